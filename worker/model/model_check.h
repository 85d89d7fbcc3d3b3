// What a configuration and a plan must satisfy before any memory is taken: one sentence with the
// dimension, the value and the valid ones.
#pragma once

#include "absl/status/status.h"
#include "kernels/ops.h"
#include "proto/precision/plan.h"
#include "worker/model/config.h"

namespace octavo {

absl::Status CheckModel(const ModelConfig& model, const RunConfig& run);

// Parameters of every recipe, dimensions of every product, abilities of the backend, emulation.
absl::Status CheckPlan(const PrecisionPlan& plan, const ModelConfig& model, const RunConfig& run,
                       const Backend& backend);

// One recipe at one place.
absl::Status CheckSite(const Recipe& recipe, const OpSite& site, const ModelConfig& model,
                       const RunConfig& run, const Backend& backend);

// The plan without shadow recipes that could not run at their site: they are wishes for numbers,
// and a number that cannot be had is no reason to refuse a plan.
PrecisionPlan WithValidShadows(PrecisionPlan plan, const ModelConfig& model, const RunConfig& run,
                               const Backend& backend);

}  // namespace octavo
