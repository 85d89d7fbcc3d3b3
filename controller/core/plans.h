// Precision plans as a resource with history: version 1 from the spec, later ones from operators
// and the policy; the step at which ranks applied each comes back from them.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "controller/core/state.h"
#include "octavo/v1/job_service.pb.h"
#include "proto/precision/plan.h"

namespace octavo {

// Version 1. REQUIRES: the spec is valid.
v1::PrecisionPlan PlanOfSpec(const v1::JobSpec& spec);

struct PlanEdit {
  std::string name;
  std::string request_id;
  std::string etag;  // of JobPrecision
  std::vector<v1::PrecisionOverride> overrides;
  std::int64_t rollback_to = 0;
  std::string reason;
  std::string caller;
  bool validate_only = false;
};

// Makes version n+1 and sends it to the ranks. INVALID_ARGUMENT: unknown version, bad override, a
// recipe that the op or the placed workers' hardware cannot run, or no change at all.
absl::StatusOr<v1::SetPrecisionResponse> SetPrecision(CoreState& state, const PlanEdit& edit,
                                                      Now now);

// The same for a decision of the policy; `changes`: direction and signal of each, for the metrics.
absl::Status AdoptPolicyPlan(CoreState& state, JobRecord& job, PrecisionPlan plan,
                             const std::vector<std::pair<std::string, std::string>>& changes,
                             Now now);

v1::JobPrecision RenderPrecision(const CoreState& state, const JobRecord& job);
// Changes with every version and with every accepted word of an operator about the policy.
std::string PlanEtag(const JobRecord& job);
// An operator's pins of these sites are no more (released, or another recipe was set there).
void ForgetPins(JobRecord& job, const std::vector<OpSite>& sites);
// Puts the policy's memory of the job into the store.
void SavePolicy(CoreState& state, JobRecord& job, Now now);

// PlanApplied from a rank: stores the step once, warns when ranks differ.
void OnPlanApplied(CoreState& state, JobRecord& job, std::int32_t rank,
                   const internal::v1::PlanApplied& applied, Now now);

// Appends a plan to the job's history and refreshes newest_plan and recipes. The plan is checked.
absl::Status TakePlan(JobRecord& job, const v1::PrecisionPlan& plan);

}  // namespace octavo
