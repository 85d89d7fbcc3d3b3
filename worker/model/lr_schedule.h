// Learning rate as a pure function of the step: linear warm-up, then cosine, WSD or constant.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numbers>

namespace octavo {

enum class LrDecay : std::uint8_t { kConstant, kCosine, kWsd };

struct LrSchedule {
  LrDecay decay = LrDecay::kCosine;
  double peak = 1e-3;
  double final = 1e-4;            // value at and after the last step (cosine, WSD)
  std::int64_t warmup_steps = 0;  // step s < warmup: peak·(s+1)/warmup
  std::int64_t total_steps = 1;
  std::int64_t decay_steps = 0;  // WSD: linear from peak to final over the last decay_steps
};

// Rate of the optimizer step with 0-based index `step` (skipped steps count: data order and
// schedule advance together).
inline double LearningRate(const LrSchedule& s, std::int64_t step) {
  if (step < s.warmup_steps) {
    return s.peak * static_cast<double>(step + 1) / static_cast<double>(s.warmup_steps);
  }
  if (s.decay == LrDecay::kConstant) {
    return s.peak;
  }
  const std::int64_t begin = s.decay == LrDecay::kWsd
                                 ? std::max(s.warmup_steps, s.total_steps - s.decay_steps)
                                 : s.warmup_steps;
  // The last step (total − 1) gets `final` exactly.
  const double length = static_cast<double>(std::max<std::int64_t>(s.total_steps - 1 - begin, 1));
  const double x = std::clamp(static_cast<double>(step - begin) / length, 0.0, 1.0);
  const double left =
      s.decay == LrDecay::kWsd ? 1.0 - x : 0.5 * (1.0 + std::cos(std::numbers::pi * x));
  return s.final + (s.peak - s.final) * left;
}

}  // namespace octavo
