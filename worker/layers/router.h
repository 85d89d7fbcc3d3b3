// The router: FP32 from end to end whatever the plan says (NUMERICS 8).
//
// Forward: logits = x·Wgᵀ, scores, top-k, routing weights, auxiliary and z loss, send order.
// Backward: from the routing weights' gradient to dWg and dx.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "worker/layers/context.h"
#include "worker/layers/exchange.h"

namespace octavo {

enum class AuxScope : std::uint8_t { kNone, kMicrobatch, kSequence, kGlobal };

struct RouterShape {
  std::int32_t layer = 0;
  RouterConfig config;
  std::int64_t hidden = 0, tokens = 0, sequence = 0;
  AuxScope aux_scope = AuxScope::kNone;
  float aux_coefficient = 0, z_coefficient = 0;
  // 1 / (microbatches · ranks): the losses are means over both.
  float loss_weight = 1;
  // kRowAlign when the rows go straight into padded groups (one rank), else 1.
  std::int64_t align = 1;
  const float* weight = nullptr;  // [E, H]
  float* weight_grad = nullptr;
  const float* bias = nullptr;  // [E] selection bias, or null
  std::int64_t segments() const { return aux_scope == AuxScope::kSequence ? tokens / sequence : 1; }
};

struct RouterSaved {
  float* logits = nullptr;             // [T, E]
  std::int32_t* topk_index = nullptr;  // [T, k]
  float* topk_weight = nullptr;        // [T, k]
  float* logsumexp = nullptr;          // [T]
  float* aux_coeff = nullptr;          // [segments, E]
  std::int32_t* dest_row = nullptr;    // [T, k] send order (or padded row with align 128)
};

// Shared by all layers.
struct RouterScratch {
  float* x32 = nullptr;                    // [T, H]; unused under fp32
  std::int64_t* segment_counts = nullptr;  // [segments, E]
  float* score_sum = nullptr;              // [segments, E]
  double* z_sum = nullptr;                 // [1]
  std::int64_t* counts = nullptr;          // [E]
  std::int64_t* begin = nullptr;           // [E]
  float* d_logits = nullptr;               // [T, E]
  void* route_workspace = nullptr;
  // Pinned: segment counts [segments, E], score sums, z.
  std::int64_t* host_segment_counts = nullptr;
  float* host_score_sum = nullptr;
  double* host_z_sum = nullptr;
  float* host_aux_coeff =
      nullptr;  // [layers, segments, E]: a copy may be under way while the next fills
};

// Losses of one call on this rank, weighted.
struct RouterLosses {
  double aux = 0, z = 0;
};

class Router {
 public:
  explicit Router(const RouterShape& shape) : shape_(shape) {}

  static RouterSaved TakeSaved(const RouterShape& shape, Arena& arena);
  static RouterScratch TakeScratch(const RouterShape& shape, std::int32_t layers, DType act,
                                   std::int64_t route_workspace, Arena& arena, Arena& pinned);

  // Enqueues scores, selection and indices (scratch.counts), and on the copy lane what Losses
  // reads; the caller waits for that lane before.
  void Forward(const LayerContext& ctx, const RouterScratch& scratch, const void* x,
               RouterSaved& saved) const;
  // Losses, and aux_coeff for backward. counts [E]: this rank's. Global scope: `history` [E] holds
  // the counts of all ranks of earlier microbatches of the step and gets this one's (unless null:
  // not recorded); world reduces them.
  absl::Status Losses(const LayerContext& ctx, const RouterScratch& scratch, Exchange& world,
                      const std::int64_t* counts, std::vector<std::int64_t>* history,
                      RouterSaved& saved, RouterLosses* losses) const;
  // dx32 [T, H] FP32 += d logits·Wg; Wg's gradient is added to.
  void Backward(const LayerContext& ctx, const RouterScratch& scratch, const RouterSaved& saved,
                const void* x, const float* d_topk_weight, float* dx32) const;

  const RouterShape& shape() const { return shape_; }

 private:
  const float* Widen(const LayerContext& ctx, const RouterScratch& scratch, const void* x) const;

  const RouterShape shape_;
};

}  // namespace octavo
