// One matrix product on the GPU, however it is executed: C[M,N] (+)= Σ_k A(m,k)·B(n,k).
//
// Multiply asks cuBLASLt first. What it refuses (MX blocks, odd widths or alignments, two E5M2
// operands, scales in another layout than its own) runs on a plain FP32 kernel: the same operands,
// the same result within rounding, slower. Neither ever changes the precision of an operand.
//
// cuBLASLt wants 1×128 dequant_scales as [K/128][M], M contiguous, and every per-tensor scale at
// its own 16-byte aligned address; callers pass `ready_scale` when theirs has to be repacked first.
#pragma once

#include <cstdint>

#include "kernels/cuda/context.h"
#include "kernels/ops.h"

namespace octavo::cuda {

struct ProductOperand {
  // High precision: k_contiguous ? [rows, K] : [K, rows], row stride ld.
  const void* data = nullptr;
  DType dtype = DType::kF32;
  bool k_contiguous = true;
  std::int64_t ld = 0;
  // FP8 (quant.present()): rows [row_begin, +M) and contraction [k_begin, +K) of quant.
  QTensor quant;
  std::int64_t row_begin = 0, k_begin = 0;
  std::int64_t group = 0;              // which per-tensor D
  const float* ready_scale = nullptr;  // in cuBLASLt's layout, or null: quant's own is looked at
};

struct Product {
  std::int64_t m, n, k;
  ProductOperand a, b;
  void* c;
  DType c_dtype;
  std::int64_t ldc;
  bool accumulate;
  Accumulate mode;
};

// Where a product runs: the compute stream with the whole GEMM workspace, or a share of it.
struct Lane {
  cudaStream_t stream;
  void* workspace;
  std::int64_t workspace_bytes;
};
Lane ComputeLane(const OpsContext* context);

void Multiply(OpsContext* context, const Lane& lane, const Product& product, const char* what);

// Runs independent products on the side streams, a share of the workspace each. Between
// construction and destruction nothing else may be enqueued on the compute stream.
class SideLanes {
 public:
  explicit SideLanes(OpsContext* context);
  SideLanes(const SideLanes&) = delete;
  SideLanes& operator=(const SideLanes&) = delete;
  ~SideLanes();
  Lane Next();

 private:
  OpsContext* context_;
  int next_ = 0;
};

ProductOperand MakeProductOperand(const GemmOperand& operand, std::int64_t rows, std::int64_t k);

// Whether cuBLASLt can read the 1×128 scales of rows [row_begin, +rows) in place.
bool RowScalesReady(const QTensor& quant, std::int64_t rows);

// Repacks 1×128 scales of row groups: group g at out + begin[g]·tiles as [tiles][padded rows of g].
// out holds padded_rows·tiles floats.
void PackRowScales(OpsContext* context, const QTensor& quant, const RowGroups& groups, float* out);

// out[4·i] = dequant_scale[i]: per-tensor scales at 16-byte steps.
void SpreadScales(OpsContext* context, const float* dequant_scale, std::int64_t count, float* out);

}  // namespace octavo::cuda
