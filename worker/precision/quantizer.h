// One activation, gradient or weight matrix cast by its recipe: which scale, which kernel.
#pragma once

#include <cstdint>

#include "kernels/ops.h"
#include "proto/precision/recipe.h"
#include "worker/precision/tensor_state.h"

namespace octavo {

struct QuantizeRequest {
  const Recipe& recipe;
  QuantizeRule rule;
  const void* x;  // [P, cols]
  DType x_dtype;
  std::int64_t cols;
  RowGroups groups;
  std::int32_t state_index;  // of group 0's site, for delayed scaling
  QTensor row, col;          // either may be absent
  StatSlot* stats;           // [groups] or null
};

// Per-tensor kinds: Q from the delayed window, or from the amax of x (current scaling, priming) by
// group; others: by tile.
void QuantizeInto(const Backend& backend, TensorStates& states, const QuantizeRequest& request);

}  // namespace octavo
