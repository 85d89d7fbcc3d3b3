// The two kernels behind every row-tiled quantisation, over any source of values (a dense tensor,
// or SwiGLU computed on the way in):
//
//   quantize_row_kernel    16 rows a block, a warp a row; 16 lanes hold one 1×128 tile
//   quantize_tile_kernel   128×128 elements a block, kept in registers between the row-wise and the
//                          column-wise cast; the transposed codes pass through swizzled shared
//                          memory
//
// kTile is the width a dequant_scale covers: 128, 32 (MX), or 0 for one given quant_scale a group.
// A block lies within one row group (groups begin at multiples of 128), so its statistics go to one
// slot. Padding rows are zeros: their tiles get the scale of an all-zero tile by the same rule.
#pragma once

#include "base/check.h"
#include "kernels/cuda/device.cuh"

namespace octavo::cuda {

struct QuantizeTarget {
  std::uint8_t* q;
  std::int64_t ld;
  float* scale;
  std::int64_t row_stride, tile_stride;
};
inline QuantizeTarget MakeTarget(const QTensor& t) {
  return {t.q, t.stride(), t.dequant_scale, t.scale_row_stride, t.scale_tile_stride};
}

struct QuantizeParams {
  Groups groups;
  std::int64_t rows, cols;  // rows of the buffer (P)
  bool e5m2, pow2;
  float format_max;
  QuantizeTarget row, col;
  const float* quant_scale;  // kTile 0: [groups]
  StatSlot* stats;           // [groups] or null
};

// ---------------------------------------------------------------- sources

// x [rows, cols] of T, row-major.
template <class T>
struct DenseSource {
  const T* x;
  std::int64_t ld;
  using Loaded = Raw8<T>;
  using Kept = Raw8<T>;
  __device__ __forceinline__ float RowFactor(std::int64_t) const { return 1.0f; }
  __device__ __forceinline__ void Load(std::int64_t row, std::int64_t col, Loaded& r) const {
    LoadRaw(x + row * ld + col, r);
  }
  static __device__ __forceinline__ void Zero(Loaded& r) { ZeroRaw(r); }
  static __device__ __forceinline__ Kept Keep(const Loaded& r, float) { return r; }
  static __device__ __forceinline__ void Values(const Kept& r, float v[8]) { Unpack(r, v); }
};

// ---------------------------------------------------------------- scales

template <int kTile>
__device__ __forceinline__ float TileQuantScale(std::uint32_t amax_bits, const QuantizeParams& p) {
  const float amax = __uint_as_float(amax_bits);
  if (kTile == 32) {
    return MxScaleFromAmax(amax, p.format_max).quant_scale;
  }
  return QuantScaleFromAmax(amax, p.format_max, p.pow2, 0);
}

// quant_scales rest in shared memory; the sign says that the tile held no finite nonzero element.
__device__ __forceinline__ float Marked(float quant_scale, std::uint32_t amax_bits) {
  return amax_bits == 0 ? -quant_scale : quant_scale;
}
__device__ __forceinline__ float UnmarkedDequant(float marked, bool note, ThreadStats& stats) {
  const float d = DequantScaleFromQuantScale(fabsf(marked));
  if (note && marked > 0) {
    stats.dequant_min = fminf(stats.dequant_min, d);
    stats.dequant_max = fmaxf(stats.dequant_max, d);
  }
  return d;
}

template <int kLanes>
__device__ __forceinline__ std::uint32_t MaxOverLanes(std::uint32_t v) {
#pragma unroll
  for (int o = kLanes / 2; o > 0; o >>= 1) {
    v = max(v, __shfl_xor_sync(kFullMask, v, o));
  }
  return v;
}

// ---------------------------------------------------------------- rows

inline constexpr int kRowsPerBlock = 16;

template <class Source, int kTile>
__global__ void __launch_bounds__(256, 3) quantize_row_kernel(Source source, QuantizeParams p) {
  constexpr int kUnroll = sizeof(typename Source::Loaded) > 16 ? 2 : 4;  // loads in flight
  extern __shared__ float marked[];  // [tiles][kRowsPerBlock], kTile > 0
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const std::int64_t row0 = static_cast<std::int64_t>(blockIdx.x) * kRowsPerBlock;
  const RowOwner owner = FindOwner(p.groups, row0);
  if (owner.group < 0) {
    return;  // rows of no group are nobody's: not written
  }
  const float given = kTile == 0 ? p.quant_scale[owner.group] : 1.0f;
  ThreadStats stats;

  for (int rr = warp; rr < kRowsPerBlock; rr += 8) {
    const std::int64_t row = row0 + rr;
    if (row >= p.rows) {
      break;
    }
    const bool real = row < owner.real_end;
    const float factor = real ? source.RowFactor(row) : 0.0f;
    for (std::int64_t c0 = 0; c0 < p.cols; c0 += 256 * kUnroll) {
      typename Source::Loaded loaded[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const std::int64_t col = c0 + u * 256 + lane * 8;
        if (real && col < p.cols) {
          source.Load(row, col, loaded[u]);
        } else {
          Source::Zero(loaded[u]);
        }
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (c0 + u * 256 >= p.cols) {
          break;
        }
        const std::int64_t col = c0 + u * 256 + lane * 8;
        const bool in = real && col < p.cols;
        float v[8];
        Source::Values(Source::Keep(loaded[u], factor), v);
        std::uint32_t bits[8], largest, smallest;
        Extremes8(v, bits, largest, smallest, in, stats);
        stats.amax_bits = max(stats.amax_bits, largest);
        float quant_scale = given;
        if (kTile > 0) {
          const std::uint32_t amax = MaxOverLanes < kTile == 32 ? 4 : 16 > (largest);
          quant_scale = TileQuantScale<kTile>(amax, p);
          if ((lane & (kTile / 8 - 1)) == 0 && col < p.cols) {
            marked[(col / (kTile > 0 ? kTile : 1)) * kRowsPerBlock + rr] =
                Marked(quant_scale, amax);
          }
        }
        const uint2 codes = Encode8(p.e5m2, v, quant_scale);
        if (col < p.cols) {
          *reinterpret_cast<uint2*>(p.row.q + row * p.row.ld + col) = codes;
        }
        if (in) {
          CountCast8(p.e5m2, v, codes, quant_scale, largest, smallest, stats);
        }
      }
    }
  }
  const std::int64_t last = min(row0 + kRowsPerBlock, p.rows);
  if (kTile > 0) {
    __syncthreads();
    const int tiles = static_cast<int>(p.cols / (kTile > 0 ? kTile : 1));
    for (int i = threadIdx.x; i < tiles * kRowsPerBlock; i += 256) {
      // The stride that is 1 decides which index runs fastest, so that stores are coalesced.
      const bool by_row = p.row.row_stride == 1;
      const int r = by_row ? i % kRowsPerBlock : i / tiles;
      const int t = by_row ? i / kRowsPerBlock : i % tiles;
      if (row0 + r < last) {
        p.row.scale[(row0 + r) * p.row.row_stride + t * p.row.tile_stride] =
            UnmarkedDequant(marked[t * kRowsPerBlock + r], true, stats);
      }
    }
  }
  const std::int64_t real_rows = max(std::int64_t{0}, min(last, owner.real_end) - row0);
  if (kTile == 0) {
    NoteScale(stats.amax_bits, DequantScaleFromQuantScale(given), stats);
  }
  FlushStats(p.stats != nullptr ? p.stats + owner.group : nullptr, stats,
             static_cast<std::uint64_t>(real_rows * p.cols));
}

// ---------------------------------------------------------------- transposed codes in shared
// memory

// Eight row-consecutive codes of column c (0..127) live at 8-byte chunk `slot`, swizzled so that
// the 16 lanes of one store (columns 8 apart) and the 8 lanes of one 16-byte load hit all banks
// once.
__device__ __forceinline__ void StoreTransposed(std::uint8_t* smem, int c, int slot, uint2 codes) {
  *reinterpret_cast<uint2*>(smem + c * 128 + ((slot ^ ((c >> 3) & 15)) << 3)) = codes;
}
__device__ __forceinline__ uint4 LoadTransposed(const std::uint8_t* smem, int c, int chunk16) {
  const int l = (c >> 3) & 15;
  const uint4 w = *reinterpret_cast<const uint4*>(smem + c * 128 + ((chunk16 ^ (l >> 1)) << 4));
  return (l & 1) != 0 ? make_uint4(w.z, w.w, w.x, w.y) : w;
}
// Copies columns [0, columns) of the tile to dst [columns, 128 consecutive codes].
template <int kThreads>
__device__ __forceinline__ void WriteTransposed(const std::uint8_t* smem, int columns,
                                                std::uint8_t* dst, std::int64_t ld) {
#pragma unroll
  for (int k = 0; k < 1024 / kThreads; ++k) {
    const int i = threadIdx.x + k * kThreads, c = i >> 3, m = i & 7;
    if (c < columns) {
      *reinterpret_cast<uint4*>(dst + c * ld + m * 16) = LoadTransposed(smem, c, m);
    }
  }
}

// ---------------------------------------------------------------- rows and columns

template <class Source, int kTile, bool kRow>
__global__ void __launch_bounds__(256, 2) quantize_tile_kernel(Source source, QuantizeParams p) {
  constexpr int kDivisor = kTile > 0 ? kTile : 128;
  constexpr int kPerEdge = 128 / kDivisor;  // dequant_scales along an edge of the block's tile
  __shared__ __align__(16) std::uint8_t codes_t[128 * 128];
  __shared__ std::uint32_t col_part[8][128];
  __shared__ float row_marked[kPerEdge][128], col_marked[kPerEdge][128];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int lane16 = threadIdx.x & 15, slot = threadIdx.x >> 4;
  const std::int64_t col_tiles = CeilDiv(p.cols, 128);
  const std::int64_t row0 = blockIdx.x / col_tiles * 128, col0 = blockIdx.x % col_tiles * 128;
  const std::int64_t col = col0 + lane16 * 8;
  const RowOwner owner = FindOwner(p.groups, row0);
  if (owner.group < 0) {
    return;  // rows of no group are nobody's: not written
  }
  const float given = kTile == 0 ? p.quant_scale[owner.group] : 1.0f;
  ThreadStats stats;

  typename Source::Kept kept[8];
  {
    typename Source::Loaded loaded[8];
    float factor[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const std::int64_t row = row0 + slot * 8 + i;
      const bool in = row < owner.real_end && col < p.cols;
      factor[i] = in ? source.RowFactor(row) : 0.0f;
      if (in) {
        source.Load(row, col, loaded[i]);
      } else {
        Source::Zero(loaded[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      kept[i] = Source::Keep(loaded[i], factor[i]);
    }
  }

  std::uint32_t col_amax[8] = {0, 0, 0, 0, 0, 0, 0, 0};
  std::uint32_t largest_all = 0, smallest_all = 0xFFFFFFFFu;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const std::int64_t row = row0 + slot * 8 + i;
    const bool in = row < owner.real_end && col < p.cols;
    float v[8];
    Source::Values(kept[i], v);
    std::uint32_t bits[8], largest, smallest;
    Extremes8(v, bits, largest, smallest, in, stats);
    largest_all = max(largest_all, largest);
    smallest_all = in ? min(smallest_all, smallest) : smallest_all;
    if (kTile > 0) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        col_amax[j] = max(col_amax[j], bits[j]);
      }
    }
    if (kRow) {
      float quant_scale = given;
      if (kTile > 0) {
        const std::uint32_t amax = MaxOverLanes<kDivisor / 8>(largest);
        quant_scale = TileQuantScale<kTile>(amax, p);
        if ((lane16 & (kDivisor / 8 - 1)) == 0) {
          row_marked[lane16 * 8 / kDivisor][slot * 8 + i] = Marked(quant_scale, amax);
        }
      }
      const uint2 codes = Encode8(p.e5m2, v, quant_scale);
      if (row < p.rows && col < p.cols) {
        *reinterpret_cast<uint2*>(p.row.q + row * p.row.ld + col) = codes;
      }
      if (in) {
        CountCast8(p.e5m2, v, codes, quant_scale, largest, smallest, stats);
      }
    }
  }
  stats.amax_bits = largest_all;

  if (kTile > 0) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      col_amax[j] = max(col_amax[j], __shfl_xor_sync(kFullMask, col_amax[j], 16));
      if (lane < 16) {
        col_part[warp][lane16 * 8 + j] = col_amax[j];
      }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < kPerEdge * 128; i += 256) {
      const int part = i / 128, c = i % 128;
      std::uint32_t amax = 0;
#pragma unroll
      for (int w = 0; w < 8 / kPerEdge; ++w) {
        amax = max(amax, col_part[part * (8 / kPerEdge) + w][c]);
      }
      col_marked[part][c] = Marked(TileQuantScale<kTile>(amax, p), amax);
    }
    __syncthreads();
  }

