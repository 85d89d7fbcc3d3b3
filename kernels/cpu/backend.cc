#include "kernels/cpu/backend.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "base/check.h"
#include "kernels/cpu/context.h"
#include "kernels/cpu/ops_cpu.h"
#include "kernels/cpu/workspace.h"

namespace octavo {
namespace cpu {
namespace {

constexpr std::int64_t kAlignment = 64;

void* Allocate(OpsContext* context, std::int64_t bytes, Memory) {
  OCTAVO_CHECK(bytes >= 0, "allocate: %lld bytes", static_cast<long long>(bytes));
  ++Get(context).allocations;
  // aligned_alloc(64, 0) may give null, which would read as out of memory.
  return std::aligned_alloc(
      kAlignment, static_cast<std::size_t>(RoundUp(std::max<std::int64_t>(bytes, 1), kAlignment)));
}

void Release(OpsContext*, void* data, Memory) { std::free(data); }

void Copy(OpsContext*, const CopyArgs& args) {
  if (args.bytes > 0) {
    std::memmove(args.dst, args.src, static_cast<std::size_t>(args.bytes));
  }
}

void Zero(OpsContext*, void* data, std::int64_t bytes) {
  if (bytes > 0) {
    std::memset(data, 0, static_cast<std::size_t>(bytes));
  }
}

// Everything was done when its call returned; the waits are counted as a device would have them.
void Synchronize(OpsContext* context) { ++Get(context).synchronizations; }
void SynchronizeLane(OpsContext* context, Lane) { ++Get(context).synchronizations; }
void Order(OpsContext*, Lane, Lane) {}

int PollError(OpsContext*, char*, std::int64_t) { return 0; }

// NUMERICS 3: every FP8 recipe runs here; MX only as an emulation that the job agreed to.
int Supports(OpsContext*, const SupportQuery& query, char* reason, std::int64_t reason_bytes) {
  const char* refusal = nullptr;
  if (query.tiling == Tiling::kRow32 && !query.emulate) {
    refusal = "the CPU has no MX arithmetic; set allow_emulation: true to emulate it";
  } else if (query.tiling != Tiling::kNone && !IsFp8(query.format)) {
    refusal = "operands are quantised to E4M3 or E5M2";
  }
  if (refusal != nullptr && reason != nullptr && reason_bytes > 0) {
    std::snprintf(reason, static_cast<std::size_t>(reason_bytes), "%s", refusal);
  }
  return refusal == nullptr ? 1 : 0;
}

void FillWorkspaceSizes(OpsContext*, const WorkspaceQuery& query, WorkspaceSizes* sizes) {
  *sizes = WorkspaceSizes{};
  sizes->attention_forward = AttentionForwardWorkspaceBytes(query.sequence, query.head_dim);
  sizes->attention_backward = AttentionBackwardWorkspaceBytes(query.sequence, query.head_dim);
}

void SetGemmWorkspace(OpsContext*, void*, std::int64_t) {}
void RangePush(OpsContext*, const char*) {}
void RangePop(OpsContext*) {}
void* Stream(OpsContext*) { return nullptr; }

void Counters(OpsContext* context, OpsCounters* counters) {
  const Context& c = Get(context);
  *counters = {.allocations = c.allocations, .synchronizations = c.synchronizations, .plans = 0};
  for (const Scratch* scratch : {&c.operand_a, &c.operand_b, &c.product, &c.wide_c, &c.block,
                                 &c.row, &c.codes, &c.band_codes}) {
    counters->allocations += scratch->growths();
  }
}

// Operations run as they are called, so a mark is the time of its call.
int ReserveMarks(OpsContext* context, std::int32_t count) {
  std::vector<double>& marks = Get(context).marks;
  marks.resize(std::max(marks.size(), static_cast<std::size_t>(count)));
  return 0;
}
void Mark(OpsContext* context, std::int32_t index, Lane) {
  Get(context).marks[static_cast<std::size_t>(index)] =
      std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}
double MarkSeconds(OpsContext* context, std::int32_t from, std::int32_t to) {
  const std::vector<double>& marks = Get(context).marks;
  return marks[static_cast<std::size_t>(to)] - marks[static_cast<std::size_t>(from)];
}

void StatsReset(OpsContext*, StatSlot* slots, std::int64_t count) {
  std::fill_n(slots, count, StatSlot{});
}

constexpr Ops kOps = {
    .name = "cpu",
    .act_dtype_default = DType::kBF16,
    .allocate = Allocate,
    .release = Release,
    .copy = Copy,
    .zero = Zero,
    .synchronize = Synchronize,
    .synchronize_lane = SynchronizeLane,
    .order = Order,
    .poll_error = PollError,
    .supports = Supports,
    .workspace_sizes = FillWorkspaceSizes,
    .set_gemm_workspace = SetGemmWorkspace,
    .range_push = RangePush,
    .range_pop = RangePop,
    .stream = Stream,
    .counters = Counters,
    .reserve_marks = ReserveMarks,
    .mark = Mark,
    .mark_seconds = MarkSeconds,
    .stats_reset = StatsReset,
};

// The compute operations come from the list, so that one without an implementation does not link.
constexpr Ops MakeOps() {
  Ops ops = kOps;
#define OCTAVO_FILL(field, Name, Args) ops.field = Name;
  OCTAVO_COMPUTE_OPS(OCTAVO_FILL)
#undef OCTAVO_FILL
  return ops;
}
constexpr Ops kTable = MakeOps();

}  // namespace
}  // namespace cpu

Backend CreateCpuBackend() { return {.ops = &cpu::kTable, .context = new cpu::Context()}; }

void DestroyCpuBackend(Backend* backend) {
  delete static_cast<cpu::Context*>(backend->context);
  *backend = Backend{};
}

}  // namespace octavo
