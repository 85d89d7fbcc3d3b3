// Permute and combine on the GPU.
//
// route_index    ranks (token, choice) pairs by (expert, token) without atomics on order: a
// histogram
//                a chunk of tokens, a scan over chunks, then one thread an expert walks its chunk.
// permute        by source row: a warp reads 2 KiB of a row once and stores it `fanout` times.
// combine        by token: a warp gathers its `fanout` rows and adds them in FP32, in order.
// Offsets are 64-bit: rows × hidden passes 2^31 in real models.
#include "base/check.h"
#include "kernels/cuda/context.h"
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/ops_cuda.h"

namespace octavo::cuda {
namespace {

// ---------------------------------------------------------------- route index

inline constexpr int kChunkTokens = 128;

__global__ void __launch_bounds__(256)
    route_histogram_kernel(const std::int32_t* topk, std::int64_t tokens, int experts, int k,
                           std::int32_t* hist) {
  extern __shared__ std::int32_t count[];
  for (int e = threadIdx.x; e < experts; e += blockDim.x) {
    count[e] = 0;
  }
  __syncthreads();
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * kChunkTokens * k;
  const std::int64_t last = min(first + static_cast<std::int64_t>(kChunkTokens) * k, tokens * k);
  for (std::int64_t i = first + threadIdx.x; i < last; i += blockDim.x) {
    const int e = topk[i];
    if (e >= 0 && e < experts) {
      atomicAdd(&count[e], 1);
    }
  }
  __syncthreads();
  for (int e = threadIdx.x; e < experts; e += blockDim.x) {
    hist[static_cast<std::int64_t>(blockIdx.x) * experts + e] = count[e];
  }
}

// hist[chunk][e] becomes the rows of e in earlier chunks; counts and begins of experts. One block.
__global__ void __launch_bounds__(1024)
    route_scan_kernel(std::int32_t* hist, std::int64_t chunks, int experts, std::int64_t align,
                      std::int64_t* counts, std::int64_t* begin) {
  extern __shared__ std::int64_t padded[];  // [experts]
  // `parts` threads share an expert: each adds up its range of chunks, then offsets it.
  const int parts = max(1, 1024 / experts);
  __shared__ std::int32_t part_sum[1024];
  for (int e0 = 0; e0 < experts; e0 += 1024 / parts) {
    const int e = e0 + static_cast<int>(threadIdx.x) % (1024 / parts);
    const int part = static_cast<int>(threadIdx.x) / (1024 / parts);
    const std::int64_t span = CeilDiv(chunks, static_cast<std::int64_t>(parts));
    const std::int64_t c0 = part * span, c1 = min(chunks, c0 + span);
    const bool on = e < experts && part < parts;
    std::int32_t sum = 0;
    if (on) {
      for (std::int64_t c = c0; c < c1; ++c) {
        sum += hist[c * experts + e];
      }
    }
    part_sum[threadIdx.x] = sum;
    __syncthreads();
    if (on) {
      std::int32_t before = 0;
      for (int q = 0; q < part; ++q) {
        before += part_sum[q * (1024 / parts) + static_cast<int>(threadIdx.x) % (1024 / parts)];
      }
      for (std::int64_t c = c0; c < c1; ++c) {
        const std::int32_t here = hist[c * experts + e];
        hist[c * experts + e] = before;
        before += here;
      }
      if (part == parts - 1) {
        counts[e] = before;
        padded[e] = CeilDiv(static_cast<std::int64_t>(before), align) * align;
      }
    }
    __syncthreads();
  }
  if (threadIdx.x < 32) {
    std::int64_t carry = 0;
    for (int base = 0; base < experts; base += 32) {
      const int e = base + static_cast<int>(threadIdx.x);
      const std::int64_t own = e < experts ? padded[e] : 0;
      std::int64_t sum = own;
#pragma unroll
      for (int o = 1; o < 32; o <<= 1) {
        const std::int64_t left = __shfl_up_sync(kFullMask, sum, o);
        sum += static_cast<int>(threadIdx.x) >= o ? left : 0;
      }
      if (e < experts) {
        begin[e] = carry + sum - own;
      }
      carry += __shfl_sync(kFullMask, sum, 31);
    }
  }
}

__global__ void __launch_bounds__(256)
    route_place_kernel(const std::int32_t* topk, std::int64_t tokens, int experts, int k,
                       const std::int32_t* hist, const std::int64_t* begin,
                       std::int32_t* dest_row) {
  extern __shared__ std::int32_t chosen[];  // [kChunkTokens · k], then their destinations
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * kChunkTokens * k;
  const int n =
      static_cast<int>(min(static_cast<std::int64_t>(kChunkTokens) * k, tokens * k - first));
  std::int32_t* place = chosen + kChunkTokens * k;
  for (int i = threadIdx.x; i < n; i += blockDim.x) {
    chosen[i] = topk[first + i];
    place[i] = -1;
  }
  __syncthreads();
  for (int e = threadIdx.x; e < experts; e += blockDim.x) {
    std::int32_t next = static_cast<std::int32_t>(begin[e]) +
                        hist[static_cast<std::int64_t>(blockIdx.x) * experts + e];
#pragma unroll 8
    for (int i = 0; i < n; ++i) {
      if (chosen[i] == e) {
        place[i] = next++;
      }
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < n; i += blockDim.x) {
    dest_row[first + i] = place[i];
  }
}

// ---------------------------------------------------------------- permute

inline constexpr int kSegmentBytes = 2048;  // of a row, by one warp: 4 loads of 16 bytes a lane

__global__ void __launch_bounds__(256) permute_kernel(PermuteArgs a, int segments) {
  const int lane = threadIdx.x & 31;
  const std::int64_t unit = static_cast<std::int64_t>(blockIdx.x) * 8 + (threadIdx.x >> 5);
  const std::int64_t row = unit / segments;
  const int segment = static_cast<int>(unit % segments);
  if (row >= a.rows) {
    return;
  }
  const std::int32_t mine = lane < a.fanout ? a.dest_row[row * a.fanout + lane] : -1;
  const std::int64_t first = static_cast<std::int64_t>(segment) * kSegmentBytes + lane * 16;
  const std::uint8_t* src = a.src.payload + row * a.src.payload_stride;
  uint4 w[4];
#pragma unroll
  for (int u = 0; u < 4; ++u) {
    const std::int64_t at = first + u * 512;
    if (at < a.payload_bytes) {
      w[u] = LoadStream(src + at);
    }
  }
  for (int j = 0; j < a.fanout; ++j) {
    const std::int32_t dest = __shfl_sync(kFullMask, mine, j);
    if (dest < 0) {
      continue;
    }
    std::uint8_t* dst = a.dst.payload + dest * a.dst.payload_stride;
#pragma unroll
    for (int u = 0; u < 4; ++u) {
      const std::int64_t at = first + u * 512;
      if (at < a.payload_bytes) {
        *reinterpret_cast<uint4*>(dst + at) = w[u];
      }
    }
  }
  // dequant_scales: the segments of a row share them.
  if (a.tiles > 0) {
    const std::uint8_t* from = a.src.dequant_scale + row * a.src.scale_row_stride;
    for (int t = segment * 32 + lane; t < a.tiles; t += segments * 32) {
      const float d = *reinterpret_cast<const float*>(from + t * a.src.scale_tile_stride);
      for (int j = 0; j < a.fanout; ++j) {
        const std::int32_t dest = a.dest_row[row * a.fanout + j];
        if (dest >= 0) {
          *reinterpret_cast<float*>(a.dst.dequant_scale + dest * a.dst.scale_row_stride +
                                    t * a.dst.scale_tile_stride) = d;
        }
      }
    }
  }
  if (segment == 0 && lane < a.fanout && mine >= 0 && a.src.weight != nullptr &&
      a.dst.weight != nullptr) {
    *reinterpret_cast<float*>(a.dst.weight + mine * a.dst.weight_stride) =
        *reinterpret_cast<const float*>(a.src.weight + row * a.src.weight_stride + lane * 4);
  }
}

// A block a group and 16 of its (at most 127) padding rows; a warp a row.
__global__ void __launch_bounds__(256) pad_rows_kernel(PadRowsArgs a) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = blockIdx.x;
  const std::int64_t begin = a.groups.begin[g], rows = a.groups.rows[g];
  const std::int64_t end = begin + (rows + kRowAlign - 1) / kRowAlign * kRowAlign;
  for (std::int64_t row = begin + rows + blockIdx.y * 8 + warp; row < end; row += gridDim.y * 8) {
    std::uint8_t* dst = a.dst.payload + row * a.dst.payload_stride;
    for (std::int64_t at = lane * 16; at < a.payload_bytes; at += 512) {
      *reinterpret_cast<uint4*>(dst + at) = make_uint4(0, 0, 0, 0);
    }
    for (int t = lane; t < a.tiles; t += 32) {
      *reinterpret_cast<float*>(a.dst.dequant_scale + row * a.dst.scale_row_stride +
                                t * a.dst.scale_tile_stride) = kDequantScaleMin;
    }
    if (lane == 0 && a.dst.weight != nullptr) {
      *reinterpret_cast<float*>(a.dst.weight + row * a.dst.weight_stride) = 0.0f;
    }
  }
}

// ---------------------------------------------------------------- segments

__global__ void fill_i32_kernel(std::int32_t* p, std::int64_t n, std::int32_t value) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < n) {
    p[i] = value;
  }
}
__global__ void expand_segments_kernel(ExpandSegmentsArgs a) {
  for (std::int64_t s = blockIdx.y; s < a.count; s += gridDim.y) {
    const RowSegment segment = a.segments[s];
    for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
         i < segment.rows; i += static_cast<std::int64_t>(gridDim.x) * blockDim.x) {
      const std::int64_t from = segment.src_begin + i, to = segment.dst_begin + i;
      const std::int64_t at = a.invert ? to : from;
      if (at < a.src_rows) {
        a.dest_row[at] = static_cast<std::int32_t>(a.invert ? from : to);
      }
    }
  }
}

