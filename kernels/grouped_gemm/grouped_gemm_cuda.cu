// Grouped products: Hopper's own kernels (grouped_tiles.h) where they take the operands, else one
// cuBLASLt product an expert.
//
// The loop works on the host's copy of the group sizes, spread over a few streams because one small
// product does not fill the card; empty groups are skipped (weight gradients write zeros). It
// serves MX, FP32, odd widths and other cards, those weight gradients that it computes faster, and
// is the comparison of our own kernels: OCTAVO_GROUPED_GEMM in the environment (looked at in every
// call) says cublaslt for the loop everywhere, tiles for our own kernels wherever they can.
//
// Its products run over a group's padded rows: padding of A is zeros, so padding of C comes out as
// zeros, and every size is a multiple of 128, which cuBLASLt's block scales ask for. Its 1×128
// scales cannot have a stride, so those of a row-wise A are repacked group by group in one small
// launch.
#include <cstdlib>
#include <cstring>

#include "base/check.h"
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/ops_cuda.h"
#include "kernels/gemm/product_cuda.h"
#include "kernels/grouped_gemm/grouped_tiles.h"

namespace octavo::cuda {
namespace {

const void* Advance(const void* data, DType dtype, std::int64_t elements) {
  return static_cast<const std::uint8_t*>(data) + elements * DTypeBytes(dtype);
}

// Whether our own kernels are asked. loop_is_faster: what measurements say of these operands.
bool TilesWanted(const OpsContext* context, bool loop_is_faster) {
  const char* chosen = std::getenv("OCTAVO_GROUPED_GEMM");
  if (chosen != nullptr && std::strcmp(chosen, "cublaslt") == 0) {
    return false;
  }
  return context->sm == 90 &&
         (!loop_is_faster || (chosen != nullptr && std::strcmp(chosen, "tiles") == 0));
}

// By `bench_ops_cuda grouped` on an H200: our kernel leaves adding to memory to the copy engine, at
// about 2.4 TB/s, and in BF16 two warpgroups of 128×256 tiles are a little behind. Experts of these
// sizes fill the card by themselves, so that a call each costs nothing.
bool LoopIsFaster(const GroupedWgradArgs& a) {
  const std::int64_t elements = a.m * a.n;
  return a.accumulate ? elements >= (std::int64_t{1} << 21)
                      : !a.a.quant.present() && elements >= (std::int64_t{1} << 22);
}

// Per-tensor scales of all groups at 16-byte steps, or null when the operand has none.
float* SpreadTensorScales(OpsContext* context, const QTensor& quant, std::int64_t count,
                          std::int64_t* used_floats) {
  if (!quant.present() || quant.tiling != Tiling::kTensor || count == 0) {
    return nullptr;
  }
  float* out = reinterpret_cast<float*>(context->scratch) + *used_floats;
  SpreadScales(context, quant.dequant_scale, count, out);
  *used_floats += 4 * count;
  return out;
}

}  // namespace

void GroupedGemm(OpsContext* context, const GroupedGemmArgs& a) {
  const RowGroups& groups = a.groups;
  OCTAVO_CHECK(a.a.quant.present() || a.a.k_contiguous, "grouped_gemm: A is [P, K]");
  if (TilesWanted(context, false) &&
      GroupedGemmTiles({context->stream, context->multiprocessors}, a)) {
    context->Launched("grouped_gemm");
    return;
  }
  std::int64_t used = 0;
  const float* a_tensor = SpreadTensorScales(context, a.a.quant, groups.count, &used);
  const float* b_tensor = SpreadTensorScales(context, a.b.quant, groups.count, &used);
  float* a_packed = nullptr;
  const std::int64_t tiles = CeilDiv(a.k, kTile);
  if (a.a.quant.present() && a.a.quant.tiling == Tiling::kRow128 &&
      (used + groups.padded_rows * tiles) * 4 <= context->scratch_bytes) {
    a_packed = reinterpret_cast<float*>(context->scratch) + used;
    PackRowScales(context, a.a.quant, groups, a_packed);
  }
  const std::int64_t row_bytes = a.n * DTypeBytes(a.c_dtype);
  std::uint8_t* c = static_cast<std::uint8_t*>(a.c);
  SideLanes lanes(context);
  for (std::int64_t g = 0; g < groups.count; ++g) {
    const std::int64_t begin = groups.host_begin[g], rows = groups.host_rows[g];
    const std::int64_t room = groups.padded_rows - begin, wanted = RoundUp(rows, kRowAlign);
    const std::int64_t padded = wanted < room ? wanted : room;
    Product p{.m = padded,
              .n = a.n,
              .k = a.k,
              .a = MakeProductOperand(a.a, groups.padded_rows, a.k),
              .b = MakeProductOperand(a.b, a.n, a.k),
              .c = c + begin * row_bytes,
              .c_dtype = a.c_dtype,
              .ldc = a.n,
              .accumulate = false,
              .mode = a.mode};
    p.a.group = p.b.group = g;
    p.a.row_begin = begin;
    p.b.row_begin = g * a.n;
    if (p.a.quant.present()) {
      p.a.ready_scale = a_tensor != nullptr   ? a_tensor + 4 * g
                        : a_packed != nullptr ? a_packed + begin * tiles
                                              : nullptr;
    } else {
      p.a.data = Advance(p.a.data, p.a.dtype, begin * p.a.ld);
    }
    if (p.b.quant.present()) {
      p.b.ready_scale = b_tensor != nullptr ? b_tensor + 4 * g : nullptr;
    } else {
      p.b.data = Advance(p.b.data, p.b.dtype, g * (p.b.k_contiguous ? a.n : a.k) * p.b.ld);
    }
    Multiply(context, lanes.Next(), p, "grouped_gemm");
  }
}

void GroupedWgrad(OpsContext* context, const GroupedWgradArgs& a) {
  const RowGroups& groups = a.groups;
  if (TilesWanted(context, LoopIsFaster(a)) &&
      GroupedWgradTiles({context->stream, context->multiprocessors}, a)) {
    context->Launched("grouped_wgrad");
    return;
  }
  std::int64_t used = 0;
  const float* a_tensor = SpreadTensorScales(context, a.a.quant, groups.count, &used);
  const float* b_tensor = SpreadTensorScales(context, a.b.quant, groups.count, &used);
  const bool fp8 = a.a.quant.present();
  SideLanes lanes(context);
  for (std::int64_t g = 0; g < groups.count; ++g) {
    const std::int64_t begin = groups.host_begin[g], rows = groups.host_rows[g];
    // Over the padding too, which is zeros: a plan is sought once per size, and a sum over ragged
    // rows would be a new size in nearly every call.
    const std::int64_t room = groups.padded_rows - begin, wanted = RoundUp(rows, kRowAlign);
    const auto make = [&](const GemmOperand& operand, std::int64_t width, const float* tensor) {
      ProductOperand o = MakeProductOperand(operand, width, 0);
      o.k_contiguous = false;  // stored [P, width]
      o.ld = operand.ld != 0 ? operand.ld : width;
      o.group = g;
      if (o.quant.present()) {
        o.k_begin = begin;
        o.ready_scale = tensor != nullptr ? tensor + 4 * g : nullptr;
      } else {
        o.data = Advance(o.data, o.dtype, begin * o.ld);
      }
      return o;
    };
    Multiply(context, lanes.Next(),
             Product{.m = a.m,
                     .n = a.n,
                     .k = fp8 || wanted < room ? wanted : room,
                     .a = make(a.a, a.m, a_tensor),
                     .b = make(a.b, a.n, b_tensor),
                     .c = a.c + g * a.m * a.n,
                     .c_dtype = DType::kF32,
                     .ldc = a.n,
                     .accumulate = a.accumulate,
                     .mode = a.mode},
             "grouped_wgrad");
  }
}

}  // namespace octavo::cuda
