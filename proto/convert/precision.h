// Recipes and plans: wire (octavo.v1) ↔ value (proto/precision), both ways.
//
// The wire form of a recipe that Octavo writes is complete: every parameter that means something
// for the kind is set. What a person wrote may be sparse; empty and absent mean the kind's default.
// A plan from the wire is checked again (dense, in order, hash), whoever sent it.
#pragma once

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "octavo/v1/precision.pb.h"
#include "proto/precision/plan.h"
#include "proto/precision/recipe.h"

namespace octavo {

v1::Recipe RecipeToWire(const Recipe& recipe);
// INVALID_ARGUMENT: unknown kind or spelling (the text names field, value and what is valid).
// Ranges are ValidateRecipe's.
absl::StatusOr<Recipe> RecipeFromWire(const v1::Recipe& wire);

v1::LayerOpRecipe SiteToWire(const OpSite& site, const Recipe& recipe);

// version, layers, entries, author, reason and semantic_hash; author_name, applied_step and
// create_time belong to whoever stores the plan.
v1::PrecisionPlan PlanToWire(const PrecisionPlan& plan);
absl::StatusOr<PrecisionPlan> PlanFromWire(const v1::PrecisionPlan& wire);

// An override as of the job spec or SetPrecision. `layers` limits the range ("3" or "2-5").
absl::StatusOr<PlanOverride> OverrideFromWire(const std::string& layers_text,
                                              const std::vector<std::string>& ops,
                                              const v1::Recipe& recipe, std::int32_t layers);

// "3" → {3, 3}; "2-5" → {2, 5}; error text in the status otherwise.
absl::StatusOr<std::pair<std::int32_t, std::int32_t>> ParseLayerRange(const std::string& text,
                                                                      std::int32_t layers);

}  // namespace octavo
