// What to do with a pass that may hold non-finite values (NUMERICS 11, step retry). Pure.
//
//   first pass clean                       → apply
//   first pass non-finite, FP8 in the plan → retry in BF16: the layer of the first non-finite op,
//   or
//                                            all layers when no op is known
//   first pass non-finite, no FP8 anywhere → skip (the same arithmetic again gives the same values)
//   retried pass clean                     → apply, counted as retried
//   retried pass non-finite                → skip; max_skips_in_a_row of them → fail
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace octavo {

enum class StepAction : std::uint8_t { kApply, kRetry, kSkip, kFail };

// Outcome of a step as StepReport.outcome counts it.
enum class StepOutcome : std::uint8_t { kApplied = 0, kAppliedAfterRetry = 1, kSkipped = 2 };

struct PassVerdict {
  bool nonfinite = false;
  bool site_known = false;
  std::int32_t layer = 0;  // of the first non-finite op, when known
  bool plan_has_fp8 = false;
};

struct GuardDecision {
  StepAction action = StepAction::kApply;
  std::vector<std::int32_t> bf16_layers;  // for kRetry; empty: all
};

// Not thread-safe.
class StepGuard {
 public:
  explicit StepGuard(std::int32_t max_skips_in_a_row) : max_skips_(max_skips_in_a_row) {}

  // `retried`: this pass is the retry. The decision of the last pass of a step updates the counts.
  GuardDecision Decide(const PassVerdict& verdict, bool retried);

  std::int64_t retried_steps() const { return retried_; }
  std::int64_t skipped_steps() const { return skipped_; }
  std::int32_t skips_in_a_row() const { return in_a_row_; }
  void Restore(std::int64_t retried, std::int64_t skipped, std::int32_t in_a_row) {
    retried_ = retried;
    skipped_ = skipped;
    in_a_row_ = in_a_row;
  }

 private:
  const std::int32_t max_skips_;
  std::int64_t retried_ = 0, skipped_ = 0;
  std::int32_t in_a_row_ = 0;
};

}  // namespace octavo
