// Cast and axpby on the GPU: plain element loops, eight elements a thread where rows allow it.
#include "base/check.h"
#include "kernels/cuda/context.h"
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/ops_cuda.h"

namespace octavo::cuda {
namespace {

template <class S, class D>
__global__ void __launch_bounds__(256)
    cast_kernel(const S* src, std::int64_t ld_src, D* dst, std::int64_t ld_dst, std::int64_t rows,
                std::int64_t cols, bool vector) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * 256 + threadIdx.x;
  const std::int64_t per_row = vector ? cols / 8 : cols;
  const std::int64_t row = i / per_row, at = i % per_row;
  if (row >= rows) {
    return;
  }
  if (vector) {
    float v[8];
    Load8Plain(src + row * ld_src + at * 8, v);
    Store8(dst + row * ld_dst + at * 8, v);
  } else {
    dst[row * ld_dst + at] = FromFloat<D>(ToFloat(src[row * ld_src + at]));
  }
}

template <class S, class D>
void LaunchCast(cudaStream_t stream, const CastArgs& a) {
  const std::int64_t ld_src = a.src.stride(), ld_dst = a.dst.stride();
  const auto aligned = [](const void* p) { return reinterpret_cast<std::uintptr_t>(p) % 16 == 0; };
  const bool vector = a.src.cols % 8 == 0 && ld_src % 8 == 0 && ld_dst % 8 == 0 &&
                      aligned(a.src.data) && aligned(a.dst.data);
  const std::int64_t threads = a.src.rows * (vector ? a.src.cols / 8 : a.src.cols);
  cast_kernel<<<Blocks(threads, 256), 256, 0, stream>>>(static_cast<const S*>(a.src.data), ld_src,
                                                        static_cast<D*>(a.dst.data), ld_dst,
                                                        a.src.rows, a.src.cols, vector);
}

// b == 0 overwrites y without reading it, so that stale memory cannot leak NaN into the result.
template <class X, class Y>
__global__ void __launch_bounds__(256)
    axpby_kernel(const X* x, float a, Y* y, float b, std::int64_t n) {
  const std::int64_t i = (static_cast<std::int64_t>(blockIdx.x) * 256 + threadIdx.x) * 8;
  const bool vector = i + 8 <= n && reinterpret_cast<std::uintptr_t>(x) % 16 == 0 &&
                      reinterpret_cast<std::uintptr_t>(y) % 16 == 0;
  float vx[8], vy[8];
  const int count = static_cast<int>(min(std::int64_t{8}, n - i));
  if (vector) {
    Load8Plain(x + i, vx);
    if (b != 0.0f) {
      Load8Plain(y + i, vy);
    }
  } else {
#pragma unroll  // an index known at compile time keeps the arrays in registers
    for (int j = 0; j < 8; ++j) {
      if (j < count) {
        vx[j] = ToFloat(x[i + j]);
        vy[j] = b != 0.0f ? ToFloat(y[i + j]) : 0.0f;
      }
    }
  }
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    if (j < count) {
      const float ax = __fmul_rn(a, vx[j]);
      vy[j] = b != 0.0f ? __fadd_rn(ax, __fmul_rn(b, vy[j])) : ax;
    }
  }
  if (vector) {
    Store8(y + i, vy);
  } else {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      if (j < count) {
        y[i + j] = FromFloat<Y>(vy[j]);
      }
    }
  }
}

template <class X>
void LaunchAxpby(cudaStream_t stream, const AxpbyArgs& a) {
  const unsigned blocks = Blocks(a.n, 2048);
  if (a.y_dtype == DType::kBF16) {
    axpby_kernel<<<blocks, 256, 0, stream>>>(static_cast<const X*>(a.x), a.a,
                                             static_cast<bf16*>(a.y), a.b, a.n);
  } else {
    axpby_kernel<<<blocks, 256, 0, stream>>>(static_cast<const X*>(a.x), a.a,
                                             static_cast<float*>(a.y), a.b, a.n);
  }
}

}  // namespace

void Cast(OpsContext* context, const CastArgs& a) {
  OCTAVO_CHECK_EQ(a.src.rows, a.dst.rows);
  OCTAVO_CHECK_EQ(a.src.cols, a.dst.cols);
  if (a.src.rows == 0 || a.src.cols == 0) {
    return;
  }
  cudaStream_t stream = context->stream;
  if (a.src.dtype == a.dst.dtype) {
    const std::int64_t bytes = DTypeBytes(a.src.dtype);
    context->Record(
        cudaMemcpy2DAsync(a.dst.data, a.dst.stride() * bytes, a.src.data, a.src.stride() * bytes,
                          a.src.cols * bytes, a.src.rows, cudaMemcpyDeviceToDevice, stream),
        "cast");
  } else if (a.src.dtype == DType::kF32 && a.dst.dtype == DType::kBF16) {
    LaunchCast<float, bf16>(stream, a);
  } else {
    OCTAVO_CHECK(a.src.dtype == DType::kBF16 && a.dst.dtype == DType::kF32,
                 "casts between kF32 and kBF16 only, src %d, dst %d", static_cast<int>(a.src.dtype),
                 static_cast<int>(a.dst.dtype));
    LaunchCast<bf16, float>(stream, a);
  }
  context->Launched("cast");
}

void Axpby(OpsContext* context, const AxpbyArgs& a) {
  if (a.n <= 0) {
    return;
  }
  if (a.x_dtype == DType::kBF16) {
    LaunchAxpby<bf16>(context->stream, a);
  } else {
    LaunchAxpby<float>(context->stream, a);
  }
  context->Launched("axpby");
}

}  // namespace octavo::cuda
