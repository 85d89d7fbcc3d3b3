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

#include <type_traits>

#include "base/check.h"
#include "kernels/cuda/context.h"
#include "kernels/cuda/device.cuh"

namespace octavo::cuda {

struct QuantizeTarget {
  std::uint8_t* q;
  std::int64_t ld;
  float* dequant_scale;
  std::int64_t row_stride, tile_stride;
};
inline QuantizeTarget MakeTarget(const QTensor& t) {
  return {t.q, t.stride(), t.dequant_scale, t.scale_row_stride, t.scale_tile_stride};
}

struct QuantizeParams {
  Groups groups;
  std::int64_t rows, cols;  // rows of the buffer (P)
  bool e5m2, pow2;
  float format_max, min_dequant_scale;
  QuantizeTarget row, col;
  const float* quant_scale;  // kTile 0: [groups]
  StatSlot* stats;           // [groups] or null
};

// ---------------------------------------------------------------- magnitudes

// Ordered magnitudes of a lane's eight elements. Wide: eight FP32 words. Packed: eight BF16 numbers
// in four words, so that one instruction compares two. A number that is not finite is "wild".
struct Wide {
  static constexpr int kWords = 8;
  static __device__ __forceinline__ std::uint32_t Max(std::uint32_t a, std::uint32_t b) {
    return max(a, b);
  }
  static __device__ __forceinline__ bool Wild(std::uint32_t a) { return a >= kInfinityBits; }
  // Bits of the largest FP32 magnitude in the word.
  static __device__ __forceinline__ std::uint32_t Largest(std::uint32_t a) { return a; }
  // The word with wild numbers replaced by zero.
  static __device__ __forceinline__ std::uint32_t Tame(std::uint32_t a, std::uint32_t* wild) {
    *wild += a >= kInfinityBits ? 1 : 0;
    return a >= kInfinityBits ? 0 : a;
  }
};
struct Packed {
  static constexpr int kWords = 4;
  static __device__ __forceinline__ std::uint32_t Max(std::uint32_t a, std::uint32_t b) {
    return __vmaxs2(a, b);
  }
  static __device__ __forceinline__ bool Wild(std::uint32_t a) {
    return ((a + 0x00800080u) & 0x80008000u) != 0;
  }
  static __device__ __forceinline__ std::uint32_t Largest(std::uint32_t a) {
    return max(a << 16, a & 0xFFFF0000u);
  }
  static __device__ __forceinline__ std::uint32_t Tame(std::uint32_t a, std::uint32_t* wild) {
    const bool low = (a & 0xFFFFu) >= 0x7F80u, high = (a >> 16) >= 0x7F80u;
    *wild += (low ? 1 : 0) + (high ? 1 : 0);
    return (low ? 0 : a & 0xFFFFu) | (high ? 0 : a & 0xFFFF0000u);
  }
};

template <class M>
__device__ __forceinline__ std::uint32_t MaxWord(const std::uint32_t w[M::kWords]) {
  std::uint32_t top = w[0];
#pragma unroll
  for (int i = 1; i < M::kWords; ++i) {
    top = M::Max(top, w[i]);
  }
  return top;
}
// Tames the words if any is wild (rare), counts them where `count` says so, and says whether.
template <class M>
__device__ __forceinline__ bool TameAll(std::uint32_t w[M::kWords], bool count,
                                        ThreadStats& stats) {
  if (!M::Wild(MaxWord<M>(w))) {
    return false;
  }
  std::uint32_t wild = 0;
#pragma unroll
  for (int i = 0; i < M::kWords; ++i) {
    w[i] = M::Tame(w[i], &wild);
  }
  stats.nonfinite += count ? wild : 0;
  return true;
}

// Maxima of kCount values over the 16 lanes of a half warp, with few shuffles: each exchange halves
// the number of values a lane still owns. Afterwards the lane owns value OwnedBy<kCount>(lane).
template <class M, int kCount>
__device__ __forceinline__ std::uint32_t HalfWarpMaxima(std::uint32_t x[kCount]) {
  static_assert(kCount == 2 || kCount == 4 || kCount == 8);
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int n = kCount / 2, bit = 8; n >= 1; n /= 2, bit /= 2) {
    const bool upper = (lane & bit) != 0;
#pragma unroll
    for (int i = 0; i < n; ++i) {
      const std::uint32_t send = upper ? x[i] : x[i + n], keep = upper ? x[i + n] : x[i];
      x[i] = M::Max(keep, __shfl_xor_sync(kFullMask, send, bit));
    }
  }
#pragma unroll
  for (int bit = 8 / kCount; bit >= 1; bit /= 2) {
    x[0] = M::Max(x[0], __shfl_xor_sync(kFullMask, x[0], bit));
  }
  return x[0];
}
template <int kCount>
__device__ __forceinline__ int OwnedBy(int lane) {
  return (lane & 15) / (16 / kCount);
}
template <int kCount>
__device__ __forceinline__ int OwnerOf(int lane, int i) {
  return (lane & 16) | (i * (16 / kCount));
}

