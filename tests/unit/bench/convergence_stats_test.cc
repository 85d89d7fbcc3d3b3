#include "bench/convergence_stats.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

namespace octavo {
namespace {

TEST(ConvergenceStats, MeanAndStandardDeviationOfKnownValues) {
  const Sample s = Summarise(std::vector<double>{2, 4, 4, 4, 5, 5, 7, 9});
  EXPECT_EQ(s.n, 8);
  EXPECT_DOUBLE_EQ(s.mean, 5);
  EXPECT_DOUBLE_EQ(s.sd, std::sqrt(32.0 / 7));
  EXPECT_TRUE(std::isnan(Summarise({}).mean));
  EXPECT_TRUE(std::isnan(Summarise(std::vector<double>{3}).sd));
}

// Two-sided probabilities in closed form: one degree of freedom is Cauchy's, two are algebraic; the
// rest are the tables' 5 % and 1 % points, printed to three decimals.
TEST(ConvergenceStats, StudentMatchesClosedFormsAndTables) {
  for (double t : {0.0, 0.1, 0.5, 1.0, 2.0, 5.0, 40.0}) {
    EXPECT_NEAR(StudentTwoSided(t, 1), 1 - 2 / M_PI * std::atan(t), 1e-12) << t;
    EXPECT_NEAR(StudentTwoSided(-t, 2), 1 - t / std::sqrt(2 + t * t), 1e-12) << t;
  }
  EXPECT_NEAR(StudentTwoSided(2.571, 5), 0.05, 1e-4);
  EXPECT_NEAR(StudentTwoSided(2.145, 14), 0.05, 1e-4);
  EXPECT_NEAR(StudentTwoSided(2.977, 14), 0.01, 1e-4);
  EXPECT_NEAR(StudentTwoSided(1.96, 1e6), 0.05, 1e-4);
}

TEST(ConvergenceStats, WelchDegreesAndStandardError) {
  // Equal sizes and variances give the pooled 2(n − 1) degrees; 1 + 1 % of a mean of 100.
  const Comparison c = Compare({.n = 8, .mean = 100, .sd = 2}, {.n = 8, .mean = 101, .sd = 2});
  EXPECT_NEAR(c.degrees, 14, 1e-9);
  EXPECT_NEAR(c.standard_error, 0.01, 1e-12);
  EXPECT_NEAR(c.difference, 0.01, 1e-12);
  EXPECT_NEAR(c.allowed, 0.02, 1e-12);
  EXPECT_NEAR(c.p, StudentTwoSided(1, 14), 1e-12);
  // Unequal ones by hand: (1 + 0.25)² / (1/3 + 0.0625/15).
  const Comparison w = Compare({.n = 4, .mean = 10, .sd = 2}, {.n = 16, .mean = 10, .sd = 2});
  EXPECT_NEAR(w.degrees, 1.5625 / (1.0 / 3 + 0.0625 / 15), 1e-9);
}

TEST(ConvergenceStats, VerdictsOfTheRule) {
  const auto verdict = [](double mean, double sd, std::int64_t n = 8) {
    return Compare({.n = n, .mean = 100, .sd = sd}, {.n = n, .mean = mean, .sd = sd}).verdict;
  };
  // SD 0.1 %: two standard errors are 0.1 %, so 0.25 % decides.
  EXPECT_EQ(verdict(100.24, 0.1), Verdict::kWithin);
  EXPECT_EQ(verdict(100.26, 0.1), Verdict::kAbove);
  EXPECT_EQ(verdict(99.74, 0.1), Verdict::kBelow);
  // SD 0.4 %: two standard errors are 0.4 % and decide.
  EXPECT_EQ(verdict(100.39, 0.4), Verdict::kWithin);
  EXPECT_EQ(verdict(99.59, 0.4), Verdict::kBelow);
  // SD 1 %: two standard errors are 1 %; what is within says little.
  EXPECT_EQ(verdict(100.9, 1), Verdict::kCoarse);
  EXPECT_EQ(verdict(101.1, 1), Verdict::kAbove);
  EXPECT_EQ(verdict(100, 1, 1), Verdict::kUnknown);
  // A run that diverged makes no mean.
  EXPECT_EQ(verdict(std::nan(""), 0.1), Verdict::kUnknown);
}

// Draws from one distribution are outside two standard errors about as often as t says. Binomial
// with 4000 trials at 6.5 % (t with 14 degrees at 2): five standard deviations are 2 %.
TEST(ConvergenceStats, EqualRecipesAreRarelyOutside) {
  constexpr unsigned kSeed = 20260711;
  SCOPED_TRACE(testing::Message() << "seed " << kSeed);
  std::mt19937 engine(kSeed);
  std::normal_distribution<double> loss(2.5, 0.02);  // 0.8 %: the standard errors decide
  constexpr int kTrials = 4000;
  int outside = 0, p_below = 0;
  for (int i = 0; i < kTrials; ++i) {
    std::vector<double> a(8), b(8);
    for (std::size_t j = 0; j < a.size(); ++j) {
      a[j] = loss(engine);
      b[j] = loss(engine);
    }
    const Comparison c = Compare(Summarise(a), Summarise(b));
    outside += c.verdict == Verdict::kAbove || c.verdict == Verdict::kBelow ? 1 : 0;
    p_below += c.p < 0.05 ? 1 : 0;
  }
  EXPECT_NEAR(static_cast<double>(outside) / kTrials, 0.065, 0.02);
  EXPECT_NEAR(static_cast<double>(p_below) / kTrials, 0.05, 0.0175);
}

}  // namespace
}  // namespace octavo
