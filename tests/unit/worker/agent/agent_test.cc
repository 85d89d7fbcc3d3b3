// The pure core: events in, commands out, time as an argument. No sockets, no processes.
#include "worker/agent/agent.h"

#include <signal.h>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/limits.h"

namespace octavo {
namespace {

using ::testing::HasSubstr;

constexpr std::int64_t kMs = 1000;
constexpr std::int64_t kSecond = 1'000'000;

class AgentTest : public ::testing::Test {
 protected:
  AgentTest() { Restart(2); }

  void Restart(int slots, std::int64_t orphan_grace_ms = 0) {
    AgentConfig config = {.worker = "w0",
                          .incarnation = "i1",
                          .address = "10.0.0.1",
                          .host = "host",
                          .http_address = "10.0.0.1:9400",
                          .version = "0",
                          .device = "cpu",
                          .orphan_grace_ms = orphan_grace_ms};
    config.slots.resize(static_cast<std::size_t>(slots));
    agent_ = std::make_unique<Agent>(config, now_);
  }

  // Handles the event and sorts the commands.
  void Do(const Event& event) {
    sent_.clear();
    to_ranks_.clear();
    spawns_.clear();
    signals_.clear();
    commands_ = agent_->Handle(event, now_);
    for (const Command& command : commands_) {
      if (const auto* up = std::get_if<SendToController>(&command)) {
        sent_.push_back(up->message);
      } else if (const auto* down = std::get_if<SendToRank>(&command)) {
        to_ranks_.push_back(*down);
      } else if (const auto* spawn = std::get_if<SpawnRank>(&command)) {
        spawns_.push_back(spawn->key);
      } else if (const auto* signal = std::get_if<SignalRank>(&command)) {
        signals_.push_back(signal->signal);
      }
    }
  }
  template <class T>
  const T* Only() const {
    const T* found = nullptr;
    for (const Command& command : commands_) {
      if (const auto* typed = std::get_if<T>(&command)) {
        EXPECT_EQ(found, nullptr) << "more than one";
        found = typed;
      }
    }
    return found;
  }
  void TickAfter(std::int64_t micros) {
    now_ += micros;
    Do(Tick{});
  }

  void Register() {
    Do(SessionOpened{});
    FromController accepted;
    accepted.message.mutable_registered()->set_accepted(true);
    Do(accepted);
  }
  static iv1::RankAssignment Assignment(const RankKey& key, int slot) {
    iv1::RankAssignment assignment;
    assignment.set_job_uid(key.job_uid);
    assignment.set_job_name("name-of-" + key.job_uid);
    assignment.set_attempt(key.attempt);
    assignment.set_rank(key.rank);
    assignment.set_slot(slot);
    assignment.mutable_plan()->set_version(1);
    return assignment;
  }
  void Start(const RankKey& key, int slot) {
    FromController start;
    *start.message.mutable_start()->mutable_assignment() = Assignment(key, slot);
    Do(start);
  }
  // Started, spawned and connected on `stream`.
  void StartAndConnect(const RankKey& key, int slot, std::int64_t stream) {
    Start(key, slot);
    ASSERT_EQ(spawns_.size(), 1u);
    Do(RankSpawned{key, 4711});
    Do(Hello(key, stream));
  }
  static FromRank Message(const RankKey& key, std::int64_t stream) {
    FromRank event{.stream = stream};
    event.message.set_job_uid(key.job_uid);
    event.message.set_attempt(key.attempt);
    event.message.set_rank(key.rank);
    return event;
  }
  static FromRank Hello(const RankKey& key, std::int64_t stream) {
    FromRank event = Message(key, stream);
    event.message.mutable_hello()->set_pid(4711);
    return event;
  }
  void Exit(const RankKey& key, const ExitReason& exit, std::int64_t stream) {
    Do(RankExited{key, exit, "last line\n"});
    if (stream != 0) {
      Do(RankStreamClosed{stream});
    }
  }
  const iv1::RankEnded* SentEnd() const {
    for (const iv1::WorkerToController& message : sent_) {
      if (message.has_reliable() && message.reliable().has_ended()) {
        return &message.reliable().ended();
      }
    }
    return nullptr;
  }

