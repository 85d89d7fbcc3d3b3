#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels/cpu/ops_cpu.h"
#include "tests/unit/kernels/values.h"

namespace octavo {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// Nearest BF16 by comparing the two neighbours in FP64, ties to the even code.
float NearestBf16(float x) {
  if (std::isnan(x) || std::isinf(x)) {
    return x;
  }
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(x);
  const std::uint32_t low = bits & 0xFFFF0000u;
  const std::uint32_t high = low + 0x10000u;
  const auto value = [](std::uint32_t b) {
    // The value after the largest finite one counts as 2^128 when rounding.
    return (b & 0x7FFFFFFFu) == 0x7F800000u
               ? std::copysign(std::ldexp(1.0, 128), std::bit_cast<float>(b))
               : static_cast<double>(std::bit_cast<float>(b));
  };
  const double to_low = std::fabs(static_cast<double>(x) - value(low));
  const double to_high = std::fabs(static_cast<double>(x) - value(high));
  const bool take_low = to_low < to_high || (to_low == to_high && (low >> 16) % 2 == 0);
  return std::bit_cast<float>(take_low ? low : high);
}

TEST(Cast, RoundsToNearestEvenBf16OverAllBinades) {
  std::vector<float> x;
  for (std::uint64_t bits = 0; bits < (1ull << 32); bits += 32771) {
    x.push_back(std::bit_cast<float>(static_cast<std::uint32_t>(bits)));
  }
  for (std::uint32_t code = 0; code < 0x10000; ++code) {  // ties and their neighbours
    for (std::uint32_t low : {0x7FFFu, 0x8000u, 0x8001u}) {
      x.push_back(std::bit_cast<float>(code << 16 | low));
    }
  }
  const auto n = static_cast<std::int64_t>(x.size());
  Stored y(x.size(), 0.0f, DType::kBF16);
  cpu::Cast(nullptr, {.src = {.data = x.data(), .dtype = DType::kF32, .rows = 1, .cols = n},
                      .dst = {.data = y.data(), .dtype = DType::kBF16, .rows = 1, .cols = n}});
  for (std::size_t i = 0; i < x.size(); ++i) {
    const float want = NearestBf16(x[i]);
    if (std::isnan(want)) {
      ASSERT_TRUE(std::isnan(y.Get(i))) << i;
    } else {
      ASSERT_EQ(std::bit_cast<std::uint32_t>(y.Get(i)), std::bit_cast<std::uint32_t>(want)) << x[i];
    }
  }
}

TEST(Cast, KeepsWhatLiesBetweenTheRowsOfAStridedMatrix) {
  Random random(1);
  const std::int64_t rows = 3, cols = 700, src_ld = 701, dst_ld = 710;
  Stored x(random.Normals(rows * src_ld), DType::kBF16);
  std::vector<float> y(static_cast<std::size_t>(rows * dst_ld), 9.0f);
  cpu::Cast(
      nullptr,
      {.src = {.data = x.data(), .dtype = DType::kBF16, .rows = rows, .cols = cols, .ld = src_ld},
       .dst = {.data = y.data(), .dtype = DType::kF32, .rows = rows, .cols = cols, .ld = dst_ld}});
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t c = 0; c < dst_ld; ++c) {
      const float want = c < cols ? x.Get(static_cast<std::size_t>(r * src_ld + c)) : 9.0f;
      ASSERT_EQ(y[static_cast<std::size_t>(r * dst_ld + c)], want) << r << " " << c;
    }
  }
}

TEST(Cast, CopiesSameTypesAndDoesNothingForNoRows) {
  std::vector<std::int32_t> x = {1, 2, 3, 4};
  std::vector<std::int32_t> y(4, 0);
  const Mat src = {.data = x.data(), .dtype = DType::kI32, .rows = 2, .cols = 2};
  Mat dst = {.data = y.data(), .dtype = DType::kI32, .rows = 2, .cols = 2};
  cpu::Cast(nullptr, {.src = src, .dst = dst});
  EXPECT_EQ(x, y);
  cpu::Cast(nullptr, {.src = {.dtype = DType::kF32, .rows = 0, .cols = 5},
                      .dst = {.dtype = DType::kBF16, .rows = 0, .cols = 5}});
}

TEST(Axpby, ComputesInFp32AndRoundsOnce) {
  for (DType x_type : {DType::kF32, DType::kBF16}) {
    for (DType y_type : {DType::kF32, DType::kBF16}) {
      Random random(3);
      const std::int64_t n = 1300;
      Stored x(random.Normals(n), x_type);
      Stored y(random.Normals(n), y_type);
      Stored want = y;
      for (std::size_t i = 0; i < want.size(); ++i) {
        const float product = 0.7f * x.Get(i);
        const float kept = -1.3f * y.Get(i);
        want.Set(i, product + kept);
      }
      cpu::Axpby(nullptr, {.x = x.data(),
                           .x_dtype = x_type,
                           .a = 0.7f,
                           .y = y.data(),
                           .y_dtype = y_type,
                           .b = -1.3f,
                           .n = n});
      EXPECT_TRUE(y == want) << Name(x_type) << " " << Name(y_type);
    }
  }
}

TEST(Axpby, IgnoresStaleMemoryWhenItOverwrites) {
  std::vector<float> x = {1, 2, 3};
  std::vector<float> y = {kNaN, kNaN, kNaN};
  cpu::Axpby(nullptr, {.x = x.data(),
                       .x_dtype = DType::kF32,
                       .a = 2.0f,
                       .y = y.data(),
                       .y_dtype = DType::kF32,
                       .b = 0.0f,
                       .n = 3});
  EXPECT_EQ(y, (std::vector<float>{2, 4, 6}));
}

}  // namespace
}  // namespace octavo
