// Telemetry of the ranks of one host, added up before it travels (ARCHITECTURE 9): 256 hosts
// instead of 2048 ranks, 82 kB each. Pure functions over values.
//
//   merger.Add(rank, snapshot, expected_ranks, now)  → snapshots that are complete (often none)
//   merger.Flush(now)                                → those that waited kMergeWaitMicros
//
// Sums: counts, energies, FLOPs, bytes, seconds (rank-seconds), memory, dropped, padding, executed
// counts, rounds. Max: amax, dequant_scale_max, max_ratio, cv. Min: dequant_scale_min (over tensors
// that saw a value), min_ratio. Worst experts: counts of the same expert and ratio added, the
// kWorstKept largest ratios kept. The dense recipe list is that of the first rank that has one:
// plans switch at the same step everywhere.
#pragma once

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "worker/agent/rank_key.h"

namespace octavo {

inline constexpr int kWorstKept = 8;  // per tensor, after a merge

// REQUIRES: the same window in both.
void MergeSnapshot(const iv1::TelemetrySnapshot& from, iv1::TelemetrySnapshot* into);

// One attempt of one job on this host.
class TelemetryMerger {
 public:
  static constexpr std::int64_t kMergeWaitMicros = 5'000'000;

  // A rank's snapshot of a window. Older windows are given out as they are: a rank that has moved
  // on will not report for them any more.
  std::vector<iv1::TelemetrySnapshot> Add(const iv1::TelemetrySnapshot& snapshot,
                                          int expected_ranks, std::int64_t now_micros);
  std::vector<iv1::TelemetrySnapshot> Flush(std::int64_t now_micros);

 private:
  struct Window {
    iv1::TelemetrySnapshot merged;
    std::int64_t since_micros = 0;
  };
  std::map<std::pair<std::int64_t, std::int64_t>, Window> windows_;  // by (last_step, first_step)
};

}  // namespace octavo
