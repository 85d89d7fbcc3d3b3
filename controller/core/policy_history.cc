#include "controller/core/policy_history.h"

namespace octavo {

void RecentHealth::Add(const HistoryItem& item) {
  if (const auto* start = std::get_if<AttemptStarted>(&item)) {
    snapshots_.clear();  // steps before it may be repeated
    last_step_ = start->step;
  } else if (const auto* snapshot = std::get_if<HealthSnapshot>(&item)) {
    if (!snapshots_.empty() && snapshots_.back().plan_version != snapshot->plan_version) {
      snapshots_.clear();
    }
    snapshots_.push_back(*snapshot);
    if (snapshots_.size() > kSnapshots) {
      snapshots_.pop_front();
    }
    last_step_ = snapshot->last_step;
  }
}

}  // namespace octavo
