#include "worker/data/order.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

namespace octavo {
namespace {

TEST(OrderTest, EveryEpochIsAPermutationForEverySizeUpTo300) {
  for (std::int64_t samples = 1; samples <= 300; ++samples) {
    for (std::int64_t epoch : {0, 1, 7}) {
      std::vector<bool> seen(static_cast<std::size_t>(samples));
      for (std::int64_t i = 0; i < samples; ++i) {
        const std::int64_t s = PermuteIndex({.seed = 5, .samples = samples}, epoch, i);
        ASSERT_GE(s, 0);
        ASSERT_LT(s, samples);
        ASSERT_FALSE(seen[static_cast<std::size_t>(s)]) << samples << " " << epoch << " " << i;
        seen[static_cast<std::size_t>(s)] = true;
      }
    }
  }
}

TEST(OrderTest, LooksRandom) {
  // Correlation of index and sample over 4096 samples: about N(0, 1/64) for a random permutation.
  constexpr std::int64_t kSamples = 4096;
  double correlation = 0;
  std::int64_t fixed = 0;
  for (std::int64_t i = 0; i < kSamples; ++i) {
    const std::int64_t s = PermuteIndex({.seed = 1, .samples = kSamples}, 0, i);
    const double mean = (kSamples - 1) / 2.0;
    correlation += (static_cast<double>(i) - mean) * (static_cast<double>(s) - mean);
    fixed += s == i ? 1 : 0;
  }
  correlation /= kSamples * (double{kSamples} * kSamples - 1) / 12;
  EXPECT_LT(std::abs(correlation), 5.0 / 64);
  EXPECT_LT(fixed, 12);  // one is expected
}

TEST(OrderTest, SeedAndEpochChangeTheOrder) {
  std::int64_t same_seed = 0, same_epoch = 0;
  for (std::int64_t i = 0; i < 1000; ++i) {
    const std::int64_t s = PermuteIndex({.seed = 1, .samples = 1000}, 0, i);
    same_seed += s == PermuteIndex({.seed = 2, .samples = 1000}, 0, i) ? 1 : 0;
    same_epoch += s == PermuteIndex({.seed = 1, .samples = 1000}, 1, i) ? 1 : 0;
  }
  EXPECT_LT(same_seed, 15);  // one is expected
  EXPECT_LT(same_epoch, 15);
}

TEST(OrderTest, PositionsCountOverEpochs) {
  const OrderKey key{.seed = 3, .samples = 10};
  EXPECT_EQ(SampleAt(key, 23), PermuteIndex(key, 2, 3));
}

// The order is part of the checkpoint's meaning: a change breaks resume of every running job.
TEST(OrderTest, OrderIsFrozen) {
  std::vector<std::int64_t> order;
  for (std::int64_t i = 0; i < 8; ++i) {
    order.push_back(PermuteIndex({.seed = 1, .samples = 1000}, 0, i));
  }
  EXPECT_EQ(order, (std::vector<std::int64_t>{316, 547, 240, 602, 923, 376, 249, 414}));
}

}  // namespace
}  // namespace octavo
