// `precision.recipe: auto`: chooses a recipe per (layer, op) from shadow evidence (NUMERICS 11).
//
// While all layers run in BF16 the ranks measure every candidate as a shadow. A candidate passes at a
// site when each of its tensors, summed over all snapshots since the last choice, stays within the
// policy's thresholds, and the device can run it. The first passing candidate in the job's order wins
// (order is the user's preference for speed); none passing means BF16.
#pragma once

#include <string>
#include <vector>

#include "proto/precision/health.h"
#include "proto/precision/plan.h"

namespace octavo {

struct PolicyState;

struct Choice {
  OpSite site;
  Recipe recipe;
  double sqnr_db = 0, sqnr_limit_db = 0;  // worst tensor of the chosen recipe
  std::string reason;                     // what passed and what failed, with numbers
};

// Adds the snapshot's shadow tensors to state.evidence.
void GatherEvidence(PolicyState& state, const HealthSnapshot& snapshot);

// Sites whose recipe should change now. Sites in fallback, pinned, protected or the operator's are
// left alone; sites without evidence too.
std::vector<Choice> ChooseRecipes(const PolicyConfig& config, const PolicyState& state,
                                  const PrecisionPlan& plan);

}  // namespace octavo
