// Which quantised tensors are worst, and why: the policy's own signals as a ranking for people.
//
// Every tensor gets the signal that is nearest to its threshold, or farthest beyond. Severity 1 is
// the threshold; below 1 a tensor is healthy, and the ranking still says what would fail first.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "proto/precision/health.h"
#include "proto/precision/plan.h"

namespace octavo {

struct RankedTensor {
  TensorHealth tensor;
  RecipeKind recipe = RecipeKind::kBf16;  // executed, or measured as a shadow
  Signal signal = Signal::kSqnr;
  double value = 0, threshold = 0;
  double severity = 0;       // > 1: beyond the threshold; non-finite values come first
  std::int32_t expert = -1;  // global id, when one expert shows it
  std::string reason;        // a sentence with the numbers
};

// `recent`: snapshots of one plan version, oldest first, all ranks merged; sums are taken over them
// and the newest amax is compared with the median of the others. Worst first; ties by site.
std::vector<RankedTensor> RankTensors(const PolicyConfig& config, const PrecisionPlan& plan,
                                      std::span<const HealthSnapshot> recent);

// Adds `from` to `into`: maxima of amax, sums of counts and energies, per (site, tensor, shadow).
void JoinHealth(const HealthSnapshot& from, HealthSnapshot* into);

}  // namespace octavo
