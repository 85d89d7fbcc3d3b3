// What survives the controller: jobs, attempts, plans, events, request ids and telemetry.
//
//   core runs a batch of events ──► StoreBatch ──► JobStore::Commit (one transaction, durable)
//                                                   └─► only then replies and acks leave
//
// The core never waits for a disk: it fills a StoreBatch, its owner commits it, and releases the
// effects of those events afterwards. So whatever a client or worker was told is on disk.
// Invariants: revisions grow by one per event over the whole store and are never reused; a batch is
// applied whole or not at all. Not thread-safe: one owning thread, one connection (SQLite 3.40 has
// the WAL-reset bug with two).
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "octavo/internal/v1/store.pb.h"
#include "octavo/v1/job.pb.h"
#include "octavo/v1/precision.pb.h"

namespace octavo {

struct StoredPlan {
  std::string job_uid;
  v1::PrecisionPlan plan;
};

// A mutation that was answered: the same id again gives the same job.
struct StoredRequest {
  std::string request_id;
  std::string method;
  std::string job_uid;            // or the worker's name
  std::uint64_t fingerprint = 0;  // of the request's content: same id, other content is an error
};

struct StoredEvent {
  std::string job_uid;
  v1::JobEvent event;  // without snapshot
};

// One row of a job's telemetry history.
struct StoredTelemetry {
  std::string job_uid;
  std::int64_t sequence = 0;  // ascending in time
  std::int64_t cost = 0;      // of its items, as the writer counts
  internal::v1::StoredHistory history;
};
struct TelemetryRow {
  std::int64_t sequence = 0;
  std::int64_t cost = 0;
};

// One worker that an operator drained; survives both sides' restarts.
struct StoredDrain {
  std::string worker;
  std::string reason;
};

struct StoreBatch {
  std::vector<internal::v1::StoredJob> jobs;                // put, by uid; the last one wins
  std::vector<internal::v1::StoredAttempt> attempts;        // put, by (uid, number)
  std::vector<StoredPlan> plans;                            // put, by (uid, version)
  std::vector<StoredRequest> requests;                      // insert
  std::vector<StoredEvent> events;                          // insert, revisions ascending
  std::vector<StoredDrain> drains;                          // put; an empty reason removes
  std::vector<std::pair<std::string, std::int64_t>> trims;  // uid keeps its newest n events
  std::vector<StoredTelemetry> telemetry;                   // put, by (uid, sequence)
  // uid: rows of its telemetry with a smaller sequence go
  std::vector<std::pair<std::string, std::int64_t>> telemetry_trims;
  std::vector<std::string> forgotten_jobs;  // uid: every row of the job goes

  bool empty() const {
    return jobs.empty() && attempts.empty() && plans.empty() && requests.empty() &&
           events.empty() && drains.empty() && trims.empty() && telemetry.empty() &&
           telemetry_trims.empty() && forgotten_jobs.empty();
  }
};

// Everything but events, which are read by page, and telemetry, which is read by job.
struct StoreSnapshot {
  std::vector<internal::v1::StoredJob> jobs;
  std::vector<internal::v1::StoredAttempt> attempts;  // ascending by (uid, number)
  std::vector<StoredPlan> plans;                      // ascending by (uid, version)
  std::vector<StoredRequest> requests;
  std::vector<StoredDrain> drains;
  std::int64_t revision = 0;  // of the newest event ever stored
};

class JobStore {
 public:
  virtual ~JobStore() = default;

  virtual absl::StatusOr<StoreSnapshot> Load() = 0;
  // Durable when OK. On error nothing was applied and the same batch may be tried again.
  virtual absl::Status Commit(const StoreBatch& batch) = 0;
  // Events of a job with revision > after, oldest first, at most `limit`.
  virtual absl::StatusOr<std::vector<v1::JobEvent>> ReadEvents(const std::string& job_uid,
                                                               std::int64_t after,
                                                               std::int64_t limit) = 0;
  // Which telemetry of a job there is, and the rows with sequence >= first; both ascending.
  virtual absl::StatusOr<std::vector<TelemetryRow>> ListTelemetry(const std::string& job_uid) = 0;
  virtual absl::StatusOr<std::vector<StoredTelemetry>> ReadTelemetry(const std::string& job_uid,
                                                                     std::int64_t first) = 0;
};

}  // namespace octavo
