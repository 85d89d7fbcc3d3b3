// The agent's side towards the controller, and its timers. The side towards ranks is
// agent_ranks.cc.
#include "worker/agent/agent.h"

#include <signal.h>

#include <algorithm>
#include <utility>

#include "base/clock.h"
#include "proto/limits.h"

namespace octavo {
namespace {

// A stream on which the controller does not answer Register is dropped and dialled again.
constexpr std::int64_t kRegisterTimeoutMicros = kWorkerLeaseMs * kMicrosPerMilli;
// After the last rank has ended, a draining daemon waits so long for the acknowledgement.
constexpr std::int64_t kDrainReportMicros = 5 * kMicrosPerSecond;

}  // namespace

Agent::Agent(AgentConfig config, std::int64_t now_micros)
    : config_(std::move(config)),
      now_micros_(now_micros),
      disconnected_since_micros_(now_micros),
      heartbeat_interval_micros_(kHeartbeatIntervalMs * kMicrosPerMilli),
      orphan_grace_micros_(
          (config_.orphan_grace_ms > 0 ? config_.orphan_grace_ms : kOrphanGraceMs) *
          kMicrosPerMilli),
      poisoned_(config_.slots.size(), false) {
  for (std::size_t slot = 0; slot < config_.slots.size(); ++slot) {
    poisoned_[slot] = config_.slots[slot].poisoned();  // its probe failed
  }
}

Commands Agent::Handle(const Event& event, std::int64_t now_micros) {
  now_micros_ = std::max(now_micros_, now_micros);
  std::visit([this](const auto& typed) { On(typed); }, event);
  return std::exchange(out_, {});
}

bool Agent::finished(std::int64_t now_micros) const {
  if (!draining_) {
    return false;
  }
  const bool ranks_gone = std::all_of(ranks_.begin(), ranks_.end(), [](const auto& entry) {
    return entry.second.state() == RankState::kUnkillable;
  });
  return ranks_gone && (outbox_.reliable().empty() || now_micros >= drain_deadline_micros_);
}

int Agent::slots_busy() const { return static_cast<int>(ranks_.size()); }
int Agent::slots_poisoned() const {
  return static_cast<int>(std::count(poisoned_.begin(), poisoned_.end(), true));
}

// ---------------------------------------------------------------- session

void Agent::On(const SessionOpened&) {
  session_open_ = true;
  session_opened_micros_ = now_micros_;
  iv1::WorkerToController message;
  iv1::Register* hello = message.mutable_register_();
  hello->set_worker(config_.worker);
  hello->set_incarnation(config_.incarnation);
  hello->set_address(config_.address);
  hello->set_host(config_.host);
  hello->set_http_address(config_.http_address);
  hello->set_version(config_.version);
  hello->set_device(config_.device);
  for (std::size_t slot = 0; slot < config_.slots.size(); ++slot) {
    v1::SlotFacts* facts = hello->add_slots();
    *facts = config_.slots[slot];
    facts->set_slot(static_cast<std::int32_t>(slot));
    facts->set_poisoned(poisoned_[slot]);
  }
  FillRunning(hello->mutable_running());
  out_.push_back(SendToController{std::move(message)});
}

void Agent::On(const SessionClosed& event) {
  session_open_ = false;
  if (registered_) {
    registered_ = false;
    disconnected_since_micros_ = now_micros_;
    Log(true, "controller_disconnected",
        StrCat(event.reason, "; ", ranks_.size(), " ranks go on for at most ",
               HumanDuration(static_cast<double>(orphan_grace_micros_) / 1e6)));
  }
}

void Agent::On(const FromController& event) {
  const iv1::ControllerToWorker& message = event.message;
  if (message.has_registered()) {
    OnRegistered(message.registered());
    return;
  }
  if (!registered_) {
    out_.push_back(CloseSession{"the controller spoke before it answered Register"});
    return;
  }
  switch (message.body_case()) {
    case iv1::ControllerToWorker::kStart:
      OnStart(message.start());
      break;
    case iv1::ControllerToWorker::kStop:
      OnStopRank(message.stop());
      break;
    case iv1::ControllerToWorker::kPlan:
      OnPlan(message.plan());
      break;
    case iv1::ControllerToWorker::kWishes:
      OnWishes(message.wishes());
      break;
    case iv1::ControllerToWorker::kProfile:
      OnProfile(message.profile());
      break;
    case iv1::ControllerToWorker::kKv:
      OnKvReply(message.kv());
      break;
    case iv1::ControllerToWorker::kAck:
      outbox_.Ack(message.ack().sequence());
      break;
    case iv1::ControllerToWorker::kLog:
      out_.push_back(ReadLog{message.log()});
      break;
    case iv1::ControllerToWorker::kForget: {
      const std::string& job = message.forget().job_uid();
      newest_attempt_.erase(job);
      std::erase_if(ended_, [&](const auto& entry) { return entry.first.first == job; });
      out_.push_back(ForgetJobFiles{job});
      break;
    }
    case iv1::ControllerToWorker::kRegistered:
    case iv1::ControllerToWorker::BODY_NOT_SET:
      break;  // a newer controller's message that we do not know changes nothing
  }
}

void Agent::OnRegistered(const iv1::Registered& registered) {
  if (!registered.accepted()) {
    if (registered.reason() != last_refusal_) {
      last_refusal_ = registered.reason();
      Log(true, "registration_refused", registered.reason());
    }
    out_.push_back(CloseSession{StrCat("registration refused: ", registered.reason())});
    return;
  }
  if (registered.heartbeat_interval_ms() > 0) {
    heartbeat_interval_micros_ = registered.heartbeat_interval_ms() * kMicrosPerMilli;
  }
  if (config_.orphan_grace_ms == 0 && registered.orphan_grace_ms() > 0) {
    orphan_grace_micros_ = registered.orphan_grace_ms() * kMicrosPerMilli;
  }
  registered_ = true;
  last_refusal_.clear();
  orphaned_ = false;
  next_heartbeat_micros_ = now_micros_ + heartbeat_interval_micros_;
  Log(false, "registered", StrCat(outbox_.reliable().size(), " reports to repeat"));
  for (const iv1::ReliableReport& report : outbox_.reliable()) {
    iv1::WorkerToController message;
    *message.mutable_reliable() = report;
    SendUp(std::move(message));
  }
  for (const auto& [id, pending] : pending_kv_) {
    iv1::WorkerToController message;
    iv1::RankKeyValue* kv = message.mutable_kv();
    kv->set_job_uid(id.first.job_uid);
    kv->set_attempt(id.first.attempt);
    kv->set_rank(id.first.rank);
    *kv->mutable_request() = pending.request;
    SendUp(std::move(message));
  }
  for (iv1::WorkerToController& message : outbox_.TakeBuffered()) {
    SendUp(std::move(message));
  }
  if (draining_) {
    iv1::WorkerToController message;
    message.mutable_drain()->set_reason(drain_reason_);
    SendUp(std::move(message));
  }
}

// ---------------------------------------------------------------- timers

void Agent::On(const Tick&) {
  if (session_open_ && !registered_ &&
      now_micros_ - session_opened_micros_ >= kRegisterTimeoutMicros) {
    session_opened_micros_ = now_micros_;  // once per stream, should closing take a while
    out_.push_back(CloseSession{
        StrCat("no answer to Register within ", kRegisterTimeoutMicros / kMicrosPerMilli, " ms")});
  }
  if (registered_ && now_micros_ >= next_heartbeat_micros_) {
    SendHeartbeat();
  }
  if (!registered_ && !orphaned_ && !ranks_.empty() &&
      now_micros_ - disconnected_since_micros_ >= orphan_grace_micros_) {
    orphaned_ = true;
    for (auto& [key, rank] : ranks_) {
      StopForLocalCause(rank, kRankStopGraceMs, v1::WORKER_LOST,
                        StrCat("no controller for ", orphan_grace_micros_ / kMicrosPerMilli,
                               " ms (orphan grace)"));
    }
  }
  ExpireKv();
  for (auto& [id, merger] : mergers_) {
    ForwardTelemetry(id, merger.Flush(now_micros_));
  }
  std::vector<RankKey> silent_ends;
  for (const auto& [key, rank] : ranks_) {
    if (rank.ended.has_value() && now_micros_ >= rank.ended->report_by_micros) {
      silent_ends.push_back(key);
    }
  }
  for (const RankKey& key : silent_ends) {
    FinishRank(key);
  }
  for (auto& [key, rank] : ranks_) {
    if (rank.ended.has_value()) {
      continue;
    }
    const RankState before = rank.state();
    if (const std::optional<int> signal = rank.NextSignal(now_micros_)) {
      Log(true, "rank_signalled",
          StrCat(key.DebugString(), " signal ", *signal, " pid ", rank.pid(), ": ", rank.cause()));
      out_.push_back(SignalRank{key, *signal});
    } else if (rank.state() == RankState::kUnkillable && before != RankState::kUnkillable) {
      poisoned_[static_cast<std::size_t>(rank.slot())] = true;
      Log(true, "slot_poisoned",
          StrCat("slot ", rank.slot(), ": process ", rank.pid(), " of ", key.DebugString(),
                 " did not end within ", kRankKillGraceMs, " ms after SIGKILL"));
      iv1::RankEnded ended;
      ended.set_exit_code(-1);
      ended.set_signal(SIGKILL);
      ended.set_unkillable(true);
      ended.set_slot(rank.slot());
      ended.set_job_uid(key.job_uid);
      ended.set_attempt(key.attempt);
      ended.set_rank(key.rank);
      if (rank.outcome.has_value()) {
        *ended.mutable_outcome() = *rank.outcome;
      }
      ReportEnd(std::move(ended));
    }
  }
}

void Agent::SendHeartbeat() {
  next_heartbeat_micros_ = now_micros_ + heartbeat_interval_micros_;
  iv1::WorkerToController message;
  iv1::WorkerHeartbeat* heartbeat = message.mutable_heartbeat();
  FillRunning(heartbeat->mutable_running());
  heartbeat->set_draining(draining_);
  heartbeat->set_dropped_reports(outbox_.dropped());
  SendUp(std::move(message));
}

void Agent::ExpireKv() {
  for (auto it = pending_kv_.begin(); it != pending_kv_.end();) {
    if (now_micros_ < it->second.deadline_micros) {
      ++it;
      continue;
    }
    const auto rank = ranks_.find(it->first.first);
    if (rank != ranks_.end() && rank->second.connected()) {
      const iv1::KeyValueRequest& request = it->second.request;
      iv1::WorkerToRank message;
      iv1::KeyValueReply* reply = message.mutable_kv();
      reply->set_id(request.id());
      reply->set_error(StrCat(request.has_get() ? "waiting for key " : "storing key ",
                              request.has_get() ? request.get().key() : request.set().key(),
                              ": no answer from the controller in time",
                              registered_ ? "" : " (it is not connected)"));
      out_.push_back(SendToRank{rank->second.stream(), std::move(message)});
    }
    it = pending_kv_.erase(it);
  }
}

void Agent::On(const DrainRequested& event) {
  if (draining_) {
    return;
  }
  draining_ = true;
  drain_reason_ = event.reason;
  const std::int64_t grace_ms =
      config_.drain_grace_ms > 0 ? config_.drain_grace_ms : kRankStopGraceMs;
  drain_deadline_micros_ = now_micros_ + kDrainReportMicros;
  Log(false, "draining", StrCat(event.reason, "; ", ranks_.size(), " ranks"));
  if (registered_) {
    iv1::WorkerToController message;
    message.mutable_drain()->set_reason(event.reason);
    SendUp(std::move(message));
    SendHeartbeat();
  }
  for (auto& [key, rank] : ranks_) {
    StopForLocalCause(rank, grace_ms, v1::DRAINED, StrCat("worker is draining: ", event.reason));
  }
}

// ---------------------------------------------------------------- sending

void Agent::SendUp(iv1::WorkerToController message) {
  out_.push_back(SendToController{std::move(message)});
}

void Agent::SendOrBuffer(iv1::WorkerToController message) {
  if (registered_) {
    SendUp(std::move(message));
  } else {
    outbox_.Buffer(std::move(message));
  }
}

void Agent::AddReliable(iv1::ReliableReport report) {
  const iv1::ReliableReport& numbered = outbox_.AddReliable(std::move(report));
  if (registered_) {
    iv1::WorkerToController message;
    *message.mutable_reliable() = numbered;
    SendUp(std::move(message));
  }
}

void Agent::FillRunning(google::protobuf::RepeatedPtrField<iv1::RunningRank>* running) const {
  for (const auto& [key, rank] : ranks_) {
    if (rank.state() == RankState::kUnkillable) {
      continue;  // reported as ended
    }
    iv1::RunningRank* entry = running->Add();
    entry->set_job_uid(key.job_uid);
    entry->set_attempt(key.attempt);
    entry->set_rank(key.rank);
    entry->set_slot(rank.slot());
    entry->set_pid(rank.pid());
    *entry->mutable_progress() = rank.progress;
  }
}

void Agent::Log(bool warning, std::string event, std::string text) {
  out_.push_back(LogEvent{warning, std::move(event), std::move(text)});
}

}  // namespace octavo
