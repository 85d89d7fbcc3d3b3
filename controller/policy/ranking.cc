#include "controller/policy/ranking.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>
#include <tuple>

namespace octavo {
namespace {

constexpr double kNonfiniteSeverity = 1e6;
// Fewer values than this have no meaningful median.
constexpr std::size_t kMedianMinimum = 3;

template <typename... Arguments>
std::string Print(const char* format, Arguments... arguments) {
  char text[256];
  std::snprintf(text, sizeof(text), format, arguments...);
  return text;
}

double Median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

// Keeps the worst of the candidates.
void Offer(RankedTensor& ranked, Signal signal, double value, double threshold, double severity,
           std::int32_t expert, std::string reason) {
  if (severity > ranked.severity || ranked.reason.empty()) {
    ranked.signal = signal;
    ranked.value = value;
    ranked.threshold = threshold;
    ranked.severity = severity;
    ranked.expert = expert;
    ranked.reason = std::move(reason);
  }
}

void OfferRatio(RankedTensor& ranked, Signal signal, ExpertRatio ratio, const char* what,
                double threshold) {
  const TensorHealth& t = ranked.tensor;
  std::uint64_t count = t.saturated, total = t.elements;
  if (ratio != ExpertRatio::kSaturated) {
    count = ratio == ExpertRatio::kFlushed ? t.flushed : t.transpose_flushed;
    total = t.nonzero;
  }
  double value = total == 0 ? 0 : static_cast<double>(count) / static_cast<double>(total);
  std::int32_t expert = -1;
  for (const WorstExpert& worst : t.worst) {
    const double of_expert =
        worst.total == 0 ? 0 : static_cast<double>(worst.count) / static_cast<double>(worst.total);
    if (worst.ratio == ratio && of_expert > value) {
      value = of_expert;
      expert = worst.expert;
    }
  }
  const double limit = std::max(threshold, 1e-12);
  std::string reason =
      Print("%.3g %% of its %s (limit %.3g %%)", 100 * value, what, 100 * threshold);
  if (expert >= 0) {
    reason = Print("expert %d: ", static_cast<int>(expert)) + reason;
  }
  Offer(ranked, signal, value, threshold, value / limit, expert, std::move(reason));
}

using TensorId = std::tuple<OpSite, Tensor, bool, RecipeKind>;
TensorId IdOf(const TensorHealth& t) { return {t.site, t.tensor, t.shadow, t.shadow_recipe}; }

}  // namespace

void JoinHealth(const HealthSnapshot& from, HealthSnapshot* into) {
  into->first_step =
      into->first_step == 0 ? from.first_step : std::min(into->first_step, from.first_step);
  into->last_step = std::max(into->last_step, from.last_step);
  into->plan_version = std::max(into->plan_version, from.plan_version);
  std::map<TensorId, std::size_t> known;
  for (std::size_t i = 0; i < into->tensors.size(); ++i) {
    known.emplace(IdOf(into->tensors[i]), i);
  }
  for (const TensorHealth& tensor : from.tensors) {
    const auto [at, fresh] = known.emplace(IdOf(tensor), into->tensors.size());
    if (fresh) {
      into->tensors.push_back(tensor);
      continue;
    }
    TensorHealth& sum = into->tensors[at->second];
    sum.amax = std::max(sum.amax, tensor.amax);
    if (tensor.dequant_scale_max > 0) {  // 0, 0: no group had a scale
      sum.dequant_scale_min = sum.dequant_scale_max > 0
                                  ? std::min(sum.dequant_scale_min, tensor.dequant_scale_min)
                                  : tensor.dequant_scale_min;
      sum.dequant_scale_max = std::max(sum.dequant_scale_max, tensor.dequant_scale_max);
    }
    sum.e5m2 = tensor.e5m2;
    sum.elements += tensor.elements;
    sum.nonfinite += tensor.nonfinite;
    sum.saturated += tensor.saturated;
    sum.nonzero += tensor.nonzero;
    sum.flushed += tensor.flushed;
    sum.transpose_flushed += tensor.transpose_flushed;
    sum.signal_energy += tensor.signal_energy;
    sum.noise_energy += tensor.noise_energy;
    // An expert lives on one rank of each data-parallel group: the same id may come more than once.
    for (const WorstExpert& expert : tensor.worst) {
      const auto same =
          std::find_if(sum.worst.begin(), sum.worst.end(), [&expert](const WorstExpert& other) {
            return other.expert == expert.expert && other.ratio == expert.ratio;
          });
      if (same == sum.worst.end()) {
        sum.worst.push_back(expert);
      } else {
        same->count += expert.count;
        same->total += expert.total;
      }
    }
  }
}

std::vector<RankedTensor> RankTensors(const PolicyConfig& config, const PrecisionPlan& plan,
                                      std::span<const HealthSnapshot> recent) {
  HealthSnapshot sum;
  std::map<TensorId, std::vector<double>> amaxes;  // oldest first
  // Of one format: E5M2 scales are 128 times smaller.
  const auto peers_of = [](const TensorHealth& t) {
    return std::tuple(t.site.op, t.tensor, t.shadow, t.shadow_recipe, t.e5m2);
  };
  std::map<std::tuple<Op, Tensor, bool, RecipeKind, bool>, std::vector<double>> scales;
  for (const HealthSnapshot& snapshot : recent) {
    JoinHealth(snapshot, &sum);
    for (const TensorHealth& t : snapshot.tensors) {
      amaxes[IdOf(t)].push_back(t.amax);
    }
  }
  for (const TensorHealth& t : sum.tensors) {
    if (t.dequant_scale_max > 0) {
      scales[peers_of(t)].push_back(t.dequant_scale_max);
    }
  }

  std::vector<RankedTensor> ranking;
  for (const TensorHealth& t : sum.tensors) {
    if (t.site.layer < 0 || t.site.layer >= plan.layers) {
      continue;
    }
    RankedTensor ranked{.tensor = t};
    const Recipe& planned = plan.Resolve(t.site.layer, t.site.op);
    ranked.recipe = t.shadow ? t.shadow_recipe : planned.kind;
    if (t.nonfinite > 0) {
      Offer(ranked, Signal::kNonfinite, static_cast<double>(t.nonfinite), 0, kNonfiniteSeverity, -1,
            Print("%llu non-finite elements", static_cast<unsigned long long>(t.nonfinite)));
    }
    if (t.signal_energy > 0) {
      const double db = SqnrDb(t), limit = t.e5m2 ? config.sqnr_e5m2_db : config.sqnr_e4m3_db;
      Offer(ranked, Signal::kSqnr, db, limit, std::pow(10.0, (limit - db) / 10), -1,
            Print("SQNR %.1f dB (limit %.1f dB)", db, limit));
    }
    if (ranked.recipe == RecipeKind::kFp8Delayed) {
      OfferRatio(ranked, Signal::kSaturated, ExpertRatio::kSaturated,
                 "elements saturate: their scale is too small", config.saturated_ratio);
    }
    OfferRatio(ranked, Signal::kFlushed, ExpertRatio::kFlushed, "non-zero elements become zero",
               t.tensor == Tensor::kGrad ? config.flushed_ratio_grad : config.flushed_ratio);
    if (ranked.recipe == RecipeKind::kFp8Flow) {
      OfferRatio(ranked, Signal::kTransposeFlushed, ExpertRatio::kTransposeFlushed,
                 "non-zero elements become zero in the transpose", config.transpose_flushed_ratio);
    }
    std::vector<double> past = amaxes[IdOf(t)];
    if (past.size() > kMedianMinimum && past.back() > 0) {
      const double newest = past.back();
      past.pop_back();
      const double median = Median(std::move(past));
      const double jump = median > 0 ? newest / median : 1;
      Offer(ranked, Signal::kAmaxJump, jump, config.amax_jump,
            std::max(jump, 1 / jump) / config.amax_jump, -1,
            Print("amax %.3g is %.3g times its recent median (limit %.3g times up or down)", newest,
                  jump, config.amax_jump));
    }
    const std::vector<double>& peers = scales[peers_of(t)];
    if (peers.size() >= kMedianMinimum && t.dequant_scale_max > 0) {
      const double ratio = t.dequant_scale_max / Median(peers);
      Offer(ranked, Signal::kDequantScaleOutlier, ratio, config.dequant_scale_ratio,
            ratio / config.dequant_scale_ratio, -1,
            Print("its dequant_scale is %.3g times the median of this op over layers (limit %.3g)",
                  ratio, config.dequant_scale_ratio));
    }
    ranking.push_back(std::move(ranked));
  }
  std::stable_sort(
      ranking.begin(), ranking.end(), [](const RankedTensor& a, const RankedTensor& b) {
        return a.severity != b.severity ? a.severity > b.severity : IdOf(a.tensor) < IdOf(b.tensor);
      });
  return ranking;
}

}  // namespace octavo
