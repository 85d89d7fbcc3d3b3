// The CUDA backend as a plug-in: octavo_plugin_v1, the context, memory, and the table filled from
// the list of operations. Device code lives beside the CPU twins in kernels/<op>/<op>_cuda.cu.
#include <cuda_runtime.h>
#include <nvtx3/nvToolsExt.h>

#include <cstdio>
#include <cstring>

#include "base/check.h"
#include "kernels/cuda/context.h"
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/ops_cuda.h"
#include "kernels/ops_abi.h"

namespace octavo {

#if defined(OCTAVO_HAVE_NCCL)
// worker/comm/nccl.cc, built into this plug-in.
int NcclVersion();
int NcclUniqueId(std::uint8_t* id, char* message, std::int64_t message_bytes);
Communicator* NcclCreate(void* compute, void* comm, int device, int* multiprocessors,
                         const std::uint8_t* id, int rank, int size, double timeout_seconds,
                         char* message, std::int64_t message_bytes);
#endif

namespace cuda {
namespace {

void Write(char* message, std::int64_t bytes, const std::string& text) {
  if (message != nullptr && bytes > 0) {
    std::snprintf(message, static_cast<std::size_t>(bytes), "%s", text.c_str());
  }
}

// ---------------------------------------------------------------- memory and streams

void* Allocate(OpsContext* context, std::int64_t bytes, Memory memory) {
  OCTAVO_CHECK(bytes >= 0, "allocate: %lld bytes", static_cast<long long>(bytes));
  const std::size_t size = static_cast<std::size_t>(bytes > 0 ? bytes : 1);
  void* data = nullptr;
  ++context->allocations;
  const cudaError_t status =
      memory == Memory::kDevice ? cudaMalloc(&data, size) : cudaMallocHost(&data, size);
  if (status == cudaErrorMemoryAllocation) {
    (void)cudaGetLastError();  // out of memory is an answer, not a fault
    return nullptr;
  }
  context->Record(status, "allocate");
  return status == cudaSuccess ? data : nullptr;
}

void Release(OpsContext* context, void* data, Memory memory) {
  if (data != nullptr) {
    context->Record(memory == Memory::kDevice ? cudaFree(data) : cudaFreeHost(data), "release");
  }
}

cudaStream_t LaneOf(OpsContext* context, Lane lane) {
  return context->lane[static_cast<std::size_t>(lane)];
}

void Copy(OpsContext* context, const CopyArgs& a) {
  if (a.bytes <= 0) {
    return;
  }
  const cudaMemcpyKind kind = a.kind == CopyKind::kToDevice ? cudaMemcpyHostToDevice
                              : a.kind == CopyKind::kToHost ? cudaMemcpyDeviceToHost
                                                            : cudaMemcpyDeviceToDevice;
  context->Record(cudaMemcpyAsync(a.dst, a.src, static_cast<std::size_t>(a.bytes), kind,
                                  LaneOf(context, a.lane)),
                  "copy");
}

void Zero(OpsContext* context, void* data, std::int64_t bytes) {
  if (bytes > 0) {
    context->Record(cudaMemsetAsync(data, 0, static_cast<std::size_t>(bytes), context->stream),
                    "zero");
  }
}

void Synchronize(OpsContext* context) {
  ++context->synchronizations;
  context->Record(cudaStreamSynchronize(context->stream), "synchronize");
}

void SynchronizeLane(OpsContext* context, Lane lane) {
  ++context->synchronizations;
  context->Record(cudaStreamSynchronize(LaneOf(context, lane)), "synchronize");
}

// A wait takes the event as it was recorded last, so that one event a lane serves every pair.
void Order(OpsContext* context, Lane earlier, Lane later) {
  cudaEvent_t event = context->order[static_cast<std::size_t>(earlier)];
  context->Record(cudaEventRecord(event, LaneOf(context, earlier)), "order");
  context->Record(cudaStreamWaitEvent(LaneOf(context, later), event), "order");
}

int PollError(OpsContext* context, char* message, std::int64_t message_bytes) {
  context->Record(cudaPeekAtLastError(), "device");
  if (context->error.empty()) {
    return 0;
  }
  Write(message, message_bytes, context->error);
  return 1;
}

int Supports(OpsContext* context, const SupportQuery& query, char* reason,
             std::int64_t reason_bytes) {
  std::string refusal;
  if (query.tiling == Tiling::kNone) {
    return 1;
  }
  if (!IsFp8(query.format)) {
    refusal = "operands are quantised to E4M3 or E5M2";
  } else if (query.tiling == Tiling::kRow32 && !query.emulate) {
    refusal = "MX tensor cores begin with SM 100, this device is SM " +
              std::to_string(context->sm) + "; set allow_emulation: true to emulate mxfp8";
  } else if (context->sm < 89) {
    refusal = "FP8 needs SM 89 or later, this device is SM " + std::to_string(context->sm);
  }
  if (refusal.empty()) {
    return 1;
  }
  Write(reason, reason_bytes, refusal);
  return 0;
}

void FillWorkspaceSizes(OpsContext* context, const WorkspaceQuery& q, WorkspaceSizes* sizes) {
  *sizes = WorkspaceSizes{};
  sizes->route_index = RouteIndexWorkspaceBytes(q.tokens, q.experts);
  sizes->rms_norm_backward =
      RmsNormBackwardWorkspaceBytes(q.hidden > q.head_dim ? q.hidden : q.head_dim);
  sizes->embedding_backward = EmbeddingBackwardWorkspaceBytes(q.tokens, q.vocab);
  sizes->gemm = kGemmWorkspaceBytes;
  AttentionWorkspaceBytes(context, q, &sizes->attention_forward, &sizes->attention_backward);
}

void SetGemmWorkspace(OpsContext* context, void* data, std::int64_t bytes) {
  // cuBLASLt wants 256-byte alignment; plans depend on the size, so they are chosen anew.
  const bool usable = data != nullptr && reinterpret_cast<std::uintptr_t>(data) % 256 == 0;
  context->gemm_workspace = usable ? data : context->own_gemm_workspace;
  context->gemm_workspace_bytes = usable ? bytes : kGemmWorkspaceBytes;
  context->gemm_plans.reset();
}

void RangePush(OpsContext*, const char* name) { nvtxRangePushA(name); }
void RangePop(OpsContext*) { nvtxRangePop(); }
void* Stream(OpsContext* context) { return context->stream; }

void Counters(OpsContext* context, OpsCounters* counters) {
  *counters = {.allocations = context->allocations,
               .synchronizations = context->synchronizations,
               .plans = context->plans};
}

int ReserveMarks(OpsContext* context, std::int32_t count) {
  while (context->marks.size() < static_cast<std::size_t>(count)) {
    cudaEvent_t event = nullptr;
    if (cudaEventCreate(&event) != cudaSuccess) {
      (void)cudaGetLastError();  // a profile that cannot be taken is not a fault of the step
      return 1;
    }
    context->marks.push_back(event);
  }
  return 0;
}
void Mark(OpsContext* context, std::int32_t index, Lane lane) {
  context->Record(
      cudaEventRecord(context->marks[static_cast<std::size_t>(index)], LaneOf(context, lane)),
      "mark");
}
double MarkSeconds(OpsContext* context, std::int32_t from, std::int32_t to) {
  float milliseconds = 0;
  context->Record(
      cudaEventElapsedTime(&milliseconds, context->marks[static_cast<std::size_t>(from)],
                           context->marks[static_cast<std::size_t>(to)]),
      "mark");
  return 1e-3 * static_cast<double>(milliseconds);
}

// The state of a new slot is all zeros (stats.h).
void StatsReset(OpsContext* context, StatSlot* slots, std::int64_t count) {
  Zero(context, slots, count * static_cast<std::int64_t>(sizeof(StatSlot)));
}

Ops MakeOps() {
  Ops ops{};
  ops.name = "cuda";
  ops.act_dtype_default = DType::kBF16;
  ops.allocate = Allocate;
  ops.release = Release;
  ops.copy = Copy;
  ops.zero = Zero;
  ops.synchronize = Synchronize;
  ops.synchronize_lane = SynchronizeLane;
  ops.order = Order;
  ops.poll_error = PollError;
  ops.supports = Supports;
  ops.workspace_sizes = FillWorkspaceSizes;
  ops.set_gemm_workspace = SetGemmWorkspace;
  ops.range_push = RangePush;
  ops.range_pop = RangePop;
  ops.stream = Stream;
  ops.counters = Counters;
  ops.reserve_marks = ReserveMarks;
  ops.mark = Mark;
  ops.mark_seconds = MarkSeconds;
  ops.stats_reset = StatsReset;
  // An NVTX range each: with no tool attached it is a load and a branch.
#define OCTAVO_FILL(field, Name, Args)                    \
  ops.field = [](OpsContext* context, const Args& args) { \
    nvtxRangePushA(#field);                               \
    Name(context, args);                                  \
    nvtxRangePop();                                       \
  };
  OCTAVO_COMPUTE_OPS(OCTAVO_FILL)
#undef OCTAVO_FILL
  return ops;
}

// ---------------------------------------------------------------- life

int Probe(int ordinal, DeviceFacts* facts, char* message, std::int64_t message_bytes) {
  *facts = DeviceFacts{};
  cudaDeviceProp properties{};
  const cudaError_t status = cudaGetDeviceProperties(&properties, ordinal);
  if (status != cudaSuccess) {
    Write(message, message_bytes,
          "CUDA device " + std::to_string(ordinal) + ": " + cudaGetErrorString(status));
    return 1;
  }
  std::snprintf(facts->name, sizeof(facts->name), "%s", properties.name);
  for (int i = 0; i < 16; ++i) {
    std::snprintf(facts->uuid + 2 * i, 3, "%02x",
                  static_cast<unsigned>(static_cast<unsigned char>(properties.uuid.bytes[i])));
  }
  facts->sm = properties.major * 10 + properties.minor;
  facts->multiprocessors = properties.multiProcessorCount;
  facts->memory_bytes = static_cast<std::int64_t>(properties.totalGlobalMem);
  (void)cudaDriverGetVersion(&facts->driver_version);
  (void)cudaRuntimeGetVersion(&facts->runtime_version);
  facts->cublaslt_version = static_cast<std::int32_t>(cublasLtGetVersion());
  facts->cudnn_version = CudnnVersion();
#if defined(OCTAVO_HAVE_NCCL)
  facts->nccl_version = NcclVersion();
#endif
  return 0;
}

void Free(OpsContext* context) {
  for (cudaStream_t lane : context->lane) {
    if (lane != nullptr) {
      (void)cudaStreamSynchronize(lane);
    }
  }
  context->gemm_plans.reset();
  context->attention_plans.reset();
  if (context->lt != nullptr) {
    cublasLtDestroy(context->lt);
  }
  for (int i = 0; i < OpsContext::kSides; ++i) {
    if (context->side[i] != nullptr) {
      (void)cudaStreamDestroy(context->side[i]);
    }
    if (context->join[i] != nullptr) {
      (void)cudaEventDestroy(context->join[i]);
    }
  }
  if (context->fork != nullptr) {
    (void)cudaEventDestroy(context->fork);
  }
  for (cudaEvent_t mark : context->marks) {
    (void)cudaEventDestroy(mark);
  }
  (void)cudaFree(context->own_gemm_workspace);
  (void)cudaFree(context->scratch);
  for (int i = 0; i < kLanes; ++i) {
    if (context->lane[i] != nullptr) {
      (void)cudaStreamDestroy(context->lane[i]);
    }
    if (context->order[i] != nullptr) {
      (void)cudaEventDestroy(context->order[i]);
    }
  }
  delete context;
}

const Ops kTable = MakeOps();

int Create(int ordinal, Backend* backend, char* message, std::int64_t message_bytes) {
  DeviceFacts facts;
  if (Probe(ordinal, &facts, message, message_bytes) != 0) {
    return 1;
  }
  if (facts.sm != 90) {
    Write(message, message_bytes,
          std::string("device ") + facts.name + " is SM " + std::to_string(facts.sm) +
              "; this plug-in is built for SM 90 (Hopper)");
    return 1;
  }
  OpsContext* context = new OpsContext;
  context->device = ordinal;
  context->sm = facts.sm;
  context->multiprocessors = context->device_multiprocessors = facts.multiprocessors;
  context->scratch_bytes = kScratchBytes;
  context->Record(cudaSetDevice(ordinal), "cudaSetDevice");
  // Collectives and copies come first when multiprocessors fall free: somebody waits for them, and
  // the products beside them lose little.
  int lowest = 0, highest = 0;
  context->Record(cudaDeviceGetStreamPriorityRange(&lowest, &highest), "stream priorities");
  for (int i = 0; i < kLanes; ++i) {
    const bool compute = i == static_cast<int>(Lane::kCompute);
    context->Record(cudaStreamCreateWithPriority(&context->lane[i], cudaStreamNonBlocking,
                                                 compute ? lowest : highest),
                    "stream");
    context->Record(cudaEventCreateWithFlags(&context->order[i], cudaEventDisableTiming), "event");
  }
  context->stream = context->lane[static_cast<std::size_t>(Lane::kCompute)];
  context->Record(cudaEventCreateWithFlags(&context->fork, cudaEventDisableTiming), "event");
  for (int i = 0; i < OpsContext::kSides; ++i) {
    context->Record(cudaStreamCreateWithFlags(&context->side[i], cudaStreamNonBlocking), "stream");
    context->Record(cudaEventCreateWithFlags(&context->join[i], cudaEventDisableTiming), "event");
  }
  context->Record(cudaMalloc(reinterpret_cast<void**>(&context->scratch),
                             static_cast<std::size_t>(kScratchBytes)),
                  "scratch memory");
  context->Record(
      cudaMalloc(&context->own_gemm_workspace, static_cast<std::size_t>(kGemmWorkspaceBytes)),
      "GEMM workspace");
  context->gemm_workspace = context->own_gemm_workspace;
  context->gemm_workspace_bytes = kGemmWorkspaceBytes;
  const cublasStatus_t status = cublasLtCreate(&context->lt);
  if (status != CUBLAS_STATUS_SUCCESS) {
    context->RecordText(std::string("cublasLtCreate: ") + cublasLtGetStatusString(status));
  }
  if (!context->error.empty()) {
    Write(message, message_bytes, "CUDA device " + std::to_string(ordinal) + ": " + context->error);
    Free(context);
    return 1;
  }
  *backend = Backend{.ops = &kTable, .context = context};
  return 0;
}

void Destroy(Backend* backend) {
  if (backend->context != nullptr) {
    Free(backend->context);
  }
  *backend = Backend{};
}

#if defined(OCTAVO_HAVE_NCCL)
Communicator* CreateNcclFor(Backend* backend, const std::uint8_t* id, int rank, int size,
                            double timeout_seconds, char* message, std::int64_t message_bytes) {
  OpsContext* const context = backend->context;
  return NcclCreate(context->stream, LaneOf(context, Lane::kComm), context->device,
                    &context->multiprocessors, id, rank, size, timeout_seconds, message,
                    message_bytes);
}
#endif

const PluginTable kPlugin = {
    .abi_version = kOpsAbiVersion,
    .build = "octavo cuda plug-in, SM 90a, CUDA " OCTAVO_CUDA_VERSION,
    .probe = Probe,
    .create = Create,
    .destroy = Destroy,
#if defined(OCTAVO_HAVE_NCCL)
    .nccl_unique_id = NcclUniqueId,
    .nccl_create = CreateNcclFor,
#else
    .nccl_unique_id = nullptr,
    .nccl_create = nullptr,
#endif
};

}  // namespace
}  // namespace cuda
}  // namespace octavo

extern "C" __attribute__((visibility("default"))) const octavo::PluginTable* octavo_plugin_v1() {
  return &octavo::cuda::kPlugin;
}
