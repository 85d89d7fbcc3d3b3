// Router on the GPU: a warp a token, its logits in registers (expert e in lane e % 32), everything
// in FP32 with accurate exponentials.
//
// Selection works on ordered integer keys (NaN below −∞, −0 equal to +0), so a round of top-k is
// one warp maximum of keys and one warp minimum of indices: ties go to the lower index by
// construction. Statistics: a block handles 32 consecutive tokens of one segment and writes partial
// sums to scratch; a second kernel adds them in order, so nothing depends on the order of blocks.
#include "base/check.h"
#include "kernels/cuda/context.h"
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/ops_cuda.h"

namespace octavo::cuda {
namespace {

inline constexpr int kExpertsMax = 1024;
inline constexpr int kTopKMax = 32;  // a lane a choice
inline constexpr int kChunkTokens = 32;
inline constexpr int kWarps = 8;
inline constexpr float kNormaliserFloor = 1e-20f;  // NUMERICS 8
inline constexpr float kNegativeInfinity = -__builtin_huge_valf();

// Larger key, better expert; NaN is 0, the least.
__device__ __forceinline__ std::uint32_t OrderKey(float v) {
  const std::uint32_t bits = __float_as_uint(__fadd_rn(v, 0.0f));
  if ((bits & 0x7FFFFFFFu) > kInfinityBits) {
    return 0;
  }
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

// Softmax over the warp's kPer·32 values (absent ones −∞): returns log Σ exp.
template <int kPer>
__device__ __forceinline__ float WarpSoftmax(const float x[kPer], int experts, float y[kPer]) {
  const int lane = threadIdx.x & 31;
  float top = kNegativeInfinity;
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    top = fmaxf(top, x[i]);
  }
  top = WarpMax(top);
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    y[i] = i * 32 + lane < experts ? expf(x[i] - top) : 0.0f;
    sum += y[i];
  }
  sum = WarpSum(sum);
  const float inverse = 1.0f / sum;
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    y[i] *= inverse;
  }
  return top + static_cast<float>(log(static_cast<double>(sum)));
}

__device__ __forceinline__ float SigmoidExact(float x) { return 1.0f / (1.0f + expf(-x)); }

template <int kPer>
__device__ __forceinline__ void LoadRow(const float* row, int experts, float x[kPer]) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    const int e = i * 32 + lane;
    x[i] = e < experts ? row[e] : kNegativeInfinity;
  }
}

// Value of expert e, from whichever lane holds it.
template <int kPer>
__device__ __forceinline__ float Pick(const float x[kPer], int e) {
  float found = 0;
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    const float candidate = __shfl_sync(kFullMask, x[i], e & 31);
    found = (e >> 5) == i ? candidate : found;
  }
  return found;
}

// Group limit: key of experts outside the topk_group best groups becomes −∞'s. Rare, so simple:
// values through shared memory, a lane a group.
template <int kPer>
__device__ void LimitToGroups(const RouterConfig& c, const float v[kPer], float* values,
                              float* group_score, std::uint32_t key[kPer]) {
  const int lane = threadIdx.x & 31, size = c.experts / c.n_group;
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    if (i * 32 + lane < c.experts) {
      values[i * 32 + lane] = v[i];
    }
  }
  __syncwarp();
  for (int g = lane; g < c.n_group; g += 32) {
    std::uint32_t best = 0, second = 0;
    int best_at = -1, second_at = -1;
    for (int i = 0; i < size; ++i) {
      const std::uint32_t k = OrderKey(values[g * size + i]);
      if (best_at < 0 || k > best) {
        second = best, second_at = best_at;
        best = k, best_at = i;
      } else if (second_at < 0 || k > second) {
        second = k, second_at = i;
      }
    }
    group_score[g] = size == 1 ? values[g * size + best_at]
                               : values[g * size + best_at] + values[g * size + second_at];
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    const int e = i * 32 + lane;
    if (e < c.experts) {
      const int g = e / size;
      const std::uint32_t own = OrderKey(group_score[g]);
      int better = 0;
      for (int h = 0; h < c.n_group; ++h) {
        const std::uint32_t other = OrderKey(group_score[h]);
        better += other > own || (other == own && h < g) ? 1 : 0;
      }
      key[i] = better < c.topk_group ? key[i] : OrderKey(kNegativeInfinity);
    }
  }
  __syncwarp();
}

