#include "controller/core/profiles.h"

#include "proto/convert/error_detail.h"
#include "tests/unit/controller/core/core_harness.h"

namespace octavo {
namespace {

class CoreProfiles : public CoreHarness {
 protected:
  void Train() {
    RunOn2Workers();
    sent_.clear();
  }
  absl::StatusOr<v1::JobProfile> Start(const std::string& name, int steps,
                                       const std::string& request_id = "") {
    auto profile = core_->StartProfile(
        {.name = name, .request_id = request_id, .steps = steps, .caller = "ada"}, now_);
    Settle();
    return profile;
  }
  absl::StatusOr<v1::JobProfile> Read(std::int64_t id = 0) {
    v1::GetProfileRequest request;
    request.set_name("jobs/job");
    request.set_id(id);
    return core_->ReadProfile(request);
  }
  void Answer(const std::string& worker, int rank, std::int64_t id, int entries = 1,
              int attempt = 1) {
    internal::v1::WorkerToController message;
    message.mutable_profile()->set_job_uid(Get("job").uid());
    message.mutable_profile()->set_attempt(attempt);
    v1::RankProfile& profile = *message.mutable_profile()->mutable_profile();
    profile.set_rank(rank);
    profile.set_id(id);
    for (int i = 0; i < entries; ++i) {
      profile.add_entries()->set_op(std::string(100, 'x'));
    }
    Send(worker, message);
  }
};

TEST_F(CoreProfiles, WishesGoToEveryWorkerAndAnswersAreGathered) {
  EXPECT_EQ(Start("nobody", 3).status().code(), absl::StatusCode::kNotFound);
  Train();
  EXPECT_EQ(Read().status().code(), absl::StatusCode::kNotFound);
  const auto asked = Start("job", 3);
  ASSERT_TRUE(asked.ok()) << ToString(asked.status());
  EXPECT_EQ(asked->ranks_expected(), 2);
  for (const char* worker : {"a", "b"}) {
    ASSERT_EQ(sent_[worker].size(), 1u) << worker;
    EXPECT_EQ(sent_[worker][0].profile().wish().id(), asked->id());
    EXPECT_EQ(sent_[worker][0].profile().wish().steps(), 3);
    EXPECT_EQ(sent_[worker][0].profile().attempt(), 1);
  }
  Answer("b", 1, asked->id());
  Answer("b", 1, asked->id());      // twice counts once
  Answer("b", 0, asked->id() - 1);  // of an older wish
  Answer("b", 7, asked->id());      // no such rank
  ASSERT_TRUE(Read().ok());
  EXPECT_EQ(Read()->ranks_size(), 1);
  EXPECT_FALSE(Read()->complete());
  EXPECT_FALSE(Read()->over());
  Answer("a", 0, asked->id());
  const auto done = Read(asked->id());
  ASSERT_TRUE(done.ok());
  EXPECT_TRUE(done->complete());
  ASSERT_EQ(done->ranks_size(), 2);
  EXPECT_EQ(done->ranks(0).rank(), 0);
  EXPECT_EQ(done->ranks(1).rank(), 1);
}

TEST_F(CoreProfiles, OnlyRunningJobsAndSensibleStepCountsAreProfiled) {
  ASSERT_TRUE(Submit(Spec("waits")).ok());
  EXPECT_EQ(ErrorReason(Start("waits", 3).status()), "ILLEGAL_TRANSITION");
  ASSERT_TRUE(Verb(JobVerb::kCancel, "waits").ok());
  Train();
  EXPECT_EQ(Start("job", 0).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Start("job", kProfileStepsMax + 1).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(CoreProfiles, ARepeatedRequestIsTheSameProfileAndANewOneReplacesIt) {
  Train();
  const auto first = Start("job", 3, "request-1");
  const auto again = Start("job", 3, "request-1");
  ASSERT_TRUE(first.ok() && again.ok());
  EXPECT_EQ(first->id(), again->id());
  EXPECT_EQ(sent_["a"].size(), 1u) << "asked once";
  const auto second = Start("job", 2, "request-2");
  ASSERT_TRUE(second.ok());
  EXPECT_GT(second->id(), first->id());
  EXPECT_EQ(Read(first->id()).status().code(), absl::StatusCode::kAborted);
  EXPECT_EQ(ErrorReason(Read(first->id()).status()), "PROFILE_REPLACED");
  EXPECT_EQ(Read(second->id() + 1).status().code(), absl::StatusCode::kNotFound);
}

TEST_F(CoreProfiles, AnEndedAttemptIsSaidToBeOver) {
  Train();
  const auto asked = Start("job", 3);
  ASSERT_TRUE(asked.ok());
  EndAll("a", Killed);
  EndAll("b", Killed);
  ASSERT_TRUE(Read().ok());
  EXPECT_TRUE(Read()->over());
}

TEST_F(CoreProfiles, AnswersBeyondAMessageLoseEntriesOfTheLastRanks) {
  Train();
  const auto asked = Start("job", 1);
  ASSERT_TRUE(asked.ok());
  Answer("a", 0, asked->id(), 20000);
  Answer("b", 1, asked->id(), 20000);
  const auto all = Read();
  ASSERT_TRUE(all.ok());
  EXPECT_LT(all->ByteSizeLong(), 4u << 20);
  EXPECT_EQ(all->ranks(0).entries_size(), 20000);
  EXPECT_TRUE(all->ranks(1).entries_left_out());
  v1::GetProfileRequest request;
  request.set_name("job");
  request.add_ranks(1);
  const auto one = core_->ReadProfile(request);
  ASSERT_TRUE(one.ok());
  ASSERT_EQ(one->ranks_size(), 1);
  EXPECT_EQ(one->ranks(0).entries_size(), 20000);
}

}  // namespace
}  // namespace octavo
