#include "controller/core/attempts.h"

#include <algorithm>
#include <map>
#include <set>

#include "base/check.h"
#include "base/status.h"
#include "base/str.h"
#include "controller/core/attempt_end.h"
#include "controller/core/jobs.h"
#include "controller/core/plans.h"
#include "controller/core/progress.h"
#include "controller/core/workers.h"
#include "proto/convert/job.h"

namespace octavo {
namespace {

constexpr std::int64_t kFailedGangGraceMs = 2000;      // peers of a dead rank have nothing to save
constexpr std::int64_t kSaveGraceMs = 10 * 60 * 1000;  // suspend and drain wait for a checkpoint

internal::v1::StartRank MakeStart(const CoreState& state, const JobRecord& job,
                                  const AttemptRecord& attempt, std::int32_t rank) {
  internal::v1::StartRank start;
  internal::v1::RankAssignment& assignment = *start.mutable_assignment();
  const v1::Attempt& placed = attempt.stored.attempt();
  assignment.set_job_uid(job.uid());
  assignment.set_job_name(job.spec().name());
  assignment.set_attempt(placed.number());
  assignment.set_rank(rank);
  assignment.set_world_size(placed.placements_size());
  assignment.set_slot(placed.placements(rank).slot());
  assignment.set_device_ordinal(placed.placements(rank).slot());
  *assignment.mutable_spec() = job.spec();
  *assignment.mutable_plan() = job.plans.back();
  assignment.set_newest_checkpoint_step(job.job().progress().checkpoint_step());
  assignment.set_newest_checkpoint_path(job.job().progress().checkpoint_path());
  const auto worker = state.workers.find(WorkerOf(attempt, rank));
  if (worker != state.workers.end()) {
    assignment.set_bind_address(worker->second.address);
  }
  for (const v1::Placement& placement : placed.placements()) {
    assignment.add_peer_workers(StripPrefix(placement.worker(), "workers/"));
  }
  return start;
}

// The live session of the rank's worker, or 0.
SessionId SessionOf(const CoreState& state, const AttemptRecord& attempt, std::int32_t rank) {
  const auto worker = state.workers.find(WorkerOf(attempt, rank));
  return worker == state.workers.end() ? 0 : worker->second.session;
}

// One message per worker: specification and plan are large, and a gang has many ranks.
void SendStarts(CoreState& state, const JobRecord& job, AttemptRecord& attempt,
                const std::vector<std::int32_t>& ranks) {
  std::vector<SendToWorker> sends;
  std::map<SessionId, std::size_t> send_of;
  for (const std::int32_t rank : ranks) {
    const SessionId session = SessionOf(state, attempt, rank);
    if (session == 0) {
      continue;  // repeated when the worker registers again
    }
    attempt.ranks[static_cast<std::size_t>(rank)].start_session = session;
    const auto [known, fresh] = send_of.emplace(session, sends.size());
    if (fresh) {
      SendToWorker& send = sends.emplace_back(SendToWorker{.session = session});
      *send.message.mutable_start() = MakeStart(state, job, attempt, rank);
      continue;
    }
    internal::v1::StartRank::Seat& seat = *sends[known->second].message.mutable_start()->add_more();
    const std::int32_t slot = attempt.stored.attempt().placements(rank).slot();
    seat.set_rank(rank);
    seat.set_slot(slot);
    seat.set_device_ordinal(slot);
  }
  for (SendToWorker& send : sends) {
    state.effects.push_back(std::move(send));
  }
}

void SendStop(CoreState& state, const JobRecord& job, AttemptRecord& attempt, std::int32_t rank) {
  const SessionId session = SessionOf(state, attempt, rank);
  if (session == 0) {
    return;
  }
  SendToWorker send{.session = session};
  internal::v1::StopRank& stop = *send.message.mutable_stop();
  stop.set_job_uid(job.uid());
  stop.set_attempt(attempt.number());
  stop.set_rank(rank);
  *stop.mutable_wishes() = attempt.wishes;
  stop.set_grace_ms(attempt.stop_grace_ms);
  attempt.ranks[static_cast<std::size_t>(rank)].stop_session = session;
  state.effects.push_back(std::move(send));
}

// To each worker of the attempt once.
void SendToWorkers(CoreState& state, const AttemptRecord& attempt,
                   const internal::v1::ControllerToWorker& message) {
  std::set<SessionId> told;
  for (std::int32_t rank = 0; rank < attempt.stored.ranks_size(); ++rank) {
    const SessionId session = SessionOf(state, attempt, rank);
    if (session != 0 && told.insert(session).second) {
      state.effects.push_back(SendToWorker{.session = session, .message = message});
    }
  }
}

internal::v1::ControllerToWorker WishesMessage(const JobRecord& job, const AttemptRecord& attempt) {
  internal::v1::ControllerToWorker message;
  internal::v1::SendWishes& wishes = *message.mutable_wishes();
  wishes.set_job_uid(job.uid());
  wishes.set_attempt(attempt.number());
  *wishes.mutable_wishes() = attempt.wishes;
  return message;
}

internal::v1::ControllerToWorker PlanMessage(const JobRecord& job, const AttemptRecord& attempt) {
  internal::v1::ControllerToWorker message;
  internal::v1::SendPlan& send = *message.mutable_plan();
  send.set_job_uid(job.uid());
  send.set_attempt(attempt.number());
  *send.mutable_plan() = job.plans.back();
  return message;
}

// Begins the end of the attempt: the first reason is kept, the remaining ranks are asked to stop.
void StopAttempt(CoreState& state, JobRecord& job, FailureClass why, const std::string& reason,
                 std::int64_t grace_ms, Now now) {
  AttemptRecord& attempt = *job.current;
  if (!attempt.stored.ending()) {
    attempt.stored.set_ending(true);
    attempt.stored.set_ending_class(ToWire(why));
    attempt.stored.set_ending_reason(reason);
    EmitEvent(state, job, "ATTEMPT",
              StrCat("attempt ", attempt.number(), " is being stopped: ", reason), now);
    SaveAttempt(state, attempt);
  }
  attempt.stop_grace_ms = grace_ms;
  attempt.wishes.set_sequence(attempt.wishes.sequence() + 1);
  for (std::int32_t rank = 0; rank < attempt.stored.ranks_size(); ++rank) {
    if (attempt.stored.ranks(rank).ended()) {
      continue;
    }
    RankRuntime& runtime = attempt.ranks[static_cast<std::size_t>(rank)];
    if (runtime.asked_micros == 0) {
      runtime.asked_micros = now.mono_micros;
    }
    SendStop(state, job, attempt, rank);
  }
}

void FailAttempt(CoreState& state, JobRecord& job, FailureClass why, const std::string& reason,
                 Now now) {
  job.current->wishes.set_stop_without_checkpoint(true);
  StopAttempt(state, job, why, reason, kFailedGangGraceMs, now);
}

// A rank ended badly in an attempt whose ranks have been asked to save and stop: a checkpoint needs
// all of them, so that the rest is not waited for as long. It may still be publishing one that is
// whole; a rank that hangs says nothing, and would hold its slots.
void ShortenSaving(CoreState& state, JobRecord& job, Now now) {
  AttemptRecord& attempt = *job.current;
  if (attempt.stop_grace_ms > kRankStopGraceMs) {
    StopAttempt(state, job, static_cast<FailureClass>(attempt.stored.ending_class()),
                attempt.stored.ending_reason(), kRankStopGraceMs, now);
  }
}

void SendAnswers(CoreState& state, const JobRecord& job, const AttemptRecord& attempt,
                 const std::vector<RendezvousStore::Answer>& answers) {
  for (const RendezvousStore::Answer& answer : answers) {
    const SessionId session = SessionOf(state, attempt, answer.rank);
    if (session == 0) {
      continue;  // the rank asks again after its worker is back
    }
    SendToWorker send{.session = session};
    internal::v1::RankKeyValueReply& reply = *send.message.mutable_kv();
    reply.set_job_uid(job.uid());
    reply.set_attempt(attempt.number());
    reply.set_rank(answer.rank);
    *reply.mutable_reply() = answer.reply;
    state.effects.push_back(std::move(send));
  }
}

struct Missing {
  std::string sentence;           // empty: everybody has met
  std::set<std::string> workers;  // of ranks that never came
};

// Who never came is to blame; when all came and still wait for each other, nobody is.
Missing WhoIsMissing(const AttemptRecord& attempt) {
  Missing missing;
  std::vector<std::string> absent, meeting;
  for (std::int32_t rank = 0; rank < attempt.stored.ranks_size(); ++rank) {
    const internal::v1::RankPhase phase = attempt.ranks[static_cast<std::size_t>(rank)].phase;
    const std::string who = StrCat("rank ", rank, " on workers/", WorkerOf(attempt, rank));
    if (phase < internal::v1::RANK_MEETING) {
      absent.push_back(who);
      missing.workers.insert(WorkerOf(attempt, rank));
    } else if (phase == internal::v1::RANK_MEETING) {
      meeting.push_back(who);
    }
  }
  if (!absent.empty()) {
    missing.sentence = StrCat(StrJoin(absent, ", "), " did not come");
  } else if (!meeting.empty()) {
    missing.sentence = StrCat(StrJoin(meeting, ", "), " did not meet the others");
  }
  return missing;
}

void Blame(JobRecord& job, const Missing& missing) {
  for (const std::string& worker : missing.workers) {
    ++(*job.stored.mutable_blame())[worker];
  }
}

std::string PhaseName(internal::v1::RankPhase phase) {
  switch (phase) {
    case internal::v1::RANK_MEETING:
      return "meeting";
    case internal::v1::RANK_LOADING:
      return "loading";
    case internal::v1::RANK_TRAINING:
      return "training";
    case internal::v1::RANK_VALIDATING:
      return "validating";
    case internal::v1::RANK_SAVING:
      return "saving";
    case internal::v1::RANK_FINISHED:
      return "finished";
    default:
      return "starting";
  }
}

void CheckGang(CoreState& state, JobRecord& job, Now now) {
  AttemptRecord& attempt = *job.current;
  const std::int64_t limit_s = job.spec().restart().gang_timeout_seconds();
  if (attempt.stored.trained() || now.mono_micros - attempt.started_micros < limit_s * 1000000) {
    return;
  }
  const Missing missing = WhoIsMissing(attempt);
  if (missing.sentence.empty()) {
    return;  // all have met; loading is bounded by the stall limit
  }
  Blame(job, missing);
  FailAttempt(state, job, FailureClass::kGangTimeout,
              StrCat(missing.sentence, " within ", limit_s, " s (restart.gang_timeout_seconds)"),
              now);
  SaveJob(state, job, now);
}

void CheckStall(CoreState& state, JobRecord& job, Now now) {
  AttemptRecord& attempt = *job.current;
  const std::int64_t limit_s = job.spec().restart().stall_timeout_seconds();
  if (now.mono_micros - attempt.last_step_micros < limit_s * 1000000) {
    return;
  }
  std::int32_t slowest = 0;
  for (std::int32_t rank = 1; rank < attempt.stored.ranks_size(); ++rank) {
    if (attempt.ranks[static_cast<std::size_t>(rank)].step <
        attempt.ranks[static_cast<std::size_t>(slowest)].step) {
      slowest = rank;
    }
  }
  const RankRuntime& runtime = attempt.ranks[static_cast<std::size_t>(slowest)];
  FailAttempt(
      state, job, FailureClass::kStepStalled,
      StrCat("no step for ", limit_s, " s (restart.stall_timeout_seconds); furthest behind: rank ",
             slowest, " on workers/", WorkerOf(attempt, slowest), ", ", PhaseName(runtime.phase),
             " at step ", runtime.step),
      now);
}

// Ranks of an attempt recovered from the store that were still meeting have lost their rendezvous.
void CheckRecovered(CoreState& state, JobRecord& job, Now now) {
  AttemptRecord& attempt = *job.current;
  if (!attempt.recovered) {
    return;
  }
  bool met = true;
  for (std::int32_t rank = 0; rank < attempt.stored.ranks_size(); ++rank) {
    const auto worker = state.workers.find(WorkerOf(attempt, rank));
    if (attempt.stored.ranks(rank).ended()) {
      continue;
    }
    if (worker == state.workers.end() || !worker->second.heard_since_register) {
      return;  // not all are back yet; the lease bounds this
    }
    met = met && attempt.ranks[static_cast<std::size_t>(rank)].phase >= internal::v1::RANK_LOADING;
  }
  attempt.recovered = false;
  if (!attempt.stored.trained() && !met && !attempt.stored.ending()) {
    FailAttempt(state, job, FailureClass::kPreempted,
                "the controller was restarted while the ranks were meeting", now);
  } else {
    EmitEvent(
        state, job, "ATTEMPT",
        StrCat("attempt ", attempt.number(), " found again after a restart of the controller"),
        now);
  }
}

}  // namespace

std::string WorkerOf(const AttemptRecord& attempt, std::int32_t rank) {
  return StripPrefix(attempt.stored.attempt().placements(rank).worker(), "workers/");
}

AttemptRecord* CurrentAttempt(JobRecord* job, std::int32_t attempt) {
  return job != nullptr && job->current.has_value() && job->current->number() == attempt
             ? &*job->current
             : nullptr;
}

void SaveAttempt(CoreState& state, const AttemptRecord& attempt) {
  for (internal::v1::StoredAttempt& put : state.batch.attempts) {
    if (put.job_uid() == attempt.stored.job_uid() && put.attempt().number() == attempt.number()) {
      put = attempt.stored;
      return;
    }
  }
  state.batch.attempts.push_back(attempt.stored);
}

void StartAttempt(CoreState& state, JobRecord& job, const std::vector<RankPlacement>& placement,
                  Now now) {
  OCTAVO_CHECK(!job.current.has_value());
  job.current.emplace();
  AttemptRecord& attempt = *job.current;
  attempt.stored.set_job_uid(job.uid());
  v1::Attempt& stored = *attempt.stored.mutable_attempt();
  stored.set_number(job.past.empty() ? 1 : job.past.back().attempt().number() + 1);
  SetTimestamp(stored.mutable_start_time(), now.unix_micros);
  std::set<std::string> workers;
  for (const RankPlacement& rank : placement) {
    v1::Placement& placed = *stored.add_placements();
    placed.set_rank(rank.rank);
    placed.set_worker("workers/" + rank.worker);
    placed.set_slot(rank.slot);
    attempt.stored.add_ranks()->set_rank(rank.rank);
    workers.insert(rank.worker);
    (*attempt.stored.mutable_incarnations())[rank.worker] =
        state.workers.at(rank.worker).incarnation;
  }
  attempt.ranks.resize(placement.size());
  attempt.started_micros = attempt.last_step_micros = now.mono_micros;
  job.stored.clear_next_attempt_unix_micros();
  job.backoff_until = 0;
  job.job().mutable_progress()->set_phase("starting");
  SaveAttempt(state, attempt);
  Transition(state, job, JobTrigger::kAttemptStarted,
             StrCat("attempt ", stored.number(), ": ", placement.size(), " ranks on ",
                    StrJoin(workers, ", ")),
             now);
  std::vector<std::int32_t> ranks;
  ranks.reserve(placement.size());
  for (const RankPlacement& rank : placement) {
    ranks.push_back(rank.rank);
  }
  SendStarts(state, job, attempt, ranks);
}

void StopForVerb(CoreState& state, JobRecord& job, Now now) {
  if (!job.current.has_value()) {
    Transition(state, job, JobTrigger::kRanksGone, job.stored.verb_reason(), now);
    return;
  }
  AttemptRecord& attempt = *job.current;
  if (job.state() == JobState::kCancelling) {
    attempt.wishes.set_stop(true);
    StopAttempt(state, job, FailureClass::kCancelledByUser, job.stored.verb_reason(),
                kRankStopGraceMs, now);
  } else {
    attempt.wishes.set_suspend(true);
    StopAttempt(state, job, FailureClass::kSuspendedByUser, job.stored.verb_reason(), kSaveGraceMs,
                now);
  }
}

void RequestCheckpoint(CoreState& state, JobRecord& job, Now now) {
  AttemptRecord& attempt = *job.current;
  attempt.wishes.set_checkpoint(true);
  attempt.wishes.set_sequence(attempt.wishes.sequence() + 1);
  SendToWorkers(state, attempt, WishesMessage(job, attempt));
}

void SendProfileWish(CoreState& state, JobRecord& job) {
  internal::v1::ControllerToWorker message;
  internal::v1::SendProfile& send = *message.mutable_profile();
  send.set_job_uid(job.uid());
  send.set_attempt(job.current->number());
  send.mutable_wish()->set_id(job.profile->id());
  send.mutable_wish()->set_steps(job.profile->steps());
  SendToWorkers(state, *job.current, message);
}

void SendPlanToRanks(CoreState& state, JobRecord& job) {
  if (job.current.has_value()) {
    SendToWorkers(state, *job.current, PlanMessage(job, *job.current));
  }
}

void OnRankEnded(CoreState& state, const std::string& worker, const internal::v1::RankEnded& ended,
                 Now now) {
  if (ended.unkillable()) {
    const auto record = state.workers.find(worker);
    if (record != state.workers.end()) {
      record->second.poisoned.insert(ended.slot());
    }
  }
  JobRecord* job = FindJobByUid(state, ended.job_uid());
  AttemptRecord* attempt = CurrentAttempt(job, ended.attempt());
  if (attempt == nullptr || ended.rank() < 0 || ended.rank() >= attempt->stored.ranks_size() ||
      attempt->stored.ranks(ended.rank()).ended() || WorkerOf(*attempt, ended.rank()) != worker) {
    return;  // of an attempt that is over: already accounted for
  }
  if (ended.has_last_step()) {
    OnStepReport(state, *job, ended.last_step(), now);  // a repeat, unless it was lost on the way
  }
  const RankRuntime& runtime = attempt->ranks[static_cast<std::size_t>(ended.rank())];
  internal::v1::StoredRank& stored = *attempt->stored.mutable_ranks(ended.rank());
  const std::int64_t asked_for_ms =
      runtime.asked_micros == 0 ? -1 : (now.mono_micros - runtime.asked_micros) / 1000;
  stored = JudgeRankEnd(
      ended, {.worker = worker, .asked_for_ms = asked_for_ms, .grace_ms = attempt->stop_grace_ms});
  if (stored.end_class() == v1::GANG_TIMEOUT && !stored.collateral()) {
    const Missing missing = WhoIsMissing(*attempt);
    Blame(*job, missing);
    stored.set_end_reason(
        StrCat(stored.end_reason(), missing.sentence.empty() ? "" : "; ", missing.sentence));
  }
  if (ended.outcome().step() > attempt->stored.attempt().last_step()) {
    attempt->stored.mutable_attempt()->set_last_step(ended.outcome().step());
  }
  SaveAttempt(state, *attempt);
  EmitEvent(state, *job, "RANK", stored.end_reason(), now);
  const auto failure = static_cast<FailureClass>(stored.end_class());
  if (failure == FailureClass::kDrained && !attempt->stored.ending()) {
    attempt->wishes.set_suspend(true);
    StopAttempt(state, *job, failure, stored.end_reason(), kSaveGraceMs, now);
  } else if (!stored.succeeded() && !attempt->stored.ending()) {
    FailAttempt(state, *job, failure, stored.end_reason(), now);
  } else if (!stored.succeeded() && failure != FailureClass::kNone) {
    ShortenSaving(state, *job, now);
  }
  FinishAttemptIfOver(state, *job, now);
}

void OnRankProgress(CoreState& state, JobRecord& job, std::int32_t rank,
                    const internal::v1::RankProgress& progress, Now now) {
  AttemptRecord& attempt = *job.current;
  RankRuntime& runtime = attempt.ranks[static_cast<std::size_t>(rank)];
  runtime.seen = true;
  if (progress.phase() != runtime.phase || progress.step() > runtime.step) {
    attempt.last_step_micros = now.mono_micros;
  }
  runtime.step = std::max(runtime.step, progress.step());
  if (runtime.phase != progress.phase()) {
    runtime.phase = progress.phase();
    if (rank == 0) {
      job.job().mutable_progress()->set_phase(PhaseName(progress.phase()));
      TouchProgress(state, job, now);
      PublishProgress(state, job, now);
    }
    const bool all_training =
        std::all_of(attempt.ranks.begin(), attempt.ranks.end(),
                    [](const RankRuntime& r) { return r.phase >= internal::v1::RANK_TRAINING; });
    if (all_training) {
      OnTraining(state, job, now);
    }
  }
}

void OnTraining(CoreState& state, JobRecord& job, Now now) {
  AttemptRecord& attempt = *job.current;
  if (attempt.stored.trained()) {
    return;
  }
  attempt.stored.set_trained(true);
  attempt.last_step_micros = now.mono_micros;
  SaveAttempt(state, attempt);
  state.effects.push_back(
      GangStart{.seconds = static_cast<double>(now.mono_micros - attempt.started_micros) / 1e6,
                .result = "formed"});
  if (NextState(job.state(), JobTrigger::kTrainingBegan).has_value()) {
    Transition(state, job, JobTrigger::kTrainingBegan,
               StrCat("attempt ", attempt.number(), " is training"), now);
  }
}

void OnAttemptStart(CoreState& state, JobRecord& job, const internal::v1::AttemptStart& start,
                    Now now) {
  v1::Attempt& attempt = *job.current->stored.mutable_attempt();
  if (attempt.first_step() != 0) {
    return;  // a repeat
  }
  attempt.set_loaded_checkpoint_step(start.loaded_step());
  attempt.set_first_step(start.loaded_step() + 1);
  SaveAttempt(state, *job.current);
  std::string text = StrCat("attempt ", attempt.number());
  if (start.loaded_path().empty()) {
    StrAppend(&text, " begins with new weights");
  } else if (start.loaded_step() == 0) {
    StrAppend(&text, " begins with the weights of ", start.loaded_path());
  } else {
    StrAppend(&text, " continues from step ", start.loaded_step(), " of ", start.loaded_path());
  }
  if (!start.note().empty()) {
    StrAppend(&text, "; ", start.note());
  }
  EmitEvent(state, job, "ATTEMPT", text, now);
  if (state.policy != nullptr) {
    DeviceAbility device{.is_cuda = job.spec().device() == "cuda"};
    for (const auto& [name, incarnation] : job.current->stored.incarnations()) {
      const auto worker = state.workers.find(name);
      if (worker != state.workers.end()) {
        const std::int32_t sm = ViewOf(worker->second).device.sm;
        device.sm = device.sm == 0 ? sm : std::min(device.sm, sm);  // the weakest counts
      }
    }
    state.policy->OnAttempt(job.job(), device, start.loaded_step());
    SavePolicy(state, job, now);
  }
}

void OnCheckpoint(CoreState& state, JobRecord& job, std::int32_t rank,
                  const internal::v1::CheckpointDone& done, Now now) {
  if (!done.ok()) {
    EmitEvent(
        state, job, "WARNING",
        StrCat("checkpoint of step ", done.step(), " by rank ", rank, " failed: ", done.error()),
        now);
    return;
  }
  v1::JobProgress& progress = *job.job().mutable_progress();
  if (done.step() == progress.checkpoint_step() && done.path() == progress.checkpoint_path()) {
    return;  // a repeat
  }
  progress.set_checkpoint_step(done.step());
  progress.set_checkpoint_path(done.path());
  if (job.current.has_value() && job.current->wishes.checkpoint()) {
    job.current->wishes.set_checkpoint(false);
  }
  EmitEvent(
      state, job, "CHECKPOINT",
      StrCat("checkpoint of step ", done.step(), " is complete: ", done.path(), ", ",
             HumanBytes(static_cast<double>(done.bytes())), " in ", HumanDuration(done.seconds())),
      now);
  SaveJob(state, job, now);
  state.effects.push_back(CheckpointMetric{.train_job = job.spec().name(),
                                           .bytes = done.bytes(),
                                           .seconds = done.seconds(),
                                           .unix_micros = now.unix_micros});
}

void LoseRanksOn(CoreState& state, const std::string& worker, const std::string& why, Now now,
                 const std::string& unless_incarnation) {
  const std::set<std::string> live = state.live;  // ends of jobs change the set
  for (const std::string& uid : live) {
    JobRecord* job = FindJobByUid(state, uid);
    if (job == nullptr || !job->current.has_value()) {
      continue;
    }
    AttemptRecord& attempt = *job->current;
    const auto started = attempt.stored.incarnations().find(worker);
    if (started == attempt.stored.incarnations().end() ||
        (!unless_incarnation.empty() && started->second == unless_incarnation)) {
      continue;
    }
    std::vector<std::string> lost;
    for (std::int32_t rank = 0; rank < attempt.stored.ranks_size(); ++rank) {
      internal::v1::StoredRank& stored = *attempt.stored.mutable_ranks(rank);
      if (stored.ended() || WorkerOf(attempt, rank) != worker) {
        continue;
      }
      stored.set_ended(true);
      stored.set_end_class(v1::WORKER_LOST);
      lost.push_back(StrCat(rank));
    }
    if (lost.empty()) {
      continue;
    }
    const std::string reason = StrCat("workers/", worker, " ", why, "; it ran rank ",
                                      StrJoin(lost, ", "), " of attempt ", attempt.number());
    for (internal::v1::StoredRank& stored : *attempt.stored.mutable_ranks()) {
      if (stored.ended() && stored.end_class() == v1::WORKER_LOST && stored.end_reason().empty()) {
        stored.set_end_reason(reason);
      }
    }
    SaveAttempt(state, attempt);
    EmitEvent(state, *job, "RANK", reason, now);
    if (!attempt.stored.ending()) {
      FailAttempt(state, *job, FailureClass::kWorkerLost, reason, now);
    } else {
      ShortenSaving(state, *job, now);
    }
    FinishAttemptIfOver(state, *job, now);
  }
}

void DrainAttemptsOn(CoreState& state, const std::string& worker, const std::string& why, Now now) {
  for (const std::string& uid : state.live) {
    JobRecord& job = *state.jobs.at(uid);
    if (!job.current.has_value() || job.current->stored.ending() ||
        !job.current->stored.incarnations().contains(worker)) {
      continue;
    }
    job.current->wishes.set_suspend(true);
    StopAttempt(state, job, FailureClass::kDrained,
                StrCat("workers/", worker, " is drained: ", why), kSaveGraceMs, now);
  }
}

void RepeatCommands(CoreState& state, WorkerRecord& worker, Now now) {
  for (const std::string& uid : state.live) {
    JobRecord& job = *state.jobs.at(uid);
    if (!job.current.has_value() || !job.current->stored.incarnations().contains(worker.name)) {
      continue;
    }
    AttemptRecord& attempt = *job.current;
    bool runs_any = false;
    std::vector<std::int32_t> starts, stops;
    for (std::int32_t rank = 0; rank < attempt.stored.ranks_size(); ++rank) {
      RankRuntime& runtime = attempt.ranks[static_cast<std::size_t>(rank)];
      if (attempt.stored.ranks(rank).ended() || WorkerOf(attempt, rank) != worker.name) {
        continue;
      }
      const bool runs = worker.running.contains({uid, attempt.number(), rank});
      runs_any = runs_any || runs;
      if (!runs && runtime.start_session != worker.session) {
        starts.push_back(rank);
      }
      if (attempt.stored.ending() && runtime.stop_session != worker.session) {
        if (runtime.asked_micros == 0) {
          runtime.asked_micros = now.mono_micros;
        }
        stops.push_back(rank);
      }
    }
    SendStarts(state, job, attempt, starts);
    for (const std::int32_t rank : stops) {
      SendStop(state, job, attempt, rank);
    }
    if (runs_any) {
      state.effects.push_back(
          SendToWorker{.session = worker.session, .message = PlanMessage(job, attempt)});
      if (attempt.wishes.sequence() > 0 && !attempt.stored.ending()) {
        state.effects.push_back(
            SendToWorker{.session = worker.session, .message = WishesMessage(job, attempt)});
      }
    }
  }
}

void OnKeyValue(CoreState& state, JobRecord& job, std::int32_t rank,
                const internal::v1::KeyValueRequest& request, Now now) {
  std::vector<RendezvousStore::Answer> answers;
  job.current->rendezvous.Handle(rank, request, now.mono_micros, &answers);
  SendAnswers(state, job, *job.current, answers);
}

void CheckLimits(CoreState& state, JobRecord& job, Now now) {
  if (!job.current.has_value()) {
    return;
  }
  CheckRecovered(state, job, now);
  AttemptRecord& attempt = *job.current;
  std::vector<RendezvousStore::Answer> answers;
  attempt.rendezvous.Expire(now.mono_micros, &answers);
  SendAnswers(state, job, attempt, answers);
  if (attempt.stored.ending() || attempt.recovered) {
    return;
  }
  CheckGang(state, job, now);
  if (!attempt.stored.ending()) {
    CheckStall(state, job, now);
  }
}

}  // namespace octavo
