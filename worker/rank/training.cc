#include "worker/rank/training.h"

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/log.h"
#include "base/status.h"
#include "base/str.h"
#include "proto/convert/precision.h"
#include "worker/rank/failure.h"
#include "worker/rank/profiled_communicator.h"
#include "worker/rank/profiler.h"
#include "worker/rank/trainer.h"

namespace octavo {
namespace {

// Everybody begins with rank 0's plan; a rank that was given a newer one offers it afterwards.
absl::StatusOr<PrecisionPlan> AgreeOnPlan(const TrainingSetup& setup, HostCollectives& world) {
  std::string wire = PlanToWire(setup.plan).SerializeAsString();
  RETURN_IF_ERROR(world.Broadcast(&wire, 0));
  v1::PrecisionPlan plan;
  if (!plan.ParseFromString(wire)) {
    return InternalError("rank 0 sent a plan that cannot be read");
  }
  return PlanFromWire(plan);
}

// Bits differ between OpenBLAS's kernels: replicas of one layer would drift apart, and a resumed
// run would depend on which rank held what. (On a GPU, the core only serves the host's small
// products.)
absl::Status CheckBlasCores(const TrainingSetup& setup, HostCollectives& world) {
  constexpr std::size_t kNameBytes = 32;
  if (std::string_view(setup.backend.ops->name) != "cpu") {
    return absl::OkStatus();
  }
  std::string mine = setup.blas_core.substr(0, kNameBytes);
  mine.resize(kNameBytes, '\0');
  ASSIGN_OR_RETURN(const std::string all, world.AllGather(mine));
  const auto name_of = [&](int rank) {
    return std::string(all.substr(static_cast<std::size_t>(rank) * kNameBytes, kNameBytes).c_str());
  };
  std::vector<std::string> others;
  for (int rank = 1; rank < world.size(); ++rank) {
    if (name_of(rank) != name_of(0)) {
      others.push_back(StrCat("rank ", rank, ": ", name_of(rank)));
    }
  }
  return others.empty()
             ? absl::OkStatus()
             : FailedPreconditionError(StrCat("the ranks' OpenBLAS kernels differ (rank 0: ",
                                              name_of(0), "; ", StrJoin(others, ", "),
                                              "); set OPENBLAS_CORETYPE for all octavo-worker to "
                                              "one that every host can run"));
}

// Groups that share a communicator go on sharing one.
class ProfiledComms {
 public:
  explicit ProfiledComms(const ModelComms& given) : comms_(given) {
    for (Communicator** comm : {&comms_.world, &comms_.expert_parallel, &comms_.expert_data}) {
      std::unique_ptr<ProfiledCommunicator>& wrapped = by_inner_[*comm];
      if (wrapped == nullptr) {
        wrapped = std::make_unique<ProfiledCommunicator>(*comm);
      }
      *comm = wrapped.get();
    }
  }
  const ModelComms& comms() const { return comms_; }

 private:
  ModelComms comms_;
  std::map<const Communicator*, std::unique_ptr<ProfiledCommunicator>> by_inner_;
};

// Steps until the end, a wish to leave, or an error. `outcome` is filled in as far as it got.
absl::Status Loop(Trainer& trainer, TrainingOutcome* outcome) {
  while (!trainer.finished()) {
    ASSIGN_OR_RETURN(const StepResult step, trainer.Step());
    const ControlVector& all = step.control;
    outcome->step = trainer.state().step;
    outcome->last_loss = trainer.state().losses.back();
    const bool leave = all.leaving() && !trainer.finished();
    if (step.fatal.ok() && !leave) {
      if (trainer.validation_due()) {
        RETURN_IF_ERROR(trainer.Validate().status());
        outcome->validation_loss = trainer.validation_loss();
      }
      if (trainer.finished() || trainer.save_due()) {
        RETURN_IF_ERROR(trainer.Save(/*wait=*/trainer.finished()));
      }
    }
    trainer.SendStepReport();
    trainer.SnapshotIfDue(/*force=*/false);
    RETURN_IF_ERROR(step.fatal);
    if (leave) {
      if (!all.stop_without_checkpoint) {
        RETURN_IF_ERROR(trainer.Save(/*wait=*/true));
      }
      outcome->suspended = all.suspend && !all.stop && !all.stop_without_checkpoint;
      outcome->stopped = !outcome->suspended;
      return absl::OkStatus();
    }
  }
  return absl::OkStatus();
}

absl::Status Run(const TrainingSetup& given, TrainingOutcome* outcome) {
  TrainingSetup setup = given;
  if (given.hooks.ops) {
    setup.backend.ops = given.hooks.ops(given.backend);
  }
  OpProfiler profiler(setup.backend);
  setup.profiler = &profiler;
  setup.backend.ops = profiler.ops();
  const ProfiledComms comms(given.comms);
  setup.comms = comms.comms();
  Arena device(setup.backend, "start");
  HostCollectives world(setup.backend, setup.comms.world, device);
  RETURN_IF_ERROR(CheckBlasCores(given, world));
  ASSIGN_OR_RETURN(setup.plan, AgreeOnPlan(given, world));
  absl::StatusOr<std::unique_ptr<Trainer>> created = Trainer::Create(setup);
  // Together: a rank whose dataset is missing ends the gang with its reason, not with a time limit.
  RETURN_IF_ERROR(world.Agree(WithFailure(created.status(), FailureOf(created.status()))));
  const std::unique_ptr<Trainer> trainer = *std::move(created);
  trainer->OfferPlan(given.plan);
  outcome->validation_loss = trainer->validation_loss();
  ASSIGN_OR_RETURN(const bool interrupted, trainer->Start());
  outcome->step = trainer->state().step;
  if (interrupted) {
    // Nothing was trained yet: what is on disk is what a checkpoint would hold.
    const RankWishes wishes = setup.host->wishes();
    outcome->suspended = wishes.suspend && !wishes.stop && !wishes.stop_without_checkpoint;
    outcome->stopped = !outcome->suspended;
    return absl::OkStatus();
  }
  const absl::Status status = Loop(*trainer, outcome);
  trainer->reporter().DeliverLastStep();
  return status;
}

}  // namespace

TrainingOutcome RunTraining(const TrainingSetup& setup) {
  TrainingOutcome outcome;
  const absl::Status status = Run(setup, &outcome);
  outcome.failure = FailureOf(status);
  outcome.message = status.ok() ? "" : Message(status);
  if (!status.ok()) {
    LogError(
        "training_failed",
        {{"failure", Name(outcome.failure)}, {"step", outcome.step}, {"error", outcome.message}});
  }
  return outcome;
}

}  // namespace octavo
