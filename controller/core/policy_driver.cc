#include "controller/core/policy_driver.h"

#include <algorithm>
#include <utility>

#include "base/status.h"
#include "proto/convert/health.h"

namespace octavo {
namespace {

std::vector<OpSite> ChangedSites(const PrecisionPlan& before, const PrecisionPlan& after) {
  std::vector<OpSite> sites;
  for (const PlanChange& change : Diff(before, after)) {
    sites.push_back(change.site);
  }
  return sites;
}

}  // namespace

void JoinHealth(const HealthSnapshot& from, HealthSnapshot* into) {
  into->first_step = from.first_step;
  into->last_step = from.last_step;
  into->plan_version = from.plan_version;
  for (const TensorHealth& tensor : from.tensors) {
    const auto found = std::find_if(
        into->tensors.begin(), into->tensors.end(), [&tensor](const TensorHealth& other) {
          return other.site == tensor.site && other.tensor == tensor.tensor &&
                 other.shadow == tensor.shadow && other.shadow_recipe == tensor.shadow_recipe;
        });
    if (found == into->tensors.end()) {
      into->tensors.push_back(tensor);
      continue;
    }
    TensorHealth& sum = *found;
    sum.amax = std::max(sum.amax, tensor.amax);
    if (tensor.dequant_scale_max > 0) {  // 0, 0: no group had a scale
      sum.dequant_scale_min = sum.dequant_scale_max > 0
                                  ? std::min(sum.dequant_scale_min, tensor.dequant_scale_min)
                                  : tensor.dequant_scale_min;
      sum.dequant_scale_max = std::max(sum.dequant_scale_max, tensor.dequant_scale_max);
    }
    sum.elements += tensor.elements;
    sum.nonfinite += tensor.nonfinite;
    sum.saturated += tensor.saturated;
    sum.nonzero += tensor.nonzero;
    sum.flushed += tensor.flushed;
    sum.transpose_flushed += tensor.transpose_flushed;
    sum.signal_energy += tensor.signal_energy;
    sum.noise_energy += tensor.noise_energy;
    // An expert lives on one rank of each data-parallel group: the same id may come more than once.
    for (const WorstExpert& expert : tensor.worst) {
      const auto same =
          std::find_if(sum.worst.begin(), sum.worst.end(), [&expert](const WorstExpert& other) {
            return other.expert == expert.expert && other.ratio == expert.ratio;
          });
      if (same == sum.worst.end()) {
        sum.worst.push_back(expert);
      } else {
        same->count += expert.count;
        same->total += expert.total;
      }
    }
  }
}

PolicyDriver::JobPolicy& PolicyDriver::Of(const v1::Job& job) {
  const auto found = jobs_.find(job.uid());
  if (found != jobs_.end()) {
    return found->second;
  }
  JobPolicy& policy = jobs_[job.uid()];
  absl::StatusOr<PolicyConfig> config = PolicyConfigFromSpec(job.spec(), DeviceAbility());
  if (config.ok()) {
    policy.config = *std::move(config);
  } else {
    policy.config.enabled = false;  // a valid spec has a policy; without one nothing is decided
  }
  return policy;
}

void PolicyDriver::Restore(const v1::Job& job, const std::vector<PrecisionPlan>& history) {
  JobPolicy& policy = Of(job);
  for (std::size_t i = 1; i < history.size(); ++i) {
    const PrecisionPlan& before = history[i - 1];
    const PrecisionPlan& after = history[i];
    if (after.author == PlanAuthor::kOperator) {
      PolicyOnOperator(policy.state, ChangedSites(before, after), /*release=*/false);
      continue;
    }
    for (const PlanChange& change : Diff(before, after)) {
      SiteState& site = policy.state.sites[change.site];
      if (site.status == SiteState::Status::kFallback && change.after == site.original) {
        site.status = SiteState::Status::kHealthy;
        continue;
      }
      if (!change.before.is_fp8()) {
        continue;  // auto chose a recipe: no fall
      }
      if (site.status == SiteState::Status::kHealthy) {
        site.original = change.before;
        site.flaps += site.fell_once ? 1 : 0;
        site.fell_once = true;
        site.hold_steps = policy.config.hold_steps << std::min(site.flaps, 30);
      }
      site.status = site.flaps >= policy.config.max_flaps ? SiteState::Status::kPinned
                                                          : SiteState::Status::kFallback;
      site.good_shadows = 0;
      site.since_step = job.progress().step();
    }
  }
}

void PolicyDriver::OnAttempt(const v1::Job& job, const DeviceAbility& device, std::int64_t step) {
  JobPolicy& policy = Of(job);
  absl::StatusOr<PolicyConfig> config = PolicyConfigFromSpec(job.spec(), device);
  if (config.ok()) {
    policy.config = *std::move(config);
  }
  policy.joined = HealthSnapshot();
  policy.joined_ranks = 0;
  PolicyOnStart(policy.config, policy.state, step);
}

void PolicyDriver::OnPlanApplied(const v1::Job& job, std::int64_t version, std::int64_t step) {
  JobPolicy& policy = Of(job);
  PolicyOnApplied(policy.config, policy.state, version, step);
}

PolicyAnswer PolicyDriver::ToAnswer(const v1::Job& job, PolicyOutput output) {
  PolicyAnswer answer{.alerts = std::move(output.alerts)};
  if (!output.changed) {
    return answer;
  }
  const v1::PolicySpec& spec = job.spec().precision().policy();
  answer.checkpoint_first = output.family_changed && (!spec.has_checkpoint_before_switch() ||
                                                      spec.checkpoint_before_switch());
  for (const PolicyDecision& decision : output.decisions) {
    answer.changes.emplace_back(Name(decision.direction), Name(decision.signal));
  }
  answer.plan = std::move(output.plan);
  return answer;
}

PolicyAnswer PolicyDriver::OnStep(const v1::Job& job, const PrecisionPlan& newest,
                                  const internal::v1::StepReport& report) {
  JobPolicy& policy = Of(job);
  if (!policy.config.enabled) {
    return {};
  }
  return ToAnswer(job,
                  PolicyOnStep(policy.config, policy.state, newest, StepHealthFromWire(report)));
}

PolicyAnswer PolicyDriver::Judge(const v1::Job& job, JobPolicy& policy,
                                 const PrecisionPlan& newest) {
  const HealthSnapshot joined = std::exchange(policy.joined, HealthSnapshot());
  policy.joined_ranks = 0;
  return ToAnswer(job, PolicyOnSnapshot(policy.config, policy.state, newest, joined));
}

PolicyAnswer PolicyDriver::OnSnapshot(const v1::Job& job, const PrecisionPlan& newest,
                                      const internal::v1::TelemetrySnapshot& snapshot) {
  JobPolicy& policy = Of(job);
  if (!policy.config.enabled) {
    return {};
  }
  const HealthSnapshot health = HealthFromWire(snapshot);
  PolicyAnswer answer;
  // Telemetry may be dropped: an interval that never becomes complete is judged when the next
  // begins.
  if (policy.joined_ranks > 0 && health.last_step > policy.joined.last_step) {
    answer = Judge(job, policy, newest);
  } else if (policy.joined_ranks > 0 && health.last_step < policy.joined.last_step) {
    return {};  // late: its interval has been judged
  }
  JoinHealth(health, &policy.joined);
  policy.joined_ranks += std::max(snapshot.ranks(), 1);
  // One plan at a time: what was just decided has to be applied first.
  if (!answer.plan.has_value() && policy.joined_ranks >= job.spec().parallel().ranks()) {
    PolicyAnswer complete = Judge(job, policy, newest);
    complete.alerts.insert(complete.alerts.begin(), answer.alerts.begin(), answer.alerts.end());
    return complete;
  }
  return answer;
}

void PolicyDriver::OnOperatorPlan(const v1::Job& job, const PrecisionPlan& before,
                                  const PrecisionPlan& after) {
  PolicyOnOperator(Of(job).state, ChangedSites(before, after), /*release=*/false);
}

}  // namespace octavo
