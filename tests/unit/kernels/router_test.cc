#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "kernels/cpu/ops_cpu.h"
#include "kernels/ops.h"
#include "tests/unit/kernels/values.h"

namespace octavo {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

std::string Text(const RouterConfig& c) {
  return "E " + std::to_string(c.experts) + " k " + std::to_string(c.experts_per_token) +
         " score " + std::to_string(static_cast<int>(c.score)) + " normalise " +
         std::to_string(c.normalize_topk) + " groups " + std::to_string(c.n_group) + "/" +
         std::to_string(c.topk_group);
}

struct Outputs {
  std::vector<std::int32_t> index;
  std::vector<float> weight, score_sum, logsumexp;
  std::vector<std::int64_t> counts;
  double z_sum = -1;
};

Outputs Forward(const RouterConfig& c, const std::vector<float>& logits, const float* bias,
                std::int64_t tokens_per_segment) {
  const auto tokens = static_cast<std::int64_t>(logits.size()) / c.experts;
  const std::int64_t segments =
      std::max<std::int64_t>(1, CeilDiv(tokens, std::max<std::int64_t>(1, tokens_per_segment)));
  Outputs o;
  o.index.assign(static_cast<std::size_t>(tokens * c.experts_per_token), -7);
  o.weight.assign(o.index.size(), -7.0f);
  o.counts.assign(static_cast<std::size_t>(segments * c.experts), -7);
  o.score_sum.assign(o.counts.size(), -7.0f);
  o.logsumexp.assign(static_cast<std::size_t>(tokens), -7.0f);
  cpu::RouterForward(nullptr, {.config = c,
                               .tokens = tokens,
                               .tokens_per_segment = tokens_per_segment,
                               .logits = logits.data(),
                               .bias = bias,
                               .topk_index = o.index.data(),
                               .topk_weight = o.weight.data(),
                               .counts = o.counts.data(),
                               .score_sum = o.score_sum.data(),
                               .logsumexp = o.logsumexp.data(),
                               .z_sum = &o.z_sum});
  return o;
}

// ---------------------------------------------------------------- the FP64 oracle, for one token

struct Token {
  std::vector<double> softmax, score;
  double lse = 0;
};

Token Scores(const RouterConfig& c, const double* logits) {
  Token t;
  const double max = *std::max_element(logits, logits + c.experts);
  double sum = 0;
  for (int e = 0; e < c.experts; ++e) {
    t.softmax.push_back(std::exp(logits[e] - max));
    sum += t.softmax.back();
  }
  for (double& p : t.softmax) {
    p /= sum;
  }
  t.lse = max + std::log(sum);
  for (int e = 0; e < c.experts; ++e) {
    t.score.push_back(c.score == RouterScore::kSigmoid ? 1.0 / (1.0 + std::exp(-logits[e]))
                                                       : t.softmax[static_cast<std::size_t>(e)]);
  }
  return t;
}

// Best first; a stable sort keeps equal values in index order. NaN is below everything.
std::vector<int> Order(const std::vector<double>& v) {
  std::vector<int> order(v.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
    const double x = v[static_cast<std::size_t>(a)], y = v[static_cast<std::size_t>(b)];
    return std::isnan(y) ? !std::isnan(x) : x > y;
  });
  return order;
}

std::vector<int> Select(const RouterConfig& c, const double* logits, const float* bias) {
  const Token t = Scores(c, logits);
  std::vector<double> v = t.score;
  if (c.score != RouterScore::kSigmoid && c.n_group == 1 && bias == nullptr) {
    v.assign(logits, logits + c.experts);
  }
  for (int e = 0; e < c.experts && bias != nullptr; ++e) {
    v[static_cast<std::size_t>(e)] += static_cast<double>(bias[e]);
  }
  if (c.n_group > 1) {
    const int size = c.experts / c.n_group;
    std::vector<double> group;
    for (int g = 0; g < c.n_group; ++g) {
      std::vector<double> members(v.begin() + g * size, v.begin() + (g + 1) * size);
      std::sort(members.rbegin(), members.rend());
      group.push_back(members[0] + (size > 1 ? members[1] : 0.0));
    }
    const std::vector<int> order = Order(group);
    for (int j = c.topk_group; j < c.n_group; ++j) {
      std::fill_n(v.begin() + order[static_cast<std::size_t>(j)] * size, size, -HUGE_VAL);
    }
  }
  std::vector<int> chosen = Order(v);
  chosen.resize(static_cast<std::size_t>(c.experts_per_token));
  return chosen;
}

