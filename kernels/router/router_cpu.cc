// Router (NUMERICS 8): logits → scores → selection → routing weights, and the way back.
//
//   scores     softmax over all experts, or sigmoid; kTopKSoftmax takes its weights from a softmax
//              over the chosen logits, its scores (statistics, auxiliary loss) over all experts
//   selection  v = logit for the softmax kinds with neither groups nor bias, else score + bias;
//              order: larger first, ties to the lower index, NaN below −∞
//   groups     group score = sum of its two best v; experts of groups not chosen get v = −∞
//   weights    unbiased scores of the chosen, / (their sum + 1e-20) when normalize_topk,
//              × routed_scaling_factor; kTopKSoftmax is normalised by construction
//
// A token with any non-finite logit gets NaN for all its k weights, also where arithmetic alone
// would have hidden it (−∞ under softmax); its selection is what the order above says. Outputs are
// overwritten, never added to. With tokens == 0 one segment of zeros is written.
#include <algorithm>
#include <cmath>
#include <limits>

#include "base/check.h"
#include "kernels/cpu/ops_cpu.h"
#include "kernels/cpu/rows.h"

namespace octavo::cpu {
namespace {

constexpr std::int32_t kExpertsMax = 1024;  // rows of scores live on the stack
constexpr std::int32_t kTopKMax = 64;
constexpr float kNormaliserFloor = 1e-20f;  // NUMERICS 8
constexpr float kInfinity = std::numeric_limits<float>::infinity();

void CheckConfig(const RouterConfig& c) {
  OCTAVO_CHECK(c.experts > 0 && c.experts <= kExpertsMax, "experts = %d must be in 1..%d",
               c.experts, kExpertsMax);
  OCTAVO_CHECK(c.experts_per_token > 0 && c.experts_per_token <= std::min(c.experts, kTopKMax),
               "experts_per_token = %d must be in 1..%d", c.experts_per_token,
               std::min(c.experts, kTopKMax));
  OCTAVO_CHECK(c.n_group > 0 && c.experts % c.n_group == 0, "n_group = %d must divide experts = %d",
               c.n_group, c.experts);
  OCTAVO_CHECK(c.topk_group > 0 && c.topk_group <= c.n_group, "topk_group = %d must be in 1..%d",
               c.topk_group, c.n_group);
  OCTAVO_CHECK(c.experts / c.n_group * c.topk_group >= c.experts_per_token,
               "%d groups of %d experts cannot give %d experts per token", c.topk_group,
               c.experts / c.n_group, c.experts_per_token);
}

std::int64_t SegmentLength(std::int64_t tokens, std::int64_t tokens_per_segment) {
  OCTAVO_CHECK(tokens == 0 || tokens_per_segment > 0, "tokens_per_segment = %lld",
               static_cast<long long>(tokens_per_segment));
  return std::max<std::int64_t>(tokens_per_segment, 1);
}

// The order of selection: NaN is below everything, equal values do not displace each other.
bool Better(float a, float b) { return a > b || (b != b && a == a); }

// Indices of the k best of v [n], best first, ties to the lower index.
void SelectTop(const float* v, std::int32_t n, std::int32_t k, std::int32_t* index) {
  std::int32_t held = 0;
  for (std::int32_t e = 0; e < n; ++e) {
    if (held == k && !Better(v[e], v[index[k - 1]])) {
      continue;
    }
    std::int32_t at = held < k ? held++ : k - 1;
    while (at > 0 && Better(v[e], v[index[at - 1]])) {
      index[at] = index[at - 1];
      --at;
    }
    index[at] = e;
  }
}

// Sets v of every expert outside the topk_group best groups to −∞.
void LimitToGroups(const RouterConfig& c, float* v) {
  const std::int32_t size = c.experts / c.n_group;
  float group_score[kExpertsMax];
  std::int32_t chosen[kExpertsMax];
  for (std::int32_t g = 0; g < c.n_group; ++g) {
    std::int32_t best[2];
    const std::int32_t count = std::min(size, 2);
    const float* members = v + g * size;
    SelectTop(members, size, count, best);
    group_score[g] = count == 1 ? members[best[0]] : members[best[0]] + members[best[1]];
  }
  SelectTop(group_score, c.n_group, c.topk_group, chosen);
  std::sort(chosen, chosen + c.topk_group);
  std::int32_t next = 0;  // the next chosen group, in index order
  for (std::int32_t g = 0; g < c.n_group; ++g) {
    if (next < c.topk_group && chosen[next] == g) {
      ++next;
    } else {
      std::fill_n(v + g * size, size, -kInfinity);
    }
  }
}

// softmax [n] of logits [n]; returns log Σ exp. One +∞ or NaN makes all of it NaN.
float Softmax(const float* logits, std::int32_t n, float* softmax) {
  const float max = RowMax(logits, n);
  Lanes lanes;
  ExpRow(logits, n, 1.0f, max, softmax, &lanes);
  const float sum = lanes.Total();
  ScaleRow(softmax, n, 1.0f / sum, softmax);
  return max + static_cast<float>(std::log(static_cast<double>(sum)));
}

OCTAVO_MULTIVERSION void SigmoidRow(const float* x, std::int64_t n, float* y) {
  for (std::int64_t i = 0; i < n; ++i) {
    y[i] = SigmoidF32(x[i]);
  }
}

bool AllFinite(const float* x, std::int32_t n) {
  for (std::int32_t i = 0; i < n; ++i) {
    if (!(std::fabs(x[i]) < kInfinity)) {
      return false;
    }
  }
  return true;
}

// Weights of the chosen before routed_scaling_factor: [k].
void ChosenWeights(const RouterConfig& c, const float* logits, const float* score,
                   const std::int32_t* index, float* weight) {
  const std::int32_t k = c.experts_per_token;
  if (c.score == RouterScore::kTopKSoftmax) {
    float chosen[kTopKMax];
    for (std::int32_t j = 0; j < k; ++j) {
      chosen[j] = logits[index[j]];
    }
    Softmax(chosen, k, weight);
    return;
  }
  float sum = 0;
  for (std::int32_t j = 0; j < k; ++j) {
    weight[j] = score[index[j]];
    sum += weight[j];
  }
  if (c.normalize_topk) {
    for (std::int32_t j = 0; j < k; ++j) {
      weight[j] = weight[j] / (sum + kNormaliserFloor);
    }
  }
}

// Adds to d_score the gradient of the chosen weights w.r.t. unbiased scores.
void ChosenWeightsBackward(const RouterConfig& c, const float* score, const std::int32_t* index,
                           const float* d_weight, float* d_score) {
  const std::int32_t k = c.experts_per_token;
  float sum = 0;
  for (std::int32_t j = 0; j < k; ++j) {
    sum += score[index[j]];
  }
  const float normaliser = sum + kNormaliserFloor;
  float mean = 0;  // Σ d_weight·weight
  for (std::int32_t j = 0; j < k && c.normalize_topk; ++j) {
    mean += d_weight[j] * c.routed_scaling_factor * (score[index[j]] / normaliser);
  }
  for (std::int32_t j = 0; j < k; ++j) {
    const float d = d_weight[j] * c.routed_scaling_factor;
    d_score[index[j]] += c.normalize_topk ? (d - mean) / normaliser : d;
  }
}

// dlogits += J^T d for y = softmax: y·(d − Σ d·y).
void SoftmaxBackward(const float* softmax, const float* d, std::int32_t n, float* dlogits) {
  Lanes lanes;
  AddDot(softmax, d, n, &lanes);
  const float mean = lanes.Total();
  for (std::int32_t i = 0; i < n; ++i) {
    dlogits[i] += softmax[i] * (d[i] - mean);
  }
}

}  // namespace

void RouterForward(OpsContext*, const RouterForwardArgs& a) {
  const RouterConfig& c = a.config;
  CheckConfig(c);
  const std::int32_t experts = c.experts;
  const std::int32_t k = c.experts_per_token;
  const std::int64_t length = SegmentLength(a.tokens, a.tokens_per_segment);
  const bool select_by_logit =
      c.score != RouterScore::kSigmoid && c.n_group == 1 && a.bias == nullptr;
  float score[kExpertsMax];
  float value[kExpertsMax];
  double segment_sum[kExpertsMax] = {};
  double z = 0;
  std::int64_t segment = 0;
  std::fill_n(a.counts, experts, std::int64_t{0});
  std::fill_n(a.score_sum, experts, 0.0f);
  for (std::int64_t t = 0; t < a.tokens; ++t) {
    const float* logits = a.logits + t * experts;
    if (t > 0 && t % length == 0) {
      ++segment;
      std::fill_n(a.counts + segment * experts, experts, std::int64_t{0});
      std::fill_n(segment_sum, experts, 0.0);
    }
    a.logsumexp[t] = Softmax(logits, experts, score);
    z += static_cast<double>(a.logsumexp[t]) * static_cast<double>(a.logsumexp[t]);
    if (c.score == RouterScore::kSigmoid) {
      SigmoidRow(logits, experts, score);
    }
    const float* order = logits;
    if (!select_by_logit) {
      for (std::int32_t e = 0; e < experts; ++e) {
        value[e] = score[e] + (a.bias == nullptr ? 0.0f : a.bias[e]);
      }
      if (c.n_group > 1) {
        LimitToGroups(c, value);
      }
      order = value;
    }
    std::int32_t* index = a.topk_index + t * k;
    float* weight = a.topk_weight + t * k;
    SelectTop(order, experts, k, index);
    ChosenWeights(c, logits, score, index, weight);
    const bool finite = AllFinite(logits, experts);
    for (std::int32_t j = 0; j < k; ++j) {
      weight[j] =
          finite ? weight[j] * c.routed_scaling_factor : std::numeric_limits<float>::quiet_NaN();
      ++a.counts[segment * experts + index[j]];
    }
    for (std::int32_t e = 0; e < experts; ++e) {
      segment_sum[e] += static_cast<double>(score[e]);
    }
    if ((t + 1) % length == 0 || t + 1 == a.tokens) {
      for (std::int32_t e = 0; e < experts; ++e) {
        a.score_sum[segment * experts + e] = static_cast<float>(segment_sum[e]);
      }
    }
  }
  a.z_sum[0] = z;
}

void RouterBackward(OpsContext*, const RouterBackwardArgs& a) {
  const RouterConfig& c = a.config;
  CheckConfig(c);
  const std::int32_t experts = c.experts;
  const std::int32_t k = c.experts_per_token;
  const std::int64_t length = SegmentLength(a.tokens, a.tokens_per_segment);
  float softmax[kExpertsMax];
  float score[kExpertsMax];
  float d_score[kExpertsMax];
  for (std::int64_t t = 0; t < a.tokens; ++t) {
    const float* logits = a.logits + t * experts;
    const std::int32_t* index = a.topk_index + t * k;
    const float* d_weight = a.dtopk_weight + t * k;
    float* dlogits = a.dlogits + t * experts;
    Softmax(logits, experts, softmax);
    std::fill_n(dlogits, experts, 0.0f);
    if (a.aux_coeff == nullptr) {
      std::fill_n(d_score, experts, 0.0f);
    } else {
      std::copy_n(a.aux_coeff + t / length * experts, experts, d_score);
    }
    switch (c.score) {
      case RouterScore::kSoftmax:
        ChosenWeightsBackward(c, softmax, index, d_weight, d_score);
        SoftmaxBackward(softmax, d_score, experts, dlogits);
        break;
      case RouterScore::kTopKSoftmax: {
        float weight[kTopKMax];
        float d_chosen[kTopKMax];
        float dlogits_chosen[kTopKMax] = {};
        ChosenWeights(c, logits, softmax, index, weight);
        ScaleRow(d_weight, k, c.routed_scaling_factor, d_chosen);
        SoftmaxBackward(weight, d_chosen, k, dlogits_chosen);
        for (std::int32_t j = 0; j < k; ++j) {
          dlogits[index[j]] += dlogits_chosen[j];
        }
        SoftmaxBackward(softmax, d_score, experts, dlogits);  // the auxiliary loss
        break;
      }
      case RouterScore::kSigmoid:
        SigmoidRow(logits, experts, score);
        ChosenWeightsBackward(c, score, index, d_weight, d_score);
        for (std::int32_t e = 0; e < experts; ++e) {
          dlogits[e] += d_score[e] * (score[e] * (1.0f - score[e]));
        }
        break;
    }
    if (a.z_coeff != 0.0f) {
      const float z = a.z_coeff * 2.0f * a.logsumexp[t];
      for (std::int32_t e = 0; e < experts; ++e) {
        dlogits[e] += z * softmax[e];
      }
    }
  }
}

void RouterBiasUpdate(OpsContext*, const RouterBiasUpdateArgs& a) {
  std::int64_t total = 0;
  for (std::int32_t e = 0; e < a.experts; ++e) {
    total += a.counts[e];
  }
  for (std::int32_t e = 0; e < a.experts; ++e) {
    const std::int64_t lack = total - a.experts * a.counts[e];
    a.bias[e] += lack > 0 ? a.rate : (lack < 0 ? -a.rate : 0.0f);
  }
}

}  // namespace octavo::cpu