// ---------------------------------------------------------------- sources

// x [rows, cols] of T, row-major.
template <class T>
struct DenseSource {
  const T* x;
  std::int64_t ld;
  using Loaded = Raw8<T>;
  using Kept = Raw8<T>;
  using Magnitude = std::conditional_t<sizeof(T) == 2, Packed, Wide>;
  static constexpr bool kComputes = false;
  // Loaded as 16-byte vectors, and where vector v of (row, col) lies.
  static constexpr int kVectors = sizeof(T) / 2;
  __device__ __forceinline__ const void* Address(std::int64_t row, std::int64_t col, int v) const {
    return x + row * ld + col + v * 4;
  }
  __device__ __forceinline__ float RowFactor(std::int64_t) const { return 1.0f; }
  __device__ __forceinline__ void Load(std::int64_t row, std::int64_t col, Loaded& r) const {
    LoadRaw(x + row * ld + col, r);
  }
  // Asks L2 for 64 columns of a row.
  __device__ __forceinline__ void Prefetch64(std::int64_t row, std::int64_t col) const {
    PrefetchL2(x + row * ld + col);
    if (sizeof(T) == 4) {
      PrefetchL2(x + row * ld + col + 32);
    }
  }
  static __device__ __forceinline__ void Zero(Loaded& r) { ZeroRaw(r); }
  static __device__ __forceinline__ Kept Keep(const Loaded& r, float) { return r; }
  static __device__ __forceinline__ void ZeroKept(Kept& r) { ZeroRaw(r); }
  static __device__ __forceinline__ void Values(const Kept& r, float v[8]) { Unpack(r, v); }
  static __device__ __forceinline__ void Magnitudes(const Kept& r,
                                                    std::uint32_t w[Magnitude::kWords]) {
    constexpr std::uint32_t kMask = sizeof(T) == 2 ? 0x7FFF7FFFu : 0x7FFFFFFFu;
    w[0] = r.a.x & kMask;
    w[1] = r.a.y & kMask;
    w[2] = r.a.z & kMask;
    w[3] = r.a.w & kMask;
    if constexpr (sizeof(T) == 4) {
      w[4] = r.b.x & kMask;
      w[5] = r.b.y & kMask;
      w[6] = r.b.z & kMask;
      w[7] = r.b.w & kMask;
    }
  }
};

// ---------------------------------------------------------------- scales

