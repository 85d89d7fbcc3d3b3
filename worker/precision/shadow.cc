#include "worker/precision/shadow.h"

#include <algorithm>

namespace octavo {

void MergeInto(const StatSlot& from, StatSlot* into) {
  into->amax = std::max(into->amax, from.amax);
  if (from.dequant_scale_min > 0) {
    into->dequant_scale_min = into->dequant_scale_min > 0
                                  ? std::min(into->dequant_scale_min, from.dequant_scale_min)
                                  : from.dequant_scale_min;
    into->dequant_scale_max = std::max(into->dequant_scale_max, from.dequant_scale_max);
  }
  into->elements += from.elements;
  into->nonfinite += from.nonfinite;
  into->saturated += from.saturated;
  into->nonzero += from.nonzero;
  into->flushed += from.flushed;
  into->transpose_flushed += from.transpose_flushed;
}

ShadowStates::ShadowStates(const Backend& backend, const TensorStates& states,
                           std::int32_t local_experts, Arena& device, Arena& pinned)
    : backend_(backend), slots_per_entry_(std::max(local_experts, 1)) {
  capacity_ = static_cast<std::int64_t>(states.energy_sites().size()) * kShadowRecipesMax;
  const std::int64_t slots = capacity_ * slots_per_entry_;
  device_slots_ = device.Take<StatSlot>(slots);
  device_energies_ = device.Take<SqnrSlot>(capacity_);
  pinned_slots_ = pinned.Take<StatSlot>(slots);
  pinned_energies_ = pinned.Take<SqnrSlot>(capacity_);
}

std::size_t ShadowStates::KeyOf(const OpSite& site, Tensor tensor) const {
  return (static_cast<std::size_t>(site.layer) * kOpCount + static_cast<std::size_t>(site.op)) *
             kTensorCount +
         static_cast<std::size_t>(tensor);
}

void ShadowStates::SetPlan(const PrecisionPlan& plan, const TensorStates& states) {
  entries_.clear();
  results_.clear();
  ranges_.assign(static_cast<std::size_t>(plan.layers) * kOpCount * kTensorCount, {});
  for (const TensorSite& at : states.energy_sites()) {
    const auto found = plan.shadows.find(at.site);
    if (found == plan.shadows.end()) {
      continue;
    }
    Range& range = ranges_[KeyOf(at.site, at.tensor)];
    range.first = static_cast<std::int32_t>(entries_.size());
    for (const Recipe& recipe : found->second) {
      if (!recipe.is_fp8() || range.count == kShadowRecipesMax) {
        continue;
      }
      const auto index = static_cast<std::int64_t>(entries_.size());
      Recipe cast = recipe;
      cast.kind = recipe.is_per_tensor() ? RecipeKind::kFp8Current : recipe.kind;
      entries_.push_back({.site = at.site,
                          .tensor = at.tensor,
                          .recipe = recipe,
                          .cast = cast,
                          .groups = states.group_count(at.site),
                          .slots = device_slots_ + index * slots_per_entry_,
                          .energy = device_energies_ + index});
      ++range.count;
    }
  }
}

std::span<const ShadowStates::Entry> ShadowStates::Find(const OpSite& site, Tensor tensor) const {
  if (entries_.empty()) {
    return {};
  }
  const Range& range = ranges_[KeyOf(site, tensor)];
  return {entries_.data() + range.first, static_cast<std::size_t>(range.count)};
}

void ShadowStates::Reset() {
  const auto count = static_cast<std::int64_t>(entries_.size());
  if (count > 0) {
    backend_.ops->stats_reset(backend_.context, device_slots_, count * slots_per_entry_);
    backend_.ops->zero(backend_.context, device_energies_,
                       count * static_cast<std::int64_t>(sizeof(SqnrSlot)));
  }
}

void ShadowStates::Fetch() {
  const auto count = static_cast<std::int64_t>(entries_.size());
  const auto fetch = [this](void* dst, const void* src, std::int64_t bytes) {
    backend_.ops->copy(backend_.context,
                       {.dst = dst, .src = src, .bytes = bytes, .kind = CopyKind::kToHost});
  };
  if (count > 0) {
    fetch(pinned_slots_, device_slots_,
          count * slots_per_entry_ * static_cast<std::int64_t>(sizeof(StatSlot)));
    fetch(pinned_energies_, device_energies_, count * static_cast<std::int64_t>(sizeof(SqnrSlot)));
  }
}

void ShadowStates::Publish() {
  results_.clear();
  for (std::size_t i = 0; i < entries_.size(); ++i) {
    const Entry& entry = entries_[i];
    ShadowResult result{.site = entry.site,
                        .tensor = entry.tensor,
                        .recipe = entry.recipe,
                        .energy = pinned_energies_[i]};
    for (std::int32_t g = 0; g < entry.groups; ++g) {
      MergeInto(pinned_slots_[i * static_cast<std::size_t>(slots_per_entry_) +
                              static_cast<std::size_t>(g)],
                &result.stats);
    }
    results_.push_back(result);
  }
}

}  // namespace octavo
