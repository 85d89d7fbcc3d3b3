// Why an attempt (or a job) ended. The class alone decides what happens next: whether another
// attempt is made and whether this one counts towards restart.max. Pure; mirrors
// octavo.v1.FailureClass value by value (tests/unit/proto/convert proves it).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

namespace octavo {

enum class FailureClass : std::uint8_t {
  kNone = 0,
  kSpecRejected = 1,       // validation said no
  kGangTimeout = 2,        // a rank did not come to the rendezvous in time
  kRankExit = 3,           // a rank process ended by itself or by a signal
  kRankOom = 4,            // out of memory, host or device
  kCollectiveTimeout = 5,  // a collective waited past its limit
  kStepStalled = 6,        // heartbeats without steps
  kWorkerLost = 7,         // session silent beyond the lease
  kDeviceFault = 8,        // sticky device error
  kSlotPoisoned = 9,       // a process that does not die, or memory not given back
  kNumericFailure = 10,    // bounded number of non-finite steps in a row
  kCheckpointUnusable = 11,
  kPreempted = 12,  // the controller's decision
  kSuspendedByUser = 13,
  kDrained = 14,
  kCancelledByUser = 15,
  kNoProgress = 16,  // restart.max_without_progress attempts without a step
};
inline constexpr std::size_t kFailureClassCount = 17;

struct FailureClassFacts {
  std::string_view name;            // as on the wire and in metrics
  bool counts_towards_restart_max;  // a real failure
  bool retryable;                   // another attempt may help
  std::string_view advice;          // what the reader does next; empty when nothing
};

inline constexpr std::array<FailureClassFacts, kFailureClassCount> kFailureClassFacts = {{
    {"NONE", false, false, ""},
    {"SPEC_REJECTED", false, false, "correct the job's specification and submit it again"},
    {"GANG_TIMEOUT", true, true, "see the log of the rank that did not come"},
    {"RANK_EXIT", true, true, "see the log of that rank"},
    {"RANK_OOM", true, false, "lower train.microbatch or set train.recompute: full"},
    {"COLLECTIVE_TIMEOUT", true, true, "see the log of the rank that was absent"},
    {"STEP_STALLED", true, true, "see the log of the rank that stopped stepping"},
    {"WORKER_LOST", true, true, "see whether the worker's host is up"},
    {"DEVICE_FAULT", true, true, "see the device's health on that worker"},
    {"SLOT_POISONED", true, true,
     "end the process named in the message by hand, or restart the host"},
    {"NUMERIC_FAILURE", true, false, "lower the learning rate or move the named layer to bf16"},
    {"CHECKPOINT_UNUSABLE", true, true, "run octavo checkpoints verify on the path"},
    {"PREEMPTED", false, true, ""},
    {"SUSPENDED_BY_USER", false, false, "octavo resume continues it"},
    {"DRAINED", false, true, ""},
    {"CANCELLED_BY_USER", false, false, ""},
    {"NO_PROGRESS", false, false, "see the attempts' reasons; the first is usually the cause"},
}};

constexpr std::string_view Name(FailureClass failure) {
  return kFailureClassFacts[static_cast<std::size_t>(failure)].name;
}
constexpr bool CountsTowardsRestartMax(FailureClass failure) {
  return kFailureClassFacts[static_cast<std::size_t>(failure)].counts_towards_restart_max;
}
constexpr bool Retryable(FailureClass failure) {
  return kFailureClassFacts[static_cast<std::size_t>(failure)].retryable;
}
constexpr std::string_view Advice(FailureClass failure) {
  return kFailureClassFacts[static_cast<std::size_t>(failure)].advice;
}
std::optional<FailureClass> ParseFailureClass(std::string_view text);

}  // namespace octavo
