// State of one CUDA backend: streams, handles, scratch and the first error.
//
// Scratch is taken once, when the backend is created; operations use it in the order of the compute
// lane, one after the other, so they never allocate. Errors of launches are kept (the first one)
// and reported by poll_error once a step: a fault of the device is sticky anyway.
#pragma once

#include <cublasLt.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "kernels/ops.h"

namespace octavo::cuda {

class GemmPlans;       // kernels/gemm/gemm_cuda.cu: chosen cuBLASLt algorithms by shape
class AttentionPlans;  // kernels/attention/attention_cuda.cu: finalised cuDNN plans by shape

// Deleters live where the classes are complete.
struct GemmPlansDeleter {
  void operator()(GemmPlans* plans) const;
};
struct AttentionPlansDeleter {
  void operator()(AttentionPlans* plans) const;
};

}  // namespace octavo::cuda

namespace octavo {

struct OpsContext {
  int device = 0;
  // What a kernel may fill: all of the device's, but while a message travels those that its kernels
  // keep (worker/comm/nccl.cc). A persistent kernel with more blocks than that would have some wait
  // for the message's end and take twice as long.
  int multiprocessors = 0;
  int device_multiprocessors = 0;
  int sm = 0;
  cudaStream_t stream = nullptr;   // the compute lane
  cudaStream_t lane[kLanes] = {};  // by Lane; lane[kCompute] is `stream`
  cudaEvent_t order[kLanes] = {};  // recorded on the earlier lane, waited for at once by the later
  cublasLtHandle_t lt = nullptr;
  void* gemm_workspace = nullptr;  // caller's, else own_gemm_workspace
  std::int64_t gemm_workspace_bytes = 0;
  void* own_gemm_workspace = nullptr;
  // Side streams for small products that do not fill the card; forked from and joined to `stream`.
  static constexpr int kSides = 4;
  cudaStream_t side[kSides] = {};
  cudaEvent_t fork = nullptr, join[kSides] = {};
  std::uint8_t* scratch = nullptr;  // partial sums, repacked scales
  std::int64_t scratch_bytes = 0;
  std::unique_ptr<cuda::GemmPlans, cuda::GemmPlansDeleter> gemm_plans;
  std::unique_ptr<cuda::AttentionPlans, cuda::AttentionPlansDeleter> attention_plans;
  std::vector<cudaEvent_t> marks;
  std::int64_t allocations = 0, synchronizations = 0, plans = 0;
  // Constant after the first error; read by poll_error of the owning thread.
  std::string error;

  // Keeps the first error. `what` names the operation.
  void Record(cudaError_t status, const char* what) {
    if (status != cudaSuccess && error.empty()) {
      error =
          std::string(what) + ": " + cudaGetErrorName(status) + ": " + cudaGetErrorString(status);
    }
  }
  void RecordText(const std::string& text) {
    if (error.empty()) {
      error = text;
    }
  }
  // After every launch: a refused launch is an error of the caller's shapes or of a sick device.
  void Launched(const char* what) { Record(cudaGetLastError(), what); }
};

}  // namespace octavo

namespace octavo::cuda {

// Bytes of scratch a backend owns.
inline constexpr std::int64_t kScratchBytes = std::int64_t{64} << 20;
inline constexpr std::int64_t kGemmWorkspaceBytes = std::int64_t{32} << 20;

}  // namespace octavo::cuda
