// The scaling-aware transpose against exact arithmetic (NUMERICS 6).
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <vector>

#include "kernels/formats/fp8.h"
#include "kernels/formats/scale.h"
#include "tests/unit/kernels/quantised.h"
#include "tests/unit/kernels/targets.h"
#include "tests/unit/kernels/values.h"

namespace octavo {
namespace {

// Nearest E4M3 magnitude code to a value that FP64 holds exactly; ties to even.
int NearestMagnitude(double magnitude) {
  int best = 0;
  for (int code = 0; code <= 0x7E; ++code) {
    const double distance = std::fabs(E4M3Decode(static_cast<std::uint8_t>(code)) - magnitude);
    const double best_distance = std::fabs(E4M3Decode(static_cast<std::uint8_t>(best)) - magnitude);
    if (distance < best_distance || (distance == best_distance && code % 2 == 0)) {
      best = code;
    }
  }
  return best;
}

TEST(RescaleCode, EqualsExactArithmeticForEveryCodeAndShift) {
  for (int k = 0; k <= 40; ++k) {
    for (int code = 0; code < 256; ++code) {
      const auto byte = static_cast<std::uint8_t>(code);
      const std::uint8_t got = RescaleCode(byte, k);
      if ((code & 0x7F) == 0x7F) {
        EXPECT_EQ(got, byte) << "NaN stays NaN";
        continue;
      }
      const double exact = std::ldexp(std::fabs(E4M3Decode(byte)), -k);
      EXPECT_EQ(got & 0x7F, NearestMagnitude(exact)) << "code " << code << " k " << k;
      EXPECT_EQ(got & 0x80, code & 0x80);
      if (k >= 19) {
        EXPECT_EQ(got & 0x7F, 0);
      }
    }
  }
}

class TransposeScaled : public testing::TestWithParam<ScaleOrder> {};

TEST_P(TransposeScaled, EqualsTheDefinitionOnRaggedGroups) {
  Random random(11);
  CpuBackend cpu;
  const Groups groups({130, 0, 1, 256});
  const std::int64_t cols = 256;
  const std::int64_t rows = groups.padded_rows();
  Quantised src(rows, cols, DType::kE4M3, Tiling::kRow128, GetParam());
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t c = 0; c < cols; ++c) {
      // Stale codes in the padding must not reach the result.
      src.code(r, c) = static_cast<std::uint8_t>(random.Below(256));
      src.dequant_scale(r, c) = 0x1p-126f;
    }
    for (std::int64_t c = 0; c < cols && groups.GroupOf(r) >= 0; c += kTile) {
      src.dequant_scale(r, c) = std::ldexp(1.0f, static_cast<int>(random.Below(24)) - 12);
    }
  }
  // An all-zero row carries 2^-126 and must not decide the tile's exponent.
  for (std::int64_t c = 0; c < cols; ++c) {
    src.code(5, c) = 0;
    src.dequant_scale(5, c) = 0x1p-126f;
  }
  Quantised dst(cols, rows, DType::kE4M3, Tiling::kRow128);
  std::vector<StatSlot> stats(4);
  cpu->transpose_scaled(
      cpu.context(),
      {.src = src.view(), .groups = groups.view(), .dst = dst.view(), .stats = stats.data()});
  std::vector<std::uint64_t> flushed(4, 0);
  for (std::int64_t tile_row = 0; tile_row < rows; tile_row += kTile) {
    for (std::int64_t c = 0; c < cols; ++c) {
      double largest = 0x1p-126;
      for (std::int64_t r = tile_row; r < tile_row + kTile; ++r) {
        if (groups.GroupOf(r) >= 0) {
          largest = std::max(largest, static_cast<double>(src.dequant_scale(r, c)));
        }
      }
      ASSERT_EQ(dst.dequant_scale(c, tile_row), largest);
      for (std::int64_t r = tile_row; r < tile_row + kTile; ++r) {
        const std::int64_t g = groups.GroupOf(r);
        const std::uint8_t before = src.code(r, c);
        const std::uint8_t after = dst.code(c, r);
        if (g < 0) {
          ASSERT_EQ(after, 0) << "padding";
        } else if ((before & 0x7F) == 0x7F) {
          ASSERT_EQ(after, before);
        } else {
          const double exact = std::fabs(E4M3Decode(before)) * (src.dequant_scale(r, c) / largest);
          ASSERT_EQ(after & 0x7F, NearestMagnitude(exact)) << r << " " << c;
          ASSERT_EQ(after & 0x80, before & 0x80);
          flushed[Index(g)] += (before & 0x7F) != 0 && (after & 0x7F) == 0 ? 1u : 0u;
        }
      }
    }
  }
  for (std::int64_t g = 0; g < groups.count(); ++g) {
    EXPECT_EQ(stats[Index(g)].transpose_flushed, flushed[Index(g)]);
  }
  EXPECT_GT(flushed[0], 0u) << "the case must reach the flush";
}

