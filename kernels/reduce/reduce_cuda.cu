// Sums that do not depend on the order of blocks: each block writes its partial sum, one block adds
// the partial sums in index order.
#include "base/check.h"
#include "kernels/cuda/context.h"
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/ops_cuda.h"

namespace octavo::cuda {
namespace {

inline constexpr int kSumBlocks = 1024;

__global__ void __launch_bounds__(256)
    sum_squares_kernel(const float* x, std::int64_t n, double* partial) {
  __shared__ double smem[33];
  double sum = 0;
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * 256 * 8;
  const bool aligned = reinterpret_cast<std::uintptr_t>(x) % 16 == 0;
  for (std::int64_t i = (static_cast<std::int64_t>(blockIdx.x) * 256 + threadIdx.x) * 8; i < n;
       i += stride) {
    float v[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    if (aligned && i + 8 <= n) {
      Load8(x + i, v);
    } else {
      for (int j = 0; j < 8 && i + j < n; ++j) {
        v[j] = x[i + j];
      }
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      sum += static_cast<double>(v[j]) * v[j];
    }
  }
  sum = BlockSum(sum, smem);
  if (threadIdx.x == 0) {
    partial[blockIdx.x] = sum;
  }
}

__global__ void __launch_bounds__(256)
    add_partial_kernel(const double* partial, std::int64_t n, double* out) {
  __shared__ double smem[33];
  double sum = 0;
  for (std::int64_t i = threadIdx.x; i < n; i += 256) {
    sum += partial[i];
  }
  sum = BlockSum(sum, smem);
  if (threadIdx.x == 0) {
    out[0] += sum;
  }
}

template <class T>
__global__ void __launch_bounds__(256)
    count_nonfinite_kernel(const T* x, std::int64_t n, std::uint64_t* count) {
  std::uint32_t bad = 0;
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * 256 * 8;
  const bool aligned = reinterpret_cast<std::uintptr_t>(x) % 16 == 0;
  for (std::int64_t i = (static_cast<std::int64_t>(blockIdx.x) * 256 + threadIdx.x) * 8; i < n;
       i += stride) {
    float v[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    if (aligned && i + 8 <= n) {
      Load8(x + i, v);
    } else {
      for (int j = 0; j < 8 && i + j < n; ++j) {
        v[j] = ToFloat(x[i + j]);
      }
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      bad += (__float_as_uint(v[j]) & kInfinityBits) == kInfinityBits ? 1 : 0;
    }
  }
  bad = __reduce_add_sync(kFullMask, bad);
  if ((threadIdx.x & 31) == 0) {
    AtomicAddNonzero(count, bad);
  }
}

unsigned GridFor(std::int64_t n) {
  const std::int64_t blocks = CeilDiv(n, 2048);
  return static_cast<unsigned>(blocks < kSumBlocks ? blocks : kSumBlocks);
}

}  // namespace

void AddPartialSums(OpsContext* context, const double* partial, std::int64_t count, double* out) {
  add_partial_kernel<<<1, 256, 0, context->stream>>>(partial, count, out);
}

void SumSquares(OpsContext* context, const SumSquaresArgs& a) {
  if (a.n <= 0) {
    return;
  }
  double* partial = reinterpret_cast<double*>(context->scratch);
  const unsigned blocks = GridFor(a.n);
  sum_squares_kernel<<<blocks, 256, 0, context->stream>>>(a.x, a.n, partial);
  AddPartialSums(context, partial, blocks, a.out);
  context->Launched("sum_squares");
}

void CountNonfinite(OpsContext* context, const CountNonfiniteArgs& a) {
  if (a.n <= 0) {
    return;
  }
  if (a.dtype == DType::kF32) {
    count_nonfinite_kernel<<<GridFor(a.n), 256, 0, context->stream>>>(
        static_cast<const float*>(a.x), a.n, a.count);
  } else {
    OCTAVO_CHECK(a.dtype == DType::kBF16, "counts FP32 or BF16, dtype = %d",
                 static_cast<int>(a.dtype));
    count_nonfinite_kernel<<<GridFor(a.n), 256, 0, context->stream>>>(static_cast<const bf16*>(a.x),
                                                                      a.n, a.count);
  }
  context->Launched("count_nonfinite");
}

}  // namespace octavo::cuda
