#include "controller/policy/replay.h"

namespace octavo {

ReplayResult Replay(const PolicyConfig& config, const PrecisionPlan& first_plan,
                    const std::vector<HistoryItem>& history) {
  ReplayResult result;
  result.plan = first_plan;
  PolicyState state;
  PolicyOnStart(config, state, 0);
  const auto take = [&](PolicyOutput out, std::int64_t step) {
    for (PolicyDecision& d : out.decisions) {
      result.decisions.push_back(std::move(d));
    }
    for (std::string& a : out.alerts) {
      result.alerts.push_back(std::move(a));
    }
    if (out.changed) {
      result.plan = std::move(out.plan);
      PolicyOnApplied(config, state, result.plan.version, step);
    }
  };
  for (const HistoryItem& item : history) {
    if (const auto* start = std::get_if<AttemptStarted>(&item)) {
      PolicyOnStart(config, state, start->step);
    } else if (const auto* applied = std::get_if<PlanAppliedAt>(&item)) {
      PolicyOnApplied(config, state, std::max(applied->version, state.awaited_version),
                      applied->step);
    } else if (const auto* step = std::get_if<StepHealth>(&item)) {
      take(PolicyOnStep(config, state, result.plan, *step), step->step);
    } else if (const auto* snapshot = std::get_if<HealthSnapshot>(&item)) {
      HealthSnapshot judged = *snapshot;
      judged.plan_version = result.plan.version;
      take(PolicyOnSnapshot(config, state, result.plan, judged), snapshot->last_step);
    }
  }
  return result;
}

}  // namespace octavo
