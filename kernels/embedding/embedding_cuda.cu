// Embedding lookup and its gradient.
//
// The gradient must not depend on the order of threads, so positions are grouped by token first: a
// histogram, a scan over the vocabulary, a scatter (unordered within a token), and then one block a
// token that ranks its positions and adds their rows in order.
#include "base/check.h"
#include "kernels/cuda/context.h"
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/ops_cuda.h"

namespace octavo::cuda {
namespace {

template <class T>
__global__ void __launch_bounds__(256)
    embedding_forward_kernel(const std::int32_t* tokens, std::int64_t count, std::int64_t hidden,
                             std::int64_t vocab, const float* table, T* out) {
  const std::int64_t vectors = hidden / 8;
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * 256 + threadIdx.x;
  const std::int64_t t = i / vectors, c = i % vectors * 8;
  if (t >= count) {
    return;
  }
  const std::int32_t token = tokens[t];
  float v[8];
  if (token >= 0 && token < vocab) {
    Load8Plain(table + token * hidden + c, v);
  } else {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      v[j] = __int_as_float(0x7FC00000);  // a bug of the caller must be loud
    }
  }
  Store8(out + t * hidden + c, v);
}

__global__ void count_tokens_kernel(const std::int32_t* tokens, std::int64_t count,
                                    std::int64_t vocab, std::int32_t* counts) {
  const std::int64_t t = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (t < count && tokens[t] >= 0 && tokens[t] < vocab) {
    atomicAdd(&counts[tokens[t]], 1);
  }
}

// start[v] = Σ counts before v, cursor likewise. One block of 1024 threads.
__global__ void __launch_bounds__(1024)
    scan_tokens_kernel(const std::int32_t* counts, std::int64_t vocab, std::int32_t* start,
                       std::int32_t* cursor) {
  __shared__ std::int32_t warp_sum[32];
  __shared__ std::int32_t carry;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  if (threadIdx.x == 0) {
    carry = 0;
  }
  __syncthreads();
  for (std::int64_t base = 0; base < vocab; base += 4096) {
    std::int32_t own[4], sum = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const std::int64_t v = base + threadIdx.x * 4 + j;
      own[j] = v < vocab ? counts[v] : 0;
      sum += own[j];
    }
    std::int32_t inclusive = sum;
#pragma unroll
    for (int o = 1; o < 32; o <<= 1) {
      const std::int32_t left = __shfl_up_sync(kFullMask, inclusive, o);
      inclusive += lane >= o ? left : 0;
    }
    if (lane == 31) {
      warp_sum[warp] = inclusive;
    }
    __syncthreads();
    std::int32_t before = carry;
    for (int w = 0; w < warp; ++w) {
      before += warp_sum[w];
    }
    before += inclusive - sum;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const std::int64_t v = base + threadIdx.x * 4 + j;
      if (v < vocab) {
        start[v] = before;
        cursor[v] = before;
      }
      before += own[j];
    }
    __syncthreads();
    if (threadIdx.x == 1023) {
      carry = before;
    }
    __syncthreads();
  }
}

__global__ void scatter_tokens_kernel(const std::int32_t* tokens, std::int64_t count,
                                      std::int64_t vocab, std::int32_t* cursor,
                                      std::int32_t* position) {
  const std::int64_t t = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (t < count && tokens[t] >= 0 && tokens[t] < vocab) {
    position[atomicAdd(&cursor[tokens[t]], 1)] = static_cast<std::int32_t>(t);
  }
}

// A block a token of the vocabulary. Positions are ranked by counting smaller ones, into `ordered`.
template <class T>
__global__ void __launch_bounds__(128)
    embedding_backward_kernel(const std::int32_t* counts, const std::int32_t* start,
                              const std::int32_t* position, std::int32_t* ordered,
                              std::int64_t hidden, const T* d_out, float* d_table) {
  const std::int64_t token = blockIdx.x;
  const std::int32_t n = counts[token];
  if (n == 0) {
    return;
  }
  const std::int32_t* mine = position + start[token];
  std::int32_t* order = ordered + start[token];
  for (std::int32_t i = threadIdx.x; i < n; i += blockDim.x) {
    const std::int32_t p = mine[i];
    std::int32_t rank = 0;
    for (std::int32_t j = 0; j < n; ++j) {
      rank += mine[j] < p ? 1 : 0;
    }
    order[rank] = p;
  }
  __syncthreads();
  for (std::int64_t c = threadIdx.x * 8; c < hidden; c += blockDim.x * 8) {
    float sum[8];
    Load8Plain(d_table + token * hidden + c, sum);
#pragma unroll 4
    for (std::int32_t i = 0; i < n; ++i) {
      float v[8];
      Load8(d_out + order[i] * hidden + c, v);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        sum[j] += v[j];
      }
    }
    Store8(d_table + token * hidden + c, sum);
  }
}

}  // namespace

// counts, start and cursor of the vocabulary; positions twice.
std::int64_t EmbeddingBackwardWorkspaceBytes(std::int64_t tokens, std::int64_t vocab) {
  return 4 * (3 * vocab + 2 * tokens);
}

void EmbeddingForward(OpsContext* context, const EmbeddingForwardArgs& a) {
  OCTAVO_CHECK(a.hidden % 8 == 0, "hidden = %lld must be a multiple of 8",
               static_cast<long long>(a.hidden));
  if (a.count > 0) {
    const unsigned blocks = Blocks(a.count * (a.hidden / 8), 256);
    if (a.dtype == DType::kBF16) {
      embedding_forward_kernel<<<blocks, 256, 0, context->stream>>>(
          a.tokens, a.count, a.hidden, a.vocab, a.table, static_cast<bf16*>(a.out));
    } else {
      embedding_forward_kernel<<<blocks, 256, 0, context->stream>>>(
          a.tokens, a.count, a.hidden, a.vocab, a.table, static_cast<float*>(a.out));
    }
  }
  context->Launched("embedding_forward");
}

void EmbeddingBackward(OpsContext* context, const EmbeddingBackwardArgs& a) {
  OCTAVO_CHECK(a.hidden % 8 == 0, "hidden = %lld must be a multiple of 8",
               static_cast<long long>(a.hidden));
  if (a.count == 0) {
    return;
  }
  cudaStream_t stream = context->stream;
  std::int32_t* counts = static_cast<std::int32_t*>(a.workspace);
  std::int32_t* start = counts + a.vocab;
  std::int32_t* cursor = start + a.vocab;
  std::int32_t* position = cursor + a.vocab;
  std::int32_t* ordered = position + a.count;
  cudaMemsetAsync(counts, 0, sizeof(std::int32_t) * a.vocab, stream);
  count_tokens_kernel<<<Blocks(a.count, 256), 256, 0, stream>>>(a.tokens, a.count, a.vocab, counts);
  scan_tokens_kernel<<<1, 1024, 0, stream>>>(counts, a.vocab, start, cursor);
  scatter_tokens_kernel<<<Blocks(a.count, 256), 256, 0, stream>>>(a.tokens, a.count, a.vocab,
                                                                  cursor, position);
  const unsigned blocks = static_cast<unsigned>(a.vocab);
  if (a.dtype == DType::kBF16) {
    embedding_backward_kernel<<<blocks, 128, 0, stream>>>(
        counts, start, position, ordered, a.hidden, static_cast<const bf16*>(a.d_out), a.d_table);
  } else {
    embedding_backward_kernel<<<blocks, 128, 0, stream>>>(
        counts, start, position, ordered, a.hidden, static_cast<const float*>(a.d_out), a.d_table);
  }
  context->Launched("embedding_backward");
}

}  // namespace octavo::cuda
