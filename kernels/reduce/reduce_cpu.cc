// SumSquares (gradient norm) and CountNonfinite.
#include <bit>
#include <cstdint>

#include "base/check.h"
#include "kernels/cpu/ops_cpu.h"
#include "kernels/cpu/rows.h"

namespace octavo::cpu {
namespace {

constexpr int kWide = 8;  // FP64 lanes, fixed so that the order of the sum is

OCTAVO_MULTIVERSION double SumSquaresOf(const float* x, std::int64_t n) {
  double lane[kWide] = {};
  std::int64_t i = 0;
  for (; i + kWide <= n; i += kWide) {
    for (int j = 0; j < kWide; ++j) {
      const double v = x[i + j];
      lane[j] += v * v;
    }
  }
  for (; i < n; ++i) {
    const double v = x[i];
    lane[i % kWide] += v * v;
  }
  return ((lane[0] + lane[4]) + (lane[2] + lane[6])) + ((lane[1] + lane[5]) + (lane[3] + lane[7]));
}

// An exponent field of all ones is an infinity or a NaN.
OCTAVO_MULTIVERSION std::uint64_t CountF32(const std::uint32_t* bits, std::int64_t n) {
  std::uint64_t count = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    count += (bits[i] & 0x7F800000u) == 0x7F800000u ? 1u : 0u;
  }
  return count;
}

OCTAVO_MULTIVERSION std::uint64_t CountBf16(const std::uint16_t* bits, std::int64_t n) {
  std::uint64_t count = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    count += (bits[i] & 0x7F80u) == 0x7F80u ? 1u : 0u;
  }
  return count;
}

}  // namespace

void SumSquares(OpsContext*, const SumSquaresArgs& a) {
  if (a.n > 0) {
    a.out[0] += SumSquaresOf(a.x, a.n);
  }
}

void CountNonfinite(OpsContext*, const CountNonfiniteArgs& a) {
  if (a.n <= 0) {
    return;
  }
  if (a.dtype == DType::kF32) {
    a.count[0] += CountF32(static_cast<const std::uint32_t*>(a.x), a.n);
    return;
  }
  OCTAVO_CHECK(a.dtype == DType::kBF16, "counts FP32 or BF16, dtype = %d",
               static_cast<int>(a.dtype));
  a.count[0] += CountBf16(static_cast<const std::uint16_t*>(a.x), a.n);
}

}  // namespace octavo::cpu
