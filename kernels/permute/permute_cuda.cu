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

inline constexpr int kChunkTokens = 64;

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

// hist[chunk][e] becomes the rows of e in earlier chunks; counts[e] the total. 32 experts a block,
// a warp covers them side by side (coalesced), 32 warps share the chunks.
__global__ void __launch_bounds__(1024)
    route_scan_kernel(std::int32_t* hist, int chunks, int experts, std::int64_t* counts) {
  __shared__ std::int32_t part[32][33];
  const int c = threadIdx.x & 31, w = threadIdx.x >> 5;
  const int e = blockIdx.x * 32 + c;
  const int span = (chunks + 31) / 32, first = min(chunks, w * span),
            last = min(chunks, first + span);
  std::int32_t sum = 0;
  if (e < experts) {
#pragma unroll 4
    for (int i = first; i < last; ++i) {
      sum += hist[static_cast<std::int64_t>(i) * experts + e];
    }
  }
  part[w][c] = sum;
  __syncthreads();
  if (w == 0) {
    std::int32_t before = 0;
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const std::int32_t own = part[i][c];
      part[i][c] = before;
      before += own;
    }
    if (e < experts) {
      counts[e] = before;
    }
  }
  __syncthreads();
  if (e < experts) {
    std::int32_t before = part[w][c];
#pragma unroll 4
    for (int i = first; i < last; ++i) {
      std::int32_t* at = hist + static_cast<std::int64_t>(i) * experts + e;
      const std::int32_t own = *at;
      *at = before;
      before += own;
    }
  }
}

