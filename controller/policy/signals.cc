#include "controller/policy/signals.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <tuple>

namespace octavo {
namespace {

// Fewer snapshots than this say nothing about a median or a variation.
constexpr std::size_t kWindowMinimum = 8;
// Fewer layers than this have no meaningful median of a scale.
constexpr std::size_t kLayersMinimum = 3;

std::string Number(double v) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.4g", v);
  return text;
}

double Ratio(std::uint64_t count, std::uint64_t total) {
  return total == 0 ? 0.0 : static_cast<double>(count) / static_cast<double>(total);
}

// The larger of the tensor's ratio and its worst expert's, with that expert's id.
struct WorstRatio {
  double value = 0;
  std::int32_t expert = -1;
};
WorstRatio Worst(const TensorHealth& t, ExpertRatio ratio, std::uint64_t count,
                 std::uint64_t total) {
  WorstRatio out{Ratio(count, total), -1};
  for (const WorstExpert& e : t.worst) {
    const double r = Ratio(e.count, e.total);
    if (e.ratio == ratio && r > out.value) {
      out = {r, e.expert};
    }
  }
  return out;
}

template <typename T>
double Median(std::vector<T> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return static_cast<double>(*middle);
}

double FlushedThreshold(const PolicyConfig& config, Tensor tensor) {
  return tensor == Tensor::kGrad ? config.flushed_ratio_grad : config.flushed_ratio;
}

double SqnrThreshold(const PolicyConfig& config, const TensorHealth& t) {
  return t.e5m2 ? config.sqnr_e5m2_db : config.sqnr_e4m3_db;
}

}  // namespace

std::string DebugString(const Firing& f) {
  std::string text = "layer " + std::to_string(f.site.layer) + " " + std::string(Name(f.site.op)) +
                     " " + std::string(Name(f.tensor)) + ": " + std::string(Name(f.signal)) + " " +
                     Number(f.value);
  if (f.signal == Signal::kAmaxJump && f.value < 1) {
    text += " < " + Number(1 / f.threshold);  // the limit holds up and down
  } else {
    text += (f.signal == Signal::kSqnr ? " < " : " > ") + Number(f.threshold);
  }
  if (f.expert >= 0) {
    text += " (expert " + std::to_string(f.expert) + ")";
  }
  return text;
}

bool ShadowIsHealthy(const PolicyConfig& config, const TensorHealth& t, std::string* why) {
  const auto fail = [&](Signal signal, double value, double threshold) {
    if (why != nullptr) {
      *why = DebugString(Firing{t.site, t.tensor, signal, value, threshold, -1, false});
    }
    return false;
  };
  if (t.nonfinite > 0) {
    return fail(Signal::kNonfinite, static_cast<double>(t.nonfinite), 0);
  }
  const double saturated = Worst(t, ExpertRatio::kSaturated, t.saturated, t.elements).value;
  if (t.shadow_recipe == RecipeKind::kFp8Delayed && saturated > config.saturated_ratio) {
    return fail(Signal::kSaturated, saturated, config.saturated_ratio);
  }
  const double flushed = Worst(t, ExpertRatio::kFlushed, t.flushed, t.nonzero).value;
  if (flushed > FlushedThreshold(config, t.tensor)) {
    return fail(Signal::kFlushed, flushed, FlushedThreshold(config, t.tensor));
  }
  const double transposed =
      Worst(t, ExpertRatio::kTransposeFlushed, t.transpose_flushed, t.nonzero).value;
  if (transposed > config.transpose_flushed_ratio) {
    return fail(Signal::kTransposeFlushed, transposed, config.transpose_flushed_ratio);
  }
  if (t.sqnr_sampled() && SqnrDb(t) < SqnrThreshold(config, t)) {
    return fail(Signal::kSqnr, SqnrDb(t), SqnrThreshold(config, t));
  }
  return true;
}

std::vector<Firing> SignalWindows::Observe(const PolicyConfig& config, const PrecisionPlan& plan,
                                           const HealthSnapshot& snapshot,
                                           const std::function<bool(const OpSite&)>& settling) {
  std::vector<Firing> firings;
  for (const TensorHealth& t : snapshot.tensors) {
    if (t.shadow || t.site.layer < 0 || t.site.layer >= plan.layers) {
      continue;
    }
    const Recipe& recipe = plan.Resolve(t.site.layer, t.site.op);
    if (recipe.is_fp8()) {
      ObserveTensor(config, recipe, snapshot, t, settling && settling(t.site), &firings);
    }
  }
  ObserveDequantScales(config, plan, snapshot, &firings);
  return firings;
}

