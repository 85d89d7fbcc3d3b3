// Mixture of experts: router, dispatch, experts, combine, and shared experts beside them.
//
//   forward   x → router (FP32) → cast once → dispatch → experts → return → Σ over k (+ shared)
//   backward  dy → cast once → dispatch → experts' gradients → return → Σ over k
//             + router's gradient (+ shared) → dx
// Beside the messages runs what does not need them: while counts are gathered, the cast, the
// packing and the shared experts; while a part of x or y travels, the products of another; while dY
// travels, the weight gradient that the layer above left (LateWgrad), the shared experts and what
// fc2's weight gradient needs of the input; while dX travels, fc1's weight gradient, the first half
// of it. A layer whose rows came in several rounds keeps source-side data only; its backward sends
// x again with dY, round by round (NUMERICS 8).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "worker/layers/dense_mlp.h"
#include "worker/layers/experts.h"
#include "worker/layers/moe_dispatch.h"
#include "worker/layers/router.h"

namespace octavo {

struct MoeShape {
  // Parts in which forward's messages travel (round_plan.h); one rank: 1.
  std::int32_t parts = 1;
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
  // Tokens per expert of this rank's expert-parallel group in the step so far, added to; null: not
  // a training pass.
  std::int64_t* step_counts = nullptr;
};

// The second half of a layer's fc1 weight gradient, left until there is a message to run beside.
// Its operands lie in scratch that the next layer's backward may overwrite once its dY has arrived,
// so that layer runs it before; whoever else uses that scratch runs it first.
class LateWgrad {
 public:
  void Leave(std::function<void()> run) { run_ = std::move(run); }
  void Run() {
    if (run_) {
      std::exchange(run_, nullptr)();
    }
  }
  void Drop() { run_ = nullptr; }

 private:
  std::function<void()> run_;
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
  // dx [T, H] act dtype from dy. Runs `late` and may leave it something; `beside` is called once,
  // when dY travels, and may start collectives of its own.
  absl::Status Backward(const LayerContext& ctx, const MoeScratch& scratch, MoeDispatch& dispatch,
                        const void* x, const void* dy, MoeRouting& routing, MoeSaved& saved,
                        void* dx, LateWgrad* late,
                        const std::function<absl::Status()>& beside) const;

  const MoeShape& shape() const { return shape_; }

 private:
  // The source side of a dispatch: [T, H] as it travels, counted and measured.
  Payload CastPayload(const LayerContext& ctx, const MoeDispatch& dispatch, Tensor tensor,
                      const void* rows, const QBuffer& wire) const;
  // A packed x to the experts of `round`, through them and, unless only the activations for
  // backward are wanted, under way back (Join before Combine).
  absl::Status RunExperts(const LayerContext& ctx, const MoeScratch& scratch, MoeDispatch& dispatch,
                          const MoeRouting& routing, MoeSaved& saved, std::int32_t round,
                          std::int32_t parts, bool activations_only) const;
  OpSite Site(Op op) const { return {shape_.router.layer, op}; }

  const MoeShape shape_;
  const std::string layer_name_;  // of profiles: what runs late still belongs to its layer
  Router router_;
  Experts experts_;
  std::unique_ptr<DenseMlp> shared_;
};

}  // namespace octavo
