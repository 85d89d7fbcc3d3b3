// Rotary embedding in place. A thread owns (row, pairs of one vector) and walks over the heads, so
// the sines of a position are computed once for all of them: in FP64 up to the reduced angle,
// because an FP32 angle is off by 4e-3 at position 10^5.
#include <cmath>

#include "base/check.h"
#include "kernels/cuda/context.h"
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/ops_cuda.h"

namespace octavo::cuda {
namespace {

inline constexpr int kHalfMax = 256;

struct Frequencies {
  double value[kHalfMax];  // theta^(-i / (D/2)) / 2π: turns a position
};

template <class T, int kWidth>
__global__ void __launch_bounds__(128)
    rope_kernel(T* x, std::int64_t rows, std::int64_t sequence, std::int64_t row_stride,
                int first_head, int heads, int half, float direction,
                const __grid_constant__ Frequencies f) {
  const int vectors = half / kWidth;
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * 128 + threadIdx.x;
  const std::int64_t row = i / vectors;
  const int at = static_cast<int>(i % vectors) * kWidth;
  if (row >= rows) {
    return;
  }
  const double position = static_cast<double>(row % sequence);
  float cosine[kWidth], sine[kWidth];
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    const double turns = position * f.value[at + j];
    sincospif(2.0f * static_cast<float>(turns - rint(turns)), &sine[j], &cosine[j]);
    sine[j] *= direction;
  }
  T* base = x + row * row_stride + static_cast<std::int64_t>(first_head) * 2 * half + at;
  for (int h = 0; h < heads; ++h, base += 2 * half) {
    float low[kWidth], high[kWidth], a[kWidth], b[kWidth];
    if constexpr (kWidth == 8) {
      Load8Plain(base, low);
      Load8Plain(base + half, high);
    } else {
      low[0] = ToFloat(base[0]);
      high[0] = ToFloat(base[half]);
    }
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      a[j] = low[j] * cosine[j] - high[j] * sine[j];
      b[j] = high[j] * cosine[j] + low[j] * sine[j];
    }
    if constexpr (kWidth == 8) {
      Store8(base, a);
      Store8(base + half, b);
    } else {
      base[0] = FromFloat<T>(a[0]);
      base[half] = FromFloat<T>(b[0]);
    }
  }
}

template <class T>
void Launch(cudaStream_t stream, const RopeArgs& a, const Frequencies& f) {
  const int half = a.head_dim / 2;
  const float direction = static_cast<float>(a.direction);
  if (half % 8 == 0 && a.row_stride % 8 == 0) {
    rope_kernel<T, 8><<<Blocks(a.rows * (half / 8), 128), 128, 0, stream>>>(
        static_cast<T*>(a.x), a.rows, a.sequence, a.row_stride, a.first_head, a.heads, half,
        direction, f);
  } else {
    rope_kernel<T, 1><<<Blocks(a.rows * half, 128), 128, 0, stream>>>(
        static_cast<T*>(a.x), a.rows, a.sequence, a.row_stride, a.first_head, a.heads, half,
        direction, f);
  }
}

}  // namespace

void Rope(OpsContext* context, const RopeArgs& a) {
  OCTAVO_CHECK(a.head_dim % 2 == 0 && a.head_dim <= 2 * kHalfMax,
               "head_dim = %d must be even and at most %d", a.head_dim, 2 * kHalfMax);
  if (a.rows == 0 || a.heads == 0) {
    return;
  }
  Frequencies f{};
  const int half = a.head_dim / 2;
  for (int i = 0; i < half; ++i) {
    f.value[i] = std::pow(static_cast<double>(a.theta), -static_cast<double>(i) / half) /
                 6.283185307179586476925;
  }
  a.dtype == DType::kBF16 ? Launch<bf16>(context->stream, a, f)
                          : Launch<float>(context->stream, a, f);
  context->Launched("rope");
}

}  // namespace octavo::cuda
