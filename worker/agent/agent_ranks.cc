// The agent's side towards ranks: starting, stopping, messages, ends.
#include <signal.h>

#include <algorithm>
#include <utility>

#include "base/clock.h"
#include "proto/limits.h"
#include "worker/agent/agent.h"

namespace octavo {
namespace {

constexpr std::size_t kPendingKvMax = 65536;  // of all ranks of this host
// From the process's end to the end of its stream: local socket, already written bytes.
constexpr std::int64_t kLastWordWaitMicros = 2 * kMicrosPerSecond;

}  // namespace

// ---------------------------------------------------------------- commands of the controller

void Agent::OnStart(const iv1::StartRank& start) {
  OnStartRank(start.assignment());
  for (const iv1::StartRank::Seat& seat : start.more()) {
    iv1::RankAssignment assignment = start.assignment();
    assignment.set_rank(seat.rank());
    assignment.set_slot(seat.slot());
    assignment.set_device_ordinal(seat.device_ordinal());
    OnStartRank(assignment);
  }
}

void Agent::OnStartRank(const iv1::RankAssignment& assignment) {
  const RankKey key = KeyOf(assignment);
  if (ranks_.count(key) != 0) {
    return;  // repeated after a reconnect
  }
  const auto ended = ended_.find({key.job_uid, key.rank});
  if (ended != ended_.end() && ended->second == key.attempt) {
    return;  // it ran and ended; the report is on its way or was acknowledged
  }
  std::int32_t& newest = newest_attempt_[key.job_uid];
  if (key.attempt < newest) {
    RefuseStart(assignment, v1::RANK_EXIT,
                StrCat("attempt ", key.attempt, " is stale; this worker has seen ", newest));
    return;
  }
  newest = key.attempt;
  for (auto& [other_key, other] : ranks_) {
    if (other_key.job_uid == key.job_uid && other_key.attempt < key.attempt) {
      other.KillNow(StrCat("fenced by attempt ", key.attempt), now_micros_);
    }
  }
  if (draining_) {
    RefuseStart(assignment, v1::DRAINED, StrCat("worker is draining: ", drain_reason_));
    return;
  }
  const int slot = assignment.slot();
  if (slot < 0 || slot >= static_cast<int>(poisoned_.size())) {
    RefuseStart(assignment, v1::RANK_EXIT,
                StrCat("slot ", slot, " does not exist; this worker has slots 0 to ",
                       static_cast<int>(poisoned_.size()) - 1));
    return;
  }
  if (poisoned_[static_cast<std::size_t>(slot)]) {
    RefuseStart(assignment, v1::SLOT_POISONED, StrCat("slot ", slot, " is poisoned"));
    return;
  }
  const auto tenant = std::find_if(ranks_.begin(), ranks_.end(), [slot](const auto& entry) {
    return entry.second.slot() == slot;
  });
  if (tenant != ranks_.end()) {
    RefuseStart(assignment, v1::RANK_EXIT,
                StrCat("slot ", slot, " is busy with ", tenant->first.DebugString(), " (",
                       RankStateName(tenant->second.state()), ")"));
    return;
  }
  ranks_.emplace(key, RankProcess(assignment, now_micros_));
  Log(false, "rank_starting", StrCat(key.DebugString(), " slot ", slot));
  out_.push_back(SpawnRank{key});
}

void Agent::OnStopRank(const iv1::StopRank& stop) {
  const RankKey key = KeyOf(stop);
  const auto found = ranks_.find(key);
  if (found == ranks_.end()) {
    const auto ended = ended_.find({key.job_uid, key.rank});
    if (ended != ended_.end() && ended->second >= key.attempt) {
      return;  // its end is reported already
    }
    // No outcome: the controller asked, and there is nothing of ours to blame.
    iv1::RankEnded ended_here;
    ended_here.set_job_uid(key.job_uid);
    ended_here.set_attempt(key.attempt);
    ended_here.set_rank(key.rank);
    ended_here.set_slot(-1);
    ended_here.set_exit_code(-1);
    ended_here.set_never_started(true);
    ended_here.set_log_tail(StrCat(config_.worker, " does not run it\n"));
    ReportEnd(std::move(ended_here));
    return;
  }
  RankProcess& rank = found->second;
  if (rank.state() == RankState::kUnkillable) {
    return;
  }
  if (stop.kill_now()) {
    rank.KillNow("killed on the controller's order", now_micros_);
    On(Tick{});  // the signal must not wait for the next tick
    return;
  }
  iv1::Wishes wishes = stop.wishes();
  if (!wishes.stop() && !wishes.suspend() && !wishes.stop_without_checkpoint()) {
    wishes.set_stop(true);
  }
  if (rank.SetControllerWishes(wishes)) {
    SendWishesTo(rank);
  }
  const std::int64_t grace_ms = stop.grace_ms() > 0 ? stop.grace_ms() : kRankStopGraceMs;
  rank.AskToLeave(
      {.grace_micros = grace_ms * kMicrosPerMilli,
       .cause = StrCat("asked to stop by the controller, with ", grace_ms, " ms of grace"),
       .failure = v1::RANK_EXIT},
      now_micros_);
}

void Agent::OnPlan(const iv1::SendPlan& plan) {
  for (auto& [key, rank] : ranks_) {
    if (key.job_uid != plan.job_uid() || key.attempt != plan.attempt() ||
        plan.plan().version() <= rank.assignment().plan().version()) {
      continue;
    }
    *rank.assignment().mutable_plan() = plan.plan();  // what a rank gets that says hello later
    if (rank.connected()) {
      iv1::WorkerToRank message;
      *message.mutable_plan() = plan.plan();
      out_.push_back(SendToRank{rank.stream(), std::move(message)});
    }
  }
}

void Agent::OnWishes(const iv1::SendWishes& wishes) {
  for (auto& [key, rank] : ranks_) {
    if (key.job_uid == wishes.job_uid() && key.attempt == wishes.attempt() &&
        rank.SetControllerWishes(wishes.wishes())) {
      SendWishesTo(rank);
    }
  }
}

// Not kept: a rank that is not connected has no steps to time, and a person asks again.
void Agent::OnProfile(const iv1::SendProfile& profile) {
  for (const auto& [key, rank] : ranks_) {
    if (key.job_uid == profile.job_uid() && key.attempt == profile.attempt() && rank.connected()) {
      iv1::WorkerToRank message;
      *message.mutable_profile() = profile.wish();
      out_.push_back(SendToRank{rank.stream(), std::move(message)});
    }
  }
}

void Agent::OnKvReply(const iv1::RankKeyValueReply& reply) {
  const RankKey key = KeyOf(reply);
  if (pending_kv_.erase({key, reply.reply().id()}) == 0) {
    return;  // answered twice after a reconnect, or timed out here
  }
  const auto rank = ranks_.find(key);
  if (rank != ranks_.end() && rank->second.connected()) {
    iv1::WorkerToRank message;
    *message.mutable_kv() = reply.reply();
    out_.push_back(SendToRank{rank->second.stream(), std::move(message)});
  }
}

// ---------------------------------------------------------------- processes

void Agent::On(const RankSpawned& event) {
  const auto rank = ranks_.find(event.key);
  if (rank != ranks_.end()) {
    rank->second.OnSpawned(event.pid, now_micros_);
    Log(false, "rank_started", StrCat(event.key.DebugString(), " pid ", event.pid));
  }
}

void Agent::On(const RankSpawnFailed& event) {
  const auto rank = ranks_.find(event.key);
  if (rank != ranks_.end()) {
    const iv1::RankAssignment assignment = rank->second.assignment();
    RemoveRank(event.key);
    RefuseStart(assignment, v1::RANK_EXIT, event.error);
  }
}

void Agent::On(const RankExited& event) {
  const auto found = ranks_.find(event.key);
  if (found == ranks_.end()) {
    return;
  }
  RankProcess& rank = found->second;
  rank.ended = {.exit = event.exit,
                .log_tail = event.log_tail,
                .out_of_memory = event.out_of_memory,
                .report_by_micros = now_micros_ + kLastWordWaitMicros};
  if (!rank.connected()) {
    FinishRank(event.key);
  }
}

void Agent::FinishRank(const RankKey& key) {
  const RankProcess& rank = ranks_.at(key);
  const RankProcess::Ended& end = *rank.ended;
  Log(!end.exit.success(), "rank_ended",
      StrCat(key.DebugString(), " ", end.exit.DebugString(),
             rank.cause().empty() ? "" : StrCat(" after: ", rank.cause())));
  if (rank.state() == RankState::kUnkillable) {
    // Reported long ago; the slot is usable again, which the next Register tells.
    poisoned_[static_cast<std::size_t>(rank.slot())] = false;
    RemoveRank(key);
    return;
  }
  iv1::RankEnded ended;
  ended.set_job_uid(key.job_uid);
  ended.set_attempt(key.attempt);
  ended.set_rank(key.rank);
  ended.set_slot(rank.slot());
  ended.set_exit_code(end.exit.code);
  ended.set_signal(end.exit.signal);
  ended.set_log_tail(end.log_tail);
  if (rank.outcome.has_value()) {
    *ended.mutable_outcome() = *rank.outcome;
  } else if (!rank.cause().empty() &&
             (end.exit.signal == 0 || end.exit.signal == SIGTERM || end.exit.signal == SIGKILL)) {
    // No last word, but we know why it had to leave: say so, the exit alone ("signal 9") cannot.
    ended.mutable_outcome()->set_failure_class(rank.cause_class());
    ended.mutable_outcome()->set_message(rank.cause());
    ended.mutable_outcome()->set_step(rank.progress.step());
  } else if (end.out_of_memory && end.exit.signal == SIGKILL) {
    ended.mutable_outcome()->set_failure_class(v1::RANK_OOM);
    ended.mutable_outcome()->set_message(
        StrCat("killed for memory on ", config_.worker, " (the cgroup's oom_kill count grew)"));
    ended.mutable_outcome()->set_step(rank.progress.step());
  }
  // Step reports are not repeated when a session breaks; the newest one comes with the end, which
  // is.
  if (rank.last_step.has_value()) {
    *ended.mutable_last_step() = *rank.last_step;
  }
  RemoveRank(key);
  ReportEnd(std::move(ended));
}

void Agent::ReportEnd(iv1::RankEnded ended) {
  const RankKey key = KeyOf(ended);
  std::int32_t& attempt = ended_[{key.job_uid, key.rank}];
  attempt = std::max(attempt, key.attempt);
  drain_deadline_micros_ = std::max(drain_deadline_micros_, now_micros_ + 5 * kMicrosPerSecond);
  iv1::ReliableReport report;
  *report.mutable_ended() = std::move(ended);
  AddReliable(std::move(report));
}

void Agent::RefuseStart(const iv1::RankAssignment& assignment, v1::FailureClass failure,
                        const std::string& why) {
  Log(true, "rank_refused", StrCat(KeyOf(assignment).DebugString(), ": ", why));
  iv1::RankEnded ended;
  ended.set_job_uid(assignment.job_uid());
  ended.set_attempt(assignment.attempt());
  ended.set_rank(assignment.rank());
  ended.set_slot(assignment.slot());
  ended.set_exit_code(-1);
  ended.set_never_started(true);
  ended.mutable_outcome()->set_failure_class(failure);
  ended.mutable_outcome()->set_message(StrCat("not started on ", config_.worker, ": ", why));
  ReportEnd(std::move(ended));
}

void Agent::RemoveRank(const RankKey& key) {
  const auto found = ranks_.find(key);
  const std::string train_job = found->second.assignment().job_name();
  if (found->second.connected()) {
    streams_.erase(found->second.stream());
    out_.push_back(CloseRankStream{found->second.stream(), "the rank has ended"});
  }
  ranks_.erase(found);
  std::erase_if(pending_kv_, [&](const auto& entry) { return entry.first.first == key; });
  const JobAttempt id = {key.job_uid, key.attempt};
  const bool attempt_over = std::none_of(ranks_.begin(), ranks_.end(), [&](const auto& entry) {
    return entry.first.job_uid == key.job_uid && entry.first.attempt == key.attempt;
  });
  const auto merger = mergers_.find(id);
  if (attempt_over && merger != mergers_.end()) {
    ForwardTelemetry(id, merger->second.Flush(now_micros_ + TelemetryMerger::kMergeWaitMicros));
    mergers_.erase(merger);
  }
  const bool job_gone = std::none_of(ranks_.begin(), ranks_.end(), [&](const auto& entry) {
    return entry.first.job_uid == key.job_uid;
  });
  if (job_gone) {
    out_.push_back(ForgetJobSeries{train_job});
  }
}

void Agent::StopForLocalCause(RankProcess& rank, std::int64_t grace_ms, v1::FailureClass failure,
                              const std::string& cause) {
  if (rank.SetLocalStop(/*with_checkpoint=*/true)) {
    SendWishesTo(rank);
  }
  rank.AskToLeave({.grace_micros = grace_ms * kMicrosPerMilli, .cause = cause, .failure = failure},
                  now_micros_);
}

void Agent::SendWishesTo(const RankProcess& rank) {
  if (rank.connected()) {
    iv1::WorkerToRank message;
    *message.mutable_wishes() = rank.wishes();
    out_.push_back(SendToRank{rank.stream(), std::move(message)});
  }
}

// ---------------------------------------------------------------- messages of ranks

void Agent::On(const FromRank& event) {
  const RankKey key = KeyOf(event.message);
  const auto bound = streams_.find(event.stream);
  if (bound == streams_.end()) {
    if (!event.message.has_hello()) {
      out_.push_back(CloseRankStream{event.stream, "the first message must be RankHello"});
      return;
    }
    OnHello(event.stream, key);
    return;
  }
  if (bound->second != key) {
    out_.push_back(
        CloseRankStream{event.stream, StrCat("this stream belongs to ", bound->second.DebugString(),
                                             ", not to ", key.DebugString())});
    return;
  }
  OnRankBody(ranks_.at(key), event.message);
}

void Agent::OnHello(std::int64_t stream, const RankKey& key) {
  const auto found = ranks_.find(key);
  if (found == ranks_.end() || found->second.connected()) {
    out_.push_back(CloseRankStream{
        stream, StrCat(key.DebugString(), found == ranks_.end() ? " is not a rank of this worker"
                                                                : " has said hello already")});
    return;
  }
  RankProcess& rank = found->second;
  rank.OnHello(stream);
  streams_[stream] = key;
  iv1::WorkerToRank message;
  *message.mutable_assignment() = rank.assignment();
  out_.push_back(SendToRank{stream, std::move(message)});
  if (rank.wishes().sequence() > 0) {
    SendWishesTo(rank);
  }
}

void Agent::On(const RankStreamClosed& event) {
  const auto bound = streams_.find(event.stream);
  if (bound == streams_.end()) {
    return;
  }
  const RankKey key = bound->second;
  RankProcess& rank = ranks_.at(key);
  rank.clear_stream();
  streams_.erase(bound);
  if (rank.ended.has_value()) {
    FinishRank(key);
    return;
  }
  rank.ExpectExit(kRankTermGraceMs * kMicrosPerMilli, "its link to the worker broke", now_micros_);
}

void Agent::OnRankBody(RankProcess& rank, const iv1::RankToWorker& message) {
  const RankKey key = rank.key();
  const std::string& train_job = rank.assignment().job_name();
  const auto address = [&key](auto* wire) {
    wire->set_job_uid(key.job_uid);
    wire->set_attempt(key.attempt);
    wire->set_rank(key.rank);
    return wire;
  };
  iv1::ReliableReport report;
  iv1::WorkerToController up;
  switch (message.body_case()) {
    case iv1::RankToWorker::kProgress: {
      const std::int64_t step = std::max(rank.progress.step(), message.progress().step());
      rank.progress = message.progress();
      rank.progress.set_step(step);
      break;
    }
    case iv1::RankToWorker::kStep:
      rank.progress.set_step(std::max(rank.progress.step(), message.step().step()));
      rank.last_step = message.step();
      out_.push_back(ObserveStep{train_job, message.step()});
      up.mutable_step()->set_job_uid(key.job_uid);
      up.mutable_step()->set_attempt(key.attempt);
      *up.mutable_step()->mutable_report() = message.step();
      SendOrBuffer(std::move(up));
      break;
    case iv1::RankToWorker::kTelemetry: {
      const auto local = std::count_if(ranks_.begin(), ranks_.end(), [&](const auto& entry) {
        return entry.first.job_uid == key.job_uid && entry.first.attempt == key.attempt &&
               entry.second.connected();
      });
      const JobAttempt id = {key.job_uid, key.attempt};
      ForwardTelemetry(id,
                       mergers_[id].Add(message.telemetry(), static_cast<int>(local), now_micros_));
      break;
    }
    case iv1::RankToWorker::kKv:
      OnKvRequest(rank, message.kv());
      break;
    case iv1::RankToWorker::kCheckpoint:
      out_.push_back(ObserveCheckpoint{train_job, message.checkpoint()});
      *address(report.mutable_checkpoint())->mutable_done() = message.checkpoint();
      AddReliable(std::move(report));
      break;
    case iv1::RankToWorker::kPlanApplied:
      *address(report.mutable_plan_applied())->mutable_applied() = message.plan_applied();
      AddReliable(std::move(report));
      break;
    case iv1::RankToWorker::kAttemptStart:
      *address(report.mutable_attempt_start())->mutable_start() = message.attempt_start();
      AddReliable(std::move(report));
      break;
    case iv1::RankToWorker::kProfile:
      up.mutable_profile()->set_job_uid(key.job_uid);
      up.mutable_profile()->set_attempt(key.attempt);
      *up.mutable_profile()->mutable_profile() = message.profile();
      up.mutable_profile()->mutable_profile()->set_rank(key.rank);
      SendOrBuffer(std::move(up));
      break;
    case iv1::RankToWorker::kOutcome:
      rank.outcome = message.outcome();
      rank.progress.set_phase(iv1::RANK_FINISHED);
      rank.ExpectExit(kRankStopGraceMs * kMicrosPerMilli, "it said its last word but did not exit",
                      now_micros_);
      break;
    case iv1::RankToWorker::kHello:
    case iv1::RankToWorker::BODY_NOT_SET:
      break;
  }
}

void Agent::OnKvRequest(RankProcess& rank, const iv1::KeyValueRequest& request) {
  const RankKey key = rank.key();
  if (pending_kv_.size() >= kPendingKvMax) {
    iv1::WorkerToRank message;
    message.mutable_kv()->set_id(request.id());
    message.mutable_kv()->set_error(StrCat("more than ", kPendingKvMax, " requests wait"));
    out_.push_back(SendToRank{rank.stream(), std::move(message)});
    return;
  }
  const std::int64_t wait_ms = request.has_get() && request.get().timeout_ms() > 0
                                   ? request.get().timeout_ms()
                                   : kRendezvousGetMs;
  // Longer than the controller's own bound for the same request, so that its better text wins.
  pending_kv_[{key, request.id()}] = {
      .request = request,
      .deadline_micros = now_micros_ + wait_ms * kMicrosPerMilli + 2 * kMicrosPerSecond};
  if (registered_) {
    iv1::WorkerToController message;
    iv1::RankKeyValue* kv = message.mutable_kv();
    kv->set_job_uid(key.job_uid);
    kv->set_attempt(key.attempt);
    kv->set_rank(key.rank);
    *kv->mutable_request() = request;
    SendUp(std::move(message));
  }
}

void Agent::ForwardTelemetry(const JobAttempt& id, std::vector<iv1::TelemetrySnapshot> snapshots) {
  for (iv1::TelemetrySnapshot& snapshot : snapshots) {
    for (const auto& [key, rank] : ranks_) {
      if (key.job_uid == id.first) {
        out_.push_back(ObserveTelemetry{rank.assignment().job_name(),
                                        rank.assignment().spec().telemetry().detail(), snapshot});
        break;
      }
    }
    iv1::WorkerToController up;
    up.mutable_telemetry()->set_job_uid(id.first);
    up.mutable_telemetry()->set_attempt(id.second);
    *up.mutable_telemetry()->mutable_snapshot() = std::move(snapshot);
    SendOrBuffer(std::move(up));
  }
}

}  // namespace octavo
