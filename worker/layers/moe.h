// Mixture of experts: router, dispatch, experts, combine, and shared experts beside them.
//
//   forward   x → router (FP32) → cast once → dispatch → experts → return → Σ over k (+ shared)
//   backward  dy → cast once → dispatch → experts' gradients → return → Σ over k
//             + router's gradient (+ shared) → dx
// A layer whose rows came in several rounds keeps source-side data only; its backward sends x again
// with dY, round by round (NUMERICS 8).
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "worker/layers/dense_mlp.h"
#include "worker/layers/experts.h"
#include "worker/layers/moe_dispatch.h"
#include "worker/layers/router.h"

namespace octavo {

struct MoeShape {
  RouterShape router;
  ExpertsShape experts;
  bool shared = false;
  DenseMlpShape shared_mlp;
};

// Per layer, recompute or not: routing is small and never recomputed.
struct MoeRouting {
  RouterSaved router;
  std::vector<std::int64_t> counts;  // [R, E] of the last forward
  std::int32_t rounds = 1;
};

// Activations: per layer, or shared by layers that recompute.
struct MoeSaved {
  ExpertsSaved experts;
  DenseMlpSaved shared;
};

struct MoeScratch {
  RouterScratch router;
  ExpertsScratch experts;
  DenseMlpScratch shared;
  QBuffer wire_x, wire_dy;         // [T, H] casts at the source
  float* sum = nullptr;            // [T, H] FP32
  void* shared_rows = nullptr;     // [T, H]
  float* d_topk_weight = nullptr;  // [T, k]
};

// What a training forward reports.
struct MoeReport {
  RouterLosses losses;
  // All ranks' counts of earlier microbatches, for the global auxiliary loss; updated.
  std::vector<std::int64_t>* history = nullptr;
  // This rank's tokens per expert of the step so far, added to; null: not a training pass.
  std::int64_t* step_counts = nullptr;
};

class Moe {
 public:
  Moe(const MoeShape& shape, WeightCache& cache);

  // y [T, H] from x [T, H]; x must stay until backward.
  absl::Status Forward(const LayerContext& ctx, const MoeScratch& scratch, MoeDispatch& dispatch,
                       Exchange& world, const void* x, MoeRouting& routing, MoeSaved& saved,
                       void* y, MoeReport* report) const;
  // Activations for backward again, from x and the stored routing; no output.
  absl::Status Recompute(const LayerContext& ctx, const MoeScratch& scratch, MoeDispatch& dispatch,
                         const void* x, MoeRouting& routing, MoeSaved& saved) const;
  // dx [T, H] act dtype from dy.
  absl::Status Backward(const LayerContext& ctx, const MoeScratch& scratch, MoeDispatch& dispatch,
                        const void* x, const void* dy, MoeRouting& routing, MoeSaved& saved,
                        void* dx) const;

  const MoeShape& shape() const { return shape_; }

 private:
  // The source side of a dispatch: [T, H] as it travels, counted and measured.
  Payload CastPayload(const LayerContext& ctx, const MoeDispatch& dispatch, Tensor tensor,
                      const void* rows, const QBuffer& wire) const;
  absl::Status DispatchInput(const LayerContext& ctx, const MoeScratch& scratch,
                             MoeDispatch& dispatch, const Payload& source, MoeRouting& routing,
                             MoeSaved& saved, std::int32_t round, bool activations_only) const;
  OpSite Site(Op op) const { return {shape_.router.layer, op}; }

  const MoeShape shape_;
  Router router_;
  Experts experts_;
  std::unique_ptr<DenseMlp> shared_;
};

}  // namespace octavo
