#include "controller/scheduler/restart_budget.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace octavo {
namespace {

constexpr RestartLimits kLimits{.max = 5, .max_without_progress = 3, .backoff_seconds = 5};

TEST(RestartBudget, RetriesAFailureAndCountsIt) {
  const RestartVerdict verdict = AfterAttempt(kLimits, {}, FailureClass::kRankExit, true);
  EXPECT_EQ(verdict.action, RestartAction::kRetry);
  EXPECT_EQ(verdict.history, (RestartHistory{.failures = 1, .failures_without_progress = 0}));
  EXPECT_EQ(verdict.wait_seconds, 5);
}

TEST(RestartBudget, DrainAndPreemptionDoNotCount) {
  const RestartHistory history{.failures = 5, .failures_without_progress = 2};
  for (const FailureClass decision : {FailureClass::kDrained, FailureClass::kPreempted}) {
    const RestartVerdict verdict = AfterAttempt(kLimits, history, decision, false);
    EXPECT_EQ(verdict.action, RestartAction::kDisplaced);
    EXPECT_EQ(verdict.history, history);
  }
}

TEST(RestartBudget, EndsBeyondMax) {
  const RestartVerdict verdict =
      AfterAttempt(kLimits, {.failures = 5}, FailureClass::kWorkerLost, true);
  EXPECT_EQ(verdict.action, RestartAction::kGiveUp);
  EXPECT_EQ(verdict.failure, FailureClass::kWorkerLost);
  EXPECT_THAT(verdict.reason, testing::HasSubstr("restart.max = 5"));
}

TEST(RestartBudget, MaxZeroEndsAtTheFirstFailure) {
  EXPECT_EQ(AfterAttempt({.max = 0}, {}, FailureClass::kRankExit, true).action,
            RestartAction::kGiveUp);
}

TEST(RestartBudget, EndsWithoutProgress) {
  RestartHistory history;
  for (int attempt = 1; attempt <= 3; ++attempt) {
    const RestartVerdict verdict = AfterAttempt(kLimits, history, FailureClass::kRankExit, false);
    history = verdict.history;
    if (attempt < 3) {
      EXPECT_EQ(verdict.action, RestartAction::kRetry);
      EXPECT_EQ(verdict.wait_seconds, attempt == 1 ? 5 : 10) << "doubled each time";
    } else {
      EXPECT_EQ(verdict.action, RestartAction::kGiveUp);
      EXPECT_EQ(verdict.failure, FailureClass::kNoProgress);
    }
  }
}

TEST(RestartBudget, OneStepOfProgressStartsTheCountAgain) {
  const RestartVerdict verdict = AfterAttempt(
      kLimits, {.failures = 2, .failures_without_progress = 2}, FailureClass::kRankExit, true);
  EXPECT_EQ(verdict.action, RestartAction::kRetry);
  EXPECT_EQ(verdict.history.failures_without_progress, 0);
}

TEST(RestartBudget, ClassesThatCannotHelpAreNotTriedAgain) {
  for (const FailureClass failure : {FailureClass::kRankOom, FailureClass::kNumericFailure}) {
    const RestartVerdict verdict = AfterAttempt(kLimits, {}, failure, true);
    EXPECT_EQ(verdict.action, RestartAction::kGiveUp);
    EXPECT_EQ(verdict.failure, failure);
  }
}

TEST(RestartBudget, TheWaitHasACap) {
  const RestartLimits limits{.max = 1000, .max_without_progress = 100, .backoff_seconds = 3600};
  EXPECT_EQ(AfterAttempt(limits, {.failures_without_progress = 60}, FailureClass::kRankExit, false)
                .wait_seconds,
            kRestartBackoffSecondsMax);
}

}  // namespace
}  // namespace octavo
