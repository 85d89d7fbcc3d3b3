#include "proto/jobs/job_state.h"

#include <gtest/gtest.h>

#include <random>
#include <set>

#include "proto/jobs/failure_class.h"
#include "proto/jobs/pending_reason.h"

namespace octavo {
namespace {

TEST(JobStateTest, TheStraightLifeEndsInSucceeded) {
  JobState state = JobState::kPending;
  for (JobTrigger trigger :
       {JobTrigger::kAttemptStarted, JobTrigger::kTrainingBegan, JobTrigger::kAttemptFailed,
        JobTrigger::kAttemptStarted, JobTrigger::kTrainingBegan, JobTrigger::kSuspendRequested,
        JobTrigger::kRanksGone, JobTrigger::kResumeRequested, JobTrigger::kAttemptStarted,
        JobTrigger::kAllRanksSucceeded}) {
    const std::optional<JobState> next = NextState(state, trigger);
    ASSERT_TRUE(next.has_value()) << Name(state) << " + " << Name(trigger);
    state = *next;
  }
  EXPECT_EQ(state, JobState::kSucceeded);
}

TEST(JobStateTest, NothingLeavesATerminalState) {
  for (JobState state : {JobState::kSucceeded, JobState::kFailed, JobState::kCancelled}) {
    for (std::size_t i = 0; i < kJobTriggerCount; ++i) {
      EXPECT_EQ(NextState(state, static_cast<JobTrigger>(i)), std::nullopt);
    }
  }
}

TEST(JobStateTest, AWishAloneNeverEndsAJob) {
  for (JobState state : kJobStates) {
    for (JobTrigger wish : {JobTrigger::kSuspendRequested, JobTrigger::kResumeRequested,
                            JobTrigger::kCancelRequested, JobTrigger::kAttemptStarted}) {
      const std::optional<JobState> next = NextState(state, wish);
      EXPECT_FALSE(next.has_value() && IsTerminal(*next)) << Name(state) << " " << Name(wish);
    }
  }
}

// Two rows pair checks that the table itself cannot: a job that is being cancelled never goes back
// to running, and a suspended one only by resume.
TEST(JobStateTest, RandomWalksNeverUncancel) {
  const unsigned seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 rng(seed);
  for (int walk = 0; walk < 2000; ++walk) {
    JobState state = JobState::kPending;
    bool cancelled = false;
    for (int i = 0; i < 40; ++i) {
      const auto trigger = static_cast<JobTrigger>(rng() % kJobTriggerCount);
      const JobState before = state;
      state = NextState(state, trigger).value_or(state);
      cancelled = cancelled || state == JobState::kCancelling;
      if (cancelled) {
        EXPECT_TRUE(state == JobState::kCancelling || state == JobState::kCancelled ||
                    state == JobState::kSucceeded);
      }
      if (before == JobState::kSuspended && state == JobState::kPending) {
        EXPECT_EQ(trigger, JobTrigger::kResumeRequested);
      }
    }
  }
}

TEST(JobStateTest, NamesRoundTripAndAreUnique) {
  std::set<std::string_view> names;
  for (JobState state : kJobStates) {
    EXPECT_EQ(ParseJobState(Name(state)), state);
    names.insert(Name(state));
  }
  EXPECT_EQ(names.size(), kJobStateCount);
  EXPECT_EQ(ParseJobState("running"), std::nullopt);
}

TEST(JobStateTest, AnIllegalWishSaysWhatIsPossible) {
  EXPECT_EQ(IllegalTransition(JobState::kRunning, JobTrigger::kResumeRequested),
            "cannot resume: the job is RUNNING; possible now: suspend, cancel");
  EXPECT_EQ(IllegalTransition(JobState::kSucceeded, JobTrigger::kCancelRequested),
            "cannot cancel: the job is SUCCEEDED; possible now: nothing");
  EXPECT_EQ(IllegalTransition(JobState::kCancelling, JobTrigger::kSuspendRequested),
            "cannot suspend: the job is CANCELLING; possible now: nothing");
}

TEST(FailureClassTest, OnlyRealFailuresSpendTheBudget) {
  EXPECT_TRUE(CountsTowardsRestartMax(FailureClass::kRankExit));
  EXPECT_TRUE(CountsTowardsRestartMax(FailureClass::kWorkerLost));
  EXPECT_FALSE(CountsTowardsRestartMax(FailureClass::kPreempted));
  EXPECT_FALSE(CountsTowardsRestartMax(FailureClass::kDrained));
  EXPECT_TRUE(Retryable(FailureClass::kDrained));
  EXPECT_FALSE(Retryable(FailureClass::kRankOom));
  EXPECT_FALSE(Retryable(FailureClass::kNumericFailure));
  EXPECT_FALSE(Retryable(FailureClass::kCancelledByUser));
}

TEST(FailureClassTest, NamesRoundTrip) {
  for (std::size_t i = 0; i < kFailureClassCount; ++i) {
    const auto failure = static_cast<FailureClass>(i);
    EXPECT_EQ(ParseFailureClass(Name(failure)), failure);
  }
  EXPECT_EQ(ParseFailureClass("OOM"), std::nullopt);
}

TEST(PendingReasonTest, EverySentenceCarriesTheThreeNumbers) {
  for (int i = 1; i <= 8; ++i) {
    const std::string text = Sentence(static_cast<PendingReason>(i), {.slots_needed = 71,
                                                                      .slots_free = 52,
                                                                      .slots_largest_possible = 63,
                                                                      .other_job = "jobs/first"});
    EXPECT_NE(text.find("71"), std::string::npos) << text;
    EXPECT_NE(text.find("52"), std::string::npos) << text;
    EXPECT_NE(text.find("63"), std::string::npos) << text;
  }
}

TEST(PendingReasonTest, TheSentenceNamesTheJobAhead) {
  EXPECT_EQ(Sentence(PendingReason::kBehindHigherPriority, {.slots_needed = 4,
                                                            .slots_free = 2,
                                                            .slots_largest_possible = 4,
                                                            .device = "cuda",
                                                            .other_job = "jobs/big"}),
            "behind jobs/big, which goes first: needs 4 cuda slots; free now 2, at most 4");
}

}  // namespace
}  // namespace octavo
