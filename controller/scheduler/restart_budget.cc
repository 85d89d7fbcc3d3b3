#include "controller/scheduler/restart_budget.h"

#include <algorithm>

namespace octavo {

RestartVerdict AfterAttempt(const RestartLimits& limits, const RestartHistory& history,
                            FailureClass failure, bool made_progress) {
  RestartVerdict verdict{.failure = failure, .history = history};
  const std::string name(Name(failure));
  if (!CountsTowardsRestartMax(failure) && Retryable(failure)) {
    verdict.action = RestartAction::kDisplaced;
    verdict.reason =
        name + " does not count as a failure; the next attempt starts when slots are free";
    return verdict;
  }
  ++verdict.history.failures;
  verdict.history.failures_without_progress =
      made_progress ? 0 : history.failures_without_progress + 1;

  if (!Retryable(failure)) {
    verdict.action = RestartAction::kGiveUp;
    verdict.reason = name + " is not tried again: " + std::string(Advice(failure));
    return verdict;
  }
  if (verdict.history.failures > limits.max) {
    verdict.action = RestartAction::kGiveUp;
    verdict.reason = "failure " + std::to_string(verdict.history.failures) +
                     " is beyond restart.max = " + std::to_string(limits.max) + "; the last was " +
                     name;
    return verdict;
  }
  if (verdict.history.failures_without_progress >= limits.max_without_progress) {
    verdict.action = RestartAction::kGiveUp;
    verdict.failure = FailureClass::kNoProgress;
    verdict.reason =
        std::to_string(verdict.history.failures_without_progress) +
        " attempts in a row without one step of progress (restart.max_without_progress = " +
        std::to_string(limits.max_without_progress) + "); the last ended by " + name;
    return verdict;
  }
  verdict.action = RestartAction::kRetry;
  const std::int32_t doublings =
      std::min(std::max(verdict.history.failures_without_progress - 1, 0), 30);
  verdict.wait_seconds =
      std::min(limits.backoff_seconds * (std::int64_t{1} << doublings), kRestartBackoffSecondsMax);
  verdict.reason = "failure " + std::to_string(verdict.history.failures) + " of at most " +
                   std::to_string(limits.max) + " (" + name + "); the next attempt starts in " +
                   std::to_string(verdict.wait_seconds) + " s";
  return verdict;
}

}  // namespace octavo
