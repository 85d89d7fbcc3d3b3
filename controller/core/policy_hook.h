// Where the precision policy plugs into the core: evidence in, at most one new plan out.
//
// The core calls it on its own thread with the newest plan; a returned plan becomes version n+1
// (checked like an operator's) and is sent to the ranks. Alerts become WARNING events.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "controller/core/now.h"
#include "octavo/internal/v1/telemetry.pb.h"
#include "octavo/v1/job.pb.h"
#include "proto/precision/plan.h"

namespace octavo {

struct PolicyAnswer {
  std::optional<PrecisionPlan>
      plan;  // entries, shadows and reason; version and author are the core's
  bool checkpoint_first = false;
  // One per decision, for the metrics: direction (fallback restore choose pin) and signal.
  std::vector<std::pair<std::string, std::string>> changes;
  std::vector<std::string> alerts;
};

class PolicyHook {
 public:
  virtual ~PolicyHook() = default;

  // A job known from the store: what earlier plans say about falls, returns and operators.
  virtual void Restore(const v1::Job& job, const std::vector<PrecisionPlan>& history) = 0;
  // A new attempt continues after `step` on such devices.
  virtual void OnAttempt(const v1::Job& job, const DeviceAbility& device, std::int64_t step) = 0;
  virtual void OnPlanApplied(const v1::Job& job, std::int64_t version, std::int64_t step) = 0;
  virtual PolicyAnswer OnStep(const v1::Job& job, const PrecisionPlan& newest,
                              const internal::v1::StepReport& report) = 0;
  // Of one worker's ranks; the hook joins the workers of one interval.
  virtual PolicyAnswer OnSnapshot(const v1::Job& job, const PrecisionPlan& newest,
                                  const internal::v1::TelemetrySnapshot& snapshot) = 0;
  // An operator changed the plan: these sites are his and not undone.
  virtual void OnOperatorPlan(const v1::Job& job, const PrecisionPlan& before,
                              const PrecisionPlan& after) = 0;
  virtual void OnJobOver(const std::string& job_uid) = 0;
};

}  // namespace octavo
