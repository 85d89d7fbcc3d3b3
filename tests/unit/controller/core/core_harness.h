// A core with a memory store and workers played by hand: messages in, effects out, time by
// argument.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "base/str.h"
#include "controller/core/core.h"
#include "controller/store/memory_store.h"
#include "gtest/gtest.h"
#include "tests/unit/controller/core/test_spec.h"

namespace octavo {

class CoreHarness : public testing::Test {
 protected:
  CoreHarness() { Restart(); }

  // As kill -9 and a new process: what was not committed is gone.
  void Restart() {
    core_ = std::make_unique<Core>(options_, &store_, nullptr);
    const absl::Status recovered = core_->Recover(now_);
    ASSERT_TRUE(recovered.ok()) << ToString(recovered);
    sent_.clear();
    sessions_.clear();
    core_->TakeEffects();
  }

  static v1::JobSpec Spec(const std::string& name, std::int32_t ranks = 2) {
    return TestSpec(name, [ranks](v1::JobSpec& spec) {
      spec.mutable_parallel()->set_ranks(ranks);
      spec.mutable_train()->set_global_batch(ranks * 2);
    });
  }

  absl::StatusOr<v1::Job> Submit(const v1::JobSpec& spec, const std::string& request_id = "") {
    auto job = core_->Submit({.request_id = request_id,
                              .spec = spec,
                              .spec_yaml = spec.SerializeAsString(),
                              .caller = "ada"},
                             now_);
    Settle();
    return job;
  }
  absl::StatusOr<v1::Job> Verb(JobVerb verb, const std::string& name) {
    auto job = core_->Verb(verb, {.name = name, .caller = "ada"}, now_);
    Settle();
    return job;
  }
  v1::Job Get(const std::string& name) {
    auto job = core_->Get(name);
    EXPECT_TRUE(job.ok()) << ToString(job.status());
    return job.ok() ? *job : v1::Job();
  }

  // Ticks, schedules, commits, and sorts the effects by worker.
  void Settle() {
    core_->Tick(now_);
    if (core_->WantsSchedule(now_)) {
      core_->Schedule(now_);
    }
    const StoreBatch batch = core_->TakeBatch();
    if (!batch.empty()) {
      ASSERT_TRUE(store_.Commit(batch).ok());
    }
    for (Effect& effect : core_->TakeEffects()) {
      if (auto* send = std::get_if<SendToWorker>(&effect)) {
        sent_[sessions_[send->session]].push_back(std::move(send->message));
      } else if (auto* event = std::get_if<PublishEvent>(&effect)) {
        published_.push_back(std::move(event->event));
      } else if (auto* close = std::get_if<CloseWorkerSession>(&effect)) {
        closed_.push_back(close->reason);
      }
    }
  }
  void Advance(double seconds) {
    const auto micros = static_cast<std::int64_t>(seconds * 1e6);
    now_.mono_micros += micros;
    now_.unix_micros += micros;
  }
  // Time passes in steps of a second; the workers named are heard every second.
  void Pass(int seconds, const std::vector<std::string>& heard) {
    for (int i = 0; i < seconds; ++i) {
      Advance(1);
      for (const std::string& worker : heard) {
        Heartbeat(worker);
      }
      Settle();
    }
  }

  // -------------------------------------------------------------- workers

