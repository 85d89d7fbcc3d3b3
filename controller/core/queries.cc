#include "controller/core/queries.h"

#include <algorithm>
#include <map>
#include <optional>

#include "base/status.h"
#include "base/str.h"
#include "controller/core/jobs.h"
#include "controller/core/workers.h"
#include "proto/convert/error_detail.h"
#include "proto/jobs/pending_reason.h"

namespace octavo {
namespace {

absl::StatusOr<std::int32_t> PageSize(std::int32_t asked) {
  if (asked < 0) {
    return WithDetail(InvalidArgumentError(StrCat("page_size is ", asked, "; valid is 0 (default ",
                                                  kDefaultPageSize, ") to ", kMaxPageSize)),
                      "PAGE_SIZE_INVALID");
  }
  return asked == 0 ? kDefaultPageSize : std::min(asked, kMaxPageSize);
}

// A token is a kind letter and a cursor: a token of another list is recognised.
std::string Token(char kind, const std::string& cursor) { return StrCat(kind, ".", cursor); }

absl::StatusOr<std::string> Cursor(char kind, const std::string& token) {
  if (token.empty()) {
    return std::string();
  }
  const std::string prefix = StrCat(kind, ".");
  if (!StartsWith(token, prefix) || token.size() == prefix.size()) {
    return WithDetail(InvalidArgumentError(StrCat("page_token ", token,
                                                  " is not one that this list returned; begin with "
                                                  "an empty one")),
                      "PAGE_TOKEN_INVALID");
  }
  return token.substr(prefix.size());
}

absl::StatusOr<std::int64_t> NumberCursor(char kind, const std::string& token) {
  ASSIGN_OR_RETURN(const std::string cursor, Cursor(kind, token));
  if (cursor.empty()) {
    return 0;
  }
  const std::optional<std::int64_t> number = ParseInt64(cursor);
  if (!number.has_value() || *number <= 0) {
    return WithDetail(InvalidArgumentError(StrCat("page_token ", token,
                                                  " is not one that this list returned; begin with "
                                                  "an empty one")),
                      "PAGE_TOKEN_INVALID");
  }
  return *number;
}

using Selector = std::vector<std::pair<std::string, std::string>>;

absl::StatusOr<Selector> ParseSelector(const std::string& text) {
  Selector selector;
  if (text.empty()) {
    return selector;
  }
  for (const std::string& part : StrSplit(text, ',')) {
    const std::size_t equals = part.find('=');
    if (equals == std::string::npos || equals == 0) {
      return WithDetail(InvalidArgumentError(StrCat("label_selector: found \"", part,
                                                    "\"; valid is key=value,key2=value2")),
                        "SELECTOR_INVALID");
    }
    selector.emplace_back(part.substr(0, equals), part.substr(equals + 1));
  }
  return selector;
}

bool Matches(const JobRecord& job, const v1::ListJobsRequest& request, const Selector& selector) {
  if (request.states_size() > 0 && std::find(request.states().begin(), request.states().end(),
                                             job.job().state()) == request.states().end()) {
    return false;
  }
  if (!request.owner().empty() && request.owner() != job.spec().owner()) {
    return false;
  }
  return std::all_of(selector.begin(), selector.end(), [&job](const auto& want) {
    const auto label = job.spec().labels().find(want.first);
    return label != job.spec().labels().end() && label->second == want.second;
  });
}

// Stored events, and those of the batch that is not stored yet.
absl::StatusOr<std::vector<v1::JobEvent>> EventsAfter(CoreState& state, const std::string& uid,
                                                      std::int64_t after, std::int64_t limit) {
  ASSIGN_OR_RETURN(std::vector<v1::JobEvent> events, state.store->ReadEvents(uid, after, limit));
  for (const StoredEvent& event : state.batch.events) {
    if (event.job_uid == uid && event.event.revision() > after &&
        static_cast<std::int64_t>(events.size()) < limit) {
      events.push_back(event.event);
    }
  }
  return events;
}

}  // namespace

absl::StatusOr<v1::ListJobsResponse> ListJobs(CoreState& state,
                                              const v1::ListJobsRequest& request) {
  ASSIGN_OR_RETURN(const std::int32_t page_size, PageSize(request.page_size()));
  ASSIGN_OR_RETURN(const std::string cursor, Cursor('j', request.page_token()));
  ASSIGN_OR_RETURN(const Selector selector, ParseSelector(request.label_selector()));
  using Key = std::pair<std::int64_t, std::string>;  // creation time, uid
  std::vector<std::pair<Key, const JobRecord*>> found;
  for (const auto& [uid, job] : state.jobs) {
    if (Matches(*job, request, selector)) {
      found.push_back({{UnixMicros(job->job().create_time()), uid}, job.get()});
    }
  }
  std::sort(found.begin(), found.end(),
            [](const auto& a, const auto& b) { return a.first > b.first; });
  v1::ListJobsResponse response;
  std::optional<Key> after;
  if (!cursor.empty()) {
    const std::vector<std::string> parts = StrSplit(cursor, '.');
    const std::optional<std::int64_t> time =
        parts.size() == 2 ? ParseInt64(parts[0]) : std::nullopt;
    if (!time.has_value()) {
      return WithDetail(InvalidArgumentError("page_token is not one that this list returned"),
                        "PAGE_TOKEN_INVALID");
    }
    after = Key{*time, parts[1]};
  }
  for (const auto& [key, job] : found) {
    if (after.has_value() && key >= *after) {
      continue;
    }
    if (response.jobs_size() == page_size) {
      const v1::Job& last = response.jobs(page_size - 1);
      response.set_next_page_token(
          Token('j', StrCat(UnixMicros(last.create_time()), ".", last.uid())));
      break;
    }
    *response.add_jobs() = RenderJob(*job, false);
  }
  return response;
}

absl::StatusOr<v1::ListWorkersResponse> ListWorkers(CoreState& state,
                                                    const v1::ListWorkersRequest& request) {
  ASSIGN_OR_RETURN(const std::int32_t page_size, PageSize(request.page_size()));
  ASSIGN_OR_RETURN(const std::string cursor, Cursor('w', request.page_token()));
  v1::ListWorkersResponse response;
  for (v1::Worker& worker : RenderWorkers(state)) {
    const std::string name = StripPrefix(worker.name(), "workers/");
    if (!cursor.empty() && name <= cursor) {
      continue;
    }
    if (response.workers_size() == page_size) {
      response.set_next_page_token(
          Token('w', StripPrefix(response.workers(page_size - 1).name(), "workers/")));
      break;
    }
    *response.add_workers() = std::move(worker);
  }
  return response;
}

absl::StatusOr<v1::ListEventsResponse> ListEvents(CoreState& state,
                                                  const v1::ListEventsRequest& request) {
  ASSIGN_OR_RETURN(const std::int32_t page_size, PageSize(request.page_size()));
  ASSIGN_OR_RETURN(const std::int64_t after, NumberCursor('e', request.page_token()));
  ASSIGN_OR_RETURN(JobRecord * job, FindJob(state, request.name()));
  ASSIGN_OR_RETURN(std::vector<v1::JobEvent> events,
                   EventsAfter(state, job->uid(), after, page_size + 1));
  v1::ListEventsResponse response;
  for (v1::JobEvent& event : events) {
    if (response.events_size() == page_size) {
      response.set_next_page_token(Token('e', StrCat(response.events(page_size - 1).revision())));
      break;
    }
    *response.add_events() = std::move(event);
  }
  return response;
}

absl::StatusOr<v1::ListPlansResponse> ListPlans(CoreState& state,
                                                const v1::ListPlansRequest& request) {
  ASSIGN_OR_RETURN(const std::int32_t page_size, PageSize(request.page_size()));
  ASSIGN_OR_RETURN(const std::int64_t before, NumberCursor('p', request.page_token()));
  ASSIGN_OR_RETURN(JobRecord * job, FindJob(state, request.name()));
  v1::ListPlansResponse response;
  for (auto plan = job->plans.rbegin(); plan != job->plans.rend(); ++plan) {
    if (before != 0 && plan->version() >= before) {
      continue;
    }
    if (response.plans_size() == page_size) {
      response.set_next_page_token(Token('p', StrCat(response.plans(page_size - 1).version())));
      break;
    }
    *response.add_plans() = *plan;
  }
  return response;
}

absl::StatusOr<WatchStart> StartWatch(CoreState& state, const v1::WatchJobRequest& request,
                                      Now now) {
  ASSIGN_OR_RETURN(JobRecord * job, FindJob(state, request.name()));
  WatchStart start{.job_uid = job->uid(), .revision = state.revision};
  const std::int64_t token = request.resume_token();
  if (token < 0 || token > state.revision) {
    return WithDetail(OutOfRangeError(StrCat("resume_token ", token,
                                             " is not from this store (its "
                                             "newest revision is ",
                                             state.revision, "); watch from 0")),
                      "WATCH_TOKEN_TOO_OLD");
  }
  if (token > 0) {
    ASSIGN_OR_RETURN(const std::vector<v1::JobEvent> first, EventsAfter(state, job->uid(), 0, 1));
    if (first.empty() ||
        (first.front().kind() != "SUBMITTED" && first.front().revision() > token + 1)) {
      return WithDetail(OutOfRangeError(StrCat("events after revision ", token,
                                               " are no longer kept; watch from 0")),
                        "WATCH_TOKEN_TOO_OLD");
    }
    ASSIGN_OR_RETURN(start.backlog, EventsAfter(state, job->uid(), token, kMaxWatchQueue / 2));
    if (static_cast<std::int64_t>(start.backlog.size()) == kMaxWatchQueue / 2) {
      return WithDetail(
          OutOfRangeError(StrCat("more than ", kMaxWatchQueue / 2, " events since revision ", token,
                                 "; list the events and watch from 0")),
          "WATCH_TOKEN_TOO_OLD");
    }
  }
  v1::JobEvent snapshot;
  snapshot.set_revision(state.revision);
  SetTimestamp(snapshot.mutable_time(), now.unix_micros);
  snapshot.set_job(job->job().name());
  snapshot.set_kind("SNAPSHOT");
  snapshot.set_message(job->job().message());
  snapshot.set_state(job->job().state());
  snapshot.set_step(job->job().progress().step());
  *snapshot.mutable_snapshot() = RenderJob(*job, false);
  start.backlog.push_back(std::move(snapshot));
  start.over = IsTerminal(job->state());
  ++job->watchers;
  return start;
}

void StopWatch(CoreState& state, const std::string& job_uid) {
  if (JobRecord* job = FindJobByUid(state, job_uid)) {
    job->watchers = std::max(0, job->watchers - 1);
  }
}

Census TakeCensus(const CoreState& state) {
  std::map<JobState, std::int64_t> jobs;
  std::map<std::string, std::int64_t> pending, workers;
  Census census;
  for (const auto& [uid, job] : state.jobs) {
    ++jobs[job->state()];
    if (job->job().has_pending()) {
      ++pending[v1::PendingReason_Name(job->job().pending().reason())];
    }
  }
  std::map<std::string, std::int32_t> free;
  for (const WorkerView& view : ClusterOf(state).workers) {
    free[view.name] = view.condition == WorkerCondition::kReady
                          ? static_cast<std::int32_t>(view.free_slots.size())
                          : 0;
  }
  for (const auto& [name, worker] : state.workers) {
    ++workers[ConditionName(worker.condition)];
    census.workers.push_back({.name = name,
                              .http_address = worker.http_address,
                              .last_seen_unix_micros = worker.last_seen_unix,
                              .slots_free = free[name],
                              .lost = worker.condition == WorkerCondition::kLost});
  }
  for (const JobState job_state : kJobStates) {
    census.jobs_by_state.emplace_back(Name(job_state), jobs[job_state]);
  }
  for (const std::string_view reason : kPendingReasonNames) {
    if (reason != Name(PendingReason::kNone)) {
      census.pending_by_reason.emplace_back(reason, pending[std::string(reason)]);
    }
  }
  for (const WorkerCondition condition : {WorkerCondition::kReady, WorkerCondition::kDraining,
                                          WorkerCondition::kSilent, WorkerCondition::kLost}) {
    census.workers_by_state.emplace_back(ConditionName(condition),
                                         workers[ConditionName(condition)]);
  }
  return census;
}

}  // namespace octavo
