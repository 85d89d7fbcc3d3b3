// Grouped products over ragged, empty and lopsided groups against FP64 over the same operands.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "tests/unit/kernels/quantised.h"
#include "tests/unit/kernels/values.h"

namespace octavo {
namespace {

const std::vector<std::vector<std::int64_t>> kRowCounts = {
    {130, 0, 1, 96},  // ragged, with an empty expert
    {0, 0, 300, 0},   // all to one
    {0, 0, 0, 0},     // nothing arrived
    {128, 128, 128, 128},
};

constexpr std::int64_t kN = 128;
constexpr std::int64_t kK = 256;

double Bound(DType c_dtype) { return c_dtype == DType::kF32 ? 1e-6 : 2.5e-3; }

void FillCodes(Quantised* q, Random& random, bool pow2, std::int64_t groups) {
  for (std::int64_t r = 0; r < q->rows(); ++r) {
    for (std::int64_t c = 0; c < q->cols(); ++c) {
      q->code(r, c) = static_cast<std::uint8_t>(random.Below(0x78) | (random.Below(2) << 7));
      if (c % 32 == 0) {
        const float fraction = pow2 ? 1.0f : 1.0f + static_cast<float>(random.Below(1000)) * 1e-3f;
        q->dequant_scale(r, c, (r + c) % groups) =
            std::ldexp(fraction, static_cast<int>(random.Below(8)) - 10);
      }
    }
  }
}

class GroupedBf16 : public testing::TestWithParam<std::tuple<int, bool, DType>> {};

TEST_P(GroupedBf16, ForwardEqualsFp64AndPaddingIsZero) {
  const auto [rows_case, b_k, c_dtype] = GetParam();
  Random random(41);
  CpuBackend cpu;
  const Groups groups(kRowCounts[Index(rows_case)]);
  const std::int64_t rows = groups.padded_rows();
  Stored a(random.Normals(rows * kK), DType::kBF16);
  Stored b(random.Normals(groups.count() * kN * kK), DType::kBF16);
  Stored c(Index(rows * kN), 55.0f, c_dtype);
  cpu->grouped_gemm(cpu.context(),
                    {.groups = groups.view(),
                     .n = kN,
                     .k = kK,
                     .a = {.data = a.data(), .dtype = DType::kBF16},
                     .b = {.data = b.data(), .dtype = DType::kBF16, .k_contiguous = b_k},
                     .c = c.data(),
                     .c_dtype = c_dtype,
                     .mode = Accumulate::kPromoted});
  std::vector<double> want(Index(rows * kN), 0.0);
  for (std::int64_t r = 0; r < rows; ++r) {
    const std::int64_t g = groups.GroupOf(r);
    for (std::int64_t j = 0; j < kN; ++j) {
      for (std::int64_t l = 0; l < kK && g >= 0; ++l) {
        const std::int64_t at = b_k ? j * kK + l : l * kN + j;
        want[Index(r * kN + j)] += a[Index(r * kK + l)] * b[Index(g * kN * kK + at)];
      }
      if (g < 0) {
        ASSERT_EQ(c[Index(r * kN + j)], 0.0) << "padding";
      }
    }
  }
  EXPECT_LE(RelativeError(c, want), Bound(c_dtype));
}

INSTANTIATE_TEST_SUITE_P(All, GroupedBf16,
                         testing::Combine(testing::Range(0, 4), testing::Bool(),
                                          testing::Values(DType::kF32, DType::kBF16)));

struct Tilings {
  const char* name;
  Tiling a, b, wgrad;
};
constexpr Tilings kTilings[] = {
    {"blockwise", Tiling::kRow128, Tiling::kBlock128, Tiling::kRow128},
    {"per_tensor", Tiling::kTensor, Tiling::kTensor, Tiling::kTensor},
    {"mx", Tiling::kRow32, Tiling::kRow32, Tiling::kRow32},
};
class GroupedFp8 : public testing::TestWithParam<std::tuple<int, Tilings, bool>> {};

TEST_P(GroupedFp8, ForwardEqualsFp64OverTheSameOperands) {
  const auto [rows_case, tilings, pow2] = GetParam();
  Random random(42);
  CpuBackend cpu;
  const Groups groups(kRowCounts[Index(rows_case)]);
  const std::int64_t rows = groups.padded_rows();
  Quantised a(rows, kK, DType::kE4M3, tilings.a, ScaleOrder::kTileMajor, groups.count());
  Quantised b(groups.count() * kN, kK, DType::kE4M3, tilings.b, ScaleOrder::kTileMajor,
              groups.count());
  FillCodes(&a, random, pow2, groups.count());
  FillCodes(&b, random, pow2, groups.count());
  std::vector<float> c(Index(rows * kN), 55.0f);
  cpu->grouped_gemm(cpu.context(), {.groups = groups.view(),
                                    .n = kN,
                                    .k = kK,
                                    .a = {.quant = a.view()},
                                    .b = {.quant = b.view()},
                                    .c = c.data(),
                                    .c_dtype = DType::kF32,
                                    .mode = Accumulate::kPromoted});
  std::vector<double> want(Index(rows * kN), 0.0);
  for (std::int64_t r = 0; r < rows; ++r) {
    const std::int64_t g = groups.GroupOf(r);
    for (std::int64_t l = 0; l < kK && g >= 0; ++l) {
      const double a_value = a.Value(r, l, g);
      for (std::int64_t j = 0; j < kN; ++j) {
        want[Index(r * kN + j)] += a_value * b.Value(g * kN + j, l, g);
      }
    }
  }
  EXPECT_LE(RelativeError(c, want), 1e-6);
}

TEST_P(GroupedFp8, WgradEqualsFp64OverTheSameOperands) {
  const auto [rows_case, tilings, pow2] = GetParam();
  Random random(43);
  CpuBackend cpu;
  const Groups groups(kRowCounts[Index(rows_case)]);
  const std::int64_t rows = groups.padded_rows();
  const std::int64_t m = 40;
  Quantised a(m, rows, DType::kE5M2, tilings.wgrad, ScaleOrder::kTileMajor, groups.count());
  Quantised b(kN, rows, DType::kE4M3, tilings.wgrad, ScaleOrder::kTileMajor, groups.count());
  FillCodes(&a, random, pow2, groups.count());
  FillCodes(&b, random, pow2, groups.count());
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t i = 0; i < m && groups.GroupOf(r) < 0; ++i) {
      a.code(i, r) = 0;  // padding columns are zeros by contract
    }
  }
  std::vector<float> c(Index(groups.count() * m * kN), 2.0f);
  for (const bool accumulate : {true, false}) {
    cpu->grouped_wgrad(cpu.context(), {.groups = groups.view(),
                                       .m = m,
                                       .n = kN,
                                       .a = {.quant = a.view()},
                                       .b = {.quant = b.view()},
                                       .c = c.data(),
                                       .accumulate = accumulate,
                                       .mode = Accumulate::kPromoted});
    std::vector<double> want(c.size(), accumulate ? 2.0 : 0.0);
    for (std::int64_t r = 0; r < rows; ++r) {
      const std::int64_t g = groups.GroupOf(r);
      for (std::int64_t i = 0; i < m && g >= 0; ++i) {
        for (std::int64_t j = 0; j < kN; ++j) {
          want[Index((g * m + i) * kN + j)] += a.Value(i, r, g) * b.Value(j, r, g);
        }
      }
    }
    EXPECT_LE(RelativeError(c, want), 1e-6) << (accumulate ? "accumulating" : "overwriting");
  }
}

