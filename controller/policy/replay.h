// Replays stored history through the policy: what would another policy have decided, and when?
// Deterministic: the same history and config give the same decisions.
#pragma once

#include <algorithm>
#include <variant>
#include <vector>

#include "controller/policy/fallback.h"

namespace octavo {

struct AttemptStarted {
  std::int64_t step = 0;
};
struct PlanAppliedAt {
  std::int64_t version = 0, step = 0;
};
using HistoryItem = std::variant<AttemptStarted, PlanAppliedAt, StepHealth, HealthSnapshot>;

struct ReplayResult {
  std::vector<PolicyDecision> decisions;
  std::vector<std::string> alerts;
  PrecisionPlan plan;  // after the last item
};

// A plan the policy makes during the replay counts as applied with the next item. Recorded
// PlanAppliedAt items of the original run therefore only extend the grace.
// Recorded statistics belong to the recipes that ran: a tensor whose site the replayed plan holds in
// another FP8 recipe than the recorded one is judged as recorded.
ReplayResult Replay(const PolicyConfig& config, const PrecisionPlan& first_plan,
                    const std::vector<HistoryItem>& history);

}  // namespace octavo
