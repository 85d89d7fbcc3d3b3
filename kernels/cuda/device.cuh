// What every kernel of the CUDA backend shares: eight elements at a time, warp reductions, the FP8
// casts of the hardware, row groups, and the statistics of a quantising kernel.
//
// The unit of work is "eight consecutive elements of a row by one lane": 16 bytes of BF16 are one
// load, 16 lanes hold one 128-wide tile, 4 lanes one MX block of 32.
//
// Counting costs almost nothing because it looks at the whole first: only when the largest
// magnitude of a lane's elements is not finite, or a code came out as zero, are elements looked at
// one by one.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "kernels/formats/bf16.h"
#include "kernels/formats/fp8.h"
#include "kernels/formats/scale.h"
#include "kernels/ops.h"

namespace octavo::cuda {

using bf16 = __nv_bfloat16;

inline constexpr std::uint32_t kInfinityBits = 0x7F800000u;
inline constexpr unsigned kFullMask = 0xFFFFFFFFu;

// ---------------------------------------------------------------- eight elements

// 16 bytes that this kernel does not write. Not L1::no_allocate, though most of them are read once:
// that costs a tenth of the bandwidth on an H200 (measured).
__device__ __forceinline__ uint4 LoadStream(const void* p) {
  uint4 v;
  asm volatile("ld.global.nc.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}

// Brings the line of 128 bytes at p into L2. A block asks for what the block that follows it on its
// SM will load, so that memory stays busy while blocks compute: half of the blocks on the card
// ahead, or less; asking further ahead is slower than not asking (measured).
__device__ __forceinline__ void PrefetchL2(const void* p) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}

// Asynchronous copies of 16 bytes into shared memory. A thread that reads only what it copied
// itself needs no barrier, just CopyWait. wanted == false writes zeros and reads nothing.
__device__ __forceinline__ void CopyAsync(void* shared, const void* global, bool wanted) {
  const std::uint32_t to = static_cast<std::uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(global),
               "r"(wanted ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void CopyCommit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int kLeft>
__device__ __forceinline__ void CopyWait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}

template <class T>
struct Raw8;

template <>
struct Raw8<bf16> {
  uint4 a;
};
template <>
struct Raw8<float> {
  uint4 a, b;
};

__device__ __forceinline__ void LoadRaw(const bf16* p, Raw8<bf16>& r) { r.a = LoadStream(p); }
__device__ __forceinline__ void LoadRaw(const float* p, Raw8<float>& r) {
  r.a = LoadStream(p);
  r.b = LoadStream(p + 4);
}
// Plain loads, for memory that the same kernel writes.
__device__ __forceinline__ void LoadRawPlain(const bf16* p, Raw8<bf16>& r) {
  r.a = *reinterpret_cast<const uint4*>(p);
}
__device__ __forceinline__ void LoadRawPlain(const float* p, Raw8<float>& r) {
  r.a = *reinterpret_cast<const uint4*>(p);
  r.b = *reinterpret_cast<const uint4*>(p + 4);
}
__device__ __forceinline__ void ZeroRaw(Raw8<bf16>& r) { r.a = make_uint4(0, 0, 0, 0); }
__device__ __forceinline__ void ZeroRaw(Raw8<float>& r) {
  r.a = make_uint4(0, 0, 0, 0);
  r.b = r.a;
}

__device__ __forceinline__ void Unpack2(std::uint32_t w, float& lo, float& hi) {
  lo = __uint_as_float(w << 16);
  hi = __uint_as_float(w & 0xFFFF0000u);
}
__device__ __forceinline__ void Unpack(const Raw8<bf16>& r, float v[8]) {
  Unpack2(r.a.x, v[0], v[1]);
  Unpack2(r.a.y, v[2], v[3]);
  Unpack2(r.a.z, v[4], v[5]);
  Unpack2(r.a.w, v[6], v[7]);
}
__device__ __forceinline__ void Unpack(const Raw8<float>& r, float v[8]) {
  v[0] = __uint_as_float(r.a.x);
  v[1] = __uint_as_float(r.a.y);
  v[2] = __uint_as_float(r.a.z);
  v[3] = __uint_as_float(r.a.w);
  v[4] = __uint_as_float(r.b.x);
  v[5] = __uint_as_float(r.b.y);
  v[6] = __uint_as_float(r.b.z);
  v[7] = __uint_as_float(r.b.w);
}

__device__ __forceinline__ std::uint32_t PackBf16(float lo, float hi) {
  __nv_bfloat162 p = __floats2bfloat162_rn(lo, hi);
  return *reinterpret_cast<std::uint32_t*>(&p);
}
__device__ __forceinline__ void Store8(bf16* p, const float v[8]) {
  uint4 w = make_uint4(PackBf16(v[0], v[1]), PackBf16(v[2], v[3]), PackBf16(v[4], v[5]),
                       PackBf16(v[6], v[7]));
  *reinterpret_cast<uint4*>(p) = w;
}
__device__ __forceinline__ void Store8(float* p, const float v[8]) {
  reinterpret_cast<float4*>(p)[0] = make_float4(v[0], v[1], v[2], v[3]);
  reinterpret_cast<float4*>(p)[1] = make_float4(v[4], v[5], v[6], v[7]);
}
template <class T>
__device__ __forceinline__ void Load8(const T* p, float v[8]) {
  Raw8<T> r;
  LoadRaw(p, r);
  Unpack(r, v);
}
template <class T>
__device__ __forceinline__ void Load8Plain(const T* p, float v[8]) {
  Raw8<T> r;
  LoadRawPlain(p, r);
  Unpack(r, v);
}

__device__ __forceinline__ float ToFloat(float x) { return x; }
__device__ __forceinline__ float ToFloat(bf16 x) { return __bfloat162float(x); }
template <class T>
__device__ __forceinline__ T FromFloat(float x);
template <>
__device__ __forceinline__ float FromFloat<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ bf16 FromFloat<bf16>(float x) {
  return __float2bfloat16_rn(x);
}

// ---------------------------------------------------------------- casts

// Four codes, first in the low byte. cvt.rn.satfinite agrees with Fp8Encode on every input. The
// format is a template argument: as a value it would cost a second, predicated conversion.
template <bool kE5M2>
__device__ __forceinline__ std::uint32_t Encode4(float a, float b, float c, float d) {
  constexpr __nv_fp8_interpretation_t kFormat = kE5M2 ? __NV_E5M2 : __NV_E4M3;
  const std::uint32_t lo = __nv_cvt_float2_to_fp8x2(make_float2(a, b), __NV_SATFINITE, kFormat);
  const std::uint32_t hi = __nv_cvt_float2_to_fp8x2(make_float2(c, d), __NV_SATFINITE, kFormat);
  return lo | (hi << 16);
}
template <bool kE5M2>
__device__ __forceinline__ uint2 Encode8(const float v[8], float quant_scale) {
  float y[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    y[j] = __fmul_rn(v[j], quant_scale);
  }
  return make_uint2(Encode4<kE5M2>(y[0], y[1], y[2], y[3]), Encode4<kE5M2>(y[4], y[5], y[6], y[7]));
}

// Through FP16, which holds every FP8 number.
__device__ __forceinline__ void Decode8(bool e5m2, uint2 codes, float v[8]) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const std::uint32_t pair = ((j < 2 ? codes.x : codes.y) >> (16 * (j & 1))) & 0xFFFFu;
    const __half2_raw h = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(pair),
                                                     e5m2 ? __NV_E5M2 : __NV_E4M3);
    const float2 f = __half22float2(__half2(h));
    v[2 * j] = f.x;
    v[2 * j + 1] = f.y;
  }
}

