#include "controller/core/progress.h"

#include <algorithm>
#include <map>
#include <optional>
#include <utility>

#include "base/status.h"
#include "base/str.h"
#include "controller/core/attempts.h"
#include "controller/core/jobs.h"
#include "controller/core/plans.h"
#include "proto/convert/precision.h"
#include "proto/spec/job_spec.h"

namespace octavo {
namespace {

constexpr double kStepSecondsWeight = 0.1;  // of the newest step in the running mean

// A rank's canonical text with all its parameters; a newer rank's unknown ones leave the kind.
v1::Recipe RecipeOfText(const std::string& text) {
  if (const std::optional<Recipe> recipe = ParseRecipe(text); recipe.has_value()) {
    return RecipeToWire(*recipe);
  }
  v1::Recipe wire;
  wire.set_kind(text.substr(0, text.find('(')));
  return wire;
}

void Adopt(CoreState& state, JobRecord& job, PolicyAnswer answer, Now now) {
  for (const std::string& alert : answer.alerts) {
    EmitEvent(state, job, "WARNING", alert, now);
  }
  if (!answer.plan.has_value()) {
    return;
  }
  // A change of recipe family takes a checkpoint first: the ranks do, at the step they agree on.
  const absl::Status adopted =
      AdoptPolicyPlan(state, job, *std::move(answer.plan), answer.changes, now);
  if (!adopted.ok()) {
    state.policy->OnRefused(job.job(), job.newest_plan);
    const std::string text = StrCat("the policy's plan was refused: ", Message(adopted));
    if (job.mismatch_warned != text) {
      job.mismatch_warned = text;
      EmitEvent(state, job, "WARNING", text, now);
    }
  }
}

void TakeRecipes(CoreState& state, JobRecord& job, const std::string& worker,
                 const internal::v1::TelemetrySnapshot& snapshot, Now now) {
  const std::int32_t layers = job.spec().model().layers();
  if (snapshot.recipes_in_force_size() != layers * kOpCount) {
    return;  // no recipes in this snapshot, or of another model: nothing to show
  }
  v1::EffectivePrecision effective;
  effective.set_plan_version(snapshot.plan_version());
  effective.set_step(snapshot.last_step());
  for (std::int32_t layer = 0; layer < layers; ++layer) {
    for (int op = 0; op < kOpCount; ++op) {
      v1::LayerOpRecipe& entry = *effective.add_entries();
      entry.set_layer(layer);
      entry.set_op(std::string(kOpNames[op]));
      *entry.mutable_recipe() = RecipeOfText(snapshot.recipes_in_force(layer * kOpCount + op));
    }
  }
  // A mismatch stays listed with its newest reason; counts add up over snapshots and workers.
  std::map<std::pair<std::int32_t, std::string>, v1::EffectivePrecision::Mismatch> mismatches;
  const v1::EffectivePrecision& known = job.stored.effective();
  if (known.plan_version() == effective.plan_version()) {
    for (const v1::EffectivePrecision::Mismatch& mismatch : known.mismatches()) {
      mismatches[{mismatch.layer(), mismatch.op()}] = mismatch;
    }
  }
  for (const internal::v1::ExecutedPrecision& executed : snapshot.executed()) {
    if (executed.planned() == executed.executed() || executed.op() < 0 ||
        executed.op() >= kOpCount) {
      continue;
    }
    const std::string op(kOpNames[static_cast<std::size_t>(executed.op())]);
    v1::EffectivePrecision::Mismatch& mismatch = mismatches[{executed.layer(), op}];
    mismatch.set_layer(executed.layer());
    mismatch.set_op(op);
    mismatch.set_planned(executed.planned());
    mismatch.set_executed(executed.executed());
    mismatch.set_reason(executed.reason());
    mismatch.set_count(mismatch.count() + executed.count());
  }
  for (auto& [site, mismatch] : mismatches) {
    *effective.add_mismatches() = std::move(mismatch);
  }

  const auto same_entries = [&] {
    if (known.entries_size() != effective.entries_size()) {
      return false;
    }
    for (int i = 0; i < known.entries_size(); ++i) {
      if (known.entries(i).recipe().SerializeAsString() !=
          effective.entries(i).recipe().SerializeAsString()) {
        return false;
      }
    }
    return true;
  };
  const bool changed = !same_entries();
  if (changed && known.plan_version() == effective.plan_version() &&
      known.step() == effective.step()) {
    // All ranks run the same plan (invariant 3): two answers for one step is worth a warning.
    const std::string text =
        StrCat("workers/", worker, " runs other recipes than its peers at step ", effective.step(),
               " (plan version ", effective.plan_version(), ")");
    if (job.mismatch_warned != text) {
      job.mismatch_warned = text;
      EmitEvent(state, job, "WARNING", text, now);
    }
  }
  *job.stored.mutable_effective() = effective;
  if (changed) {
    job.job().mutable_progress()->set_recipe_summary(RecipeSummary(effective, layers));
    state.effects.push_back(RecipesMetric(job.spec(), effective));
  }
}

}  // namespace

RecipesInForce RecipesMetric(const v1::JobSpec& spec, const v1::EffectivePrecision& effective) {
  RecipesInForce metric{.train_job = spec.name(), .effective = effective};
  metric.effective.clear_entries();
  for (const v1::LayerOpRecipe& entry : effective.entries()) {
    const std::optional<Op> op = ParseOp(entry.op());
    if (op.has_value() && LayerHasOp(spec.model(), entry.layer(), *op)) {
      *metric.effective.add_entries() = entry;
    }
  }
  return metric;
}

std::string RecipeSummary(const v1::EffectivePrecision& effective, std::int32_t layers) {
  std::map<std::string, int> counts;
  std::vector<std::string> order;
  for (const v1::LayerOpRecipe& entry : effective.entries()) {
    if (entry.op() != Name(Op::kFc1)) {
      continue;
    }
    if (counts[entry.recipe().kind()]++ == 0) {
      order.push_back(entry.recipe().kind());
    }
  }
  std::sort(order.begin(), order.end(), [&counts](const std::string& a, const std::string& b) {
    return counts[a] != counts[b] ? counts[a] > counts[b] : a < b;
  });
  std::string text;
  for (const std::string& kind : order) {
    StrAppend(&text, text.empty() ? "" : ", ", kind, " ", counts[kind], "/", layers,
              text.empty() ? " layers" : "");
  }
  return text;
}

void OnStepReport(CoreState& state, JobRecord& job, const internal::v1::StepReport& report,
                  Now now) {
  AttemptRecord& attempt = *job.current;
  OnTraining(state, job, now);
  attempt.steps_reported = true;
  attempt.last_step_micros = now.mono_micros;
  v1::Attempt& stored = *attempt.stored.mutable_attempt();
  if (report.step() <= stored.last_step()) {
    return;  // a repeat of a relay; steps of one attempt only grow
  }
  stored.set_last_step(report.step());
  job.stored.set_best_step(std::max(job.stored.best_step(), report.step()));

  v1::JobProgress& progress = *job.job().mutable_progress();
  if (progress.first_loss() == 0) {
    progress.set_first_loss(report.loss());
  }
  progress.set_step(report.step());
  progress.set_loss(report.loss());
  progress.set_aux_loss(report.aux_loss());
  progress.set_grad_norm(report.grad_norm());
  progress.set_learning_rate(report.learning_rate());
  progress.set_plan_version(report.plan_version());
  progress.set_tokens(report.tokens() * report.step());
  progress.set_phase("training");
  if (report.has_validation()) {
    progress.set_validation_loss(report.validation_loss());
    progress.set_validation_step(report.step());
  }
  if (report.step_seconds() > 0) {
    job.step_seconds_mean = job.step_seconds_mean == 0
                                ? report.step_seconds()
                                : job.step_seconds_mean * (1 - kStepSecondsWeight) +
                                      report.step_seconds() * kStepSecondsWeight;
    progress.set_tokens_per_second(static_cast<double>(report.tokens()) / job.step_seconds_mean);
    progress.set_eta_seconds(static_cast<double>(progress.total_steps() - report.step()) *
                             job.step_seconds_mean);
  }
  if (report.outcome() == 1) {
    progress.set_retried_steps(progress.retried_steps() + 1);
    EmitEvent(state, job, "WARNING",
              StrCat("step ", report.step(), " had non-finite values (", report.nonfinite_op(),
                     ") and was repeated in bf16"),
              now);
  } else if (report.outcome() == 2) {
    progress.set_skipped_steps(progress.skipped_steps() + 1);
    EmitEvent(state, job, "WARNING",
              StrCat("step ", report.step(), " was skipped: non-finite values also in bf16 (",
                     report.nonfinite_op(), ")"),
              now);
  }
  state.effects.push_back(
      StepMetric{.train_job = job.spec().name(), .report = report, .unix_micros = now.unix_micros});
  if (state.policy != nullptr) {
    Adopt(state, job, state.policy->OnStep(job.job(), job.newest_plan, report), now);
  }
  TouchProgress(state, job, now);  // with what the policy has just taken
  PublishProgress(state, job, now);
}

void OnTelemetry(CoreState& state, JobRecord& job, const std::string& worker,
                 const internal::v1::TelemetrySnapshot& snapshot, Now now) {
  v1::JobProgress& progress = *job.job().mutable_progress();
  for (const auto& [kind, flops] : snapshot.flops()) {
    job.stored.set_total_flops(job.stored.total_flops() + flops);
    if (StartsWith(kind, "fp8") || StartsWith(kind, "mxfp8")) {
      job.stored.set_fp8_flops(job.stored.fp8_flops() + flops);
    }
  }
  if (job.stored.total_flops() > 0) {
    progress.set_fp8_flop_share(job.stored.fp8_flops() / job.stored.total_flops());
  }
  progress.set_all_to_all_bytes(progress.all_to_all_bytes() + snapshot.all_to_all_bytes());
  double load_max = 0;
  for (const internal::v1::LayerLoad& load : snapshot.loads()) {
    load_max = std::max(load_max, load.max_ratio());
  }
  if (load_max > 0) {
    progress.set_expert_load_max(load_max);
  }
  TakeRecipes(state, job, worker, snapshot, now);
  state.effects.push_back(TelemetryMetric{.train_job = job.spec().name(),
                                          .detail = job.spec().telemetry().detail(),
                                          .snapshot = snapshot});
  if (state.policy != nullptr) {
    Adopt(state, job, state.policy->OnSnapshot(job.job(), job.newest_plan, snapshot), now);
  }
  TouchProgress(state, job, now);
}

}  // namespace octavo
