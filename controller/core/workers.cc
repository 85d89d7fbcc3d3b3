#include "controller/core/workers.h"

#include <algorithm>
#include <set>
#include <string_view>
#include <unordered_map>

#include "base/status.h"
#include "base/str.h"
#include "controller/core/attempts.h"
#include "controller/core/jobs.h"
#include "controller/core/plans.h"
#include "controller/core/profiles.h"
#include "controller/core/progress.h"
#include "proto/convert/error_detail.h"
#include "proto/spec/names.h"

namespace octavo {
namespace {

RankId KeyOf(const internal::v1::RunningRank& rank) {
  return {rank.job_uid(), rank.attempt(), rank.rank()};
}

void Send(CoreState& state, const WorkerRecord& worker, internal::v1::ControllerToWorker message) {
  state.effects.push_back(SendToWorker{.session = worker.session, .message = std::move(message)});
}

// The rank that belongs to that worker in a current attempt and has not ended, or nullptr.
JobRecord* OwnerOf(CoreState& state, const WorkerRecord& worker, const RankId& key) {
  const auto& [uid, attempt_number, rank] = key;
  JobRecord* job = FindJobByUid(state, uid);
  const AttemptRecord* attempt = CurrentAttempt(job, attempt_number);
  if (attempt == nullptr || rank < 0 || rank >= attempt->stored.ranks_size() ||
      attempt->stored.ranks(rank).ended() || WorkerOf(*attempt, rank) != worker.name) {
    return nullptr;
  }
  return job;
}

// What it runs: progress of ours, an end to what is fenced.
void TakeRunning(CoreState& state, WorkerRecord& worker,
                 const google::protobuf::RepeatedPtrField<internal::v1::RunningRank>& running,
                 Now now) {
  std::map<RankId, internal::v1::RunningRank> before = std::move(worker.running);
  worker.running.clear();
  for (const internal::v1::RunningRank& rank : running) {
    worker.running[KeyOf(rank)] = rank;
  }
  if (before.size() != worker.running.size()) {
    state.schedule_wanted = true;  // a slot became free, or is taken by something fenced
  }
  for (const auto& [key, rank] : worker.running) {
    if (JobRecord* job = OwnerOf(state, worker, key)) {
      if (rank.has_progress()) {
        OnRankProgress(state, *job, rank.rank(), rank.progress(), now);
      }
      continue;
    }
    if (worker.kills_sent.insert(key).second) {
      internal::v1::ControllerToWorker message;
      internal::v1::StopRank& stop = *message.mutable_stop();
      stop.set_job_uid(rank.job_uid());
      stop.set_attempt(rank.attempt());
      stop.set_rank(rank.rank());
      stop.set_kill_now(true);
      Send(state, worker, std::move(message));
    }
  }
}

// "1.4" of "1.4.2". Messages between controller and workers may change with each.
std::string MajorMinor(const std::string& version) {
  const std::size_t first = version.find('.');
  return version.substr(
      0, first == std::string::npos ? std::string::npos : version.find('.', first + 1));
}

void Refuse(CoreState& state, SessionId session, const std::string& reason) {
  SendToWorker send{.session = session};
  internal::v1::Registered& registered = *send.message.mutable_registered();
  registered.set_accepted(false);
  registered.set_reason(reason);
  state.effects.push_back(std::move(send));
  state.effects.push_back(CloseWorkerSession{.session = session, .reason = reason});
}

void OnRegister(CoreState& state, SessionId session, const internal::v1::Register& request,
                Now now) {
  const std::string& name = request.worker();
  if (!IsPlainName(name) || request.incarnation().empty() || request.slots().empty()) {
    Refuse(state, session,
           "a worker registers with a name of 1 to 128 letters, digits, '.', '_' or '-', an "
           "incarnation and at least one slot");
    return;
  }
  if (MajorMinor(request.version()) != MajorMinor(state.options.version)) {
    Refuse(state, session,
           StrCat("the worker's version is ",
                  request.version().empty() ? "not given" : request.version(),
                  ", the controller's is ", state.options.version,
                  "; both must be of the same major.minor version"));
    return;
  }
  WorkerRecord& worker = state.workers[name];
  const bool known = !worker.name.empty();
  const bool same_process = worker.incarnation == request.incarnation();
  const std::int64_t silent_ms = (now.mono_micros - worker.last_heard_micros) / 1000;
  if (known && worker.session != 0 && worker.session != session && !same_process &&
      silent_ms < state.options.worker_lease_ms) {
    Refuse(state, session,
           StrCat("a worker named ", name, " is connected from host ", worker.host, " (heard ",
                  silent_ms, " ms ago); give this one another --name, or wait ",
                  state.options.worker_lease_ms, " ms"));
    return;
  }
  if (worker.session != 0 && worker.session != session) {
    state.effects.push_back(CloseWorkerSession{.session = worker.session,
                                               .reason = "the worker opened a newer session"});
    state.sessions.erase(worker.session);
  }
  worker.name = name;
  worker.incarnation = request.incarnation();
  worker.address = request.address();
  worker.host = request.host();
  worker.http_address = request.http_address();
  worker.version = request.version();
  worker.device = request.device();
  worker.slots.assign(request.slots().begin(), request.slots().end());
  if (!same_process) {
    worker.poisoned.clear();
    worker.acked_sequence = 0;
    if (!worker.drained_by_operator) {
      worker.drain_reason.clear();
    }
  }
  for (const v1::SlotFacts& slot : worker.slots) {
    if (slot.poisoned()) {
      worker.poisoned.insert(slot.slot());
    }
  }
  worker.session = session;
  worker.heard_since_register = false;
  worker.kills_sent.clear();
  worker.last_heard_micros = now.mono_micros;
  worker.last_seen_unix = now.unix_micros;
  worker.condition =
      worker.drain_reason.empty() ? WorkerCondition::kReady : WorkerCondition::kDraining;
  state.sessions[session] = name;
  state.schedule_wanted = true;

  internal::v1::ControllerToWorker message;
  internal::v1::Registered& registered = *message.mutable_registered();
  registered.set_accepted(true);
  registered.set_heartbeat_interval_ms(state.options.heartbeat_interval_ms);
  registered.set_lease_ms(state.options.worker_lease_ms);
  registered.set_orphan_grace_ms(state.options.orphan_grace_ms);
  Send(state, worker, std::move(message));
  // Ranks of an earlier daemon died with it (parent-death signal).
  LoseRanksOn(state, name, "was restarted", now, request.incarnation());
  TakeRunning(state, worker, request.running(), now);
}

void OnReliable(CoreState& state, WorkerRecord& worker, const internal::v1::ReliableReport& report,
                Now now) {
  if (report.sequence() > worker.acked_sequence) {
    worker.acked_sequence = report.sequence();
    const auto owner = [&](const auto& body) {
      JobRecord* job = FindJobByUid(state, body.job_uid());
      AttemptRecord* attempt = CurrentAttempt(job, body.attempt());
      return attempt != nullptr && body.rank() >= 0 && body.rank() < attempt->stored.ranks_size()
                 ? job
                 : nullptr;
    };
    switch (report.body_case()) {
      case internal::v1::ReliableReport::kEnded:
        worker.running.erase(
            {report.ended().job_uid(), report.ended().attempt(), report.ended().rank()});
        OnRankEnded(state, worker.name, report.ended(), now);
        state.schedule_wanted = true;
        break;
      case internal::v1::ReliableReport::kCheckpoint:
        if (JobRecord* job = owner(report.checkpoint())) {
          OnCheckpoint(state, *job, report.checkpoint().rank(), report.checkpoint().done(), now);
        }
        break;
      case internal::v1::ReliableReport::kPlanApplied:
        if (JobRecord* job = owner(report.plan_applied())) {
          OnPlanApplied(state, *job, report.plan_applied().rank(), report.plan_applied().applied(),
                        now);
        }
        break;
      case internal::v1::ReliableReport::kAttemptStart:
        if (JobRecord* job = owner(report.attempt_start())) {
          OnAttemptStart(state, *job, report.attempt_start().start(), now);
        }
        break;
      case internal::v1::ReliableReport::BODY_NOT_SET:
        break;
    }
  }
  internal::v1::ControllerToWorker message;
  message.mutable_ack()->set_sequence(worker.acked_sequence);
  Send(state, worker, std::move(message));
}

void OnHeartbeat(CoreState& state, WorkerRecord& worker,
                 const internal::v1::WorkerHeartbeat& heartbeat, Now now) {
  TakeRunning(state, worker, heartbeat.running(), now);
  if (!worker.heard_since_register) {
    worker.heard_since_register = true;
    RepeatCommands(state, worker, now);
  }
}

void StartDrain(CoreState& state, WorkerRecord& worker, const std::string& reason, Now now) {
  worker.drain_reason = reason.empty() ? "no reason given" : reason;
  if (worker.condition == WorkerCondition::kReady) {
    worker.condition = WorkerCondition::kDraining;
  }
  state.schedule_wanted = true;
  DrainAttemptsOn(state, worker.name, worker.drain_reason, now);
}

// Slots that current attempts hold on the worker, with the job's name and rank.
struct Occupant {
  std::string job;
  std::int32_t rank;
};
using Occupants = std::map<std::string, std::map<std::int32_t, Occupant>>;  // worker → slot

Occupants OccupantsOf(const CoreState& state) {
  Occupants occupants;
  for (const auto& [name, worker] : state.workers) {
    for (const auto& [key, rank] : worker.running) {
      const auto job = state.jobs.find(rank.job_uid());
      occupants[name][rank.slot()] = {
          job == state.jobs.end() ? "jobs/" + rank.job_uid() : job->second->job().name(),
          rank.rank()};
    }
  }
  for (const std::string& uid : state.live) {
    const JobRecord& job = *state.jobs.at(uid);
    if (!job.current.has_value()) {
      continue;
    }
    for (std::int32_t rank = 0; rank < job.current->stored.ranks_size(); ++rank) {
      if (!job.current->stored.ranks(rank).ended()) {
        const v1::Placement& placement = job.current->stored.attempt().placements(rank);
        occupants[WorkerOf(*job.current, rank)][placement.slot()] = {job.job().name(), rank};
      }
    }
  }
  return occupants;
}

}  // namespace

const char* ConditionName(WorkerCondition condition) {
  switch (condition) {
    case WorkerCondition::kReady:
      return "READY";
    case WorkerCondition::kDraining:
      return "DRAINING";
    case WorkerCondition::kSilent:
      return "SILENT";
    case WorkerCondition::kLost:
      return "LOST";
  }
  return "";
}

void OnWorkerMessage(CoreState& state, SessionId session,
                     const internal::v1::WorkerToController& message, Now now) {
  if (message.has_register_()) {
    OnRegister(state, session, message.register_(), now);
    return;
  }
  const auto name = state.sessions.find(session);
  if (name == state.sessions.end()) {
    return;  // of a stream that a newer one has replaced, or before Register
  }
  WorkerRecord& worker = state.workers.at(name->second);
  worker.last_heard_micros = now.mono_micros;
  worker.last_seen_unix = now.unix_micros;
  switch (message.body_case()) {
    case internal::v1::WorkerToController::kHeartbeat:
      OnHeartbeat(state, worker, message.heartbeat(), now);
      break;
    case internal::v1::WorkerToController::kReliable:
      OnReliable(state, worker, message.reliable(), now);
      break;
    case internal::v1::WorkerToController::kStep: {
      JobRecord* job = FindJobByUid(state, message.step().job_uid());
      if (CurrentAttempt(job, message.step().attempt()) != nullptr) {
        OnStepReport(state, *job, message.step().report(), now);
      }
      break;
    }
    case internal::v1::WorkerToController::kTelemetry: {
      JobRecord* job = FindJobByUid(state, message.telemetry().job_uid());
      if (CurrentAttempt(job, message.telemetry().attempt()) != nullptr) {
        OnTelemetry(state, *job, worker.name, message.telemetry().snapshot(), now);
      }
      break;
    }
    case internal::v1::WorkerToController::kProfile: {
      JobRecord* job = FindJobByUid(state, message.profile().job_uid());
      if (CurrentAttempt(job, message.profile().attempt()) != nullptr) {
        OnRankProfile(*job, message.profile().profile());
      }
      break;
    }
    case internal::v1::WorkerToController::kKv: {
      const internal::v1::RankKeyValue& kv = message.kv();
      if (JobRecord* job = OwnerOf(state, worker, {kv.job_uid(), kv.attempt(), kv.rank()})) {
        OnKeyValue(state, *job, kv.rank(), kv.request(), now);
      }
      break;
    }
    case internal::v1::WorkerToController::kLog:
      state.effects.push_back(LogAnswer{.reply = message.log()});
      break;
    case internal::v1::WorkerToController::kDrain:
      StartDrain(state, worker, message.drain().reason(), now);
      break;
    case internal::v1::WorkerToController::kRegister:
    case internal::v1::WorkerToController::BODY_NOT_SET:
      break;
  }
}

void OnSessionClosed(CoreState& state, SessionId session, Now now) {
  const auto name = state.sessions.find(session);
  if (name == state.sessions.end()) {
    return;
  }
  WorkerRecord& worker = state.workers.at(name->second);
  state.sessions.erase(name);
  if (worker.session == session) {
    worker.session = 0;
    worker.condition = WorkerCondition::kSilent;
    worker.heard_since_register = false;
    state.schedule_wanted = true;
  }
}

void CheckLeases(CoreState& state, Now now) {
  std::vector<std::string> forgotten;
  for (auto& [name, worker] : state.workers) {
    const std::int64_t silent_ms = (now.mono_micros - worker.last_heard_micros) / 1000;
    if (worker.condition == WorkerCondition::kLost) {
      if (silent_ms > state.options.worker_forget_ms && worker.session == 0) {
        forgotten.push_back(name);
      }
      continue;
    }
    if (silent_ms < state.options.worker_lease_ms) {
      continue;
    }
    if (worker.session != 0) {
      state.effects.push_back(CloseWorkerSession{
          .session = worker.session,
          .reason = StrCat("nothing was heard for ", silent_ms, " ms; register again")});
      state.sessions.erase(worker.session);
      worker.session = 0;
    }
    worker.condition = WorkerCondition::kLost;
    worker.running.clear();
    state.schedule_wanted = true;
    LoseRanksOn(state, name, StrCat("was silent for ", state.options.worker_lease_ms / 1000, " s"),
                now);
  }
  for (const std::string& name : forgotten) {
    state.workers.erase(name);
  }
}

void ExpectWorker(CoreState& state, const std::string& name, Now now) {
  WorkerRecord& worker = state.workers[name];
  worker.name = name;
  worker.condition = WorkerCondition::kSilent;
  worker.last_heard_micros = now.mono_micros;
}

absl::StatusOr<v1::Worker> DrainWorker(CoreState& state, const DrainArgs& args, Now now) {
  const std::string name = StripPrefix(args.name, "workers/");
  const std::uint64_t fingerprint = Fingerprint(StrCat(name, args.undo ? "|undo" : ""));
  ASSIGN_OR_RETURN(const std::string known,
                   FindRequest(state, args.request_id, "DrainWorker", fingerprint));
  const auto found = state.workers.find(name);
  if (found == state.workers.end()) {
    std::vector<std::string> names;
    for (const auto& [other, worker] : state.workers) {
      names.push_back(other);
    }
    const std::optional<std::string> near = NearestMatch(name, names);
    return WithDetail(
        NotFoundError(StrCat("no worker named ", name,
                             near.has_value() ? StrCat("; did you mean ", *near, "?")
                                              : std::string("; octavo workers shows them"))),
        "WORKER_NOT_FOUND");
  }
  WorkerRecord& worker = found->second;
  if (!known.empty()) {
    return RenderWorker(state, worker);
  }
  if (args.undo) {
    worker.drain_reason.clear();
    worker.drained_by_operator = false;
    if (worker.condition == WorkerCondition::kDraining) {
      worker.condition = WorkerCondition::kReady;
    }
    state.schedule_wanted = true;
    state.batch.drains.push_back({.worker = name});
  } else {
    std::string reason = args.reason.empty() ? "drained" : args.reason;
    if (!args.caller.empty()) {
      StrAppend(&reason, " (", args.caller, ")");
    }
    worker.drained_by_operator = true;
    StartDrain(state, worker, reason, now);
    state.batch.drains.push_back({.worker = name, .reason = reason});
  }
  RememberRequest(state, args.request_id, "DrainWorker", name, fingerprint);
  return RenderWorker(state, worker);
}

WorkerView ViewOf(const WorkerRecord& worker) {
  WorkerView view{.name = worker.name, .condition = worker.condition};
  view.device.is_cuda = worker.device == "cuda";
  for (const v1::SlotFacts& slot : worker.slots) {
    if (worker.poisoned.contains(slot.slot())) {
      continue;
    }
    // The gang's recipes must run on every slot: the weakest device counts.
    view.device.sm = view.usable_slots == 0 ? slot.sm() : std::min(view.device.sm, slot.sm());
    ++view.usable_slots;
  }
  return view;
}

ClusterView ClusterOf(const CoreState& state) {
  // Busy slots as bits: this runs for every pass over every worker and rank.
  std::unordered_map<std::string_view, std::vector<bool>> busy;
  const auto occupy = [](std::vector<bool>& slots, std::int32_t slot) {
    if (slot >= 0) {
      slots.resize(std::max(slots.size(), static_cast<std::size_t>(slot) + 1));
      slots[static_cast<std::size_t>(slot)] = true;
    }
  };
  constexpr std::string_view kPrefix = "workers/";
  for (const std::string& uid : state.live) {
    const JobRecord& job = *state.jobs.at(uid);
    if (!job.current.has_value()) {
      continue;
    }
    const internal::v1::StoredAttempt& attempt = job.current->stored;
    for (std::int32_t rank = 0; rank < attempt.ranks_size(); ++rank) {
      if (!attempt.ranks(rank).ended()) {
        const v1::Placement& placement = attempt.attempt().placements(rank);
        occupy(busy[std::string_view(placement.worker()).substr(kPrefix.size())], placement.slot());
      }
    }
  }
  ClusterView cluster;
  cluster.workers.reserve(state.workers.size());
  for (const auto& [name, worker] : state.workers) {
    WorkerView view = ViewOf(worker);
    std::vector<bool> taken;
    if (const auto placed = busy.find(name); placed != busy.end()) {
      taken = std::move(placed->second);
    }
    for (const auto& [key, rank] : worker.running) {
      occupy(taken, rank.slot());
    }
    for (const v1::SlotFacts& slot : worker.slots) {
      const auto index = static_cast<std::size_t>(slot.slot());
      const bool is_busy = index < taken.size() && taken[index];
      if (!is_busy && !worker.poisoned.contains(slot.slot())) {
        view.free_slots.push_back(slot.slot());
      }
    }
    std::sort(view.free_slots.begin(), view.free_slots.end());
    cluster.workers.push_back(std::move(view));
  }
  return cluster;
}

static v1::Worker Render(const WorkerRecord& worker, const Occupants& occupants) {
  v1::Worker rendered;
  rendered.set_name("workers/" + worker.name);
  rendered.set_state(ConditionName(worker.condition));
  rendered.set_address(worker.address);
  rendered.set_host(worker.host);
  rendered.set_slots(static_cast<std::int32_t>(worker.slots.size()));
  rendered.set_device(worker.device);
  rendered.set_version(worker.version);
  rendered.set_http_address(worker.http_address);
  rendered.set_message(worker.drain_reason);
  SetTimestamp(rendered.mutable_last_seen_time(), worker.last_seen_unix);
  const auto busy = occupants.find(worker.name);
  std::int32_t free = 0;
  for (v1::SlotFacts slot : worker.slots) {
    slot.set_poisoned(worker.poisoned.contains(slot.slot()));
    if (busy != occupants.end() && busy->second.contains(slot.slot())) {
      const Occupant& occupant = busy->second.at(slot.slot());
      slot.set_job(occupant.job);
      slot.set_rank(occupant.rank);
      rendered.add_running(StrCat(occupant.job, "#", occupant.rank));
    } else if (!slot.poisoned() && worker.condition == WorkerCondition::kReady) {
      ++free;
    }
    *rendered.add_slot_facts() = slot;
  }
  rendered.set_slots_free(free);
  return rendered;
}

v1::Worker RenderWorker(const CoreState& state, const WorkerRecord& worker) {
  return Render(worker, OccupantsOf(state));
}

std::vector<v1::Worker> RenderWorkers(const CoreState& state) {
  const Occupants occupants = OccupantsOf(state);
  std::vector<v1::Worker> rendered;
  rendered.reserve(state.workers.size());
  for (const auto& [name, worker] : state.workers) {
    rendered.push_back(Render(worker, occupants));
  }
  return rendered;
}

}  // namespace octavo
