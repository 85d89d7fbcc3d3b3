// Embedding lookup and its gradient.
//
// The gradient must not depend on the order of threads, so positions are grouped by token first: a
// histogram, a scan over the vocabulary, a scatter (unordered within a token), and then a block for
// (token that occurs, 512 columns) that ranks its positions and adds their rows: four threads a
// column vector, each a quarter of the positions in order.
// A token that fills a large part of the batch (bytes, padding) would keep few blocks busy, so it
// is taken apart by position: a block for (token, 1/64 of the batch, 512 columns) finds its rows by
// scanning the tokens, and the 64 sums are added in order.
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

// A token is frequent from 1/16 of the batch on: there are at most 16 of them.
inline constexpr std::int32_t kMostFrequent = 16;
inline constexpr std::int64_t kPieces = 64;
constexpr std::int32_t FrequentFrom(std::int64_t count) {
  return static_cast<std::int32_t>(count / kMostFrequent > 512 ? count / kMostFrequent : 512);
}

struct Frequent {
  std::int32_t count;
  std::int32_t token[kMostFrequent];  // in no order: each is summed by itself
};

// start[v] = Σ counts before v, cursor likewise; distinct[] lists the tokens that occur, their
// number in distinct_count. One block of 1024 threads.
__global__ void __launch_bounds__(1024)
    scan_tokens_kernel(const std::int32_t* counts, std::int64_t vocab, std::int32_t frequent_from,
                       std::int32_t* start, std::int32_t* cursor, std::int32_t* distinct,
                       std::int32_t* distinct_count, Frequent* frequent) {
  __shared__ std::int64_t warp_sum[32];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  if (threadIdx.x == 0) {
    frequent->count = 0;
  }
  __syncthreads();
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
        if (static_cast<std::int32_t>(own[j]) >= frequent_from) {
          frequent->token[atomicAdd(&frequent->count, 1)] = static_cast<std::int32_t>(v);
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

// Block (piece, 512 columns, frequent token): the sum of the rows of its positions within the
// piece, in order, to partial [kMostFrequent, kPieces, hidden]. A chunk of positions becomes a list
// of matches in shared memory (in order: counts of warps, then of lanes); four threads a column
// vector each add a quarter of it.
template <class T>
__global__ void __launch_bounds__(256, 4)
    sum_frequent_kernel(const std::int32_t* tokens, std::int64_t count, const Frequent* frequent,
                        std::int64_t hidden, const T* d_out, float* partial) {
  __shared__ std::int32_t match[1024], warp_count[8];
  __shared__ float part[3][64][9];
  if (static_cast<std::int32_t>(blockIdx.z) >= frequent->count) {
    return;
  }
  const std::int32_t token = frequent->token[blockIdx.z];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int vector = threadIdx.x & 63, quarter = threadIdx.x >> 6;
  const std::int64_t col = blockIdx.y * 512 + vector * 8;
  const std::int64_t each = CeilDiv(count, kPieces), begin = blockIdx.x * each;
  const std::int64_t end = min(count, begin + each);
  float sum[8] = {};
  for (std::int64_t base = begin; base < end; base += 1024) {
    unsigned hits[4];  // of the warp's four rows of 32 positions
    int mine = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const std::int64_t at = base + warp * 128 + j * 32 + lane;
      hits[j] = __ballot_sync(kFullMask, at < end && tokens[at] == token);
      mine += __popc(hits[j]);
    }
    __syncthreads();  // the last chunk's matches are added
    if (lane == 0) {
      warp_count[warp] = mine;
    }
    __syncthreads();
    int place = 0, found = 0;
#pragma unroll
    for (int w = 0; w < 8; ++w) {
      place += w < warp ? warp_count[w] : 0;
      found += warp_count[w];
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if ((hits[j] >> lane & 1) != 0) {
        match[place + __popc(hits[j] & ((1u << lane) - 1))] = warp * 128 + j * 32 + lane;
      }
      place += __popc(hits[j]);
    }
    __syncthreads();
    if (col < hidden) {
      const int span = (found + 3) / 4, first = min(found, quarter * span);
      const int last = min(found, first + span);
#pragma unroll 8
      for (int i = first; i < last; ++i) {
        float v[8];
        Load8(d_out + (base + match[i]) * hidden + col, v);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          sum[j] += v[j];
        }
      }
    }
  }
  if (quarter > 0) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      part[quarter - 1][vector][j] = sum[j];
    }
  }
  __syncthreads();
  if (quarter == 0 && col < hidden) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      sum[j] = ((sum[j] + part[0][vector][j]) + part[1][vector][j]) + part[2][vector][j];
    }
    Store8(partial + (blockIdx.z * kPieces + blockIdx.x) * hidden + col, sum);
  }
}

