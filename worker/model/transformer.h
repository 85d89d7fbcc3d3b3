// Transformer: the model of one rank, forward and backward, from tokens to reduced gradients.
//
// A step, as the trainer drives it (all ranks call the same functions in the same order):
//
//   model.BeginStep({.target_tokens = n});
//   for each microbatch: RETURN_IF_ERROR(model.ForwardBackward(tokens, targets));
//   ASSIGN_OR_RETURN(PassResult pass, model.FinishPass());   // gradients reduced, statistics on
//   host … control vector: SUM of pass.grad_norm_squared, loss_sum, tokens; MIN of first_nonfinite
//   … non-finite anywhere → model.RestartPass(layers in BF16), run the microbatches again, once;
//   model.ApplyOptimizer({.lr, .t, .grad_factor, .skip});
//   RETURN_IF_ERROR(model.EndStep({.applied}));              // amax windows, balance bias
//
// The loss is the mean over all target tokens of the step (all ranks and microbatches) plus
// auxiliary and z losses averaged over microbatches and ranks; gradients are sums over ranks of
// parts that are already divided, so nothing is rescaled after the reduction. Device memory is
// taken in Create and InitializeParameters; nothing after them allocates. Errors: a collective that
// failed (the attempt must end) or a device fault. One owner, no threads.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/arena.h"
#include "kernels/ops.h"
#include "kernels/stats.h"
#include "proto/precision/op_id.h"
#include "proto/precision/plan.h"
#include "worker/comm/communicator.h"
#include "worker/model/config.h"
#include "worker/model/optimizer.h"
#include "worker/model/parameters.h"
#include "worker/precision/executed.h"
#include "worker/precision/shadow.h"
#include "worker/precision/tensor_state.h"

namespace octavo {

// Groups of this rank; none is owned. world has all ranks; expert_parallel the ranks [g·ep,
// (g+1)·ep); expert_data the ranks with this rank's position in every such group, in group order.
struct ModelComms {
  Communicator* world = nullptr;
  Communicator* expert_parallel = nullptr;
  Communicator* expert_data = nullptr;
};

struct TransformerOptions {
  ModelConfig model;
  RunConfig run;
  OptimizerOptions optimizer;
  Backend backend;  // not owned; outlives the model
  ModelComms comms;
  PrecisionPlan plan;
};

struct StepOptions {
  std::int64_t target_tokens = 0;  // targets >= 0 of the whole step over all ranks; > 0
  bool sample_sqnr = false;        // measure SQNR in this step's first microbatch
};

// What one pass over the microbatches gave on this rank. Sums of it over ranks are the step's
// values.
struct PassResult {
  double loss_sum = 0;              // Σ token losses of this rank
  std::int64_t tokens = 0;          // targets counted on this rank
  double aux_loss = 0, z_loss = 0;  // already weighted: their sum over ranks is the step's term
  // Squares of reduced gradients, every parameter counted once over all ranks; sum over ranks.
  double grad_norm_squared = 0;
  // Position in execution order of the first quantised tensor that held a non-finite element on
  // this rank (SiteOfExecution decodes it), or kNoNonfinite. Take the minimum over ranks.
  std::int64_t first_nonfinite = 0;
};
inline constexpr std::int64_t kNoNonfinite = INT64_MAX;

struct OptimizerStep {
  double lr = 0;
  std::int64_t t = 0;        // 1-based count of applied steps, this one included
  float grad_factor = 1.0f;  // clip factor
  bool skip = false;
};

// Tokens per expert of one MoE layer over all ranks in the last pass.
struct ExpertLoad {
  std::int32_t layer = 0;
  double max = 0, min = 0, mean = 0, cv = 0;  // tokens; cv = standard deviation / mean
};

struct NonfiniteSite {
  OpSite site;
  Tensor tensor = Tensor::kInput;
};

struct ModelMemory {
  std::int64_t parameters = 0, activations = 0, workspace = 0, communication = 0, precision = 0;
  std::int64_t total() const {
    return parameters + activations + workspace + communication + precision;
  }
};

// One named piece of FP32 host state that a checkpoint carries beside parameters and moments:
// delayed windows ("precision.L.fc1.input.E": [quant_scale, age, window newest last…]) and balance
// biases
// ("layers.L.router.bias"). Every rank exports what it owns: expert entries on the rank that holds
// the expert (equal on its replicas), all others equal on every rank.
struct StateTensor {
  std::string name;
  bool expert = false;  // belongs to one global expert
  std::vector<float> values;
};

class TransformerImpl;

class Transformer {
 public:
  // Checks the configuration (InvalidArgument: dimension, value, valid ones), takes all memory
  // (ResourceExhausted names the arena and bytes), sets the plan. Parameters hold no values yet.
  static absl::StatusOr<std::unique_ptr<Transformer>> Create(const TransformerOptions& options);
  ~Transformer();

