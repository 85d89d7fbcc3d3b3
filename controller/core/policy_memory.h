// The policy's memory of a job, to and from the store: who fell, why, for how long, how often; which
// sites are the operator's.
#pragma once

#include <vector>

#include "controller/policy/fallback.h"
#include "octavo/internal/v1/store.pb.h"
#include "proto/precision/plan.h"

namespace octavo {

// Everything of the state but windows and evidence. Sites that cannot be read are left out.
internal::v1::StoredPolicy PolicyToStore(const PolicyState& state);
void PolicyFromStore(const internal::v1::StoredPolicy& stored, PolicyState* state);

// The same from the plan history alone (a store of an older version): original recipes, relapses and
// operators' sites; a fall counts from `step`.
void PolicyFromHistory(const std::vector<PrecisionPlan>& history, const PolicyConfig& config,
                       std::int64_t step, PolicyState* state);

std::vector<OpSite> ChangedSites(const PrecisionPlan& before, const PrecisionPlan& after);

}  // namespace octavo
