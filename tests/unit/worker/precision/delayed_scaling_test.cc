#include "worker/precision/delayed_scaling.h"

#include <gtest/gtest.h>

#include <limits>

namespace octavo {
namespace {

constexpr std::int32_t kStale = 3;

DelayedScaling Window(std::int32_t length, AmaxAlgorithm algorithm = AmaxAlgorithm::kMax,
                      bool e5m2 = false, std::int32_t margin = 0) {
  Recipe recipe = DefaultRecipe(RecipeKind::kFp8Delayed);
  recipe.history_len = length;
  recipe.amax_algo = algorithm;
  recipe.margin = margin;
  DelayedScaling window;
  window.Configure(recipe, e5m2);
  return window;
}

TEST(DelayedScaling, EmptyWindowPrimesAndAPushGivesQ) {
  DelayedScaling w = Window(4);
  EXPECT_FALSE(w.primed());
  w.Push(2.0f, kStale);
  EXPECT_TRUE(w.primed());
  EXPECT_EQ(w.quant_scale(), 224.0f);  // 448 / 2
}

TEST(DelayedScaling, MaximumOverTheWindowAndEvictionOfTheOldest) {
  DelayedScaling w = Window(3);
  for (float a : {8.0f, 1.0f, 2.0f}) {
    w.Push(a, kStale);
  }
  EXPECT_EQ(w.quant_scale(), 448.0f / 8);
  w.Push(1.0f, kStale);  // 8 leaves
  EXPECT_EQ(w.quant_scale(), 448.0f / 2);
  DelayedScaling latest = Window(3, AmaxAlgorithm::kMostRecent);
  latest.Push(8, kStale);
  latest.Push(1, kStale);
  EXPECT_EQ(latest.quant_scale(), 448.0f);
}

TEST(DelayedScaling, LargerMarginMeansMoreHeadroom) {
  DelayedScaling w = Window(2, AmaxAlgorithm::kMax, false, 2);
  w.Push(1.0f, kStale);
  EXPECT_EQ(w.quant_scale(), 112.0f);
  DelayedScaling gradient = Window(2, AmaxAlgorithm::kMax, true);
  gradient.Push(1.0f, kStale);
  EXPECT_EQ(gradient.quant_scale(), 57344.0f);
}

TEST(DelayedScaling, ZeroAndNonFiniteAmaxPushNothingAndAge) {
  DelayedScaling w = Window(4);
  w.Push(2.0f, kStale);
  for (float bad :
       {0.0f, std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    w.Push(bad, kStale);
    EXPECT_EQ(w.quant_scale(), 224.0f);
  }
  EXPECT_EQ(w.age(), 3);
  EXPECT_EQ(w.window().size(), 1u);
  w.Push(4.0f, kStale);
  EXPECT_EQ(w.age(), 0);
}

TEST(DelayedScaling, StaleWindowsEmptySoThatTheNextUsePrimes) {
  DelayedScaling w = Window(4);
  w.Push(2.0f, kStale);
  for (int i = 0; i < kStale; ++i) {
    w.Push(0, kStale);
    EXPECT_TRUE(w.primed());
  }
  w.Push(0, kStale);
  EXPECT_FALSE(w.primed());
}

TEST(DelayedScaling, ChangingTheLengthKeepsTheNewest) {
  DelayedScaling w = Window(4);
  for (float a : {8.0f, 4.0f, 2.0f, 1.0f}) {
    w.Push(a, kStale);
  }
  Recipe recipe = DefaultRecipe(RecipeKind::kFp8Delayed);
  recipe.history_len = 2;
  w.Configure(recipe, false);
  EXPECT_EQ(w.window(), (std::vector<float>{2.0f, 1.0f}));
  EXPECT_EQ(w.quant_scale(), 224.0f);
}

TEST(DelayedScaling, MinimumDequantScaleBoundsQ) {
  Recipe recipe = DefaultRecipe(RecipeKind::kFp8Delayed);
  recipe.min_dequant_scale = 0.125f;
  DelayedScaling w;
  w.Configure(recipe, false);
  w.Push(1e-6f, kStale);
  EXPECT_EQ(w.quant_scale(), 8.0f);
}

TEST(DelayedScaling, StateRoundTripsAndRubbishIsRefused) {
  DelayedScaling w = Window(4);
  w.Push(2.0f, kStale);
  w.Push(3.0f, kStale);
  w.Push(0.0f, kStale);
  DelayedScaling copy = Window(4);
  ASSERT_TRUE(copy.Import(w.Export()));
  EXPECT_EQ(copy.Export(), w.Export());
  EXPECT_EQ(copy.age(), 1);
  EXPECT_EQ(copy.quant_scale(), w.quant_scale());
  for (const std::vector<float>& bad : {std::vector<float>{},
                                        {1.0f},
                                        {0.0f, 0.0f},
                                        {1.0f, -1.0f},
                                        {1.0f, 0.0f, std::numeric_limits<float>::quiet_NaN()},
                                        {1.0f, 0.0f, -2.0f}}) {
    EXPECT_FALSE(copy.Import(bad)) << bad.size();
  }
  EXPECT_EQ(copy.Export(), w.Export());
}

}  // namespace
}  // namespace octavo