// ---------------------------------------------------------------- combine

// A warp a token and 256·kVectors columns; kFan rows are in flight at a time.
template <class S, class D>
__global__ void __launch_bounds__(256, 2) combine_kernel(CombineArgs a, int segments) {
  constexpr int kFan = 4, kVectors = 2;
  const int lane = threadIdx.x & 31;
  const std::int64_t unit = static_cast<std::int64_t>(blockIdx.x) * 8 + (threadIdx.x >> 5);
  const std::int64_t token = unit / segments;
  const int segment = static_cast<int>(unit % segments);
  if (token >= a.tokens) {
    return;
  }
  const std::int32_t mine = lane < a.fanout ? a.source_row[token * a.fanout + lane] : -1;
  const std::int64_t first = static_cast<std::int64_t>(segment) * 256 * kVectors + lane * 8;
  float sum[kVectors][8];
  D* y = static_cast<D*>(a.y) + token * a.hidden;
#pragma unroll
  for (int u = 0; u < kVectors; ++u) {
    const std::int64_t col = first + u * 256;
    if (a.accumulate && col < a.hidden) {
      Load8Plain(y + col, sum[u]);
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        sum[u][i] = 0;
      }
    }
  }
  for (int j0 = 0; j0 < a.fanout; j0 += kFan) {
    Raw8<S> raw[kFan][kVectors];
    std::int32_t from[kFan];
#pragma unroll
    for (int j = 0; j < kFan; ++j) {
      from[j] = __shfl_sync(kFullMask, mine, (j0 + j) & 31);
      from[j] = j0 + j < a.fanout ? from[j] : -1;
      const S* src = reinterpret_cast<const S*>(a.src.payload + from[j] * a.src.payload_stride);
#pragma unroll
      for (int u = 0; u < kVectors; ++u) {
        if (from[j] >= 0 && first + u * 256 < a.hidden) {
          LoadRaw(src + first + u * 256, raw[j][u]);
        }
      }
    }
#pragma unroll
    for (int j = 0; j < kFan; ++j) {
      if (from[j] >= 0) {
#pragma unroll
        for (int u = 0; u < kVectors; ++u) {
          if (first + u * 256 < a.hidden) {
            float v[8];
            Unpack(raw[j][u], v);
#pragma unroll
            for (int i = 0; i < 8; ++i) {
              sum[u][i] += v[i];
            }
          }
        }
      }
    }
  }