INSTANTIATE_TEST_SUITE_P(Layouts, TransposeScaled,
                         testing::Values(ScaleOrder::kTileMajor, ScaleOrder::kRowMajor));

// fp8_flow rounds once: what wgrad reads column-wise is bit for bit what fprop read row-wise, as
// long as the column's code is a normal number. 8, the smallest normal code, may be a rounded one:
// 7.5 subnormal steps are a tie, which goes up to it. It and the subnormals are half a step off at
// most. Quantising the dequantised rows again does the same only with powers of two (quantize_test,
// DoubleQuantisation).
class FlowColumns : public OnTarget {};

TEST_P(FlowColumns, HoldTheVeryValuesOfTheRows) {
  Random random(17);
  CpuBackend cpu;
  const std::int64_t cols = 256;
  const Groups groups({200, 129});
  ASSERT_EQ(groups.padded_rows(), 512);
  std::vector<float> values = random.Normals(512 * cols);
  for (std::int64_t r = 0; r < 512; ++r) {  // rows of different sizes, as tokens are
    for (std::int64_t c = 0; c < cols; ++c) {
      values[Index(r * cols + c)] *= std::ldexp(1.0f, static_cast<int>(r % 5));
    }
  }
  Stored x(values, DType::kBF16);
  Quantised row(512, cols, DType::kE4M3, Tiling::kRow128);
  Quantised absent;
  cpu->quantize_rows(cpu.context(), {.x = x.data(),
                                     .x_dtype = DType::kBF16,
                                     .cols = cols,
                                     .groups = groups.view(),
                                     .rule = {.pow2 = true},
                                     .row = row.view(),
                                     .col = absent.view(),
                                     .stats = nullptr});
  Quantised col(cols, 512, DType::kE4M3, Tiling::kRow128);
  cpu->transpose_scaled(
      cpu.context(),
      {.src = row.view(), .groups = groups.view(), .dst = col.view(), .stats = nullptr});
  std::int64_t normal = 0;
  std::int64_t rounded_to_normal = 0;
  for (std::int64_t r = 0; r < 512; ++r) {
    for (std::int64_t c = 0; c < cols; ++c) {
      const int magnitude = col.code(c, r) & 0x7F;
      if (magnitude > 8) {
        ++normal;
        ASSERT_EQ(col.Value(c, r), row.Value(r, c)) << r << " " << c;
      } else {
        // 2^-9 is the step of E4M3's subnormals.
        ASSERT_LE(std::fabs(col.Value(c, r) - row.Value(r, c)), 0x1p-10 * col.dequant_scale(c, r))
            << r << " " << c;
        rounded_to_normal += magnitude == 8 && col.Value(c, r) != row.Value(r, c) ? 1 : 0;
      }
    }
  }
  EXPECT_GT(normal, (200 + 129) * cols * 9 / 10);
  EXPECT_GT(rounded_to_normal, 0) << "the case must reach the exception";
}

INSTANTIATE_TEST_SUITE_P(Machine, FlowColumns, testing::ValuesIn(Targets()), TargetName);

TEST(TransposeScaledDeathTest, RefusesScalesThatAreNoPowersOfTwo) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";  // OpenBLAS keeps a thread
  CpuBackend cpu;
  const Groups groups({128});
  Quantised src(128, 128, DType::kE4M3, Tiling::kRow128);
  for (std::int64_t r = 0; r < 128; ++r) {
    src.dequant_scale(r, 0) = 0.3f;
  }
  Quantised dst(128, 128, DType::kE4M3, Tiling::kRow128);
  EXPECT_DEATH(
      cpu->transpose_scaled(
          cpu.context(),
          {.src = src.view(), .groups = groups.view(), .dst = dst.view(), .stats = nullptr}),
      "power-of-two");
}

}  // namespace
}  // namespace octavo
