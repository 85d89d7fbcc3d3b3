#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "kernels/cpu/ops_cpu.h"
#include "tests/unit/kernels/values.h"

namespace octavo {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

TEST(SumSquares, AddsToWhatIsThere) {
  for (std::int64_t n : {0, 1, 7, 8, 9, 1000, 4097}) {
    Random random(static_cast<std::uint32_t>(n));
    const std::vector<float> x = random.Normals(n, 3.0f);
    double out = 5.0;
    long double want = 5.0L;
    for (float v : x) {
      want += static_cast<long double>(v) * v;
    }
    cpu::SumSquares(nullptr, {.x = x.data(), .n = n, .out = &out});
    EXPECT_NEAR(out, static_cast<double>(want), 1e-13 * static_cast<double>(want)) << n;
  }
}

// 1e38² overflows FP32, so this fails unless the squares are formed in FP64.
TEST(SumSquares, DoesNotOverflowForLargeFiniteValues) {
  const std::vector<float> x(100, 1e38f);
  double out = 0;
  cpu::SumSquares(nullptr, {.x = x.data(), .n = 100, .out = &out});
  EXPECT_NEAR(out / 1e78, 1.0, 1e-6);
}

TEST(SumSquares, ShowsEveryNonFiniteElement) {
  for (std::size_t at = 0; at < 19; ++at) {
    for (float bad : {kInfinity, -kInfinity, kNaN}) {
      std::vector<float> x(19, 1.0f);
      x[at] = bad;
      double out = 0;
      cpu::SumSquares(nullptr, {.x = x.data(), .n = 19, .out = &out});
      EXPECT_FALSE(std::isfinite(out)) << at;
    }
  }
}

TEST(CountNonfinite, CountsInfinitiesAndNaNsOnly) {
  for (DType dtype : {DType::kF32, DType::kBF16}) {
    Random random(11);
    std::vector<float> values = random.Normals(1000);
    values[1] = std::numeric_limits<float>::max() * 0.9f;
    values[2] = 0.0f;
    std::uint64_t bad = 0;
    for (std::size_t i = 3; i < values.size(); i += 37) {
      values[i] = i % 3 == 0 ? kNaN : (i % 3 == 1 ? kInfinity : -kInfinity);
      ++bad;
    }
    Stored x(values, dtype);
    std::uint64_t count = 10;
    cpu::CountNonfinite(nullptr, {.x = x.data(), .dtype = dtype, .n = 1000, .count = &count});
    EXPECT_EQ(count, 10 + bad) << Name(dtype);
    cpu::CountNonfinite(nullptr, {.x = nullptr, .dtype = dtype, .n = 0, .count = &count});
    EXPECT_EQ(count, 10 + bad) << Name(dtype);
  }
}

}  // namespace
}  // namespace octavo
