// Quantise on the GPU: rows, rows and columns in one pass, 128×128 blocks, one scale a tensor; amax
// and dequantise. Tiles and statistics are in quantize_tiles.cuh; memory-bound, so each element is
// read once with 16-byte loads, four in flight a lane.
#include "base/check.h"
#include "kernels/cuda/context.h"
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/ops_cuda.h"
#include "kernels/quantize/quantize_tiles.cuh"

namespace octavo::cuda {
namespace {

// ---------------------------------------------------------------- 128×128 blocks

struct BlocksParams {
  const float* w;
  std::int64_t n, k;
  bool e5m2, pow2;
  float format_max, min_dequant_scale;
  QuantizeTarget row, col;
  StatSlot* stats;
};

// Eight row-consecutive codes of column c rest at an 8-byte chunk of its 128 bytes, swizzled so
// that neither the stores (lanes 4 columns apart) nor the 16-byte loads (8 lanes a column) meet in
// banks.
__device__ __forceinline__ void StoreColumn8(std::uint8_t* smem, int c, int chunk, uint2 codes) {
  *reinterpret_cast<uint2*>(smem + c * 128 + ((chunk ^ (c >> 2 & 15)) << 3)) = codes;
}
__device__ __forceinline__ uint4 LoadColumn16(const std::uint8_t* smem, int c, int chunk16) {
  const int l = c >> 2 & 15;
  const uint4 w = *reinterpret_cast<const uint4*>(smem + c * 128 + ((chunk16 ^ (l >> 1)) << 4));
  return (l & 1) != 0 ? make_uint4(w.z, w.w, w.x, w.y) : w;
}

// One 128×128 tile a block, held in registers between amax and cast: a warp holds eight whole rows
// of 512 bytes, a lane four columns of them. The codes are transposed as bytes: a 2-D tile is its
// own transpose. Little is alive across the barrier, so that two blocks fit on an SM.
template <bool kE5M2, bool kColumns>
__global__ void __launch_bounds__(512, 2) quantize_blocks_kernel(BlocksParams p) {
  __shared__ __align__(16) std::uint8_t codes_t[kColumns ? 128 * 128 : 16];
  __shared__ std::uint32_t part[16];
  constexpr std::uint32_t kMagnitude = 0x7FFFFFFFu;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const unsigned tiles_n = static_cast<unsigned>(p.n / 128);
  const unsigned tiles_k = static_cast<unsigned>(p.k / 128);
  unsigned tile_k = blockIdx.x % tiles_k;
  unsigned row_tile = blockIdx.x / tiles_k;  // of all groups

  uint4 raw[8];
  {
    const float* src =
        p.w + (std::int64_t{row_tile} * 128 + warp * 8) * p.k + tile_k * 128 + lane * 4;
#pragma unroll
    for (int i = 0; i < 8; ++i, src += p.k) {
      raw[i] = LoadStream(src);
    }
  }
  std::uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    largest = max(largest, max(max(raw[i].x & kMagnitude, raw[i].y & kMagnitude),
                               max(raw[i].z & kMagnitude, raw[i].w & kMagnitude)));
  }
  const bool wild = largest >= kInfinityBits;  // rare: the largest finite one, then
  if (wild) {
    largest = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const std::uint32_t words[4] = {raw[i].x, raw[i].y, raw[i].z, raw[i].w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const std::uint32_t m = words[j] & kMagnitude;
        largest = m >= kInfinityBits ? largest : max(largest, m);
      }
    }
  }
  largest = __reduce_max_sync(kFullMask, largest);
  if (lane == 0) {
    part[warp] = largest;
  }
  __syncthreads();
  const std::uint32_t amax = __reduce_max_sync(kFullMask, part[lane & 15]);
  const float quant_scale =
      QuantScaleFromAmax(__uint_as_float(amax), p.format_max, p.pow2, 0, p.min_dequant_scale);

