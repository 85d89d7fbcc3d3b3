// A weight matrix as layers see it, and what the host knows of the buffers beside its master.
//
// Two passes over memory are saved by knowing: the BF16 copy is written by the optimizer only when
// a product has read it since the step before (FP8 products read quantised copies), and the first
// weight gradient of a pass overwrites what the pass before left, so that nothing zeroes it first
// and no product reads it. All of it is bookkeeping in the order of the compute stream.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace octavo {

struct WeightState {
  std::int64_t elements = 0;
  bool copy_stale = false;  // the master changed since the BF16 copy was written
  bool copy_read = false;   // a product read the copy since the optimizer's last step
  // Experts' weights: 1 until the pass's first gradient of that expert; empty: gradients are zeroed
  // at the start of a pass and always added to.
  std::vector<std::uint8_t> unwritten;

  bool Unwritten(std::int32_t group) const {
    return !unwritten.empty() && unwritten[static_cast<std::size_t>(group)] != 0;
  }
  bool AllUnwritten(std::int32_t first, std::int32_t last) const {
    return !unwritten.empty() && std::all_of(unwritten.begin() + first, unwritten.begin() + last,
                                             [](std::uint8_t u) { return u != 0; });
  }
  void MarkWritten(std::int32_t first, std::int32_t last) {
    if (!unwritten.empty()) {
      std::fill(unwritten.begin() + first, unwritten.begin() + last, std::uint8_t{0});
    }
  }
};

// [groups, n, k] in the parameter table.
struct WeightRef {
  const float* master = nullptr;
  void* copy = nullptr;  // BF16; null under fp32
  float* grad = nullptr;
  WeightState* state = nullptr;  // null: the copy is always current, gradients are zeroed before
};

}  // namespace octavo
