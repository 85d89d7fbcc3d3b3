// The precision policy of controller/policy, one state per live job, behind the core's hook.
//
//   snapshots of w workers ─► joined per interval ─► PolicyOnSnapshot ─► plan n+1, or nothing
//
// The policy's state is not stored: after a restart of the controller it is rebuilt from the plan
// history (who fell, how often, who is the operator's), and its windows fill again within the grace
// that follows any start. Not thread-safe: the core's thread.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "controller/core/policy_hook.h"
#include "controller/policy/fallback.h"
#include "proto/precision/health.h"

namespace octavo {

// Adds `from` to `into`: maxima of amax, sums of counts and energies, per (site, tensor, shadow).
void JoinHealth(const HealthSnapshot& from, HealthSnapshot* into);

class PolicyDriver final : public PolicyHook {
 public:
  void Restore(const v1::Job& job, const std::vector<PrecisionPlan>& history) override;
  void OnAttempt(const v1::Job& job, const DeviceAbility& device, std::int64_t step) override;
  void OnPlanApplied(const v1::Job& job, std::int64_t version, std::int64_t step) override;
  PolicyAnswer OnStep(const v1::Job& job, const PrecisionPlan& newest,
                      const internal::v1::StepReport& report) override;
  PolicyAnswer OnSnapshot(const v1::Job& job, const PrecisionPlan& newest,
                          const internal::v1::TelemetrySnapshot& snapshot) override;
  void OnOperatorPlan(const v1::Job& job, const PrecisionPlan& before,
                      const PrecisionPlan& after) override;
  void OnJobOver(const std::string& job_uid) override { jobs_.erase(job_uid); }

 private:
  struct JobPolicy {
    PolicyConfig config;
    PolicyState state;
    HealthSnapshot joined;  // of the interval that is being collected
    std::int32_t joined_ranks = 0;
  };
  JobPolicy& Of(const v1::Job& job);
  PolicyAnswer Judge(const v1::Job& job, JobPolicy& policy, const PrecisionPlan& newest);
  static PolicyAnswer ToAnswer(const v1::Job& job, PolicyOutput output);

  std::map<std::string, JobPolicy> jobs_;  // by uid
};

}  // namespace octavo
