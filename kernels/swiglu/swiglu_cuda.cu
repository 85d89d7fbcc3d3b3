// SwiGLU × p on the GPU, fused with the cast: act = silu(gate)·up·p never reaches memory in high
// precision when a quantised output is wanted.
//
// Forward is a source of the quantising kernels (quantize_tiles.cuh). Backward has two outputs a
// column (d_gate at c, d_up at F + c) and a sum along the row (dweight), so it has kernels of its
// own:
//   rows only      a warp a row; the row's sum stays in the warp
//   rows, columns  128×128 elements of F a block of 512 threads; the row sums of the F/128 tiles go
//                  through scratch and are added in order, so dweight is reproducible.
#include "base/check.h"
#include "kernels/cuda/context.h"
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/ops_cuda.h"
#include "kernels/quantize/quantize_tiles.cuh"

namespace octavo::cuda {
namespace {

// 1/(1 + 2^(-g·log2 e)) in four instructions; a flushed subnormal or an infinity of the power gives
// the right limit.
__device__ __forceinline__ float Sigmoid(float g) {
  float power, sigmoid;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(g * -1.44269504f));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(sigmoid) : "f"(1.0f + power));
  return sigmoid;
}

template <class T>
struct SwigluSource {
  const T* gate_up;  // [rows, 2F]
  std::int64_t f;
  const float* weight;
  struct Loaded {
    Raw8<T> gate, up;
  };
  struct Kept {
    float v[8];
  };
  static constexpr bool kComputes = true;
  static constexpr int kVectors = sizeof(T);  // gate, then up
  __device__ __forceinline__ const void* Address(std::int64_t row, std::int64_t col, int v) const {
    constexpr int kEach = sizeof(T) / 2;
    return gate_up + row * 2 * f + col + (v >= kEach ? f : 0) + v % kEach * 4;
  }
  __device__ __forceinline__ float RowFactor(std::int64_t row) const {
    return weight != nullptr ? weight[row] : 1.0f;
  }
  __device__ __forceinline__ void Load(std::int64_t row, std::int64_t col, Loaded& r) const {
    const T* p = gate_up + row * 2 * f + col;
    LoadRaw(p, r.gate);
    LoadRaw(p + f, r.up);
  }
  // Asks L2 for 64 columns of a row, of gate and of up.
  __device__ __forceinline__ void Prefetch64(std::int64_t row, std::int64_t col) const {
    const T* p = gate_up + row * 2 * f + col;
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(T)) / 2; ++i) {
      PrefetchL2(p + i * 32);
      PrefetchL2(p + f + i * 32);
    }
  }
  static __device__ __forceinline__ void Zero(Loaded& r) {
    ZeroRaw(r.gate);
    ZeroRaw(r.up);
  }
  static __device__ __forceinline__ Kept Keep(const Loaded& r, float factor) {
    float g[8], u[8];
    Unpack(r.gate, g);
    Unpack(r.up, u);
    Kept k;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      k.v[j] = g[j] * Sigmoid(g[j]) * u[j] * factor;
    }
    return k;
  }
  using Magnitude = Wide;
  static __device__ __forceinline__ void ZeroKept(Kept& k) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      k.v[j] = 0;
    }
  }
  static __device__ __forceinline__ void Magnitudes(const Kept& k, std::uint32_t w[8]) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      w[j] = __float_as_uint(k.v[j]) & 0x7FFFFFFFu;
    }
  }
  static __device__ __forceinline__ void Values(const Kept& k, float v[8]) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      v[j] = k.v[j];
    }
  }
};

template <class T>
__global__ void __launch_bounds__(256)
    swiglu_forward_kernel(SwigluSource<T> source, Groups groups, T* act) {
  const int lane = threadIdx.x & 31;
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * 8 + (threadIdx.x >> 5);
  if (row >= groups.padded_rows) {
    return;
  }
  const RowOwner owner = FindOwner(groups, row);
  if (owner.group < 0) {
    return;  // rows of no group are nobody's: not written
  }
  const bool real = row < owner.real_end;
  const float factor = real ? source.RowFactor(row) : 0.0f;
  constexpr int kUnroll = sizeof(T) == 2 ? 4 : 2;  // loads in flight
  for (std::int64_t c0 = lane * 8; c0 < source.f; c0 += 256 * kUnroll) {
    typename SwigluSource<T>::Loaded r[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (real && c0 + u * 256 < source.f) {
        source.Load(row, c0 + u * 256, r[u]);
      } else {
        SwigluSource<T>::Zero(r[u]);
      }
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (c0 + u * 256 < source.f) {
        Store8(act + row * source.f + c0 + u * 256, SwigluSource<T>::Keep(r[u], factor).v);
      }
    }
  }
}

