#include "worker/precision/delayed_scaling.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "kernels/formats/scale.h"

namespace octavo {

void DelayedScaling::Configure(const Recipe& recipe, bool e5m2) {
  history_len_ = recipe.history_len;
  algorithm_ = recipe.amax_algo;
  margin_ = recipe.margin;
  min_dequant_scale_ = recipe.min_dequant_scale;
  e5m2_ = e5m2;
  const std::size_t keep = static_cast<std::size_t>(history_len_);
  if (window_.size() > keep) {
    window_.erase(window_.begin(), window_.end() - static_cast<std::ptrdiff_t>(keep));
  }
  Recompute();
}

void DelayedScaling::Push(float amax, std::int32_t stale_after) {
  if (!std::isfinite(amax) || amax <= 0) {
    ++age_;
    if (age_ > stale_after) {
      Clear();
    }
    return;
  }
  if (window_.size() >= static_cast<std::size_t>(history_len_)) {
    window_.erase(window_.begin());
  }
  window_.push_back(amax);
  age_ = 0;
  Recompute();
}

void DelayedScaling::Clear() {
  window_.clear();
  quant_scale_ = 1.0f;
  age_ = 0;
}

void DelayedScaling::Recompute() {
  if (window_.empty()) {
    return;
  }
  const float amax = algorithm_ == AmaxAlgorithm::kMax
                         ? *std::max_element(window_.begin(), window_.end())
                         : window_.back();
  quant_scale_ = QuantScaleFromAmax(amax, e5m2_ ? 57344.0f : 448.0f, false, margin_);
  if (min_dequant_scale_ > 0) {
    quant_scale_ = std::min(quant_scale_, 1.0f / min_dequant_scale_);
  }
}

std::vector<float> DelayedScaling::Export() const {
  std::vector<float> values = {quant_scale_, static_cast<float>(age_)};
  values.insert(values.end(), window_.begin(), window_.end());
  return values;
}

bool DelayedScaling::Import(const std::vector<float>& values) {
  if (values.size() < 2) {
    return false;
  }
  const auto bad = [](float v) { return !std::isfinite(v) || v <= 0; };
  if (bad(values[0]) || !std::isfinite(values[1]) || values[1] < 0 || values[1] > 1e9f ||
      std::any_of(values.begin() + 2, values.end(), bad)) {
    return false;
  }
  const std::size_t have = values.size() - 2;
  const std::size_t keep = std::min(have, static_cast<std::size_t>(history_len_));
  window_.assign(values.end() - static_cast<std::ptrdiff_t>(keep), values.end());
  age_ = static_cast<std::int32_t>(values[1]);
  // The stored value and not a recomputed one: after a push that was not made, Q may be older than
  // the window's newest value only through parameters, and those are part of the plan.
  quant_scale_ = values[0];
  Recompute();
  return true;
}

}  // namespace octavo
