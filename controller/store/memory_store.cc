#include "controller/store/memory_store.h"

#include <algorithm>

namespace octavo {

absl::StatusOr<StoreSnapshot> MemoryStore::Load() {
  std::lock_guard<std::mutex> lock(mutex_);
  StoreSnapshot snapshot{.revision = revision_};
  for (const auto& [uid, job] : jobs_) {
    snapshot.jobs.push_back(job);
  }
  for (const auto& [key, attempt] : attempts_) {
    snapshot.attempts.push_back(attempt);
  }
  for (const auto& [key, plan] : plans_) {
    snapshot.plans.push_back({.job_uid = key.first, .plan = plan});
  }
  for (const auto& [id, request] : requests_) {
    snapshot.requests.push_back(request);
  }
  for (const auto& [worker, reason] : drains_) {
    snapshot.drains.push_back({.worker = worker, .reason = reason});
  }
  return snapshot;
}

absl::Status MemoryStore::Commit(const StoreBatch& batch) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!commit_status_.ok()) {
    return commit_status_;
  }
  ++commits_;
  for (const internal::v1::StoredJob& job : batch.jobs) {
    jobs_[job.job().uid()] = job;
  }
  for (const internal::v1::StoredAttempt& attempt : batch.attempts) {
    attempts_[{attempt.job_uid(), attempt.attempt().number()}] = attempt;
  }
  for (const StoredPlan& plan : batch.plans) {
    plans_[{plan.job_uid, plan.plan.version()}] = plan.plan;
  }
  for (const StoredRequest& request : batch.requests) {
    requests_[request.request_id] = request;
  }
  for (const StoredEvent& event : batch.events) {
    events_[event.job_uid][event.event.revision()] = event.event;
    revision_ = std::max(revision_, event.event.revision());
  }
  for (const StoredDrain& drain : batch.drains) {
    if (drain.reason.empty()) {
      drains_.erase(drain.worker);
    } else {
      drains_[drain.worker] = drain.reason;
    }
  }
  for (const auto& [uid, keep] : batch.trims) {
    auto& events = events_[uid];
    while (static_cast<std::int64_t>(events.size()) > keep) {
      events.erase(events.begin());
    }
  }
  for (const StoredTelemetry& row : batch.telemetry) {
    telemetry_[row.job_uid][row.sequence] = row;
  }
  for (const auto& [uid, first] : batch.telemetry_trims) {
    auto& rows = telemetry_[uid];
    rows.erase(rows.begin(), rows.lower_bound(first));
  }
  for (const std::string& uid : batch.forgotten_jobs) {
    jobs_.erase(uid);
    telemetry_.erase(uid);
    events_.erase(uid);
    std::erase_if(attempts_, [&uid](const auto& row) { return row.first.first == uid; });
    std::erase_if(plans_, [&uid](const auto& row) { return row.first.first == uid; });
    std::erase_if(requests_, [&uid](const auto& row) { return row.second.job_uid == uid; });
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<v1::JobEvent>> MemoryStore::ReadEvents(const std::string& job_uid,
                                                                  std::int64_t after,
                                                                  std::int64_t limit) {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<v1::JobEvent> events;
  const auto job = events_.find(job_uid);
  if (job == events_.end()) {
    return events;
  }
  for (auto it = job->second.upper_bound(after);
       it != job->second.end() && static_cast<std::int64_t>(events.size()) < limit; ++it) {
    events.push_back(it->second);
  }
  return events;
}

absl::StatusOr<std::vector<TelemetryRow>> MemoryStore::ListTelemetry(const std::string& job_uid) {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<TelemetryRow> rows;
  if (const auto job = telemetry_.find(job_uid); job != telemetry_.end()) {
    for (const auto& [sequence, row] : job->second) {
      rows.push_back({.sequence = sequence, .cost = row.cost});
    }
  }
  return rows;
}

absl::StatusOr<std::vector<StoredTelemetry>> MemoryStore::ReadTelemetry(const std::string& job_uid,
                                                                        std::int64_t first) {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<StoredTelemetry> rows;
  if (const auto job = telemetry_.find(job_uid); job != telemetry_.end()) {
    for (auto row = job->second.lower_bound(first); row != job->second.end(); ++row) {
      rows.push_back(row->second);
    }
  }
  return rows;
}

}  // namespace octavo
