// What ranks report about the training itself: steps, telemetry, the recipes in force.
#pragma once

#include <string>

#include "controller/core/state.h"

namespace octavo {

// Job-wide values of one step. REQUIRES: the job has a current attempt and the report carries it.
void OnStepReport(CoreState& state, JobRecord& job, const internal::v1::StepReport& report,
                  Now now);

// Statistics of one worker's ranks over an interval; feeds the policy.
void OnTelemetry(CoreState& state, JobRecord& job, const std::string& worker,
                 const internal::v1::TelemetrySnapshot& snapshot, Now now);

// The metric of what ranks run: only the ops that the model's layers have.
RecipesInForce RecipesMetric(const v1::JobSpec& spec, const v1::EffectivePrecision& effective);

// "fp8_flow 4/6 layers, bf16 2/6": the recipe of each layer's expert (or dense) products.
std::string RecipeSummary(const v1::EffectivePrecision& effective, std::int32_t layers);

}  // namespace octavo