template <class Index>
std::vector<double> Weights(const RouterConfig& c, const double* logits, const Index* index) {
  const Token t = Scores(c, logits);
  std::vector<double> w;
  double sum = 0;
  for (int j = 0; j < c.experts_per_token; ++j) {
    w.push_back(c.score == RouterScore::kTopKSoftmax ? std::exp(logits[index[j]] - t.lse)
                                                     : t.score[static_cast<std::size_t>(index[j])]);
    sum += w.back();
  }
  for (double& x : w) {
    if (c.score == RouterScore::kTopKSoftmax) {
      x /= sum;
    } else if (c.normalize_topk) {
      x /= sum + 1e-20;
    }
    x *= static_cast<double>(c.routed_scaling_factor);
  }
  return w;
}

std::vector<RouterConfig> Configs() {
  std::vector<RouterConfig> all;
  for (RouterScore score :
       {RouterScore::kSoftmax, RouterScore::kTopKSoftmax, RouterScore::kSigmoid}) {
    for (bool normalise : {false, true}) {
      all.push_back({8, 2, score, normalise, 1.0f, 1, 1});
      all.push_back({8, 2, score, normalise, 2.5f, 4, 2});
      all.push_back({37, 5, score, normalise, 1.0f, 1, 1});
      all.push_back({64, 8, score, normalise, 2.5f, 8, 3});
      all.push_back({6, 6, score, normalise, 0.5f, 6, 6});  // groups of one expert, all chosen
    }
  }
  all.push_back({1, 1, RouterScore::kSoftmax, false, 1.0f, 1, 1});
  return all;
}

std::vector<double> Wide(const std::vector<float>& x) { return {x.begin(), x.end()}; }

TEST(RouterForward, MatchesTheFp64Oracle) {
  for (const RouterConfig& c : Configs()) {
    for (bool with_bias : {false, true}) {
      Random random(81);
      const std::int64_t tokens = 40, per_segment = 16;  // the last segment is short
      const std::vector<float> logits = random.Normals(tokens * c.experts, 2.0f);
      const std::vector<float> bias = random.Normals(c.experts, 0.2f);
      const float* b = with_bias ? bias.data() : nullptr;
      const std::vector<double> wide = Wide(logits);
      const Outputs o = Forward(c, logits, b, per_segment);
      std::vector<double> score_sum(o.score_sum.size(), 0.0);
      std::vector<std::int64_t> counts(o.counts.size(), 0);
      double z = 0;
      for (std::int64_t t = 0; t < tokens; ++t) {
        const double* row = wide.data() + t * c.experts;
        const std::vector<int> chosen = Select(c, row, b);
        const std::vector<double> weights = Weights(c, row, chosen.data());
        const Token token = Scores(c, row);
        const auto segment = static_cast<std::size_t>(t / per_segment * c.experts);
        for (std::size_t j = 0; j < chosen.size(); ++j) {
          const auto at = static_cast<std::size_t>(t) * chosen.size() + j;
          ASSERT_EQ(o.index[at], chosen[j]) << Text(c) << " token " << t << " choice " << j;
          ASSERT_NEAR(o.weight[at], weights[j], 1e-6 * weights[j]) << Text(c);
          ++counts[segment + static_cast<std::size_t>(chosen[j])];
        }
        for (std::size_t e = 0; e < token.score.size(); ++e) {
          score_sum[segment + e] += token.score[e];
        }
        ASSERT_NEAR(o.logsumexp[static_cast<std::size_t>(t)], token.lse, 1e-6);
        z += token.lse * token.lse;
      }
      EXPECT_EQ(o.counts, counts) << Text(c);
      EXPECT_LT(RelativeError(o.score_sum, score_sum), 1e-6) << Text(c);
      EXPECT_NEAR(o.z_sum, z, 1e-6 * z) << Text(c);
    }
  }
}

