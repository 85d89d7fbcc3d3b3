// The core's thread: order, group commit, and nothing released that is not stored.
#include "controller/core/mailbox.h"

#include <algorithm>
#include <atomic>
#include <future>
#include <thread>

#include "base/status.h"
#include "controller/store/memory_store.h"
#include "gtest/gtest.h"
#include "proto/spec/job_spec.h"

namespace octavo {
namespace {

class RecordingSink final : public EffectSink {
 public:
  void Deliver(Effects effects) override { effects_ += static_cast<int>(effects.size()); }
  void Observe(const Census&) override { ++censuses_; }
  void ObserveCommitSeconds(double) override { ++commits_; }
  void ObservePassSeconds(double) override {}
  void StoreBroken(const absl::Status& status) override { broken_.set_value(status); }

  std::atomic<int> effects_{0}, censuses_{0}, commits_{0};
  std::promise<absl::Status> broken_;
};

class MailboxTest : public testing::Test {
 protected:
  MailboxTest() : core_(CoreOptions(), &store_, nullptr) {
    EXPECT_TRUE(core_.Recover({1, 1}).ok());
  }
  static v1::JobSpec Spec(const std::string& name) {
    v1::JobSpec spec;
    spec.set_name(name);
    spec.mutable_model()->set_layers(1);
    spec.mutable_parallel()->set_ranks(1);
    spec.mutable_precision()->set_recipe("bf16");
    return spec;
  }
  // Submits and returns what the release was told.
  std::future<absl::Status> Submit(Mailbox& mailbox, const std::string& name) {
    auto told = std::make_shared<std::promise<absl::Status>>();
    std::future<absl::Status> future = told->get_future();
    EXPECT_TRUE(mailbox.Post([this, told, name](Core& core, Now now) {
      EXPECT_TRUE(core.Submit({.spec = Spec(name)}, now).ok());
      return Mailbox::Release([this, told, name](const absl::Status& stored) {
        if (stored.ok()) {
          // The answer leaves after the commit.
          EXPECT_GE(store_.Load()->jobs.size(), 1u);
        }
        told->set_value(stored);
      });
    }));
    return future;
  }
  static constexpr auto kSoon = std::chrono::seconds(10);

  MemoryStore store_;
  Core core_;
  RecordingSink sink_;
};

TEST_F(MailboxTest, ReleasesAfterTheCommit) {
  Mailbox mailbox({}, &core_, &store_, &RealClock::Get(), &sink_);
  mailbox.Start();
  auto told = Submit(mailbox, "a");
  ASSERT_EQ(told.wait_for(kSoon), std::future_status::ready);
  EXPECT_TRUE(told.get().ok());
  mailbox.Stop();
}

TEST_F(MailboxTest, EventsThatWaitShareOneCommit) {
  Mailbox mailbox({}, &core_, &store_, &RealClock::Get(), &sink_);
  std::vector<std::future<absl::Status>> told;
  for (int i = 0; i < 100; ++i) {
    told.push_back(Submit(mailbox, "job-" + std::to_string(i)));
  }
  mailbox.Start();
  for (auto& future : told) {
    ASSERT_EQ(future.wait_for(kSoon), std::future_status::ready);
    EXPECT_TRUE(future.get().ok());
  }
  mailbox.Stop();
  EXPECT_EQ(store_.commits(), 2) << "the submits, and the reasons why the jobs wait";
}

TEST_F(MailboxTest, EventsRunInOrderAndStopRunsWhatIsQueued) {
  Mailbox mailbox({}, &core_, &store_, &RealClock::Get(), &sink_);
  std::vector<int> order;
  for (int i = 0; i < 1000; ++i) {
    ASSERT_TRUE(mailbox.Post([&order, i](Core&, Now) {
      order.push_back(i);
      return Mailbox::Release();
    }));
  }
  mailbox.Start();
  mailbox.Stop();
  ASSERT_EQ(order.size(), 1000u);
  EXPECT_TRUE(std::is_sorted(order.begin(), order.end()));
  EXPECT_FALSE(mailbox.Post([](Core&, Now) { return Mailbox::Release(); })) << "closed";
}

TEST_F(MailboxTest, AFullQueueRefuses) {
  Mailbox mailbox({.capacity = 2}, &core_, &store_, &RealClock::Get(), &sink_);
  const auto nothing = [](Core&, Now) { return Mailbox::Release(); };
  EXPECT_TRUE(mailbox.Post(nothing));
  EXPECT_TRUE(mailbox.Post(nothing));
  EXPECT_FALSE(mailbox.Post(nothing));
  EXPECT_EQ(mailbox.refused(), 1);
}

TEST_F(MailboxTest, ACommitThatFailsForAWhileOnlyDelaysTheAnswer) {
  Mailbox mailbox({}, &core_, &store_, &RealClock::Get(), &sink_);
  store_.FailCommits(ResourceExhaustedError("disk full"));
  auto told = Submit(mailbox, "a");
  mailbox.Start();
  const auto deadline = std::chrono::steady_clock::now() + kSoon;
  while (mailbox.store_healthy()) {
    ASSERT_LT(std::chrono::steady_clock::now(), deadline) << "waited for the failed commit";
    std::this_thread::yield();
  }
  EXPECT_EQ(sink_.effects_.load(), 0) << "nothing leaves";
  EXPECT_NE(told.wait_for(std::chrono::seconds(0)), std::future_status::ready);
  EXPECT_NE(Message(mailbox.StoreStatus()).find("disk full"), std::string::npos)
      << "who comes now is told why, and does not wait";
  store_.FailCommits(absl::OkStatus());
  ASSERT_EQ(told.wait_for(kSoon), std::future_status::ready);
  EXPECT_TRUE(told.get().ok());
  EXPECT_TRUE(mailbox.store_healthy());
  EXPECT_TRUE(mailbox.StoreStatus().ok());
  mailbox.Stop();
}

TEST_F(MailboxTest, ABrokenStoreIsToldAndNothingIsReleasedAsDone) {
  Mailbox mailbox({.store_retry_ms = 50}, &core_, &store_, &RealClock::Get(), &sink_);
  store_.FailCommits(ResourceExhaustedError("disk full"));
  auto told = Submit(mailbox, "a");
  auto broken = sink_.broken_.get_future();
  mailbox.Start();
  ASSERT_EQ(broken.wait_for(kSoon), std::future_status::ready);
  EXPECT_EQ(broken.get().code(), absl::StatusCode::kResourceExhausted);
  ASSERT_EQ(told.wait_for(kSoon), std::future_status::ready);
  EXPECT_EQ(told.get().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(sink_.effects_.load(), 0);
  // Also when the disk has room again: the lost batch is missing below what comes later.
  store_.FailCommits(absl::OkStatus());
  auto later = Submit(mailbox, "b");
  ASSERT_EQ(later.wait_for(kSoon), std::future_status::ready);
  EXPECT_EQ(later.get().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(store_.commits(), 0);
  mailbox.Stop();
}

}  // namespace
}  // namespace octavo
