// Gangs, failures and what follows, fencing, leases, restarts of the controller.
#include <set>

#include "controller/core/attempt_end.h"
#include "gmock/gmock.h"
#include "proto/convert/error_detail.h"
#include "tests/unit/controller/core/core_harness.h"

namespace octavo {
namespace {

using testing::HasSubstr;

class CoreAttempts : public CoreHarness {};

TEST_F(CoreAttempts, ADeadRankEndsTheGangAndTheJobRestartsAfterItsBackOff) {
  RunOn2Workers();
  Step("a", 1);
  EndAll("b", Killed);
  EXPECT_EQ(Get("job").state(), v1::RUNNING) << "rank 0 has not ended yet";
  const auto stops = TakeStops("a");
  ASSERT_EQ(stops.size(), 1u);
  EXPECT_EQ(stops[0].attempt(), 1);
  EndAll("a", [](internal::v1::RankEnded& ended) {
    ended.set_exit_code(1);
    ended.mutable_outcome()->set_failure_class(v1::COLLECTIVE_TIMEOUT);
    ended.mutable_outcome()->set_message("peer went away");
  });
  v1::Job job = Get("job");
  EXPECT_EQ(job.state(), v1::RESTARTING);
  EXPECT_EQ(job.attempts(0).end_class(), v1::RANK_EXIT) << "the death is the cause";
  EXPECT_THAT(job.attempts(0).end_reason(),
              HasSubstr("rank 1 on workers/b was killed by signal 9"));
  EXPECT_EQ(job.restarts(), 1);
  EXPECT_EQ(job.pending().reason(), v1::RESTART_BACKOFF);
  Pass(4, {"a", "b"});
  EXPECT_EQ(Get("job").state(), v1::RESTARTING);
  Pass(2, {"a", "b"});
  EXPECT_EQ(Get("job").state(), v1::STARTING);
  EXPECT_EQ(TakeStarts("b").at(0).attempt(), 2);
}

TEST_F(CoreAttempts, TheCollateralEndMayArriveFirst) {
  RunOn2Workers();
  EndAll("a", [](internal::v1::RankEnded& ended) {
    ended.set_exit_code(1);
    ended.mutable_outcome()->set_failure_class(v1::COLLECTIVE_TIMEOUT);
  });
  Advance(0.1);
  EndAll("b", Killed);  // died before our SIGKILL could have
  EXPECT_EQ(Get("job").attempts(0).end_class(), v1::RANK_EXIT);
}

// An input that no attempt can read explains whatever its peers died of meanwhile, in any order:
// nothing is tried again.
TEST_F(CoreAttempts, ARejectedSpecificationExplainsTheOtherRanksEndsWhicheverComesFirst) {
  const auto rejected = [](internal::v1::RankEnded& ended) {
    ended.set_exit_code(1);
    ended.mutable_outcome()->set_failure_class(v1::SPEC_REJECTED);
    ended.mutable_outcome()->set_message("the dataset /data/x is damaged");
  };
  const auto timed_out = [](internal::v1::RankEnded& ended) {
    ended.set_exit_code(1);
    ended.mutable_outcome()->set_failure_class(v1::COLLECTIVE_TIMEOUT);
    ended.mutable_outcome()->set_message("peer went away");
  };
  Register("a", 1);
  Register("b", 1);
  int number = 0;
  for (const bool rejected_first : {true, false}) {
    for (const bool killed : {false, true}) {
      const std::string name = "job" + std::to_string(number++);
      SCOPED_TRACE(name);
      ASSERT_TRUE(Submit(Spec(name)).ok());
      StartAll("a", internal::v1::RANK_TRAINING);
      StartAll("b", internal::v1::RANK_TRAINING);
      const auto end_other = [&] {
        if (killed) {
          EndAll("a", Killed);
        } else {
          EndAll("a", timed_out);
        }
      };
      if (!rejected_first) {
        end_other();
      }
      EndAll("b", rejected);
      if (rejected_first) {
        end_other();
      }
      const v1::Job job = Get(name);
      EXPECT_EQ(job.state(), v1::FAILED);
      EXPECT_EQ(job.failure(), v1::SPEC_REJECTED);
      EXPECT_EQ(job.attempts_size(), 1);
      EXPECT_THAT(job.attempts(0).end_reason(), HasSubstr("the dataset /data/x is damaged"));
    }
  }
}

TEST_F(CoreAttempts, TheCauseIsTheEndThatExplainsMost) {
  const auto cause = [](const std::vector<v1::FailureClass>& ends) {
    internal::v1::StoredAttempt attempt;
    for (const v1::FailureClass end : ends) {
      internal::v1::StoredRank& rank = *attempt.add_ranks();
      rank.set_ended(true);
      rank.set_end_class(end);
    }
    return CauseOf(attempt).failure;
  };
  // Each explains those behind it; NUMERIC_FAILURE is what all ranks agreed on.
  const std::vector<std::pair<v1::FailureClass, FailureClass>> order = {
      {v1::NUMERIC_FAILURE, FailureClass::kNumericFailure},
      {v1::SPEC_REJECTED, FailureClass::kSpecRejected},
      {v1::RANK_EXIT, FailureClass::kRankExit},
      {v1::SLOT_POISONED, FailureClass::kSlotPoisoned},
      {v1::WORKER_LOST, FailureClass::kWorkerLost},
      {v1::STEP_STALLED, FailureClass::kStepStalled},
      {v1::COLLECTIVE_TIMEOUT, FailureClass::kCollectiveTimeout}};
  for (std::size_t i = 0; i < order.size(); ++i) {
    for (std::size_t j = i + 1; j < order.size(); ++j) {
      EXPECT_EQ(cause({order[i].first, order[j].first}), order[i].second) << i << " " << j;
      EXPECT_EQ(cause({order[j].first, order[i].first}), order[i].second) << j << " " << i;
    }
  }
}

// What an attempt says that it begins from: one thing, and whose.
TEST_F(CoreAttempts, AnAttemptSaysWhatItBeginsFrom) {
  struct Case {
    std::int64_t step;
    std::string path, note, text;
  };
  Register("a", 2);
  for (const Case& c :
       {Case{0, "", "", "attempt 1 begins with new weights"},
        Case{0, "/other/imported", "", "attempt 1 begins with the weights of /other/imported"},
        Case{40, "/ckpt/job/step-40", "", "attempt 1 continues from step 40 of /ckpt/job/step-40"},
        Case{40, "/ckpt/job/step-40", "/ckpt/job/step-60: cut",
             "attempt 1 continues from step 40 of /ckpt/job/step-40; /ckpt/job/step-60: cut"}}) {
    const std::string name = "job" + std::to_string(c.step) + std::to_string(c.text.size());
    ASSERT_TRUE(Submit(Spec(name)).ok());
    StartAll("a", internal::v1::RANK_TRAINING);
    ASSERT_FALSE(running_["a"].empty());
    internal::v1::ReliableReport report;
    report.mutable_attempt_start()->set_job_uid(running_["a"][0].job_uid());
    report.mutable_attempt_start()->set_attempt(1);
    internal::v1::AttemptStart& start = *report.mutable_attempt_start()->mutable_start();
    start.set_loaded_step(c.step);
    start.set_loaded_path(c.path);
    start.set_note(c.note);
    Reliable("a", report);
    std::vector<std::string> said;
    v1::ListEventsRequest request;
    request.set_name(name);
    request.set_page_size(1000);
    const auto listed = core_->Events(request);
    ASSERT_TRUE(listed.ok()) << ToString(listed.status());
    for (const v1::JobEvent& event : listed->events()) {
      if (event.kind() == "ATTEMPT") {
        said.push_back(event.message());
      }
    }
    EXPECT_EQ(said, std::vector<std::string>{c.text});
    EndAll("a", Succeeded);
  }
}

TEST_F(CoreAttempts, AnExitWithoutAWordIsNoSuccess) {
  RunOn2Workers();
  EndAll("a", [](internal::v1::RankEnded&) {});
  EndAll("b", Succeeded);
  EXPECT_EQ(Get("job").state(), v1::RESTARTING);
  EXPECT_THAT(Get("job").message(), HasSubstr("without saying that it had finished"));
}

// The report of the last step may be lost with a stream; the end of its rank is repeated and has
// it.
TEST_F(CoreAttempts, ALostReportOfTheLastStepComesWithTheEndOfItsRank) {
  RunOn2Workers();
  Step("a", 98, 2.5);
  const auto end = [](internal::v1::RankEnded& ended) {
    ended.mutable_outcome()->set_step(100);
    internal::v1::StepReport& last = *ended.mutable_last_step();
    last.set_step(100);
    last.set_loss(1.25);
    last.set_tokens(256);
    last.set_has_validation(true);
    last.set_validation_loss(1.5);
  };
  EndAll("b", Succeeded);
  EndAll("a", end);
  const v1::Job job = Get("job");
  EXPECT_EQ(job.state(), v1::SUCCEEDED);
  EXPECT_EQ(job.progress().step(), 100);
  EXPECT_EQ(job.progress().loss(), 1.25);
  EXPECT_EQ(job.progress().validation_loss(), 1.5);
  EXPECT_EQ(job.progress().tokens(), 25600);
}

TEST_F(CoreAttempts, TheLastStepInTheEndChangesNothingWhenItsReportHadArrived) {
  RunOn2Workers();
  Step("a", 100, 2.5);
  EndAll("b", Succeeded);
  EndAll("a", [](internal::v1::RankEnded& ended) {
    ended.mutable_outcome()->set_step(100);
    ended.mutable_last_step()->set_step(100);
    ended.mutable_last_step()->set_loss(9);
  });
  EXPECT_EQ(Get("job").state(), v1::SUCCEEDED);
  EXPECT_EQ(Get("job").progress().loss(), 2.5);
}

TEST_F(CoreAttempts, SpecificationAndPlanTravelOncePerWorkerWhateverRanksItGets) {
  Register("a", 3);
  Register("b", 1);
  ASSERT_TRUE(Submit(Spec("job", 4)).ok());
  ASSERT_EQ(sent_["a"].size(), 2u) << "registered, and one StartRank after it";
  const std::vector<internal::v1::RankAssignment> on_a = TakeStarts("a"), on_b = TakeStarts("b");
  ASSERT_EQ(on_a.size(), 3u);
  ASSERT_EQ(on_b.size(), 1u);
  std::set<std::int32_t> ranks{on_b[0].rank()}, slots;
  for (const internal::v1::RankAssignment& start : on_a) {
    EXPECT_EQ(start.world_size(), 4);
    EXPECT_EQ(start.spec().name(), "job");
    EXPECT_EQ(start.device_ordinal(), start.slot());
    EXPECT_EQ(start.bind_address(), on_a[0].bind_address());
    ranks.insert(start.rank());
    slots.insert(start.slot());
  }
  EXPECT_EQ(ranks, (std::set<std::int32_t>{0, 1, 2, 3}));
  EXPECT_EQ(slots, (std::set<std::int32_t>{0, 1, 2}));
}

TEST_F(CoreAttempts, EndsAfterThreeAttemptsWithoutAStep) {
  RunOn2Workers();
  for (int attempt = 1; attempt <= 3; ++attempt) {
    ASSERT_EQ(Get("job").attempts_size(), attempt);
    EndAll("a", Killed);
    EndAll("b", Killed);
    if (attempt < 3) {
      Pass(15, {"a", "b"});
      StartAll("a", internal::v1::RANK_TRAINING);
      StartAll("b", internal::v1::RANK_TRAINING);
    }
  }
  EXPECT_EQ(Get("job").state(), v1::FAILED);
  EXPECT_EQ(Get("job").failure(), v1::NO_PROGRESS);
}

TEST_F(CoreAttempts, EndsBeyondRestartMaxAndNamesTheLastCause) {
  Register("a", 2);
  v1::JobSpec spec = Spec("job");
  spec.mutable_restart()->set_max(1);
  ASSERT_TRUE(Submit(spec).ok());
  for (int attempt = 1; attempt <= 2; ++attempt) {
    StartAll("a", internal::v1::RANK_TRAINING);
    Step("a", attempt);
    EndAll("a", Killed);
    Pass(6, {"a"});
  }
  EXPECT_EQ(Get("job").state(), v1::FAILED);
  EXPECT_EQ(Get("job").failure(), v1::RANK_EXIT);
  EXPECT_EQ(Get("job").restarts(), 2);
}

TEST_F(CoreAttempts, AGangThatCannotFormNamesTheMissingRankAndBlamesItsWorker) {
  Register("a", 1);
  Register("b", 1);
  v1::JobSpec spec = Spec("job");
  spec.mutable_restart()->set_gang_timeout_seconds(20);
  ASSERT_TRUE(Submit(spec).ok());
  StartAll("a", internal::v1::RANK_MEETING);
  StartAll("b", internal::v1::RANK_STARTING);
  Pass(21, {"a", "b"});
  EXPECT_TRUE(Get("job").attempts(0).placements_size() == 2);
  EndAll("a", Stopped);
  Pass(8, {"a", "b"});
  EndAll("b", Killed);  // by its worker: it did not react to the wish
  const v1::Job job = Get("job");
  EXPECT_EQ(job.attempts(0).end_class(), v1::GANG_TIMEOUT);
  EXPECT_THAT(job.attempts(0).end_reason(),
              HasSubstr("rank 1 on workers/b did not come within 20 s"));
}

TEST_F(CoreAttempts, AStallNamesTheRankThatIsBehind) {
  Register("a", 1);
  Register("b", 1);
  v1::JobSpec spec = Spec("job");
  spec.mutable_restart()->set_stall_timeout_seconds(60);
  ASSERT_TRUE(Submit(spec).ok());
  StartAll("a", internal::v1::RANK_TRAINING);
  StartAll("b", internal::v1::RANK_TRAINING);
  running_["a"][0].mutable_progress()->set_step(7);
  running_["b"][0].mutable_progress()->set_step(6);
  Pass(70, {"a", "b"});
  EndAll("a", Killed);
  EndAll("b", Killed);
  EXPECT_EQ(Get("job").attempts(0).end_class(), v1::STEP_STALLED);
  EXPECT_THAT(Get("job").attempts(0).end_reason(), HasSubstr("furthest behind: rank 1"));
}

TEST_F(CoreAttempts, ALostWorkerEndsTheAttemptWithoutAFailedRpcBeingTakenForIt) {
  RunOn2Workers();
  Step("a", 1);
  Disconnect("b");
  Pass(8, {"a"});
  EXPECT_EQ(Get("job").state(), v1::RUNNING) << "within the lease nothing is concluded";
  Pass(4, {"a"});
  EXPECT_TRUE(TakeStops("a").size() == 1u);
  EndAll("a", Stopped);
  const v1::Job job = Get("job");
  EXPECT_EQ(job.attempts(0).end_class(), v1::WORKER_LOST);
  EXPECT_EQ(job.state(), v1::RESTARTING);
}

TEST_F(CoreAttempts, AWorkerThatReconnectsInTimeLosesNothing) {
  RunOn2Workers();
  Disconnect("b");
  Pass(5, {"a"});
  Register("b", 1);
  Pass(20, {"a", "b"});
  EXPECT_EQ(Get("job").state(), v1::RUNNING);
  EXPECT_TRUE(TakeStarts("b").empty()) << "it runs already";
}

TEST_F(CoreAttempts, ARestartedDaemonHasLostItsRanks) {
  RunOn2Workers();
  Disconnect("b");
  running_["b"].clear();
  Register("b", 1, "i2");
  EXPECT_TRUE(TakeStarts("b").empty()) << "one attempt has one process per rank";
  EndAll("a", Stopped);
  EXPECT_EQ(Get("job").attempts(0).end_class(), v1::WORKER_LOST);
  EXPECT_THAT(Get("job").attempts(0).end_reason(), HasSubstr("workers/b was restarted"));
}

TEST_F(CoreAttempts, AStartThatWasLostWithTheStreamIsSentAgain) {
  Register("a", 1);
  Register("b", 1);
  ASSERT_TRUE(Submit(Spec("job")).ok());
  EXPECT_EQ(TakeStarts("b").size(), 1u);
  Disconnect("b");  // before the worker read it
  Register("b", 1, "i1", /*heartbeat=*/false);
  EXPECT_TRUE(TakeStarts("b").empty()) << "its reports may still say that the rank has ended";
  Heartbeat("b");
  EXPECT_EQ(TakeStarts("b").size(), 1u);
}

TEST_F(CoreAttempts, AFencedRankIsKilledAndItsReportsChangeNothing) {
  RunOn2Workers();
  const auto stale = running_["b"];
  Disconnect("b");
  Pass(12, {"a"});
  EndAll("a", Stopped);
  running_["b"].clear();
  Register("c", 1);
  Pass(6, {"a", "c"});
  StartAll("a", internal::v1::RANK_TRAINING);
  StartAll("c", internal::v1::RANK_TRAINING);
  ASSERT_EQ(Get("job").state(), v1::RUNNING);
  running_["b"] = stale;  // back, and still running attempt 1
  Register("b", 1);
  const auto stops = TakeStops("b");
  ASSERT_EQ(stops.size(), 1u);
  EXPECT_EQ(stops[0].attempt(), 1);
  EXPECT_TRUE(stops[0].kill_now());
  Step("b", 99);
  EXPECT_NE(Get("job").progress().step(), 99);
  EndAll("b", Succeeded);
  EXPECT_EQ(Get("job").state(), v1::RUNNING);
}

TEST_F(CoreAttempts, ARepeatedReportIsAcknowledgedAndChangesNothing) {
  RunOn2Workers();
  internal::v1::ReliableReport report;
  report.set_sequence(1);
  *report.mutable_ended() = EndedOf(running_["b"][0]);
  Killed(*report.mutable_ended());
  internal::v1::WorkerToController message;
  *message.mutable_reliable() = report;
  running_["b"].clear();
  Send("b", message);
  const std::size_t events = Kinds("job").size();
  sent_["b"].clear();
  Send("b", message);
  ASSERT_EQ(sent_["b"].size(), 1u);
  EXPECT_EQ(sent_["b"][0].ack().sequence(), 1);
  EXPECT_EQ(Kinds("job").size(), events);
}

TEST_F(CoreAttempts, NothingIsToldBeforeItIsStored) {
  Register("a", 2);
  ASSERT_TRUE(core_->Submit({.spec = Spec("job")}, now_).ok());
  core_->Schedule(now_);
  // The owner commits first; the effects wait with it.
  EXPECT_EQ(store_.Load()->jobs.size(), 0u);
  const StoreBatch batch = core_->TakeBatch();
  EXPECT_EQ(batch.jobs.size(), 1u);
  EXPECT_EQ(batch.attempts.size(), 1u) << "the placement is stored before StartRank leaves";
}

TEST_F(CoreAttempts, ARestartedControllerFindsTheRunningJobAgain) {
  RunOn2Workers();
  Step("a", 5);
  Restart();
  EXPECT_EQ(Get("job").state(), v1::RUNNING);
  Pass(3, {});
  Register("a", 1);
  Register("b", 1);
  Step("a", 9);
  EXPECT_EQ(Get("job").progress().step(), 9) << "training went on meanwhile";
  EXPECT_TRUE(TakeStarts("a").empty());
  Pass(20, {"a", "b"});
  EndAll("a", Succeeded);
  EndAll("b", Succeeded);
  EXPECT_EQ(Get("job").state(), v1::SUCCEEDED);
  EXPECT_EQ(Get("job").attempts_size(), 1);
}

TEST_F(CoreAttempts, AResultReportedToTheRestartedControllerCounts) {
  RunOn2Workers();
  Restart();
  Register("a", 1, "i1", false);
  EndAll("a", Succeeded);
  Register("b", 1, "i1", false);
  EndAll("b", Succeeded);
  EXPECT_EQ(Get("job").state(), v1::SUCCEEDED);
}

TEST_F(CoreAttempts, ADaemonRestartedDuringTheOutageHasLostItsRanks) {
  RunOn2Workers();
  Restart();
  running_["b"].clear();
  Register("a", 1);
  Register("b", 1, "i2");
  EXPECT_TRUE(TakeStarts("b").empty());
  EndAll("a", Stopped);
  EXPECT_EQ(Get("job").attempts(0).end_class(), v1::WORKER_LOST);
}

TEST_F(CoreAttempts, WorkersThatDoNotComeBackToARestartedControllerAreLost) {
  RunOn2Workers();
  Restart();
  Pass(11, {});
  EXPECT_EQ(Get("job").state(), v1::RESTARTING);
  EXPECT_EQ(Get("job").attempts(0).end_class(), v1::WORKER_LOST);
}

TEST_F(CoreAttempts, AGangThatWasMeetingDuringTheOutageStartsOverWithoutCountingAFailure) {
  Register("a", 1);
  Register("b", 1);
  ASSERT_TRUE(Submit(Spec("job")).ok());
  StartAll("a", internal::v1::RANK_MEETING);
  StartAll("b", internal::v1::RANK_MEETING);
  Restart();
  Register("a", 1);
  Register("b", 1);
  EXPECT_EQ(TakeStops("a").size(), 1u) << "its rendezvous is gone";
  EndAll("a", Stopped);
  EndAll("b", Stopped);
  EXPECT_EQ(Get("job").restarts(), 0);
  EXPECT_EQ(Get("job").state(), v1::STARTING);
  EXPECT_EQ(TakeStarts("a").at(0).attempt(), 2);
}

TEST_F(CoreAttempts, ADrainSavesAndMovesTheJobWithoutCountingAFailure) {
  RunOn2Workers();
  const auto drained = core_->Drain({.name = "workers/b", .reason = "memory errors"}, now_);
  ASSERT_TRUE(drained.ok());
  EXPECT_EQ(drained->state(), "DRAINING");
  Settle();
  EXPECT_TRUE(TakeStops("a").at(0).wishes().suspend());
  EndAll("a", Suspended);
  EndAll("b", Suspended);
  EXPECT_EQ(Get("job").state(), v1::PENDING);
  EXPECT_EQ(Get("job").restarts(), 0);
  EXPECT_EQ(Get("job").attempts(0).end_class(), v1::DRAINED);
  EXPECT_EQ(Get("job").pending().reason(), v1::WORKERS_DRAINING);
  Register("c", 1);
  EXPECT_EQ(Get("job").state(), v1::STARTING);
  EXPECT_EQ(Get("job").attempts(1).placements(1).worker(), "workers/c");
}

TEST_F(CoreAttempts, ADrainByAnOperatorSurvivesRestartsAndCanBeUndone) {
  Register("a", 1);
  ASSERT_TRUE(core_->Drain({.name = "a", .reason = "x"}, now_).ok());
  Settle();
  Restart();
  Register("a", 1, "i2");
  EXPECT_EQ(core_->Workers({})->workers(0).state(), "DRAINING");
  ASSERT_TRUE(core_->Drain({.name = "a", .undo = true}, now_).ok());
  EXPECT_EQ(core_->Workers({})->workers(0).state(), "READY");
  EXPECT_EQ(ErrorReason(core_->Drain({.name = "nobody"}, now_).status()), "WORKER_NOT_FOUND");
}

TEST_F(CoreAttempts, AnUnkillableRankPoisonsItsSlotOnly) {
  Register("a", 2);
  ASSERT_TRUE(Submit(Spec("job")).ok());
  StartAll("a", internal::v1::RANK_TRAINING);
  Step("a", 1);
  const auto ranks = running_["a"];
  running_["a"].clear();
  for (const auto& rank : ranks) {
    internal::v1::ReliableReport report;
    *report.mutable_ended() = EndedOf(rank);
    Killed(*report.mutable_ended());
    report.mutable_ended()->set_unkillable(rank.slot() == 1);
    Reliable("a", report);
  }
  const v1::Worker worker = core_->Workers({})->workers(0);
  EXPECT_FALSE(worker.slot_facts(0).poisoned());
  EXPECT_TRUE(worker.slot_facts(1).poisoned());
  EXPECT_EQ(worker.slots_free(), 1);
  Pass(6, {"a"});
  EXPECT_EQ(Get("job").pending().reason(), v1::EXCEEDS_CLUSTER);
}

TEST_F(CoreAttempts, ASecondDaemonWithTheSameNameIsRefused) {
  Register("a", 1, "i1");
  const SessionId first = session_of_["a"];
  sent_.clear();
  Register("a", 1, "other", false);
  ASSERT_FALSE(sent_["a"].empty());
  EXPECT_FALSE(sent_["a"][0].registered().accepted());
  EXPECT_THAT(sent_["a"][0].registered().reason(), HasSubstr("a worker named a is connected"));
  EXPECT_EQ(core_->state().workers.at("a").session, first);
}

TEST_F(CoreAttempts, RanksMeetThroughTheRendezvousStore) {
  Register("a", 1);
  Register("b", 1);
  ASSERT_TRUE(Submit(Spec("job")).ok());
  StartAll("a", internal::v1::RANK_MEETING);
  StartAll("b", internal::v1::RANK_MEETING);
  const auto ask = [&](const std::string& worker, std::int64_t id, bool set) {
    internal::v1::WorkerToController message;
    internal::v1::RankKeyValue& kv = *message.mutable_kv();
    kv.set_job_uid(running_[worker][0].job_uid());
    kv.set_attempt(running_[worker][0].attempt());
    kv.set_rank(running_[worker][0].rank());
    kv.mutable_request()->set_id(id);
    if (set) {
      kv.mutable_request()->mutable_set()->set_key("addr/0");
      kv.mutable_request()->mutable_set()->set_value("10.0.0.1:5000");
    } else {
      kv.mutable_request()->mutable_get()->set_key("addr/0");
      kv.mutable_request()->mutable_get()->set_timeout_ms(5000);
    }
    Send(worker, message);
  };
  sent_.clear();
  ask("b", 1, false);
  EXPECT_TRUE(sent_["b"].empty()) << "not yet there";
  ask("a", 1, true);
  ASSERT_EQ(sent_["b"].size(), 1u);
  EXPECT_TRUE(sent_["b"][0].kv().reply().ok());
  EXPECT_EQ(sent_["b"][0].kv().reply().value(), "10.0.0.1:5000");
  EXPECT_EQ(sent_["b"][0].kv().rank(), 1);
}

TEST_F(CoreAttempts, NewestPlanTravelsToRanksAndIsStoredWithItsStep) {
  RunOn2Workers();
  sent_.clear();
  PlanEdit edit{.name = "job", .reason = "test", .caller = "op"};
  v1::PrecisionOverride& change = edit.overrides.emplace_back();
  change.set_layers("1");
  change.mutable_recipe()->set_kind("bf16");
  const auto set = core_->SetPlan(edit, now_);
  ASSERT_TRUE(set.ok()) << ToString(set.status());
  Settle();
  EXPECT_EQ(set->plan().version(), 2);
  EXPECT_GT(set->changed_size(), 0);
  ASSERT_EQ(sent_["a"].size(), 1u);
  EXPECT_EQ(sent_["a"][0].plan().plan().version(), 2);
  internal::v1::ReliableReport report;
  report.mutable_plan_applied()->set_job_uid(Get("job").uid());
  report.mutable_plan_applied()->set_attempt(1);
  report.mutable_plan_applied()->mutable_applied()->set_version(2);
  report.mutable_plan_applied()->mutable_applied()->set_step(12);
  Reliable("a", report);
  Restart();
  v1::ListPlansRequest list;
  list.set_name("job");
  const auto plans = core_->Plans(list);
  ASSERT_EQ(plans->plans_size(), 2);
  EXPECT_EQ(plans->plans(0).version(), 2);
  EXPECT_EQ(plans->plans(0).applied_step(), 12);
  EXPECT_EQ(plans->plans(0).author_name(), "op");
  EXPECT_EQ(plans->plans(0).author(), v1::PLAN_AUTHOR_OPERATOR);
}

TEST_F(CoreAttempts, PlanChangesAreCheckedRacedAndRolledBack) {
  ASSERT_TRUE(Submit(Spec("job")).ok());
  PlanEdit edit{.name = "job", .etag = "p1"};
  v1::PrecisionOverride& change = edit.overrides.emplace_back();
  change.set_layers("1-2");
  change.mutable_recipe()->set_kind("bf16");
  ASSERT_TRUE(core_->SetPlan(edit, now_).ok());
  EXPECT_EQ(ErrorReason(core_->SetPlan(edit, now_).status()), "STALE_ETAG");
  edit.etag = "";
  EXPECT_EQ(ErrorReason(core_->SetPlan(edit, now_).status()), "PLAN_UNCHANGED");
  edit.overrides[0].set_layers("7");
  EXPECT_EQ(core_->SetPlan(edit, now_).status().code(), absl::StatusCode::kInvalidArgument);
  const auto back = core_->SetPlan({.name = "job", .rollback_to = 1}, now_);
  ASSERT_TRUE(back.ok());
  EXPECT_EQ(back->plan().version(), 3);
  EXPECT_EQ(ErrorReason(core_->SetPlan({.name = "job", .rollback_to = 9}, now_).status()),
            "PLAN_INVALID");
  const auto dry = core_->SetPlan({.name = "job", .rollback_to = 2, .validate_only = true}, now_);
  ASSERT_TRUE(dry.ok());
  EXPECT_EQ(core_->Precision("job")->plan().version(), 3);
}

TEST_F(CoreAttempts, AChangedPlanListsOpsThatExistAndWarnsOfProtectedLayers) {
  v1::JobSpec spec = Spec("job");
  spec.mutable_model()->add_dense_layers(0);
  spec.mutable_model()->set_dense_hidden(spec.model().hidden());
  ASSERT_TRUE(Submit(spec).ok());
  PlanEdit edit{.name = "job"};
  v1::PrecisionOverride& change = edit.overrides.emplace_back();
  change.set_layers("0-1");
  change.mutable_recipe()->set_kind("fp8_current");
  for (const char* op : {"attn_qkv", "mlp_fc1", "fc1"}) {
    change.add_ops(op);
  }
  const auto set = core_->SetPlan(edit, now_);
  ASSERT_TRUE(set.ok()) << Message(set.status());
  std::vector<std::string> sites;
  for (const v1::LayerOpRecipe& site : set->changed()) {
    sites.push_back(StrCat(site.layer(), " ", site.op()));
  }
  EXPECT_EQ(sites, (std::vector<std::string>{"0 attn_qkv", "0 mlp_fc1", "1 attn_qkv", "1 fc1"}));
  ASSERT_EQ(set->warnings_size(), 1);
  EXPECT_NE(set->warnings(0).find("layer 0 "), std::string::npos) << set->warnings(0);

  change.set_layers("0");
  change.clear_ops();
  change.add_ops("fc2");
  const absl::Status none = core_->SetPlan(edit, now_).status();
  EXPECT_EQ(ErrorReason(none), "PLAN_UNCHANGED");
  EXPECT_NE(Message(none).find("no such op"), std::string::npos) << Message(none);
}

TEST_F(CoreAttempts, TheEffectiveRecipeIsWhatRanksReport) {
  RunOn2Workers();
  EXPECT_EQ(core_->Precision("job")->effective().entries_size(), 0) << "no echo of the request";
  internal::v1::WorkerToController message;
  message.mutable_telemetry()->set_job_uid(Get("job").uid());
  message.mutable_telemetry()->set_attempt(1);
  internal::v1::TelemetrySnapshot& snapshot = *message.mutable_telemetry()->mutable_snapshot();
  snapshot.set_last_step(10);
  snapshot.set_plan_version(1);
  for (int i = 0; i < 4 * kOpCount; ++i) {
    snapshot.add_recipes_in_force(i / kOpCount == 0   ? "bf16"
                                  : i / kOpCount == 1 ? "fp8_flow"
                                                      : "fp8_flow(wgrad=bf16)");
  }
  (*snapshot.mutable_flops())["fp8"] = 60;
  (*snapshot.mutable_flops())["bf16"] = 40;
  snapshot.set_all_to_all_bytes(1000);
  internal::v1::ExecutedPrecision& executed = *snapshot.add_executed();
  executed.set_layer(2);
  executed.set_op(static_cast<std::int32_t>(Op::kFc1));
  executed.set_planned("fp8_flow");
  executed.set_executed("bf16");
  executed.set_reason("no tokens");
  executed.set_count(3);
  Send("a", message);
  Send("b", message);
  const v1::EffectivePrecision effective = core_->Precision("job")->effective();
  ASSERT_EQ(effective.entries_size(), 4 * kOpCount);
  EXPECT_EQ(effective.entries(0).recipe().kind(), "bf16");
  EXPECT_EQ(effective.entries(kOpCount).recipe().kind(), "fp8_flow");
  EXPECT_EQ(effective.entries(kOpCount).recipe().wgrad(), "fp8");
  EXPECT_EQ(effective.entries(2 * kOpCount).recipe().kind(), "fp8_flow");
  EXPECT_EQ(effective.entries(2 * kOpCount).recipe().wgrad(), "bf16") << "parameters too";
  ASSERT_EQ(effective.mismatches_size(), 1);
  EXPECT_EQ(effective.mismatches(0).count(), 6);
  const v1::JobProgress progress = Get("job").progress();
  EXPECT_EQ(progress.recipe_summary(), "fp8_flow 3/4 layers, bf16 1/4");
  EXPECT_DOUBLE_EQ(progress.fp8_flop_share(), 0.6);
  EXPECT_EQ(progress.all_to_all_bytes(), 2000);
}

}  // namespace
}  // namespace octavo