struct ForwardScratch {
  float* score;          // [chunks, E]
  std::int32_t* counts;  // [chunks, E]
  double* z;             // [chunks]
};

template <int kPer>
__global__ void __launch_bounds__(kWarps * 32)
    router_forward_kernel(RouterForwardArgs a, std::int64_t chunks_per_segment,
                          ForwardScratch scratch) {
  extern __shared__ float
      shared[];  // [E] counts, [8][E] scores, then group limit: [8][E + n_group]
  __shared__ double z_part[kWarps];
  const RouterConfig& c = a.config;
  const int experts = c.experts, k = c.experts_per_token;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  std::int32_t* counts = reinterpret_cast<std::int32_t*>(shared);
  float* warp_scores = shared + experts + warp * experts;
  float* values = shared + experts + kWarps * experts + warp * (experts + c.n_group);
  for (int e = threadIdx.x; e < experts; e += kWarps * 32) {
    counts[e] = 0;
  }
  __syncthreads();

  const std::int64_t segment = blockIdx.x / chunks_per_segment;
  const std::int64_t segment_end = min(a.tokens, (segment + 1) * a.tokens_per_segment);
  const std::int64_t first =
      segment * a.tokens_per_segment + blockIdx.x % chunks_per_segment * kChunkTokens;
  const std::int64_t last = min(first + kChunkTokens, segment_end);
  const bool by_logit = c.score != RouterScore::kSigmoid && c.n_group == 1 && a.bias == nullptr;

  float score_sum[kPer] = {};
  double z_sum = 0;
  for (std::int64_t t = first + warp; t < last; t += kWarps) {
    float logit[kPer], score[kPer];
    LoadRow<kPer>(a.logits + t * experts, experts, logit);
    const float lse = WarpSoftmax<kPer>(logit, experts, score);
    bool finite = true;
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      const bool in = i * 32 + lane < experts;
      finite &= !in || (__float_as_uint(logit[i]) & 0x7FFFFFFFu) < kInfinityBits;
      if (c.score == RouterScore::kSigmoid) {
        score[i] = in ? SigmoidExact(logit[i]) : 0.0f;
      }
      score_sum[i] += score[i];
    }
    finite = __all_sync(kFullMask, finite);

    std::uint32_t key[kPer];
    if (by_logit) {
#pragma unroll
      for (int i = 0; i < kPer; ++i) {
        key[i] = OrderKey(logit[i]);
      }
    } else {
      float v[kPer];
#pragma unroll
      for (int i = 0; i < kPer; ++i) {
        const int e = i * 32 + lane;
        v[i] = score[i] + (a.bias != nullptr && e < experts ? a.bias[e] : 0.0f);
        key[i] = OrderKey(v[i]);
      }
      if (c.n_group > 1) {
        LimitToGroups<kPer>(c, v, values, values + experts, key);
      }
    }
    // Keys get one added, so that 0 can mean "absent or taken" (the largest key, +∞'s, has room).
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      key[i] = i * 32 + lane < experts ? key[i] + 1 : 0;
    }
    int chosen = 0;  // lane j: choice j
    for (int j = 0; j < k; ++j) {
      std::uint32_t best = 0;
#pragma unroll
      for (int i = 0; i < kPer; ++i) {
        best = max(best, key[i]);
      }
      best = __reduce_max_sync(kFullMask, best);
      unsigned index = 0xFFFFFFFFu;
#pragma unroll
      for (int i = kPer - 1; i >= 0; --i) {
        index = key[i] == best ? static_cast<unsigned>(i * 32 + lane) : index;
      }
      index = __reduce_min_sync(kFullMask, index);
#pragma unroll
      for (int i = 0; i < kPer; ++i) {
        key[i] = static_cast<unsigned>(i * 32 + lane) == index ? 0 : key[i];
      }
      chosen = lane == j ? static_cast<int>(index) : chosen;
    }

    // Weights: lane j holds choice j.
    const bool mine = lane < k;
    float weight = 0;
    {
      float picked = 0;
#pragma unroll
      for (int i = 0; i < kPer; ++i) {
        const float from = c.score == RouterScore::kTopKSoftmax ? logit[i] : score[i];
        const float candidate = __shfl_sync(kFullMask, from, chosen & 31);
        picked = (chosen >> 5) == i ? candidate : picked;
      }
      if (c.score == RouterScore::kTopKSoftmax) {
        const float top = WarpMax(mine ? picked : kNegativeInfinity);
        const float exponent = mine ? expf(picked - top) : 0.0f;
        weight = exponent / WarpSum(exponent);
      } else {
        const float sum = WarpSum(mine ? picked : 0.0f);
        weight = c.normalize_topk ? picked / (sum + kNormaliserFloor) : picked;
      }
    }
    weight = finite ? weight * c.routed_scaling_factor : __int_as_float(0x7FC00000);
    if (mine) {
      a.topk_index[t * k + lane] = chosen;
      a.topk_weight[t * k + lane] = weight;
      atomicAdd(&counts[chosen], 1);
    }
    if (lane == 0) {
      a.logsumexp[t] = lse;
    }
    z_sum += static_cast<double>(lse) * static_cast<double>(lse);
  }
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    if (i * 32 + lane < experts) {
      warp_scores[i * 32 + lane] = score_sum[i];
    }
  }
  if (lane == 0) {
    z_part[warp] = z_sum;
  }
  __syncthreads();
  for (int e = threadIdx.x; e < experts; e += kWarps * 32) {
    float sum = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      sum += shared[experts + w * experts + e];
    }
    scratch.score[static_cast<std::int64_t>(blockIdx.x) * experts + e] = sum;
    scratch.counts[static_cast<std::int64_t>(blockIdx.x) * experts + e] = counts[e];
  }
  if (threadIdx.x == 0) {
    double z = 0;
    for (int w = 0; w < kWarps; ++w) {
      z += z_part[w];
    }
    scratch.z[blockIdx.x] = z;
  }
}

