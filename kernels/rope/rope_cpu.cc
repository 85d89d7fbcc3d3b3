// Rotary position embedding, pairs (i, i + D/2):
//   (x_i, x_{i+D/2}) ← (x_i·cos − d·x_{i+D/2}·sin, x_{i+D/2}·cos + d·x_i·sin), d = direction.
// Angles and their sines are computed in FP64 and rounded to FP32 once: at position 10^5 an FP32
// angle is off by 4e-3 already.
#include <algorithm>
#include <cmath>
#include <vector>

#include "base/check.h"
#include "kernels/cpu/ops_cpu.h"
#include "kernels/cpu/rows.h"

namespace octavo::cpu {
namespace {

constexpr std::int64_t kHalfMax = 256;  // head_dim <= 512

// cos and sin of every (position, pair). A step calls this op twice a layer with the same geometry,
// so each thread keeps its last table; it grows to the longest sequence and is then constant.
struct AngleTable {
  float theta = 0;
  std::int64_t half = 0;
  std::int64_t positions = 0;
  std::vector<float> cosine, sine;  // [positions, half]

  void Prepare(float theta_wanted, std::int64_t half_wanted, std::int64_t positions_wanted) {
    if (theta != theta_wanted || half != half_wanted) {
      theta = theta_wanted;
      half = half_wanted;
      positions = 0;
    }
    if (positions >= positions_wanted) {
      return;
    }
    cosine.resize(static_cast<std::size_t>(positions_wanted * half));
    sine.resize(static_cast<std::size_t>(positions_wanted * half));
    for (std::int64_t i = 0; i < half; ++i) {
      const double frequency =
          std::pow(static_cast<double>(theta), -static_cast<double>(i) / static_cast<double>(half));
      for (std::int64_t p = positions; p < positions_wanted; ++p) {
        const double angle = static_cast<double>(p) * frequency;
        cosine[static_cast<std::size_t>(p * half + i)] = static_cast<float>(std::cos(angle));
        sine[static_cast<std::size_t>(p * half + i)] = static_cast<float>(std::sin(angle));
      }
    }
    positions = positions_wanted;
  }
};

OCTAVO_MULTIVERSION void Rotate(const float* __restrict low, const float* __restrict high,
                                const float* __restrict cosine, const float* __restrict sine,
                                float direction, std::int64_t n, float* __restrict out_low,
                                float* __restrict out_high) {
  for (std::int64_t i = 0; i < n; ++i) {
    const float s = sine[i] * direction;
    out_low[i] = low[i] * cosine[i] - high[i] * s;
    out_high[i] = high[i] * cosine[i] + low[i] * s;
  }
}

}  // namespace

void Rope(OpsContext*, const RopeArgs& a) {
  if (a.rows == 0 || a.heads == 0) {
    return;
  }
  const std::int64_t half = a.head_dim / 2;
  OCTAVO_CHECK(a.head_dim > 0 && a.head_dim % 2 == 0 && half <= kHalfMax,
               "head_dim = %d must be even and at most %lld", a.head_dim,
               static_cast<long long>(2 * kHalfMax));
  OCTAVO_CHECK(a.sequence > 0, "sequence = %lld", static_cast<long long>(a.sequence));
  OCTAVO_CHECK(a.direction == 1 || a.direction == -1, "direction = %d", a.direction);
  OCTAVO_CHECK((a.first_head + a.heads) * static_cast<std::int64_t>(a.head_dim) <= a.row_stride,
               "heads %d + %d of %d do not fit the row stride %lld", a.first_head, a.heads,
               a.head_dim, static_cast<long long>(a.row_stride));
  static thread_local AngleTable table;
  table.Prepare(a.theta, half, std::min(a.sequence, a.rows));
  float low[kHalfMax];
  float high[kHalfMax];
  float out_low[kHalfMax];
  float out_high[kHalfMax];
  for (std::int64_t r = 0; r < a.rows; ++r) {
    const std::int64_t position = r % a.sequence;
    const float* cosine = table.cosine.data() + position * half;
    const float* sine = table.sine.data() + position * half;
    for (std::int64_t h = a.first_head; h < a.first_head + a.heads; ++h) {
      const std::int64_t at = r * a.row_stride + h * a.head_dim;
      Rotate(LoadRow(a.x, a.dtype, at, half, low), LoadRow(a.x, a.dtype, at + half, half, high),
             cosine, sine, static_cast<float>(a.direction), half, out_low, out_high);
      StoreRow(out_low, half, a.x, a.dtype, at);
      StoreRow(out_high, half, a.x, a.dtype, at + half);
    }
  }
}

}  // namespace octavo::cpu