INSTANTIATE_TEST_SUITE_P(All, GroupedFp8,
                         // Without any row there is no FP8 operand; BF16 covers that.
                         testing::Combine(testing::Values(0, 1, 3), testing::ValuesIn(kTilings),
                                          testing::Bool()),
                         [](const testing::TestParamInfo<GroupedFp8::ParamType>& test) {
                           return std::string(std::get<1>(test.param).name) + "_rows" +
                                  std::to_string(std::get<0>(test.param)) +
                                  (std::get<2>(test.param) ? "_pow2" : "_fp32");
                         });

class WgradBf16 : public testing::TestWithParam<int> {};

TEST_P(WgradBf16, EmptyGroupsWriteZerosOrAddNothing) {
  Random random(44);
  CpuBackend cpu;
  const Groups groups(kRowCounts[Index(GetParam())]);
  const std::int64_t rows = groups.padded_rows();
  const std::int64_t m = 24;
  Stored a(random.Normals(rows * m), DType::kBF16);
  Stored b(random.Normals(rows * kN), DType::kBF16);
  std::vector<float> c(Index(groups.count() * m * kN), 2.0f);
  for (const bool accumulate : {true, false}) {
    cpu->grouped_wgrad(cpu.context(), {.groups = groups.view(),
                                       .m = m,
                                       .n = kN,
                                       .a = {.data = a.data(), .dtype = DType::kBF16},
                                       .b = {.data = b.data(), .dtype = DType::kBF16},
                                       .c = c.data(),
                                       .accumulate = accumulate,
                                       .mode = Accumulate::kPromoted});
    std::vector<double> want(c.size(), accumulate ? 2.0 : 0.0);
    for (std::int64_t r = 0; r < rows; ++r) {
      const std::int64_t g = groups.GroupOf(r);
      for (std::int64_t i = 0; i < m && g >= 0; ++i) {
        for (std::int64_t j = 0; j < kN; ++j) {
          want[Index((g * m + i) * kN + j)] += a[Index(r * m + i)] * b[Index(r * kN + j)];
        }
      }
    }
    EXPECT_LE(RelativeError(c, want), 1e-6) << (accumulate ? "accumulating" : "overwriting");
    for (std::int64_t g = 0; g < groups.count(); ++g) {
      if (groups.rows(g) == 0) {
        EXPECT_EQ(c[Index(g * m * kN)], accumulate ? 2.0f : 0.0f);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Rows, WgradBf16, testing::Range(0, 4));

}  // namespace
}  // namespace octavo