// Adds the chunks of a segment: 32 experts a block, 16 threads an expert.
__global__ void __launch_bounds__(512)
    router_sum_kernel(ForwardScratch scratch, int experts, std::int64_t chunks,
                      std::int64_t chunks_per_segment, std::int64_t* counts, float* score_sum,
                      double* z_sum) {
  __shared__ double scores[16][33];
  __shared__ std::int64_t totals[16][33];
  const int c = threadIdx.x & 31, w = threadIdx.x >> 5;
  const int e = blockIdx.x * 32 + c;
  const std::int64_t base = static_cast<std::int64_t>(blockIdx.y) * chunks_per_segment;
  double score = 0;
  std::int64_t total = 0;
  if (e < experts) {
#pragma unroll 4
    for (std::int64_t i = w; i < chunks_per_segment; i += 16) {
      score += static_cast<double>(scratch.score[(base + i) * experts + e]);
      total += scratch.counts[(base + i) * experts + e];
    }
  }
  scores[w][c] = score;
  totals[w][c] = total;
  __syncthreads();
  if (w == 0 && e < experts) {
#pragma unroll
    for (int i = 1; i < 16; ++i) {
      score += scores[i][c];
      total += totals[i][c];
    }
    counts[static_cast<std::int64_t>(blockIdx.y) * experts + e] = total;
    score_sum[static_cast<std::int64_t>(blockIdx.y) * experts + e] = static_cast<float>(score);
  }
  if (blockIdx.x == 0 && blockIdx.y == 0) {
    __shared__ double smem[33];
    double z = 0;
    for (std::int64_t i = threadIdx.x; i < chunks; i += 512) {
      z += scratch.z[i];
    }
    z = BlockSum(z, smem);
    if (threadIdx.x == 0) {
      z_sum[0] = z;
    }
  }
}

// ---------------------------------------------------------------- backward