#pragma unroll
  for (int u = 0; u < kVectors; ++u) {
    if (first + u * 256 < a.hidden) {
      Store8(y + first + u * 256, sum[u]);
    }
  }
  if (segment == 0 && lane < a.fanout && a.weight_out != nullptr && a.src.weight != nullptr &&
      mine >= 0) {
    a.weight_out[token * a.fanout + lane] =
        *reinterpret_cast<const float*>(a.src.weight + mine * a.src.weight_stride);
  }
}

template <class S, class D>
void LaunchCombine(OpsContext* context, const CombineArgs& a) {
  const int segments = static_cast<int>(CeilDiv(a.hidden, 512));
  combine_kernel<S, D><<<Blocks(a.tokens * segments, 8), 256, 0, context->stream>>>(a, segments);
}

}  // namespace

std::int64_t RouteIndexWorkspaceBytes(std::int64_t tokens, std::int32_t experts) {
  return CeilDiv(tokens, kChunkTokens) * experts * static_cast<std::int64_t>(sizeof(std::int32_t));
}

void RouteIndex(OpsContext* context, const RouteIndexArgs& a) {
  const int k = a.experts_per_token;
  if (a.tokens == 0) {
    cudaMemsetAsync(a.counts, 0, sizeof(std::int64_t) * a.experts, context->stream);
    cudaMemsetAsync(a.begin, 0, sizeof(std::int64_t) * a.experts, context->stream);
    return;
  }
  OCTAVO_CHECK(a.experts <= 4096 && k <= 64, "experts = %d, experts_per_token = %d", a.experts, k);
  const std::int64_t chunks = CeilDiv(a.tokens, kChunkTokens);
  std::int32_t* hist = static_cast<std::int32_t*>(a.workspace);
  const unsigned blocks = static_cast<unsigned>(chunks);
  route_histogram_kernel<<<blocks, 256, sizeof(std::int32_t) * a.experts, context->stream>>>(
      a.topk_index, a.tokens, a.experts, k, hist);
  route_scan_kernel<<<1, 1024, sizeof(std::int64_t) * a.experts, context->stream>>>(
      hist, chunks, a.experts, a.align, a.counts, a.begin);
  route_place_kernel<<<blocks, 256, sizeof(std::int32_t) * 2 * kChunkTokens * k, context->stream>>>(
      a.topk_index, a.tokens, a.experts, k, hist, a.begin, a.dest_row);
  context->Launched("route_index");
}