// Transposes 4×4 bytes: byte i of out[j] is byte j of r[i].
__device__ __forceinline__ void Transpose4x4(const std::uint32_t r[4], std::uint32_t out[4]) {
  const std::uint32_t t0 = __byte_perm(r[0], r[1], 0x5140), t1 = __byte_perm(r[2], r[3], 0x5140);
  const std::uint32_t t2 = __byte_perm(r[0], r[1], 0x7362), t3 = __byte_perm(r[2], r[3], 0x7362);
  out[0] = __byte_perm(t0, t1, 0x5410);
  out[1] = __byte_perm(t0, t1, 0x7632);
  out[2] = __byte_perm(t2, t3, 0x5410);
  out[3] = __byte_perm(t2, t3, 0x7632);
}

// ---------------------------------------------------------------- reductions

__device__ __forceinline__ float WarpSum(float v) {
#pragma unroll
  for (int o = 16; o > 0; o >>= 1) {
    v += __shfl_xor_sync(kFullMask, v, o);
  }
  return v;
}
__device__ __forceinline__ double WarpSum(double v) {
#pragma unroll
  for (int o = 16; o > 0; o >>= 1) {
    v += __shfl_xor_sync(kFullMask, v, o);
  }
  return v;
}
__device__ __forceinline__ float WarpMax(float v) {
#pragma unroll
  for (int o = 16; o > 0; o >>= 1) {
    v = fmaxf(v, __shfl_xor_sync(kFullMask, v, o));
  }
  return v;
}