template <int kPer>
__global__ void __launch_bounds__(kWarps * 32) router_backward_kernel(RouterBackwardArgs a) {
  const RouterConfig& c = a.config;
  const int experts = c.experts, k = c.experts_per_token;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const std::int64_t t = static_cast<std::int64_t>(blockIdx.x) * kWarps + warp;
  if (t >= a.tokens) {
    return;
  }
  float logit[kPer], softmax[kPer], score[kPer], d_score[kPer], d_logit[kPer];
  LoadRow<kPer>(a.logits + t * experts, experts, logit);
  WarpSoftmax<kPer>(logit, experts, softmax);
  const float* aux =
      a.aux_coeff != nullptr ? a.aux_coeff + t / a.tokens_per_segment * experts : nullptr;
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    const int e = i * 32 + lane;
    const bool in = e < experts;
    score[i] = c.score == RouterScore::kSigmoid ? (in ? SigmoidExact(logit[i]) : 0.0f) : softmax[i];
    d_score[i] = in && aux != nullptr ? aux[e] : 0.0f;
    d_logit[i] = 0;
  }
  // Lane j: choice j.
  const bool mine = lane < k;
  const int chosen = mine ? a.topk_index[t * k + lane] : 0;
  const float d_weight = mine ? a.dtopk_weight[t * k + lane] * c.routed_scaling_factor : 0.0f;
  float picked = 0;
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    const float from = c.score == RouterScore::kTopKSoftmax ? logit[i] : score[i];
    const float candidate = __shfl_sync(kFullMask, from, chosen & 31);
    picked = (chosen >> 5) == i ? candidate : picked;
  }
  float d_choice;  // into d_logit for kTopKSoftmax, else into d_score
  if (c.score == RouterScore::kTopKSoftmax) {
    const float top = WarpMax(mine ? picked : kNegativeInfinity);
    const float exponent = mine ? expf(picked - top) : 0.0f;
    const float weight = exponent / WarpSum(exponent);
    const float mean = WarpSum(mine ? weight * d_weight : 0.0f);
    d_choice = weight * (d_weight - mean);
  } else if (c.normalize_topk) {
    const float normaliser = WarpSum(mine ? picked : 0.0f) + kNormaliserFloor;
    const float mean = WarpSum(mine ? d_weight * (picked / normaliser) : 0.0f);
    d_choice = (d_weight - mean) / normaliser;
  } else {
    d_choice = d_weight;
  }
  for (int j = 0; j < k; ++j) {
    const int e = __shfl_sync(kFullMask, chosen, j);
    const float d = __shfl_sync(kFullMask, d_choice, j);
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      if (e == i * 32 + lane) {
        if (c.score == RouterScore::kTopKSoftmax) {
          d_logit[i] += d;
        } else {
          d_score[i] += d;
        }
      }
    }
  }
  if (c.score == RouterScore::kSigmoid) {
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      d_logit[i] += d_score[i] * (score[i] * (1.0f - score[i]));
    }
  } else {
    float dot = 0;
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      dot += softmax[i] * d_score[i];
    }
    dot = WarpSum(dot);
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      d_logit[i] += softmax[i] * (d_score[i] - dot);
    }
  }
  const float z = a.z_coeff != 0.0f ? a.z_coeff * 2.0f * a.logsumexp[t] : 0.0f;
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    const int e = i * 32 + lane;
    if (e < experts) {
      a.dlogits[t * experts + e] = a.z_coeff != 0.0f ? d_logit[i] + z * softmax[i] : d_logit[i];
    }
  }
}

__global__ void __launch_bounds__(1024)
    router_bias_kernel(const std::int64_t* counts, int experts, float rate, float* bias) {
  __shared__ std::int64_t total;
  if (threadIdx.x == 0) {
    std::int64_t sum = 0;
    for (int e = 0; e < experts; ++e) {
      sum += counts[e];
    }
    total = sum;
  }
  __syncthreads();
  for (int e = threadIdx.x; e < experts; e += blockDim.x) {
    const std::int64_t lack = total - experts * counts[e];
    bias[e] += lack > 0 ? rate : (lack < 0 ? -rate : 0.0f);
  }
}

void CheckConfig(const RouterConfig& c) {
  OCTAVO_CHECK(c.experts > 0 && c.experts <= kExpertsMax, "experts = %d must be in 1..%d",
               c.experts, kExpertsMax);
  OCTAVO_CHECK(c.experts_per_token > 0 && c.experts_per_token <= kTopKMax &&
                   c.experts_per_token <= c.experts,
               "experts_per_token = %d must be in 1..%d", c.experts_per_token, kTopKMax);
  OCTAVO_CHECK(c.n_group > 0 && c.experts % c.n_group == 0, "n_group = %d must divide experts = %d",
               c.n_group, c.experts);
}