  std::uint32_t counts = 0;  // a byte each: zero, flushed, saturated, not finite
  std::uint8_t* out =
      p.row.q + (std::int64_t{row_tile} * 128 + warp * 8) * p.row.ld + tile_k * 128 + lane * 4;
  const auto cast_row = [&](int i) {
    const float v[4] = {__uint_as_float(raw[i].x), __uint_as_float(raw[i].y),
                        __uint_as_float(raw[i].z), __uint_as_float(raw[i].w)};
    const std::uint32_t codes =
        Encode4<kE5M2>(__fmul_rn(v[0], quant_scale), __fmul_rn(v[1], quant_scale),
                       __fmul_rn(v[2], quant_scale), __fmul_rn(v[3], quant_scale));
    if (p.row.q != nullptr) {
      *reinterpret_cast<std::uint32_t*>(out) = codes;
      out += p.row.ld;
    }
    if (wild || (((codes & 0x7F7F7F7Fu) + 0x7F7F7F7Fu) & 0x80808080u) != 0x80808080u) {
      const DType format = kE5M2 ? DType::kE5M2 : DType::kE4M3;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const bool nonzero = v[j] != 0.0f;
        counts += nonzero ? 0 : 1u;
        counts += nonzero && (codes >> (8 * j) & 0x7Fu) == 0 ? 1u << 8 : 0;
        counts += IsSaturated(format, __fmul_rn(v[j], quant_scale)) ? 1u << 16 : 0;
        counts += (__float_as_uint(v[j]) & kMagnitude) >= kInfinityBits ? 1u << 24 : 0;
      }
    }
    return codes;
  };
  if constexpr (kColumns) {
    std::uint32_t turned[2][4];  // [rows 0..3 or 4..7][column]: four codes down the rows
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      std::uint32_t r[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        r[i] = cast_row(half * 4 + i);
      }
      Transpose4x4(r, turned[half]);
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      StoreColumn8(codes_t, lane * 4 + j, warp, make_uint2(turned[0][j], turned[1][j]));
    }
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      cast_row(i);
    }
  }
  const unsigned block = BlockIndexAnew();
  tile_k = block % tiles_k;
  row_tile = block / tiles_k;
  const unsigned group = row_tile / tiles_n, tile_n = row_tile % tiles_n;
  if constexpr (kColumns) {
    __syncthreads();
    std::uint8_t* dst = p.col.q + (group * p.k + std::int64_t{tile_k} * 128) * p.col.ld +
                        std::int64_t{tile_n} * 128;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int c = half * 64 + (threadIdx.x >> 3), m = threadIdx.x & 7;
      *reinterpret_cast<uint4*>(dst + c * p.col.ld + m * 16) = LoadColumn16(codes_t, c, m);
    }
  }
  ThreadStats stats;
  stats.zero = counts & 0xFFu;
  stats.flushed = counts >> 8 & 0xFFu;
  stats.saturated = counts >> 16 & 0xFFu;
  stats.nonfinite = counts >> 24;
  if (threadIdx.x == 0) {
    const float dequant_scale = DequantScaleFromQuantScale(quant_scale);
    if (p.row.q != nullptr) {
      p.row.dequant_scale[row_tile * p.row.row_stride + tile_k * p.row.tile_stride] = dequant_scale;
    }
    if constexpr (kColumns) {
      p.col.dequant_scale[(group * tiles_k + tile_k) * p.col.row_stride +
                          tile_n * p.col.tile_stride] = dequant_scale;
    }
    NoteScale(amax, dequant_scale, stats);
  }
  FlushStats(p.stats != nullptr ? p.stats + group : nullptr, stats, 128 * 128);
}

template <bool kE5M2>
void LaunchBlocks(cudaStream_t stream, unsigned blocks, const BlocksParams& p) {
  if (p.col.q != nullptr) {
    quantize_blocks_kernel<kE5M2, true><<<blocks, 512, 0, stream>>>(p);
  } else {
    quantize_blocks_kernel<kE5M2, false><<<blocks, 512, 0, stream>>>(p);
  }
}

// ---------------------------------------------------------------- amax and per-tensor scales