template <int kTile>
__device__ __forceinline__ float TileQuantScale(std::uint32_t amax_bits, const QuantizeParams& p) {
  if (kTile == 32) {
    return MxScaleFromAmax(__uint_as_float(amax_bits), p.format_max).quant_scale;
  }
  if (p.min_dequant_scale > 0) {
    return QuantScaleFromAmax(__uint_as_float(amax_bits), p.format_max, p.pow2, 0,
                              p.min_dequant_scale);
  }
  if (p.pow2) {
    // Both maxima are 1.75 · 2^e, so floor(log2(M/a)) is the exponent field of the difference of
    // the bit patterns; the rounded quotient of QuantScaleFromAmax never crosses a power of two.
    const std::uint32_t max_bits = __float_as_uint(p.format_max);
    const std::uint32_t bits = (max_bits - amax_bits + (127u << 23)) & 0x7F800000u;
    return amax_bits <= max_bits - (126u << 23) ? kQuantScaleMax : __uint_as_float(bits);
  }
  return QuantScaleFromAmax(__uint_as_float(amax_bits), p.format_max, false, 0);
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

// Shared memory of the row kernels: each warp streams its rows through kStages private stages, so
// that loads stay in flight while it computes.
inline constexpr int kStages = 3;
inline constexpr int kStageVectors = 4;  // 16-byte vectors a lane and stage
inline constexpr int kStageBytes = 8 * kStages * kStageVectors * 32 * 16;

template <class Source, int kTile, bool kE5M2>
__global__ void __launch_bounds__(256, 4) quantize_row_kernel(Source source, QuantizeParams p) {
  using M = typename Source::Magnitude;
  constexpr int kVectors = Source::kVectors;
  constexpr int kUnroll = kStageVectors / kVectors;  // units of 256 columns a stage
  constexpr int kDivisor = kTile > 0 ? kTile : 1;
  static_assert(sizeof(typename Source::Loaded) == kVectors * 16);
  extern __shared__ __align__(16) std::uint8_t dynamic[];
  float* marked = reinterpret_cast<float*>(dynamic + kStageBytes);  // [tiles][kRowsPerBlock]
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  uint4* stages = reinterpret_cast<uint4*>(dynamic) + warp * kStages * kStageVectors * 32 + lane;
  const std::int64_t row0 = static_cast<std::int64_t>(blockIdx.x) * kRowsPerBlock;
  const int cols = static_cast<int>(p.cols);
  ThreadStats stats;

  // The warp's work: two rows, one stage of columns after the other.
  const int per_row = (cols + 256 * kUnroll - 1) / (256 * kUnroll);
  const int rows_here = static_cast<int>(min(std::int64_t{kRowsPerBlock}, p.rows - row0));
  int load_half = 0, load_c0 = 0, load_stage = 0;
  const auto load_next = [&] {
    if (load_half < 2) {
      const int rr = warp + load_half * 8;
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int col = load_c0 + u * 256 + lane * 8;
        const bool wanted = rr < rows_here && col < cols;
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
          CopyAsync(stages + (load_stage * kStageVectors + u * kVectors + v) * 32,
                    source.Address(wanted ? row0 + rr : row0, wanted ? col : 0, v), wanted);
        }
      }
      load_stage = load_stage == kStages - 1 ? 0 : load_stage + 1;
      load_c0 += 256 * kUnroll;
      if (load_c0 >= cols) {
        load_c0 = 0;
        ++load_half;
      }
    }
    CopyCommit();
  };
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) {
    load_next();
  }
  float factor[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int rr = warp + half * 8;
    factor[half] = rr < rows_here ? source.RowFactor(row0 + rr) : 0.0f;
  }
  const RowOwner owner = FindOwner(p.groups, row0);  // while the loads are on their way
  if (owner.group < 0) {
    return;  // rows of no group are nobody's: not written
  }
  const float given = kTile == 0 ? p.quant_scale[owner.group] : 1.0f;
  const int real_rows_here = static_cast<int>(
      max(std::int64_t{0}, min(std::int64_t{kRowsPerBlock}, owner.real_end - row0)));

  int stage = 0;
  const auto row_of_warp = [&](int half) {
    const int rr = warp + half * 8;
    const std::int64_t row = row0 + rr;
    const bool real = rr < real_rows_here, there = rr < rows_here;
    const float row_factor = half == 0 ? factor[0] : factor[1];
    std::uint8_t* out = p.row.q + row * p.row.ld;
    for (int it = 0; it < per_row; ++it) {
      const int c0 = it * 256 * kUnroll;
      load_next();
      CopyWait<kStages - 1>();
      typename Source::Kept kept[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        typename Source::Loaded loaded;
        uint4* words = reinterpret_cast<uint4*>(&loaded);
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
          words[v] = stages[(stage * kStageVectors + u * kVectors + v) * 32];
        }
        kept[u] = Source::Keep(loaded, row_factor);
        if (!real) {
          Source::ZeroKept(kept[u]);  // padding, whatever it holds
        }
      }
      stage = stage == kStages - 1 ? 0 : stage + 1;
      std::uint32_t largest[kUnroll], top[kUnroll];
      bool wild[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const bool count = real && c0 + u * 256 + lane * 8 < cols;
        if constexpr (M::kWords == 8) {
          float v[8];
          Source::Values(kept[u], v);
          wild[u] = Largest8(v, largest[u], count, stats);
        } else {
          std::uint32_t w[M::kWords];
          Source::Magnitudes(kept[u], w);
          wild[u] = TameAll<M>(w, count, stats);
          largest[u] = MaxWord<M>(w);
        }
        top[u] = largest[u];
      }
      float quant_scale[kUnroll];
      if constexpr (kTile == 128) {
        // Each lane decides one of the 2·kUnroll tiles; the others ask it.
        std::uint32_t amax;
        if constexpr (kUnroll > 1) {
          amax = M::Largest(HalfWarpMaxima<M, kUnroll>(top));
        } else {
          amax = MaxOverLanes<16>(M::Largest(top[0]));
        }
        stats.amax_bits = max(stats.amax_bits, amax);
        const float mine = TileQuantScale<128>(amax, p);
        const int tile = c0 / 128 + OwnedBy<kUnroll>(lane) * 2 + (lane >> 4);
        if ((lane & (16 / kUnroll - 1)) == 0 && tile * 128 < cols) {
          marked[tile * kRowsPerBlock + rr] = Marked(mine, amax);
        }
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
          quant_scale[u] = __shfl_sync(kFullMask, mine, OwnerOf<kUnroll>(lane, u));
        }
      } else {
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
          const std::uint32_t own = M::Largest(largest[u]);
          stats.amax_bits = max(stats.amax_bits, own);
          quant_scale[u] = given;
          if constexpr (kTile == 32) {
            const std::uint32_t amax = MaxOverLanes<4>(own);
            quant_scale[u] = TileQuantScale<32>(amax, p);
            const int col = c0 + u * 256 + lane * 8;
            if ((lane & 3) == 0 && col < cols) {
              marked[col / 32 * kRowsPerBlock + rr] = Marked(quant_scale[u], amax);
            }
          }
        }
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int col = c0 + u * 256 + lane * 8;
        if (col < cols && there) {
          float v[8];
          Source::Values(kept[u], v);
          const uint2 codes = Encode8<kE5M2>(v, quant_scale[u]);
          *reinterpret_cast<uint2*>(out + col) = codes;
          if (real) {
            const bool saturates =
                kTile == 0 && MaySaturate(kE5M2, M::Largest(largest[u]), quant_scale[u]);
            CountCast8(kE5M2, v, codes, quant_scale[u], wild[u] || saturates, stats);
          }
        }
      }
    }
  };
  if constexpr (Source::kComputes) {
#pragma unroll 1  // two copies of a long body are slower than one (measured)
    for (int half = 0; half < 2; ++half) {
      row_of_warp(half);
    }
  } else {
    for (int half = 0; half < 2; ++half) {
      row_of_warp(half);
    }
  }
  const std::int64_t last = min(row0 + kRowsPerBlock, p.rows);
  if (kTile > 0) {
    __syncthreads();
    const int tiles = cols / kDivisor;
    for (int i = threadIdx.x; i < tiles * kRowsPerBlock; i += 256) {
      // The stride that is 1 decides which index runs fastest, so that stores are coalesced.
      const bool by_row = p.row.row_stride == 1;
      const int r = by_row ? i % kRowsPerBlock : i / tiles;
      const int t = by_row ? i / kRowsPerBlock : i % tiles;
      if (row0 + r < last) {
        p.row.dequant_scale[(row0 + r) * p.row.row_stride + t * p.row.tile_stride] =
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

// ---------------------------------------------------------------- transposed codes

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
// Half a chunk: four row-consecutive codes, quad = row / 4.
__device__ __forceinline__ void StoreTransposed4(std::uint8_t* smem, int c, int quad,
                                                 std::uint32_t codes) {
  *reinterpret_cast<std::uint32_t*>(smem + c * 128 + (((quad >> 1) ^ ((c >> 3) & 15)) << 3) +
                                    (quad & 1) * 4) = codes;
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

// A thread holds 8 columns of kTileRows consecutive rows: eight where they are packed in 16 bytes
// each, else four, so that at least two blocks fit on an SM.
template <class Source>
inline constexpr int kTileRows = sizeof(typename Source::Kept) == 16 ? 8 : 4;
template <class Source>
inline constexpr int kTileThreads = 2048 / kTileRows<Source>;
template <class Source, int kTile, bool kRow>
inline constexpr int kTileBlocks = kTileRows<Source> == 8 && kTile > 0 ? 3
                                   : kRow || kTile > 0                 ? 2
                                                                       : 1;

// Thread (lane16, slot). Tiles go along the rows, so that reads are long runs; a block asks L2 for
// the tile `ahead` blocks later. Places are 32-bit: a register each.
template <class Source, int kTile, bool kRow, bool kE5M2>
__global__ void __launch_bounds__(kTileThreads<Source>, kTileBlocks<Source, kTile, kRow>)
    quantize_tile_kernel(Source source, QuantizeParams p, unsigned ahead) {
  using M = typename Source::Magnitude;
  constexpr int kRows = kTileRows<Source>, kThreads = kTileThreads<Source>, kWarps = kThreads / 32;
  constexpr int kDivisor = kTile > 0 ? kTile : 128;
  constexpr int kPerEdge = 128 / kDivisor;  // dequant_scales along an edge of the block's tile
  __shared__ __align__(16) std::uint8_t codes_t[128 * 128];
  __shared__ __align__(16) std::uint32_t col_part[kWarps][128];
  __shared__ __align__(16) float row_marked[kPerEdge][128], col_marked[kPerEdge][128];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  int lane16 = threadIdx.x & 15, slot = threadIdx.x >> 4;
  const unsigned col_tiles = (static_cast<unsigned>(p.cols) + 127) / 128;
  int row0 = static_cast<int>(blockIdx.x / col_tiles) * 128;
  int col0 = static_cast<int>(blockIdx.x % col_tiles) * 128;
  const int col = col0 + lane16 * 8, first = row0 + slot * kRows;
  const bool col_in = kTile == 128 || col < p.cols;                    // 128-wide tiles are whole
  const int rows_here = min(kRows, static_cast<int>(p.rows) - first);  // may be negative
  ThreadStats stats;

  typename Source::Kept kept[kRows];
  int group, real_here;  // real rows of the tile
  {
    typename Source::Loaded loaded[kRows];
    float factor[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const bool there = i < rows_here && col_in;
      factor[i] = there ? source.RowFactor(first + i) : 0.0f;
      if (there) {
        source.Load(first + i, col, loaded[i]);
      } else {
        Source::Zero(loaded[i]);
      }
    }
    if (threadIdx.x < 256 && blockIdx.x + ahead < gridDim.x) {
      const unsigned then = blockIdx.x + ahead;
      const std::int64_t r = std::int64_t{then / col_tiles} * 128 + (threadIdx.x >> 1);
      const std::int64_t c = std::int64_t{then % col_tiles} * 128 + (threadIdx.x & 1) * 64;
      if (r < p.rows && c < p.cols) {
        source.Prefetch64(r, c);
      }
    }
    const RowOwner owner = FindOwner(p.groups, row0);  // while the loads are on their way
    if (owner.group < 0) {
      return;  // rows of no group are nobody's: not written
    }
    group = owner.group;
    real_here =
        static_cast<int>(max(std::int64_t{0}, min(std::int64_t{128}, owner.real_end - row0)));
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      kept[i] = Source::Keep(loaded[i], factor[i]);
    }
  }
  const int real = min(kRows, real_here - slot * kRows);  // of this thread's rows
  if (real < kRows) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (i >= real) {
        Source::ZeroKept(kept[i]);
      }
    }
  }
  const float given = kTile == 0 ? p.quant_scale[group] : 1.0f;

  std::uint32_t col_amax[M::kWords] = {};
  std::uint32_t largest[kRows];
  bool wild = false;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    std::uint32_t w[M::kWords];
    Source::Magnitudes(kept[i], w);
    wild |= TameAll<M>(w, col_in && i < real, stats);
    largest[i] = MaxWord<M>(w);
#pragma unroll
    for (int j = 0; j < M::kWords; ++j) {
      col_amax[j] = M::Max(col_amax[j], w[j]);
    }
  }
  {
    std::uint32_t top = col_amax[0];
#pragma unroll
    for (int j = 1; j < M::kWords; ++j) {
      top = M::Max(top, col_amax[j]);
    }
    stats.amax_bits = M::Largest(top);
  }
  if constexpr (kTile > 0) {
    // The two half warps hold the same columns: each keeps the maxima of four of them.
    constexpr int kHalf = M::kWords / 2;
    std::uint32_t half_max[kHalf];
#pragma unroll
    for (int j = 0; j < kHalf; ++j) {
      const bool upper = lane >= 16;
      const std::uint32_t send = upper ? col_amax[j] : col_amax[j + kHalf];
      const std::uint32_t keep = upper ? col_amax[j + kHalf] : col_amax[j];
      half_max[j] = M::Max(keep, __shfl_xor_sync(kFullMask, send, 16));
    }
    uint4 four;
    if constexpr (kHalf == 2) {
      four = make_uint4(half_max[0] << 16, half_max[0] & 0xFFFF0000u, half_max[1] << 16,
                        half_max[1] & 0xFFFF0000u);
    } else {
      four = make_uint4(half_max[0], half_max[1], half_max[2], half_max[3]);
    }
    *reinterpret_cast<uint4*>(&col_part[warp][lane16 * 8 + (lane >= 16 ? 4 : 0)]) = four;
  }

  if constexpr (kRow) {
    float mine = given;  // of the row that the lane decides
    if constexpr (kTile == 128) {
      std::uint32_t top[kRows];
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        top[i] = largest[i];
      }
      const std::uint32_t amax = M::Largest(HalfWarpMaxima<M, kRows>(top));
      mine = TileQuantScale<128>(amax, p);
      if ((lane & (16 / kRows - 1)) == 0) {
        row_marked[0][slot * kRows + OwnedBy<kRows>(lane)] = Marked(mine, amax);
      }
    }
    std::uint8_t* out = p.row.q + std::int64_t{first} * p.row.ld + col;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      float quant_scale = given;
      if constexpr (kTile == 128) {
        quant_scale = __shfl_sync(kFullMask, mine, OwnerOf<kRows>(lane, i));
      } else if constexpr (kTile == 32) {
        const std::uint32_t amax = MaxOverLanes<4>(M::Largest(largest[i]));
        quant_scale = TileQuantScale<32>(amax, p);
        if ((lane16 & 3) == 0) {
          row_marked[lane16 / 4][slot * kRows + i] = Marked(quant_scale, amax);
        }
      }
      if (col_in) {
        float v[8];
        Source::Values(kept[i], v);
        const uint2 codes = Encode8<kE5M2>(v, quant_scale);
        if (i < rows_here) {
          *reinterpret_cast<uint2*>(out + i * p.row.ld) = codes;
        }
        if (i < real) {
          const bool saturates =
              kTile == 0 && MaySaturate(kE5M2, M::Largest(largest[i]), quant_scale);
          CountCast8(kE5M2, v, codes, quant_scale, wild || saturates, stats);
        }
      }
    }
  }

  if constexpr (kTile > 0) {
    __syncthreads();
    for (int i = threadIdx.x; i < kPerEdge * 128; i += kThreads) {
      const int part = i / 128, c = i % 128;
      std::uint32_t amax = 0;
#pragma unroll
      for (int w = 0; w < kWarps / kPerEdge; ++w) {
        amax = max(amax, col_part[part * (kWarps / kPerEdge) + w][c]);
      }
      col_marked[part][c] = Marked(TileQuantScale<kTile>(amax, p), amax);
    }
    __syncthreads();
  }
  const unsigned thread = ThreadIndexAnew();
  lane16 = static_cast<int>(thread & 15);
  slot = static_cast<int>(thread >> 4);
  float col_quant[8];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    // 16 bytes at a time: single words, 8 apart, would meet in banks.
    float4 four = make_float4(given, given, given, given);
    if constexpr (kTile > 0) {
      four = *reinterpret_cast<const float4*>(
          &col_marked[slot * kRows / kDivisor][lane16 * 8 + half * 4]);
    }
    col_quant[half * 4] = fabsf(four.x);
    col_quant[half * 4 + 1] = fabsf(four.y);
    col_quant[half * 4 + 2] = fabsf(four.z);
    col_quant[half * 4 + 3] = fabsf(four.w);
  }
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float quant_scale = col_quant[j];
    float v[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      float all[8];
      Source::Values(kept[i], all);
      v[i] = all[j];
    }
    std::uint32_t codes[kRows / 4];
