// The tables of the job store, as the steps that lead to them: step i takes a file of version i to
// version i + 1. A new file takes all of them, an older one those it lacks; a step that was
// released never changes.
#pragma once

#include <iterator>

namespace octavo {

// Resources are protobuf messages (they evolve by field numbers); columns are what is searched.
inline constexpr const char* kSchemaSteps[] = {
    R"sql(
CREATE TABLE jobs (
  uid TEXT PRIMARY KEY,
  job BLOB NOT NULL               -- octavo.internal.v1.StoredJob
) STRICT, WITHOUT ROWID;
CREATE TABLE attempts (
  job_uid TEXT NOT NULL,
  number INTEGER NOT NULL,
  attempt BLOB NOT NULL,          -- octavo.internal.v1.StoredAttempt
  PRIMARY KEY (job_uid, number)
) STRICT, WITHOUT ROWID;
CREATE TABLE plans (
  job_uid TEXT NOT NULL,
  version INTEGER NOT NULL,
  plan BLOB NOT NULL,             -- octavo.v1.PrecisionPlan
  PRIMARY KEY (job_uid, version)
) STRICT, WITHOUT ROWID;
CREATE TABLE requests (
  request_id TEXT PRIMARY KEY,
  method TEXT NOT NULL,
  target TEXT NOT NULL,           -- job uid or worker name
  fingerprint INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
CREATE INDEX requests_by_target ON requests (target);
CREATE TABLE events (
  revision INTEGER PRIMARY KEY,
  job_uid TEXT NOT NULL,
  event BLOB NOT NULL             -- octavo.v1.JobEvent
) STRICT;
CREATE INDEX events_by_job ON events (job_uid, revision);
CREATE TABLE drains (
  worker TEXT PRIMARY KEY,
  reason TEXT NOT NULL
) STRICT, WITHOUT ROWID;
CREATE TABLE meta (
  key TEXT PRIMARY KEY,
  value INTEGER NOT NULL          -- revision: newest ever used, also after events were trimmed
) STRICT, WITHOUT ROWID;
INSERT INTO meta VALUES ('revision', 0);
)sql",
    R"sql(
CREATE TABLE telemetry (
  job_uid TEXT NOT NULL,
  sequence INTEGER NOT NULL,      -- ascending in time
  cost INTEGER NOT NULL,          -- of its items; what a job may keep is bounded by the sum
  history BLOB NOT NULL,          -- octavo.internal.v1.StoredHistory
  PRIMARY KEY (job_uid, sequence)
) STRICT, WITHOUT ROWID;
)sql",
};

inline constexpr int kSchemaVersion = static_cast<int>(std::size(kSchemaSteps));  // user_version

}  // namespace octavo
