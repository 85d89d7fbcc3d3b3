// Matrix products against FP64 over the same (quantised) operands.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <functional>
#include <string>
#include <tuple>
#include <vector>

#include "kernels/cpu/blas.h"
#include "tests/unit/kernels/quantised.h"
#include "tests/unit/kernels/values.h"

namespace octavo {
namespace {

using Element = std::function<double(std::int64_t, std::int64_t)>;

struct Shape {
  std::int64_t m, n, k;
};

std::vector<double> Oracle(const Shape& shape, const Element& a, const Element& b) {
  std::vector<double> rows_a(Index(shape.m * shape.k));
  std::vector<double> rows_b(Index(shape.n * shape.k));
  for (std::int64_t l = 0; l < shape.k; ++l) {
    for (std::int64_t i = 0; i < shape.m; ++i) {
      rows_a[Index(i * shape.k + l)] = a(i, l);
    }
    for (std::int64_t j = 0; j < shape.n; ++j) {
      rows_b[Index(j * shape.k + l)] = b(j, l);
    }
  }
  std::vector<double> c(Index(shape.m * shape.n));
  for (std::int64_t i = 0; i < shape.m; ++i) {
    for (std::int64_t j = 0; j < shape.n; ++j) {
      double sum = 0;
      for (std::int64_t l = 0; l < shape.k; ++l) {
        sum += rows_a[Index(i * shape.k + l)] * rows_b[Index(j * shape.k + l)];
      }
      c[Index(i * shape.n + j)] = sum;
    }
  }
  return c;
}

// NUMERICS 12: 1e-6 in FP32; BF16 output adds one rounding (2^-9 at most, 1.7e-3 in the mean
// square).
double Bound(DType c_dtype) { return c_dtype == DType::kF32 ? 1e-6 : 2.5e-3; }

// a dtype, b dtype, A [M,K], B [N,K], C dtype.
class HighPrecision : public testing::TestWithParam<std::tuple<DType, DType, bool, bool, DType>> {};

TEST_P(HighPrecision, EqualsFp64) {
  const auto [a_dtype, b_dtype, a_k_contiguous, b_k_contiguous, c_dtype] = GetParam();
  const bool a_k = a_k_contiguous;  // clang 14 captures no structured bindings
  const bool b_k = b_k_contiguous;
  Random random(31);
  CpuBackend cpu;
  for (const Shape& s : {Shape{1, 1, 1}, Shape{33, 17, 65}, Shape{70, 130, 200}, Shape{5, 3, 0}}) {
    const std::int64_t extra = 3;  // rows are longer than their contents
    const std::int64_t lda = (a_k ? s.k : s.m) + extra;
    const std::int64_t ldb = (b_k ? s.k : s.n) + extra;
    const std::int64_t ldc = s.n + extra;
    Stored a(random.Normals((a_k ? s.m : s.k) * lda), a_dtype);
    Stored b(random.Normals((b_k ? s.n : s.k) * ldb), b_dtype);
    Stored c(Index(s.m * ldc), 3.0f, c_dtype);
    const auto want = Oracle(
        s, [&, lda, a_k](auto i, auto l) { return a[Index(a_k ? i * lda + l : l * lda + i)]; },
        [&, ldb, b_k](auto j, auto l) { return b[Index(b_k ? j * ldb + l : l * ldb + j)]; });
    for (const bool accumulate : {false, true}) {
      if (accumulate && c_dtype == DType::kBF16) {
        continue;
      }
      cpu->gemm(cpu.context(),
                {.m = s.m,
                 .n = s.n,
                 .k = s.k,
                 .a = {.data = a.data(), .dtype = a_dtype, .k_contiguous = a_k, .ld = lda},
                 .b = {.data = b.data(), .dtype = b_dtype, .k_contiguous = b_k, .ld = ldb},
                 .c = c.data(),
                 .c_dtype = c_dtype,
                 .ldc = ldc,
                 .accumulate = accumulate,
                 .mode = Accumulate::kPromoted});
      std::vector<double> got;
      std::vector<double> expected;
      for (std::int64_t i = 0; i < s.m; ++i) {
        for (std::int64_t j = 0; j < ldc; ++j) {
          if (j < s.n) {
            got.push_back(c[Index(i * ldc + j)]);
            // The second call adds to what the first one left.
            expected.push_back(want[Index(i * s.n + j)] * (accumulate ? 2 : 1));
          } else {
            ASSERT_EQ(c[Index(i * ldc + j)], 3.0) << "wrote beyond the row";
          }
        }
      }
      EXPECT_LE(RelativeError(got, expected), Bound(c_dtype)) << s.m << " " << s.n << " " << s.k;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, HighPrecision,
                         testing::Combine(testing::Values(DType::kF32, DType::kBF16),
                                          testing::Values(DType::kF32, DType::kBF16),
                                          testing::Bool(), testing::Bool(),
                                          testing::Values(DType::kF32, DType::kBF16)));

TEST(Gemm, PanelsJoinWithoutSeams) {
  Random random(32);
  CpuBackend cpu;
  const Shape s = {1100, 4200, 8};  // more than one panel both ways
  Stored a(random.Normals(s.m * s.k), DType::kBF16);
  Stored b(random.Normals(s.n * s.k), DType::kBF16);
  for (const DType c_dtype : {DType::kF32, DType::kBF16}) {
    Stored c(Index(s.m * s.n), 0.0f, c_dtype);
    cpu->gemm(cpu.context(), {.m = s.m,
                              .n = s.n,
                              .k = s.k,
                              .a = {.data = a.data(), .dtype = DType::kBF16},
                              .b = {.data = b.data(), .dtype = DType::kBF16},
                              .c = c.data(),
                              .c_dtype = c_dtype,
                              .ldc = 0,
                              .accumulate = false,
                              .mode = Accumulate::kPromoted});
    const auto want = Oracle(
        s, [&](auto i, auto l) { return a[Index(i * s.k + l)]; },
        [&](auto j, auto l) { return b[Index(j * s.k + l)]; });
    EXPECT_LE(RelativeError(c, want), Bound(c_dtype));
  }
}

// Random codes without NaN, and dequant_scales around 2^-8.
void Fill(Quantised* q, DType format, bool pow2, Random& random) {
  for (std::int64_t r = 0; r < q->rows(); ++r) {
    for (std::int64_t c = 0; c < q->cols(); ++c) {
      const auto top = format == DType::kE4M3 ? 0x7F : 0x7C;
      q->code(r, c) = static_cast<std::uint8_t>(random.Below(top) | (random.Below(2) << 7));
    }
    for (std::int64_t c = 0; c < q->cols(); c += 32) {
      const int exponent = static_cast<int>(random.Below(12)) - 14;
      const float fraction = pow2 ? 1.0f : 1.0f + static_cast<float>(random.Below(1000)) * 1e-3f;
      q->dequant_scale(r, c) = std::ldexp(fraction, exponent);
    }
  }
}

struct Fp8Case {
  const char* name;
  Tiling a, b;
  DType a_format, b_format;
};
constexpr Fp8Case kFp8Cases[] = {
    {"fprop_blockwise", Tiling::kRow128, Tiling::kBlock128, DType::kE4M3, DType::kE4M3},
    {"wgrad_blockwise", Tiling::kRow128, Tiling::kRow128, DType::kE5M2, DType::kE4M3},
    {"per_tensor", Tiling::kTensor, Tiling::kTensor, DType::kE5M2, DType::kE4M3},
    {"mx", Tiling::kRow32, Tiling::kRow32, DType::kE4M3, DType::kE4M3},
};

class Fp8Gemm : public testing::TestWithParam<std::tuple<Fp8Case, bool, DType>> {};

TEST_P(Fp8Gemm, EqualsFp64OverTheSameOperands) {
  const auto [test, pow2, c_dtype] = GetParam();
  Random random(33);
  CpuBackend cpu;
  // Ragged K ends inside a tile, as the last rows of a wgrad do.
  for (const Shape& s : {Shape{300, 640, 512}, Shape{1, 128, 128}, Shape{40, 128, 200}}) {
    Quantised a(s.m, s.k, test.a_format, test.a);
    Quantised b(s.n, s.k, test.b_format, test.b);
    Fill(&a, test.a_format, pow2, random);
    Fill(&b, test.b_format, pow2, random);
    const auto want = Oracle(
        s, [&](auto i, auto l) { return a.Value(i, l); },
        [&](auto j, auto l) { return b.Value(j, l); });
    Stored c(Index(s.m * s.n), 9.0f, c_dtype);
    for (const bool accumulate : {false, true}) {
      if (accumulate && c_dtype == DType::kBF16) {
        continue;
      }
      cpu->gemm(cpu.context(), {.m = s.m,
                                .n = s.n,
                                .k = s.k,
                                .a = {.quant = a.view()},
                                .b = {.quant = b.view()},
                                .c = c.data(),
                                .c_dtype = c_dtype,
                                .ldc = 0,
                                .accumulate = accumulate,
                                .mode = Accumulate::kFast});
      std::vector<double> expected = want;
      for (double& v : expected) {
        v *= accumulate ? 2 : 1;
      }
      EXPECT_LE(RelativeError(c, expected), Bound(c_dtype)) << s.m << " " << s.n << " " << s.k;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, Fp8Gemm,
                         testing::Combine(testing::ValuesIn(kFp8Cases), testing::Bool(),
                                          testing::Values(DType::kF32, DType::kBF16)),
                         [](const testing::TestParamInfo<Fp8Gemm::ParamType>& test) {
                           return std::string(std::get<0>(test.param).name) +
                                  (std::get<1>(test.param) ? "_pow2_" : "_fp32_") +
                                  Name(std::get<2>(test.param));
                         });

// The product D_A·D_B alone would underflow for 2^-75 · 2^-75 (NUMERICS 2), and dequantised values
// would overflow at D = 2^120.
TEST(Fp8Gemm, ExtremeScalesAreAppliedOneAfterTheOther) {
  Random random(34);
  CpuBackend cpu;
  const Shape s = {16, 16, 128};
  for (const auto& [a_exponent, b_exponent] :
       {std::pair{-120, 100}, std::pair{-126, 0}, std::pair{100, -126}, std::pair{-75, -75},
        std::pair{-120, 120}}) {
    Quantised a(s.m, s.k, DType::kE4M3, Tiling::kRow128);
    Quantised b(s.n, s.k, DType::kE4M3, Tiling::kRow128);
    Fill(&a, DType::kE4M3, true, random);
    Fill(&b, DType::kE4M3, true, random);
    const float fraction = a_exponent + b_exponent == -150 ? 1.5f : 1.0f;
    for (std::int64_t r = 0; r < s.m; ++r) {
      a.dequant_scale(r, 0) = std::ldexp(fraction, a_exponent);
      b.dequant_scale(r, 0) = std::ldexp(fraction, b_exponent);
      // The least of these sums is a normal FP32 number only when every code is the largest.
      for (std::int64_t c = 0; a_exponent + b_exponent == -150 && c < s.k; ++c) {
        a.code(r, c) = b.code(r, c) = 0x7E;
      }
    }
    const auto want = Oracle(
        s, [&](auto i, auto l) { return a.Value(i, l); },
        [&](auto j, auto l) { return b.Value(j, l); });
    std::vector<float> c(Index(s.m * s.n));
    cpu->gemm(cpu.context(), {.m = s.m,
                              .n = s.n,
                              .k = s.k,
                              .a = {.quant = a.view()},
                              .b = {.quant = b.view()},
                              .c = c.data(),
                              .c_dtype = DType::kF32,
                              .ldc = 0,
                              .accumulate = false,
                              .mode = Accumulate::kPromoted});
    EXPECT_LE(RelativeError(c, want), 1e-6) << a_exponent << " " << b_exponent;
  }
}

TEST(Fp8Gemm, PanelsTakeTheirOwnScales) {
  Random random(36);
  CpuBackend cpu;
  for (const Shape& s : {Shape{1100, 64, 128}, Shape{16, 4224, 128}}) {
    for (const bool pow2 : {false, true}) {
      Quantised a(s.m, s.k, DType::kE4M3, Tiling::kRow128);
      Quantised b(s.n, s.k, DType::kE4M3, Tiling::kRow128);
      Fill(&a, DType::kE4M3, pow2, random);
      Fill(&b, DType::kE4M3, pow2, random);
      const auto want = Oracle(
          s, [&](auto i, auto l) { return a.Value(i, l); },
          [&](auto j, auto l) { return b.Value(j, l); });
      std::vector<float> c(Index(s.m * s.n));
      cpu->gemm(cpu.context(), {.m = s.m,
                                .n = s.n,
                                .k = s.k,
                                .a = {.quant = a.view()},
                                .b = {.quant = b.view()},
                                .c = c.data(),
                                .c_dtype = DType::kF32,
                                .ldc = 0,
                                .accumulate = false,
                                .mode = Accumulate::kPromoted});
      EXPECT_LE(RelativeError(c, want), 1e-6) << s.m << " " << s.n;
    }
  }
}

TEST(Fp8Gemm, AllZeroRowsWithTheSmallestScaleChangeNothing) {
  Random random(35);
  CpuBackend cpu;
  const Shape s = {64, 128, 256};
  Quantised a(s.m, s.k, DType::kE4M3, Tiling::kRow128);
  Quantised b(s.n, s.k, DType::kE4M3, Tiling::kBlock128);
  Fill(&a, DType::kE4M3, true, random);
  Fill(&b, DType::kE4M3, true, random);
  for (std::int64_t c = 0; c < s.k; ++c) {
    a.code(3, c) = 0;
    a.dequant_scale(3, c) = 0x1p-126f;
  }
  const auto want = Oracle(
      s, [&](auto i, auto l) { return a.Value(i, l); },
      [&](auto j, auto l) { return b.Value(j, l); });
  std::vector<float> c(Index(s.m * s.n));
  cpu->gemm(cpu.context(), {.m = s.m,
                            .n = s.n,
                            .k = s.k,
                            .a = {.quant = a.view()},
                            .b = {.quant = b.view()},
                            .c = c.data(),
                            .c_dtype = DType::kF32,
                            .ldc = 0,
                            .accumulate = false,
                            .mode = Accumulate::kPromoted});
  EXPECT_LE(RelativeError(c, want), 1e-6);
  for (std::int64_t j = 0; j < s.n; ++j) {
    EXPECT_EQ(c[Index(3 * s.n + j)], 0.0f);
  }
}

TEST(Gemm, NonfiniteInputsReachTheOutput) {
  CpuBackend cpu;
  std::vector<float> a = {1, 2, NAN, 4};
  std::vector<float> b = {1, 0, 0, 1};
  std::vector<float> c(4, 0.0f);
  cpu->gemm(cpu.context(), {.m = 2,
                            .n = 2,
                            .k = 2,
                            .a = {.data = a.data()},
                            .b = {.data = b.data()},
                            .c = c.data(),
                            .c_dtype = DType::kF32,
                            .ldc = 0,
                            .accumulate = false,
                            .mode = Accumulate::kPromoted});
  EXPECT_EQ(c[0], 1.0f);
  EXPECT_TRUE(std::isnan(c[2]));
}

TEST(Blas, CoreTypeIsNamed) { EXPECT_GT(std::string(BlasCoreType()).size(), 2u); }

// A choice by measured speed differed between ranks of one gang on a busy machine.
TEST(Blas, TheFirstCorrectCoreTypeIsPickedWhateverTheLoad) {
  const BlasProbe best = {.core_type = "SKYLAKEX", .correct = true, .gigaflops = 30};
  const BlasProbe next = {.core_type = "HASWELL", .correct = true, .gigaflops = 100};
  EXPECT_EQ(PickBlasCoreType({best, next}), "SKYLAKEX");
  EXPECT_EQ(PickBlasCoreType({{.core_type = "SKYLAKEX", .correct = true}, next}), "SKYLAKEX")
      << "not measured is not slow";
  EXPECT_EQ(PickBlasCoreType({{.core_type = "SKYLAKEX", .correct = false, .gigaflops = 900}, next}),
            "HASWELL");
  EXPECT_EQ(PickBlasCoreType({{.core_type = "SKYLAKEX", .correct = true, .gigaflops = 25}, next}),
            "HASWELL")
      << "four times slower";
  EXPECT_EQ(PickBlasCoreType({{.core_type = "SKYLAKEX"}, {.core_type = ""}}), "");
}

}  // namespace
}  // namespace octavo
