// Order in which quantised tensors are cast in one forward and backward, as one number, so that
// ranks can agree on the first non-finite one by a minimum. Pure.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/stats.h"
#include "worker/model/transformer.h"

namespace octavo {

std::int64_t ExecutionPosition(const OpSite& site, Tensor tensor, std::int32_t layers);
NonfiniteSite DecodeExecution(std::int64_t position, std::int32_t layers);
// Smallest position of a site with non-finite elements, or kNoNonfinite.
std::int64_t FirstNonfinite(const std::vector<TensorSite>& sites,
                            const std::vector<StatSlot>& stats, std::int32_t layers);

}  // namespace octavo
