#include "base/check.h"

#include "gtest/gtest.h"

namespace octavo {
namespace {

TEST(CheckDeathTest, PrintsFileConditionAndMessageThenAborts) {
  const int cols = 130;
  EXPECT_DEATH(OCTAVO_CHECK(cols % 128 == 0, "cols = %d must be a multiple of 128", cols),
               "check_test.cc:[0-9]+: check failed: cols % 128 == 0: cols = 130 must be");
  EXPECT_DEATH(OCTAVO_CHECK(cols < 0), "check failed: cols < 0\n");
}

TEST(CheckDeathTest, ComparisonsPrintBothValues) {
  EXPECT_DEATH(OCTAVO_CHECK_EQ(2 + 2, 5), "2 \\+ 2 == 5: 4 vs 5");
  EXPECT_DEATH(OCTAVO_CHECK_LT(7, 3), "7 < 3: 7 vs 3");
}

TEST(Check, EvaluatesOperandsOnceAndContinuesWhenTrue) {
  int calls = 0;
  const auto next = [&calls] { return ++calls; };
  OCTAVO_CHECK_EQ(next(), 1);
  OCTAVO_CHECK(next() == 2, "calls = %d", calls);
  EXPECT_EQ(calls, 2);
}

}  // namespace
}  // namespace octavo
