// Where the precision policy plugs into the core: evidence in, at most one new plan out.
//
// The core calls it on its own thread, for live jobs whose spec enables the policy, with the newest
// plan; a returned plan becomes version n+1 (checked like an operator's) and is sent to the ranks.
#pragma once

#include <optional>
#include <string>

#include "controller/core/now.h"
#include "octavo/internal/v1/telemetry.pb.h"
#include "octavo/v1/job.pb.h"
#include "proto/precision/plan.h"

namespace octavo {

struct PolicyProposal {
  PrecisionPlan plan;     // entries and reason; version and author are set by the core
  std::string direction;  // fallback | restore
  std::string cause;      // name of the signal, a bounded vocabulary
  bool checkpoint_first = false;
};

class PolicyHook {
 public:
  virtual ~PolicyHook() = default;

  virtual std::optional<PolicyProposal> OnSnapshot(const v1::Job& job, const PrecisionPlan& newest,
                                                   const internal::v1::TelemetrySnapshot& snapshot,
                                                   Now now) = 0;
  virtual std::optional<PolicyProposal> OnStep(const v1::Job& job, const PrecisionPlan& newest,
                                               const internal::v1::StepReport& report, Now now) = 0;
  // A new attempt begins, or ranks switched to a plan: the grace period starts at `step`.
  virtual void OnSwitch(const v1::Job& job, std::int64_t step) = 0;
  // An operator changed the plan: these entries are his and not undone.
  virtual void OnOperatorPlan(const v1::Job& job, const PrecisionPlan& before,
                              const PrecisionPlan& after) = 0;
  virtual void OnJobOver(const std::string& job_uid) = 0;
};

}  // namespace octavo
