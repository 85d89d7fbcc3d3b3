#include "kernels/cpu/vector_math.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "kernels/cpu/rows.h"
#include "tests/unit/kernels/values.h"

namespace octavo {
namespace {

using cpu::AddDot;
using cpu::ExpF32;
using cpu::ExpRow;
using cpu::kChunk;
using cpu::Lanes;

float FromBits(std::uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

// Every 1021st of all FP32 bit patterns (1021 is prime: all mantissa patterns and binades).
TEST(ExpF32, IsWithinOnePointTwoUlpOfTheExactValueEverywhere) {
  double worst = 0;
  float worst_at = 0;
  for (std::uint64_t bits = 0; bits < (1ull << 32); bits += 1021) {
    const float x = FromBits(static_cast<std::uint32_t>(bits));
    if (std::isnan(x)) {
      continue;
    }
    const float got = ExpF32(x);
    const double want = std::exp(static_cast<double>(x));
    if (want > 3.4028234663852886e38) {
      ASSERT_TRUE(std::isinf(got) || got == std::numeric_limits<float>::max()) << x;
      continue;
    }
    const int exponent = want > 0 ? std::max(std::ilogb(want) - 23, -149) : -149;
    const double error = std::fabs(static_cast<double>(got) - want) / std::ldexp(1.0, exponent);
    if (!(error <= worst)) {
      worst = error;
      worst_at = x;
    }
  }
  EXPECT_LE(worst, 1.2) << "at " << worst_at;
}

TEST(ExpF32, KeepsLimitsAndNaN) {
  const float infinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(ExpF32(0.0f), 1.0f);
  EXPECT_EQ(ExpF32(-0.0f), 1.0f);
  EXPECT_EQ(ExpF32(infinity), infinity);
  EXPECT_EQ(ExpF32(-infinity), 0.0f);
  EXPECT_EQ(ExpF32(-104.5f), 0.0f);
  EXPECT_EQ(ExpF32(-103.0f), std::numeric_limits<float>::denorm_min());
  EXPECT_TRUE(std::isnan(ExpF32(std::numeric_limits<float>::quiet_NaN())));
}

TEST(ExpRow, GivesTheBitsOfTheScalarFunctionAtEveryLengthAndPosition) {
  Random random(7);
  for (std::int64_t n = 0; n < 70; ++n) {
    const std::vector<float> x = random.Normals(n, 20.0f);
    std::vector<float> y(x.size());
    Lanes sum;
    ExpRow(x.data(), n, 1.0f, 0.5f, y.data(), &sum);
    Lanes expected;
    for (std::size_t i = 0; i < x.size(); ++i) {
      ASSERT_EQ(y[i], ExpF32(x[i] - 0.5f)) << i << " of " << n;
      expected.lane[i % 16] += y[i];
    }
    ASSERT_EQ(std::memcmp(sum.lane, expected.lane, sizeof(sum.lane)), 0) << n;
  }
}

TEST(Lanes, ChunksGiveTheBitsOfOnePass) {
  Random random(8);
  const std::int64_t n = 3 * kChunk + 77;
  const std::vector<float> a = random.Normals(n);
  const std::vector<float> b = random.Normals(n);
  Lanes whole;
  AddDot(a.data(), b.data(), n, &whole);
  Lanes chunks;
  for (std::int64_t i = 0; i < n; i += kChunk) {
    AddDot(a.data() + i, b.data() + i, std::min(kChunk, n - i), &chunks);
  }
  EXPECT_EQ(whole.Total(), chunks.Total());
  Lanes scalar;
  for (std::int64_t i = 0; i < n; ++i) {
    const auto at = static_cast<std::size_t>(i);
    scalar.lane[i % 16] += a[at] * b[at];
  }
  EXPECT_EQ(std::memcmp(whole.lane, scalar.lane, sizeof(whole.lane)), 0);
}

TEST(RowMax, PassesOverNaNAndFindsTheLargestAnywhere) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (std::int64_t n = 1; n < 40; ++n) {
    for (std::int64_t at = 0; at < n; ++at) {
      std::vector<float> x(static_cast<std::size_t>(n), -3.0f);
      x[static_cast<std::size_t>(at)] = 2.0f;
      x[static_cast<std::size_t>((at + 1) % n)] = n > 1 ? nan : 2.0f;
      ASSERT_EQ(cpu::RowMax(x.data(), n), 2.0f) << n << " " << at;
    }
  }
  EXPECT_EQ(cpu::RowMax(nullptr, 0), -std::numeric_limits<float>::infinity());
}

}  // namespace
}  // namespace octavo
