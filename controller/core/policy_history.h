// The newest telemetry of a job, for rankings. Everything older is in the store (history_rows.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

#include "controller/policy/replay.h"

namespace octavo {

// A value. Not thread-safe.
class RecentHealth {
 public:
  // Snapshots that a ranking sums up.
  static constexpr std::size_t kSnapshots = 8;

  void Add(const HistoryItem& item);
  // The newest snapshots of the newest plan version and attempt, oldest first.
  std::vector<HealthSnapshot> Snapshots() const { return {snapshots_.begin(), snapshots_.end()}; }
  // Last step of the newest snapshot, or the step after which the attempt continues.
  std::int64_t last_step() const { return last_step_; }

 private:
  std::deque<HealthSnapshot> snapshots_;
  std::int64_t last_step_ = 0;
};

}  // namespace octavo