void Permute(OpsContext* context, const PermuteArgs& a) {
  OCTAVO_CHECK(
      a.payload_bytes % 16 == 0 && a.src.payload_stride % 16 == 0 && a.dst.payload_stride % 16 == 0,
      "payload_bytes = %lld and strides must be multiples of 16",
      static_cast<long long>(a.payload_bytes));
  OCTAVO_CHECK(a.fanout >= 1 && a.fanout <= 32, "fanout = %d must be 1..32", a.fanout);
  if (a.rows > 0) {
    const int segments = static_cast<int>(CeilDiv(a.payload_bytes, kSegmentBytes));
    permute_kernel<<<Blocks(a.rows * segments, 8), 256, 0, context->stream>>>(a, segments);
  }
  context->Launched("permute");
}

void PadRows(OpsContext* context, const PadRowsArgs& a) {
  OCTAVO_CHECK(a.payload_bytes % 16 == 0, "payload_bytes = %lld must be a multiple of 16",
               static_cast<long long>(a.payload_bytes));
  if (a.groups.count > 0) {
    pad_rows_kernel<<<dim3(a.groups.count, 8), 256, 0, context->stream>>>(a);
  }
  context->Launched("pad_rows");
}

void ExpandSegments(OpsContext* context, const ExpandSegmentsArgs& a) {
  if (a.src_rows > 0) {
    fill_i32_kernel<<<Blocks(a.src_rows, 256), 256, 0, context->stream>>>(a.dest_row, a.src_rows,
                                                                          -1);
    if (a.count > 0) {
      const unsigned y = static_cast<unsigned>(a.count < 1024 ? a.count : 1024);
      expand_segments_kernel<<<dim3(8, y), 256, 0, context->stream>>>(a);
    }
  }
  context->Launched("expand_segments");
}

void Combine(OpsContext* context, const CombineArgs& a) {
  OCTAVO_CHECK(a.hidden % 8 == 0 && a.fanout >= 1 && a.fanout <= 32,
               "hidden = %lld must be a multiple of 8 and fanout = %d be 1..32",
               static_cast<long long>(a.hidden), a.fanout);
  OCTAVO_CHECK(!a.accumulate || a.y_dtype == DType::kF32, "accumulating needs y in FP32");
  if (a.tokens == 0) {
    return;
  }
  if (a.src_dtype == DType::kBF16) {
    if (a.y_dtype == DType::kBF16) {
      LaunchCombine<bf16, bf16>(context, a);
    } else {
      LaunchCombine<bf16, float>(context, a);
    }
  } else {
    OCTAVO_CHECK(a.y_dtype == DType::kF32, "FP32 rows are combined into FP32");
    LaunchCombine<float, float>(context, a);
  }
  context->Launched("combine");
}

}  // namespace octavo::cuda