// Sum over the block; every thread gets it. `smem` holds 33 values; ends with the block in step.
template <class T>
__device__ __forceinline__ T BlockSum(T v, T* smem) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = (blockDim.x + 31) >> 5;
  v = WarpSum(v);
  if (lane == 0) {
    smem[warp] = v;
  }
  __syncthreads();
  if (warp == 0) {
    T w = lane < warps ? smem[lane] : T(0);
    w = WarpSum(w);
    if (lane == 0) {
      smem[32] = w;
    }
  }
  __syncthreads();
  return smem[32];
}

// blockIdx.x and threadIdx.x read anew: where registers are short, what is computed from them
// before and after a long stretch need not be kept in between.
__device__ __forceinline__ unsigned BlockIndexAnew() {
  unsigned x;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(x));
  return x;
}
__device__ __forceinline__ unsigned ThreadIndexAnew() {
  unsigned x;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
  return x;
}

// ---------------------------------------------------------------- row groups

struct Groups {
  std::int32_t count;
  const std::int64_t* begin;
  const std::int64_t* rows;
  std::int64_t padded_rows;
};
inline Groups MakeGroups(const RowGroups& g) { return {g.count, g.begin, g.rows, g.padded_rows}; }

// The group that owns `row` (its padding included) and the end of its real rows; group -1 and
// real_end = row when the row is behind all groups. Called by whole warps with one row.
struct RowOwner {
  int group;
  std::int64_t real_end;
};
__device__ __forceinline__ RowOwner FindOwner(const Groups& g, std::int64_t row) {
  if (g.count == 0) {
    return {0, g.padded_rows};
  }
  if (g.count == 1) {
    const std::int64_t begin = g.begin[0], rows = g.rows[0];
    return row >= begin && row < begin + RoundUp(rows, kRowAlign) ? RowOwner{0, begin + rows}
                                                                  : RowOwner{-1, row};
  }
  const int lane = threadIdx.x & 31;
  for (int base = 0; base < g.count; base += 32) {
    const int i = base + lane;
    std::int64_t end = 0;
    bool mine = false;
    if (i < g.count) {
      const std::int64_t begin = g.begin[i], rows = g.rows[i];
      mine = row >= begin && row < begin + RoundUp(rows, kRowAlign);
      end = begin + rows;
    }
    const unsigned vote = __ballot_sync(kFullMask, mine);
    if (vote != 0) {
      const int source = __ffs(static_cast<int>(vote)) - 1;
      return {base + source, __shfl_sync(kFullMask, end, source)};
    }
  }
  return {-1, row};
}

// ---------------------------------------------------------------- statistics

// What one thread saw; elements are counted by the caller.
struct ThreadStats {
  std::uint32_t amax_bits = 0;
  float dequant_min = __builtin_huge_valf(), dequant_max = 0;
  std::uint32_t nonfinite = 0, saturated = 0, zero = 0, flushed = 0, transpose_flushed = 0;
};

