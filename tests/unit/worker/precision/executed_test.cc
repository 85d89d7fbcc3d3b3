#include "worker/precision/executed.h"

#include <gtest/gtest.h>

namespace octavo {
namespace {

TEST(Executed, CountsByPlannedExecutedAndReason) {
  ExecutedCounters counters(2);
  const Recipe flow = DefaultRecipe(RecipeKind::kFp8Flow), bf16 = DefaultRecipe(RecipeKind::kBf16);
  for (int i = 0; i < 3; ++i) {
    counters.Count({{1, Op::kFc1}, flow, flow, "", FlopPrecision::kFp8, 10});
  }
  counters.Count({{1, Op::kFc1}, flow, bf16, "retry", FlopPrecision::kBf16, 7});
  counters.CountFlops(FlopPrecision::kFp32, 5);
  ASSERT_EQ(counters.entries().size(), 2u);
  const auto& at = counters.At({1, Op::kFc1});
  EXPECT_EQ(at[0].calls, 3);
  EXPECT_FALSE(at[0].mismatch());
  EXPECT_TRUE(at[1].mismatch());
  EXPECT_EQ(at[1].reason, "retry");
  EXPECT_EQ(counters.mismatches(), 1);
  EXPECT_EQ(counters.flops(FlopPrecision::kFp8), 30);
  EXPECT_EQ(counters.flops(FlopPrecision::kBf16), 7);
  EXPECT_EQ(counters.flops(FlopPrecision::kFp32), 5);
  EXPECT_TRUE(counters.At({0, Op::kFc1}).empty());
}

}  // namespace
}  // namespace octavo
