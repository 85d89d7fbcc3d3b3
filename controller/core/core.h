// The one owner of the controller's state, sans-io.
//
//   gRPC callbacks ──► Mailbox (bounded, one thread) ──► Core: (event, now) ──► batch + effects
//                                                          │                      │
//   simulator ─────────────────────────────────────────────┘    JobStore::Commit ─┴─► delivered
//
// Every public function is one event. It changes the state at once, adds what must be stored to the
// batch and what must happen to the effects; the caller takes both, commits the batch, and only
// then releases effects and answers. The core has no thread, clock, socket or file; the same code
// runs under the mailbox in production and under a seeded simulator in tests/sim.
//
// Where things are: jobs.h (resource, verbs, events) · attempts.h, attempt_end.h (gangs, fencing,
// what next) · workers.h (sessions, leases, drain) · plans.h, policy_verbs.h (precision) ·
// progress.h (reports) · rendezvous.h (where ranks meet) · queries.h (reads) · scheduler/ (pure
// decisions). Not thread-safe.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "controller/core/jobs.h"
#include "controller/core/plans.h"
#include "controller/core/policy_verbs.h"
#include "controller/core/profiles.h"
#include "controller/core/queries.h"
#include "controller/core/state.h"
#include "controller/core/workers.h"

namespace octavo {

class Core {
 public:
  // `store` is used for Recover and for reading events and telemetry; commits are the caller's.
  // `policy` may be null. Both outlive the core.
  Core(const CoreOptions& options, JobStore* store, PolicyHook* policy);

  // Once, before any other event: takes up what the store has. Jobs that were running are found
  // again when their workers register; those that do not come back within a lease are lost.
  absl::Status Recover(Now now);

  // Clients.
  absl::StatusOr<v1::Job> Submit(const SubmitArgs& args, Now now);
  absl::StatusOr<v1::Job> Verb(JobVerb verb, const VerbArgs& args, Now now);
  absl::StatusOr<v1::Job> Get(const std::string& name);
  absl::StatusOr<v1::ListJobsResponse> List(const v1::ListJobsRequest& request);
  absl::StatusOr<v1::ListEventsResponse> Events(const v1::ListEventsRequest& request);
  absl::StatusOr<v1::ListWorkersResponse> Workers(const v1::ListWorkersRequest& request);
  absl::StatusOr<v1::Worker> Drain(const DrainArgs& args, Now now);
  absl::StatusOr<v1::JobPrecision> Precision(const std::string& name);
  absl::StatusOr<v1::ListPlansResponse> Plans(const v1::ListPlansRequest& request);
  absl::StatusOr<v1::SetPrecisionResponse> SetPlan(const PlanEdit& edit, Now now);
  absl::StatusOr<v1::JobPrecision> SetPolicy(const v1::SetPolicyRequest& request,
                                             const std::string& caller, Now now);
  absl::StatusOr<v1::ReplayPolicyResponse> Replay(const v1::ReplayPolicyRequest& request);
  absl::StatusOr<v1::JobHealth> Health(const v1::GetHealthRequest& request);
  absl::StatusOr<WatchStart> Watch(const v1::WatchJobRequest& request, Now now);
  void Unwatch(const std::string& job_uid);

  // Where the log of a rank is: sends the request to its worker. FAILED_PRECONDITION when there is
  // no such attempt or rank, UNAVAILABLE when its worker is not connected.
  struct LogTarget {
    std::int32_t attempt = 0;
    std::int32_t ranks = 0;
    bool live = false;      // the attempt is the current one
    bool job_over = false;  // no other attempt will come
  };
  absl::StatusOr<LogTarget> FindLog(const std::string& name, std::int32_t attempt);
  absl::Status AskLog(const std::string& name, const internal::v1::LogRequest& request);

  // Time by layer and operation of a running job's next steps (profiles.h).
  absl::StatusOr<v1::JobProfile> StartProfile(const ProfileArgs& args, Now now);
  absl::StatusOr<v1::JobProfile> ReadProfile(const v1::GetProfileRequest& request);

  // Workers.
  void WorkerMessage(SessionId session, const internal::v1::WorkerToController& message, Now now);
  void SessionClosed(SessionId session, Now now);

  // Time. Call at least every kTickMs. A gap of more than two heartbeats means that this process
  // stood still (stopped, swapped out, waiting for its disk): the time is nobody's silence.
  static constexpr std::int64_t kTickMs = 100;
  void Tick(Now now);
  // Before an orderly end: what is stored only every progress_store_ms.
  void SaveProgress(Now now);
  // One scheduling pass, when something changed since the last one or a back-off is running.
  bool WantsSchedule(Now now) const;
  void Schedule(Now now);

  StoreBatch TakeBatch();
  Effects TakeEffects();
  Census TakeCensus() const { return octavo::TakeCensus(state_); }

  const CoreState& state() const { return state_; }

 private:
  absl::Status RecoverTelemetry(const JobRecord& job, const std::vector<TelemetryRow>& rows);
  absl::Status RecoverEnded();

  CoreState state_;
  std::int64_t last_schedule_micros_ = 0;
  std::int64_t last_tick_micros_ = 0;  // 0: none yet
};

}  // namespace octavo