// Magnitudes of eight values as ordered bits, those that are not finite as zero (and counted where
// `count` says so). Returns whether there were any.
__device__ __forceinline__ bool Magnitudes8(const float v[8], std::uint32_t bits[8],
                                            std::uint32_t& largest, bool count,
                                            ThreadStats& stats) {
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    bits[j] = __float_as_uint(v[j]) & 0x7FFFFFFFu;
  }
  const auto reduce = [&] {
    largest = max(max(max(bits[0], bits[1]), max(bits[2], bits[3])),
                  max(max(bits[4], bits[5]), max(bits[6], bits[7])));
  };
  reduce();
  if (largest < kInfinityBits) {
    return false;
  }
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    if (bits[j] >= kInfinityBits) {
      bits[j] = 0;
      stats.nonfinite += count ? 1 : 0;
    }
  }
  reduce();
  return true;
}

// The largest magnitude alone. NaN and infinity show in a sum of products with zero, on the pipe
// that has room: comparisons and logic run at half the rate of multiplications.
__device__ __forceinline__ bool Largest8(const float v[8], std::uint32_t& largest, bool count,
                                         ThreadStats& stats) {
  float best = fmaxf(fabsf(v[0]), fabsf(v[1])), poison = v[0] * 0.0f;
#pragma unroll
  for (int j = 1; j < 8; ++j) {
    best = fmaxf(best, fabsf(v[j]));
    poison = fmaf(v[j], 0.0f, poison);
  }
  largest = __float_as_uint(best);
  if (poison == 0.0f) {
    return false;
  }
  std::uint32_t bits[8];
  return Magnitudes8(v, bits, largest, count, stats);
}

// True when a code among the eight is zero: then something was zero or was flushed.
__device__ __forceinline__ bool HasZeroCode(uint2 codes) {
  constexpr std::uint32_t kMagnitudes = 0x7F7F7F7Fu;
  const std::uint32_t x = (codes.x & kMagnitudes) + kMagnitudes;
  const std::uint32_t y = (codes.y & kMagnitudes) + kMagnitudes;
  return (x & y & 0x80808080u) != 0x80808080u;
}

// Counts zeros, flushed and saturated elements of eight values cast with quant_scale to `codes`,
// one by one only where there can be any. suspicious: the values may be saturated or not finite.
__device__ __forceinline__ void CountCast8(bool e5m2, const float v[8], uint2 codes,
                                           float quant_scale, bool suspicious, ThreadStats& stats) {
  if (suspicious || HasZeroCode(codes)) {
    const DType format = e5m2 ? DType::kE5M2 : DType::kE4M3;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const std::uint32_t word = j < 4 ? codes.x : codes.y;
      const std::uint32_t magnitude = (word >> (8 * (j & 3))) & 0x7Fu;
      const bool nonzero = v[j] != 0.0f;
      stats.zero += nonzero ? 0 : 1;
      stats.flushed += nonzero && magnitude == 0 ? 1 : 0;
      stats.saturated += IsSaturated(format, __fmul_rn(v[j], quant_scale)) ? 1 : 0;
    }
  }
}
// Whether magnitudes up to `largest` may saturate (given scales only: a tile's own never do).
__device__ __forceinline__ bool MaySaturate(bool e5m2, std::uint32_t largest, float quant_scale) {
  return __uint_as_float(largest) * quant_scale > (e5m2 ? 61439.0f : 464.0f);
}

__device__ __forceinline__ void NoteScale(std::uint32_t amax_bits, float dequant_scale,
                                          ThreadStats& stats) {
  if (amax_bits != 0) {
    stats.amax_bits = max(stats.amax_bits, amax_bits);
    stats.dequant_min = fminf(stats.dequant_min, dequant_scale);
    stats.dequant_max = fmaxf(stats.dequant_max, dequant_scale);
  }
}

