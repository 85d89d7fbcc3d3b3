#include "worker/rank/trainer.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <functional>
#include <limits>
#include <utility>

#include "base/log.h"
#include "base/status.h"
#include "base/str.h"
#include "worker/rank/dataset_identity.h"
#include "worker/rank/failure.h"
#include "worker/rank/profiler.h"

namespace octavo {
namespace {

using Steady = std::chrono::steady_clock;

double SecondsSince(Steady::time_point begin) {
  return std::chrono::duration<double>(Steady::now() - begin).count();
}

bool HasFp8(const PrecisionPlan& plan) {
  return std::any_of(plan.entries.begin(), plan.entries.end(),
                     [](const Recipe& recipe) { return recipe.is_fp8(); });
}

bool ChangesFamily(const PrecisionPlan& before, const PrecisionPlan& after) {
  for (std::size_t i = 0; i < before.entries.size(); ++i) {
    if (before.entries[i].kind != after.entries[i].kind) {
      return true;
    }
  }
  return false;
}

std::vector<const Communicator*> UniqueComms(const ModelComms& comms) {
  std::vector<const Communicator*> unique;
  for (const Communicator* comm : {comms.world, comms.expert_parallel, comms.expert_data}) {
    if (std::find(unique.begin(), unique.end(), comm) == unique.end()) {
      unique.push_back(comm);
    }
  }
  return unique;
}

}  // namespace

absl::StatusOr<StepResult> Trainer::Step() {
  const auto begin = Steady::now();
  const TrainingConfig& config = setup_.config;
  const std::int64_t step = state_.step;  // 0-based index of this step
  const bool sample = (step + 1) % config.sqnr_interval == 0;
  const Transformer::PhaseSeconds phases = model_->phase_seconds();
  const double dispatch = setup_.all_to_all_seconds == nullptr ? 0 : *setup_.all_to_all_seconds;

  BeginProfiledStep();
  // Damaged data stays damaged.
  RETURN_IF_ERROR(MarkIfPermanent(feed_->LoadStep(step), config.attempt));
  model_->BeginStep({.target_tokens = feed_->step_targets(), .sample_sqnr = sample});
  StepResult result;
  ASSIGN_OR_RETURN(result.control, RunPass(0));
  GuardDecision decision = guard_.Decide(
      {.nonfinite = result.control.nonfinite(),
       .site_known = result.control.first_nonfinite != kNoNonfinite,
       .layer = result.control.first_nonfinite == kNoNonfinite
                    ? 0
                    : model_->SiteOfExecution(result.control.first_nonfinite).site.layer,
       .plan_has_fp8 = HasFp8(model_->plan())},
      /*retried=*/false);
  std::string nonfinite_op = NonfiniteOp(result.control);
  std::int64_t nonfinite_elements = result.control.nonfinite_elements;
  const bool retry = decision.action == StepAction::kRetry;
  reporter_->AddPass(*model_, /*rolled_back=*/retry);
  if (retry) {
    model_->RestartPass(decision.bf16_layers);
    ASSIGN_OR_RETURN(result.control, RunPass(1));
    decision = guard_.Decide({.nonfinite = result.control.nonfinite()}, /*retried=*/true);
    reporter_->AddPass(*model_, /*rolled_back=*/false);
    nonfinite_elements += result.control.nonfinite_elements;
  }

  const ControlVector& all = result.control;
  const bool applied = decision.action == StepAction::kApply;
  const double lr = LearningRate(config.schedule, step);
  const auto optimizer_begin = Steady::now();
  model_->ApplyOptimizer(
      {.lr = lr,
       .t = state_.adam_t + 1,
       .grad_factor = applied ? ClipFactor(all.grad_norm_squared, config.clip) : 0.0f,
       .skip = !applied});
  RETURN_IF_ERROR(model_->EndStep(applied));
  const double optimizer_seconds = SecondsSince(optimizer_begin);
  EndProfiledStep();
  if (sample) {
    reporter_->AddSample(*model_);
  }

  state_.step += 1;
  state_.adam_t += applied ? 1 : 0;
  state_.tokens += all.tokens;
  state_.data_position += config.global_batch();
  state_.retried_steps = guard_.retried_steps();
  state_.skipped_steps = guard_.skipped_steps();
  state_.skips_in_a_row = guard_.skips_in_a_row();
  result.outcome = !applied ? StepOutcome::kSkipped
                   : retry  ? StepOutcome::kAppliedAfterRetry
                            : StepOutcome::kApplied;
  if (decision.action == StepAction::kFail) {
    result.fatal =
        WithFailure(AbortedError(StrCat("step ", state_.step, ": non-finite values in ",
                                        guard_.skips_in_a_row(),
                                        " steps in a row, also in bf16; first in ", nonfinite_op)),
                    FailureClass::kNumericFailure);
  }
  FillReport(all, result, lr, SecondsSince(begin));
  report_.set_phase_forward_seconds(model_->phase_seconds().forward - phases.forward);
  report_.set_phase_backward_seconds(model_->phase_seconds().backward - phases.backward);
  report_.set_phase_optimizer_seconds(optimizer_seconds);
  if (setup_.all_to_all_seconds != nullptr) {
    report_.set_phase_dispatch_seconds(*setup_.all_to_all_seconds - dispatch);
  }
  report_.set_nonfinite_op(result.outcome == StepOutcome::kApplied ? "" : nonfinite_op);
  report_.set_nonfinite_elements(static_cast<std::uint64_t>(nonfinite_elements));
  agreed_checkpoint_wish_ = std::max(agreed_checkpoint_wish_, all.checkpoint_wish);
  RETURN_IF_ERROR(checkpointer_->Poll(all.save_busy));
  RETURN_IF_ERROR(ApplyAgreedPlan(all));
  return result;
}

void Trainer::BeginProfiledStep() {
  OpProfiler* const profiler = setup_.profiler;
  if (profiler == nullptr) {
    return;
  }
  const ProfileRequest request = setup_.host->profile();
  if (request.id > served_profile_) {
    served_profile_ = request.id;
    profiler->Begin(request, state_.step + 1, model_->executed());
  }
  if (profiler->active()) {
    profiler->BeginStep();
  }
}

void Trainer::EndProfiledStep() {
  OpProfiler* const profiler = setup_.profiler;
  if (profiler != nullptr && profiler->timing()) {
    profiler->EndStep(model_->executed());
  }
  if (profiler != nullptr && profiler->done()) {
    iv1::RankToWorker message;
    *message.mutable_profile() = profiler->Take();
    setup_.host->Deliver(std::move(message));
  }
}

absl::StatusOr<ControlVector> Trainer::RunPass(int pass) {
  if (setup_.hooks.before_pass) {
    setup_.hooks.before_pass(state_.step + 1, pass, *model_);
  }
  for (std::int32_t m = 0; m < feed_->microbatches(); ++m) {
    reporter_->Heartbeat(iv1::RANK_TRAINING, state_.step, "");
    RETURN_IF_ERROR(
        model_->ForwardBackward(feed_->tokens(m), feed_->targets(m), feed_->target_count(m)));
  }
  if (pass == 0 && state_.step + 1 < setup_.config.steps) {
    // While the device works. A damaged place is reported by the step that needs it.
    feed_->Prefetch(state_.step + 1);
  }
  if (setup_.hooks.before_finish_pass) {
    setup_.hooks.before_finish_pass(state_.step + 1, pass, *model_);
  }
  ASSIGN_OR_RETURN(const PassResult sums, model_->FinishPass());
  ControlVector mine;
  mine.SetPass(sums);
  mine.nonfinite_elements = Reporter::NonfiniteElements(*model_);
  mine.SetWishes(PollWishes());
  mine.SetPlanHeld(plans_.newest_held());
  mine.save_busy = checkpointer_->busy();
  return ReduceControl(mine, *world_);
}

Trainer::Trainer(const TrainingSetup& setup)
    : setup_(setup),
      device_(setup.backend, "rank"),
      pinned_(setup.backend, "rank pinned", Memory::kHostPinned),
      plans_(setup.plan.version),
      guard_(setup.config.max_skips_in_a_row),
      validation_loss_(std::numeric_limits<double>::quiet_NaN()) {}

absl::StatusOr<std::unique_ptr<Trainer>> Trainer::Create(const TrainingSetup& setup) {
  auto trainer = std::unique_ptr<Trainer>(new Trainer(setup));
  const TrainingConfig& config = setup.config;
  const RunConfig& run = config.run;
  trainer->world_ =
      std::make_unique<HostCollectives>(setup.backend, setup.comms.world, trainer->device_);
  trainer->reporter_ = std::make_unique<Reporter>(
      *setup.host, UniqueComms(setup.comms), run.rank,
      setup.all_to_all_seconds == nullptr
          ? std::function<double()>()
          : [seconds = setup.all_to_all_seconds] { return *seconds; });
  const auto input = [&config](const absl::Status& status) {
    return MarkIfPermanent(status, config.attempt);
  };
  const auto open = [&](const std::string& path, std::shared_ptr<const TokenDataset>* dataset,
                        DatasetIdentity* identity) -> absl::Status {
    ASSIGN_OR_RETURN(*dataset, OpenTokenDataset(*setup.fs, path));
    ASSIGN_OR_RETURN(*identity, IdentifyDataset(**dataset));
    return absl::OkStatus();
  };
  std::shared_ptr<const TokenDataset> dataset, validation_dataset;
  DatasetIdentity identity;
  std::optional<DatasetIdentity> validation_identity;
  RETURN_IF_ERROR(input(open(config.data.path, &dataset, &identity)));
  if (config.validation_interval > 0 && !config.data.validation_path.empty()) {
    RETURN_IF_ERROR(input(
        open(config.data.validation_path, &validation_dataset, &validation_identity.emplace())));
  }
  trainer->checkpointer_ =
      std::make_unique<Checkpointer>(Checkpointer::Options{.config = trainer->setup_.config,
                                                           .fs = *setup.fs,
                                                           .backend = trainer->setup_.backend,
                                                           .world = *trainer->world_,
                                                           .host = *setup.host,
                                                           .blas_core = setup.blas_core,
                                                           .dataset = identity,
                                                           .validation = validation_identity});
  TrainValidationSplit split =
      SplitTail(dataset->token_count(),
                config.data.validation_path.empty() ? config.data.validation_fraction : 0.0);
  LoaderOptions options{.region = split.train,
                        .sequence_length = run.sequence_length,
                        .vocab = config.model.vocab,
                        .seed = run.seed,
                        .rank = run.rank,
                        .ranks = run.world_size,
                        .microbatch_sequences = run.microbatch_sequences,
                        .microbatches = run.microbatches,
                        .documents = config.data.documents};
  ASSIGN_OR_RETURN(Loader loader, Loader::Create(dataset, options));
  ASSIGN_OR_RETURN(trainer->feed_,
                   TokenFeed::Create(setup.backend, std::move(loader), run.microbatches,
                                     run.tokens(), trainer->device_, trainer->pinned_));
  if (config.validation_interval > 0) {
    if (validation_dataset != nullptr) {
      dataset = validation_dataset;
      split.validation = {.begin = 0, .end = dataset->token_count()};
    }
    options.region = split.validation;
    options.shuffle = false;
    options.microbatches = config.validation_batches;
    absl::StatusOr<Loader> validation = Loader::Create(dataset, options);
    RETURN_IF_ERROR(Annotate(validation.status(), "validation data"));
    ASSIGN_OR_RETURN(
        trainer->validation_feed_,
        TokenFeed::Create(setup.backend, *std::move(validation), config.validation_batches,
                          run.tokens(), trainer->device_, trainer->pinned_));
  }
  RunConfig model_run = run;
  model_run.reduce_early = !setup.hooks.before_finish_pass;  // it may change gradients
  ASSIGN_OR_RETURN(trainer->model_, Transformer::Create({.model = config.model,
                                                         .run = model_run,
                                                         .optimizer = config.optimizer,
                                                         .backend = setup.backend,
                                                         .comms = setup.comms,
                                                         .plan = setup.plan}));
  return trainer;
}

absl::StatusOr<bool> Trainer::Start() {
  const auto interrupted = [this] {
    reporter_->Heartbeat(iv1::RANK_LOADING, state_.step, "");
    const RankWishes wishes = PollWishes();
    return wishes.stop || wishes.suspend || wishes.stop_without_checkpoint;
  };
  reporter_->Heartbeat(iv1::RANK_LOADING, 0, "");
  ASSIGN_OR_RETURN(StartPoint start, checkpointer_->Begin(*model_, interrupted));
  if (start.interrupted) {
    return true;
  }
  state_ = std::move(start.state);
  state_.seed = setup_.config.run.seed;
  guard_.Restore(state_.retried_steps, state_.skipped_steps, state_.skips_in_a_row);
  snapshot_from_ = state_.step + 1;
  LogInfo("training_begins", {{"step", state_.step},
                              {"from", !start.path.empty() ? start.path
                                       : setup_.config.checkpoint.start_from.empty()
                                           ? "fresh weights"
                                           : setup_.config.checkpoint.start_from},
                              {"plan_version", setup_.plan.version},
                              {"memory_bytes", model_->memory().total()}});
  if (setup_.config.run.rank == 0) {
    iv1::RankToWorker message;
    message.mutable_attempt_start()->set_loaded_step(state_.step);
    message.mutable_attempt_start()->set_loaded_path(start.path);
    message.mutable_attempt_start()->set_note(start.note);
    setup_.host->Deliver(std::move(message));
  }
  ReportPlanApplied(setup_.plan.version);
  return world_->Any(interrupted());
}

absl::Status Trainer::ApplyAgreedPlan(const ControlVector& control) {
  if (std::optional<PrecisionPlan> agreed =
          plans_.Agree(control.plan_held_min, control.plan_held_max)) {
    const bool saves = setup_.config.checkpoint_before_switch && !awaited_plan_.has_value() &&
                       ChangesFamily(model_->plan(), *agreed);
    const bool saving = saves || awaited_plan_.has_value();
    awaited_plan_ = std::move(agreed);  // of two that wait the newer one counts
    if (saves) {
      RETURN_IF_ERROR(Save(/*wait=*/false));
    }
    if (saving) {
      return absl::OkStatus();  // steps go on while the checkpoint is written
    }
  }
  if (!awaited_plan_.has_value() || control.save_busy) {
    return absl::OkStatus();
  }
  const std::optional<PrecisionPlan> next = std::exchange(awaited_plan_, std::nullopt);
  SnapshotIfDue(/*force=*/true);  // statistics of two plans are never mixed
  const absl::Status set = model_->SetPlan(*next);
  if (!set.ok()) {
    // The same on every rank, because plans and configurations are equal.
    LogError("plan_refused", {{"version", next->version}, {"error", set}});
    return absl::OkStatus();
  }
  LogInfo("plan_applied", {{"version", next->version}, {"first_step", state_.step + 1}});
  ReportPlanApplied(next->version);
  return absl::OkStatus();
}

void Trainer::ReportPlanApplied(std::int64_t version) {
  if (setup_.config.run.rank == 0) {
    iv1::RankToWorker message;
    message.mutable_plan_applied()->set_version(version);
    message.mutable_plan_applied()->set_step(state_.step + 1);
    setup_.host->Deliver(std::move(message));
  }
}

absl::StatusOr<std::optional<double>> Trainer::Validate() {
  double loss_sum = 0;
  std::int64_t tokens = 0;
  RETURN_IF_ERROR(MarkIfPermanent(validation_feed_->LoadStep(0), setup_.config.attempt));
  for (std::int32_t m = 0; m < validation_feed_->microbatches(); ++m) {
    reporter_->Heartbeat(iv1::RANK_VALIDATING, state_.step, "");
    const RankWishes wishes = PollWishes();
    ASSIGN_OR_RETURN(const bool leave,
                     world_->Any(wishes.stop || wishes.suspend || wishes.stop_without_checkpoint));
    if (leave) {
      return std::optional<double>();
    }
    RETURN_IF_ERROR(
        model_->Evaluate(validation_feed_->tokens(m), validation_feed_->targets(m), &loss_sum));
    tokens += validation_feed_->target_count(m);
  }
  std::vector<double> sums = {loss_sum, static_cast<double>(tokens)};
  RETURN_IF_ERROR(world_->AllReduce(sums, ReduceOp::kSum));
  validation_loss_ = sums[0] / sums[1];
  report_.set_validation_loss(validation_loss_);
  report_.set_has_validation(true);
  return std::optional<double>(validation_loss_);
}

absl::Status Trainer::Save(bool wait) {
  reporter_->Heartbeat(iv1::RANK_SAVING, state_.step, "");
  served_checkpoint_wish_ = agreed_checkpoint_wish_;
  state_.plan_version = model_->plan().version;
  state_.plan_hash = SemanticHash(model_->plan());
  return checkpointer_->Save(*model_, state_, wait);
}

void Trainer::SendStepReport() {
  report_.set_phase_checkpoint_seconds(checkpointer_->TakeStallSeconds());
  reporter_->ReportStep(report_);
}

bool Trainer::validation_due() const {
  const std::int64_t interval = setup_.config.validation_interval;
  return interval > 0 && (state_.step % interval == 0 || finished());
}

bool Trainer::save_due() const {
  const std::int64_t interval = setup_.config.checkpoint.interval_steps;
  return (interval > 0 && state_.step % interval == 0) ||
         agreed_checkpoint_wish_ > served_checkpoint_wish_;
}

void Trainer::SnapshotIfDue(bool force) {
  if (force || state_.step % setup_.config.telemetry_interval == 0 || finished()) {
    reporter_->Snapshot(*model_, {.first_step = snapshot_from_, .last_step = state_.step});
    snapshot_from_ = state_.step + 1;
  }
}

RankWishes Trainer::PollWishes() {
  while (std::optional<PrecisionPlan> plan = setup_.host->TakePlan()) {
    plans_.Offer(*std::move(plan));
  }
  return setup_.host->wishes();
}

std::string Trainer::NonfiniteOp(const ControlVector& control) const {
  if (!control.nonfinite()) {
    return "";
  }
  if (control.first_nonfinite == kNoNonfinite) {
    return "the gradient or the loss";
  }
  const NonfiniteSite site = model_->SiteOfExecution(control.first_nonfinite);
  return StrCat("layer ", site.site.layer, " ", Name(site.site.op), " ", Name(site.tensor));
}

void Trainer::FillReport(const ControlVector& control, const StepResult& result, double lr,
                         double seconds) {
  const double loss =
      control.loss_sum / static_cast<double>(std::max<std::int64_t>(control.tokens, 1));
  if (state_.step == 1) {
    state_.first_loss = loss;
  }
  state_.losses.push_back(loss);
  if (static_cast<std::int64_t>(state_.losses.size()) > kLossHistory) {
    state_.losses.erase(state_.losses.begin());
  }
  report_.Clear();
  report_.set_step(state_.step);
  report_.set_loss(loss);
  report_.set_aux_loss(control.aux_loss + control.z_loss);
  report_.set_grad_norm(std::sqrt(control.grad_norm_squared));
  report_.set_learning_rate(lr);
  report_.set_tokens(control.tokens);
  report_.set_step_seconds(seconds);
  report_.set_plan_version(model_->plan().version);
  report_.set_outcome(static_cast<int>(result.outcome));
  report_.set_rank(setup_.config.run.rank);
}

}  // namespace octavo
