// The controller's whole state, as plain values. Only the functions of controller/core change it,
// and only on the core's thread.
//
//   CoreState ── jobs: uid → JobRecord ── current: AttemptRecord ── ranks, rendezvous keys
//            ├── workers: name → WorkerRecord ── session, lease, what it says it runs
//            └── batch + effects: what this event changes on disk and in the world
//
// What is in `stored` survives a restart; everything else is rebuilt from what workers report when
// they register again.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "controller/core/effects.h"
#include "controller/core/now.h"
#include "controller/core/policy_hook.h"
#include "controller/core/rendezvous.h"
#include "controller/scheduler/placement.h"
#include "controller/store/job_store.h"
#include "octavo/v1/job_service.pb.h"
#include "proto/jobs/job_state.h"
#include "proto/limits.h"
#include "proto/precision/plan.h"

namespace octavo {

struct CoreOptions {
  std::uint64_t seed = 1;  // of uids; random in production
  std::string version = "0";
  std::int64_t heartbeat_interval_ms = kHeartbeatIntervalMs;
  std::int64_t worker_lease_ms = kWorkerLeaseMs;
  std::int64_t orphan_grace_ms = kOrphanGraceMs;
  std::int64_t worker_forget_ms = 3600 * 1000;  // a lost worker stays listed so long
  std::int64_t progress_store_ms = 5000;        // how old stored progress may be
  std::int32_t ended_jobs_kept = 1000;          // older ended jobs leave the store
  std::int32_t blame_limit = 2;                 // times at fault before a worker is avoided
};

// (job uid, attempt, rank): the identity of a rank process; the attempt is the fence.
using RankId = std::tuple<std::string, std::int32_t, std::int32_t>;

struct RankRuntime {
  internal::v1::RankPhase phase = internal::v1::RANK_PHASE_UNSPECIFIED;
  std::int64_t step = 0;
  SessionId start_session = 0;    // in which StartRank was last sent
  SessionId stop_session = 0;     // in which StopRank was last sent
  std::int64_t asked_micros = 0;  // when it was first asked to stop; 0 never
  bool seen = false;              // its worker has reported it as running
};

struct AttemptRecord {
  internal::v1::StoredAttempt stored;
  std::vector<RankRuntime> ranks;
  RendezvousStore rendezvous;
  std::int64_t started_micros = 0;    // monotonic
  std::int64_t last_step_micros = 0;  // monotonic; training or phase progress
  internal::v1::Wishes wishes;
  std::int64_t stop_grace_ms = 0;
  bool recovered = false;  // from the store; its workers have yet to register
  bool steps_reported = false;

  std::int32_t number() const { return stored.attempt().number(); }
};

struct JobRecord {
  internal::v1::StoredJob stored;
  std::vector<v1::PrecisionPlan> plans;  // ascending versions; the last is the newest
  std::vector<internal::v1::StoredAttempt> past;
  std::optional<AttemptRecord> current;
  std::int64_t queued_micros = 0;  // monotonic, since it waits
  std::int64_t backoff_until = 0;  // monotonic
  std::int64_t progress_saved_micros = 0;
  bool progress_dirty = false;
  std::int64_t events_since_trim = 0;
  int watchers = 0;
  double step_seconds_mean = 0;  // exponential, for rates and ETA
  std::string mismatch_warned;   // newest warning about ranks that disagree
  std::optional<v1::JobProfile> profile;  // newest; not stored
  PrecisionPlan newest_plan;     // the value of plans.back(), for the policy and placement
  std::vector<Recipe> recipes;   // distinct ones of newest_plan

  v1::Job& job() { return *stored.mutable_job(); }
  const v1::Job& job() const { return stored.job(); }
  const std::string& uid() const { return stored.job().uid(); }
  const v1::JobSpec& spec() const { return stored.job().spec(); }
  JobState state() const { return static_cast<JobState>(stored.job().state()); }
};

struct WorkerRecord {
  std::string name;
  std::string incarnation;
  std::string address, host, http_address, version, device;
  std::vector<v1::SlotFacts> slots;
  std::set<std::int32_t> poisoned;
  SessionId session = 0;
  WorkerCondition condition = WorkerCondition::kReady;
  std::string drain_reason;            // not empty: draining, by an operator or by its own SIGTERM
  bool drained_by_operator = false;    // stored; its own drain ends with its process
  std::int64_t last_heard_micros = 0;  // monotonic
  std::int64_t last_seen_unix = 0;
  std::int64_t acked_sequence = 0;
  bool heard_since_register = false;                    // a heartbeat has come in this session
  std::map<RankId, internal::v1::RunningRank> running;  // as it reports
  std::set<RankId> kills_sent;                          // in this session
};

struct CoreState {
  CoreOptions options;
  PolicyHook* policy = nullptr;                            // not owned; may be null
  JobStore* store = nullptr;                               // for reading events only
  std::map<std::string, std::unique_ptr<JobRecord>> jobs;  // by uid
  std::map<std::string, std::string> newest_by_name;       // job name (no prefix) → uid
  std::set<std::string> live;                              // uids not terminal
  std::map<std::string, WorkerRecord> workers;
  std::map<SessionId, std::string> sessions;  // → worker name
  std::map<std::string, StoredRequest> requests;
  std::int64_t revision = 0;
  std::uint64_t random_state = 1;
  bool schedule_wanted = true;
  std::int64_t recovered_micros = 0;  // monotonic time of the start

  StoreBatch batch;
  Effects effects;
};

}  // namespace octavo
