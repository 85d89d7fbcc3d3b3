// LM head and loss, in chunks of rows so that logits never exist for all tokens at once:
//   logits = h·Wᵀ (FP32) → cross entropy → d logits → dh, dW
// The gradient is taken right after the chunk's loss. Always BF16 or better (NUMERICS 4).
#pragma once

#include <cstdint>

#include "worker/layers/context.h"

namespace octavo {

struct LmHeadShape {
  std::int64_t tokens = 0, hidden = 0, vocab = 0;
  WeightRef weight;  // [V, H]
};

struct LmHeadScratch {
  std::int64_t chunk = 0;    // rows
  float* logits = nullptr;   // [chunk, V]
  void* d_logits = nullptr;  // [chunk, V] act dtype; null under fp32 (logits themselves)
};

class LmHead {
 public:
  explicit LmHead(const LmHeadShape& shape) : shape_(shape) {}

  static LmHeadScratch TakeScratch(const LmHeadShape& shape, DType act, Arena& arena);

  // loss_sum += Σ token losses (device). dloss 0: forward only, dh untouched; else dh [T, H] and
  // the weight's gradient.
  void Run(const LayerContext& ctx, const LmHeadScratch& scratch, const void* h,
           const std::int32_t* target, float dloss, double* loss_sum, void* dh) const;

  // FP32 logits of rows [first, first + rows) of h, rows <= scratch.chunk, into scratch.logits.
  void Logits(const LayerContext& ctx, const LmHeadScratch& scratch, const void* h,
              std::int64_t first, std::int64_t rows) const;

 private:
  const LmHeadShape shape_;
};

}  // namespace octavo
