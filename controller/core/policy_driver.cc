#include "controller/core/policy_driver.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "base/status.h"
#include "base/str.h"
#include "controller/core/policy_memory.h"
#include "proto/convert/error_detail.h"
#include "proto/convert/health.h"

namespace octavo {
namespace {

constexpr std::size_t kAlertsRemembered = 4096;

// "layer 3 fc1 input: amax_jump 12.5 > 10" → the part before the numbers.
std::string AlertKey(const std::string& sentence) {
  const std::size_t colon = sentence.find(": ");
  return sentence.substr(0, sentence.find(' ', colon == std::string::npos ? 0 : colon + 2));
}

}  // namespace

void PolicyDriver::Configure(const v1::Job& job, JobPolicy& policy) {
  absl::StatusOr<PolicyConfig> config = PolicyConfigFromSpec(job.spec(), policy.device);
  if (config.ok()) {
    policy.config = *std::move(config);
  } else {
    policy.config.enabled = false;  // a valid spec has a policy; without one nothing is decided
  }
  policy.config.enabled = policy.switched.value_or(policy.config.enabled);
}

PolicyDriver::JobPolicy& PolicyDriver::Of(const v1::Job& job) {
  const auto [found, fresh] = jobs_.try_emplace(job.uid());
  if (fresh) {
    found->second.device.is_cuda = job.spec().device() == "cuda";
    Configure(job, found->second);
  }
  return found->second;
}

void PolicyDriver::Restore(const v1::Job& job, const std::vector<PrecisionPlan>& history,
                           const internal::v1::StoredPolicy* saved) {
  JobPolicy& policy = Of(job);
  if (saved == nullptr) {
    PolicyFromHistory(history, policy.config, job.progress().step(), &policy.state);
    return;
  }
  if (saved->switched() != 0) {
    policy.switched = saved->switched() == 1;
  }
  policy.device = {.is_cuda = saved->cuda(), .sm = saved->sm()};
  Configure(job, policy);
  PolicyFromStore(*saved, &policy.state);
}

internal::v1::StoredPolicy PolicyDriver::Save(const v1::Job& job) {
  const JobPolicy& policy = Of(job);
  internal::v1::StoredPolicy stored = PolicyToStore(policy.state);
  stored.set_switched(!policy.switched.has_value() ? 0 : *policy.switched ? 1 : 2);
  stored.set_cuda(policy.device.is_cuda);
  stored.set_sm(policy.device.sm);
  return stored;
}

void PolicyDriver::Remember(JobPolicy& policy, const HistoryItem& item) {
  policy.rows.Add(item);
  policy.recent.Add(item);
}

void PolicyDriver::RestoreTelemetry(const v1::Job& job, const std::vector<TelemetryRow>& rows,
                                    const std::vector<StoredTelemetry>& newest) {
  JobPolicy& policy = Of(job);
  policy.rows.Restore(rows);
  for (const StoredTelemetry& row : newest) {
    for (const internal::v1::StoredHistory::Item& stored : row.history.items()) {
      if (const std::optional<HistoryItem> item = HistoryItemFromStore(stored); item.has_value()) {
        policy.recent.Add(*item);
      }
    }
  }
  policy.judged_step = policy.recent.last_step();
}

void PolicyDriver::SaveTelemetry(const std::string& job_uid, StoreBatch* batch) {
  if (const auto found = jobs_.find(job_uid); found != jobs_.end()) {
    found->second.rows.Take(job_uid, batch);
  }
  for (std::string& uid : dropped_) {
    batch->telemetry_trims.emplace_back(std::move(uid), std::numeric_limits<std::int64_t>::max());
  }
  dropped_.clear();
}

void PolicyDriver::OnAttempt(const v1::Job& job, const DeviceAbility& device, std::int64_t step) {
  JobPolicy& policy = Of(job);
  policy.device = device;
  Configure(job, policy);
  policy.open.clear();
  policy.judged_step = step;
  Remember(policy, AttemptStarted{step});
  PolicyOnStart(policy.config, policy.state, step);
}

void PolicyDriver::OnPlanApplied(const v1::Job& job, std::int64_t version, std::int64_t step) {
  JobPolicy& policy = Of(job);
  Remember(policy, PlanAppliedAt{version, step});
  PolicyOnApplied(policy.config, policy.state, version, step);
}

PolicyAnswer PolicyDriver::ToAnswer(JobPolicy& policy, PolicyOutput output, std::int64_t step) {
  PolicyAnswer answer;
  if (policy.alerted.size() > kAlertsRemembered) {
    policy.alerted.clear();
  }
  for (std::string& sentence : output.alerts) {
    const auto [said, fresh] = policy.alerted.emplace(AlertKey(sentence), step);
    // A step back: another attempt repeats steps.
    if (!fresh && step >= said->second && step - said->second < kAlertRepeatSteps) {
      continue;
    }
    said->second = step;
    answer.alerts.push_back(std::move(sentence));
  }
  if (!output.changed) {
    return answer;
  }
  for (const PolicyDecision& decision : output.decisions) {
    answer.changes.emplace_back(Name(decision.direction), Name(decision.signal));
  }
  answer.plan = std::move(output.plan);
  return answer;
}

PolicyAnswer PolicyDriver::OnStep(const v1::Job& job, const PrecisionPlan& newest,
                                  const internal::v1::StepReport& report) {
  JobPolicy& policy = Of(job);
  const StepHealth health = StepHealthFromWire(report);
  Remember(policy, health);
  if (!policy.config.enabled) {
    return {};
  }
  return ToAnswer(policy, PolicyOnStep(policy.config, policy.state, newest, health), health.step);
}

PolicyAnswer PolicyDriver::Judge(JobPolicy& policy, const PrecisionPlan& newest) {
  const auto oldest = policy.open.begin();
  HealthSnapshot joined = std::move(oldest->second.joined);
  policy.judged_step = std::max(policy.judged_step, oldest->first);
  policy.open.erase(oldest);
  PolicyAnswer answer;
  if (policy.config.enabled) {
    answer = ToAnswer(policy, PolicyOnSnapshot(policy.config, policy.state, newest, joined),
                      joined.last_step);
  }
  Remember(policy, joined);
  return answer;
}

PolicyAnswer PolicyDriver::OnSnapshot(const v1::Job& job, const PrecisionPlan& newest,
                                      const internal::v1::TelemetrySnapshot& snapshot) {
  JobPolicy& policy = Of(job);
  const HealthSnapshot health = HealthFromWire(snapshot);
  if (health.last_step <= policy.judged_step) {
    return {};  // late: its interval has been judged
  }
  Interval& interval = policy.open[health.last_step];
  JoinHealth(health, &interval.joined);
  interval.ranks += std::max(snapshot.ranks(), 1);
  PolicyAnswer answer;
  // In order of steps: when every rank is in, or when newer intervals show that one never will be.
  // One plan at a time: what was just decided has to be applied first.
  while (!policy.open.empty() && !answer.plan.has_value()) {
    const bool complete = policy.open.begin()->second.ranks >= job.spec().parallel().ranks();
    if (!complete && policy.open.size() <= kOpenIntervals) {
      break;
    }
    PolicyAnswer next = Judge(policy, newest);
    next.alerts.insert(next.alerts.begin(), answer.alerts.begin(), answer.alerts.end());
    answer = std::move(next);
  }
  return answer;
}

void PolicyDriver::OnRefused(const v1::Job& job, const PrecisionPlan& newest) {
  PolicyState& state = Of(job).state;
  state.awaited_version = newest.version;
  state.switching.clear();
}

void PolicyDriver::OnOperatorPlan(const v1::Job& job, const PrecisionPlan& before,
                                  const PrecisionPlan& after) {
  PolicyState& state = Of(job).state;
  PolicyOnOperator(state, ChangedSites(before, after), /*release=*/false);
  state.awaited_version = before.version + 1;  // statistics of the old plan say nothing about it
}

void PolicyDriver::OnJobOver(const std::string& job_uid) {
  if (!jobs_.contains(job_uid)) {
    return;
  }
  ended_.push_back(job_uid);
  if (ended_.size() > kEndedJobsKept) {
    jobs_.erase(ended_.front());
    dropped_.push_back(ended_.front());
    ended_.pop_front();
  }
}

void PolicyDriver::SetEnabled(const v1::Job& job, bool enabled) {
  JobPolicy& policy = Of(job);
  policy.switched = enabled;  // stands above the spec's word
  Configure(job, policy);
  if (enabled) {
    policy.state.windows.Clear();  // they did not see what happened meanwhile
  }
}

bool PolicyDriver::Enabled(const v1::Job& job) { return Of(job).config.enabled; }

void PolicyDriver::SetOperatorSites(const v1::Job& job, const std::vector<OpSite>& sites,
                                    bool release) {
  PolicyState& state = Of(job).state;
  PolicyOnOperator(state, sites, release);
  for (const OpSite& site : sites) {
    state.switching.erase(site);  // no plan changes
  }
}

absl::StatusOr<PolicyReplay> PolicyDriver::Replay(const v1::Job& job, const v1::PolicySpec* policy,
                                                  const std::vector<StoredTelemetry>& stored,
                                                  const PlanOf& plan_of) {
  const auto found = jobs_.find(job.uid());
  const std::vector<HistoryItem> items =
      found == jobs_.end() ? std::vector<HistoryItem>() : found->second.rows.Items(stored);
  PolicyReplay replay;
  std::int64_t oldest_version = 0;
  const auto cover = [&replay](std::int64_t first, std::int64_t last) {
    replay.first_step = replay.first_step == 0 ? first : std::min(replay.first_step, first);
    replay.last_step = std::max(replay.last_step, last);
  };
  for (const HistoryItem& item : items) {
    if (const auto* snapshot = std::get_if<HealthSnapshot>(&item)) {
      oldest_version = oldest_version == 0 ? snapshot->plan_version : oldest_version;
      ++replay.snapshots;
      cover(snapshot->first_step, snapshot->last_step);
    } else if (const auto* step = std::get_if<StepHealth>(&item)) {
      ++replay.steps;
      cover(step->step, step->step);
    }
  }
  if (replay.snapshots == 0) {
    return WithDetail(
        FailedPreconditionError(StrCat(
            "no telemetry of ", job.name(), " is kept: of a live job from its first snapshot ",
            "on (telemetry.interval_steps: ", job.spec().telemetry().interval_steps(),
            "), and of the last ", kEndedJobsKept, " that ended")),
        "NO_TELEMETRY");
  }
  v1::JobSpec spec = job.spec();
  if (policy != nullptr) {
    *spec.mutable_precision()->mutable_policy() = *policy;
  }
  ASSIGN_OR_RETURN(const PolicyConfig config, PolicyConfigFromSpec(spec, found->second.device));
  ASSIGN_OR_RETURN(const PrecisionPlan first_plan, plan_of(oldest_version));
  replay.result = octavo::Replay(config, first_plan, items);
  return replay;
}

absl::StatusOr<PolicyHealth> PolicyDriver::Health(const v1::Job& job, const PrecisionPlan& newest) {
  const auto found = jobs_.find(job.uid());
  const std::vector<HealthSnapshot> recent =
      found == jobs_.end() ? std::vector<HealthSnapshot>() : found->second.recent.Snapshots();
  if (recent.empty()) {
    return WithDetail(FailedPreconditionError(StrCat(
                          "no statistics of ", job.name(), " have arrived yet; ranks ",
                          "send them every ", job.spec().telemetry().interval_steps(), " steps")),
                      "NO_TELEMETRY");
  }
  return PolicyHealth{.first_step = recent.front().first_step,
                      .last_step = recent.back().last_step,
                      .plan_version = recent.back().plan_version,
                      .tensors = RankTensors(found->second.config, newest, recent)};
}

}  // namespace octavo