#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float quant_scale =
        kTile > 0 ? fabsf(col_marked[slot * 8 / kDivisor][lane16 * 8 + j]) : given;
    float v[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float all[8];
      Source::Values(kept[i], all);
      v[i] = all[j];
    }
    const uint2 codes = Encode8(p.e5m2, v, quant_scale);
    StoreTransposed(codes_t, lane16 * 8 + j, slot, codes);
    if (!kRow) {
      // Elements are counted with their column's scale; rows behind the group's end are left out.
      const int rows_in = static_cast<int>(
          max(std::int64_t{0}, min(std::int64_t{8}, owner.real_end - (row0 + slot * 8))));
      if (rows_in > 0 && col + j < p.cols) {
        const DType format = p.e5m2 ? DType::kE5M2 : DType::kE4M3;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const std::uint32_t magnitude = ((i < 4 ? codes.x : codes.y) >> (8 * (i & 3))) & 0x7Fu;
          const bool counted = i < rows_in, nonzero = v[i] != 0.0f;
          stats.zero += counted && !nonzero ? 1 : 0;
          stats.flushed += counted && nonzero && magnitude == 0 ? 1 : 0;
          stats.saturated += counted && IsSaturated(format, __fmul_rn(v[i], quant_scale)) ? 1 : 0;
        }
      }
    }
  }
  __syncthreads();
  const int columns = static_cast<int>(min(std::int64_t{128}, p.cols - col0));
  WriteTransposed<256>(codes_t, columns, p.col.q + col0 * p.col.ld + row0, p.col.ld);
  if (kTile > 0) {
    for (int i = threadIdx.x; i < kPerEdge * 128; i += 256) {
      const int part = i / 128, at = i % 128;
      if (at < columns) {
        p.col.scale[(col0 + at) * p.col.row_stride + (row0 / kDivisor + part) * p.col.tile_stride] =
            UnmarkedDequant(col_marked[part][at], !kRow, stats);
      }
      if (kRow && row0 + at < p.rows && part * kDivisor < columns) {
        p.row.scale[(row0 + at) * p.row.row_stride + (col0 / kDivisor + part) * p.row.tile_stride] =
            UnmarkedDequant(row_marked[part][at], true, stats);
      }
    }
  }
  const std::int64_t real_rows =
      max(std::int64_t{0}, min(std::int64_t{128}, owner.real_end - row0));
  if (kTile == 0) {
    NoteScale(stats.amax_bits, DequantScaleFromQuantScale(given), stats);
  }
  FlushStats(p.stats != nullptr ? p.stats + owner.group : nullptr, stats,
             static_cast<std::uint64_t>(real_rows * columns));
}