// ---------------------------------------------------------------- backward

template <class T>
struct BackwardParams {
  const T* gate_up;
  const T* d_act;
  const float* weight;
  std::int64_t f;
  T* out;  // plain output, or null
  float* dweight;
  float* partial;  // tile kernel: [rows, F/128] sums for dweight
  QuantizeParams quantize;
};

template <class T>
struct BackwardLoaded {
  Raw8<T> gate, up, d;
};

template <class T>
__device__ __forceinline__ void LoadBackward(const BackwardParams<T>& p, std::int64_t row,
                                             std::int64_t col, BackwardLoaded<T>& r) {
  const T* at = p.gate_up + row * 2 * p.f + col;
  LoadRaw(at, r.gate);
  LoadRaw(at + p.f, r.up);
  LoadRaw(p.d_act + row * p.f + col, r.d);
}
template <class T>
__device__ __forceinline__ void ZeroBackward(BackwardLoaded<T>& r) {
  ZeroRaw(r.gate);
  ZeroRaw(r.up);
  ZeroRaw(r.d);
}

// d_gate, d_up of eight elements; returns Σ silu(gate)·up·d_act.
template <class T>
__device__ __forceinline__ float Backward8(const BackwardLoaded<T>& r, float weight,
                                           float d_gate[8], float d_up[8]) {
  float g[8], u[8], d[8];
  Unpack(r.gate, g);
  Unpack(r.up, u);
  Unpack(r.d, d);
  float sum = 0;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float s = Sigmoid(g[j]), silu = g[j] * s, dp = d[j] * weight;
    sum += silu * u[j] * d[j];
    d_up[j] = dp * silu;
    d_gate[j] = dp * u[j] * (s + silu * (1.0f - s));
  }
  return sum;
}

// Asks L2 for what a warp reads next: `width` columns from col on, at the row's end the first ones
// of the warp's next row (8 further), if it has one.
template <class T>
__device__ __forceinline__ void PrefetchBackward(const BackwardParams<T>& p, std::int64_t row,
                                                 std::int64_t col, bool next_row, int width) {
  constexpr int kLine = 128 / sizeof(T);
  const int lane = threadIdx.x & 31, lines = width / kLine;  // at most 8 of gate, up and d_act
  if (col >= p.f) {
    if (!next_row || row + 8 >= p.quantize.rows) {
      return;
    }
    row += 8;
    col = 0;
  }
  const int part = lane / 8;
  col += lane % 8 * kLine;
  if (part < 3 && lane % 8 < lines && col < p.f) {
    PrefetchL2((part < 2 ? p.gate_up + (row * 2 + part) * p.f : p.d_act + row * p.f) + col);
  }
}