// Every assignment of three levels to the experts: all ways to tie. Sums of two sigmoids of 0, 1, 3
// differ pairwise, so FP32 and FP64 see the same ties.
TEST(RouterForward, AllTiesGoToTheLowerIndexAmongExpertsAndGroups) {
  const std::vector<RouterConfig> configs = {
      {7, 3, RouterScore::kSoftmax, false, 1.0f, 1, 1},
      {7, 3, RouterScore::kSigmoid, true, 1.0f, 1, 1},
      {8, 2, RouterScore::kSigmoid, true, 1.0f, 4, 2},
      {8, 4, RouterScore::kSigmoid, false, 1.0f, 2, 1},
      {6, 2, RouterScore::kSigmoid, false, 1.0f, 6, 3},
  };
  const float levels[] = {0.0f, 1.0f, 3.0f};
  for (const RouterConfig& c : configs) {
    std::vector<float> logits;
    const auto count = static_cast<std::int64_t>(std::pow(3, c.experts) + 0.5);
    for (std::int64_t i = 0; i < count; ++i) {
      std::int64_t digits = i;
      for (int e = 0; e < c.experts; ++e) {
        logits.push_back(levels[digits % 3]);
        digits /= 3;
      }
    }
    const std::vector<double> wide = Wide(logits);
    const Outputs o = Forward(c, logits, nullptr, count);
    for (std::int64_t t = 0; t < count; ++t) {
      const std::vector<int> want = Select(c, wide.data() + t * c.experts, nullptr);
      for (std::size_t j = 0; j < want.size(); ++j) {
        ASSERT_EQ(o.index[static_cast<std::size_t>(t) * want.size() + j], want[j])
            << Text(c) << " case " << t << " choice " << j;
      }
    }
  }
}

// Softmax of −200 and −300 below a logit of 0 is 0 for both; the logits still order them.
TEST(RouterForward, UnderflowingSoftmaxDoesNotMakeTies) {
  const RouterConfig c = {4, 3, RouterScore::kSoftmax, false, 1.0f, 1, 1};
  const Outputs o = Forward(c, {-300.0f, -200.0f, 0.0f, -250.0f}, nullptr, 1);
  EXPECT_EQ(o.index, (std::vector<std::int32_t>{2, 1, 3}));
  EXPECT_EQ(o.weight[1], 0.0f);
}

// All scores of the two chosen groups are below 0 once the bias is added: a replacement of "not
// chosen" by 0 instead of −∞ would win.
TEST(RouterForward, ExpertsOfOtherGroupsAreNeverChosenUnderNegativeBias) {
  const RouterConfig c = {6, 2, RouterScore::kSigmoid, true, 1.0f, 3, 1};
  const std::vector<float> bias(6, -5.0f);
  const Outputs o = Forward(c, {0.0f, 0.0f, 1.0f, -3.0f, 0.5f, 0.4f}, bias.data(), 1);
  EXPECT_EQ(o.index, (std::vector<std::int32_t>{4, 5}));
}

TEST(RouterForward, BiasChangesTheSelectionButNotTheWeights) {
  const RouterConfig c = {4, 1, RouterScore::kSigmoid, false, 1.0f, 1, 1};
  const std::vector<float> bias = {0, 0, 0, 10};
  const Outputs o = Forward(c, {2.0f, 1.0f, 0.0f, -1.0f}, bias.data(), 1);
  EXPECT_EQ(o.index[0], 3);
  EXPECT_NEAR(o.weight[0], 1.0 / (1.0 + std::exp(1.0)), 1e-7);
}

TEST(RouterForward, NonFiniteLogitsSelectByTheOrderAndGiveNaNWeights) {
  const RouterConfig c = {5, 3, RouterScore::kSoftmax, true, 1.0f, 1, 1};
  const std::vector<float> logits = {
      kNaN, 1.0f, kNaN,      -kInfinity, 2.0f,        // NaN ranks below −∞
      kNaN, kNaN, kNaN,      kNaN,       kNaN,        // all equal: lowest indices
      0.0f, 1.0f, kInfinity, 0.5f,       -1.0f,       //
      0.0f, 1.0f, 2.0f,      -kInfinity, -kInfinity,  // softmax alone would hide this one
      0.0f, 1.0f, 2.0f,      3.0f,       4.0f,        // healthy neighbour
  };
  const Outputs o = Forward(c, logits, nullptr, 5);
  EXPECT_EQ(o.index, (std::vector<std::int32_t>{4, 1, 3, 0, 1, 2, 2, 1, 3, 2, 1, 0, 4, 3, 2}));
  for (std::size_t i = 0; i < o.weight.size(); ++i) {
    EXPECT_EQ(std::isnan(o.weight[i]), i < 12) << i;
  }
  EXPECT_EQ(std::accumulate(o.counts.begin(), o.counts.end(), std::int64_t{0}), 15);
  EXPECT_TRUE(std::isnan(o.z_sum));
}

