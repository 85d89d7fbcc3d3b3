#include "controller/core/attempt_end.h"

#include <algorithm>
#include <csignal>
#include <cstring>

#include "base/str.h"
#include "controller/core/attempts.h"
#include "controller/core/jobs.h"
#include "controller/scheduler/restart_budget.h"
#include "proto/convert/job.h"

namespace octavo {
namespace {

constexpr std::int64_t kOwnReasonMs = 500;

bool IsDecision(FailureClass failure) {
  return failure == FailureClass::kPreempted || failure == FailureClass::kDrained ||
         failure == FailureClass::kSuspendedByUser || failure == FailureClass::kCancelledByUser;
}

// How much an end explains the others.
int Weight(FailureClass failure) {
  switch (failure) {
    case FailureClass::kNumericFailure:
      return 9;
    case FailureClass::kSpecRejected:
    case FailureClass::kRankOom:
    case FailureClass::kCheckpointUnusable:
    case FailureClass::kDeviceFault:
      return 8;
    case FailureClass::kRankExit:
      return 7;
    case FailureClass::kSlotPoisoned:
      return 6;
    case FailureClass::kWorkerLost:
      return 5;
    case FailureClass::kGangTimeout:
    case FailureClass::kStepStalled:
      return 4;
    case FailureClass::kCollectiveTimeout:
      return 3;
    default:
      return 1;
  }
}

std::string LastLine(const std::string& text) {
  std::string last;
  for (const std::string& line : StrSplit(text, '\n')) {
    if (!StripSpace(line).empty()) {
      last = std::string(StripSpace(line));
    }
  }
  return last.substr(0, 300);
}

std::string HowItEnded(const internal::v1::RankEnded& ended) {
  if (ended.never_started()) {
    return "did not start";
  }
  if (ended.unkillable()) {
    return StrCat("could not be killed; slot ", ended.slot(), " is out of use");
  }
  if (ended.signal() != 0) {
    const char* name = ::strsignal(ended.signal());
    return StrCat("was killed by signal ", ended.signal(), name == nullptr ? "" : " (",
                  name == nullptr ? "" : name, name == nullptr ? "" : ")");
  }
  return StrCat("exited with code ", ended.exit_code());
}

void CloseAttempt(CoreState& state, JobRecord& job, FailureClass failure, const std::string& reason,
                  Now now) {
  AttemptRecord& attempt = *job.current;
  v1::Attempt& stored = *attempt.stored.mutable_attempt();
  SetTimestamp(stored.mutable_end_time(), now.unix_micros);
  stored.set_end_class(ToWire(failure));
  stored.set_end_reason(reason);
  if (!attempt.stored.trained()) {
    state.effects.push_back(
        GangStart{.seconds = static_cast<double>(now.mono_micros - attempt.started_micros) / 1e6,
                  .result = "failed"});
  }
  SaveAttempt(state, attempt);
  job.job().mutable_progress()->clear_phase();  // no rank is in any phase now
  job.past.push_back(attempt.stored);
  job.current.reset();
  state.schedule_wanted = true;
}

void Report(CoreState& state, const char* result, FailureClass failure) {
  state.effects.push_back(AttemptOver{.result = result, .reason = std::string(Name(failure))});
}

void DecideNext(CoreState& state, JobRecord& job, const AttemptCause& cause, bool made_progress,
                Now now) {
  const v1::RestartSpec& limits = job.spec().restart();
  const RestartVerdict verdict =
      AfterAttempt({.max = limits.max(),
                    .max_without_progress = limits.max_without_progress(),
                    .backoff_seconds = limits.backoff_seconds()},
                   {.failures = job.job().restarts(),
                    .failures_without_progress = job.stored.failures_without_progress()},
                   cause.failure, made_progress);
  job.job().set_restarts(verdict.history.failures);
  job.stored.set_failures_without_progress(verdict.history.failures_without_progress);
  state.effects.push_back(
      JobRestarted{.train_job = job.spec().name(), .restarts = verdict.history.failures});
  const std::string message = StrCat(cause.reason, "; ", verdict.reason);
  switch (verdict.action) {
    case RestartAction::kDisplaced:
      Report(state, "displaced", cause.failure);
      Transition(state, job, JobTrigger::kAttemptDisplaced, cause.reason, now);
      return;
    case RestartAction::kRetry:
      Report(state, "failed", cause.failure);
      job.backoff_until = now.mono_micros + verdict.wait_seconds * 1000000;
      job.stored.set_next_attempt_unix_micros(now.unix_micros + verdict.wait_seconds * 1000000);
      Transition(state, job, JobTrigger::kAttemptFailed, message, now);
      return;
    case RestartAction::kGiveUp:
      Report(state, "failed", cause.failure);
      job.job().set_failure(ToWire(verdict.failure));
      Transition(state, job, JobTrigger::kGivenUp, message, now);
      return;
  }
}

}  // namespace

internal::v1::StoredRank JudgeRankEnd(const internal::v1::RankEnded& ended,
                                      const RankEndContext& context) {
  internal::v1::StoredRank rank;
  rank.set_rank(ended.rank());
  rank.set_ended(true);
  const bool asked = context.asked_for_ms >= 0;
  const internal::v1::RankOutcome& outcome = ended.outcome();
  const bool clean = ended.exit_code() == 0 && ended.signal() == 0 && !ended.never_started() &&
                     !ended.unkillable() && ended.has_outcome();
  std::string detail = outcome.message();
  if (clean && outcome.failure_class() == 0 && !outcome.suspended() && !outcome.stopped()) {
    rank.set_succeeded(true);
  } else if (clean && outcome.failure_class() == 0) {
    // It ended by a wish: ours, or its worker's own (the daemon got SIGTERM).
    rank.set_end_class(asked ? v1::FAILURE_CLASS_UNSPECIFIED : v1::DRAINED);
    rank.set_collateral(asked);
    detail = outcome.suspended() ? "saved and stopped" : "stopped";
  } else {
    FailureClass failure = FailureClass::kRankExit;
    if (ended.unkillable()) {
      failure = FailureClass::kSlotPoisoned;
    } else if (ended.has_outcome()) {
      failure = FailureClassFromNumber(outcome.failure_class()).value_or(FailureClass::kRankExit);
      if (failure == FailureClass::kNone) {
        failure = FailureClass::kRankExit;
      }
    }
    rank.set_end_class(ToWire(failure));
    const bool by_our_kill =
        ended.signal() == SIGTERM ||
        (ended.signal() == SIGKILL && context.asked_for_ms >= context.grace_ms);
    // A rank that was asked and leaves with an error reacts to its peers; one that leaves at the
    // very moment it is asked may have had a reason of its own.
    const bool no_word =
        ended.signal() == 0 && (!ended.has_outcome() || (failure == FailureClass::kRankExit &&
                                                         context.asked_for_ms >= kOwnReasonMs));
    rank.set_collateral(asked &&
                        (by_our_kill || no_word || ended.unkillable() || IsDecision(failure) ||
                         failure == FailureClass::kCollectiveTimeout));
    if (detail.empty() && ended.exit_code() == 0) {
      detail = "without saying that it had finished";
    } else if (detail.empty() && ended.signal() != SIGKILL) {
      detail = LastLine(ended.log_tail());  // a kill from outside leaves no last line of its own
    }
  }
  std::string reason =
      StrCat("rank ", ended.rank(), " on workers/", context.worker, " ", HowItEnded(ended));
  if (!detail.empty()) {
    StrAppend(&reason, ": ", detail);
  }
  rank.set_end_reason(reason);
  return rank;
}

AttemptCause CauseOf(const internal::v1::StoredAttempt& attempt) {
  AttemptCause cause;
  if (attempt.ending()) {
    cause = {.failure = static_cast<FailureClass>(attempt.ending_class()),
             .reason = attempt.ending_reason()};
    if (IsDecision(cause.failure)) {
      return cause;
    }
  }
  for (const internal::v1::StoredRank& rank : attempt.ranks()) {
    const auto failure = static_cast<FailureClass>(rank.end_class());
    if (rank.succeeded() || rank.collateral() || failure == FailureClass::kNone) {
      continue;
    }
    if (cause.failure == FailureClass::kNone || Weight(failure) > Weight(cause.failure)) {
      cause = {.failure = failure, .reason = rank.end_reason()};
    }
  }
  if (cause.failure == FailureClass::kNone) {
    cause = {.failure = FailureClass::kRankExit, .reason = "ranks ended before the last step"};
  }
  return cause;
}

void FinishAttemptIfOver(CoreState& state, JobRecord& job, Now now) {
  const AttemptRecord& attempt = *job.current;
  const auto& ranks = attempt.stored.ranks();
  if (!std::all_of(ranks.begin(), ranks.end(),
                   [](const internal::v1::StoredRank& rank) { return rank.ended(); })) {
    return;
  }
  const bool made_progress =
      attempt.steps_reported ||
      attempt.stored.attempt().last_step() > attempt.stored.attempt().loaded_checkpoint_step();
  if (std::all_of(ranks.begin(), ranks.end(),
                  [](const internal::v1::StoredRank& rank) { return rank.succeeded(); })) {
    CloseAttempt(state, job, FailureClass::kNone, "every rank finished", now);
    Report(state, "succeeded", FailureClass::kNone);
    // The ends of all ranks are evidence of every step, also when the last report was lost.
    job.job().mutable_progress()->set_step(job.spec().train().steps());
    Transition(state, job, JobTrigger::kAllRanksSucceeded,
               StrCat("all ", job.spec().train().steps(), " steps are done"), now);
    return;
  }
  const AttemptCause cause = CauseOf(attempt.stored);
  CloseAttempt(state, job, cause.failure, cause.reason, now);
  if (job.state() == JobState::kCancelling || job.state() == JobState::kSuspending) {
    Report(state, "stopped", cause.failure);
    Transition(state, job, JobTrigger::kRanksGone, job.stored.verb_reason(), now);
    return;
  }
  DecideNext(state, job, cause, made_progress, now);
}

}  // namespace octavo
