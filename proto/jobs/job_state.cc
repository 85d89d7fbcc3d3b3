#include "proto/jobs/job_state.h"

namespace octavo {
namespace {

constexpr std::array<std::string_view, kJobStateCount> kStateNames = {
    "PENDING",    "STARTING",   "RUNNING",   "SUSPENDING", "SUSPENDED",
    "RESTARTING", "CANCELLING", "SUCCEEDED", "FAILED",     "CANCELLED"};

constexpr std::array<std::string_view, kJobTriggerCount> kTriggerNames = {
    "attempt_started",  "training_began", "suspend_requested", "resume_requested",
    "cancel_requested", "attempt_failed", "attempt_displaced", "all_ranks_succeeded",
    "ranks_gone",       "given_up"};

// The table, proved.

constexpr bool NoPairTwice() {
  for (std::size_t i = 0; i < std::size(kJobTransitions); ++i) {
    for (std::size_t j = i + 1; j < std::size(kJobTransitions); ++j) {
      if (kJobTransitions[i].from == kJobTransitions[j].from &&
          kJobTransitions[i].trigger == kJobTransitions[j].trigger) {
        return false;
      }
    }
  }
  return true;
}

constexpr bool TerminalStatesAreFinal() {
  for (const JobTransition& t : kJobTransitions) {
    if (IsTerminal(t.from)) {
      return false;
    }
  }
  return true;
}

constexpr bool TerminalOnlyFromEvidence() {
  for (const JobTransition& t : kJobTransitions) {
    if (IsTerminal(t.to) && !IsEvidence(t.trigger)) {
      return false;
    }
  }
  return true;
}

constexpr bool EveryLiveStateCanBeCancelled() {
  for (JobState state : kJobStates) {
    if (IsTerminal(state)) {
      continue;
    }
    const std::optional<JobState> next = NextState(state, JobTrigger::kCancelRequested);
    if (next != JobState::kCancelling) {
      return false;
    }
  }
  return NextState(JobState::kCancelling, JobTrigger::kRanksGone) == JobState::kCancelled;
}

constexpr bool EveryStateIsReachable() {
  bool reached[kJobStateCount + 1] = {};
  reached[static_cast<std::size_t>(JobState::kPending)] = true;
  for (std::size_t round = 0; round < kJobStateCount; ++round) {
    for (const JobTransition& t : kJobTransitions) {
      if (reached[static_cast<std::size_t>(t.from)]) {
        reached[static_cast<std::size_t>(t.to)] = true;
      }
    }
  }
  for (JobState state : kJobStates) {
    if (!reached[static_cast<std::size_t>(state)]) {
      return false;
    }
  }
  return true;
}

// What holds slots gives them back only by evidence, so that no slot is counted free too early.
constexpr bool SlotsAreFreedByEvidence() {
  for (const JobTransition& t : kJobTransitions) {
    if (HoldsSlots(t.from) && !HoldsSlots(t.to) && !IsEvidence(t.trigger)) {
      return false;
    }
  }
  return true;
}

static_assert(NoPairTwice(), "a trigger has one effect in a state");
static_assert(TerminalStatesAreFinal());
static_assert(TerminalOnlyFromEvidence());
static_assert(EveryLiveStateCanBeCancelled());
static_assert(EveryStateIsReachable());
static_assert(SlotsAreFreedByEvidence());
static_assert(kJobStates.back() == JobState::kCancelled && kJobStateCount == kStateNames.size());
static_assert(static_cast<std::size_t>(JobTrigger::kGivenUp) + 1 == kJobTriggerCount);

struct Verb {
  JobTrigger trigger;
  std::string_view name;
};
constexpr Verb kVerbs[] = {{JobTrigger::kSuspendRequested, "suspend"},
                           {JobTrigger::kResumeRequested, "resume"},
                           {JobTrigger::kCancelRequested, "cancel"}};

std::string VerbName(JobTrigger trigger) {
  for (const Verb& verb : kVerbs) {
    if (verb.trigger == trigger) {
      return std::string(verb.name);
    }
  }
  return "apply " + std::string(Name(trigger));
}

}  // namespace

std::string_view Name(JobState state) {
  const std::size_t index = static_cast<std::size_t>(state) - 1;
  return index < kJobStateCount ? kStateNames[index] : "UNKNOWN";
}

std::optional<JobState> ParseJobState(std::string_view text) {
  for (JobState state : kJobStates) {
    if (Name(state) == text) {
      return state;
    }
  }
  return std::nullopt;
}

std::string_view Name(JobTrigger trigger) {
  return kTriggerNames[static_cast<std::size_t>(trigger)];
}

std::string IllegalTransition(JobState state, JobTrigger trigger) {
  std::string possible;
  for (const Verb& verb : kVerbs) {
    const std::optional<JobState> next = NextState(state, verb.trigger);
    if (next.has_value() && *next != state) {
      possible += (possible.empty() ? "" : ", ") + std::string(verb.name);
    }
  }
  return "cannot " + VerbName(trigger) + ": the job is " + std::string(Name(state)) +
         "; possible now: " + (possible.empty() ? "nothing" : possible);
}

}  // namespace octavo
