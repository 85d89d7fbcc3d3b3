// From snapshots to firings: which tensor of which (layer, op) crosses which threshold (NUMERICS
// 11).
//
// Pure values. A ratio must stay beyond its threshold in several snapshots running; amax is
// compared with the window of its own past; a dequant_scale with the same op in other layers. Each
// ratio is judged for the whole tensor and for its worst experts. Whether a firing leads to a
// change or only to an alert depends on the recipe in force and is decided here (`acts`), what the
// change is in fallback.h.
#pragma once

#include <array>
#include <deque>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "proto/precision/health.h"
#include "proto/precision/plan.h"

namespace octavo {

struct Firing {
  OpSite site;
  Tensor tensor = Tensor::kInput;
  Signal signal = Signal::kNonfinite;
  double value = 0, threshold = 0;
  std::int32_t expert = -1;  // global id when a single expert shows it
  bool acts = false;         // leads to a fallback; otherwise an alert
};
// "layer 3 fc1 input: flushed 0.12 > 0.05 (expert 17)".
std::string DebugString(const Firing& firing);

// Memory of past snapshots. A value: copyable, so that a dry run can fork it.
class SignalWindows {
 public:
  // Judges one snapshot under the plan that was in force. Shadow tensors are ignored here.
  // `settling`: whether a site is inside a grace; what it shows then counts for the median of its
  // amax, which a few values do not move, and not for its variation: the first gradients of a
  // training are many times larger than all later ones, and a decision long after the grace must
  // not rest on them.
  std::vector<Firing> Observe(const PolicyConfig& config, const PrecisionPlan& plan,
                              const HealthSnapshot& snapshot,
                              const std::function<bool(const OpSite&)>& settling = {});
  // Forgets one site (its recipe changed) or everything (start, resume).
  void Reset(const OpSite& site);
  void Clear();
  // Ops of the layer that reported an FP8 tensor at least once since Clear.
  std::vector<OpSite> SeenFp8Sites(std::int32_t layer) const;

 private:
  struct TensorWindow {
    std::deque<float> amax;   // newest last, at most kHealthWindow
    std::size_t settled = 0;  // of them, the newest that came after the grace
    std::array<std::int32_t, kSignalCount> running{};
    std::int64_t stale_steps = 0;  // steps with elements but no usable amax
  };
  struct Key {
    OpSite site;
    Tensor tensor;
    friend auto operator<=>(const Key&, const Key&) = default;
  };
  void ObserveTensor(const PolicyConfig& config, const Recipe& recipe,
                     const HealthSnapshot& snapshot, const TensorHealth& t, bool settling,
                     std::vector<Firing>* firings);
  void ObserveDequantScales(const PolicyConfig& config, const PrecisionPlan& plan,
                            const HealthSnapshot& snapshot, std::vector<Firing>* firings);

  std::map<Key, TensorWindow> windows_;
};

// Whether a shadow measurement would pass every threshold under the measured recipe; when not,
// `why` (may be null) gets the reason.
bool ShadowIsHealthy(const PolicyConfig& config, const TensorHealth& t, std::string* why);

}  // namespace octavo
