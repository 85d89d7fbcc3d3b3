// TransformerImpl: what a Transformer owns and the stages of its step. Private to worker/model.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "worker/layers/exchange.h"
#include "worker/model/decoder.h"
#include "worker/model/transformer.h"

namespace octavo {

// Members in order of creation: whatever holds memory comes after its arena.
class TransformerImpl {
 public:
  explicit TransformerImpl(const TransformerOptions& options)
      : options_(options),
        parameter_arena_(options.backend, "parameters"),
        activation_arena_(options.backend, "activations"),
        workspace_arena_(options.backend, "workspace"),
        communication_arena_(options.backend, "communication"),
        precision_arena_(options.backend, "precision"),
        pinned_arena_(options.backend, "pinned", Memory::kHostPinned),
        executed_(options.model.layers) {}

  absl::Status Build();
  absl::Status SetPlan(const PrecisionPlan& plan);
  void StartPass();
  absl::Status Run(const std::int32_t* tokens, const std::int32_t* targets, bool training);
  absl::StatusOr<PassResult> FinishPass();
  // Starts the reduction of gradients that are final and were not: of layers [layer, …) and what
  // follows them; layer −1: of everything.
  absl::Status ReduceFrom(std::int32_t layer);
  absl::Status EndStep(bool applied);
  absl::Status Evaluate(const std::int32_t* tokens, const std::int32_t* targets, double* loss_sum);
  absl::Status CheckDevice();
  // After a wait for the device: no fault of it, and no message or reduction that ended early.
  absl::Status CheckResults();
  double ReadLoss();
  void CarryNonfinite();
  std::vector<ExpertLoad> Load() const;

  const TransformerOptions options_;
  Arena parameter_arena_, activation_arena_, workspace_arena_, communication_arena_;
  Arena precision_arena_, pinned_arena_;

  Parameters parameters_;
  std::unique_ptr<Optimizer> optimizer_;
  std::unique_ptr<Exchange> world_, expert_parallel_, expert_data_;
  std::unique_ptr<TensorStates> states_;
  std::unique_ptr<ShadowStates> shadows_;
  std::unique_ptr<DenseGroups> dense_groups_;
  std::unique_ptr<WeightCache> weights_;
  std::unique_ptr<Decoder> decoder_;
  ExecutedCounters executed_;
  PrecisionPlan plan_;
  LayerContext context_;

  // The step under way.
  StepOptions step_;
  std::int32_t microbatch_ = 0;
  std::int64_t tokens_counted_ = 0;
  // First element of each layer's gradients in the two regions of the parameter table, then where
  // that of what follows the layers is; and from where on they are being reduced.
  std::vector<std::int64_t> dense_begin_, expert_begin_;
  std::int64_t dense_reduced_ = 0, expert_reduced_ = 0;
  double aux_loss_ = 0, z_loss_ = 0;
  Transformer::PhaseSeconds phase_seconds_;
  std::vector<StatSlot> stats_;                   // of the last finished pass, plus carried counts
  std::vector<std::uint64_t> carried_nonfinite_;  // of passes of this step that were rolled back
  std::vector<std::int64_t> reduced_counts_;      // [layers, E] over all ranks

  // Device words and their pinned copies: loss, squares (dense, expert).
  double* sums_ = nullptr;       // [3]
  double* host_sums_ = nullptr;  // [3]
  void* squares_workspace_ = nullptr;
  std::int64_t* device_counts_ = nullptr;  // [E]
  std::int64_t* host_counts_ = nullptr;    // [E]
};

}  // namespace octavo
