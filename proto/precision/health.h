// FP8 health as values: what ranks measure, which signals are read from it, and the thresholds.
// Shared by the worker (which fills snapshots) and the controller's policy (which judges them).
// Definitions and defaults: NUMERICS 9 and 11.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "proto/precision/op_id.h"
#include "proto/precision/recipe.h"

namespace octavo {

enum class Signal : std::uint8_t {
  kNonfinite,
  kSaturated,
  kFlushed,
  kTransposeFlushed,
  kSqnr,
  kAmaxJump,
  kAmaxVariation,
  kDequantScaleOutlier,
  kStale,
  kLossSpike,
};
inline constexpr int kSignalCount = 10;
std::string_view Name(Signal signal);

// The three ratios of which the worst experts travel by name.
enum class ExpertRatio : std::uint8_t { kSaturated, kFlushed, kTransposeFlushed };

struct WorstExpert {
  std::int32_t expert = 0;  // global id
  ExpertRatio ratio = ExpertRatio::kSaturated;
  std::uint64_t count = 0, total = 0;
};

// One quantised tensor over one snapshot interval, all ranks merged.
struct TensorHealth {
  OpSite site;
  Tensor tensor = Tensor::kInput;
  bool shadow = false;                              // measured beside another execution
  RecipeKind shadow_recipe = RecipeKind::kBf16;     // what was measured, when shadow
  bool e5m2 = false;
  float amax = 0, dequant_scale_min = 0, dequant_scale_max = 0;
  std::uint64_t elements = 0, nonfinite = 0, saturated = 0, nonzero = 0, flushed = 0;
  std::uint64_t transpose_flushed = 0;
  double signal_energy = 0, noise_energy = 0;       // 0, 0: not sampled
  std::vector<WorstExpert> worst;

  bool sqnr_sampled() const { return signal_energy > 0; }
};
// 10·log10(signal / noise) dB; noise 0 gives 200.
double SqnrDb(const TensorHealth& t);

struct HealthSnapshot {
  std::int64_t first_step = 0, last_step = 0;
  std::int64_t plan_version = 0;  // in force at last_step
  std::vector<TensorHealth> tensors;
};

// What a step report says that the policy needs.
struct StepHealth {
  std::int64_t step = 0;
  double loss = 0;
  bool nonfinite = false;         // the step was retried or skipped
  bool site_known = false;
  OpSite site;                    // first non-finite op, when known
  Tensor tensor = Tensor::kInput;
  std::uint64_t nonfinite_elements = 0;
};

struct PolicyConfig {
  bool enabled = true;
  double saturated_ratio = 1e-3;
  double flushed_ratio = 0.05, flushed_ratio_grad = 0.25;
  double transpose_flushed_ratio = 0.10;
  double sqnr_e4m3_db = 25, sqnr_e5m2_db = 20;
  double amax_jump = 10, amax_variation = 2.0, dequant_scale_ratio = 10;
  double loss_sigma = 6;
  std::int64_t loss_spike_hold = 200;
  std::int64_t grace_steps = 100, hold_steps = 200;
  std::int32_t healthy_snapshots = 5, max_flaps = 4;
  std::int64_t stale_after = 64;
  std::vector<Recipe> ladder;     // empty: recipe, then bf16
  // auto
  bool automatic = false;
  std::vector<Recipe> candidates;
  std::int64_t warmup_steps = 200, rerank_steps = 2000;
  std::int32_t protect = 1;
  DeviceAbility device;
  bool allow_emulation = false;
};

// Snapshots a window keeps (NUMERICS 11), and how many a signal must show in a row.
inline constexpr int kHealthWindow = 32;
inline constexpr int kSaturatedRunning = 2;
inline constexpr int kFlushedRunning = 3;
inline constexpr int kSqnrRunning = 2;
inline constexpr int kDequantScaleRunning = 3;
inline constexpr int kLossWindow = 100;

}  // namespace octavo
