// The life of a job as one checked table: (state, trigger) → state. Pure and constexpr.
//
//   PENDING ──attempt_started──► STARTING ──training_began──► RUNNING ──all_ranks_succeeded──►
//   SUCCEEDED
//      ▲                            │ attempt_failed             │
//      │ resume_requested           ▼                            ▼
//   SUSPENDED ◄─ranks_gone─ SUSPENDING                       RESTARTING ──attempt_started──►
//   STARTING any live state ──cancel_requested──► CANCELLING ──ranks_gone──► CANCELLED STARTING,
//   RUNNING, RESTARTING, SUSPENDING ──given_up──► FAILED
//
// Triggers are wishes (somebody asks), acts of the controller, or evidence (the party that owns the
// fact has seen it: the worker saw every rank process of the newest attempt end, or there was
// none). Terminal states are entered by evidence alone: a failed RPC proves nothing. A wish that
// finds nothing running still goes through SUSPENDING or CANCELLING; the controller then delivers
// `kRanksGone` at once. What the table lacks is illegal: FAILED_PRECONDITION for a client.
//
//   std::optional<JobState> next = NextState(job.state, JobTrigger::kSuspendRequested);
//   if (!next) return FailedPreconditionError(IllegalTransition(job.state, trigger));
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace octavo {

// Values equal octavo.v1.JobState (0 is its UNSPECIFIED and never a state of a job).
enum class JobState : std::uint8_t {
  kPending = 1,
  kStarting = 2,
  kRunning = 3,
  kSuspending = 4,
  kSuspended = 5,
  kRestarting = 6,
  kCancelling = 7,
  kSucceeded = 8,
  kFailed = 9,
  kCancelled = 10,
};
inline constexpr std::size_t kJobStateCount = 10;
inline constexpr std::array<JobState, kJobStateCount> kJobStates = {
    JobState::kPending,   JobState::kStarting,   JobState::kRunning,    JobState::kSuspending,
    JobState::kSuspended, JobState::kRestarting, JobState::kCancelling, JobState::kSucceeded,
    JobState::kFailed,    JobState::kCancelled};

enum class JobTrigger : std::uint8_t {
  kAttemptStarted,     // act: the whole gang is placed and the placement stored
  kTrainingBegan,      // evidence: every rank has met and loaded
  kSuspendRequested,   // wish
  kResumeRequested,    // wish
  kCancelRequested,    // wish
  kAttemptFailed,      // evidence: the attempt ended by a failure that may be tried again
  kAttemptDisplaced,   // evidence: it ended by preemption or drain; not a failure
  kAllRanksSucceeded,  // evidence: every rank exited 0 after the last step
  kRanksGone,          // evidence: no rank process of any attempt is left
  kGivenUp,            // evidence: the attempt ended and the class or the budget allows no other
};
inline constexpr std::size_t kJobTriggerCount = 10;

constexpr bool IsTerminal(JobState state) { return state >= JobState::kSucceeded; }

// An attempt may hold slots (its ranks exist or are being stopped).
constexpr bool HoldsSlots(JobState state) {
  return state == JobState::kStarting || state == JobState::kRunning ||
         state == JobState::kSuspending || state == JobState::kCancelling;
}

// Waits for the scheduler (Job.pending is set).
constexpr bool IsWaiting(JobState state) {
  return state == JobState::kPending || state == JobState::kRestarting;
}

constexpr bool IsEvidence(JobTrigger trigger) {
  return trigger == JobTrigger::kTrainingBegan || trigger >= JobTrigger::kAttemptFailed;
}

struct JobTransition {
  JobState from;
  JobTrigger trigger;
  JobState to;
};

inline constexpr JobTransition kJobTransitions[] = {
    {JobState::kPending, JobTrigger::kAttemptStarted, JobState::kStarting},
    {JobState::kPending, JobTrigger::kSuspendRequested, JobState::kSuspending},
    {JobState::kPending, JobTrigger::kCancelRequested, JobState::kCancelling},

    {JobState::kStarting, JobTrigger::kTrainingBegan, JobState::kRunning},
    {JobState::kStarting, JobTrigger::kSuspendRequested, JobState::kSuspending},
    {JobState::kStarting, JobTrigger::kCancelRequested, JobState::kCancelling},
    {JobState::kStarting, JobTrigger::kAttemptFailed, JobState::kRestarting},
    {JobState::kStarting, JobTrigger::kAttemptDisplaced, JobState::kPending},
    // A job resumed from the checkpoint of its last step has nothing left to train.
    {JobState::kStarting, JobTrigger::kAllRanksSucceeded, JobState::kSucceeded},
    {JobState::kStarting, JobTrigger::kGivenUp, JobState::kFailed},

    {JobState::kRunning, JobTrigger::kSuspendRequested, JobState::kSuspending},
    {JobState::kRunning, JobTrigger::kCancelRequested, JobState::kCancelling},
    {JobState::kRunning, JobTrigger::kAttemptFailed, JobState::kRestarting},
    {JobState::kRunning, JobTrigger::kAttemptDisplaced, JobState::kPending},
    {JobState::kRunning, JobTrigger::kAllRanksSucceeded, JobState::kSucceeded},
    {JobState::kRunning, JobTrigger::kGivenUp, JobState::kFailed},

    {JobState::kSuspending, JobTrigger::kRanksGone, JobState::kSuspended},
    {JobState::kSuspending, JobTrigger::kCancelRequested, JobState::kCancelling},
    // The last step came before the wish did: the truth is that it succeeded.
    {JobState::kSuspending, JobTrigger::kAllRanksSucceeded, JobState::kSucceeded},
    {JobState::kSuspending, JobTrigger::kGivenUp, JobState::kFailed},
    {JobState::kSuspending, JobTrigger::kSuspendRequested, JobState::kSuspending},

    {JobState::kSuspended, JobTrigger::kResumeRequested, JobState::kPending},
    {JobState::kSuspended, JobTrigger::kCancelRequested, JobState::kCancelling},
    {JobState::kSuspended, JobTrigger::kSuspendRequested, JobState::kSuspended},

    {JobState::kRestarting, JobTrigger::kAttemptStarted, JobState::kStarting},
    {JobState::kRestarting, JobTrigger::kSuspendRequested, JobState::kSuspending},
    {JobState::kRestarting, JobTrigger::kCancelRequested, JobState::kCancelling},
    {JobState::kRestarting, JobTrigger::kGivenUp, JobState::kFailed},

    {JobState::kCancelling, JobTrigger::kRanksGone, JobState::kCancelled},
    {JobState::kCancelling, JobTrigger::kAllRanksSucceeded, JobState::kSucceeded},
    {JobState::kCancelling, JobTrigger::kCancelRequested, JobState::kCancelling},
};

// The state after `trigger`, or nullopt when it is illegal in `state`.
constexpr std::optional<JobState> NextState(JobState state, JobTrigger trigger) {
  for (const JobTransition& transition : kJobTransitions) {
    if (transition.from == state && transition.trigger == trigger) {
      return transition.to;
    }
  }
  return std::nullopt;
}

// "PENDING" etc., the one spelling of wire, YAML, logs and metrics.
std::string_view Name(JobState state);
std::optional<JobState> ParseJobState(std::string_view text);
// "suspend_requested" etc.
std::string_view Name(JobTrigger trigger);

// A sentence for FAILED_PRECONDITION: what was asked, the state, and what is possible in it, e.g.
// "cannot resume: the job is RUNNING; possible now: suspend, cancel".
std::string IllegalTransition(JobState state, JobTrigger trigger);

}  // namespace octavo
