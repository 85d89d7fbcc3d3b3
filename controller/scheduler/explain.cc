#include "controller/scheduler/explain.h"

#include <algorithm>

namespace octavo {
namespace {

// What earlier jobs in the order wait for, per device.
struct Reservation {
  std::int64_t slots = 0;
  std::string first_job;  // named in the reason of those behind
};

PendingExplanation Explain(const WaitingJob& job, const Capacity& capacity,
                           const Reservation& ahead) {
  PendingReason reason = PendingReason::kWaitingForSlots;
  if (capacity.workers_known == 0) {
    reason = PendingReason::kNoWorkers;
  } else if (capacity.workers_matching == 0) {
    reason = PendingReason::kNoMatchingDevice;
  } else if (job.gang.ranks > capacity.largest) {
    reason = job.gang.ranks <= capacity.largest + capacity.draining
                 ? PendingReason::kWorkersDraining
                 : PendingReason::kExceedsCluster;
  } else if (job.backoff_seconds > 0) {
    reason = PendingReason::kRestartBackoff;
  } else if (job.gang.ranks <= capacity.free) {
    reason = PendingReason::kBehindHigherPriority;
  } else if (job.previous_ranks_left > 0) {
    reason = PendingReason::kWaitingForPreviousAttempt;
  }
  PendingExplanation pending{.reason = reason,
                             .slots_needed = job.gang.ranks,
                             .slots_free = capacity.free,
                             .slots_largest_possible = capacity.largest};
  pending.sentence = Sentence(reason, {.slots_needed = job.gang.ranks,
                                       .slots_free = capacity.free,
                                       .slots_largest_possible = capacity.largest,
                                       .device = job.gang.cuda ? "cuda" : "cpu",
                                       .other_job = ahead.first_job,
                                       .wait_seconds = job.backoff_seconds,
                                       .ranks_left = job.previous_ranks_left,
                                       .slots_draining = capacity.draining});
  if (reason == PendingReason::kNoMatchingDevice && !capacity.refusal.empty()) {
    pending.sentence += "; " + capacity.refusal;
  }
  return pending;
}

}  // namespace

std::vector<Decision> SchedulePass(ClusterView cluster, const std::vector<WaitingJob>& jobs) {
  std::vector<QueueKey> keys;
  keys.reserve(jobs.size());
  for (const WaitingJob& job : jobs) {
    keys.push_back(job.key);
  }
  std::vector<Decision> decisions;
  decisions.reserve(jobs.size());
  Reservation reserved[2];  // cpu, cuda
  for (const std::size_t index : QueueOrder(keys)) {
    const WaitingJob& job = jobs[index];
    Reservation& ahead = reserved[job.gang.cuda ? 1 : 0];
    const Capacity capacity = CapacityFor(cluster, job.gang);
    Decision decision{.uid = job.key.uid};
    const bool fits = job.gang.ranks + ahead.slots <= capacity.free;
    if (fits && job.backoff_seconds <= 0) {
      decision.placement = Place(cluster, job.gang);
    }
    if (!decision.placement.empty()) {
      Occupy(cluster, decision.placement);
    } else {
      decision.pending = Explain(job, capacity, ahead);
      // A job in back-off cannot use what it would reserve: nobody waits for it.
      if (job.backoff_seconds <= 0 && job.gang.ranks <= capacity.largest) {
        ahead.slots += job.gang.ranks;
        if (ahead.first_job.empty()) {
          ahead.first_job = job.name;
        }
      }
    }
    decisions.push_back(std::move(decision));
  }
  return decisions;
}

}  // namespace octavo
