#include "controller/scheduler/explain.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace octavo {
namespace {

using testing::HasSubstr;

WorkerView Worker(const std::string& name, std::int32_t slots, std::int32_t busy = 0) {
  WorkerView worker{.name = name, .usable_slots = slots};
  for (std::int32_t slot = busy; slot < slots; ++slot) {
    worker.free_slots.push_back(slot);
  }
  return worker;
}

WaitingJob Job(const std::string& uid, std::int32_t ranks, std::int32_t priority = 0,
               std::int64_t submitted = 0) {
  return {.key = {.priority = priority, .submit_micros = submitted, .uid = uid},
          .name = "jobs/" + uid,
          .gang = {.ranks = ranks, .expert_parallel = 1}};
}

TEST(SchedulePass, SaysThatThereAreNoWorkers) {
  const auto decisions = SchedulePass({}, {Job("a", 2)});
  ASSERT_EQ(decisions.size(), 1u);
  EXPECT_EQ(decisions[0].pending.reason, PendingReason::kNoWorkers);
  EXPECT_EQ(decisions[0].pending.slots_needed, 2);
}

TEST(SchedulePass, SaysThatTheJobIsLargerThanTheCluster) {
  const auto decisions = SchedulePass({{Worker("w", 2)}}, {Job("a", 3)});
  EXPECT_EQ(decisions[0].pending.reason, PendingReason::kExceedsCluster);
  EXPECT_EQ(decisions[0].pending.slots_free, 2);
  EXPECT_EQ(decisions[0].pending.slots_largest_possible, 2);
  EXPECT_THAT(decisions[0].pending.sentence, HasSubstr("needs 3"));
}

TEST(SchedulePass, SaysThatDrainingWorkersWouldMakeRoom) {
  ClusterView cluster{{Worker("w", 2), Worker("d", 2)}};
  cluster.workers[1].condition = WorkerCondition::kDraining;
  const auto decisions = SchedulePass(cluster, {Job("a", 3)});
  EXPECT_EQ(decisions[0].pending.reason, PendingReason::kWorkersDraining);
}

TEST(SchedulePass, SaysThatNoWorkerHasTheDeviceAndWhy) {
  WaitingJob job = Job("a", 1);
  job.gang.cuda = true;
  const auto decisions = SchedulePass({{Worker("w", 2)}}, {job});
  EXPECT_EQ(decisions[0].pending.reason, PendingReason::kNoMatchingDevice);
  EXPECT_THAT(decisions[0].pending.sentence, HasSubstr("the worker has cpu"));
}

TEST(SchedulePass, WaitsForSlotsThatOthersUse) {
  const auto decisions = SchedulePass({{Worker("w", 4, 3)}}, {Job("a", 2)});
  EXPECT_EQ(decisions[0].pending.reason, PendingReason::kWaitingForSlots);
  EXPECT_EQ(decisions[0].pending.slots_free, 1);
  EXPECT_EQ(decisions[0].pending.slots_largest_possible, 4);
}

TEST(SchedulePass, HigherPriorityGoesFirstAndALaterSmallJobDoesNotOvertake) {
  // 2 of 4 slots are free: `large` cannot start, and `small` must not take its slots.
  const auto decisions =
      SchedulePass({{Worker("w", 4, 2)}}, {Job("small", 1, 0, 1), Job("large", 4, 5, 2)});
  ASSERT_EQ(decisions.size(), 2u);
  EXPECT_EQ(decisions[0].uid, "large");
  EXPECT_EQ(decisions[0].pending.reason, PendingReason::kWaitingForSlots);
  EXPECT_EQ(decisions[1].uid, "small");
  EXPECT_EQ(decisions[1].pending.reason, PendingReason::kBehindHigherPriority);
  EXPECT_THAT(decisions[1].pending.sentence, HasSubstr("jobs/large"));
}

TEST(SchedulePass, AJobThatCanNeverRunBlocksNobody) {
  const auto decisions = SchedulePass({{Worker("w", 2)}}, {Job("huge", 99, 9), Job("small", 2, 0)});
  EXPECT_TRUE(decisions[0].placement.empty());
  EXPECT_EQ(decisions[1].placement.size(), 2u);
}

TEST(SchedulePass, AJobInBackOffHoldsNobodyUpAndIsServedFirstAfterwards) {
  WaitingJob restarting = Job("restarting", 2, 0, 1);
  restarting.backoff_seconds = 5;
  const std::vector<WaitingJob> both = {restarting, Job("later", 2, 0, 2)};
  const auto during = SchedulePass({{Worker("w", 3)}}, both);
  EXPECT_EQ(during[0].pending.reason, PendingReason::kRestartBackoff);
  EXPECT_THAT(during[0].pending.sentence, HasSubstr("5 s"));
  EXPECT_EQ(during[1].uid, "later");
  EXPECT_EQ(during[1].placement.size(), 2u);

  restarting.backoff_seconds = 0;
  const auto after = SchedulePass({{Worker("w", 3)}}, {restarting, Job("later", 2, 0, 2)});
  EXPECT_EQ(after[0].placement.size(), 2u);
  EXPECT_TRUE(after[1].placement.empty());

  // Slots that are too few keep it waiting as before, and now it holds the later ones up.
  const auto full = SchedulePass({{Worker("w", 3, 2)}}, {restarting, Job("later", 1, 0, 2)});
  EXPECT_EQ(full[0].pending.reason, PendingReason::kWaitingForSlots);
  EXPECT_EQ(full[1].pending.reason, PendingReason::kBehindHigherPriority);
}

TEST(SchedulePass, NamesRanksOfThePreviousAttemptThatStillHoldSlots) {
  WaitingJob job = Job("a", 2);
  job.previous_ranks_left = 1;
  const auto decisions = SchedulePass({{Worker("w", 2, 1)}}, {job});
  EXPECT_EQ(decisions[0].pending.reason, PendingReason::kWaitingForPreviousAttempt);
}

TEST(SchedulePass, EqualPrioritiesAreServedInTheOrderOfSubmission) {
  const auto decisions = SchedulePass({{Worker("w", 1)}},
                                      {Job("b", 1, 0, 20), Job("a", 1, 0, 10), Job("c", 1, 0, 30)});
  EXPECT_EQ(decisions[0].uid, "a");
  EXPECT_EQ(decisions[0].placement.size(), 1u);
  EXPECT_TRUE(decisions[1].placement.empty());
  EXPECT_TRUE(decisions[2].placement.empty());
}

}  // namespace
}  // namespace octavo
