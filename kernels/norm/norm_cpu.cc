// RMSNorm with optional residual addition.
//   h = x (+ residual), rounded to the act dtype: y is computed from the h that is stored, so
//   forward and backward see the same values;  y = (h · rstd) · w,  rstd = 1/sqrt(mean(h²) + eps).
// Backward, with g = dy·w and c = mean(g·h·rstd):
//   dh = rstd·(g − h·rstd·c) (+ d_residual);  dw += dy·h·rstd, row by row.
#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "kernels/cpu/ops_cpu.h"
#include "kernels/cpu/rows.h"

namespace octavo::cpu {
namespace {

OCTAVO_MULTIVERSION void Sum2(const float* a, const float* b, std::int64_t n, float* out) {
  for (std::int64_t i = 0; i < n; ++i) {
    out[i] = a[i] + b[i];
  }
}

OCTAVO_MULTIVERSION void Normalise(const float* h, const float* w, float rstd, std::int64_t n,
                                   float* y) {
  for (std::int64_t i = 0; i < n; ++i) {
    y[i] = (h[i] * rstd) * w[i];
  }
}

OCTAVO_MULTIVERSION void NormaliseBackward(const float* __restrict h, const float* __restrict w,
                                           const float* __restrict dy, float rstd, float mean,
                                           std::int64_t n, float* __restrict dx,
                                           float* __restrict dw) {
  for (std::int64_t i = 0; i < n; ++i) {
    const float normal = h[i] * rstd;
    dx[i] = rstd * (dy[i] * w[i] - normal * mean);
    dw[i] += dy[i] * normal;
  }
}

// h of one chunk, rounded to what residual_out holds.
const float* LoadSum(const RmsNormForwardArgs& a, std::int64_t row, std::int64_t c, std::int64_t n,
                     float* buffer) {
  const float* x = LoadRow(a.x, a.dtype, row * a.ld_x + c, n, buffer);
  if (a.residual == nullptr) {
    return x;
  }
  float residual_buffer[kChunk];
  const float* residual = LoadRow(a.residual, a.dtype, row * a.cols + c, n, residual_buffer);
  Sum2(x, residual, n, buffer);
  RoundRow(buffer, n, a.dtype);
  return buffer;
}

}  // namespace

void RmsNormForward(OpsContext*, const RmsNormForwardArgs& a) {
  OCTAVO_CHECK(a.rows == 0 || (a.cols > 0 && a.ld_x >= a.cols && a.ld_y >= a.cols),
               "cols = %lld, ld_x = %lld, ld_y = %lld", static_cast<long long>(a.cols),
               static_cast<long long>(a.ld_x), static_cast<long long>(a.ld_y));
  float buffer[kChunk];
  float y[kChunk];
  for (std::int64_t r = 0; r < a.rows; ++r) {
    Lanes squares;
    for (std::int64_t c = 0; c < a.cols; c += kChunk) {
      const std::int64_t n = std::min(kChunk, a.cols - c);
      const float* h = LoadSum(a, r, c, n, buffer);
      AddDot(h, h, n, &squares);
    }
    const float mean = squares.Total() / static_cast<float>(a.cols);
    const float rstd = 1.0f / std::sqrt(mean + a.eps);
    a.rstd[r] = rstd;
    for (std::int64_t c = 0; c < a.cols; c += kChunk) {
      const std::int64_t n = std::min(kChunk, a.cols - c);
      const float* h = LoadSum(a, r, c, n, buffer);
      Normalise(h, a.w + c, rstd, n, y);
      if (a.residual_out != nullptr) {  // after the last read: residual_out may alias residual
        StoreRow(h, n, a.residual_out, a.dtype, r * a.cols + c);
      }
      StoreRow(y, n, a.y, a.dtype, r * a.ld_y + c);
    }
  }
}

void RmsNormBackward(OpsContext*, const RmsNormBackwardArgs& a) {
  OCTAVO_CHECK(
      a.rows == 0 || (a.cols > 0 && a.ld_h >= a.cols && a.ld_dy >= a.cols && a.ld_dx >= a.cols),
      "cols = %lld, ld_h = %lld, ld_dy = %lld, ld_dx = %lld", static_cast<long long>(a.cols),
      static_cast<long long>(a.ld_h), static_cast<long long>(a.ld_dy),
      static_cast<long long>(a.ld_dx));
  float h_buffer[kChunk];
  float dy_buffer[kChunk];
  float residual_buffer[kChunk];
  float dx[kChunk];
  for (std::int64_t r = 0; r < a.rows; ++r) {
    Lanes products;
    for (std::int64_t c = 0; c < a.cols; c += kChunk) {
      const std::int64_t n = std::min(kChunk, a.cols - c);
      AddDot3(LoadRow(a.dy, a.dtype, r * a.ld_dy + c, n, dy_buffer), a.w + c,
              LoadRow(a.h, a.dtype, r * a.ld_h + c, n, h_buffer), n, &products);
    }
    const float rstd = a.rstd[r];
    const float mean = products.Total() * rstd / static_cast<float>(a.cols);
    for (std::int64_t c = 0; c < a.cols; c += kChunk) {
      const std::int64_t n = std::min(kChunk, a.cols - c);
      NormaliseBackward(LoadRow(a.h, a.dtype, r * a.ld_h + c, n, h_buffer), a.w + c,
                        LoadRow(a.dy, a.dtype, r * a.ld_dy + c, n, dy_buffer), rstd, mean, n, dx,
                        a.dw + c);
      if (a.d_residual != nullptr) {
        AddRow(LoadRow(a.d_residual, a.dtype, r * a.cols + c, n, residual_buffer), n, dx);
      }
      StoreRow(dx, n, a.dx, a.dtype, r * a.ld_dx + c);
    }
  }
}

}  // namespace octavo::cpu