// Exhaustive over the special values, for every kind of score: the choice is a valid set of k
// different experts whatever comes in, and is the oracle's where the value is the logit.
TEST(RouterForward, EverySpecialCombinationGivesDistinctExperts) {
  const float specials[] = {kNaN, kInfinity, -kInfinity, 0.0f, 1.0f};
  const int experts = 4;
  std::vector<float> logits;
  const int count = 625;
  for (int i = 0; i < count; ++i) {
    int digits = i;
    for (int e = 0; e < experts; ++e) {
      logits.push_back(specials[digits % 5]);
      digits /= 5;
    }
  }
  const std::vector<float> bias = {0.1f, -0.1f, 0.0f, 0.2f};
  for (RouterScore score :
       {RouterScore::kSoftmax, RouterScore::kTopKSoftmax, RouterScore::kSigmoid}) {
    for (int groups : {1, 2}) {
      for (const float* b : {static_cast<const float*>(nullptr), bias.data()}) {
        const RouterConfig c = {experts, 2, score, true, 1.0f, groups, 1};
        const Outputs o = Forward(c, logits, b, count);
        for (std::size_t t = 0; t < count; ++t) {
          const int first = o.index[2 * t], second = o.index[2 * t + 1];
          ASSERT_TRUE(first >= 0 && first < experts && second >= 0 && second < experts);
          ASSERT_NE(first, second) << Text(c) << " case " << t;
          bool finite = true;
          for (std::size_t e = 0; e < experts; ++e) {
            finite = finite && std::isfinite(logits[t * experts + e]);
          }
          ASSERT_EQ(std::isfinite(o.weight[2 * t]), finite) << Text(c) << " case " << t;
          if (score != RouterScore::kSigmoid && groups == 1 && b == nullptr) {
            std::vector<double> row(
                logits.begin() + static_cast<std::ptrdiff_t>(t * experts),
                logits.begin() + static_cast<std::ptrdiff_t>((t + 1) * experts));
            const std::vector<int> order = Order(row);
            ASSERT_EQ(first, order[0]) << "case " << t;
            ASSERT_EQ(second, order[1]) << "case " << t;
          }
        }
      }
    }
  }
}

TEST(RouterForward, NoTokensWritesOneSegmentOfZeros) {
  const RouterConfig c = {8, 2, RouterScore::kSoftmax, true, 1.0f, 1, 1};
  for (std::int64_t per_segment : {0, 128}) {
    const Outputs o = Forward(c, {}, nullptr, per_segment);
    EXPECT_EQ(o.counts, std::vector<std::int64_t>(8, 0));
    EXPECT_EQ(o.score_sum, std::vector<float>(8, 0.0f));
    EXPECT_EQ(o.z_sum, 0.0);
  }
}

TEST(RouterDeathTest, TooFewExpertsInTheChosenGroupsEndsTheProcess) {
  const RouterConfig c = {8, 3, RouterScore::kSigmoid, true, 1.0f, 4, 1};
  EXPECT_DEATH(Forward(c, std::vector<float>(8, 0.0f), nullptr, 1),
               "1 groups of 2 experts cannot give 3");
}

// ---------------------------------------------------------------- backward

