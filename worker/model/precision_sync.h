// Delayed-scaling windows across ranks and checkpoints: the reduction of amax over replicas, and
// windows as named values.
#pragma once

#include <span>
#include <vector>

#include "absl/status/status.h"
#include "proto/precision/plan.h"
#include "worker/layers/exchange.h"
#include "worker/model/transformer.h"
#include "worker/precision/tensor_state.h"

namespace octavo {

// After an applied step: amax of every delayed site, from the pass's statistics (which see every
// cast of every microbatch), reduced by maximum over the ranks that hold the tensor; a tensor with
// a non-finite element counts as +∞. Two packed reductions, none when the plan has no delayed site.
absl::Status PushAmax(TensorStates& states, const PrecisionPlan& plan, Exchange& world,
                      Exchange& expert_data, std::int32_t stale_after);

// "precision.LAYER.OP.TENSOR" or, for one expert, "precision.LAYER.OP.TENSOR.EXPERT"; primed only.
std::vector<StateTensor> ExportWindows(const TensorStates& states);
// Windows of sites that the plan does not run delayed are ignored.
absl::Status ImportWindows(std::span<const StateTensor> state, const PrecisionPlan& plan,
                           TensorStates& states);

}  // namespace octavo
