// SwiGLU × p against FP64, its gradients against finite differences of that FP64 function, and the
// fused casts against quantising the FP32 result.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <tuple>
#include <vector>

#include "tests/unit/kernels/quantised.h"
#include "tests/unit/kernels/values.h"

namespace octavo {
namespace {

double Silu(double g) { return g / (1 + std::exp(-g)); }
double Act(double gate, double up, double p) { return Silu(gate) * up * p; }

// Operands on ragged groups; padding rows hold NaN, which must not reach anything.
struct Problem {
  Groups groups{{130, 0, 3}};
  std::int64_t f;
  DType dtype;
  Stored gate_up, d_act;
  std::vector<float> weight;

  Problem(std::int64_t f_in, DType dtype_in, Random& random)
      : f(f_in),
        dtype(dtype_in),
        gate_up(random.Normals(groups.padded_rows() * 2 * f_in, 2.0f), dtype_in),
        d_act(random.Normals(groups.padded_rows() * f_in), dtype_in),
        weight(random.Normals(groups.padded_rows(), 0.3f)) {
    weight[2] = 0;  // dweight must not need a division by p
    gate_up.Set(0, 200.0f);
    gate_up.Set(1, -200.0f);
    gate_up.Set(2, 0.0f);
    for (std::int64_t r = 0; r < groups.padded_rows(); ++r) {
      for (std::int64_t c = 0; c < 2 * f && groups.GroupOf(r) < 0; ++c) {
        gate_up.Set(Index(r * 2 * f + c), NAN);
        d_act.Set(Index(r * f + c % f), NAN);
      }
    }
  }
  double gate(std::int64_t r, std::int64_t c) const { return gate_up[Index(r * 2 * f + c)]; }
  double up(std::int64_t r, std::int64_t c) const { return gate_up[Index(r * 2 * f + f + c)]; }
};

// One rounding to BF16 is off by 2^-8 at most, and the few large gates dominate the norm.
double Bound(DType dtype) { return dtype == DType::kBF16 ? 0x1p-8 : Tolerance(dtype); }

class Swiglu : public testing::TestWithParam<std::tuple<DType, bool>> {};

TEST_P(Swiglu, ForwardEqualsFp64) {
  const auto [dtype, with_weight] = GetParam();
  Random random(61);
  CpuBackend cpu;
  for (const std::int64_t f : {40, 256}) {
    Problem x(f, dtype, random);
    const std::int64_t rows = x.groups.padded_rows();
    Stored act(Index(rows * f), 9.0f, dtype);
    cpu->swiglu_forward(cpu.context(), {.groups = x.groups.view(),
                                        .f = f,
                                        .gate_up = x.gate_up.data(),
                                        .dtype = dtype,
                                        .weight = with_weight ? x.weight.data() : nullptr,
                                        .act = act.data(),
                                        .rule = {},
                                        .quant = {},
                                        .quant_col = {},
                                        .stats = nullptr});
    std::vector<double> want(Index(rows * f), 0.0);
    for (std::int64_t r = 0; r < rows; ++r) {
      for (std::int64_t c = 0; c < f; ++c) {
        if (x.groups.GroupOf(r) >= 0) {
          want[Index(r * f + c)] =
              Act(x.gate(r, c), x.up(r, c), with_weight ? x.weight[Index(r)] : 1.0);
        } else {
          ASSERT_EQ(act[Index(r * f + c)], 0.0) << "padding";
        }
      }
    }
    EXPECT_LE(RelativeError(act, want), Bound(dtype));
  }
}

// Central differences of the FP64 function, step 1e-5: their own error is near 1e-10 of the slope.
TEST_P(Swiglu, BackwardEqualsFiniteDifferences) {
  const auto [dtype, with_weight] = GetParam();
  Random random(62);
  CpuBackend cpu;
  for (const std::int64_t f : {40, 256}) {
    Problem x(f, dtype, random);
    const std::int64_t rows = x.groups.padded_rows();
    Stored d_gate_up(Index(rows * 2 * f), 9.0f, dtype);
    std::vector<float> dweight(Index(rows), 9.0f);
    cpu->swiglu_backward(cpu.context(), {.groups = x.groups.view(),
                                         .f = f,
                                         .gate_up = x.gate_up.data(),
                                         .d_act = x.d_act.data(),
                                         .dtype = dtype,
                                         .weight = with_weight ? x.weight.data() : nullptr,
                                         .d_gate_up = d_gate_up.data(),
                                         .rule = {},
                                         .quant = {},
                                         .quant_col = {},
                                         .stats = nullptr,
                                         .dweight = dweight.data()});
    std::vector<double> want(Index(rows * 2 * f), 0.0);
    std::vector<double> want_dweight(Index(rows), 0.0);
    const double h = 1e-5;
    for (std::int64_t r = 0; r < rows; ++r) {
      for (std::int64_t c = 0; c < f; ++c) {
        if (x.groups.GroupOf(r) < 0) {
          ASSERT_EQ(d_gate_up[Index(r * 2 * f + c)], 0.0) << "padding";
          ASSERT_EQ(d_gate_up[Index(r * 2 * f + f + c)], 0.0) << "padding";
          continue;
        }
        const double g = x.gate(r, c);
        const double u = x.up(r, c);
        const double p = with_weight ? x.weight[Index(r)] : 1.0;
        const double d = x.d_act[Index(r * f + c)];
        want[Index(r * 2 * f + c)] = d * (Act(g + h, u, p) - Act(g - h, u, p)) / (2 * h);
        want[Index(r * 2 * f + f + c)] = d * (Act(g, u + h, p) - Act(g, u - h, p)) / (2 * h);
        want_dweight[Index(r)] += d * (Act(g, u, p + h) - Act(g, u, p - h)) / (2 * h);
      }
    }
    EXPECT_LE(RelativeError(d_gate_up, want), Bound(dtype));
    EXPECT_LE(RelativeError(dweight, want_dweight), 2e-6);
  }
}

INSTANTIATE_TEST_SUITE_P(All, Swiglu,
                         testing::Combine(testing::Values(DType::kF32, DType::kBF16),
                                          testing::Bool()));

// The fused cast equals quantising the FP32 result, codes, scales, padding and statistics.
class SwigluQuantised : public testing::TestWithParam<std::tuple<Tiling, bool, int>> {};

void ExpectSameTensor(Quantised& got, Quantised& want) {
  EXPECT_EQ(got.codes(), want.codes());
  EXPECT_EQ(got.scales(), want.scales());
}

void ExpectSameStats(const std::vector<StatSlot>& got, const std::vector<StatSlot>& want) {
  for (std::size_t g = 0; g < want.size(); ++g) {
    EXPECT_EQ(got[g].amax, want[g].amax);
    EXPECT_EQ(got[g].elements, want[g].elements);
    EXPECT_EQ(got[g].nonzero, want[g].nonzero);
    EXPECT_EQ(got[g].flushed, want[g].flushed);
    EXPECT_EQ(got[g].dequant_scale_min, want[g].dequant_scale_min);
    EXPECT_EQ(got[g].dequant_scale_max, want[g].dequant_scale_max);
  }
}

TEST_P(SwigluQuantised, EqualsQuantisingTheFp32Result) {
  const Tiling tiling = std::get<0>(GetParam());  // clang 14 captures no structured bindings
  const bool pow2 = std::get<1>(GetParam());
  const int outputs = std::get<2>(GetParam());
  Random random(63);
  CpuBackend cpu;
  const std::int64_t f = 256;
  // FP32 gate_up, so that the unfused result is what the fused kernel holds in registers.
  Problem x(f, DType::kF32, random);
  const std::int64_t rows = x.groups.padded_rows();
  const QuantizeRule rule = {.tiling = tiling, .pow2 = pow2};
  const auto make = [&](std::int64_t r, std::int64_t c, int bit) {
    return (outputs & bit) != 0 ? Quantised(r, c, DType::kE4M3, tiling) : Quantised();
  };
  for (const bool backward : {false, true}) {
    const std::int64_t cols = backward ? 2 * f : f;
    std::vector<float> plain(Index(rows * cols));
    std::vector<float> dweight(Index(rows));
    std::vector<float> plain_dweight(Index(rows));
    std::vector<StatSlot> stats(3);
    std::vector<StatSlot> want_stats(3);
    Quantised row = make(rows, cols, 1);
    Quantised col = make(cols, rows, 2);
    Quantised want_row = make(rows, cols, 1);
    Quantised want_col = make(cols, rows, 2);
    const auto run = [&](void* out, QTensor quant, QTensor quant_col, StatSlot* slots, float* dw) {
      if (backward) {
        cpu->swiglu_backward(cpu.context(), {.groups = x.groups.view(),
                                             .f = f,
                                             .gate_up = x.gate_up.data(),
                                             .d_act = x.d_act.data(),
                                             .dtype = DType::kF32,
                                             .weight = x.weight.data(),
                                             .d_gate_up = out,
                                             .rule = rule,
                                             .quant = quant,
                                             .quant_col = quant_col,
                                             .stats = slots,
                                             .dweight = dw});
      } else {
        cpu->swiglu_forward(cpu.context(), {.groups = x.groups.view(),
                                            .f = f,
                                            .gate_up = x.gate_up.data(),
                                            .dtype = DType::kF32,
                                            .weight = x.weight.data(),
                                            .act = out,
                                            .rule = rule,
                                            .quant = quant,
                                            .quant_col = quant_col,
                                            .stats = slots});
      }
    };
    run(nullptr, row.view(), col.view(), stats.data(), dweight.data());
    run(plain.data(), {}, {}, nullptr, plain_dweight.data());
    cpu->quantize_rows(cpu.context(), {.x = plain.data(),
                                       .x_dtype = DType::kF32,
                                       .cols = cols,
                                       .groups = x.groups.view(),
                                       .rule = rule,
                                       .row = want_row.view(),
                                       .col = want_col.view(),
                                       .stats = want_stats.data()});
    ExpectSameTensor(row, want_row);
    ExpectSameTensor(col, want_col);
    ExpectSameStats(stats, want_stats);
    if (backward) {
      EXPECT_EQ(dweight, plain_dweight);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, SwigluQuantised,
                         testing::Combine(testing::Values(Tiling::kRow128, Tiling::kRow32),
                                          testing::Bool(), testing::Values(1, 2, 3)));

}  // namespace
}  // namespace octavo