  const RankKey a_{"job-a", 1, 0};
  const RankKey b_{"job-a", 1, 1};
  std::int64_t now_ = 1 * kSecond;
  std::unique_ptr<Agent> agent_;
  Commands commands_;
  std::vector<iv1::WorkerToController> sent_;
  std::vector<SendToRank> to_ranks_;
  std::vector<RankKey> spawns_;
  std::vector<int> signals_;
};

TEST_F(AgentTest, RegistersFirstAndSendsHeartbeatsWithProgress) {
  Do(SessionOpened{});
  ASSERT_EQ(sent_.size(), 1u);
  ASSERT_TRUE(sent_[0].has_register_());
  EXPECT_EQ(sent_[0].register_().worker(), "w0");
  EXPECT_EQ(sent_[0].register_().slots_size(), 2);
  EXPECT_FALSE(agent_->registered());
  Register();
  EXPECT_TRUE(agent_->registered());
  StartAndConnect(a_, 0, 1);
  FromRank progress = Message(a_, 1);
  progress.message.mutable_progress()->set_step(12);
  Do(progress);
  TickAfter(kHeartbeatIntervalMs * kMs);
  ASSERT_EQ(sent_.size(), 1u);
  ASSERT_TRUE(sent_[0].has_heartbeat());
  ASSERT_EQ(sent_[0].heartbeat().running_size(), 1);
  EXPECT_EQ(sent_[0].heartbeat().running(0).progress().step(), 12);
  EXPECT_EQ(sent_[0].heartbeat().running(0).pid(), 4711);
}

TEST_F(AgentTest, RefusedRegistrationClosesTheSession) {
  Do(SessionOpened{});
  FromController refused;
  refused.message.mutable_registered()->set_reason("name taken");
  Do(refused);
  ASSERT_NE(Only<CloseSession>(), nullptr);
  EXPECT_THAT(Only<CloseSession>()->reason, HasSubstr("name taken"));
  EXPECT_FALSE(agent_->registered());
}

TEST_F(AgentTest, SilentControllerIsDialledAgain) {
  Do(SessionOpened{});
  TickAfter(kWorkerLeaseMs * kMs);
  EXPECT_NE(Only<CloseSession>(), nullptr);
  Do(Tick{});
  EXPECT_EQ(Only<CloseSession>(), nullptr) << "once per stream";
}

TEST_F(AgentTest, HelloGetsTheAssignmentWithTheNewestPlanAndWishes) {
  Register();
  Start(a_, 0);
  EXPECT_EQ(spawns_, std::vector<RankKey>{a_});
  Do(RankSpawned{a_, 4711});
  FromController plan;
  plan.message.mutable_plan()->set_job_uid("job-a");
  plan.message.mutable_plan()->set_attempt(1);
  plan.message.mutable_plan()->mutable_plan()->set_version(5);
  Do(plan);
  FromController wishes;
  wishes.message.mutable_wishes()->set_job_uid("job-a");
  wishes.message.mutable_wishes()->set_attempt(1);
  wishes.message.mutable_wishes()->mutable_wishes()->set_checkpoint(true);
  wishes.message.mutable_wishes()->mutable_wishes()->set_sequence(1);
  Do(wishes);
  EXPECT_TRUE(to_ranks_.empty()) << "not connected yet";
  Do(Hello(a_, 7));
  ASSERT_EQ(to_ranks_.size(), 2u);
  EXPECT_EQ(to_ranks_[0].message.assignment().plan().version(), 5);
  EXPECT_TRUE(to_ranks_[1].message.wishes().checkpoint());
  // An older plan and a repeated wish change nothing; a newer plan is passed on.
  plan.message.mutable_plan()->mutable_plan()->set_version(4);
  Do(plan);
  EXPECT_TRUE(to_ranks_.empty());
  Do(wishes);
  EXPECT_TRUE(to_ranks_.empty());
  plan.message.mutable_plan()->mutable_plan()->set_version(6);
  Do(plan);
  ASSERT_EQ(to_ranks_.size(), 1u);
  EXPECT_EQ(to_ranks_[0].message.plan().version(), 6);
  // The same wish with a new number means: save once more.
  wishes.message.mutable_wishes()->mutable_wishes()->set_sequence(2);
  Do(wishes);
  ASSERT_EQ(to_ranks_.size(), 1u);
}

TEST_F(AgentTest, StartIsIdempotentAlsoAfterTheEnd) {
  Register();
  StartAndConnect(a_, 0, 1);
  Start(a_, 0);
  EXPECT_TRUE(spawns_.empty());
  Exit(a_, {.code = 0}, 1);
  ASSERT_NE(SentEnd(), nullptr);
  Start(a_, 0);
  EXPECT_TRUE(spawns_.empty()) << "it ran and ended; running it again would publish twice";
  EXPECT_EQ(SentEnd(), nullptr);
}

TEST_F(AgentTest, StaleAttemptIsRefusedAndNewerAttemptFencesTheOlder) {
  Register();
  StartAndConnect({"job-a", 2, 0}, 0, 1);
  Start({"job-a", 1, 1}, 1);
  EXPECT_TRUE(spawns_.empty());
  ASSERT_NE(SentEnd(), nullptr);
  EXPECT_TRUE(SentEnd()->never_started());
  EXPECT_THAT(SentEnd()->outcome().message(), HasSubstr("stale"));
  Start({"job-a", 3, 0}, 1);
  EXPECT_EQ(spawns_.size(), 1u);
  Do(Tick{});
  EXPECT_EQ(signals_, std::vector<int>{SIGKILL}) << "attempt 2 is fenced";
}

TEST_F(AgentTest, BusyMissingAndPoisonedSlotsAreRefusedWithTheReason) {
  Register();
  StartAndConnect(a_, 0, 1);
  Start({"job-b", 1, 0}, 0);
  ASSERT_NE(SentEnd(), nullptr);
  EXPECT_THAT(SentEnd()->outcome().message(), HasSubstr("slot 0 is busy with job-a/1/0"));
  Start({"job-c", 1, 0}, 9);
  EXPECT_THAT(SentEnd()->outcome().message(), HasSubstr("slots 0 to 1"));
}

TEST_F(AgentTest, EndIsReportedFromTheProcessWithTheLastWordThatCameBefore) {
  Register();
  StartAndConnect(a_, 0, 1);
  Do(RankExited{a_, {.code = 3}, "boom\n"});
  EXPECT_EQ(SentEnd(), nullptr) << "the stream may still hold its last word";
  FromRank outcome = Message(a_, 1);
  outcome.message.mutable_outcome()->set_failure_class(v1::NUMERIC_FAILURE);
  outcome.message.mutable_outcome()->set_message("layer 3 fc1 grad");
  Do(outcome);
  Do(RankStreamClosed{1});
  ASSERT_NE(SentEnd(), nullptr);
  EXPECT_EQ(SentEnd()->exit_code(), 3);
  EXPECT_EQ(SentEnd()->outcome().failure_class(), v1::NUMERIC_FAILURE);
  EXPECT_EQ(SentEnd()->log_tail(), "boom\n");
  EXPECT_EQ(agent_->slots_busy(), 0);
}

TEST_F(AgentTest, TheEndCarriesTheNewestStepInCaseItsReportIsLost) {
  Register();
  StartAndConnect(a_, 0, 1);
  for (const std::int64_t number : {99, 100}) {
    FromRank step = Message(a_, 1);
    step.message.mutable_step()->set_step(number);
    step.message.mutable_step()->set_loss(static_cast<double>(number) / 8);
    Do(step);
    if (number == 99) {
      Do(SessionClosed{"cut"});  // whatever was sent before may not have arrived
      Register();
    }
  }
  Exit(a_, {.code = 0}, 1);
  ASSERT_NE(SentEnd(), nullptr);
  EXPECT_EQ(SentEnd()->last_step().step(), 100);
  EXPECT_EQ(SentEnd()->last_step().loss(), 12.5);
}

TEST_F(AgentTest, OneStartMakesAllRanksOfTheAttemptOnThisWorker) {
  Register();
  FromController start;
  *start.message.mutable_start()->mutable_assignment() = Assignment(a_, 0);
  iv1::StartRank::Seat& seat = *start.message.mutable_start()->add_more();
  seat.set_rank(b_.rank);
  seat.set_slot(1);
  seat.set_device_ordinal(1);
  Do(start);
  EXPECT_EQ(spawns_, (std::vector<RankKey>{a_, b_}));
  Do(RankSpawned{b_, 4711});
  Do(Hello(b_, 7));
  ASSERT_EQ(to_ranks_.size(), 1u);
  const iv1::RankAssignment& given = to_ranks_[0].message.assignment();
  EXPECT_EQ(given.rank(), b_.rank);
  EXPECT_EQ(given.slot(), 1);
  EXPECT_EQ(given.device_ordinal(), 1);
  EXPECT_EQ(given.plan().version(), 1);
  Do(start);
  EXPECT_TRUE(spawns_.empty()) << "a repeat";
}

TEST_F(AgentTest, EndIsReportedInTimeWhenTheStreamNeverCloses) {
  Register();
  StartAndConnect(a_, 0, 1);
  Do(RankExited{a_, {.code = -1, .signal = SIGSEGV}, ""});
  TickAfter(3 * kSecond);
  ASSERT_NE(SentEnd(), nullptr);
  EXPECT_EQ(SentEnd()->signal(), SIGSEGV);
  EXPECT_FALSE(SentEnd()->has_outcome()) << "we did not make it leave: no cause is invented";
}

TEST_F(AgentTest, KillForMemoryIsNamedButOurOwnKillIsNot) {
  Register();
  StartAndConnect(a_, 0, 1);
  StartAndConnect(b_, 1, 2);
  const ExitReason killed = {.code = -1, .signal = SIGKILL};
  Do(RankExited{.key = a_, .exit = killed, .out_of_memory = true});
  Do(RankStreamClosed{1});
  ASSERT_NE(SentEnd(), nullptr);
  EXPECT_EQ(SentEnd()->outcome().failure_class(), v1::RANK_OOM);
  FromController stop;
  stop.message.mutable_stop()->set_job_uid(b_.job_uid);
  stop.message.mutable_stop()->set_attempt(b_.attempt);
  stop.message.mutable_stop()->set_rank(b_.rank);
  stop.message.mutable_stop()->set_kill_now(true);
  Do(stop);
  Do(RankExited{.key = b_, .exit = killed, .out_of_memory = true});
  Do(RankStreamClosed{2});
  EXPECT_EQ(SentEnd()->outcome().failure_class(), v1::RANK_EXIT);
}

TEST_F(AgentTest, ReliableReportsAreRepeatedInOrderUntilAcknowledged) {
  Register();
  StartAndConnect(a_, 0, 1);
  StartAndConnect(b_, 1, 2);
  Do(SessionClosed{"gone"});
  FromRank checkpoint = Message(a_, 1);
  checkpoint.message.mutable_checkpoint()->set_step(10);
  Do(checkpoint);
  EXPECT_TRUE(sent_.empty());
  Exit(a_, {.code = 0}, 1);
  for (int session = 0; session < 2; ++session) {  // the first session breaks before the ack
    Register();
    ASSERT_EQ(sent_.size(), 2u);
    EXPECT_EQ(sent_[0].reliable().checkpoint().done().step(), 10);
    EXPECT_TRUE(sent_[1].reliable().has_ended());
    EXPECT_LT(sent_[0].reliable().sequence(), sent_[1].reliable().sequence());
    Do(SessionClosed{"gone again"});
  }
  Register();
  FromController ack;
  ack.message.mutable_ack()->set_sequence(sent_[0].reliable().sequence());
  Do(ack);
  Do(SessionClosed{"once more"});
  Register();
  ASSERT_EQ(sent_.size(), 1u);
  EXPECT_TRUE(sent_[0].reliable().has_ended());
}

TEST_F(AgentTest, StepsAreKeptOverAShortOutageAndDroppedOldestFirst) {
  Register();
  StartAndConnect(a_, 0, 1);
  Do(SessionClosed{"gone"});
  for (int step = 1; step <= kMaxRankQueue + 5; ++step) {
    FromRank report = Message(a_, 1);
    report.message.mutable_step()->set_step(step);
    Do(report);
    ASSERT_NE(Only<ObserveStep>(), nullptr) << "metrics go on without a controller";
  }
  EXPECT_EQ(agent_->dropped_reports(), 5);
  Do(SessionOpened{});
  EXPECT_EQ(sent_[0].register_().running(0).progress().step(), kMaxRankQueue + 5);
  FromController accepted;
  accepted.message.mutable_registered()->set_accepted(true);
  Do(accepted);
  ASSERT_EQ(sent_.size(), static_cast<std::size_t>(kMaxRankQueue));
  EXPECT_EQ(sent_.front().step().report().step(), 6);
  EXPECT_EQ(sent_.back().step().report().step(), kMaxRankQueue + 5);
}

TEST_F(AgentTest, StopGoesFromWishToTermToKillToPoisonedSlot) {
  Register();
  StartAndConnect(a_, 0, 1);
  FromController stop;
  stop.message.mutable_stop()->set_job_uid(a_.job_uid);
  stop.message.mutable_stop()->set_attempt(a_.attempt);
  stop.message.mutable_stop()->set_rank(a_.rank);
  stop.message.mutable_stop()->set_grace_ms(1000);
  Do(stop);
  ASSERT_EQ(to_ranks_.size(), 1u);
  EXPECT_TRUE(to_ranks_[0].message.wishes().stop());
  EXPECT_TRUE(signals_.empty());
  TickAfter(999 * kMs);
  EXPECT_TRUE(signals_.empty());
  TickAfter(1 * kMs);
  EXPECT_EQ(signals_, std::vector<int>{SIGTERM});
  TickAfter(kRankTermGraceMs * kMs);
  EXPECT_EQ(signals_, std::vector<int>{SIGKILL});
  TickAfter(kRankKillGraceMs * kMs);
  ASSERT_NE(SentEnd(), nullptr);
  EXPECT_TRUE(SentEnd()->unkillable());
  EXPECT_EQ(agent_->slots_poisoned(), 1);
  TickAfter(60 * kSecond);
  EXPECT_EQ(SentEnd(), nullptr) << "reported once";
  Start({"job-b", 1, 0}, 0);
  EXPECT_THAT(SentEnd()->outcome().message(), HasSubstr("slot 0 is poisoned"));
  // The process ends after all: the slot is usable again.
  Exit(a_, {.code = -1, .signal = SIGKILL}, 1);
  EXPECT_EQ(SentEnd(), nullptr);
  EXPECT_EQ(agent_->slots_poisoned(), 0);
  Start({"job-b", 2, 0}, 0);
  EXPECT_EQ(spawns_.size(), 1u);
}

TEST_F(AgentTest, KillNowSkipsTheWish) {
  Register();
  StartAndConnect(a_, 0, 1);
  FromController stop;
  stop.message.mutable_stop()->set_job_uid(a_.job_uid);
  stop.message.mutable_stop()->set_attempt(a_.attempt);
  stop.message.mutable_stop()->set_kill_now(true);
  Do(stop);
  EXPECT_EQ(signals_, std::vector<int>{SIGKILL});
  Exit(a_, {.code = -1, .signal = SIGKILL}, 1);
  EXPECT_THAT(SentEnd()->outcome().message(), HasSubstr("controller's order"));
}

TEST_F(AgentTest, StoppingAnUnknownRankIsAnsweredWithEvidence) {
  Register();
  FromController stop;
  stop.message.mutable_stop()->set_job_uid("ghost");
  stop.message.mutable_stop()->set_attempt(4);
  Do(stop);
  ASSERT_NE(SentEnd(), nullptr);
  EXPECT_TRUE(SentEnd()->never_started());
  EXPECT_EQ(SentEnd()->attempt(), 4);
  EXPECT_FALSE(SentEnd()->has_outcome()) << "nobody's failure";
}

TEST_F(AgentTest, RankThatNeverCallsBackIsKilledAndSaysWhy) {
  Register();
  Start(a_, 0);
  Do(RankSpawned{a_, 4711});
  TickAfter(kRankHelloTimeoutMs * kMs);
  EXPECT_EQ(signals_, std::vector<int>{SIGTERM});
  Exit(a_, {.code = -1, .signal = SIGTERM}, 0);
  EXPECT_THAT(SentEnd()->outcome().message(), HasSubstr("did not call its worker back"));
}

TEST_F(AgentTest, SpawnFailureIsAnEnd) {
  Register();
  Start(a_, 0);
  Do(RankSpawnFailed{a_, "starting /bin/octavo-rank: No such file"});
  ASSERT_NE(SentEnd(), nullptr);
  EXPECT_TRUE(SentEnd()->never_started());
  EXPECT_THAT(SentEnd()->outcome().message(), HasSubstr("No such file"));
  EXPECT_EQ(agent_->slots_busy(), 0);
}

TEST_F(AgentTest, BrokenLinkAndUnendingLastWordAreBounded) {
  Register();
  StartAndConnect(a_, 0, 1);
  StartAndConnect(b_, 1, 2);
  Do(RankStreamClosed{1});
  FromRank outcome = Message(b_, 2);
  outcome.message.mutable_outcome();
  Do(outcome);
  TickAfter(kRankTermGraceMs * kMs);
  EXPECT_EQ(signals_, std::vector<int>{SIGTERM});
  TickAfter((kRankStopGraceMs - kRankTermGraceMs) * kMs);
  EXPECT_THAT(signals_, ::testing::UnorderedElementsAre(SIGKILL, SIGTERM));
}

TEST_F(AgentTest, StrangersAndImpostorsAreShutOut) {
  Register();
  StartAndConnect(a_, 0, 1);
  Do(Hello({"ghost", 1, 0}, 8));
  EXPECT_THAT(Only<CloseRankStream>()->reason, HasSubstr("not a rank of this worker"));
  Do(Hello(a_, 9));
  EXPECT_THAT(Only<CloseRankStream>()->reason, HasSubstr("said hello already"));
  Do(Message(a_, 10));
  EXPECT_THAT(Only<CloseRankStream>()->reason, HasSubstr("must be RankHello"));
  FromRank other = Message(b_, 1);
  other.message.mutable_outcome();
  Do(other);
  EXPECT_THAT(Only<CloseRankStream>()->reason, HasSubstr("belongs to job-a/1/0"));
}

TEST_F(AgentTest, KeyValueRequestsSurviveAReconnectAndTimeOutHere) {
  Register();
  StartAndConnect(a_, 0, 1);
  FromRank get = Message(a_, 1);
  get.message.mutable_kv()->set_id(5);
  get.message.mutable_kv()->mutable_get()->set_key("gloo/0");
  get.message.mutable_kv()->mutable_get()->set_timeout_ms(20000);
  Do(get);
  ASSERT_EQ(sent_.size(), 1u);
  EXPECT_EQ(sent_[0].kv().request().id(), 5);
  Do(SessionClosed{"gone"});
  Register();
  ASSERT_EQ(sent_.size(), 1u) << "asked again";
  EXPECT_EQ(sent_[0].kv().rank(), 0);
  FromController reply;
  reply.message.mutable_kv()->set_job_uid(a_.job_uid);
  reply.message.mutable_kv()->set_attempt(a_.attempt);
  reply.message.mutable_kv()->mutable_reply()->set_id(5);
  reply.message.mutable_kv()->mutable_reply()->set_ok(true);
  Do(reply);
  ASSERT_EQ(to_ranks_.size(), 1u);
  EXPECT_TRUE(to_ranks_[0].message.kv().ok());
  Do(reply);
  EXPECT_TRUE(to_ranks_.empty()) << "answered once";
  get.message.mutable_kv()->set_id(6);
  Do(get);
  Do(SessionClosed{"gone"});
  TickAfter(23 * kSecond);
  ASSERT_EQ(to_ranks_.size(), 1u);
  EXPECT_FALSE(to_ranks_[0].message.kv().ok());
  EXPECT_THAT(to_ranks_[0].message.kv().error(), HasSubstr("gloo/0"));
}

TEST_F(AgentTest, AProfileIsAskedOfTheJobsRanksAndItsAnswerTravelsWithTheirNumber) {
  Register();
  StartAndConnect(a_, 0, 1);
  StartAndConnect(b_, 1, 2);
  FromController wish;
  iv1::SendProfile& profile = *wish.message.mutable_profile();
  profile.set_job_uid(a_.job_uid);
  profile.set_attempt(2);
  profile.mutable_wish()->set_id(9);
  Do(wish);
  EXPECT_TRUE(to_ranks_.empty()) << "of another attempt";
  profile.set_attempt(1);
  Do(wish);
  ASSERT_EQ(to_ranks_.size(), 2u);
  EXPECT_EQ(to_ranks_[0].message.profile().id(), 9);
  FromRank answer = Message(b_, 2);
  answer.message.mutable_profile()->set_id(9);
  Do(answer);
  ASSERT_EQ(sent_.size(), 1u);
  EXPECT_EQ(sent_[0].profile().job_uid(), a_.job_uid);
  EXPECT_EQ(sent_[0].profile().attempt(), 1);
  EXPECT_EQ(sent_[0].profile().profile().rank(), 1);
  EXPECT_EQ(sent_[0].profile().profile().id(), 9);
}

TEST_F(AgentTest, OrphanedRanksGetTheStopWishAfterTheGraceAndNotBefore) {
  Restart(2, /*orphan_grace_ms=*/60'000);
  Register();
  StartAndConnect(a_, 0, 1);
  Do(SessionClosed{"gone"});
  TickAfter(59 * kSecond);
  EXPECT_TRUE(to_ranks_.empty());
  Register();  // back in time: the clock starts anew
  Do(SessionClosed{"gone"});
  TickAfter(59 * kSecond);
  EXPECT_TRUE(to_ranks_.empty());
  TickAfter(1 * kSecond);
  ASSERT_EQ(to_ranks_.size(), 1u);
  EXPECT_TRUE(to_ranks_[0].message.wishes().stop());
  Exit(a_, {.code = 0}, 1);
  Register();
  ASSERT_NE(SentEnd(), nullptr);
  EXPECT_THAT(SentEnd()->outcome().message(), HasSubstr("orphan grace"));
  EXPECT_EQ(SentEnd()->outcome().failure_class(), v1::WORKER_LOST);
}

TEST_F(AgentTest, DrainStopsRanksRefusesNewOnesAndFinishesWhenTheControllerKnows) {
  Register();
  StartAndConnect(a_, 0, 1);
  Do(DrainRequested{"signal 15"});
  EXPECT_TRUE(sent_[0].has_drain());
  ASSERT_EQ(to_ranks_.size(), 1u);
  EXPECT_TRUE(to_ranks_[0].message.wishes().stop());
  EXPECT_FALSE(agent_->finished(now_));
  Start({"job-b", 1, 0}, 1);
  EXPECT_THAT(SentEnd()->outcome().message(), HasSubstr("draining"));
  EXPECT_EQ(SentEnd()->outcome().failure_class(), v1::DRAINED) << "does not count as a failure";
  FromRank outcome = Message(a_, 1);
  outcome.message.mutable_outcome()->set_stopped(true);
  Do(outcome);
  Exit(a_, {.code = 0}, 1);
  ASSERT_NE(SentEnd(), nullptr);
  EXPECT_TRUE(SentEnd()->outcome().stopped());
  EXPECT_FALSE(agent_->finished(now_)) << "not acknowledged yet";
  FromController ack;
  ack.message.mutable_ack()->set_sequence(1000);
  Do(ack);
  EXPECT_TRUE(agent_->finished(now_));
}

TEST_F(AgentTest, DrainWithoutAControllerIsBounded) {
  Register();
  StartAndConnect(a_, 0, 1);
  Do(SessionClosed{"gone"});
  Do(DrainRequested{"signal 15"});
  Exit(a_, {.code = 0}, 1);
  EXPECT_FALSE(agent_->finished(now_));
  EXPECT_TRUE(agent_->finished(now_ + 6 * kSecond)) << "nobody to tell: not waited for for ever";
}

TEST_F(AgentTest, CommandsBeforeRegistrationAreRefused) {
  Do(SessionOpened{});
  Start(a_, 0);
  EXPECT_TRUE(spawns_.empty());
  EXPECT_NE(Only<CloseSession>(), nullptr);
}

TEST_F(AgentTest, TelemetryOfOneHostIsMergedBeforeItTravels) {
  Register();
  StartAndConnect(a_, 0, 1);
  StartAndConnect(b_, 1, 2);
  const auto snapshot = [&](const RankKey& key, std::int64_t stream, float amax) {
    FromRank event = Message(key, stream);
    iv1::TelemetrySnapshot* telemetry = event.message.mutable_telemetry();
    telemetry->set_first_step(1);
    telemetry->set_last_step(10);
    iv1::TensorStats* tensor = telemetry->add_tensors();
    tensor->set_layer(3);
    tensor->set_amax(amax);
    tensor->set_elements(100);
    return event;
  };
  Do(snapshot(a_, 1, 2));
  EXPECT_TRUE(sent_.empty()) << "rank 1 of the same host is still to come";
  Do(snapshot(b_, 2, 5));
  ASSERT_EQ(sent_.size(), 1u);
  const iv1::TelemetrySnapshot& merged = sent_[0].telemetry().snapshot();
  EXPECT_EQ(merged.ranks(), 2);
  ASSERT_EQ(merged.tensors_size(), 1);
  EXPECT_EQ(merged.tensors(0).amax(), 5);
  EXPECT_EQ(merged.tensors(0).elements(), 200u);
  ASSERT_NE(Only<ObserveTelemetry>(), nullptr);
  EXPECT_EQ(Only<ObserveTelemetry>()->train_job, "name-of-job-a");
  // A rank that does not report does not hold the others back for ever.
  FromRank late = snapshot(a_, 1, 1);
  late.message.mutable_telemetry()->set_first_step(11);
  late.message.mutable_telemetry()->set_last_step(20);
  Do(late);
  EXPECT_TRUE(sent_.empty());
  TickAfter(TelemetryMerger::kMergeWaitMicros);
  const auto telemetry =
      std::count_if(sent_.begin(), sent_.end(), [](const auto& m) { return m.has_telemetry(); });
  EXPECT_EQ(telemetry, 1);
}

TEST_F(AgentTest, SeriesOfAJobAreForgottenWithItsLastRank) {
  Register();
  StartAndConnect(a_, 0, 1);
  StartAndConnect(b_, 1, 2);
  Do(RankExited{a_, {.code = 0}, ""});
  Do(RankStreamClosed{1});
  EXPECT_EQ(Only<ForgetJobSeries>(), nullptr);
  Do(RankExited{b_, {.code = 0}, ""});
  Do(RankStreamClosed{2});
  ASSERT_NE(Only<ForgetJobSeries>(), nullptr);
  EXPECT_EQ(Only<ForgetJobSeries>()->train_job, "name-of-job-a");
}

}  // namespace
}  // namespace octavo
