// Why a job waits: a closed enumeration with the sentence that a person reads. Recomputed by the
// scheduler at every pass; a waiting job always has one, with the numbers. Pure; values equal
// octavo.v1.PendingReason.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace octavo {

enum class PendingReason : std::uint8_t {
  kNone = 0,
  kNoWorkers = 1,
  kNoMatchingDevice = 2,
  kExceedsCluster = 3,
  kWaitingForSlots = 4,
  kBehindHigherPriority = 5,
  kRestartBackoff = 6,
  kWaitingForPreviousAttempt = 7,
  kWorkersDraining = 8,
};
inline constexpr std::string_view kPendingReasonNames[] = {"NONE",
                                                           "NO_WORKERS",
                                                           "NO_MATCHING_DEVICE",
                                                           "EXCEEDS_CLUSTER",
                                                           "WAITING_FOR_SLOTS",
                                                           "BEHIND_HIGHER_PRIORITY",
                                                           "RESTART_BACKOFF",
                                                           "WAITING_FOR_PREVIOUS_ATTEMPT",
                                                           "WORKERS_DRAINING"};

constexpr std::string_view Name(PendingReason reason) {
  return kPendingReasonNames[static_cast<std::size_t>(reason)];
}

// The numbers behind a reason. Slots are of the job's device, on workers that are READY.
struct PendingFacts {
  std::int32_t slots_needed = 0;
  std::int32_t slots_free = 0;
  std::int32_t slots_largest_possible = 0;  // if every other job ended
  std::string_view device = "cpu";
  std::string_view other_job;       // BEHIND_HIGHER_PRIORITY: jobs/{job} ahead
  std::int64_t wait_seconds = 0;    // RESTART_BACKOFF: until the next attempt
  std::int32_t ranks_left = 0;      // WAITING_FOR_PREVIOUS_ATTEMPT: rank processes not yet gone
  std::int32_t slots_draining = 0;  // WORKERS_DRAINING
};

inline std::string Sentence(PendingReason reason, const PendingFacts& facts) {
  const std::string device(facts.device);
  const std::string numbers = "needs " + std::to_string(facts.slots_needed) + " " + device +
                              " slots; free now " + std::to_string(facts.slots_free) +
                              ", at most " + std::to_string(facts.slots_largest_possible);
  switch (reason) {
    case PendingReason::kNone:
      return {};
    case PendingReason::kNoWorkers:
      return "no worker is registered; " + numbers;
    case PendingReason::kNoMatchingDevice:
      return "no worker can run it (device " + device + " and its recipes); " + numbers;
    case PendingReason::kExceedsCluster:
      return "larger than the cluster: " + numbers + "; start more workers or lower parallel.ranks";
    case PendingReason::kWaitingForSlots:
      return "waits for slots that other jobs use: " + numbers;
    case PendingReason::kBehindHigherPriority:
      return "behind " + std::string(facts.other_job) + ", which goes first: " + numbers;
    case PendingReason::kRestartBackoff:
      return "the next attempt starts in " + std::to_string(facts.wait_seconds) + " s; " + numbers;
    case PendingReason::kWaitingForPreviousAttempt:
      return std::to_string(facts.ranks_left) +
             " ranks of the previous attempt are still being stopped; " + numbers;
    case PendingReason::kWorkersDraining:
      return std::to_string(facts.slots_draining) + " slots are on draining workers; " + numbers;
  }
  return {};
}

}  // namespace octavo