// Largest finite magnitude of 32 rows; a warp reads a row.
template <class T>
__global__ void __launch_bounds__(256)
    amax_kernel(const T* x, std::int64_t rows, std::int64_t cols, Groups groups, float* amax,
                std::int32_t* has_nonfinite) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const std::int64_t row0 = static_cast<std::int64_t>(blockIdx.x) * 32;
  const RowOwner owner = FindOwner(groups, row0);
  ThreadStats stats;
  std::uint32_t best = 0;
  for (int rr = warp; rr < 32; rr += 8) {
    const std::int64_t row = row0 + rr;
    if (row >= rows || row >= owner.real_end) {
      break;
    }
    const T* src = x + row * cols;
    for (std::int64_t c0 = lane * 8; c0 < cols; c0 += 1024) {
      Raw8<T> raw[4];
#pragma unroll
      for (int u = 0; u < 4; ++u) {
        if (c0 + u * 256 < cols) {
          LoadRaw(src + c0 + u * 256, raw[u]);
        } else {
          ZeroRaw(raw[u]);
        }
      }
#pragma unroll
      for (int u = 0; u < 4; ++u) {
        float v[8];
        Unpack(raw[u], v);
        std::uint32_t largest;
        Largest8(v, largest, true, stats);
        best = max(best, largest);
      }
    }
  }
  best = __reduce_max_sync(kFullMask, best);
  const std::uint32_t nonfinite = __reduce_add_sync(kFullMask, stats.nonfinite);
  if (lane == 0 && owner.group >= 0) {
    AtomicMaxPositive(amax + owner.group, __uint_as_float(best));
    if (nonfinite != 0 && has_nonfinite != nullptr) {
      has_nonfinite[owner.group] = 1;
    }
  }
}

__global__ void scale_from_amax_kernel(const float* amax, std::int64_t n, float format_max,
                                       bool pow2, int margin, float min_dequant_scale, float* quant,
                                       float* dequant) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < n) {
    const ScalePair pair = ScaleFromAmaxPair(amax[i], format_max, pow2, margin, min_dequant_scale);
    quant[i] = pair.quant_scale;
    dequant[i] = pair.dequant_scale;
  }
}

// D = 1/Q a group, also of empty ones.
__global__ void tensor_scale_kernel(const float* quant, int groups, float* row, float* col) {
  const int g = blockIdx.x * blockDim.x + threadIdx.x;
  if (g >= groups) {
    return;
  }
  const float d = DequantScaleFromQuantScale(quant[g]);
  if (row != nullptr) {
    row[g] = d;
  }
  if (col != nullptr) {
    col[g] = d;
  }
}

// ---------------------------------------------------------------- dequantise

// Eight codes a lane (kVector), or one where widths are odd.
template <class T, bool kVector>
__global__ void __launch_bounds__(256)
    dequantize_kernel(QTensor src, std::int64_t ld, Groups groups, T* dst) {
  constexpr int kStep = kVector ? 8 : 1;
  const int lane = threadIdx.x & 31;
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * 8 + (threadIdx.x >> 5);
  if (row >= src.rows) {
    return;
  }
  const RowOwner owner = groups.count > 0 ? FindOwner(groups, row) : RowOwner{0, src.rows};
  if (owner.group < 0) {
    return;
  }
  const bool real = row < owner.real_end;
  const bool e5m2 = src.format == DType::kE5M2;
  const float* scale_row = src.dequant_scale;
  int shift = 63;  // one scale a row of the loop below
  switch (src.tiling) {
    case Tiling::kTensor:
      scale_row += owner.group;
      break;
    case Tiling::kBlock128:
      scale_row += row / 128 * src.scale_row_stride;
      shift = 7;
      break;
    case Tiling::kRow32:
      scale_row += row * src.scale_row_stride;
      shift = 5;
      break;
    default:
      scale_row += row * src.scale_row_stride;
      shift = 7;
  }
  for (std::int64_t c = lane * kStep; c < src.cols; c += 32 * kStep) {
    float v[kStep];
    if (real) {
      const float d = scale_row[shift == 63 ? 0 : (c >> shift) * src.scale_tile_stride];
      if (kVector) {
        float q[8];
        Decode8(e5m2, *reinterpret_cast<const uint2*>(src.q + row * ld + c), q);
#pragma unroll
        for (int j = 0; j < kStep; ++j) {
          v[j] = __fmul_rn(q[j], d);
        }
      } else {
        v[0] = __fmul_rn(Fp8Decode(src.format, src.q[row * ld + c]), d);
      }
    } else {
#pragma unroll
      for (int j = 0; j < kStep; ++j) {
        v[j] = 0.0f;
      }
    }
    if constexpr (kVector) {
      Store8(dst + row * src.cols + c, v);
    } else {
      dst[row * src.cols + c] = FromFloat<T>(v[0]);
    }
  }
}