#pragma unroll
    for (int i = 0; i < kRows; i += 4) {
      codes[i / 4] =
          Encode4<kE5M2>(__fmul_rn(v[i], quant_scale), __fmul_rn(v[i + 1], quant_scale),
                         __fmul_rn(v[i + 2], quant_scale), __fmul_rn(v[i + 3], quant_scale));
    }
    if constexpr (kRows == 8) {
      StoreTransposed(codes_t, lane16 * 8 + j, slot, make_uint2(codes[0], codes[1]));
    } else {
      StoreTransposed4(codes_t, lane16 * 8 + j, slot, codes[0]);
    }
    if (!kRow && col + j < p.cols) {
      // Elements are counted with their column's scale; rows behind the group's end are left out.
      const DType format = kE5M2 ? DType::kE5M2 : DType::kE4M3;
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const std::uint32_t magnitude = (codes[i / 4] >> (8 * (i & 3))) & 0x7Fu;
        const bool counted = i < real, nonzero = v[i] != 0.0f;
        stats.zero += counted && !nonzero ? 1 : 0;
        stats.flushed += counted && nonzero && magnitude == 0 ? 1 : 0;
        stats.saturated += counted && IsSaturated(format, __fmul_rn(v[i], quant_scale)) ? 1 : 0;
      }
    }
  }
  __syncthreads();
  const unsigned block = BlockIndexAnew();
  row0 = static_cast<int>(block / col_tiles) * 128;
  col0 = static_cast<int>(block % col_tiles) * 128;
  const int columns = kTile == 128 ? 128 : min(128, static_cast<int>(p.cols) - col0);
  WriteTransposed<kThreads>(codes_t, columns, p.col.q + std::int64_t{col0} * p.col.ld + row0,
                            p.col.ld);
  if constexpr (kTile > 0) {
    // 128 threads write the columns' scales, 128 others the rows'.
    const int at = threadIdx.x & 127;
#pragma unroll
    for (int part = 0; part < kPerEdge; ++part) {
      if (threadIdx.x < 128) {
        if (at < columns) {
          p.col.dequant_scale[std::int64_t{col0 + at} * p.col.row_stride +
                              std::int64_t{row0 / kDivisor + part} * p.col.tile_stride] =
              UnmarkedDequant(col_marked[part][at], !kRow, stats);
        }
      } else if (kRow && threadIdx.x < 256 && row0 + at < p.rows && part * kDivisor < columns) {
        p.row.dequant_scale[std::int64_t{row0 + at} * p.row.row_stride +
                            std::int64_t{col0 / kDivisor + part} * p.row.tile_stride] =
            UnmarkedDequant(row_marked[part][at], true, stats);
      }
    }
  }
  if (kTile == 0) {
    NoteScale(stats.amax_bits, DequantScaleFromQuantScale(given), stats);
  }
  FlushStats(p.stats != nullptr ? p.stats + group : nullptr, stats,
             static_cast<std::uint64_t>(real_here * columns));
}

