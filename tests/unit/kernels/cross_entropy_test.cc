#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels/cpu/ops_cpu.h"
#include "tests/unit/kernels/values.h"

namespace octavo {
namespace {

struct Reference {
  double loss = 0;
  std::vector<double> dlogits;
};

Reference Fp64(const Stored& logits, const std::vector<std::int32_t>& target, std::size_t vocab,
               double dloss) {
  Reference result;
  for (std::size_t r = 0; r < target.size(); ++r) {
    double max = -HUGE_VAL, sum = 0;
    for (std::size_t c = 0; c < vocab; ++c) {
      max = std::max(max, logits[r * vocab + c]);
    }
    for (std::size_t c = 0; c < vocab; ++c) {
      sum += std::exp(logits[r * vocab + c] - max);
    }
    const bool ignored = target[r] < 0;
    if (!ignored) {
      result.loss += std::log(sum) + max - logits[r * vocab + static_cast<std::size_t>(target[r])];
    }
    for (std::size_t c = 0; c < vocab; ++c) {
      const double onehot = static_cast<std::size_t>(target[r]) == c ? 1.0 : 0.0;
      result.dlogits.push_back(
          ignored ? 0.0 : (std::exp(logits[r * vocab + c] - max) / sum - onehot) * dloss);
    }
  }
  return result;
}

TEST(CrossEntropy, MatchesFp64LossAndGradient) {
  for (DType dtype : {DType::kF32, DType::kBF16}) {
    for (std::size_t vocab : {1u, 2u, 17u, 256u, 512u, 5000u}) {
      Random random(61);
      Stored logits(random.Normals(static_cast<std::int64_t>(6 * vocab), 4.0f), dtype);
      std::vector<std::int32_t> target;
      for (int r = 0; r < 6; ++r) {
        target.push_back(static_cast<std::int32_t>(random.Below(static_cast<std::int64_t>(vocab))));
      }
      target[2] = -1;
      target[4] = static_cast<std::int32_t>(vocab) - 1;
      const float dloss = 0.125f;
      const Reference want = Fp64(logits, target, vocab, dloss);
      double loss = 3.0;
      cpu::CrossEntropy(nullptr, {.rows = 6,
                                  .vocab = static_cast<std::int64_t>(vocab),
                                  .logits = logits.data(),
                                  .dtype = dtype,
                                  .target = target.data(),
                                  .dloss = dloss,
                                  .loss_sum = &loss});
      // The sum of exponentials has one FP32 rounding per term.
      EXPECT_NEAR(loss - 3.0, want.loss, 2e-6 * (1 + want.loss)) << vocab;
      if (vocab > 1) {
        EXPECT_LT(RelativeError(logits, want.dlogits), Tolerance(dtype)) << Name(dtype) << vocab;
      }
      for (std::size_t c = 0; c < vocab; ++c) {
        ASSERT_EQ(logits.Get(2 * vocab + c), 0.0f) << "ignored row";
      }
    }
  }
}

TEST(CrossEntropy, ForwardOnlyLeavesTheLogitsAlone) {
  Random random(62);
  Stored logits(random.Normals(3 * 50), DType::kBF16);
  const Stored before = logits;
  const std::vector<std::int32_t> target = {1, -1, 49};
  double loss = 0;
  cpu::CrossEntropy(nullptr, {.rows = 3,
                              .vocab = 50,
                              .logits = logits.data(),
                              .dtype = DType::kBF16,
                              .target = target.data(),
                              .dloss = 0.0f,
                              .loss_sum = &loss});
  EXPECT_TRUE(logits == before);
  EXPECT_NEAR(loss, Fp64(before, target, 50, 0).loss, 1e-5);
}

TEST(CrossEntropy, StaysFiniteForHugeLogits) {
  std::vector<float> logits = {3e38f, -3e38f, 1e38f, 3e38f};
  const std::int32_t target = 0;
  double loss = 0;
  cpu::CrossEntropy(nullptr, {.rows = 1,
                              .vocab = 4,
                              .logits = logits.data(),
                              .dtype = DType::kF32,
                              .target = &target,
                              .dloss = 1.0f,
                              .loss_sum = &loss});
  EXPECT_NEAR(loss, std::log(2.0), 1e-6);
  EXPECT_FLOAT_EQ(logits[0], -0.5f);
  EXPECT_FLOAT_EQ(logits[3], 0.5f);
  EXPECT_EQ(logits[1], 0.0f);
}

TEST(CrossEntropy, NonFiniteLogitShowsInTheLossUnlessTheRowIsIgnored) {
  for (float bad :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    std::vector<float> logits(40, 0.5f);
    logits[25] = bad;
    std::vector<std::int32_t> target = {3, 3};
    const CrossEntropyArgs base = {.rows = 2,
                                   .vocab = 20,
                                   .logits = logits.data(),
                                   .dtype = DType::kF32,
                                   .target = target.data(),
                                   .dloss = 0.0f};
    CrossEntropyArgs args = base;
    double loss = 0;
    args.loss_sum = &loss;
    cpu::CrossEntropy(nullptr, args);
    EXPECT_FALSE(std::isfinite(loss));
    target[1] = -1;
    loss = 0;
    cpu::CrossEntropy(nullptr, args);
    EXPECT_NEAR(loss, std::log(20.0), 1e-6);
  }
}

TEST(CrossEntropyDeathTest, TargetOutsideTheVocabularyEndsTheProcess) {
  std::vector<float> logits(4);
  const std::int32_t target = 4;
  double loss = 0;
  const CrossEntropyArgs args = {.rows = 1,
                                 .vocab = 4,
                                 .logits = logits.data(),
                                 .dtype = DType::kF32,
                                 .target = &target,
                                 .dloss = 1.0f,
                                 .loss_sum = &loss};
  EXPECT_DEATH(cpu::CrossEntropy(nullptr, args), "target 4 of row 0");
}

}  // namespace
}  // namespace octavo
