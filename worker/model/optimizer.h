// AdamW over the parameter table: FP32 masters, decoupled decay, moments FP32 or BF16.
//
// The kernel reads the clip factor and the skip flag on the device, so a step can be enqueued
// before the host knows them. One call per parameter, because decay differs.
#pragma once

#include <cstdint>

#include "kernels/arena.h"
#include "kernels/ops.h"
#include "worker/model/parameters.h"

namespace octavo {

struct OptimizerOptions {
  float beta1 = 0.9f, beta2 = 0.95f, eps = 1e-8f;
  float weight_decay = 0.1f;
  DType moment_dtype = DType::kF32;  // kF32 or kBF16
};

// Not thread-safe. Memory of the two control words comes from the arenas (device, pinned).
class Optimizer {
 public:
  Optimizer(const Backend& backend, const OptimizerOptions& options, Arena& arena, Arena& pinned);

  // Sets the device words from the host, without waiting for the device; once a step. factor
  // multiplies every gradient (global-norm clipping: min(1, max_norm / norm)); skip: the next Apply
  // changes nothing.
  void SetControl(float factor, bool skip);

  // t: 1-based count of applied steps, this one included. Writes masters, moments and copies.
  void Apply(Parameters& parameters, double lr, std::int64_t t);

  const OptimizerOptions& options() const { return options_; }

 private:
  const Backend backend_;
  const OptimizerOptions options_;
  struct Control {
    float grad_factor;
    std::int32_t skip;
  };
  Control* control_;       // on the device
  Control* host_control_;  // two steps, in turn
  int half_ = 0;
};

// min(1, max_norm/norm); 1 when max_norm is 0 (clipping off).
float ClipFactor(double grad_norm_squared, double max_norm);

}  // namespace octavo
