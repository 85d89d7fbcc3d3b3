// What is kept of a job's telemetry for dry runs, replays and rankings. Bounded: the oldest goes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

#include "controller/policy/replay.h"

namespace octavo {

// A value. Not thread-safe.
class PolicyHistory {
 public:
  // A snapshot costs its tensors (about 200 bytes each), everything else 1.
  static constexpr std::size_t kCostMax = 150000;

  static std::size_t CostOf(const HistoryItem& item);

  void Add(HistoryItem item);
  bool empty() const { return items_.empty(); }
  // Last step of the newest snapshot of the newest attempt; 0: none.
  std::int64_t JudgedStep() const;
  std::vector<HistoryItem> Items() const { return {items_.begin(), items_.end()}; }
  // The newest snapshots of the newest plan version, oldest first, at most `count`.
  std::vector<HealthSnapshot> Recent(std::size_t count) const;

  struct Extent {
    std::int64_t first_step = 0, last_step = 0, snapshots = 0, steps = 0;
    std::int64_t oldest_version = 0;  // of the first snapshot
  };
  Extent Measure() const;

 private:
  std::deque<HistoryItem> items_;
  std::size_t cost_ = 0;
};

}  // namespace octavo
