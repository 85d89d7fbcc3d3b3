// Jobs from submit to the end, verbs in every state, idempotency, lists and watches.
#include "gmock/gmock.h"
#include "proto/convert/error_detail.h"
#include "tests/unit/controller/core/core_harness.h"

namespace octavo {
namespace {

using testing::HasSubstr;

class CoreJobs : public CoreHarness {};

TEST_F(CoreJobs, RunsFromSubmitToSuccess) {
  Register("a", 1);
  Register("b", 1);
  ASSERT_TRUE(Submit(Spec("job")).ok());
  EXPECT_EQ(Get("jobs/job").state(), v1::STARTING);
  const auto start = sent_["a"];
  StartAll("a", internal::v1::RANK_MEETING);
  StartAll("b", internal::v1::RANK_MEETING);
  EXPECT_EQ(Get("job").state(), v1::STARTING) << "meeting is not training";
  SetPhase("a", internal::v1::RANK_TRAINING);
  EXPECT_EQ(Get("job").state(), v1::STARTING) << "one rank of two";
  SetPhase("b", internal::v1::RANK_TRAINING);
  EXPECT_EQ(Get("job").state(), v1::RUNNING);
  Step("a", 1, 5.5);
  Step("a", 2, 5.0);
  const v1::JobProgress progress = Get("job").progress();
  EXPECT_EQ(progress.step(), 2);
  EXPECT_EQ(progress.first_loss(), 5.5);
  EXPECT_EQ(progress.loss(), 5.0);
  EXPECT_DOUBLE_EQ(progress.tokens_per_second(), 512);
  EXPECT_DOUBLE_EQ(progress.eta_seconds(), 49);
  EndAll("a", Succeeded);
  EXPECT_EQ(Get("job").state(), v1::RUNNING) << "one rank still runs";
  EndAll("b", Succeeded);
  const v1::Job job = Get("job");
  EXPECT_EQ(job.state(), v1::SUCCEEDED);
  ASSERT_EQ(job.attempts_size(), 1);
  EXPECT_EQ(job.attempts(0).last_step(), 2);
  EXPECT_TRUE(job.attempts(0).has_end_time());
}

TEST_F(CoreJobs, StartRankCarriesEverythingARankNeeds) {
  Register("a", 2);
  ASSERT_TRUE(Submit(Spec("job")).ok());
  const auto starts = TakeStarts("a");
  ASSERT_EQ(starts.size(), 2u);
  EXPECT_EQ(starts[1].rank(), 1);
  EXPECT_EQ(starts[1].world_size(), 2);
  EXPECT_EQ(starts[1].attempt(), 1);
  EXPECT_EQ(starts[1].job_name(), "job");
  EXPECT_EQ(starts[1].plan().version(), 1);
  EXPECT_FALSE(starts[1].bind_address().empty());
  EXPECT_EQ(starts[1].peer_workers_size(), 2);
  EXPECT_EQ(starts[1].spec().train().steps(), 100);
}

TEST_F(CoreJobs, SameRequestIdGivesTheSameJobAlsoAfterARestart) {
  const auto first = Submit(Spec("job"), "req-1");
  ASSERT_TRUE(first.ok());
  const auto again = Submit(Spec("job"), "req-1");
  ASSERT_TRUE(again.ok());
  EXPECT_EQ(first->uid(), again->uid());
  Restart();
  const auto after = Submit(Spec("job"), "req-1");
  ASSERT_TRUE(after.ok()) << ToString(after.status());
  EXPECT_EQ(first->uid(), after->uid());
  EXPECT_EQ(core_->List({})->jobs_size(), 1);
}

TEST_F(CoreJobs, ARequestIdWithOtherContentIsAnError) {
  ASSERT_TRUE(Submit(Spec("job"), "req-1").ok());
  const auto other = Submit(Spec("other"), "req-1");
  EXPECT_EQ(other.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ErrorReason(other.status()), "REQUEST_ID_REUSED");
}

TEST_F(CoreJobs, ANameIsTakenWhileItsJobLivesAndFreeAfterwards) {
  ASSERT_TRUE(Submit(Spec("job")).ok());
  const auto taken = Submit(Spec("job"));
  EXPECT_EQ(taken.status().code(), absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(ErrorReason(taken.status()), "JOB_NAME_TAKEN");
  ASSERT_TRUE(Verb(JobVerb::kCancel, "job").ok());
  const auto second = Submit(Spec("job"));
  ASSERT_TRUE(second.ok());
  EXPECT_EQ(Get("job").uid(), second->uid());
  EXPECT_EQ(core_->List({})->jobs_size(), 2);
}

TEST_F(CoreJobs, ValidateOnlyChangesNothing) {
  const auto dry = core_->Submit({.spec = Spec("job"), .validate_only = true}, now_);
  ASSERT_TRUE(dry.ok());
  EXPECT_TRUE(dry->uid().empty());
  EXPECT_TRUE(core_->TakeBatch().empty());
  EXPECT_EQ(core_->Get("job").status().code(), absl::StatusCode::kNotFound);
}

TEST_F(CoreJobs, AnUnknownNameSuggestsANearOne) {
  ASSERT_TRUE(Submit(Spec("moe-small")).ok());
  const auto missing = core_->Get("jobs/moe-smal");
  EXPECT_EQ(ErrorReason(missing.status()), "JOB_NOT_FOUND");
  EXPECT_THAT(Message(missing.status()), HasSubstr("moe-small"));
}

TEST_F(CoreJobs, AWaitingJobAlwaysHasAReason) {
  ASSERT_TRUE(Submit(Spec("job")).ok());
  EXPECT_EQ(Get("job").pending().reason(), v1::NO_WORKERS);
  Register("a", 1);
  EXPECT_EQ(Get("job").pending().reason(), v1::EXCEEDS_CLUSTER);
  EXPECT_EQ(Get("job").pending().slots_largest_possible(), 1);
  Register("b", 1);
  EXPECT_EQ(Get("job").state(), v1::STARTING);
  EXPECT_FALSE(Get("job").has_pending());
  ASSERT_TRUE(Submit(Spec("second", 1)).ok());
  EXPECT_EQ(Get("second").pending().reason(), v1::WAITING_FOR_SLOTS);
}

TEST_F(CoreJobs, CancelsInEveryLiveState) {
  // PENDING
  ASSERT_TRUE(Submit(Spec("job")).ok());
  ASSERT_TRUE(Verb(JobVerb::kCancel, "job").ok());
  EXPECT_EQ(Get("job").state(), v1::CANCELLED);
  // STARTING
  Register("a", 1);
  Register("b", 1);
  ASSERT_TRUE(Submit(Spec("job")).ok());
  StartAll("a", internal::v1::RANK_MEETING);
  StartAll("b", internal::v1::RANK_MEETING);
  ASSERT_TRUE(Verb(JobVerb::kCancel, "job").ok());
  EXPECT_EQ(Get("job").state(), v1::CANCELLING);
  const auto stops = TakeStops("a");
  ASSERT_EQ(stops.size(), 1u);
  EXPECT_TRUE(stops[0].wishes().stop());
  EXPECT_EQ(stops[0].grace_ms(), kRankStopGraceMs);
  EndAll("a", Stopped);
  EXPECT_EQ(Get("job").state(), v1::CANCELLING) << "rank 1 still runs";
  EndAll("b", Stopped);
  EXPECT_EQ(Get("job").state(), v1::CANCELLED);
  // RUNNING
  RunOn2Workers("two");
  ASSERT_TRUE(Verb(JobVerb::kCancel, "two").ok());
  EndAll("a", Stopped);
  EndAll("b", Killed);
  EXPECT_EQ(Get("two").state(), v1::CANCELLED);
  // SUSPENDED
  RunOn2Workers("three");
  ASSERT_TRUE(Verb(JobVerb::kSuspend, "three").ok());
  EXPECT_EQ(Get("three").state(), v1::SUSPENDING);
  EndAll("a", Suspended);
  EndAll("b", Suspended);
  EXPECT_EQ(Get("three").state(), v1::SUSPENDED);
  EXPECT_EQ(Get("three").progress().phase(), "") << "no rank is left to be in one";
  ASSERT_TRUE(Verb(JobVerb::kCancel, "three").ok());
  EXPECT_EQ(Get("three").state(), v1::CANCELLED);
  // SUSPENDING
  RunOn2Workers("four");
  ASSERT_TRUE(Verb(JobVerb::kSuspend, "four").ok());
  ASSERT_TRUE(Verb(JobVerb::kCancel, "four").ok());
  EndAll("a", Stopped);
  EndAll("b", Stopped);
  EXPECT_EQ(Get("four").state(), v1::CANCELLED);
  // RESTARTING
  RunOn2Workers("five");
  EndAll("a", Killed);
  EndAll("b", Killed);
  EXPECT_EQ(Get("five").state(), v1::RESTARTING);
  ASSERT_TRUE(Verb(JobVerb::kCancel, "five").ok());
  EXPECT_EQ(Get("five").state(), v1::CANCELLED);
  // Terminal: refused by name, and nothing changes.
  const auto again = Verb(JobVerb::kCancel, "five");
  EXPECT_EQ(again.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(ErrorReason(again.status()), "ILLEGAL_TRANSITION");
}

TEST_F(CoreJobs, AJobThatFinishedBeforeTheCancelArrivedHasSucceeded) {
  RunOn2Workers();
  ASSERT_TRUE(Verb(JobVerb::kCancel, "job").ok());
  EndAll("a", Succeeded);
  EndAll("b", Succeeded);
  EXPECT_EQ(Get("job").state(), v1::SUCCEEDED);
}

TEST_F(CoreJobs, ResumesASuspendedJobAsANewAttempt) {
  RunOn2Workers();
  ASSERT_TRUE(Verb(JobVerb::kSuspend, "job").ok());
  EXPECT_TRUE(TakeStops("a").at(0).wishes().suspend());
  EndAll("a", Suspended);
  EndAll("b", Suspended);
  ASSERT_TRUE(Verb(JobVerb::kResume, "job").ok());
  EXPECT_EQ(Get("job").state(), v1::STARTING);
  EXPECT_EQ(TakeStarts("a").at(0).attempt(), 2);
  EXPECT_EQ(Get("job").restarts(), 0);
}

TEST_F(CoreJobs, ARankThatHangsDoesNotHoldASuspendedJobsSlots) {
  RunOn2Workers();
  ASSERT_TRUE(Verb(JobVerb::kSuspend, "job").ok());
  const std::int64_t saving_ms = TakeStops("a").at(0).grace_ms();
  EXPECT_GT(saving_ms, kRankStopGraceMs) << "a checkpoint takes time";
  EXPECT_EQ(TakeStops("b").at(0).grace_ms(), saving_ms);
  // The rank on a waited for the one on b, which says nothing: no checkpoint can come of it.
  EndAll("a", [](internal::v1::RankEnded& ended) {
    ended.set_exit_code(1);
    ended.mutable_outcome()->set_failure_class(v1::COLLECTIVE_TIMEOUT);
    ended.mutable_outcome()->set_message("no data from rank 1 within 8.0 s");
  });
  EXPECT_EQ(Get("job").state(), v1::SUSPENDING);
  const auto again = TakeStops("b");
  ASSERT_EQ(again.size(), 1u);
  EXPECT_EQ(again[0].grace_ms(), kRankStopGraceMs);
  EndAll("b", Killed);
  EXPECT_EQ(Get("job").state(), v1::SUSPENDED);
  ASSERT_TRUE(Verb(JobVerb::kResume, "job").ok());
}

TEST_F(CoreJobs, RanksThatSaveAndStopInOrderKeepTheirTime) {
  RunOn2Workers();
  ASSERT_TRUE(Verb(JobVerb::kSuspend, "job").ok());
  TakeStops("b");
  EndAll("a", Suspended);
  EXPECT_TRUE(TakeStops("b").empty());
}

TEST_F(CoreJobs, AStaleEtagIsRefused) {
  const auto job = Submit(Spec("job"));
  ASSERT_TRUE(job.ok());
  Register("a", 2);  // starts it: the etag moves on
  const auto stale = core_->Verb(JobVerb::kCancel, {.name = "job", .etag = job->etag()}, now_);
  EXPECT_EQ(stale.status().code(), absl::StatusCode::kAborted);
  EXPECT_EQ(ErrorReason(stale.status()), "STALE_ETAG");
  EXPECT_TRUE(core_->Verb(JobVerb::kCancel, {.name = "job", .etag = Get("job").etag()}, now_).ok());
}

TEST_F(CoreJobs, CheckpointIsAWishToEveryWorkerAndOnlyWhileRunning) {
  ASSERT_TRUE(Submit(Spec("early")).ok());
  EXPECT_EQ(Verb(JobVerb::kCheckpoint, "early").status().code(),
            absl::StatusCode::kFailedPrecondition);
  ASSERT_TRUE(Verb(JobVerb::kCancel, "early").ok());
  RunOn2Workers();
  sent_.clear();
  ASSERT_TRUE(Verb(JobVerb::kCheckpoint, "job").ok());
  for (const char* worker : {"a", "b"}) {
    ASSERT_EQ(sent_[worker].size(), 1u);
    EXPECT_TRUE(sent_[worker][0].wishes().wishes().checkpoint());
  }
  internal::v1::ReliableReport report;
  report.mutable_checkpoint()->set_job_uid(Get("job").uid());
  report.mutable_checkpoint()->set_attempt(1);
  report.mutable_checkpoint()->mutable_done()->set_ok(true);
  report.mutable_checkpoint()->mutable_done()->set_step(7);
  report.mutable_checkpoint()->mutable_done()->set_path("/ckpt/job/7");
  Reliable("a", report);
  EXPECT_EQ(Get("job").progress().checkpoint_step(), 7);
}

TEST_F(CoreJobs, PagesNeitherSkipNorRepeatWhenJobsEnd) {
  for (int i = 0; i < 7; ++i) {
    ASSERT_TRUE(Submit(Spec(StrCat("job-", i))).ok());
    Advance(1);
  }
  std::vector<std::string> seen;
  v1::ListJobsRequest request;
  request.set_page_size(3);
  while (true) {
    const auto page = core_->List(request);
    ASSERT_TRUE(page.ok());
    for (const v1::Job& job : page->jobs()) {
      seen.push_back(job.spec().name());
    }
    if (page->next_page_token().empty()) {
      break;
    }
    request.set_page_token(page->next_page_token());
    ASSERT_TRUE(Verb(JobVerb::kCancel, "job-3").ok() || seen.size() > 3);
  }
  EXPECT_EQ(seen, (std::vector<std::string>{"job-6", "job-5", "job-4", "job-3", "job-2", "job-1",
                                            "job-0"}));
  request.set_page_token("nonsense");
  EXPECT_EQ(ErrorReason(core_->List(request).status()), "PAGE_TOKEN_INVALID");
  request.set_page_token("");
  request.set_page_size(-1);
  EXPECT_EQ(core_->List(request).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(CoreJobs, OldEndedJobsLeaveTheStore) {
  options_.ended_jobs_kept = 2;
  Restart();
  for (int i = 0; i < 4; ++i) {
    ASSERT_TRUE(Submit(Spec(StrCat("job-", i))).ok());
    Advance(1);
    ASSERT_TRUE(Verb(JobVerb::kCancel, StrCat("job-", i)).ok());
  }
  EXPECT_EQ(core_->List({})->jobs_size(), 2);
  EXPECT_EQ(store_.Load()->jobs.size(), 2u);
  EXPECT_EQ(core_->Get("job-0").status().code(), absl::StatusCode::kNotFound);
}

TEST_F(CoreJobs, AWatchGetsWhatItMissedThenWhatFollows) {
  Register("a", 1);
  Register("b", 1);
  ASSERT_TRUE(Submit(Spec("job")).ok());
  v1::WatchJobRequest request;
  request.set_name("job");
  auto fresh = core_->Watch(request, now_);
  ASSERT_TRUE(fresh.ok());
  ASSERT_EQ(fresh->backlog.size(), 1u);
  EXPECT_EQ(fresh->backlog[0].kind(), "SNAPSHOT");
  EXPECT_EQ(fresh->backlog[0].snapshot().state(), v1::STARTING);
  const std::int64_t seen = fresh->revision;
  StartAll("a", internal::v1::RANK_TRAINING);
  StartAll("b", internal::v1::RANK_TRAINING);
  Step("a", 1);
  ASSERT_FALSE(published_.empty());
  std::int64_t last = 0;
  for (const v1::JobEvent& event : published_) {
    EXPECT_GE(event.revision(), last);
    last = event.revision();
  }
  EXPECT_EQ(published_.back().kind(), "PROGRESS");
  EXPECT_EQ(published_.back().snapshot().progress().step(), 1);
  request.set_resume_token(seen);
  const auto resumed = core_->Watch(request, now_);
  ASSERT_TRUE(resumed.ok());
  EXPECT_GT(resumed->backlog.front().revision(), seen);
  EXPECT_EQ(resumed->backlog.back().kind(), "SNAPSHOT");
  EXPECT_EQ(resumed->backlog.back().snapshot().state(), v1::RUNNING);
}

TEST_F(CoreJobs, ATokenOfAnotherStoreIsOutOfRange) {
  ASSERT_TRUE(Submit(Spec("job")).ok());
  v1::WatchJobRequest request;
  request.set_name("job");
  request.set_resume_token(1 << 20);
  EXPECT_EQ(core_->Watch(request, now_).status().code(), absl::StatusCode::kOutOfRange);
}

TEST_F(CoreJobs, RevisionsGrowByOneAndHistoryTellsTheStory) {
  RunOn2Workers();
  EndAll("a", Succeeded);
  EndAll("b", Succeeded);
  EXPECT_EQ(Kinds("job"),
            (std::vector<std::string>{"SUBMITTED", "STATE", "STATE", "RANK", "RANK", "STATE"}));
}

}  // namespace
}  // namespace octavo