// ---------------------------------------------------------------- launch

// kColumnsAlone: the column-wise copy may be wanted without the row-wise one.
template <class Source, int kTile, bool kColumnsAlone>
void LaunchQuantize(cudaStream_t stream, const Source& source, const QuantizeParams& p) {
  if (p.rows == 0 || p.cols == 0) {
    return;
  }
  if (p.col.q == nullptr) {
    const std::size_t smem =
        kTile > 0 ? sizeof(float) * kRowsPerBlock * (p.cols / (kTile > 0 ? kTile : 1)) : 0;
    if (smem > 48 * 1024) {
      cudaFuncSetAttribute(quantize_row_kernel<Source, kTile>,
                           cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(smem));
    }
    quantize_row_kernel<Source, kTile>
        <<<Blocks(p.rows, kRowsPerBlock), 256, smem, stream>>>(source, p);
    return;
  }
  const unsigned blocks = Blocks(p.rows, 128) * Blocks(p.cols, 128);
  if (p.row.q != nullptr) {
    quantize_tile_kernel<Source, kTile, true><<<blocks, 256, 0, stream>>>(source, p);
  } else {
    OCTAVO_CHECK(kColumnsAlone, "a column-wise copy needs the row-wise one here");
    if constexpr (kColumnsAlone) {
      quantize_tile_kernel<Source, kTile, false><<<blocks, 256, 0, stream>>>(source, p);
    }
  }
}

}  // namespace octavo::cuda