// What RouterBackward differentiates, in FP64, for a fixed selection.
double Loss(const RouterConfig& c, const std::vector<double>& logits,
            const std::vector<std::int32_t>& index, const std::vector<float>& d_weight,
            const float* aux, std::int64_t per_segment, double z_coeff) {
  double loss = 0;
  const auto tokens = static_cast<std::int64_t>(logits.size()) / c.experts;
  for (std::int64_t t = 0; t < tokens; ++t) {
    const double* row = logits.data() + t * c.experts;
    const std::int64_t first = t * c.experts_per_token;
    const std::vector<double> w = Weights(c, row, index.data() + first);
    const Token token = Scores(c, row);
    for (std::size_t j = 0; j < w.size(); ++j) {
      loss += w[j] * static_cast<double>(d_weight[static_cast<std::size_t>(first) + j]);
    }
    for (int e = 0; e < c.experts && aux != nullptr; ++e) {
      loss += static_cast<double>(aux[t / per_segment * c.experts + e]) *
              token.score[static_cast<std::size_t>(e)];
    }
    loss += z_coeff * token.lse * token.lse;
  }
  return loss;
}

TEST(RouterBackward, MatchesFiniteDifferencesOfTheFp64Loss) {
  for (const RouterConfig& c : Configs()) {
    for (bool with_aux : {false, true}) {
      Random random(82);
      const std::int64_t tokens = 5, per_segment = 2;
      const std::vector<float> logits = random.Normals(tokens * c.experts, 1.5f);
      const std::vector<float> aux = random.Normals(3 * c.experts);
      const std::vector<float> d_weight = random.Normals(tokens * c.experts_per_token);
      const Outputs o = Forward(c, logits, nullptr, per_segment);
      const float z_coeff = with_aux ? 0.3f : 0.0f;
      const float* a = with_aux ? aux.data() : nullptr;
      std::vector<float> dlogits(logits.size(), 7.0f);
      cpu::RouterBackward(nullptr, {.config = c,
                                    .tokens = tokens,
                                    .tokens_per_segment = per_segment,
                                    .logits = logits.data(),
                                    .topk_index = o.index.data(),
                                    .dtopk_weight = d_weight.data(),
                                    .aux_coeff = a,
                                    .z_coeff = z_coeff,
                                    .logsumexp = o.logsumexp.data(),
                                    .dlogits = dlogits.data()});
      std::vector<double> at = Wide(logits);
      const double step = 1e-5;
      for (std::size_t i = 0; i < at.size(); ++i) {
        const double kept = at[i];
        at[i] = kept + step;
        const double up = Loss(c, at, o.index, d_weight, a, per_segment, z_coeff);
        at[i] = kept - step;
        const double down = Loss(c, at, o.index, d_weight, a, per_segment, z_coeff);
        at[i] = kept;
        // Central differences leave 1e-9; FP32 leaves 1e-7 of terms of size up to 5.
        ASSERT_NEAR(dlogits[i], (up - down) / (2 * step), 3e-6) << Text(c) << " at " << i;
      }
    }
  }
}

TEST(RouterBackward, NoTokensIsLegal) {
  const RouterConfig c = {8, 2, RouterScore::kSoftmax, true, 1.0f, 1, 1};
  cpu::RouterBackward(nullptr, {.config = c, .tokens = 0, .tokens_per_segment = 0});
}

// ---------------------------------------------------------------- bias

TEST(RouterBiasUpdate, MovesTowardsBalanceBySign) {
  const std::vector<std::int64_t> counts = {10, 2, 6, 6};  // mean 6
  std::vector<float> bias = {1.0f, 1.0f, 1.0f, -1.0f};
  cpu::RouterBiasUpdate(
      nullptr, {.counts = counts.data(), .experts = 4, .rate = 0.25f, .bias = bias.data()});
  EXPECT_EQ(bias, (std::vector<float>{0.75f, 1.25f, 1.0f, -1.0f}));
}

// Counts beyond 2^53 whose difference FP64 cannot see.
TEST(RouterBiasUpdate, ComparesIn64BitIntegers) {
  const std::int64_t big = (std::int64_t{1} << 60) + 1;
  const std::vector<std::int64_t> counts = {big, big - 2};
  std::vector<float> bias = {0.0f, 0.0f};
  cpu::RouterBiasUpdate(nullptr,
                        {.counts = counts.data(), .experts = 2, .rate = 1.0f, .bias = bias.data()});
  EXPECT_EQ(bias, (std::vector<float>{-1.0f, 1.0f}));
}

}  // namespace
}  // namespace octavo
