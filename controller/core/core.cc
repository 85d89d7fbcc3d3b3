#include "controller/core/core.h"

#include <algorithm>
#include <map>
#include <set>
#include <string_view>
#include <utility>

#include "base/status.h"
#include "base/str.h"
#include "controller/core/attempts.h"
#include "controller/core/progress.h"
#include "controller/scheduler/explain.h"
#include "proto/convert/error_detail.h"
#include "proto/convert/job.h"
#include "proto/convert/precision.h"

namespace octavo {
namespace {

// Starting a gang means storing it and writing its plan to every worker. When much becomes free at
// once, a pass starts so many ranks (a larger gang is started whole) and leaves the rest to the
// next, so that heartbeats and clients are heard in between.
constexpr std::int64_t kRanksStartedPerPass = 64;

// While jobs wait for a back-off, their reason shows the remaining seconds.
constexpr std::int64_t kRescheduleMicros = 1000000;

WaitingJob ToWaiting(const CoreState& state, const JobRecord& job, Now now) {
  const v1::JobSpec& spec = job.spec();
  WaitingJob waiting{.key = {.priority = spec.priority(),
                             .submit_micros = UnixMicros(job.job().create_time()),
                             .uid = job.uid()},
                     .name = job.job().name()};
  waiting.gang.ranks = spec.parallel().ranks();
  waiting.gang.expert_parallel = spec.parallel().expert_parallel() > 0
                                     ? spec.parallel().expert_parallel()
                                     : waiting.gang.ranks;
  waiting.gang.cuda = spec.device() == "cuda";
  waiting.gang.recipes = job.recipes;
  waiting.gang.allow_emulation = spec.precision().allow_emulation();
  for (const auto& [worker, times] : job.stored.blame()) {
    if (times >= state.options.blame_limit) {
      waiting.gang.blamed_workers.push_back(worker);
    }
  }
  if (job.backoff_until > now.mono_micros) {
    waiting.backoff_seconds = (job.backoff_until - now.mono_micros + 999999) / 1000000;
  }
  return waiting;
}

// Fenced ranks of waiting jobs that workers still report.
void CountRanksLeft(const CoreState& state, std::vector<WaitingJob>* waiting) {
  std::map<std::string_view, WaitingJob*> restarted;
  for (WaitingJob& job : *waiting) {
    if (!state.jobs.at(job.key.uid)->past.empty()) {
      restarted[job.key.uid] = &job;
    }
  }
  if (restarted.empty()) {
    return;
  }
  for (const auto& [name, worker] : state.workers) {
    for (const auto& [key, rank] : worker.running) {
      if (const auto job = restarted.find(rank.job_uid()); job != restarted.end()) {
        ++job->second->previous_ranks_left;
      }
    }
  }
}

void SetPending(CoreState& state, JobRecord& job, const PendingExplanation& why, Now now) {
  const v1::PendingReason before = job.job().pending().reason();
  v1::Pending& pending = *job.job().mutable_pending();
  pending.set_reason(ToWire(why.reason));
  pending.set_sentence(why.sentence);
  pending.set_slots_needed(why.slots_needed);
  pending.set_slots_free(why.slots_free);
  pending.set_slots_largest_possible(why.slots_largest_possible);
  if (before != pending.reason()) {  // numbers alone are not worth an event
    EmitEvent(state, job, "PENDING", why.sentence, now);
    SaveJob(state, job, now);
  }
}

// Wishes and limits are not stored; the reason why an attempt ends tells them.
void RestoreWishes(AttemptRecord& attempt) {
  if (!attempt.stored.ending()) {
    return;
  }
  switch (static_cast<FailureClass>(attempt.stored.ending_class())) {
    case FailureClass::kSuspendedByUser:
    case FailureClass::kDrained:
      attempt.wishes.set_suspend(true);
      attempt.stop_grace_ms = kOrphanGraceMs;
      break;
    case FailureClass::kCancelledByUser:
      attempt.wishes.set_stop(true);
      attempt.stop_grace_ms = kRankStopGraceMs;
      break;
    default:
      attempt.wishes.set_stop_without_checkpoint(true);
      attempt.stop_grace_ms = kRankTermGraceMs;
  }
  attempt.wishes.set_sequence(1);
}

// Moves the clocks that others are judged by over a time in which nobody was listened to. What was
// heard since (before this tick, in the same batch) stays at now at the latest.
void ForgiveGap(CoreState& state, std::int64_t gap_micros, Now now) {
  const auto move = [&](std::int64_t& micros) {
    micros = std::min(micros + gap_micros, now.mono_micros);
  };
  for (auto& [name, worker] : state.workers) {
    move(worker.last_heard_micros);
  }
  for (const std::string& uid : state.live) {
    std::optional<AttemptRecord>& attempt = state.jobs.at(uid)->current;
    if (!attempt.has_value()) {
      continue;
    }
    move(attempt->started_micros);
    move(attempt->last_step_micros);
    for (RankRuntime& rank : attempt->ranks) {
      if (rank.asked_micros != 0) {
        move(rank.asked_micros);
      }
    }
  }
}

}  // namespace

Core::Core(const CoreOptions& options, JobStore* store, PolicyHook* policy) {
  state_.options = options;
  state_.store = store;
  state_.policy = policy;
  state_.random_state = options.seed;
}

absl::Status Core::Recover(Now now) {
  ASSIGN_OR_RETURN(StoreSnapshot snapshot, state_.store->Load());
  state_.revision = snapshot.revision;
  state_.recovered_micros = now.mono_micros;
  for (internal::v1::StoredJob& stored : snapshot.jobs) {
    auto job = std::make_unique<JobRecord>();
    job->stored = std::move(stored);
    job->queued_micros = now.mono_micros;
    job->progress_saved_micros = now.mono_micros;
    const std::int64_t wait = job->stored.next_attempt_unix_micros() - now.unix_micros;
    if (job->stored.next_attempt_unix_micros() != 0 && wait > 0) {
      job->backoff_until = now.mono_micros + std::min(wait, std::int64_t{300} * 1000000);
    }
    const std::string uid = job->uid();
    if (!IsTerminal(job->state())) {
      state_.live.insert(uid);
    }
    // The live job owns the name, else the newest.
    std::string& owner = state_.newest_by_name[job->spec().name()];
    if (owner.empty() || (!state_.live.contains(owner) &&
                          (state_.live.contains(uid) ||
                           UnixMicros(job->job().create_time()) >
                               UnixMicros(state_.jobs.at(owner)->job().create_time())))) {
      owner = uid;
    }
    state_.jobs[uid] = std::move(job);
  }
  for (const StoredPlan& plan : snapshot.plans) {
    if (JobRecord* job = FindJobByUid(state_, plan.job_uid)) {
      RETURN_IF_ERROR(
          Annotate(TakePlan(*job, plan.plan), StrCat("stored plan of ", job->job().name())));
    }
  }
  for (internal::v1::StoredAttempt& stored : snapshot.attempts) {
    JobRecord* job = FindJobByUid(state_, stored.job_uid());
    if (job == nullptr) {
      continue;
    }
    if (stored.attempt().has_end_time()) {
      job->past.push_back(std::move(stored));
      continue;
    }
    job->current.emplace();
    AttemptRecord& attempt = *job->current;
    attempt.stored = std::move(stored);
    attempt.ranks.resize(static_cast<std::size_t>(attempt.stored.ranks_size()));
    attempt.started_micros = attempt.last_step_micros = now.mono_micros;
    attempt.recovered = true;
    RestoreWishes(attempt);
    for (const auto& [worker, incarnation] : attempt.stored.incarnations()) {
      ExpectWorker(state_, worker, now);
      state_.workers.at(worker).incarnation = incarnation;
    }
  }
  for (const auto& [uid, job] : state_.jobs) {
    if (job->plans.empty()) {
      return DataLossError(StrCat("the store has no plan for ", job->job().name(), " (", uid, ")"));
    }
    if (state_.live.contains(uid) && state_.policy != nullptr) {
      std::vector<PrecisionPlan> history;
      for (const v1::PrecisionPlan& plan : job->plans) {
        ASSIGN_OR_RETURN(PrecisionPlan value, PlanFromWire(plan));
        history.push_back(std::move(value));
      }
      state_.policy->Restore(job->job(), history,
                             job->stored.has_policy() ? &job->stored.policy() : nullptr);
      ASSIGN_OR_RETURN(const std::vector<TelemetryRow> rows, state_.store->ListTelemetry(uid));
      RETURN_IF_ERROR(RecoverTelemetry(*job, rows));
    }
    if (state_.live.contains(uid)) {
      state_.effects.push_back(JobBegan{.train_job = job->spec().name(),
                                        .owner = job->spec().owner(),
                                        .model = job->spec().model().family(),
                                        .world_size = job->spec().parallel().ranks(),
                                        .restarts = job->job().restarts()});
      state_.effects.push_back(PlanVersionMetric{.train_job = job->spec().name(),
                                                 .version = job->plans.back().version()});
      if (job->stored.effective().entries_size() > 0) {
        state_.effects.push_back(RecipesMetric(job->spec(), job->stored.effective()));
      }
    }
  }
  RETURN_IF_ERROR(RecoverEnded());
  for (const StoredRequest& request : snapshot.requests) {
    state_.requests[request.request_id] = request;
  }
  for (const StoredDrain& drain : snapshot.drains) {
    if (!state_.workers.contains(drain.worker)) {
      ExpectWorker(state_, drain.worker, now);
    }
    WorkerRecord& worker = state_.workers.at(drain.worker);
    worker.drain_reason = drain.reason;
    worker.drained_by_operator = true;
  }
  return absl::OkStatus();
}

// Reads as few of the newest rows as hold the recent snapshots: a history can be large.
absl::Status Core::RecoverTelemetry(const JobRecord& job, const std::vector<TelemetryRow>& rows) {
  std::vector<StoredTelemetry> newest;
  int snapshots = 0;
  for (std::size_t count = 0; count < rows.size() && snapshots < PolicyHook::kRecentSnapshots;) {
    count = std::min(rows.size(), std::max<std::size_t>(8, 2 * count));
    ASSIGN_OR_RETURN(newest,
                     state_.store->ReadTelemetry(job.uid(), rows[rows.size() - count].sequence));
    snapshots = 0;
    for (const StoredTelemetry& row : newest) {
      for (const internal::v1::StoredHistory::Item& item : row.history.items()) {
        snapshots += item.has_snapshot() ? 1 : 0;
      }
    }
  }
  state_.policy->RestoreTelemetry(job.job(), rows, newest);
  return absl::OkStatus();
}

// Ended jobs whose telemetry is kept for replays, in the order in which they ended.
absl::Status Core::RecoverEnded() {
  if (state_.policy == nullptr) {
    return absl::OkStatus();
  }
  std::map<std::pair<std::int64_t, std::string>, std::vector<TelemetryRow>> by_end;
  for (const auto& [uid, job] : state_.jobs) {
    if (!state_.live.contains(uid)) {
      ASSIGN_OR_RETURN(std::vector<TelemetryRow> rows, state_.store->ListTelemetry(uid));
      if (!rows.empty()) {
        by_end[{UnixMicros(job->job().end_time()), uid}] = std::move(rows);
      }
    }
  }
  for (const auto& [key, rows] : by_end) {
    const JobRecord& job = *state_.jobs.at(key.second);
    state_.policy->Restore(job.job(), {}, job.stored.has_policy() ? &job.stored.policy() : nullptr);
    RETURN_IF_ERROR(RecoverTelemetry(job, rows));
    state_.policy->OnJobOver(job.uid());
  }
  return absl::OkStatus();
}

absl::StatusOr<v1::Job> Core::Submit(const SubmitArgs& args, Now now) {
  return SubmitJob(state_, args, now);
}

absl::StatusOr<v1::Job> Core::Verb(JobVerb verb, const VerbArgs& args, Now now) {
  return ApplyVerb(state_, verb, args, now);
}

absl::StatusOr<v1::Job> Core::Get(const std::string& name) {
  ASSIGN_OR_RETURN(JobRecord * job, FindJob(state_, name));
  return RenderJob(*job, true);
}

absl::StatusOr<v1::ListJobsResponse> Core::List(const v1::ListJobsRequest& request) {
  return ListJobs(state_, request);
}

absl::StatusOr<v1::ListEventsResponse> Core::Events(const v1::ListEventsRequest& request) {
  return ListEvents(state_, request);
}

absl::StatusOr<v1::ListWorkersResponse> Core::Workers(const v1::ListWorkersRequest& request) {
  return ListWorkers(state_, request);
}

absl::StatusOr<v1::Worker> Core::Drain(const DrainArgs& args, Now now) {
  return DrainWorker(state_, args, now);
}

absl::StatusOr<v1::JobPrecision> Core::Precision(const std::string& name) {
  ASSIGN_OR_RETURN(JobRecord * job, FindJob(state_, name));
  return RenderPrecision(state_, *job);
}

absl::StatusOr<v1::JobPrecision> Core::SetPolicy(const v1::SetPolicyRequest& request,
                                                 const std::string& caller, Now now) {
  return octavo::SetPolicy(state_, request, caller, now);
}

absl::StatusOr<v1::ReplayPolicyResponse> Core::Replay(const v1::ReplayPolicyRequest& request) {
  return ReplayPolicy(state_, request);
}

absl::StatusOr<v1::JobHealth> Core::Health(const v1::GetHealthRequest& request) {
  return GetHealth(state_, request);
}

absl::StatusOr<v1::ListPlansResponse> Core::Plans(const v1::ListPlansRequest& request) {
  return ListPlans(state_, request);
}

absl::StatusOr<v1::SetPrecisionResponse> Core::SetPlan(const PlanEdit& edit, Now now) {
  return SetPrecision(state_, edit, now);
}

absl::StatusOr<WatchStart> Core::Watch(const v1::WatchJobRequest& request, Now now) {
  return StartWatch(state_, request, now);
}

void Core::Unwatch(const std::string& job_uid) { StopWatch(state_, job_uid); }

absl::StatusOr<Core::LogTarget> Core::FindLog(const std::string& name, std::int32_t attempt) {
  ASSIGN_OR_RETURN(JobRecord * job, FindJob(state_, name));
  const auto describe = [job](const internal::v1::StoredAttempt& stored, bool live) {
    return LogTarget{.attempt = stored.attempt().number(),
                     .ranks = stored.ranks_size(),
                     .live = live,
                     .job_over = IsTerminal(job->state())};
  };
  if (job->current.has_value() && (attempt == 0 || attempt == job->current->number())) {
    return describe(job->current->stored, true);
  }
  for (auto past = job->past.rbegin(); past != job->past.rend(); ++past) {
    if (attempt == 0 || past->attempt().number() == attempt) {
      return describe(*past, false);
    }
  }
  const std::string what = attempt == 0 ? std::string("has not started yet: it has no logs")
                                        : StrCat("has no attempt ", attempt);
  return WithDetail(FailedPreconditionError(StrCat(job->job().name(), " ", what)), "NO_LOGS");
}

absl::StatusOr<v1::JobProfile> Core::StartProfile(const ProfileArgs& args, Now now) {
  return octavo::StartProfile(state_, args, now);
}

absl::StatusOr<v1::JobProfile> Core::ReadProfile(const v1::GetProfileRequest& request) {
  return octavo::ReadProfile(state_, request);
}

absl::Status Core::AskLog(const std::string& name, const internal::v1::LogRequest& request) {
  ASSIGN_OR_RETURN(JobRecord * job, FindJob(state_, name));
  const v1::Attempt* attempt = nullptr;
  for (const internal::v1::StoredAttempt& past : job->past) {
    attempt = past.attempt().number() == request.attempt() ? &past.attempt() : attempt;
  }
  if (job->current.has_value() && job->current->number() == request.attempt()) {
    attempt = &job->current->stored.attempt();
  }
  if (attempt == nullptr || request.rank() < 0 || request.rank() >= attempt->placements_size()) {
    return WithDetail(
        FailedPreconditionError(
            attempt == nullptr
                ? StrCat(job->job().name(), " has no attempt ", request.attempt())
                : StrCat(job->job().name(), " has no rank ", request.rank(), " in attempt ",
                         request.attempt(), "; valid: 0 to ", attempt->placements_size() - 1)),
        "NO_LOGS");
  }
  const std::string worker_name =
      StripPrefix(attempt->placements(request.rank()).worker(), "workers/");
  const auto worker = state_.workers.find(worker_name);
  if (worker == state_.workers.end() || worker->second.session == 0) {
    return WithDetail(UnavailableError(StrCat("the log of rank ", request.rank(), " is on workers/",
                                              worker_name, ", which is not connected")),
                      "WORKER_NOT_CONNECTED");
  }
  SendToWorker send{.session = worker->second.session};
  *send.message.mutable_log() = request;
  send.message.mutable_log()->set_job_uid(job->uid());
  state_.effects.push_back(std::move(send));
  return absl::OkStatus();
}

void Core::WorkerMessage(SessionId session, const internal::v1::WorkerToController& message,
                         Now now) {
  OnWorkerMessage(state_, session, message, now);
}

void Core::SessionClosed(SessionId session, Now now) { OnSessionClosed(state_, session, now); }

void Core::Tick(Now now) {
  const std::int64_t gap = last_tick_micros_ == 0 ? 0 : now.mono_micros - last_tick_micros_;
  last_tick_micros_ = now.mono_micros;
  if (gap > 2 * state_.options.heartbeat_interval_ms * 1000) {
    ForgiveGap(state_, gap, now);
  }
  CheckLeases(state_, now);
  const std::vector<std::string> live(state_.live.begin(), state_.live.end());
  for (const std::string& uid : live) {
    JobRecord& job = *state_.jobs.at(uid);
    CheckLimits(state_, job, now);
    if (job.progress_dirty) {
      TouchProgress(state_, job, now);
    }
  }
  ForgetOldJobs(state_);
}

void Core::SaveProgress(Now now) {
  for (const std::string& uid : state_.live) {
    JobRecord& job = *state_.jobs.at(uid);
    if (job.progress_dirty) {
      SaveJob(state_, job, now);
    }
  }
}

bool Core::WantsSchedule(Now now) const {
  return state_.schedule_wanted || now.mono_micros - last_schedule_micros_ >= kRescheduleMicros;
}

void Core::Schedule(Now now) {
  state_.schedule_wanted = false;
  last_schedule_micros_ = now.mono_micros;
  std::vector<WaitingJob> waiting;
  for (const std::string& uid : state_.live) {
    const JobRecord& job = *state_.jobs.at(uid);
    if (IsWaiting(job.state())) {
      waiting.push_back(ToWaiting(state_, job, now));
    }
  }
  if (waiting.empty()) {
    return;
  }
  CountRanksLeft(state_, &waiting);
  std::int64_t started = 0;
  bool more = false;
  for (const Decision& decision : SchedulePass(ClusterOf(state_), waiting)) {
    JobRecord& job = *state_.jobs.at(decision.uid);
    if (decision.placement.empty()) {
      SetPending(state_, job, decision.pending, now);
    } else if (started >= kRanksStartedPerPass) {
      more = true;  // its slots are its own: those after it were judged without them
    } else {
      StartAttempt(state_, job, decision.placement, now);
      started += static_cast<std::int64_t>(decision.placement.size());
    }
  }
  state_.schedule_wanted = more;  // otherwise the pass has seen its own effects
}

StoreBatch Core::TakeBatch() { return std::exchange(state_.batch, StoreBatch()); }
Effects Core::TakeEffects() { return std::exchange(state_.effects, Effects()); }

}  // namespace octavo