  void Register(const std::string& worker, int slots, const std::string& incarnation = "i1",
                bool heartbeat = true) {
    session_of_[worker] = next_session_++;
    sessions_[session_of_[worker]] = worker;
    internal::v1::WorkerToController message;
    internal::v1::Register& request = *message.mutable_register_();
    request.set_worker(worker);
    request.set_incarnation(incarnation);
    request.set_version(options_.version);
    request.set_address("10.0.0." + std::to_string(next_session_));
    request.set_device("cpu");
    for (int slot = 0; slot < slots; ++slot) {
      request.add_slots()->set_slot(slot);
    }
    for (const auto& rank : running_[worker]) {
      *request.add_running() = rank;
    }
    core_->WorkerMessage(session_of_[worker], message, now_);
    Settle();
    if (heartbeat) {
      Heartbeat(worker);
      Settle();
    }
  }
  void Send(const std::string& worker, const internal::v1::WorkerToController& message) {
    core_->WorkerMessage(session_of_[worker], message, now_);
    Settle();
  }
  void Disconnect(const std::string& worker) {
    core_->SessionClosed(session_of_[worker], now_);
    Settle();
  }
  void Heartbeat(const std::string& worker) {
    internal::v1::WorkerToController message;
    message.mutable_heartbeat();
    for (const auto& rank : running_[worker]) {
      *message.mutable_heartbeat()->add_running() = rank;
    }
    Send(worker, message);
  }
  // Takes the StartRanks sent to the worker since the last call.
  std::vector<internal::v1::RankAssignment> TakeStarts(const std::string& worker) {
    std::vector<internal::v1::RankAssignment> starts;
    std::erase_if(sent_[worker], [&](const internal::v1::ControllerToWorker& message) {
      if (!message.has_start()) {
        return false;
      }
      starts.push_back(message.start().assignment());
      for (const internal::v1::StartRank::Seat& seat : message.start().more()) {
        internal::v1::RankAssignment& other = starts.emplace_back(message.start().assignment());
        other.set_rank(seat.rank());
        other.set_slot(seat.slot());
        other.set_device_ordinal(seat.device_ordinal());
      }
      return true;
    });
    return starts;
  }
  std::vector<internal::v1::StopRank> TakeStops(const std::string& worker) {
    std::vector<internal::v1::StopRank> stops;
    std::erase_if(sent_[worker], [&](const internal::v1::ControllerToWorker& message) {
      if (!message.has_stop()) {
        return false;
      }
      stops.push_back(message.stop());
      return true;
    });
    return stops;
  }
  // The worker starts what it was told; every rank is in `phase`.
  void StartAll(const std::string& worker, internal::v1::RankPhase phase) {
    for (const internal::v1::RankAssignment& start : TakeStarts(worker)) {
      internal::v1::RunningRank rank;
      rank.set_job_uid(start.job_uid());
      rank.set_attempt(start.attempt());
      rank.set_rank(start.rank());
      rank.set_slot(start.slot());
      rank.mutable_progress()->set_phase(phase);
      running_[worker].push_back(rank);
    }
    Heartbeat(worker);
  }
  void SetPhase(const std::string& worker, internal::v1::RankPhase phase) {
    for (auto& rank : running_[worker]) {
      rank.mutable_progress()->set_phase(phase);
    }
    Heartbeat(worker);
  }
  void Step(const std::string& worker, std::int64_t step, double loss = 2.0) {
    internal::v1::WorkerToController message;
    const internal::v1::RunningRank& rank = running_[worker].at(0);
    message.mutable_step()->set_job_uid(rank.job_uid());
    message.mutable_step()->set_attempt(rank.attempt());
    internal::v1::StepReport& report = *message.mutable_step()->mutable_report();
    report.set_step(step);
    report.set_loss(loss);
    report.set_tokens(256);
    report.set_step_seconds(0.5);
    report.set_plan_version(1);
    Send(worker, message);
  }
  void Reliable(const std::string& worker, internal::v1::ReliableReport report) {
    report.set_sequence(++sequence_[worker]);
    internal::v1::WorkerToController message;
    *message.mutable_reliable() = std::move(report);
    Send(worker, message);
  }
  internal::v1::RankEnded EndedOf(const internal::v1::RunningRank& rank) {
    internal::v1::RankEnded ended;
    ended.set_job_uid(rank.job_uid());
    ended.set_attempt(rank.attempt());
    ended.set_rank(rank.rank());
    ended.set_slot(rank.slot());
    return ended;
  }
  // Every rank on the worker ends; `edit` makes the evidence.
  template <class Edit>
  void EndAll(const std::string& worker, Edit edit) {
    const std::vector<internal::v1::RunningRank> ranks = std::exchange(running_[worker], {});
    for (const internal::v1::RunningRank& rank : ranks) {
      internal::v1::ReliableReport report;
      *report.mutable_ended() = EndedOf(rank);
      edit(*report.mutable_ended());
      Reliable(worker, report);
    }
  }
  static void Succeeded(internal::v1::RankEnded& ended) { ended.mutable_outcome(); }
  static void Stopped(internal::v1::RankEnded& ended) {
    ended.mutable_outcome()->set_stopped(true);
  }
  static void Suspended(internal::v1::RankEnded& ended) {
    ended.mutable_outcome()->set_suspended(true);
  }
  static void Killed(internal::v1::RankEnded& ended) {
    ended.set_exit_code(-1);
    ended.set_signal(9);
  }

  // A job of 2 ranks, one on each of workers a and b, that trains.
  void RunOn2Workers(const std::string& name = "job") {
    Register("a", 1);
    Register("b", 1);
    ASSERT_TRUE(Submit(Spec(name)).ok());
    StartAll("a", internal::v1::RANK_TRAINING);
    StartAll("b", internal::v1::RANK_TRAINING);
    ASSERT_EQ(Get(name).state(), v1::RUNNING);
  }
  std::vector<std::string> Kinds(const std::string& name) {
    v1::ListEventsRequest request;
    request.set_name(name);
    request.set_page_size(1000);
    std::vector<std::string> kinds;
    const auto listed = core_->Events(request);
    EXPECT_TRUE(listed.ok()) << ToString(listed.status());
    for (const v1::JobEvent& event : listed->events()) {
      kinds.push_back(event.kind());
    }
    return kinds;
  }

  CoreOptions options_;
  MemoryStore store_;
  Now now_{.mono_micros = 1000000000, .unix_micros = 1790000000000000};
  std::unique_ptr<Core> core_;
  std::map<SessionId, std::string> sessions_;
  std::map<std::string, SessionId> session_of_;
  SessionId next_session_ = 1;
  std::map<std::string, std::vector<internal::v1::ControllerToWorker>> sent_;
  std::map<std::string, std::vector<internal::v1::RunningRank>> running_;
  std::map<std::string, std::int64_t> sequence_;
  std::vector<v1::JobEvent> published_;
  std::vector<std::string> closed_;
};

}  // namespace octavo
