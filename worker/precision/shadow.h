// Shadow statistics: what a recipe would do to a tensor that runs in another one (NUMERICS 9, 11).
//
// The plan names recipes per (layer, op); in steps that sample SQNR every tensor of such a site is
// also cast by them, into scratch, for the numbers alone. Evidence for the policy: a layer held in
// BF16 comes back, and `auto` chooses, by these.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/arena.h"
#include "kernels/ops.h"
#include "kernels/stats.h"
#include "proto/precision/plan.h"
#include "worker/precision/tensor_state.h"

namespace octavo {

// Recipes measured per site at once; more are ignored, the first ones win.
inline constexpr int kShadowRecipesMax = 4;

// One tensor under one recipe, the rank's experts merged.
struct ShadowResult {
  OpSite site;
  Tensor tensor = Tensor::kInput;
  Recipe recipe;
  StatSlot stats;
  SqnrSlot energy;
};

// Not thread-safe.
class ShadowStates {
 public:
  ShadowStates(const Backend& backend, const TensorStates& states, std::int32_t local_experts,
               Arena& device, Arena& pinned);

  // Which sites and recipes to measure from now on (plan.shadows, every one valid for its site).
  // Results of earlier plans are dropped.
  void SetPlan(const PrecisionPlan& plan, const TensorStates& states);
  bool empty() const { return entries_.empty(); }

  struct Entry {
    OpSite site;
    Tensor tensor;
    Recipe recipe;  // as the plan names it
    Recipe cast;    // delayed scaling is measured with current scaling: it has no window here
    std::int32_t groups;
    StatSlot* slots;   // [groups] device
    SqnrSlot* energy;  // device
  };
  // Entries of a tensor; empty when nothing is to be measured.
  std::span<const Entry> Find(const OpSite& site, Tensor tensor) const;

  void Reset();
  void Fetch();    // enqueues the copies to the host
  void Publish();  // after synchronize
  const std::vector<ShadowResult>& results() const { return results_; }

 private:
  struct Range {
    std::int32_t first = 0, count = 0;
  };
  std::size_t KeyOf(const OpSite& site, Tensor tensor) const;

  const Backend backend_;
  const std::int32_t slots_per_entry_;
  std::int64_t capacity_ = 0;  // entries
  std::vector<Entry> entries_;
  std::vector<Range> ranges_;  // [layer, op, tensor]
  std::vector<ShadowResult> results_;
  StatSlot* device_slots_ = nullptr;
  SqnrSlot* device_energies_ = nullptr;
  StatSlot* pinned_slots_ = nullptr;
  SqnrSlot* pinned_energies_ = nullptr;
};

// max of amax, sums of counts, extremes of dequant_scale.
void MergeInto(const StatSlot& from, StatSlot* into);

}  // namespace octavo
