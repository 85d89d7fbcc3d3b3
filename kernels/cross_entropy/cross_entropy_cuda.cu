// Fused cross entropy: a block a row. Up to kVectors·8·1024 logits stay in registers between the
// maximum, the sum and the gradient, so memory sees each logit once in and once out; longer rows
// are read again (from L2). A warp sums against its own maximum, so that one exchange over the
// block brings both. Losses of rows go through scratch and are added in row order.
#include "base/check.h"
#include "kernels/cuda/context.h"
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/ops_cuda.h"

namespace octavo::cuda {
namespace {

inline constexpr int kThreads = 1024;
inline constexpr int kThreadsSmall = 512;

// Reads vector u of the row; outside the row: −∞.
template <class T>
__device__ __forceinline__ void LoadLogits(const T* row, std::int64_t vocab, std::int64_t at,
                                           float v[8]) {
  if (at + 8 <= vocab && vocab % 8 == 0) {
    Load8Plain(row + at, v);
  } else {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      v[j] = at + j < vocab ? ToFloat(row[at + j]) : -__builtin_huge_valf();
    }
  }
}
template <class T>
__device__ __forceinline__ void StoreGradient(T* row, std::int64_t vocab, std::int64_t at,
                                              const float v[8]) {
  if (at + 8 <= vocab && vocab % 8 == 0) {
    Store8(row + at, v);
  } else {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      if (at + j < vocab) {
        row[at + j] = FromFloat<T>(v[j]);
      }
    }
  }
}

// e^x for x <= 0 in two instructions; results below 2^-126 are zero.
__device__ __forceinline__ float Exp(float x) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x * 1.44269504f));
  return power;
}

// kVectors > 0: the row fits in registers (BF16 as 4 words a vector).
template <class T, int kBlock, int kVectors>
__global__ void __launch_bounds__(kBlock, 1024 / kBlock)
    cross_entropy_kernel(std::int64_t vocab, T* logits, const std::int32_t* target, float dloss,
                         double* row_loss) {
  __shared__ float2 parts[kBlock / 32];  // maximum and sum of a warp
  const std::int64_t r = blockIdx.x;
  T* row = logits + r * vocab;
  const std::int32_t want = target[r];
  if (want < 0 || want >= vocab) {
    // Ignored row (a target past the vocabulary is a bug of the caller: NaN makes it loud).
    if (threadIdx.x == 0) {
      row_loss[r] = want < 0 ? 0.0 : __longlong_as_double(0x7FF8000000000000ll);
    }
    if (dloss != 0.0f) {
      const float zero[8] = {};
      for (std::int64_t at = threadIdx.x * 8; at < vocab; at += kBlock * 8) {
        StoreGradient(row, vocab, at, zero);
      }
    }
    return;
  }
  constexpr int kKept = kVectors > 0 ? kVectors : 1;
  Raw8<T> kept[kKept];
  float best = -__builtin_huge_valf();
  if constexpr (kVectors > 0) {
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
      const std::int64_t at = (threadIdx.x + u * kBlock) * 8;
      if (at < vocab) {
        LoadRawPlain(row + at, kept[u]);
      }
    }
  }
  const float at_target = threadIdx.x == 0 ? ToFloat(row[want]) : 0.0f;
  const int vectors =
      kVectors > 0 ? kVectors : static_cast<int>(CeilDiv(vocab, std::int64_t{kBlock} * 8));
#pragma unroll
  for (int u = 0; u < vectors; ++u) {
    const std::int64_t at = (threadIdx.x + static_cast<std::int64_t>(u) * kBlock) * 8;
    if (at < vocab) {
      float v[8];
      if constexpr (kVectors > 0) {
        Unpack(kept[u], v);
      } else {
        LoadLogits(row, vocab, at, v);
      }
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        best = fmaxf(best, v[j]);
      }
    }
  }
  best = WarpMax(best);
  const float shift = best == -__builtin_huge_valf() ? 0.0f : best;
  float sum = 0;
#pragma unroll
  for (int u = 0; u < vectors; ++u) {
    const std::int64_t at = (threadIdx.x + static_cast<std::int64_t>(u) * kBlock) * 8;
    if (at < vocab) {
      float v[8];
      if constexpr (kVectors > 0) {
        Unpack(kept[u], v);
      } else {
        LoadLogits(row, vocab, at, v);
      }
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        sum += Exp(v[j] - shift);
      }
    }
  }
  sum = WarpSum(sum);
  const int lane = threadIdx.x & 31;
  if (lane == 0) {
    parts[threadIdx.x >> 5] = make_float2(best, sum);
  }
  __syncthreads();
  const float2 part = lane < kBlock / 32 ? parts[lane] : make_float2(-__builtin_huge_valf(), 0.0f);
  const float top = WarpMax(part.x);
  // A warp without logits has no sum; its difference of infinities would be NaN.
  sum = WarpSum(part.x == -__builtin_huge_valf() ? 0.0f : part.y * Exp(part.x - top));
  if (threadIdx.x == 0) {
    row_loss[r] =
        log(static_cast<double>(sum)) - (static_cast<double>(at_target) - static_cast<double>(top));
  }
  if (dloss == 0.0f) {
    return;
  }
  const float factor = dloss / sum;
#pragma unroll
  for (int u = 0; u < vectors; ++u) {
    const std::int64_t at = (threadIdx.x + static_cast<std::int64_t>(u) * kBlock) * 8;
    if (at < vocab) {
      float v[8];
      if constexpr (kVectors > 0) {
        Unpack(kept[u], v);
      } else {
        LoadLogits(row, vocab, at, v);
      }
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        v[j] = Exp(v[j] - top) * factor;
      }
      if (want >= at && want < at + 8) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          v[j] -= at + j == want ? dloss : 0.0f;
        }
      }
      StoreGradient(row, vocab, at, v);
    }
  }
}

template <class T>
void Launch(cudaStream_t stream, const CrossEntropyArgs& a, double* row_loss) {
  T* logits = static_cast<T*>(a.logits);
  const unsigned rows = static_cast<unsigned>(a.rows);
  if constexpr (sizeof(T) == 2) {
    if (a.vocab % 8 == 0 && a.vocab <= kThreadsSmall * 8 * 8) {
      cross_entropy_kernel<T, kThreadsSmall, 8>
          <<<rows, kThreadsSmall, 0, stream>>>(a.vocab, logits, a.target, a.dloss, row_loss);
      return;
    }
    if (a.vocab % 8 == 0 && a.vocab <= kThreads * 8 * 8) {
      cross_entropy_kernel<T, kThreads, 8>
          <<<rows, kThreads, 0, stream>>>(a.vocab, logits, a.target, a.dloss, row_loss);
      return;
    }
  }
  cross_entropy_kernel<T, kThreads, 0>
      <<<rows, kThreads, 0, stream>>>(a.vocab, logits, a.target, a.dloss, row_loss);
}

}  // namespace

void CrossEntropy(OpsContext* context, const CrossEntropyArgs& a) {
  if (a.rows == 0) {
    return;
  }
  double* row_loss = reinterpret_cast<double*>(context->scratch);
  OCTAVO_CHECK(a.rows * 8 <= context->scratch_bytes, "rows = %lld is too many in one call",
               static_cast<long long>(a.rows));
  a.dtype == DType::kBF16 ? Launch<bf16>(context->stream, a, row_loss)
                          : Launch<float>(context->stream, a, row_loss);
  AddPartialSums(context, row_loss, a.rows, a.loss_sum);
  context->Launched("cross_entropy");
}

}  // namespace octavo::cuda