// d_table[token] += Σ pieces, in order. A thread a column, blockIdx.y: which frequent token.
__global__ void __launch_bounds__(256)
    add_frequent_kernel(const float* partial, const Frequent* frequent, std::int64_t hidden,
                        float* d_table) {
  const std::int64_t col = static_cast<std::int64_t>(blockIdx.x) * 256 + threadIdx.x;
  if (static_cast<std::int32_t>(blockIdx.y) >= frequent->count || col >= hidden) {
    return;
  }
  float sum = 0;
#pragma unroll 16
  for (std::int64_t i = 0; i < kPieces; ++i) {
    sum += partial[(blockIdx.y * kPieces + i) * hidden + col];
  }
  d_table[frequent->token[blockIdx.y] * hidden + col] += sum;
}

inline constexpr int kRanked = 2048;  // positions that fit into shared memory at a time

// Block x, x + gridDim.x, … of the tokens that occur, but for frequent ones; blockIdx.y: 512
// columns. Up to kRanked positions are ranked in shared memory; more (a batch beyond 32768 tokens)
// are found in order by their rank in global memory, kRanked at a time.
template <class T>
__global__ void __launch_bounds__(256, 4)
    embedding_backward_kernel(const std::int32_t* counts, const std::int32_t* start,
                              const std::int32_t* distinct, const std::int32_t* distinct_count,
                              const std::int32_t* position, std::int32_t frequent_from,
                              std::int64_t hidden, const T* d_out, float* d_table) {
  __shared__ std::int32_t unordered[kRanked], order[kRanked];
  __shared__ float part[3][64][9];
  const int vector = threadIdx.x & 63, quarter = threadIdx.x >> 6;
  const std::int64_t col = blockIdx.y * 512 + vector * 8;
  const int total = *distinct_count;
  for (int d = blockIdx.x; d < total; d += gridDim.x) {
    const std::int64_t token = distinct[d];
    const std::int32_t n = counts[token];
    if (n >= frequent_from) {
      continue;
    }
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

template <class T>
void LaunchSums(OpsContext* context, const EmbeddingBackwardArgs& a, const std::int32_t* counts,
                const std::int32_t* start, const std::int32_t* distinct,
                const std::int32_t* distinct_count, const std::int32_t* position,
                const Frequent* frequent) {
  const std::int32_t frequent_from = FrequentFrom(a.count);
  const T* d_out = static_cast<const T*>(a.d_out);
  const unsigned columns = Blocks(a.hidden, 512);
  const unsigned x = static_cast<unsigned>(a.count < 1024 ? a.count : 1024);
  embedding_backward_kernel<<<dim3(x, columns), 256, 0, context->stream>>>(
      counts, start, distinct, distinct_count, position, frequent_from, a.hidden, d_out, a.d_table);
  if (a.count < frequent_from) {
    return;  // none can be
  }
  OCTAVO_CHECK(kMostFrequent * kPieces * a.hidden * 4 <= context->scratch_bytes,
               "hidden = %lld needs more scratch than there is", static_cast<long long>(a.hidden));
  float* partial = reinterpret_cast<float*>(context->scratch);
  sum_frequent_kernel<<<dim3(kPieces, columns, kMostFrequent), 256, 0, context->stream>>>(
      a.tokens, a.count, frequent, a.hidden, d_out, partial);
  add_frequent_kernel<<<dim3(Blocks(a.hidden, 256), kMostFrequent), 256, 0, context->stream>>>(
      partial, frequent, a.hidden, a.d_table);
}

}  // namespace

// counts, start and cursor of the vocabulary; distinct tokens, positions, one counter; frequent
// ones.
std::int64_t EmbeddingBackwardWorkspaceBytes(std::int64_t tokens, std::int64_t vocab) {
  return 4 * (3 * vocab + 2 * tokens + 4) + static_cast<std::int64_t>(sizeof(Frequent));
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
  Frequent* frequent = reinterpret_cast<Frequent*>(distinct_count + 1);
  const std::int32_t frequent_from = FrequentFrom(a.count);
  cudaMemsetAsync(counts, 0, sizeof(std::int32_t) * a.vocab, stream);
  count_tokens_kernel<<<Blocks(a.count, 256), 256, 0, stream>>>(a.tokens, a.count, a.vocab, counts);
  scan_tokens_kernel<<<1, 1024, 0, stream>>>(counts, a.vocab, frequent_from, start, cursor,
                                             distinct, distinct_count, frequent);
  scatter_tokens_kernel<<<Blocks(a.count, 256), 256, 0, stream>>>(a.tokens, a.count, a.vocab,
                                                                  cursor, position);
  if (a.dtype == DType::kBF16) {
    LaunchSums<bf16>(context, a, counts, start, distinct, distinct_count, position, frequent);
  } else {
    LaunchSums<float>(context, a, counts, start, distinct, distinct_count, position, frequent);
  }
  context->Launched("embedding_backward");
}

}  // namespace octavo::cuda
