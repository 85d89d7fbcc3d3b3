// Where the precision policy plugs into the core: evidence in, at most one new plan out.
//
// The core calls it on its own thread with the newest plan; a returned plan becomes version n+1
// (checked like an operator's) and is sent to the ranks. Alerts become WARNING events. What Save
// returns is stored with the job after every change, so that a restarted controller remembers
// holds, relapses and which sites are the operator's; telemetry is stored with the job's progress.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "controller/core/now.h"
#include "controller/core/policy_history.h"
#include "controller/policy/ranking.h"
#include "controller/policy/replay.h"
#include "controller/store/job_store.h"
#include "octavo/internal/v1/store.pb.h"
#include "octavo/internal/v1/telemetry.pb.h"
#include "octavo/v1/job.pb.h"
#include "proto/precision/plan.h"

namespace octavo {

struct PolicyAnswer {
  std::optional<PrecisionPlan>
      plan;  // entries, shadows and reason; version and author are the core's
  // One per decision, for the metrics: direction (fallback restore choose pin) and signal.
  std::vector<std::pair<std::string, std::string>> changes;
  std::vector<std::string> alerts;
};

// A dry run over the telemetry that is kept of a job.
struct PolicyReplay {
  std::int64_t first_step = 0, last_step = 0, snapshots = 0, steps = 0;
  ReplayResult result;
};

struct PolicyHealth {
  std::int64_t first_step = 0, last_step = 0, plan_version = 0;
  std::vector<RankedTensor> tensors;  // worst first
};

class PolicyHook {
 public:
  virtual ~PolicyHook() = default;

  // A job known from the store: what was saved, or (null) what earlier plans say about falls,
  // returns and operators.
  virtual void Restore(const v1::Job& job, const std::vector<PrecisionPlan>& history,
                       const internal::v1::StoredPolicy* saved) = 0;
  virtual internal::v1::StoredPolicy Save(const v1::Job& job) = 0;
  // After Restore: which telemetry the store has of the job, and the newest rows of it, with
  // kRecentSnapshots snapshots if there are so many. All ascending by sequence.
  static constexpr int kRecentSnapshots = static_cast<int>(RecentHealth::kSnapshots);
  virtual void RestoreTelemetry(const v1::Job& job, const std::vector<TelemetryRow>& rows,
                                const std::vector<StoredTelemetry>& newest) = 0;
  // Adds to the batch what the store lacks of the job's telemetry, and what it no longer needs.
  virtual void SaveTelemetry(const std::string& job_uid, StoreBatch* batch) = 0;

  // A new attempt continues after `step` on such devices.
  virtual void OnAttempt(const v1::Job& job, const DeviceAbility& device, std::int64_t step) = 0;
  virtual void OnPlanApplied(const v1::Job& job, std::int64_t version, std::int64_t step) = 0;
  virtual PolicyAnswer OnStep(const v1::Job& job, const PrecisionPlan& newest,
                              const internal::v1::StepReport& report) = 0;
  // Of one worker's ranks; the hook joins the workers of one interval.
  virtual PolicyAnswer OnSnapshot(const v1::Job& job, const PrecisionPlan& newest,
                                  const internal::v1::TelemetrySnapshot& snapshot) = 0;
  // The plan of its last answer was refused; `newest` stays in force.
  virtual void OnRefused(const v1::Job& job, const PrecisionPlan& newest) = 0;
  // An operator changed the plan: these sites are his and not undone.
  virtual void OnOperatorPlan(const v1::Job& job, const PrecisionPlan& before,
                              const PrecisionPlan& after) = 0;
  virtual void OnJobOver(const std::string& job_uid) = 0;

  // An operator's word about the policy itself. release: the sites are the policy's again.
  virtual void SetEnabled(const v1::Job& job, bool enabled) = 0;
  virtual bool Enabled(const v1::Job& job) = 0;
  virtual void SetOperatorSites(const v1::Job& job, const std::vector<OpSite>& sites,
                                bool release) = 0;

  // Read-only. `policy`: null for the job's own settings; `stored`: what the store and the batch
  // have of its telemetry; `plan_of`: the job's plan of a version. FAILED_PRECONDITION: nothing is
  // kept.
  using PlanOf = std::function<absl::StatusOr<PrecisionPlan>(std::int64_t version)>;
  virtual absl::StatusOr<PolicyReplay> Replay(const v1::Job& job, const v1::PolicySpec* policy,
                                              const std::vector<StoredTelemetry>& stored,
                                              const PlanOf& plan_of) = 0;
  virtual absl::StatusOr<PolicyHealth> Health(const v1::Job& job, const PrecisionPlan& newest) = 0;
};

}  // namespace octavo
