// What only several fields together can say about a job: divisibility, ranges given by other
// fields, recipes against dimensions and device.
#pragma once

#include "octavo/v1/job.pb.h"
#include "proto/spec/violation.h"

namespace octavo {

// Defaults that depend on other fields (kv_heads, head_dim, qk_norm, expert_parallel, microbatch,
// decay_steps, candidates, ladder, recipe parameters). `findings` tells what the author wrote.
void FillDerivedDefaults(v1::JobSpec* spec, const SpecFindings& findings);

// The parts of the check, each on sound fields only.
void CheckIdentity(const v1::JobSpec& spec, SpecFindings& findings);  // name, owner, labels, paths
void CheckModel(const v1::JobSpec& spec, SpecFindings& findings);
void CheckParallel(const v1::JobSpec& spec, SpecFindings& findings);   // ranks, experts, batch
void CheckTraining(const v1::JobSpec& spec, SpecFindings& findings);   // schedule, recompute, data
void CheckPrecision(const v1::JobSpec& spec, SpecFindings& findings);  // recipes, overrides, policy

}  // namespace octavo
