// Delayed scaling of one tensor (of one global expert): a window of past amax values gives the
// quant_scale of the next step. Pure; definition: NUMERICS 5.
#pragma once

#include <cstdint>
#include <vector>

#include "proto/precision/recipe.h"

namespace octavo {

class DelayedScaling {
 public:
  // Uses recipe.{history_len, amax_algo, margin} and the format of this tensor (E5M2 for gradients
  // of hybrid recipes). Keeps the newest values of the window and recomputes quant_scale.
  void Configure(const Recipe& recipe, bool e5m2);

  // While the window is empty the tensor must use current scaling ("priming").
  bool primed() const { return !window_.empty(); }
  float quant_scale() const { return quant_scale_; }  // REQUIRES: primed()
  std::int32_t age() const { return age_; }
  const std::vector<float>& window() const { return window_; }  // oldest first

  // End of an applied step with the amax reduced over replicas and microbatches. Finite and > 0:
  // push; else nothing is pushed, age grows, and after `stale_after` the window empties.
  void Push(float amax, std::int32_t stale_after);
  void Clear();

  // [quant_scale, age, window oldest first…]; empty windows export two values.
  std::vector<float> Export() const;
  // False when the values cannot be a state (length, non-finite or non-positive entries).
  bool Import(const std::vector<float>& values);

 private:
  void Recompute();

  std::int32_t history_len_ = 256;
  AmaxAlgorithm algorithm_ = AmaxAlgorithm::kMax;
  std::int32_t margin_ = 0;
  float min_dequant_scale_ = 0;
  bool e5m2_ = false;
  std::vector<float> window_;
  float quant_scale_ = 1.0f;
  std::int32_t age_ = 0;
};

}  // namespace octavo