template <class T>
void LaunchDequantize(cudaStream_t stream, const DequantizeArgs& a) {
  const std::int64_t ld = a.src.stride();
  T* dst = static_cast<T*>(a.dst);
  if (a.src.cols % 8 == 0 && ld % 8 == 0) {
    dequantize_kernel<T, true>
        <<<Blocks(a.src.rows, 8), 256, 0, stream>>>(a.src, ld, MakeGroups(a.groups), dst);
  } else {
    dequantize_kernel<T, false>
        <<<Blocks(a.src.rows, 8), 256, 0, stream>>>(a.src, ld, MakeGroups(a.groups), dst);
  }
}

QuantizeParams MakeParams(const RowGroups& groups, std::int64_t cols, const QuantizeRule& rule,
                          const QTensor& row, const QTensor& col, StatSlot* stats) {
  OCTAVO_CHECK(IsFp8(rule.format), "format = %d is not FP8", static_cast<int>(rule.format));
  OCTAVO_CHECK(row.present() || col.present(), "neither a row-wise nor a column-wise copy wanted");
  OCTAVO_CHECK(cols % 8 == 0, "cols = %lld must be a multiple of 8", static_cast<long long>(cols));
  OCTAVO_CHECK(!col.present() || col.stride() % 16 == 0,
               "the column-wise copy's row stride %lld must be a multiple of 16",
               static_cast<long long>(col.stride()));
  return QuantizeParams{.groups = MakeGroups(groups),
                        .rows = groups.padded_rows,
                        .cols = cols,
                        .e5m2 = rule.format == DType::kE5M2,
                        .pow2 = rule.pow2,
                        .format_max = Fp8Max(rule.format),
                        .min_dequant_scale = rule.min_dequant_scale,
                        .row = MakeTarget(row),
                        .col = MakeTarget(col),
                        .quant_scale = nullptr,
                        .stats = stats};
}

template <int kTile>
void LaunchDense(OpsContext* context, const void* x, DType dtype, const QuantizeParams& p) {
  if (dtype == DType::kBF16) {
    LaunchQuantize<DenseSource<bf16>, kTile, true>(
        context, DenseSource<bf16>{static_cast<const bf16*>(x), p.cols}, p);
  } else {
    OCTAVO_CHECK(dtype == DType::kF32, "x_dtype = %d must be kBF16 or kF32",
                 static_cast<int>(dtype));
    LaunchQuantize<DenseSource<float>, kTile, true>(
        context, DenseSource<float>{static_cast<const float*>(x), p.cols}, p);
  }
}

}  // namespace

void QuantizeRows(OpsContext* context, const QuantizeRowsArgs& a) {
  const QuantizeParams p = MakeParams(a.groups, a.cols, a.rule, a.row, a.col, a.stats);
  if (a.rule.tiling == Tiling::kRow32) {
    OCTAVO_CHECK(a.cols % 32 == 0, "cols = %lld must be a multiple of 32",
                 static_cast<long long>(a.cols));
    LaunchDense<32>(context, a.x, a.x_dtype, p);
  } else {
    OCTAVO_CHECK(a.rule.tiling == Tiling::kRow128 && a.cols % 128 == 0,
                 "tiling %d with cols = %lld: rows are tiled by 128 (or 32) columns",
                 static_cast<int>(a.rule.tiling), static_cast<long long>(a.cols));
    LaunchDense<128>(context, a.x, a.x_dtype, p);
  }
  context->Launched("quantize_rows");
}

