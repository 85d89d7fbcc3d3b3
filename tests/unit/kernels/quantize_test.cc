// Quantisation against a plain re-statement of NUMERICS 2, 7 and 9, element by element in FP64.
#include <gtest/gtest.h>

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "kernels/formats/fp8.h"
#include "tests/unit/kernels/quantised.h"
#include "tests/unit/kernels/values.h"

namespace octavo {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

// What one group of elements becomes, and the statistics it adds.
struct Expected {
  std::vector<std::uint8_t> codes;
  float dequant_scale = 0;
};

// NUMERICS 2 and 7 as written there.
float DefinedQuantScale(const std::vector<float>& x, const QuantizeRule& rule) {
  float amax = 0;
  for (const float v : x) {
    if (std::isfinite(v)) {
      amax = std::max(amax, std::fabs(v));
    }
  }
  const double format_max = rule.format == DType::kE4M3 ? 448.0 : 57344.0;
  if (rule.tiling == Tiling::kRow32) {
    int exponent = -126;
    while (exponent < 127 && std::ldexp(format_max, exponent) < amax) {
      ++exponent;
    }
    return static_cast<float>(std::ldexp(1.0, -exponent));
  }
  if (amax == 0) {
    return rule.pow2 ? 0x1p126f : 1.0f;
  }
  // Decided in FP64, so that the FP32 division below cannot overflow.
  const double limit = 0x1p126;
  if (format_max / amax >= limit) {
    return 0x1p126f;
  }
  const float quant_scale = static_cast<float>(format_max) / amax;
  return rule.pow2 ? std::ldexp(1.0f, std::ilogb(quant_scale)) : quant_scale;
}

Expected Quantise(const std::vector<float>& x, const QuantizeRule& rule, StatSlot* stats) {
  const float quant_scale = DefinedQuantScale(x, rule);
  Expected expected;
  expected.dequant_scale = 1.0f / quant_scale;
  float amax = 0;
  for (const float v : x) {
    const float scaled = v * quant_scale;
    expected.codes.push_back(Fp8Encode(rule.format, scaled));
    if (std::isfinite(v)) {
      amax = std::max(amax, std::fabs(v));
    }
    if (stats != nullptr) {
      ++stats->elements;
      stats->nonfinite += std::isfinite(v) ? 0u : 1u;
      stats->nonzero += v != 0 ? 1u : 0u;
      stats->flushed += v != 0 && (expected.codes.back() & 0x7F) == 0 ? 1u : 0u;
      const float size = std::fabs(scaled);
      stats->saturated +=
          (rule.format == DType::kE4M3 ? size > 464.0f : size >= 61440.0f) ? 1u : 0u;
    }
  }
  if (stats != nullptr && amax > 0) {
    stats->amax = std::max(stats->amax, amax);
    stats->dequant_scale_min = stats->dequant_scale_min == 0
                                   ? expected.dequant_scale
                                   : std::min(stats->dequant_scale_min, expected.dequant_scale);
    stats->dequant_scale_max = std::max(stats->dequant_scale_max, expected.dequant_scale);
  }
  return expected;
}

void ExpectSame(const StatSlot& got, const StatSlot& want) {
  EXPECT_EQ(got.amax, want.amax);
  EXPECT_EQ(got.dequant_scale_min, want.dequant_scale_min);
  EXPECT_EQ(got.dequant_scale_max, want.dequant_scale_max);
  EXPECT_EQ(got.elements, want.elements);
  EXPECT_EQ(got.nonfinite, want.nonfinite);
  EXPECT_EQ(got.saturated, want.saturated);
  EXPECT_EQ(got.nonzero, want.nonzero);
  EXPECT_EQ(got.flushed, want.flushed);
}

// Values over many magnitudes, with everything that is awkward: zeros of both signs, subnormals,
// NaN, infinities, an all-zero row, a row without a finite element, rows near both ends of FP32.
std::vector<float> AwkwardValues(std::int64_t rows, std::int64_t cols, Random& random) {
  std::vector<float> x = random.Normals(rows * cols);
  for (std::int64_t r = 0; r < rows; ++r) {
    const float factor = std::ldexp(1.0f, static_cast<int>(random.Below(40)) - 20);
    for (std::int64_t c = 0; c < cols; ++c) {
      float& v = x[Index(r * cols + c)];
      v *= factor;
      switch (random.Below(40)) {
        case 0:
          v = 0;
          break;
        case 1:
          v = -0.0f;
          break;
        case 2:
          v *= 1e-7f;
          break;  // flushed
        case 3:
          v = r % 5 == 0 ? kNan : v;
          break;
        case 4:
          v = r % 7 == 0 ? -kInf : v;
          break;
        default:
          break;
      }
      v = r == 3 ? 0.0f : v;
      v = r == 4 ? (c % 2 == 0 ? kNan : kInf) : v;
      v = r == 6 ? std::ldexp(v, -120) : v;  // meets the limit of Q
      v = r == 8 ? std::copysign(FLT_MAX, v) : v;
    }
  }
  return x;
}

// x dtype, format, tiling, pow2, outputs (1 row, 2 column, 3 both).
using RowsCase = std::tuple<DType, DType, Tiling, bool, int>;
class QuantizeRows : public testing::TestWithParam<RowsCase> {};

TEST_P(QuantizeRows, EqualsTheDefinition) {
  const auto [x_dtype, format, tiling, pow2, outputs] = GetParam();
  Random random(5);
  CpuBackend cpu;
  const Groups groups({130, 0, 1, 96});
  const std::int64_t rows = groups.padded_rows();
  const std::int64_t cols = tiling == Tiling::kRow32 ? 288 : 256;
  const std::int64_t tile = tiling == Tiling::kRow32 ? 32 : 128;
  Stored x(AwkwardValues(rows, cols, random), x_dtype);
  const QuantizeRule rule = {.format = format, .tiling = tiling, .pow2 = pow2};
  const float empty_scale = pow2 || tiling == Tiling::kRow32 ? 0x1p-126f : 1.0f;
  Quantised row = (outputs & 1) != 0 ? Quantised(rows, cols, format, tiling) : Quantised();
  Quantised col = (outputs & 2) != 0 ? Quantised(cols, rows, format, tiling) : Quantised();
  std::vector<StatSlot> stats(Index(groups.count()));
  cpu->quantize_rows(cpu.context(), {.x = x.data(),
                                     .x_dtype = x_dtype,
                                     .cols = cols,
                                     .groups = groups.view(),
                                     .rule = rule,
                                     .row = row.view(),
                                     .col = col.view(),
                                     .stats = stats.data()});
  std::vector<StatSlot> row_stats(stats.size());
  std::vector<StatSlot> col_stats(stats.size());
  for (std::int64_t r = 0; (outputs & 1) != 0 && r < rows; ++r) {
    const std::int64_t g = groups.GroupOf(r);
    for (std::int64_t c = 0; c < cols; c += tile) {
      std::vector<float> values(Index(tile), 0.0f);
      for (std::int64_t i = 0; i < tile && g >= 0; ++i) {
        values[Index(i)] = x.Get(Index(r * cols + c + i));
      }
      const Expected want = Quantise(values, rule, g >= 0 ? &row_stats[Index(g)] : nullptr);
      ASSERT_EQ(row.dequant_scale(r, c), g >= 0 ? want.dequant_scale : empty_scale) << r;
      for (std::int64_t i = 0; i < tile; ++i) {
        ASSERT_EQ(row.code(r, c + i), want.codes[Index(i)]) << r << " " << c + i;
      }
    }
  }
  for (std::int64_t c = 0; (outputs & 2) != 0 && c < cols; ++c) {
    for (std::int64_t r = 0; r < rows; r += tile) {
      // Padding takes no part in amax or statistics and becomes zero codes.
      std::vector<float> values;
      std::int64_t group = -1;
      for (std::int64_t i = 0; i < tile; ++i) {
        const std::int64_t g = groups.GroupOf(r + i);
        if (g >= 0) {
          group = g;
          values.push_back(x.Get(Index((r + i) * cols + c)));
        }
      }
      const Expected want = Quantise(values, rule, group >= 0 ? &col_stats[Index(group)] : nullptr);
      ASSERT_EQ(col.dequant_scale(c, r), group >= 0 ? want.dequant_scale : empty_scale);
      for (std::int64_t i = 0; i < tile; ++i) {
        ASSERT_EQ(col.code(c, r + i), Index(i) < values.size() ? want.codes[Index(i)] : 0)
            << c << " " << r + i;
      }
    }
  }
  for (std::size_t g = 0; g < stats.size(); ++g) {
    ExpectSame(stats[g], (outputs & 1) != 0 ? row_stats[g] : col_stats[g]);
  }
}

INSTANTIATE_TEST_SUITE_P(All, QuantizeRows,
                         testing::Combine(testing::Values(DType::kBF16, DType::kF32),
                                          testing::Values(DType::kE4M3, DType::kE5M2),
                                          testing::Values(Tiling::kRow128, Tiling::kRow32),
                                          testing::Bool(), testing::Values(1, 2, 3)));

TEST(QuantizeRowsDense, AnyNumberOfRowsPadsTheColumnCopyOnly) {
  Random random(6);
  CpuBackend cpu;
  for (const std::int64_t rows : {1, 100, 128, 200}) {
    const std::int64_t cols = 128;
    const Groups groups = Groups::Dense(rows);
    Stored x(random.Normals(rows * cols), DType::kBF16);
    Quantised row(rows, cols, DType::kE4M3, Tiling::kRow128);
    Quantised col(cols, RoundUp(rows, 128), DType::kE4M3, Tiling::kRow128);
    cpu->quantize_rows(cpu.context(), {.x = x.data(),
                                       .x_dtype = DType::kBF16,
                                       .cols = cols,
                                       .groups = groups.view(),
                                       .rule = {.pow2 = true},
                                       .row = row.view(),
                                       .col = col.view(),
                                       .stats = nullptr});
    for (std::int64_t c = 0; c < cols; ++c) {
      for (std::int64_t r = 0; r < RoundUp(rows, 128); ++r) {
        if (r >= rows) {
          ASSERT_EQ(col.code(c, r), 0);
          continue;
        }
        // Half of the last mantissa place, or half of the smallest step of the tile.
        const double value = x[Index(r * cols + c)];
        ASSERT_LE(std::fabs(col.Value(c, r) - value),
                  std::max(std::fabs(value) * 0x1p-4, col.dequant_scale(c, r) * 0x1p-10));
        ASSERT_LE(std::fabs(row.Value(r, c) - value),
                  std::max(std::fabs(value) * 0x1p-4, row.dequant_scale(r, c) * 0x1p-10));
      }
    }
  }
}

// NUMERICS 4: with powers of two in both directions quantising twice changes nothing where both
// codes are normal numbers; with FP32 scales it does.
TEST(DoubleQuantisation, ErrorIsZeroForPowersOfTwoInTheNormalRange) {
  Random random(7);
  CpuBackend cpu;
  const std::int64_t rows = 256;
  const std::int64_t cols = 256;
  const Groups groups({rows});
  Stored x(random.Normals(rows * cols), DType::kBF16);
  for (const bool pow2 : {true, false}) {
    const auto quantise = [&](const Stored& source, Quantised* row, Quantised* col) {
      Stored copy = source;
      cpu->quantize_rows(cpu.context(), {.x = copy.data(),
                                         .x_dtype = source.dtype(),
                                         .cols = cols,
                                         .groups = groups.view(),
                                         .rule = {.pow2 = pow2},
                                         .row = row->view(),
                                         .col = col->view(),
                                         .stats = nullptr});
    };
    Quantised row(rows, cols, DType::kE4M3, Tiling::kRow128);
    Quantised direct(cols, rows, DType::kE4M3, Tiling::kRow128);
    quantise(x, &row, &direct);
    Stored restored(Index(rows * cols), 0.0f, DType::kF32);
    cpu->dequantize(cpu.context(), {.src = row.view(),
                                    .groups = groups.view(),
                                    .dst = restored.data(),
                                    .dst_dtype = DType::kF32});
    Quantised absent;
    Quantised twice(cols, rows, DType::kE4M3, Tiling::kRow128);
    quantise(restored, &absent, &twice);
    std::int64_t compared = 0;
    std::int64_t different = 0;
    for (std::int64_t r = 0; r < rows; ++r) {
      for (std::int64_t c = 0; c < cols; ++c) {
        if ((row.code(r, c) & 0x7F) >= 8 && (direct.code(c, r) & 0x7F) >= 8) {
          ++compared;
          different += direct.Value(c, r) != twice.Value(c, r) ? 1 : 0;
        }
      }
    }
    EXPECT_GT(compared, rows * cols * 9 / 10);
    if (pow2) {
      EXPECT_EQ(different, 0);
    } else {
      EXPECT_GT(different, compared / 10) << "FP32 scales must show the error that pow2 avoids";
    }
  }
}

TEST(QuantizeBlocks, EqualsTheDefinitionAndTransposes) {
  Random random(8);
  CpuBackend cpu;
  const std::int64_t groups = 2;
  const std::int64_t n = 256;
  const std::int64_t k = 384;
  for (const bool pow2 : {false, true}) {
    std::vector<float> w = AwkwardValues(groups * n, k, random);
    for (std::int64_t r = 0; r < 128; ++r) {  // one all-zero block
      std::fill_n(w.begin() + (n + r) * k, 128, 0.0f);
    }
    const QuantizeRule rule = {.tiling = Tiling::kBlock128, .pow2 = pow2};
    Quantised row(groups * n, k, DType::kE4M3, Tiling::kBlock128);
    Quantised col(groups * k, n, DType::kE4M3, Tiling::kBlock128);
    std::vector<StatSlot> stats(2);
    std::vector<StatSlot> want_stats(2);
    cpu->quantize_blocks(cpu.context(), {.w = w.data(),
                                         .groups = groups,
                                         .n = n,
                                         .k = k,
                                         .rule = rule,
                                         .row = row.view(),
                                         .col = col.view(),
                                         .stats = stats.data()});
    for (std::int64_t r = 0; r < groups * n; r += 128) {
      for (std::int64_t c = 0; c < k; c += 128) {
        std::vector<float> values;
        for (std::int64_t i = 0; i < 128 * 128; ++i) {
          values.push_back(w[Index((r + i / 128) * k + c + i % 128)]);
        }
        const std::int64_t g = r / n;
        const Expected want = Quantise(values, rule, &want_stats[Index(g)]);
        ASSERT_EQ(row.dequant_scale(r, c), want.dequant_scale);
        ASSERT_EQ(col.dequant_scale(g * k + c, r - g * n), want.dequant_scale);
        for (std::int64_t i = 0; i < 128 * 128; ++i) {
          const std::uint8_t code = want.codes[Index(i)];
          ASSERT_EQ(row.code(r + i / 128, c + i % 128), code);
          ASSERT_EQ(col.code(g * k + c + i % 128, r - g * n + i / 128), code);
        }
      }
    }
    ExpectSame(stats[0], want_stats[0]);
    ExpectSame(stats[1], want_stats[1]);
  }
}

TEST(QuantizeTensor, UsesTheGivenScalePerGroupAndCountsSaturation) {
  Random random(9);
  CpuBackend cpu;
  const Groups groups({70, 0, 128});
  const std::int64_t rows = groups.padded_rows();
  const std::int64_t cols = 80;  // a multiple of 16 is enough here
  for (const DType format : {DType::kE4M3, DType::kE5M2}) {
    Stored x(random.Normals(rows * cols, 10.0f), DType::kBF16);
    x.Set(3, kNan);
    x.Set(4, -kInf);
    x.Set(5, 0.0f);
    const float top = Fp8Max(format);
    const std::vector<float> quant_scale = {top / 20, 3.0f, top / 400};  // the first saturates
    Quantised row(rows, cols, format, Tiling::kTensor, ScaleOrder::kTileMajor, 3);
    Quantised col(cols, rows, format, Tiling::kTensor, ScaleOrder::kTileMajor, 3);
    std::vector<StatSlot> stats(3);
    cpu->quantize_tensor(cpu.context(), {.x = x.data(),
                                         .x_dtype = DType::kBF16,
                                         .cols = cols,
                                         .groups = groups.view(),
                                         .quant_scale = quant_scale.data(),
                                         .format = format,
                                         .row = row.view(),
                                         .col = col.view(),
                                         .stats = stats.data()});
    std::vector<StatSlot> want(3);
    for (std::int64_t r = 0; r < rows; ++r) {
      const std::int64_t g = groups.GroupOf(r);
      for (std::int64_t c = 0; c < cols; ++c) {
        std::uint8_t code = 0;
        if (g >= 0) {
          StatSlot& slot = want[Index(g)];
          const float v = x.Get(Index(r * cols + c));
          const float scaled = v * quant_scale[Index(g)];
          code = Fp8Encode(format, scaled);
          ++slot.elements;
          slot.nonzero += v != 0 ? 1u : 0u;
          slot.nonfinite += std::isfinite(v) ? 0u : 1u;
          slot.amax = std::isfinite(v) ? std::max(slot.amax, std::fabs(v)) : slot.amax;
          slot.flushed += v != 0 && (code & 0x7F) == 0 ? 1u : 0u;
          slot.saturated +=
              (format == DType::kE4M3 ? std::fabs(scaled) > 464 : std::fabs(scaled) >= 61440) ? 1u
                                                                                              : 0u;
          slot.dequant_scale_min = slot.dequant_scale_max = 1.0f / quant_scale[Index(g)];
        }
        ASSERT_EQ(row.code(r, c), code);
        ASSERT_EQ(col.code(c, r), code);
      }
    }
    for (std::size_t g = 0; g < 3; ++g) {
      ExpectSame(stats[g], want[g]);
      EXPECT_EQ(row.scales()[g], 1.0f / quant_scale[g]);
      EXPECT_EQ(col.scales()[g], 1.0f / quant_scale[g]);
    }
    EXPECT_GT(stats[0].saturated, 0u);
    EXPECT_EQ(stats[2].saturated, 0u);
  }
}

TEST(Amax, IgnoresNonfiniteElementsAndReportsThem) {
  CpuBackend cpu;
  const Groups groups({2, 0, 1, 3});
  const std::int64_t cols = 24;
  Stored x(Index(groups.padded_rows() * cols), 100.0f, DType::kBF16);  // padding must not count
  const auto fill = [&](std::int64_t g, float value) {
    for (std::int64_t i = 0; i < groups.rows(g) * cols; ++i) {
      x.Set(Index(groups.begin(g) * cols + i), value);
    }
  };
  fill(0, -0.5f);
  fill(2, kNan);
  fill(3, 0.0f);
  x.Set(Index(7), -2.5f);
  x.Set(Index(8), kInf);
  std::vector<float> amax(4, -1.0f);
  std::vector<std::int32_t> nonfinite(4, -1);
  cpu->amax(cpu.context(), {.x = x.data(),
                            .x_dtype = DType::kBF16,
                            .cols = cols,
                            .groups = groups.view(),
                            .amax = amax.data(),
                            .has_nonfinite = nonfinite.data()});
  EXPECT_EQ(amax, (std::vector<float>{2.5f, 0.0f, 0.0f, 0.0f}));
  EXPECT_EQ(nonfinite, (std::vector<std::int32_t>{1, 0, 1, 0}));
}

TEST(ScaleFromAmax, FollowsMarginAndPowerOfTwo) {
  CpuBackend cpu;
  const std::vector<float> amax = {0.0f, 1.0f, 3.0f, 448.0f, 1e-44f};
  for (const bool pow2 : {false, true}) {
    for (const int margin : {0, 3, 8}) {
      std::vector<float> q(amax.size());
      std::vector<float> d(amax.size());
      cpu->scale_from_amax(cpu.context(),
                           {.amax = amax.data(),
                            .n = static_cast<std::int64_t>(amax.size()),
                            .rule = {.tiling = Tiling::kTensor, .pow2 = pow2, .margin = margin},
                            .quant_scale = q.data(),
                            .dequant_scale = d.data()});
      EXPECT_EQ(q[0], pow2 ? 0x1p126f : 1.0f);
      EXPECT_EQ(q[4], 0x1p126f);
      for (std::size_t i = 0; i < amax.size(); ++i) {
        EXPECT_EQ(d[i], 1.0f / q[i]);
        if (i >= 1 && i <= 3) {
          const float plain = std::ldexp(448.0f, -margin) / amax[i];
          EXPECT_EQ(q[i], pow2 ? std::ldexp(1.0f, std::ilogb(plain)) : plain);
        }
      }
    }
  }
}

class Dequantize : public testing::TestWithParam<std::tuple<Tiling, DType, DType>> {};

TEST_P(Dequantize, MultipliesByTheRightScaleAndZeroesPadding) {
  const auto [tiling, format, dst_dtype] = GetParam();
  Random random(10);
  CpuBackend cpu;
  const Groups groups({130, 0, 20});
  const std::int64_t rows = groups.padded_rows();
  const std::int64_t cols = 256;
  Quantised src(rows, cols, format, tiling, ScaleOrder::kRowMajor, 3);
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t c = 0; c < cols; ++c) {
      src.code(r, c) = static_cast<std::uint8_t>(random.Below(0x7C) | (random.Below(2) << 7));
    }
  }
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t c = 0; c < cols; c += 32) {
      src.dequant_scale(r, c, r % 3) = 0.1f + static_cast<float>(random.Below(1000)) * 0.01f;
    }
  }
  Stored dst(Index(rows * cols), 77.0f, dst_dtype);
  cpu->dequantize(
      cpu.context(),
      {.src = src.view(), .groups = groups.view(), .dst = dst.data(), .dst_dtype = dst_dtype});
  for (std::int64_t r = 0; r < rows; ++r) {
    const std::int64_t g = groups.GroupOf(r);
    for (std::int64_t c = 0; c < cols; ++c) {
      float want = 0;
      if (g >= 0) {
        want = Fp8Decode(format, src.code(r, c)) * src.dequant_scale(r, c, g);
        want = dst_dtype == DType::kBF16 ? FloatFromBf16(Bf16FromFloat(want)) : want;
      }
      ASSERT_EQ(dst.Get(Index(r * cols + c)), want) << r << " " << c;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, Dequantize,
                         testing::Combine(testing::Values(Tiling::kTensor, Tiling::kRow128,
                                                          Tiling::kRow32, Tiling::kBlock128),
                                          testing::Values(DType::kE4M3, DType::kE5M2),
                                          testing::Values(DType::kBF16, DType::kF32)));

// NUMERICS 3, min_dequant_scale: small tiles keep D at the floor, in every way of choosing it.
TEST(MinDequantScale, HoldsInEveryQuantiser) {
  Random random(12);
  CpuBackend cpu;
  const float floor = 0.3f;  // FP32 1/(1/0.3f) is 0.3f again
  const Groups groups({128});
  Stored x(random.Normals(128 * 128), DType::kBF16);
  for (const bool pow2 : {false, true}) {
    // Q = floor(log2(1/0.3)) = 2 under power-of-two scales, so D = 0.5.
    const float want = pow2 ? 0.5f : floor;
    QuantizeRule rule = {.tiling = Tiling::kRow128, .pow2 = pow2, .min_dequant_scale = floor};
    Quantised row(128, 128, DType::kE4M3, Tiling::kRow128);
    Quantised col(128, 128, DType::kE4M3, Tiling::kRow128);
    cpu->quantize_rows(cpu.context(), {.x = x.data(),
                                       .x_dtype = DType::kBF16,
                                       .cols = 128,
                                       .groups = groups.view(),
                                       .rule = rule,
                                       .row = row.view(),
                                       .col = col.view(),
                                       .stats = nullptr});
    Quantised only_row(128, 128, DType::kE4M3, Tiling::kRow128);
    cpu->quantize_rows(cpu.context(), {.x = x.data(),
                                       .x_dtype = DType::kBF16,
                                       .cols = 128,
                                       .groups = groups.view(),
                                       .rule = rule,
                                       .row = only_row.view(),
                                       .col = {},
                                       .stats = nullptr});
    rule.tiling = Tiling::kBlock128;
    const std::vector<float> w = random.Normals(128 * 128);
    Quantised block(128, 128, DType::kE4M3, Tiling::kBlock128);
    cpu->quantize_blocks(cpu.context(), {.w = w.data(),
                                         .groups = 1,
                                         .n = 128,
                                         .k = 128,
                                         .rule = rule,
                                         .row = block.view(),
                                         .col = {},
                                         .stats = nullptr});
    rule.tiling = Tiling::kTensor;
    const float amax = 2.0f;
    float quant_scale = 0;
    float dequant_scale = 0;
    cpu->scale_from_amax(cpu.context(), {.amax = &amax,
                                         .n = 1,
                                         .rule = rule,
                                         .quant_scale = &quant_scale,
                                         .dequant_scale = &dequant_scale});
    EXPECT_EQ(dequant_scale, want);
    EXPECT_EQ(block.dequant_scale(0, 0), want);
    for (std::int64_t r = 0; r < 128; ++r) {
      EXPECT_EQ(row.dequant_scale(r, 0), want);
      EXPECT_EQ(only_row.dequant_scale(r, 0), want);
      EXPECT_EQ(col.dequant_scale(r, 0), want);
    }
  }
}

TEST(StatsReset, ClearsSlots) {
  CpuBackend cpu;
  std::vector<StatSlot> stats(3);
  stats[1].amax = 3;
  stats[2].elements = 9;
  cpu->stats_reset(cpu.context(), stats.data(), 2);
  EXPECT_EQ(stats[1].amax, 0);
  EXPECT_EQ(stats[2].elements, 9u) << "only the slots asked for";
}

}  // namespace
}  // namespace octavo