// A block a chunk: begins of all experts (the same few additions in every block), then one thread
// an expert walks over the chunk's choices, four at a time.
__global__ void __launch_bounds__(256)
    route_place_kernel(const std::int32_t* topk, std::int64_t tokens, int experts, int k,
                       std::int64_t align, const std::int32_t* hist, const std::int64_t* counts,
                       std::int64_t* begin, std::int32_t* dest_row) {
  extern __shared__ __align__(16) std::int32_t chosen[];  // choices, places, begins
  __shared__ std::int64_t warp_sum[8];
  const int room = kChunkTokens * k;
  std::int32_t* place = chosen + room;
  std::int32_t* base = place + room;
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * room;
  const int n = static_cast<int>(min(static_cast<std::int64_t>(room), tokens * k - first));
  for (int i = threadIdx.x; i < room; i += 256) {
    chosen[i] = i < n ? topk[first + i] : -1;
    place[i] = -1;
  }
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  std::int64_t carry = 0;
  for (int e0 = 0; e0 < experts; e0 += 256) {
    const int e = e0 + static_cast<int>(threadIdx.x);
    const std::int64_t own = e < experts ? (counts[e] + align - 1) / align * align : 0;
    std::int64_t sum = own;
#pragma unroll
    for (int o = 1; o < 32; o <<= 1) {
      const std::int64_t left = __shfl_up_sync(kFullMask, sum, o);
      sum += lane >= o ? left : 0;
    }
    if (lane == 31) {
      warp_sum[warp] = sum;
    }
    __syncthreads();
    std::int64_t before = carry;
    for (int w = 0; w < 8; ++w) {
      before += w < warp ? warp_sum[w] : 0;
      carry += warp_sum[w];
    }
    if (e < experts) {
      const std::int64_t at = before + sum - own;
      base[e] = static_cast<std::int32_t>(at);
      if (blockIdx.x == 0) {
        begin[e] = at;
      }
    }
    __syncthreads();
  }
  for (int e = threadIdx.x; e < experts; e += 256) {
    std::int32_t next = base[e] + hist[static_cast<std::int64_t>(blockIdx.x) * experts + e];
#pragma unroll 4
    for (int i = 0; i < room; i += 4) {  // room is a multiple of 64
      const int4 c = *reinterpret_cast<const int4*>(chosen + i);
      if (c.x == e) {
        place[i] = next++;
      }
      if (c.y == e) {
        place[i + 1] = next++;
      }
      if (c.z == e) {
        place[i + 2] = next++;
      }
      if (c.w == e) {
        place[i + 3] = next++;
      }
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < n; i += 256) {
    dest_row[first + i] = place[i];
  }
}

// ---------------------------------------------------------------- permute

inline constexpr int kSegmentBytes = 2048;  // of a row, by one warp: 4 loads of 16 bytes a lane

__global__ void __launch_bounds__(256)
    permute_kernel(PermuteArgs a, int segments, bool scales_too) {
  const int lane = threadIdx.x & 31;
  const std::int64_t unit = static_cast<std::int64_t>(blockIdx.x) * 8 + (threadIdx.x >> 5);
  const std::int64_t row = unit / segments;
  const int segment = static_cast<int>(unit % segments);
  if (row >= a.rows) {
    return;
  }
  const std::int32_t mine = lane < a.fanout ? a.dest_row[row * a.fanout + lane] : -1;
  if (!__any_sync(kFullMask, mine >= 0)) {
    return;  // goes nowhere: holes of a message, rows that another map moves
  }
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
  // dequant_scales: the segments of a row share them. Row-major ones only: see
  // permute_scales_kernel.
  if (scales_too) {
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

// source[dest_row[i]] = i / fanout.
__global__ void __launch_bounds__(256)
    invert_rows_kernel(const std::int32_t* dest_row, std::int64_t count, int fanout,
                       std::int64_t rows, std::int32_t* source) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * 256 + threadIdx.x;
  if (i < count) {
    const std::int32_t dest = dest_row[i];
    if (dest >= 0 && dest < rows) {
      source[dest] = static_cast<std::int32_t>(i / fanout);
    }
  }
}

// Scales into the GEMM layout [tile][row]: 64 destination rows × 32 tiles a block through shared
// memory, because scattered 4-byte stores (one sector each) cost more than the payload's.
__global__ void __launch_bounds__(256)
    permute_scales_kernel(PermuteArgs a, std::int64_t rows, const std::int32_t* source) {
  __shared__ float tile[64][33];
  __shared__ std::int32_t from[64];
  const std::int64_t row0 = static_cast<std::int64_t>(blockIdx.x) * 64;
  const int t0 = blockIdx.y * 32, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  if (threadIdx.x < 64) {
    from[threadIdx.x] = row0 + threadIdx.x < rows ? source[row0 + threadIdx.x] : -1;
  }
  __syncthreads();
  const int t = t0 + lane;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int r = warp * 8 + i;
    if (from[r] >= 0 && t < a.tiles) {
      tile[r][lane] = *reinterpret_cast<const float*>(
          a.src.dequant_scale + from[r] * a.src.scale_row_stride + t * a.src.scale_tile_stride);
    }
  }
  __syncthreads();
  const int r = threadIdx.x & 63;
  for (int c = threadIdx.x >> 6; c < 32 && t0 + c < a.tiles; c += 4) {
    if (from[r] >= 0) {
      *reinterpret_cast<float*>(a.dst.dequant_scale + (row0 + r) * 4 +
                                (t0 + c) * a.dst.scale_tile_stride) = tile[r][c];
    }
  }
}

// Blocks (group, y): payload by a warp a row; scales by rows or by tiles, whichever is contiguous.
__global__ void __launch_bounds__(256) pad_rows_kernel(PadRowsArgs a) {
  const int lane = threadIdx.x & 31, warp = blockIdx.y * 8 + (threadIdx.x >> 5);
  const int warps = gridDim.y * 8, g = blockIdx.x;
  const std::int64_t rows = a.groups.rows[g], first = a.groups.begin[g] + rows;
  const int count = static_cast<int>((kRowAlign - rows % kRowAlign) % kRowAlign);
  for (int i = warp; i < count; i += warps) {
    std::uint8_t* dst = a.dst.payload + (first + i) * a.dst.payload_stride;
#pragma unroll 4
    for (std::int64_t at = lane * 16; at < a.payload_bytes; at += 512) {
      *reinterpret_cast<uint4*>(dst + at) = make_uint4(0, 0, 0, 0);
    }
    if (lane == 0 && a.dst.weight != nullptr) {
      *reinterpret_cast<float*>(a.dst.weight + (first + i) * a.dst.weight_stride) = 0.0f;
    }
  }
  const bool by_tile = a.dst.scale_row_stride == 4;
  const int outer = by_tile ? a.tiles : count, inner = by_tile ? count : a.tiles;
  for (int o = warp; o < outer; o += warps) {
    for (int i = lane; i < inner; i += 32) {
      const int r = by_tile ? i : o, t = by_tile ? o : i;
      *reinterpret_cast<float*>(a.dst.dequant_scale + (first + r) * a.dst.scale_row_stride +
                                t * a.dst.scale_tile_stride) = kDequantScaleMin;
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
  OCTAVO_CHECK(a.experts <= 4096 && k <= 32, "experts = %d, experts_per_token = %d", a.experts, k);
  const std::int64_t chunks = CeilDiv(a.tokens, kChunkTokens);
  std::int32_t* hist = static_cast<std::int32_t*>(a.workspace);
  const unsigned blocks = static_cast<unsigned>(chunks);
  cudaStream_t stream = context->stream;
  route_histogram_kernel<<<blocks, 256, sizeof(std::int32_t) * a.experts, stream>>>(
      a.topk_index, a.tokens, a.experts, k, hist);
  route_scan_kernel<<<Blocks(a.experts, 32), 1024, 0, stream>>>(hist, static_cast<int>(chunks),
                                                                a.experts, a.counts);
  const std::size_t smem = sizeof(std::int32_t) * (2 * kChunkTokens * k + a.experts);
  route_place_kernel<<<blocks, 256, smem, stream>>>(a.topk_index, a.tokens, a.experts, k, a.align,
                                                    hist, a.counts, a.begin, a.dest_row);
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
    // [tile][row] scales: the stride of a tile says how many destination rows there are.
    const std::int64_t dst_rows = a.dst.scale_tile_stride / 4;
    const bool apart = a.tiles > 0 && a.dst.scale_row_stride == 4 && a.dst.scale_tile_stride > 4 &&
                       dst_rows * 4 <= context->scratch_bytes;
    permute_kernel<<<Blocks(a.rows * segments, 8), 256, 0, context->stream>>>(
        a, segments, a.tiles > 0 && !apart);
    if (apart) {
      std::int32_t* source = reinterpret_cast<std::int32_t*>(context->scratch);
      const std::int64_t count = a.rows * a.fanout;
      fill_i32_kernel<<<Blocks(dst_rows, 256), 256, 0, context->stream>>>(source, dst_rows, -1);
      invert_rows_kernel<<<Blocks(count, 256), 256, 0, context->stream>>>(
          a.dest_row, count, a.fanout, dst_rows, source);
      permute_scales_kernel<<<dim3(Blocks(dst_rows, 64), Blocks(a.tiles, 32)), 256, 0,
                              context->stream>>>(a, dst_rows, source);
    }
  }
  context->Launched("permute");
}

void PadRows(OpsContext* context, const PadRowsArgs& a) {
  OCTAVO_CHECK(a.payload_bytes % 16 == 0, "payload_bytes = %lld must be a multiple of 16",
               static_cast<long long>(a.payload_bytes));
  if (a.groups.count > 0) {
    pad_rows_kernel<<<dim3(a.groups.count, 4), 256, 0, context->stream>>>(a);
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