void QuantizeBlocks(OpsContext* context, const QuantizeBlocksArgs& a) {
  OCTAVO_CHECK(a.n % 128 == 0 && a.k % 128 == 0, "weights [%lld, %lld] must be multiples of 128",
               static_cast<long long>(a.n), static_cast<long long>(a.k));
  const std::int64_t blocks = a.groups * (a.n / 128) * (a.k / 128);
  if (blocks == 0) {
    return;
  }
  BlocksParams p{a.w,
                 a.n,
                 a.k,
                 a.rule.format == DType::kE5M2,
                 a.rule.pow2,
                 Fp8Max(a.rule.format),
                 a.rule.min_dequant_scale,
                 MakeTarget(a.row),
                 MakeTarget(a.col),
                 a.stats};
  p.e5m2 ? LaunchBlocks<true>(context->stream, static_cast<unsigned>(blocks), p)
         : LaunchBlocks<false>(context->stream, static_cast<unsigned>(blocks), p);
  context->Launched("quantize_blocks");
}

void Amax(OpsContext* context, const AmaxArgs& a) {
  OCTAVO_CHECK(a.cols % 8 == 0, "cols = %lld must be a multiple of 8",
               static_cast<long long>(a.cols));
  cudaMemsetAsync(a.amax, 0, sizeof(float) * a.groups.count, context->stream);
  if (a.has_nonfinite != nullptr) {
    cudaMemsetAsync(a.has_nonfinite, 0, sizeof(std::int32_t) * a.groups.count, context->stream);
  }
  const std::int64_t rows = a.groups.padded_rows;
  if (rows > 0) {
    const unsigned blocks = Blocks(rows, 32);
    if (a.x_dtype == DType::kBF16) {
      amax_kernel<<<blocks, 256, 0, context->stream>>>(static_cast<const bf16*>(a.x), rows, a.cols,
                                                       MakeGroups(a.groups), a.amax,
                                                       a.has_nonfinite);
    } else {
      amax_kernel<<<blocks, 256, 0, context->stream>>>(static_cast<const float*>(a.x), rows, a.cols,
                                                       MakeGroups(a.groups), a.amax,
                                                       a.has_nonfinite);
    }
  }
  context->Launched("amax");
}

void ScaleFromAmax(OpsContext* context, const ScaleFromAmaxArgs& a) {
  if (a.n > 0) {
    scale_from_amax_kernel<<<Blocks(a.n, 128), 128, 0, context->stream>>>(
        a.amax, a.n, Fp8Max(a.rule.format), a.rule.pow2, a.rule.margin, a.rule.min_dequant_scale,
        a.quant_scale, a.dequant_scale);
  }
  context->Launched("scale_from_amax");
}

void QuantizeTensor(OpsContext* context, const QuantizeTensorArgs& a) {
  QuantizeParams p = MakeParams(a.groups, a.cols, {.format = a.format}, a.row, a.col, a.stats);
  p.quant_scale = a.quant_scale;
  LaunchDense<0>(context, a.x, a.x_dtype, p);
  if (a.groups.count > 0) {
    tensor_scale_kernel<<<Blocks(a.groups.count, 128), 128, 0, context->stream>>>(
        a.quant_scale, a.groups.count, a.row.present() ? a.row.dequant_scale : nullptr,
        a.col.present() ? a.col.dequant_scale : nullptr);
  }
  context->Launched("quantize_tensor");
}

void Dequantize(OpsContext* context, const DequantizeArgs& a) {
  if (a.src.rows > 0 && a.src.cols > 0) {
    if (a.dst_dtype == DType::kBF16) {
      LaunchDequantize<bf16>(context->stream, a);
    } else {
      LaunchDequantize<float>(context->stream, a);
    }
  }
  context->Launched("dequantize");
}

}  // namespace octavo::cuda