template <int kPer>
void LaunchForward(OpsContext* context, const RouterForwardArgs& a, std::int64_t chunks,
                   std::int64_t chunks_per_segment, const ForwardScratch& scratch) {
  const int experts = a.config.experts;
  const std::size_t floats =
      experts + kWarps * experts +
      (a.config.n_group > 1 ? static_cast<std::size_t>(kWarps) * (experts + a.config.n_group) : 0);
  const std::size_t smem = floats * sizeof(float);
  if (smem > 48 * 1024) {
    cudaFuncSetAttribute(router_forward_kernel<kPer>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                         static_cast<int>(smem));
  }
  router_forward_kernel<kPer>
      <<<static_cast<unsigned>(chunks), kWarps * 32, smem, context->stream>>>(a, chunks_per_segment,
                                                                              scratch);
}

}  // namespace

void RouterForward(OpsContext* context, const RouterForwardArgs& a) {
  CheckConfig(a.config);
  const int experts = a.config.experts;
  cudaStream_t stream = context->stream;
  if (a.tokens == 0) {
    cudaMemsetAsync(a.counts, 0, sizeof(std::int64_t) * experts, stream);
    cudaMemsetAsync(a.score_sum, 0, sizeof(float) * experts, stream);
    cudaMemsetAsync(a.z_sum, 0, sizeof(double), stream);
    return;
  }
  OCTAVO_CHECK(a.tokens_per_segment > 0, "tokens_per_segment = %lld",
               static_cast<long long>(a.tokens_per_segment));
  const std::int64_t segments = CeilDiv(a.tokens, a.tokens_per_segment);
  const std::int64_t chunks_per_segment = CeilDiv(a.tokens_per_segment, kChunkTokens);
  const std::int64_t chunks = segments * chunks_per_segment;
  OCTAVO_CHECK(chunks * (8 + 8 * experts) <= context->scratch_bytes, "tokens = %lld is too many",
               static_cast<long long>(a.tokens));
  ForwardScratch scratch;
  scratch.z = reinterpret_cast<double*>(context->scratch);
  scratch.score = reinterpret_cast<float*>(scratch.z + chunks);
  scratch.counts = reinterpret_cast<std::int32_t*>(scratch.score + chunks * experts);
  if (experts <= 64) {
    LaunchForward<2>(context, a, chunks, chunks_per_segment, scratch);
  } else if (experts <= 128) {
    LaunchForward<4>(context, a, chunks, chunks_per_segment, scratch);
  } else if (experts <= 256) {
    LaunchForward<8>(context, a, chunks, chunks_per_segment, scratch);
  } else {
    LaunchForward<32>(context, a, chunks, chunks_per_segment, scratch);
  }
  router_sum_kernel<<<dim3(Blocks(experts, 32), static_cast<unsigned>(segments)), 512, 0, stream>>>(
      scratch, experts, chunks, chunks_per_segment, a.counts, a.score_sum, a.z_sum);
  context->Launched("router_forward");
}

void RouterBackward(OpsContext* context, const RouterBackwardArgs& a) {
  CheckConfig(a.config);
  if (a.tokens == 0) {
    return;
  }
  const int experts = a.config.experts;
  const unsigned blocks = Blocks(a.tokens, kWarps);
  if (experts <= 64) {
    router_backward_kernel<2><<<blocks, kWarps * 32, 0, context->stream>>>(a);
  } else if (experts <= 128) {
    router_backward_kernel<4><<<blocks, kWarps * 32, 0, context->stream>>>(a);
  } else if (experts <= 256) {
    router_backward_kernel<8><<<blocks, kWarps * 32, 0, context->stream>>>(a);
  } else {
    router_backward_kernel<32><<<blocks, kWarps * 32, 0, context->stream>>>(a);
  }
  context->Launched("router_backward");
}

void RouterBiasUpdate(OpsContext* context, const RouterBiasUpdateArgs& a) {
  router_bias_kernel<<<1, 1024, 0, context->stream>>>(a.counts, a.experts, a.rate, a.bias);
  context->Launched("router_bias_update");
}

}  // namespace octavo::cuda