void SignalWindows::ObserveTensor(const PolicyConfig& config, const Recipe& recipe,
                                  const HealthSnapshot& snapshot, const TensorHealth& t,
                                  bool settling, std::vector<Firing>* firings) {
  TensorWindow& w = windows_[{t.site, t.tensor}];
  const bool delayed = recipe.kind == RecipeKind::kFp8Delayed;
  const auto fire = [&](Signal signal, double value, double threshold, std::int32_t expert,
                        bool acts) {
    firings->push_back({t.site, t.tensor, signal, value, threshold, expert, acts});
  };
  // Counts how many snapshots running the condition held, and fires from the needed one on.
  const auto running = [&](Signal signal, bool beyond, int needed, double value, double threshold,
                           std::int32_t expert, bool acts) {
    std::int32_t& n = w.running[static_cast<std::size_t>(signal)];
    n = beyond ? n + 1 : 0;
    if (n >= needed) {
      fire(signal, value, threshold, expert, acts);
    }
  };

  if (t.nonfinite > 0) {
    fire(Signal::kNonfinite, static_cast<double>(t.nonfinite), 0, -1, true);
  }
  if (delayed) {
    const WorstRatio r = Worst(t, ExpertRatio::kSaturated, t.saturated, t.elements);
    running(Signal::kSaturated, r.value > config.saturated_ratio, kSaturatedRunning, r.value,
            config.saturated_ratio, r.expert, true);
  }
  const WorstRatio flushed = Worst(t, ExpertRatio::kFlushed, t.flushed, t.nonzero);
  const double flushed_limit = FlushedThreshold(config, t.tensor);
  running(Signal::kFlushed, flushed.value > flushed_limit, kFlushedRunning, flushed.value,
          flushed_limit, flushed.expert, true);
  if (recipe.kind == RecipeKind::kFp8Flow && recipe.wgrad == WgradPrecision::kFp8) {
    const WorstRatio r = Worst(t, ExpertRatio::kTransposeFlushed, t.transpose_flushed, t.nonzero);
    running(Signal::kTransposeFlushed, r.value > config.transpose_flushed_ratio, kFlushedRunning,
            r.value, config.transpose_flushed_ratio, r.expert, true);
  }
  if (t.sqnr_sampled()) {
    const double db = SqnrDb(t), limit = SqnrThreshold(config, t);
    running(Signal::kSqnr, db < limit, kSqnrRunning, db, limit, -1, true);
  }

  const bool usable = t.amax > 0 && std::isfinite(t.amax);
  if (usable) {
    if (w.amax.size() >= kWindowMinimum) {
      const double median = Median(std::vector<float>(w.amax.begin(), w.amax.end()));
      const double jump = t.amax / median;
      if (jump > config.amax_jump || jump < 1 / config.amax_jump) {
        fire(Signal::kAmaxJump, jump, config.amax_jump, -1, delayed);
      }
    }
    w.amax.push_back(t.amax);
    if (w.amax.size() > static_cast<std::size_t>(kHealthWindow)) {
      w.amax.pop_front();
    }
    w.settled = settling ? 0 : std::min(w.settled + 1, w.amax.size());
    if (w.settled >= kWindowMinimum) {
      const auto begin = w.amax.end() - static_cast<std::ptrdiff_t>(w.settled);
      const double n = static_cast<double>(w.settled);
      double mean = 0, squares = 0;
      for (auto a = begin; a != w.amax.end(); ++a) {
        mean += *a;
      }
      mean /= n;
      for (auto a = begin; a != w.amax.end(); ++a) {
        squares += (*a - mean) * (*a - mean);
      }
      const double cv = std::sqrt(squares / n) / mean;
      if (cv > config.amax_variation) {
        fire(Signal::kAmaxVariation, cv, config.amax_variation, -1, delayed);
      }
    }
    w.stale_steps = 0;
  } else if (t.elements > 0 && delayed) {
    w.stale_steps += snapshot.last_step - snapshot.first_step + 1;
    if (w.stale_steps > config.stale_after) {
      fire(Signal::kStale, static_cast<double>(w.stale_steps),
           static_cast<double>(config.stale_after), -1, false);
    }
  }
}

void SignalWindows::ObserveDequantScales(const PolicyConfig& config, const PrecisionPlan& plan,
                                         const HealthSnapshot& snapshot,
                                         std::vector<Firing>* firings) {
  // Of one format: E5M2 reaches 128 times further than E4M3, so its scales are that much smaller.
  std::map<std::tuple<Op, Tensor, bool>, std::vector<const TensorHealth*>> by_op;
  for (const TensorHealth& t : snapshot.tensors) {
    if (!t.shadow && t.dequant_scale_max > 0 && t.site.layer >= 0 && t.site.layer < plan.layers &&
        plan.Resolve(t.site.layer, t.site.op).is_fp8()) {
      by_op[{t.site.op, t.tensor, t.e5m2}].push_back(&t);
    }
  }
  for (const auto& [key, tensors] : by_op) {
    if (tensors.size() < kLayersMinimum) {
      continue;
    }
    std::vector<float> maxima;
    for (const TensorHealth* t : tensors) {
      maxima.push_back(t->dequant_scale_max);
    }
    const double median = Median(maxima);
    for (const TensorHealth* t : tensors) {
      const double ratio = t->dequant_scale_max / median;
      std::int32_t& n = windows_[{t->site, t->tensor}]
                            .running[static_cast<std::size_t>(Signal::kDequantScaleOutlier)];
      n = ratio > config.dequant_scale_ratio ? n + 1 : 0;
      if (n >= kDequantScaleRunning) {
        const bool delayed =
            plan.Resolve(t->site.layer, t->site.op).kind == RecipeKind::kFp8Delayed;
        firings->push_back({t->site, t->tensor, Signal::kDequantScaleOutlier, ratio,
                            config.dequant_scale_ratio, -1, delayed});
      }
    }
  }
}

void SignalWindows::Reset(const OpSite& site) {
  for (int i = 0; i < kTensorCount; ++i) {
    windows_.erase({site, static_cast<Tensor>(i)});
  }
}

void SignalWindows::Clear() { windows_.clear(); }

std::vector<OpSite> SignalWindows::SeenFp8Sites(std::int32_t layer) const {
  std::vector<OpSite> sites;
  for (const auto& [key, window] : windows_) {
    if (key.site.layer == layer && (sites.empty() || sites.back() != key.site)) {
      sites.push_back(key.site);
    }
  }
  return sites;
}

}  // namespace octavo
