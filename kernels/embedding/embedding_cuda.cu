// Embedding lookup and its gradient.
//
// The gradient must not depend on the order of threads, so positions are grouped by token first: a
// histogram, a scan over the vocabulary, a scatter (unordered within a token), and then a block for
// (token that occurs, 512 columns) that ranks its positions and adds their rows: four threads a
// column vector, each a quarter of the positions in order.
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

// start[v] = Σ counts before v, cursor likewise; distinct[] lists the tokens that occur, their
// number in distinct_count. One block of 1024 threads.
__global__ void __launch_bounds__(1024)
    scan_tokens_kernel(const std::int32_t* counts, std::int64_t vocab, std::int32_t* start,
                       std::int32_t* cursor, std::int32_t* distinct, std::int32_t* distinct_count) {
  __shared__ std::int64_t warp_sum[32];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  std::int64_t carry = 0;  // occurrences in the low half, distinct tokens in the high half
  for (std::int64_t base = 0; base < vocab; base += 4096) {
    std::int64_t own[4], sum = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const std::int64_t v = base + threadIdx.x * 4 + j;
      const std::int64_t n = v < vocab ? counts[v] : 0;
      own[j] = n + (n > 0 ? std::int64_t{1} << 32 : 0);
      sum += own[j];
    }
    std::int64_t inclusive = sum;
#pragma unroll
    for (int o = 1; o < 32; o <<= 1) {
      const std::int64_t left = __shfl_up_sync(kFullMask, inclusive, o);
      inclusive += lane >= o ? left : 0;
    }
    if (lane == 31) {
      warp_sum[warp] = inclusive;
    }
    __syncthreads();
    std::int64_t before = carry + inclusive - sum;
    for (int w = 0; w < 32; ++w) {
      before += w < warp ? warp_sum[w] : 0;
      carry += warp_sum[w];
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const std::int64_t v = base + threadIdx.x * 4 + j;
      if (v < vocab) {
        start[v] = static_cast<std::int32_t>(before);
        cursor[v] = static_cast<std::int32_t>(before);
        if (own[j] != 0) {
          distinct[before >> 32] = static_cast<std::int32_t>(v);
        }
      }
      before += own[j];
    }
  }
  if (threadIdx.x == 0) {
    *distinct_count = static_cast<std::int32_t>(carry >> 32);
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

inline constexpr int kRanked = 2048;  // positions that fit into shared memory at a time

// Block x, x + gridDim.x, … of the tokens that occur; blockIdx.y: 512 columns.
template <class T>
__global__ void __launch_bounds__(256)
    embedding_backward_kernel(const std::int32_t* counts, const std::int32_t* start,
                              const std::int32_t* distinct, const std::int32_t* distinct_count,
                              const std::int32_t* position, std::int64_t hidden, const T* d_out,
                              float* d_table) {
  __shared__ std::int32_t unordered[kRanked], order[kRanked];
  __shared__ float part[3][64][9];
  const int vector = threadIdx.x & 63, quarter = threadIdx.x >> 6;
  const std::int64_t col = blockIdx.y * 512 + vector * 8;
  const int total = *distinct_count;
  for (int d = blockIdx.x; d < total; d += gridDim.x) {
    const std::int64_t token = distinct[d];
    const std::int32_t n = counts[token];
    const std::int32_t* mine = position + start[token];
    float sum[8] = {};
    // Chunks of kRanked by value: positions below `bound` come first whatever their place in
    // memory.
    std::int32_t done = 0;
    std::int32_t above = -1;  // positions up to this one are added
    while (done < n) {
      __syncthreads();
      std::int32_t take = n - done;
      if (n <= kRanked) {
        for (int i = threadIdx.x; i < n; i += 256) {
          unordered[i] = mine[i];
        }
        __syncthreads();
        for (int i = threadIdx.x; i < n; i += 256) {
          const std::int32_t p = unordered[i];
          std::int32_t rank = 0;
          for (int j = 0; j < n; ++j) {
            rank += unordered[j] < p ? 1 : 0;
          }
          order[rank] = p;
        }
      } else {
        // Very frequent token: rank in global memory, keep the next kRanked.
        take = min(take, kRanked);
        for (std::int32_t i = threadIdx.x; i < n; i += 256) {
          const std::int32_t p = mine[i];
          std::int32_t rank = 0;
          if (p > above) {
            for (std::int32_t j = 0; j < n; ++j) {
              rank += mine[j] < p ? 1 : 0;
            }
            if (rank >= done && rank < done + take) {
              order[rank - done] = p;
            }
          }
        }
      }
      __syncthreads();
      if (col < hidden) {
        const int span = (take + 3) / 4, first = min(take, quarter * span);
        const int last = min(take, first + span);
#pragma unroll 8
        for (int i = first; i < last; ++i) {
          float v[8];
          Load8(d_out + order[i] * hidden + col, v);
#pragma unroll
          for (int j = 0; j < 8; ++j) {
            sum[j] += v[j];
          }
        }
      }
      above = order[take - 1];
      done += take;
    }
    if (quarter > 0) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        part[quarter - 1][vector][j] = sum[j];
      }
    }
    __syncthreads();
    if (quarter == 0 && col < hidden) {
      float table[8];
      Load8Plain(d_table + token * hidden + col, table);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        table[j] += ((sum[j] + part[0][vector][j]) + part[1][vector][j]) + part[2][vector][j];
      }
      Store8(d_table + token * hidden + col, table);
    }
  }
}

}  // namespace

// counts, start and cursor of the vocabulary; distinct tokens, positions, one counter.
std::int64_t EmbeddingBackwardWorkspaceBytes(std::int64_t tokens, std::int64_t vocab) {
  return 4 * (3 * vocab + 2 * tokens + 4);
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
  std::int32_t* distinct = cursor + a.vocab;
  std::int32_t* position = distinct + a.count;
  std::int32_t* distinct_count = position + a.count;
  cudaMemsetAsync(counts, 0, sizeof(std::int32_t) * a.vocab, stream);
  count_tokens_kernel<<<Blocks(a.count, 256), 256, 0, stream>>>(a.tokens, a.count, a.vocab, counts);
  scan_tokens_kernel<<<1, 1024, 0, stream>>>(counts, a.vocab, start, cursor, distinct,
                                             distinct_count);
  scatter_tokens_kernel<<<Blocks(a.count, 256), 256, 0, stream>>>(a.tokens, a.count, a.vocab,
                                                                  cursor, position);
  const unsigned x = static_cast<unsigned>(a.count < 1024 ? a.count : 1024);
  const dim3 grid(x, Blocks(a.hidden, 512));
  if (a.dtype == DType::kBF16) {
    embedding_backward_kernel<<<grid, 256, 0, stream>>>(
        counts, start, distinct, distinct_count, position, a.hidden,
        static_cast<const bf16*>(a.d_out), a.d_table);
  } else {
    embedding_backward_kernel<<<grid, 256, 0, stream>>>(
        counts, start, distinct, distinct_count, position, a.hidden,
        static_cast<const float*>(a.d_out), a.d_table);
  }
  context->Launched("embedding_backward");
}

}  // namespace octavo::cuda
