// What the core wants done, as values: the only way it touches the world.
//
//   (state, event, now) ──► (state, store batch, effects)
//
// The mailbox commits the batch and only then delivers the effects, in order. Delivery may be lost
// (a broken session, a crash after the commit): nothing here is the only copy of a fact, and every
// command is repeated when a worker registers again.
#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "octavo/internal/v1/worker_service.pb.h"
#include "octavo/v1/job.pb.h"

namespace octavo {

// A worker's stream, numbered by the rim; 0 is none. A number is never used twice.
using SessionId = std::uint64_t;

struct SendToWorker {
  SessionId session = 0;
  internal::v1::ControllerToWorker message;
};
struct CloseWorkerSession {
  SessionId session = 0;
  std::string reason;
};

// For watchers of the job. Events with a snapshot and no revision of their own (PROGRESS) carry the
// revision of the newest stored event of the store.
struct PublishEvent {
  std::string job_uid;
  v1::JobEvent event;
};

struct LogAnswer {
  internal::v1::LogReply reply;
};

// One line in the controller's log: every event of every job's history.
struct LogNote {
  std::string event;
  std::string train_job;
  std::string text;
};

// Facts for the metrics, reported once each.
struct StepMetric {
  std::string train_job;
  internal::v1::StepReport report;
  std::int64_t unix_micros = 0;
};
struct TelemetryMetric {
  std::string train_job;
  std::string detail;  // layer | op | tensor
  internal::v1::TelemetrySnapshot snapshot;
};
struct RecipesInForce {
  std::string train_job;
  v1::EffectivePrecision effective;  // every (layer, op) that the model has
};
struct PlanVersionMetric {
  std::string train_job;
  std::int64_t version = 0;
};
struct PrecisionChangeMetric {
  std::string train_job;
  std::string direction;  // fallback restore operator
  std::string reason;     // bounded vocabulary
};
struct CheckpointMetric {
  std::string train_job;
  std::int64_t bytes = 0;
  double seconds = 0;
  std::int64_t unix_micros = 0;
};
struct JobBegan {
  std::string train_job;
  std::string owner;
  std::string model;
  std::int32_t world_size = 0;
  std::int64_t restarts = 0;  // already counted, after a restart of the controller
};
struct JobRestarted {
  std::string train_job;
  std::int64_t restarts = 0;
};
struct JobOver {
  std::string train_job;
};
struct AttemptOver {
  std::string result;  // succeeded failed displaced stopped
  std::string reason;  // failure class
};
struct QueueWait {
  double seconds = 0;
  std::string result;  // placed cancelled
};
struct GangStart {
  double seconds = 0;
  std::string result;  // formed failed
};

using Effect = std::variant<SendToWorker, CloseWorkerSession, PublishEvent, LogAnswer, LogNote,
                            StepMetric, TelemetryMetric, RecipesInForce, PlanVersionMetric,
                            PrecisionChangeMetric, CheckpointMetric, JobBegan, JobRestarted,
                            JobOver, AttemptOver, QueueWait, GangStart>;
using Effects = std::vector<Effect>;

// Numbers that the rim shows, taken as a whole.
struct Census {
  struct WorkerFacts {
    std::string name;
    std::string http_address;
    std::int64_t last_seen_unix_micros = 0;
    std::int32_t slots_free = 0;
    bool lost = false;
  };
  std::vector<std::pair<std::string, std::int64_t>> jobs_by_state;      // every state, also at 0
  std::vector<std::pair<std::string, std::int64_t>> pending_by_reason;  // every reason
  std::vector<std::pair<std::string, std::int64_t>> workers_by_state;   // every state
  std::vector<WorkerFacts> workers;
};

}  // namespace octavo
