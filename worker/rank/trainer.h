// The training step. One Trainer per rank and attempt; all ranks call the same methods in the same
// order, and what they must agree on goes through the control vector.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/arena.h"
#include "worker/checkpoint/manifest.h"
#include "worker/model/transformer.h"
#include "worker/rank/checkpointer.h"
#include "worker/rank/control_vector.h"
#include "worker/rank/host_collectives.h"
#include "worker/rank/plan_switch.h"
#include "worker/rank/reporter.h"
#include "worker/rank/step_guard.h"
#include "worker/rank/token_feed.h"
#include "worker/rank/training.h"

namespace octavo {

// What the ranks agreed to do after a step.
struct StepResult {
  ControlVector control;  // of the step's last pass, reduced
  StepOutcome outcome = StepOutcome::kApplied;
  absl::Status fatal;  // too many skips in a row
};

// Not thread-safe.
class Trainer {
 public:
  // Opens the data, builds the model (no values yet).
  static absl::StatusOr<std::unique_ptr<Trainer>> Create(const TrainingSetup& setup);

  // Loads the newest checkpoint or initialises. True: a wish interrupted it.
  absl::StatusOr<bool> Start();
  // One optimizer step with everything around it but saving.
  absl::StatusOr<StepResult> Step();
  // Mean validation loss over all ranks; nullopt when a wish to leave interrupted it or there is no
  // validation data.
  absl::StatusOr<std::optional<double>> Validate();
  absl::Status Save(bool wait);

  // A plan that this rank was given and the others may not have yet.
  void OfferPlan(const PrecisionPlan& plan) { plans_.Offer(plan); }

  bool finished() const { return state_.step >= setup_.config.steps; }
  bool validation_due() const;
  bool save_due() const;
  const TrainState& state() const { return state_; }
  double validation_loss() const { return validation_loss_; }
  Reporter& reporter() { return *reporter_; }
  void SendStepReport();
  void SnapshotIfDue(bool force);

 private:
  explicit Trainer(const TrainingSetup& setup);

  absl::StatusOr<ControlVector> RunPass(int pass);
  absl::Status ApplyAgreedPlan(const ControlVector& control);
  void ReportPlanApplied(std::int64_t version);
  std::string NonfiniteOp(const ControlVector& control) const;
  void FillReport(const ControlVector& control, const StepResult& result, double lr,
                  double seconds);
  RankWishes PollWishes();
  void BeginProfiledStep();
  void EndProfiledStep();

  const TrainingSetup setup_;
  Arena device_, pinned_;
  std::unique_ptr<Transformer> model_;
  std::unique_ptr<HostCollectives> world_;
  std::optional<TokenFeed> feed_, validation_feed_;
  std::unique_ptr<Reporter> reporter_;
  std::unique_ptr<Checkpointer> checkpointer_;
  PlanSwitch plans_;
  std::optional<PrecisionPlan> awaited_plan_;  // agreed; waits until its checkpoint is written
  StepGuard guard_;
  TrainState state_;
  std::int64_t snapshot_from_ = 1;  // first step of the current telemetry interval
  std::int64_t agreed_checkpoint_wish_ = 0, served_checkpoint_wish_ = 0;
  std::int64_t served_profile_ = 0;
  double validation_loss_;
  iv1::StepReport report_;  // of the last step
};

}  // namespace octavo
