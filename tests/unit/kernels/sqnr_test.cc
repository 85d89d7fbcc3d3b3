// SQNR energies, and the figures that NUMERICS 11 builds its thresholds on.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <vector>

#include "tests/unit/kernels/quantised.h"
#include "tests/unit/kernels/values.h"

namespace octavo {
namespace {

double Decibels(const SqnrSlot& slot) { return 10 * std::log10(slot.signal / slot.noise); }

class Sqnr : public testing::TestWithParam<Tiling> {};

TEST_P(Sqnr, EnergiesOfRowAndColumnCopiesMatchFp64) {
  Random random(21);
  CpuBackend cpu;
  const Groups groups({100, 0, 150});
  const std::int64_t rows = groups.padded_rows();
  const std::int64_t cols = 256;
  Stored x(random.Normals(rows * cols), DType::kBF16);
  const QuantizeRule rule = {.tiling = GetParam()};
  Quantised row(rows, cols, DType::kE4M3, GetParam());
  Quantised col(cols, rows, DType::kE4M3, GetParam());
  cpu->quantize_rows(cpu.context(), {.x = x.data(),
                                     .x_dtype = DType::kBF16,
                                     .cols = cols,
                                     .groups = groups.view(),
                                     .rule = rule,
                                     .row = row.view(),
                                     .col = col.view(),
                                     .stats = nullptr});
  for (const bool transposed : {false, true}) {
    Quantised& q = transposed ? col : row;
    SqnrSlot slot = {.signal = 5, .noise = 7};  // the op adds
    cpu->sqnr(cpu.context(), {.x = x.data(),
                              .x_dtype = DType::kBF16,
                              .cols = cols,
                              .groups = groups.view(),
                              .q = q.view(),
                              .q_is_transposed = transposed,
                              .slot = &slot});
    double signal = 5;
    double noise = 7;
    for (std::int64_t r = 0; r < rows; ++r) {
      for (std::int64_t c = 0; c < cols && groups.GroupOf(r) >= 0; ++c) {
        const double value = x[Index(r * cols + c)];
        // x̂ is rounded to FP32, as every consumer sees it.
        const double decoded = static_cast<float>(transposed ? q.Value(c, r) : q.Value(r, c));
        signal += value * value;
        noise += (value - decoded) * (value - decoded);
      }
    }
    EXPECT_NEAR(slot.signal, signal, signal * 1e-12);  // FP64 sums in another order
    EXPECT_NEAR(slot.noise, noise, noise * 1e-12);
  }
}

INSTANTIATE_TEST_SUITE_P(Tilings, Sqnr, testing::Values(Tiling::kRow128, Tiling::kRow32));

// NUMERICS 11: Gaussian data gives 31.5 dB in E4M3 and 25.5 dB in E5M2 (uniform rounding error over
// a binade with 3 and 2 mantissa bits).
TEST(Sqnr, GaussianDataGivesTheFiguresBehindTheThresholds) {
  Random random(22);
  CpuBackend cpu;
  const std::int64_t rows = 256;
  const std::int64_t cols = 512;
  const Groups groups({rows});
  Stored x(random.Normals(rows * cols), DType::kF32);
  for (const DType format : {DType::kE4M3, DType::kE5M2}) {
    Quantised row(rows, cols, format, Tiling::kRow128);
    SqnrSlot slot;
    cpu->quantize_rows(cpu.context(), {.x = x.data(),
                                       .x_dtype = DType::kF32,
                                       .cols = cols,
                                       .groups = groups.view(),
                                       .rule = {.format = format},
                                       .row = row.view(),
                                       .col = {},
                                       .stats = nullptr});
    cpu->sqnr(cpu.context(), {.x = x.data(),
                              .x_dtype = DType::kF32,
                              .cols = cols,
                              .groups = groups.view(),
                              .q = row.view(),
                              .q_is_transposed = false,
                              .slot = &slot});
    // Half a decibel: amax of a tile moves within a binade, and the figures are rounded.
    EXPECT_NEAR(Decibels(slot), format == DType::kE4M3 ? 31.5 : 25.5, 0.5);
  }
}

}  // namespace
}  // namespace octavo
