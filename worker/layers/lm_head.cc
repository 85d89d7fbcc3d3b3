#include "worker/layers/lm_head.h"

#include <algorithm>

namespace octavo {
namespace {

// FP32 logits of one chunk; large enough for efficient products (every chunk reads and writes the
// weight's whole gradient), small beside the activations.
constexpr std::int64_t kLogitsBytes = 256 << 20;
constexpr std::int64_t kChunkRowsMin = 128;

}  // namespace

LmHeadScratch LmHead::TakeScratch(const LmHeadShape& s, DType act, Arena& arena) {
  LmHeadScratch scratch;
  scratch.chunk =
      std::min(s.tokens, std::max(kChunkRowsMin, kLogitsBytes / (4 * s.vocab) / 128 * 128));
  scratch.logits = arena.Take<float>(scratch.chunk * s.vocab);
  if (act != DType::kF32) {
    scratch.d_logits = arena.TakeBytes(scratch.chunk * s.vocab * DTypeBytes(act));
  }
  return scratch;
}

void LmHead::Run(const LayerContext& ctx, const LmHeadScratch& scratch, const void* h,
                 const std::int32_t* target, float dloss, double* loss_sum, void* dh) const {
  const std::int64_t row_bytes = shape_.hidden * ctx.act_bytes();
  const FlopPrecision precision =
      ctx.act == DType::kF32 ? FlopPrecision::kFp32 : FlopPrecision::kBf16;
  const void* weight = ctx.WeightData(shape_.weight);
  for (std::int64_t begin = 0; begin < shape_.tokens; begin += scratch.chunk) {
    const std::int64_t rows = std::min(scratch.chunk, shape_.tokens - begin);
    const auto* h_rows = static_cast<const std::uint8_t*>(h) + begin * row_bytes;
    Logits(ctx, scratch, h, begin, rows);
    ctx.ops().cross_entropy(ctx.device(), {.rows = rows,
                                           .vocab = shape_.vocab,
                                           .logits = scratch.logits,
                                           .dtype = DType::kF32,
                                           .target = target + begin,
                                           .dloss = dloss,
                                           .loss_sum = loss_sum});
    const double flops = 2.0 * static_cast<double>(rows) * static_cast<double>(shape_.vocab) *
                         static_cast<double>(shape_.hidden);
    ctx.executed->CountFlops(precision, dloss == 0 ? flops : 3 * flops);
    if (dloss == 0) {
      continue;
    }
    void* d_logits = scratch.logits;
    if (ctx.act != DType::kF32) {
      d_logits = scratch.d_logits;
      ctx.ops().cast(
          ctx.device(),
          {.src =
               {.data = scratch.logits, .dtype = DType::kF32, .rows = rows, .cols = shape_.vocab},
           .dst = {.data = d_logits, .dtype = ctx.act, .rows = rows, .cols = shape_.vocab}});
    }
    ctx.ops().gemm(ctx.device(), {.m = rows,
                                  .n = shape_.hidden,
                                  .k = shape_.vocab,
                                  .a = {.data = d_logits, .dtype = ctx.act},
                                  .b = {.data = weight, .dtype = ctx.act, .k_contiguous = false},
                                  .c = static_cast<std::uint8_t*>(dh) + begin * row_bytes,
                                  .c_dtype = ctx.act,
                                  .ldc = 0,
                                  .accumulate = false,
                                  .mode = Accumulate::kPromoted});
    ctx.ops().gemm(ctx.device(), {.m = shape_.vocab,
                                  .n = shape_.hidden,
                                  .k = rows,
                                  .a = {.data = d_logits, .dtype = ctx.act, .k_contiguous = false},
                                  .b = {.data = h_rows, .dtype = ctx.act, .k_contiguous = false},
                                  .c = shape_.weight.grad,
                                  .c_dtype = DType::kF32,
                                  .ldc = 0,
                                  .accumulate = true,
                                  .mode = Accumulate::kPromoted});
  }
}

void LmHead::Logits(const LayerContext& ctx, const LmHeadScratch& scratch, const void* h,
                    std::int64_t first, std::int64_t rows) const {
  const std::int64_t row_bytes = shape_.hidden * ctx.act_bytes();
  const auto* h_rows = static_cast<const std::uint8_t*>(h) + first * row_bytes;
  ctx.ops().gemm(ctx.device(), {.m = rows,
                                .n = shape_.vocab,
                                .k = shape_.hidden,
                                .a = {.data = h_rows, .dtype = ctx.act},
                                .b = {.data = ctx.WeightData(shape_.weight), .dtype = ctx.act},
                                .c = scratch.logits,
                                .c_dtype = DType::kF32,
                                .ldc = 0,
                                .accumulate = false,
                                .mode = Accumulate::kPromoted});
}

}  // namespace octavo