template <class T, int kTile, bool kQuantize, bool kE5M2>
__global__ void __launch_bounds__(256, kTile == 32 && kQuantize ? 2 : 3)
    swiglu_backward_row_kernel(BackwardParams<T> p) {
  constexpr int kUnroll = sizeof(T) == 2 ? 2 : 1;
  extern __shared__ float marked[];  // [2F/kTile][kRowsPerBlock]
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const QuantizeParams& q = p.quantize;
  const std::int64_t row0 = static_cast<std::int64_t>(blockIdx.x) * kRowsPerBlock;
  const RowOwner owner = FindOwner(q.groups, row0);
  if (owner.group < 0) {
    return;
  }
  const int f_tiles = static_cast<int>(p.f / kTile);
  ThreadStats stats;
  for (int rr = warp; rr < kRowsPerBlock; rr += 8) {
    const std::int64_t row = row0 + rr;
    if (row >= q.rows) {
      break;
    }
    const bool real = row < owner.real_end;
    const float weight = !real ? 0.0f : p.weight != nullptr ? p.weight[row] : 1.0f;
    float sum = 0;
    for (std::int64_t c0 = 0; c0 < p.f; c0 += 256 * kUnroll) {
      BackwardLoaded<T> loaded[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const std::int64_t col = c0 + u * 256 + lane * 8;
        if (real && col < p.f) {
          LoadBackward(p, row, col, loaded[u]);
        } else {
          ZeroBackward(loaded[u]);
        }
      }
      PrefetchBackward(p, row, c0 + 256 * kUnroll, rr + 8 < kRowsPerBlock, 256 * kUnroll);
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (c0 + u * 256 >= p.f) {
          break;
        }
        const std::int64_t col = c0 + u * 256 + lane * 8;
        float d_gate[8], d_up[8];
        sum += Backward8(loaded[u], weight, d_gate, d_up);
        if (!kQuantize && col < p.f) {
          Store8(p.out + row * 2 * p.f + col, d_gate);
          Store8(p.out + row * 2 * p.f + p.f + col, d_up);
        }
        if constexpr (kQuantize) {
          const bool in = real && col < p.f;
          std::uint32_t largest[2];
          bool wild[2];
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            wild[half] = Largest8(half == 0 ? d_gate : d_up, largest[half], in, stats);
            stats.amax_bits = max(stats.amax_bits, largest[half]);
          }
          float quant_scale[2];
          if constexpr (kTile == 128) {
            // Half of the lanes decide the tile of d_gate, the others that of d_up.
            const std::uint32_t amax = HalfWarpMaxima<Wide, 2>(largest);
            const float mine = TileQuantScale<128>(amax, q);
            if ((lane & 7) == 0 && col < p.f) {
              marked[(OwnedBy<2>(lane) * f_tiles + static_cast<int>(col / 128)) * kRowsPerBlock +
                     rr] = Marked(mine, amax);
            }
            quant_scale[0] = __shfl_sync(kFullMask, mine, OwnerOf<2>(lane, 0));
            quant_scale[1] = __shfl_sync(kFullMask, mine, OwnerOf<2>(lane, 1));
          } else {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              const std::uint32_t amax = MaxOverLanes<kTile / 8>(largest[half]);
              quant_scale[half] = TileQuantScale<kTile>(amax, q);
              if ((lane & (kTile / 8 - 1)) == 0 && col < p.f) {
                marked[(half * f_tiles + static_cast<int>(col / kTile)) * kRowsPerBlock + rr] =
                    Marked(quant_scale[half], amax);
              }
            }
          }
          if (col < p.f) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              const float* v = half == 0 ? d_gate : d_up;
              const uint2 codes = Encode8<kE5M2>(v, quant_scale[half]);
              *reinterpret_cast<uint2*>(q.row.q + row * q.row.ld + half * p.f + col) = codes;
              if (real) {
                CountCast8(kE5M2, v, codes, quant_scale[half], wild[half], stats);
              }
            }
          }
        }
      }
    }
    sum = WarpSum(sum);
    if (lane == 0 && p.dweight != nullptr) {
      p.dweight[row] = sum;
    }
  }
  if constexpr (kQuantize) {
    __syncthreads();
    const std::int64_t last = min(row0 + kRowsPerBlock, q.rows);
    const int tiles = 2 * f_tiles;
    for (int i = threadIdx.x; i < tiles * kRowsPerBlock; i += 256) {
      const bool by_row = q.row.row_stride == 1;
      const int r = by_row ? i % kRowsPerBlock : i / tiles;
      const int t = by_row ? i / kRowsPerBlock : i % tiles;
      if (row0 + r < last) {
        q.row.dequant_scale[(row0 + r) * q.row.row_stride + t * q.row.tile_stride] =
            UnmarkedDequant(marked[t * kRowsPerBlock + r], true, stats);
      }
    }
    const std::int64_t real_rows = max(std::int64_t{0}, min(last, owner.real_end) - row0);
    FlushStats(q.stats != nullptr ? q.stats + owner.group : nullptr, stats,
               static_cast<std::uint64_t>(real_rows * 2 * p.f));
  }
}