__device__ __forceinline__ void AtomicMaxPositive(float* p, float v) {
  if (v > *reinterpret_cast<volatile float*>(p)) {
    atomicMax(reinterpret_cast<int*>(p), __float_as_int(v));
  }
}
__device__ __forceinline__ void AtomicAddNonzero(std::uint64_t* p, std::uint64_t v) {
  if (v != 0) {
    atomicAdd(reinterpret_cast<unsigned long long*>(p), static_cast<unsigned long long>(v));
  }
}

// Adds a block's statistics to the slot; `elements` is the block's count of real elements. All
// threads call it, with blockDim.x <= 1024 a multiple of 32. Order of blocks does not matter.
//
// A block's registers are not free before its last thread is done, so the end must be short: the
// slot is looked at before the block adds up, and nine lanes update its fields at the same time.
__device__ __forceinline__ void FlushStats(StatSlot* slot, ThreadStats s, std::uint64_t elements) {
  __shared__ __align__(16) std::uint32_t part[32][8];
  if (slot == nullptr) {
    return;
  }
  static_assert(offsetof(StatSlot, amax) == 0 && offsetof(StatSlot, dequant_scale_min) == 4 &&
                offsetof(StatSlot, dequant_scale_max) == 8);
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
  unsigned* bits = reinterpret_cast<unsigned*>(slot) + lane;  // lanes 0..2: amax, min, max
  unsigned seen = 0;
  if (warp == 0 && lane < 3) {
    seen = *reinterpret_cast<volatile unsigned*>(bits);
  }
  const std::uint32_t w[8] = {__reduce_max_sync(kFullMask, s.amax_bits),
                              __reduce_min_sync(kFullMask, __float_as_uint(s.dequant_min)),
                              __reduce_max_sync(kFullMask, __float_as_uint(s.dequant_max)),
                              __reduce_add_sync(kFullMask, s.nonfinite),
                              __reduce_add_sync(kFullMask, s.saturated),
                              __reduce_add_sync(kFullMask, s.zero),
                              __reduce_add_sync(kFullMask, s.flushed),
                              __reduce_add_sync(kFullMask, s.transpose_flushed)};
  if (lane == 0) {
    *reinterpret_cast<uint4*>(&part[warp][0]) = make_uint4(w[0], w[1], w[2], w[3]);
    *reinterpret_cast<uint4*>(&part[warp][4]) = make_uint4(w[4], w[5], w[6], w[7]);
  }
  __syncthreads();
  if (warp != 0) {
    return;
  }
  // Lane i takes field i mod 8 of every fourth warp.
  const int field = lane & 7;
  const auto merge = [field](std::uint32_t a, std::uint32_t b) {
    return field == 1 ? min(a, b) : field < 3 ? max(a, b) : a + b;
  };
  std::uint32_t v = field == 1 ? kInfinityBits : 0u;
  for (int i = lane >> 3; i < warps; i += 4) {
    v = merge(v, part[i][field]);
  }
#pragma unroll
  for (int o = 8; o < 32; o <<= 1) {
    v = merge(v, __shfl_xor_sync(kFullMask, v, o));
  }
  if (lane == 0 || lane == 2) {
    if (v > seen) {
      atomicMax(bits, v);
    }
  } else if (lane == 1) {
    // Minimum of positive numbers where 0 stands for "none yet".
    while (v != kInfinityBits && (seen == 0 || v < seen)) {
      const unsigned before = atomicCAS(bits, seen, v);
      if (before == seen) {
        break;
      }
      seen = before;
    }
  } else if (lane < 9) {
    std::uint64_t* counter = lane == 3   ? &slot->nonfinite
                             : lane == 4 ? &slot->saturated
                             : lane == 5 ? &slot->nonzero
                             : lane == 6 ? &slot->flushed
                             : lane == 7 ? &slot->transpose_flushed
                                         : &slot->elements;
    AtomicAddNonzero(counter, lane == 5 ? elements - v : lane == 8 ? elements : v);
  }
}

// ---------------------------------------------------------------- host helpers

inline unsigned Blocks(std::int64_t n, std::int64_t per_block) {
  return static_cast<unsigned>(CeilDiv(n, per_block));
}

}  // namespace octavo::cuda
