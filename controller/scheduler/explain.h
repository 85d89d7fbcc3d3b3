// One scheduling pass: every waiting job is either placed whole or gets exactly one reason with the
// numbers (needed, free, largest possible). Pure.
//
// Jobs are served in QueueOrder. A job that could run but must wait reserves what it needs: later
// jobs start only with slots beyond all reservations, so a stream of small jobs never starves a
// large one. A job that the cluster cannot hold at all and a job in its restart back-off, which
// could not use its slots yet, reserve nothing and block nobody.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "controller/scheduler/fairness.h"
#include "controller/scheduler/placement.h"
#include "proto/jobs/pending_reason.h"

namespace octavo {

struct WaitingJob {
  QueueKey key;
  std::string name;  // jobs/{job}
  GangRequest gang;
  std::int64_t backoff_seconds = 0;      // > 0: not before then
  std::int32_t previous_ranks_left = 0;  // processes of its earlier attempts that still hold slots
};

struct PendingExplanation {
  PendingReason reason = PendingReason::kNone;
  std::string sentence;
  std::int32_t slots_needed = 0;
  std::int32_t slots_free = 0;
  std::int32_t slots_largest_possible = 0;

  friend bool operator==(const PendingExplanation&, const PendingExplanation&) = default;
};

struct Decision {
  std::string uid;
  std::vector<RankPlacement> placement;  // all ranks, or empty: then `pending` says why
  PendingExplanation pending;
};

// In the order of service, one decision per job. `cluster` is taken by value: the pass uses it up.
std::vector<Decision> SchedulePass(ClusterView cluster, const std::vector<WaitingJob>& jobs);

}  // namespace octavo