// Thread (lane16, slot): 8 columns, 4 consecutive rows, of d_gate and of d_up.
template <class T, int kTile, bool kE5M2>
__global__ void __launch_bounds__(512, 1) swiglu_backward_tile_kernel(BackwardParams<T> p) {
  constexpr int kPerEdge = 128 / kTile;
  __shared__ __align__(16) std::uint8_t codes_t[128 * 128];
  __shared__ std::uint32_t col_part[16][128];
  __shared__ __align__(16) float row_marked[2][kPerEdge][128], col_marked[2][kPerEdge][128];
  const QuantizeParams& q = p.quantize;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int lane16 = threadIdx.x & 15, slot = threadIdx.x >> 4;
  const std::int64_t f_tiles = CeilDiv(p.f, 128);
  const std::int64_t tile = blockIdx.x % f_tiles, row0 = blockIdx.x / f_tiles * 128;
  const std::int64_t col = tile * 128 + lane16 * 8;
  const bool col_in = col < p.f;
  ThreadStats stats;

  BackwardLoaded<T> loaded[4];
  float value[2][4][8];  // d_gate, d_up
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (col_in) {
      LoadBackward(p, row0 + slot * 4 + i, col, loaded[i]);
    } else {
      ZeroBackward(loaded[i]);
    }
  }
  const RowOwner owner = FindOwner(q.groups, row0);  // while the loads are on their way
  if (owner.group < 0) {
    return;  // rows of no group are nobody's: not written
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (row0 + slot * 4 + i >= owner.real_end) {
      ZeroBackward(loaded[i]);
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const std::int64_t row = row0 + slot * 4 + i;
    const bool real = row < owner.real_end;
    const float weight = !real ? 0.0f : p.weight != nullptr ? p.weight[row] : 1.0f;
    float sum = Backward8(loaded[i], weight, value[0][i], value[1][i]);
#pragma unroll
    for (int o = 8; o > 0; o >>= 1) {
      sum += __shfl_xor_sync(kFullMask, sum, o);
    }
    if (lane16 == 0 && p.partial != nullptr) {
      p.partial[row * f_tiles + tile] = sum;
    }
  }

#pragma unroll
  for (int half = 0; half < 2; ++half) {
    std::uint32_t col_amax[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    std::uint32_t largest[4];
    bool wild[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bool in = row0 + slot * 4 + i < owner.real_end && col_in;
      std::uint32_t bits[8];
      wild[i] = Magnitudes8(value[half][i], bits, largest[i], in, stats);
      stats.amax_bits = max(stats.amax_bits, largest[i]);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        col_amax[j] = max(col_amax[j], bits[j]);
      }
    }
    float row_quant[4];
    if constexpr (kTile == 128) {
      const std::uint32_t amax = HalfWarpMaxima<Wide, 4>(largest);
      const float mine = TileQuantScale<128>(amax, q);
      if ((lane & 3) == 0) {
        row_marked[half][0][slot * 4 + OwnedBy<4>(lane)] = Marked(mine, amax);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        row_quant[i] = __shfl_sync(kFullMask, mine, OwnerOf<4>(lane, i));
      }
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const std::uint32_t amax = MaxOverLanes<kTile / 8>(largest[i]);
        row_quant[i] = TileQuantScale<kTile>(amax, q);
        if ((lane16 & (kTile / 8 - 1)) == 0) {
          row_marked[half][lane16 * 8 / kTile][slot * 4 + i] = Marked(row_quant[i], amax);
        }
      }
    }
    if (col_in) {
      std::uint8_t* out = q.row.q + (row0 + slot * 4) * q.row.ld + half * p.f + col;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint2 codes = Encode8<kE5M2>(value[half][i], row_quant[i]);
        *reinterpret_cast<uint2*>(out + i * q.row.ld) = codes;
        if (row0 + slot * 4 + i < owner.real_end) {
          CountCast8(kE5M2, value[half][i], codes, row_quant[i], wild[i], stats);
        }
      }
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      col_amax[j] = max(col_amax[j], __shfl_xor_sync(kFullMask, col_amax[j], 16));
      if (lane < 16) {
        col_part[warp][lane16 * 8 + j] = col_amax[j];
      }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < kPerEdge * 128; i += 512) {
      const int part = i / 128, c = i % 128;
      std::uint32_t amax = 0;
#pragma unroll
      for (int w = 0; w < 16 / kPerEdge; ++w) {
        amax = max(amax, col_part[part * (16 / kPerEdge) + w][c]);
      }
      col_marked[half][part][c] = Marked(TileQuantScale<kTile>(amax, q), amax);
    }
    __syncthreads();
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      // 16 bytes at a time: single words, 8 apart, would meet in banks.
      const float4 four = *reinterpret_cast<const float4*>(
          &col_marked[half][slot * 4 / kTile][lane16 * 8 + part * 4]);
      const float quant_scale[4] = {fabsf(four.x), fabsf(four.y), fabsf(four.z), fabsf(four.w)};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float y[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          y[i] = __fmul_rn(value[half][i][part * 4 + j], quant_scale[j]);
        }
        StoreTransposed4(codes_t, lane16 * 8 + part * 4 + j, slot,
                         Encode4<kE5M2>(y[0], y[1], y[2], y[3]));
      }
    }
    __syncthreads();
    const int columns = static_cast<int>(min(std::int64_t{128}, p.f - tile * 128));
    WriteTransposed<512>(codes_t, columns, q.col.q + (half * p.f + tile * 128) * q.col.ld + row0,
                         q.col.ld);
    for (int i = threadIdx.x; i < kPerEdge * 128; i += 512) {
      const int part = i / 128, at = i % 128;
      if (at < columns) {
        q.col.dequant_scale[(half * p.f + tile * 128 + at) * q.col.row_stride +
                            (row0 / kTile + part) * q.col.tile_stride] =
            UnmarkedDequant(col_marked[half][part][at], false, stats);
      }
      if (part * kTile < columns) {
        q.row.dequant_scale[(row0 + at) * q.row.row_stride +
                            ((half * p.f + tile * 128) / kTile + part) * q.row.tile_stride] =
            UnmarkedDequant(row_marked[half][part][at], true, stats);
      }
    }
    __syncthreads();
  }
  const std::int64_t real_rows =
      max(std::int64_t{0}, min(std::int64_t{128}, owner.real_end - row0));
  FlushStats(q.stats != nullptr ? q.stats + owner.group : nullptr, stats,
             static_cast<std::uint64_t>(real_rows * 2 * min(std::int64_t{128}, p.f - tile * 128)));
}

