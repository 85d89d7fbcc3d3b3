#include "controller/core/jobs.h"

#include <algorithm>
#include <vector>

#include "base/check.h"
#include "base/status.h"
#include "base/str.h"
#include "controller/core/attempts.h"
#include "controller/core/plans.h"
#include "proto/convert/error_detail.h"
#include "proto/convert/job.h"

namespace octavo {
namespace {

std::string LowerCase(std::string text) {
  for (char& c : text) {
    c = static_cast<char>(c >= 'A' && c <= 'Z' ? c - 'A' + 'a' : c);
  }
  return text;
}

// splitmix64: uids need to be distinct, not secret; the seed makes simulations repeatable.
std::uint64_t NextRandom(CoreState& state) {
  std::uint64_t z = (state.random_state += 0x9e3779b97f4a7c15ULL);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
  return z ^ (z >> 31);
}

std::string NewUid(CoreState& state) {
  std::string uid;
  do {
    const std::uint64_t value = NextRandom(state);
    char text[20];
    std::snprintf(text, sizeof(text), "%016llx", static_cast<unsigned long long>(value));
    uid = text;
  } while (state.jobs.contains(uid));
  return uid;
}

absl::Status CheckEtag(const JobRecord& job, const std::string& etag) {
  if (etag.empty() || etag == job.job().etag()) {
    return absl::OkStatus();
  }
  return WithDetail(
      AbortedError(StrCat(job.job().name(), " has changed: etag ", etag, " was given, it is ",
                          job.job().etag(), " now; read it again and decide anew")),
      "STALE_ETAG");
}

const char* VerbName(JobVerb verb) {
  switch (verb) {
    case JobVerb::kCancel:
      return "CancelJob";
    case JobVerb::kSuspend:
      return "SuspendJob";
    case JobVerb::kResume:
      return "ResumeJob";
    case JobVerb::kCheckpoint:
      return "CheckpointJob";
  }
  return "";
}

std::string By(const VerbArgs& args, const std::string& what) {
  std::string text = StrCat(what, " by ", args.caller.empty() ? "a client" : args.caller);
  if (!args.reason.empty()) {
    StrAppend(&text, ": ", args.reason);
  }
  return text;
}

absl::Status DoVerb(CoreState& state, JobRecord& job, JobVerb verb, const VerbArgs& args, Now now) {
  if (verb == JobVerb::kCheckpoint) {
    if (job.state() != JobState::kRunning) {
      return WithDetail(
          FailedPreconditionError(StrCat("cannot take a checkpoint: ", job.job().name(), " is ",
                                         Name(job.state()), "; it must be RUNNING")),
          "ILLEGAL_TRANSITION");
    }
    RequestCheckpoint(state, job, now);
    EmitEvent(state, job, "CHECKPOINT", By(args, "checkpoint asked for"), now);
    return absl::OkStatus();
  }
  const JobTrigger trigger = verb == JobVerb::kCancel    ? JobTrigger::kCancelRequested
                             : verb == JobVerb::kSuspend ? JobTrigger::kSuspendRequested
                                                         : JobTrigger::kResumeRequested;
  const std::optional<JobState> next = NextState(job.state(), trigger);
  if (!next.has_value()) {
    return WithDetail(FailedPreconditionError(
                          StrCat(job.job().name(), ": ", IllegalTransition(job.state(), trigger))),
                      "ILLEGAL_TRANSITION");
  }
  if (*next == job.state()) {
    return absl::OkStatus();  // the wish is already being fulfilled
  }
  const std::string message = By(args, verb == JobVerb::kCancel    ? "cancelled"
                                       : verb == JobVerb::kSuspend ? "suspended"
                                                                   : "resumed");
  job.stored.set_verb_reason(message);
  Transition(state, job, trigger, message, now);
  if (verb != JobVerb::kResume) {
    StopForVerb(state, job, now);
  }
  return absl::OkStatus();
}

}  // namespace

void SetTimestamp(google::protobuf::Timestamp* timestamp, std::int64_t unix_micros) {
  timestamp->set_seconds(unix_micros / 1000000);
  timestamp->set_nanos(static_cast<std::int32_t>(unix_micros % 1000000) * 1000);
}

std::int64_t UnixMicros(const google::protobuf::Timestamp& timestamp) {
  return timestamp.seconds() * 1000000 + timestamp.nanos() / 1000;
}

std::string StripPrefix(const std::string& name, const std::string& prefix) {
  return StartsWith(name, prefix) ? name.substr(prefix.size()) : name;
}

std::uint64_t Fingerprint(std::string_view content) {
  std::uint64_t hash = 0xcbf29ce484222325ULL;  // FNV-1a
  for (const char c : content) {
    hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3ULL;
  }
  return hash;
}

absl::StatusOr<std::string> FindRequest(const CoreState& state, const std::string& request_id,
                                        const std::string& method, std::uint64_t fingerprint) {
  const auto found = state.requests.find(request_id);
  if (request_id.empty() || found == state.requests.end()) {
    return std::string();
  }
  if (found->second.method != method || found->second.fingerprint != fingerprint) {
    return WithDetail(
        InvalidArgumentError(StrCat("request_id ", request_id, " was used before for another ",
                                    found->second.method, "; use a new id for a new request")),
        "REQUEST_ID_REUSED");
  }
  return found->second.job_uid;
}

void RememberRequest(CoreState& state, const std::string& request_id, const std::string& method,
                     const std::string& target, std::uint64_t fingerprint) {
  if (request_id.empty()) {
    return;
  }
  const StoredRequest request{
      .request_id = request_id, .method = method, .job_uid = target, .fingerprint = fingerprint};
  state.requests[request_id] = request;
  state.batch.requests.push_back(request);
}

JobRecord* FindJobByUid(CoreState& state, const std::string& uid) {
  const auto found = state.jobs.find(uid);
  return found == state.jobs.end() ? nullptr : found->second.get();
}

absl::StatusOr<JobRecord*> FindJob(CoreState& state, const std::string& name) {
  const std::string id = StripPrefix(name, "jobs/");
  const auto by_name = state.newest_by_name.find(id);
  JobRecord* job =
      FindJobByUid(state, by_name == state.newest_by_name.end() ? id : by_name->second);
  if (job != nullptr) {
    return job;
  }
  std::vector<std::string> names;
  for (const auto& [known, uid] : state.newest_by_name) {
    names.push_back(known);
  }
  std::string text = StrCat("no job named ", id.empty() ? "(empty)" : id);
  const std::optional<std::string> near = NearestMatch(id, names);
  StrAppend(&text, near.has_value() ? StrCat("; did you mean ", *near, "?")
                                    : std::string("; octavo list shows the jobs"));
  return WithDetail(NotFoundError(text), "JOB_NOT_FOUND");
}

absl::StatusOr<v1::Job> SubmitJob(CoreState& state, const SubmitArgs& args, Now now) {
  const std::uint64_t fingerprint = Fingerprint(args.spec_yaml);
  ASSIGN_OR_RETURN(const std::string known,
                   FindRequest(state, args.request_id, "SubmitJob", fingerprint));
  if (!known.empty()) {
    if (JobRecord* job = FindJobByUid(state, known)) {
      return RenderJob(*job, true);
    }
  }
  const std::string& name = args.spec.name();
  const auto holder = state.newest_by_name.find(name);
  if (holder != state.newest_by_name.end() && state.live.contains(holder->second)) {
    return WithDetail(
        AlreadyExistsError(StrCat("a job named ", name, " is ",
                                  Name(state.jobs.at(holder->second)->state()),
                                  "; choose another name, or cancel it: octavo cancel ", name)),
        "JOB_NAME_TAKEN");
  }
  v1::PrecisionPlan plan = PlanOfSpec(args.spec);

  auto record = std::make_unique<JobRecord>();
  v1::Job& job = record->job();
  job.set_name("jobs/" + name);
  *job.mutable_spec() = args.spec;
  if (job.spec().owner().empty()) {
    job.mutable_spec()->set_owner(args.caller.empty() ? "unknown" : args.caller);
  }
  job.set_spec_yaml(args.spec_yaml);
  job.set_state(v1::PENDING);
  job.set_message("submitted");
  job.mutable_progress()->set_total_steps(args.spec.train().steps());
  SetTimestamp(job.mutable_create_time(), now.unix_micros);
  SetTimestamp(job.mutable_update_time(), now.unix_micros);
  if (args.validate_only) {
    return RenderJob(*record, true);
  }
  job.set_uid(NewUid(state));
  SetTimestamp(plan.mutable_create_time(), now.unix_micros);
  plan.set_author_name(job.spec().owner());
  RETURN_IF_ERROR(TakePlan(*record, plan));
  record->queued_micros = now.mono_micros;
  JobRecord& stored = *record;
  state.newest_by_name[name] = job.uid();
  state.live.insert(job.uid());
  state.jobs[stored.uid()] = std::move(record);
  state.batch.plans.push_back({.job_uid = stored.uid(), .plan = plan});
  RememberRequest(state, args.request_id, "SubmitJob", stored.uid(), fingerprint);
  EmitEvent(state, stored, "SUBMITTED",
            StrCat("submitted by ", stored.spec().owner(), ": ", args.spec.parallel().ranks(),
                   " ranks on ", args.spec.device(), ", ", args.spec.train().steps(), " steps"),
            now);
  stored.job().set_etag(StrCat("r", state.revision));
  SaveJob(state, stored, now);
  state.effects.push_back(JobBegan{.train_job = name,
                                   .owner = stored.spec().owner(),
                                   .model = stored.spec().model().family(),
                                   .world_size = stored.spec().parallel().ranks()});
  state.effects.push_back(PlanVersionMetric{.train_job = name, .version = plan.version()});
  state.schedule_wanted = true;
  return RenderJob(stored, true);
}

absl::StatusOr<v1::Job> ApplyVerb(CoreState& state, JobVerb verb, const VerbArgs& args, Now now) {
  const std::string method = VerbName(verb);
  const std::uint64_t fingerprint = Fingerprint(StrCat(StripPrefix(args.name, "jobs/")));
  ASSIGN_OR_RETURN(const std::string known,
                   FindRequest(state, args.request_id, method, fingerprint));
  if (!known.empty()) {
    if (JobRecord* job = FindJobByUid(state, known)) {
      return RenderJob(*job, false);
    }
  }
  ASSIGN_OR_RETURN(JobRecord * job, FindJob(state, args.name));
  RETURN_IF_ERROR(CheckEtag(*job, args.etag));
  RETURN_IF_ERROR(DoVerb(state, *job, verb, args, now));
  RememberRequest(state, args.request_id, method, job->uid(), fingerprint);
  SaveJob(state, *job, now);
  return RenderJob(*job, false);
}

void Transition(CoreState& state, JobRecord& job, JobTrigger trigger, const std::string& message,
                Now now) {
  const JobState before = job.state();
  const std::optional<JobState> next = NextState(before, trigger);
  OCTAVO_CHECK(next.has_value());
  job.job().set_state(ToWire(*next));
  job.job().set_message(message);
  job.job().clear_pending();
  if (IsWaiting(*next) && !IsWaiting(before)) {
    job.queued_micros = now.mono_micros;
  }
  if (IsWaiting(before) && !IsWaiting(*next)) {
    state.effects.push_back(
        QueueWait{.seconds = static_cast<double>(now.mono_micros - job.queued_micros) / 1e6,
                  .result = trigger == JobTrigger::kAttemptStarted ? "placed" : "withdrawn"});
  }
  if (IsTerminal(*next)) {
    SetTimestamp(job.job().mutable_end_time(), now.unix_micros);
    state.live.erase(job.uid());
    state.effects.push_back(JobOver{.train_job = job.spec().name()});
    if (state.policy != nullptr) {
      state.policy->OnJobOver(job.uid());
    }
    internal::v1::ControllerToWorker forget;
    forget.mutable_forget()->set_job_uid(job.uid());
    std::set<std::string> told;
    for (const internal::v1::StoredAttempt& attempt : job.past) {
      for (const v1::Placement& placement : attempt.attempt().placements()) {
        const auto worker = state.workers.find(StripPrefix(placement.worker(), "workers/"));
        if (worker != state.workers.end() && worker->second.session != 0 &&
            told.insert(worker->first).second) {
          state.effects.push_back(
              SendToWorker{.session = worker->second.session, .message = forget});
        }
      }
    }
  }
  state.schedule_wanted = true;
  EmitEvent(state, job, "STATE", message, now);
  job.job().set_etag(StrCat("r", state.revision));
  SaveJob(state, job, now);
}

void EmitEvent(CoreState& state, JobRecord& job, const std::string& kind,
               const std::string& message, Now now) {
  v1::JobEvent event;
  event.set_revision(++state.revision);
  SetTimestamp(event.mutable_time(), now.unix_micros);
  event.set_job(job.job().name());
  event.set_kind(kind);
  event.set_message(message);
  event.set_state(job.job().state());
  event.set_step(job.job().progress().step());
  state.batch.events.push_back({.job_uid = job.uid(), .event = event});
  state.effects.push_back(
      LogNote{.event = "job_" + LowerCase(kind), .train_job = job.spec().name(), .text = message});
  if (++job.events_since_trim >= kMaxEventsPerJob / 10) {
    job.events_since_trim = 0;
    state.batch.trims.emplace_back(job.uid(), kMaxEventsPerJob);
  }
  if (job.watchers > 0) {
    *event.mutable_snapshot() = RenderJob(job, false);
    state.effects.push_back(PublishEvent{.job_uid = job.uid(), .event = std::move(event)});
  }
}

void PublishProgress(CoreState& state, JobRecord& job, Now now) {
  if (job.watchers == 0) {
    return;
  }
  v1::JobEvent event;
  event.set_revision(state.revision);
  SetTimestamp(event.mutable_time(), now.unix_micros);
  event.set_job(job.job().name());
  event.set_kind("PROGRESS");
  event.set_state(job.job().state());
  event.set_step(job.job().progress().step());
  *event.mutable_snapshot() = RenderJob(job, false);
  state.effects.push_back(PublishEvent{.job_uid = job.uid(), .event = std::move(event)});
}

void SaveJob(CoreState& state, JobRecord& job, Now now) {
  SetTimestamp(job.job().mutable_update_time(), now.unix_micros);
  job.progress_dirty = false;
  job.progress_saved_micros = now.mono_micros;
  if (state.policy != nullptr) {
    state.policy->SaveTelemetry(job.uid(), &state.batch);  // no commit of its own
  }
  // One row per job and batch: the last wins.
  for (internal::v1::StoredJob& put : state.batch.jobs) {
    if (put.job().uid() == job.uid()) {
      put = job.stored;
      return;
    }
  }
  state.batch.jobs.push_back(job.stored);
}

void TouchProgress(CoreState& state, JobRecord& job, Now now) {
  job.progress_dirty = true;
  if (now.mono_micros - job.progress_saved_micros >= state.options.progress_store_ms * 1000) {
    SaveJob(state, job, now);
  }
}

v1::Job RenderJob(const JobRecord& job, bool full) {
  v1::Job rendered = job.job();
  if (!full) {
    rendered.clear_spec_yaml();
  }
  for (const internal::v1::StoredAttempt& attempt : job.past) {
    *rendered.add_attempts() = attempt.attempt();
  }
  if (job.current.has_value()) {
    *rendered.add_attempts() = job.current->stored.attempt();
  }
  return rendered;
}

void ForgetOldJobs(CoreState& state) {
  const std::size_t ended = state.jobs.size() - state.live.size();
  const auto kept = static_cast<std::size_t>(state.options.ended_jobs_kept);
  if (ended <= kept) {
    return;
  }
  std::vector<std::pair<std::int64_t, std::string>> by_end;
  for (const auto& [uid, job] : state.jobs) {
    if (!state.live.contains(uid) && job->watchers == 0) {
      by_end.emplace_back(UnixMicros(job->job().end_time()), uid);
    }
  }
  std::sort(by_end.begin(), by_end.end());
  by_end.resize(std::min(by_end.size(), ended - kept));
  for (const auto& [end, uid] : by_end) {
    const std::string name = state.jobs.at(uid)->spec().name();
    const auto newest = state.newest_by_name.find(name);
    if (newest != state.newest_by_name.end() && newest->second == uid) {
      state.newest_by_name.erase(newest);
    }
    std::erase_if(state.requests,
                  [&uid = uid](const auto& entry) { return entry.second.job_uid == uid; });
    state.batch.forgotten_jobs.push_back(uid);
    state.jobs.erase(uid);
  }
}

}  // namespace octavo
