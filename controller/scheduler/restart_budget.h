// What happens after an attempt has ended by a failure: another attempt after a wait, or the end of
// the job. Pure: the class and the history decide, never the text of a message.
//
// Two budgets. `max` counts real failures over the job's life (preemption, drain, suspension do not
// count). `max_without_progress` counts attempts in a row that did not complete one step: ten
// restarts in a month are fine, three crashes before the first step are not.
#pragma once

#include <cstdint>
#include <string>

#include "proto/jobs/failure_class.h"

namespace octavo {

struct RestartLimits {
  std::int32_t max = 5;
  std::int32_t max_without_progress = 3;
  std::int64_t backoff_seconds = 5;
};
inline constexpr std::int64_t kRestartBackoffSecondsMax = 300;

struct RestartHistory {
  std::int32_t failures = 0;                   // real ones, counted towards `max`
  std::int32_t failures_without_progress = 0;  // in a row, the newest included

  friend bool operator==(const RestartHistory&, const RestartHistory&) = default;
};

enum class RestartAction { kRetry, kDisplaced, kGiveUp };

struct RestartVerdict {
  RestartAction action = RestartAction::kRetry;
  FailureClass failure = FailureClass::kNone;  // kGiveUp: the class the job fails with
  std::int64_t wait_seconds = 0;               // kRetry
  std::string reason;                          // a sentence with the numbers
  RestartHistory history;                      // after this attempt
};

// `made_progress`: the attempt completed at least one step.
// The wait doubles with every failure in a row without progress, from backoff_seconds up to
// kRestartBackoffSecondsMax.
RestartVerdict AfterAttempt(const RestartLimits& limits, const RestartHistory& history,
                            FailureClass failure, bool made_progress);

}  // namespace octavo