// A thread a row; a block is within one group.
__global__ void __launch_bounds__(128)
    sum_tiles_kernel(const float* partial, std::int64_t rows, std::int64_t tiles, Groups groups,
                     float* dweight) {
  const std::int64_t row0 = static_cast<std::int64_t>(blockIdx.x) * 128, row = row0 + threadIdx.x;
  if (FindOwner(groups, row0).group < 0 || row >= rows) {
    return;
  }
  float sum = 0;
  for (std::int64_t t = 0; t < tiles; ++t) {
    sum += partial[row * tiles + t];
  }
  dweight[row] = sum;
}

QuantizeParams MakeParams(const RowGroups& groups, std::int64_t cols, const QuantizeRule& rule,
                          const QTensor& row, const QTensor& col, StatSlot* stats) {
  OCTAVO_CHECK(rule.tiling == Tiling::kRow128 || rule.tiling == Tiling::kRow32,
               "tiling %d: SwiGLU quantises row tiles", static_cast<int>(rule.tiling));
  OCTAVO_CHECK(row.present(), "a column-wise copy needs the row-wise one here");
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

template <int kTile, bool kE5M2>
void BackwardQuantized(OpsContext* context, const BackwardParams<bf16>& params) {
  BackwardParams<bf16> p = params;
  const std::int64_t rows = p.quantize.rows;
  OCTAVO_CHECK(p.f % kTile == 0, "F = %lld must be a multiple of %d", static_cast<long long>(p.f),
               kTile);
  if (p.quantize.col.q == nullptr) {
    const std::size_t smem = sizeof(float) * kRowsPerBlock * 2 * (p.f / kTile);
    if (smem > 48 * 1024) {
      cudaFuncSetAttribute(swiglu_backward_row_kernel<bf16, kTile, true, kE5M2>,
                           cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(smem));
    }
    swiglu_backward_row_kernel<bf16, kTile, true, kE5M2>
        <<<Blocks(rows, kRowsPerBlock), 256, smem, context->stream>>>(p);
    return;
  }
  const std::int64_t f_tiles = CeilDiv(p.f, 128);
  OCTAVO_CHECK(rows % 128 == 0, "rows = %lld must be a multiple of 128",
               static_cast<long long>(rows));
  OCTAVO_CHECK(rows * f_tiles * 4 <= context->scratch_bytes,
               "[%lld, %lld] needs more scratch than there is", static_cast<long long>(rows),
               static_cast<long long>(p.f));
  p.partial = p.dweight != nullptr ? reinterpret_cast<float*>(context->scratch) : nullptr;
  swiglu_backward_tile_kernel<bf16, kTile, kE5M2>
      <<<static_cast<unsigned>(rows / 128 * f_tiles), 512, 0, context->stream>>>(p);
  if (p.dweight != nullptr) {
    sum_tiles_kernel<<<Blocks(rows, 128), 128, 0, context->stream>>>(p.partial, rows, f_tiles,
                                                                     p.quantize.groups, p.dweight);
  }
}

template <class T>
void BackwardPlain(OpsContext* context, const SwigluBackwardArgs& a) {
  BackwardParams<T> p{};
  p.gate_up = static_cast<const T*>(a.gate_up);
  p.d_act = static_cast<const T*>(a.d_act);
  p.weight = a.weight;
  p.f = a.f;
  p.out = static_cast<T*>(a.d_gate_up);
  p.dweight = a.dweight;
  p.quantize.groups = MakeGroups(a.groups);
  p.quantize.rows = a.groups.padded_rows;
  swiglu_backward_row_kernel<T, 128, false, false>
      <<<Blocks(a.groups.padded_rows, kRowsPerBlock), 256, 0, context->stream>>>(p);
}

}  // namespace