  Parameters& parameters();
  // From RunConfig.seed; or load a checkpoint into parameters() and call ParametersLoaded.
  void InitializeParameters();
  void ParametersLoaded();

  // Between steps only. InvalidArgument names layer, op and what is valid; then nothing changes.
  absl::Status SetPlan(const PrecisionPlan& plan);
  const PrecisionPlan& plan() const;

  void BeginStep(const StepOptions& options);
  // One microbatch: [microbatch_sequences · sequence_length] device pointers. target < 0: no loss;
  // target_count says how many are not (−1: all).
  absl::Status ForwardBackward(const std::int32_t* tokens, const std::int32_t* targets,
                               std::int64_t target_count = -1);
  // Reduces gradients and counts, brings statistics to the host. Waits for the device.
  absl::StatusOr<PassResult> FinishPass();
  // Rolls the pass back (NUMERICS 11: gradients, amax, counts, sums, statistics, but not non-finite
  // counts or executed FLOPs) and holds these layers in BF16 until EndStep. Empty: all layers.
  void RestartPass(std::span<const std::int32_t> bf16_layers);
  void ApplyOptimizer(const OptimizerStep& step);
  // applied: pushes amax windows, moves the balance bias. One packed reduction; all ranks call it.
  absl::Status EndStep(bool applied);

  // Forward only with the current plan; changes no state. Adds Σ token losses of this rank to
  // *loss_sum. Between steps. All ranks call it (dispatch is collective).
  absl::Status Evaluate(const std::int32_t* tokens, const std::int32_t* targets, double* loss_sum);

  // Forward only: FP32 logits of rows [first, first + rows) of the microbatch into `out` [rows, V] on
  // the host. Between steps; all ranks call it. tokens: device, as for Evaluate.
  absl::Status Logits(const std::int32_t* tokens, std::int64_t first, std::int64_t rows, float* out);

  // Statistics of the last finished pass (host copies): slot i belongs to stat_sites()[i].
  std::span<const StatSlot> stats() const;
  const std::vector<TensorSite>& stat_sites() const;
  // Energies of the last sampled step, one per (layer, op, tensor); signal 0: not measured.
  std::span<const SqnrSlot> sqnr() const;
  const std::vector<TensorSite>& sqnr_sites() const;  // expert is −1
  // What the plan's shadow recipes would have done in the last sampled step (experts merged).
  const std::vector<ShadowResult>& shadows() const;
  // Decodes PassResult::first_nonfinite.
  NonfiniteSite SiteOfExecution(std::int64_t position) const;

  // Planned against executed precision and FLOPs since creation (monotonic).
  const ExecutedCounters& executed() const;
  std::vector<ExpertLoad> expert_load() const;
  // Passes of MoE layers that took more than one receive round, since creation.
  std::int64_t multi_round_layers() const;

  std::vector<StateTensor> ExportState() const;
  // Unknown names are ignored; missing windows stay empty and prime. Wrong lengths:
  // InvalidArgument.
  absl::Status ImportState(std::span<const StateTensor> state);

  ModelMemory memory() const;
  // Host seconds in forward and backward of training microbatches since creation; with a GPU they
  // are the seconds of enqueueing and of waits for the all-to-all's counts.
  struct PhaseSeconds {
    double forward = 0, backward = 0;
  };
  PhaseSeconds phase_seconds() const;

 private:
  explicit Transformer(std::unique_ptr<TransformerImpl> impl);
  std::unique_ptr<TransformerImpl> impl_;
};

}  // namespace octavo