// ---------------------------------------------------------------- launch

// kColumnsAlone: the column-wise copy may be wanted without the row-wise one.
template <class Source, int kTile, bool kColumnsAlone, bool kE5M2>
void LaunchQuantizeAs(OpsContext* context, const Source& source, const QuantizeParams& p) {
  cudaStream_t stream = context->stream;
  if (p.col.q == nullptr) {
    const std::size_t smem =
        kStageBytes +
        (kTile > 0 ? sizeof(float) * kRowsPerBlock * (p.cols / (kTile > 0 ? kTile : 1)) : 0);
    cudaFuncSetAttribute(quantize_row_kernel<Source, kTile, kE5M2>,
                         cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(smem));
    quantize_row_kernel<Source, kTile, kE5M2>
        <<<Blocks(p.rows, kRowsPerBlock), 256, smem, stream>>>(source, p);
    return;
  }
  const unsigned tiles = Blocks(p.rows, 128) * Blocks(p.cols, 128);
  const unsigned ahead =
      static_cast<unsigned>(context->multiprocessors * kTileBlocks<Source, kTile, true>) / 2;
  if (p.row.q != nullptr) {
    quantize_tile_kernel<Source, kTile, true, kE5M2>
        <<<tiles, kTileThreads<Source>, 0, stream>>>(source, p, ahead);
  } else {
    OCTAVO_CHECK(kColumnsAlone, "a column-wise copy needs the row-wise one here");
    if constexpr (kColumnsAlone) {
      quantize_tile_kernel<Source, kTile, false, kE5M2>
          <<<tiles, kTileThreads<Source>, 0, stream>>>(source, p, ahead);
    }
  }
}

template <class Source, int kTile, bool kColumnsAlone>
void LaunchQuantize(OpsContext* context, const Source& source, const QuantizeParams& p) {
  if (p.rows == 0 || p.cols == 0) {
    return;
  }
  if (p.e5m2) {
    LaunchQuantizeAs<Source, kTile, kColumnsAlone, true>(context, source, p);
  } else {
    LaunchQuantizeAs<Source, kTile, kColumnsAlone, false>(context, source, p);
  }
}

}  // namespace octavo::cuda