void SwigluForward(OpsContext* context, const SwigluForwardArgs& a) {
  OCTAVO_CHECK(a.f % 8 == 0, "F = %lld must be a multiple of 8", static_cast<long long>(a.f));
  const std::int64_t rows = a.groups.padded_rows;
  if (rows == 0) {
    return;
  }
  const SwigluSource<bf16> source{static_cast<const bf16*>(a.gate_up), a.f, a.weight};
  if (a.act != nullptr) {
    if (a.dtype == DType::kBF16) {
      swiglu_forward_kernel<<<Blocks(rows, 8), 256, 0, context->stream>>>(
          source, MakeGroups(a.groups), static_cast<bf16*>(a.act));
    } else {
      swiglu_forward_kernel<<<Blocks(rows, 8), 256, 0, context->stream>>>(
          SwigluSource<float>{static_cast<const float*>(a.gate_up), a.f, a.weight},
          MakeGroups(a.groups), static_cast<float*>(a.act));
    }
  } else {
    OCTAVO_CHECK(a.dtype == DType::kBF16, "the fused cast reads BF16 on the GPU");
    const QuantizeParams p = MakeParams(a.groups, a.f, a.rule, a.quant, a.quant_col, a.stats);
    if (a.rule.tiling == Tiling::kRow32) {
      LaunchQuantize<SwigluSource<bf16>, 32, false>(context, source, p);
    } else {
      OCTAVO_CHECK(a.f % 128 == 0, "F = %lld must be a multiple of 128",
                   static_cast<long long>(a.f));
      LaunchQuantize<SwigluSource<bf16>, 128, false>(context, source, p);
    }
  }
  context->Launched("swiglu_forward");
}

void SwigluBackward(OpsContext* context, const SwigluBackwardArgs& a) {
  OCTAVO_CHECK(a.f % 8 == 0, "F = %lld must be a multiple of 8", static_cast<long long>(a.f));
  if (a.groups.padded_rows == 0) {
    return;
  }
  if (a.d_gate_up != nullptr) {
    if (a.dtype == DType::kBF16) {
      BackwardPlain<bf16>(context, a);
    } else {
      BackwardPlain<float>(context, a);
    }
  } else {
    OCTAVO_CHECK(a.dtype == DType::kBF16, "the fused cast reads BF16 on the GPU");
    BackwardParams<bf16> p{};
    p.gate_up = static_cast<const bf16*>(a.gate_up);
    p.d_act = static_cast<const bf16*>(a.d_act);
    p.weight = a.weight;
    p.f = a.f;
    p.dweight = a.dweight;
    p.quantize = MakeParams(a.groups, 2 * a.f, a.rule, a.quant, a.quant_col, a.stats);
    if (a.rule.tiling == Tiling::kRow32) {
      p.quantize.e5m2 ? BackwardQuantized<32, true>(context, p)
                      : BackwardQuantized<32, false>(context, p);
    } else {
      p.quantize.e5m2 ? BackwardQuantized<128, true>(context, p)
                      : BackwardQuantized<128, false>(context, p);
    }
  }
  context->Launched("swiglu_backward");
}

}  // namespace octavo::cuda
