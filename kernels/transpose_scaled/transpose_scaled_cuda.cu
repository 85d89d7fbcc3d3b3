// Scaling-aware transpose on the GPU, in tiles of 128×128 codes.
//
// A thread loads 16 bytes (16 columns of one row) four times; rows 4 apart in shared memory are
// gathered as 4×4 bytes and written as 16-byte runs of a column. The rescale by 2^-k takes k from
// the exponent fields, four codes at a time, where all results are normal. Elsewhere it is done in
// FP16: cvt E4M3 → FP16 is exact, the product with 2^-k is exact or so small that it rounds to zero
// either way (k is cut at 20), and cvt FP16 → E4M3 rounds to nearest even into the subnormals,
// which is NUMERICS 6. NaN codes stay: the conversion would drop their sign.
#include <cuda_fp16.h>

#include "base/check.h"
#include "kernels/cuda/context.h"
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/ops_cuda.h"

namespace octavo::cuda {
namespace {

struct TransposeParams {
  const std::uint8_t* q;
  std::int64_t ld, rows, cols;
  const float* dequant_scale;
  std::int64_t row_stride, tile_stride;
  std::uint8_t* out;
  std::int64_t out_ld;
  float* out_scale;
  std::int64_t out_row_stride, out_tile_stride;
  Groups groups;
  StatSlot* stats;
};

__device__ __forceinline__ std::uint32_t Rescale4(std::uint32_t codes, __half2 factor) {
  const __half2_raw lo =
      __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(codes & 0xFFFFu), __NV_E4M3);
  const __half2_raw hi =
      __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(codes >> 16), __NV_E4M3);
  const __half2 a = __hmul2(__half2(lo), factor), b = __hmul2(__half2(hi), factor);
  const std::uint32_t x =
      __nv_cvt_halfraw2_to_fp8x2(static_cast<__half2_raw>(a), __NV_SATFINITE, __NV_E4M3);
  const std::uint32_t y =
      __nv_cvt_halfraw2_to_fp8x2(static_cast<__half2_raw>(b), __NV_SATFINITE, __NV_E4M3);
  return x | (y << 16);
}

// 0x80 in every byte whose magnitude is not zero.
__device__ __forceinline__ std::uint32_t NonzeroBytes(std::uint32_t w) {
  return ((w & 0x7F7F7F7Fu) + 0x7F7F7F7Fu) & 0x80808080u;
}
// 0x80 in every byte that is a NaN code.
__device__ __forceinline__ std::uint32_t NanBytes(std::uint32_t w) {
  return ((w & 0x7F7F7F7Fu) + 0x01010101u) & 0x80808080u;
}

// Rescales 16 codes of one row by 2^-k; counts those that become zero in lost_bytes, four counters
// of a byte each.
__device__ __forceinline__ void Rescale16(std::uint32_t w[4], int k, std::uint32_t& lost_bytes) {
  // A code's magnitude of 8·(k + 1) or more is one with a normal result, which is 8·k less. From
  // k = 15 on there is none: the bias is zero, and no sum reaches 0x80.
  const std::uint32_t less = static_cast<std::uint32_t>(min(k, 15)) * 0x08080808u;
  const std::uint32_t bias = 0x78787878u - less;
  std::uint32_t normal = 0x80808080u, shifted[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const std::uint32_t magnitude = w[j] & 0x7F7F7F7Fu;
    normal &= (magnitude + bias) & ~(magnitude + 0x01010101u);  // and not NaN
    shifted[j] = w[j] - less;
  }
  if (normal == 0x80808080u || k == 0) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      w[j] = shifted[j];
    }
    return;
  }
  // 2^-k in FP16: normal down to 2^-14, subnormal below.
  const unsigned short bits = static_cast<unsigned short>(k <= 14 ? (15 - k) << 10 : 1 << (24 - k));
  const __half2 factor = __half2half2(__ushort_as_half(bits));
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const std::uint32_t before = w[j], after = Rescale4(before, factor);
    const std::uint32_t nan = (NanBytes(before) >> 7) * 0xFFu;
    lost_bytes += (NonzeroBytes(before) & ~NonzeroBytes(after)) >> 7;
    w[j] = (after & ~nan) | (before & nan);
  }
}

// 16 bytes (chunk c of row r) rest at [r][c ^ (r / 16)], so that neither the stores (8 chunks of a
// row at a time) nor the gather (8 row groups × 4 words of a chunk) meet in a bank.
__device__ __forceinline__ int Place(int r, int chunk) { return chunk ^ (r >> 4 & 7); }

// A block handles two neighbouring tiles (128 rows × 256 columns): all loads are issued first, so
// that the second tile is on its way while the first is turned, and L2 is asked for what the block
// `ahead` loads.
__global__ void __launch_bounds__(256, 4)
    transpose_scaled_kernel(TransposeParams p, unsigned ahead) {
  __shared__ __align__(16) uint4 tile[128][8];
  __shared__ float row_scale[2][128];
  __shared__ std::uint32_t part[8], lost_of_warp[8];
  // Consecutive blocks go down the rows: the output's rows are written piece by piece, which memory
  // likes better than reads that are contiguous across blocks (measured).
  const unsigned col_tiles = static_cast<unsigned>(p.cols / 128);
  const unsigned row_tiles = static_cast<unsigned>(p.rows / 128);
  const std::int64_t row0 = static_cast<std::int64_t>(blockIdx.x % row_tiles) * 128;
  const unsigned first_tile = blockIdx.x / row_tiles * 2;
  const int count = first_tile + 1 < col_tiles ? 2 : 1;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int first_row = threadIdx.x >> 3, chunk = threadIdx.x & 7;

  uint4 words[2][4];
  const std::uint8_t* src =
      p.q + (row0 + first_row) * p.ld + static_cast<std::int64_t>(first_tile) * 128 + chunk * 16;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (h < count) {
        words[h][i] = LoadStream(src + i * 32 * p.ld + h * 128);
      }
    }
  }
  if (blockIdx.x + ahead < gridDim.x) {
    const unsigned then = blockIdx.x + ahead;
    const unsigned tile_c = then / row_tiles * 2 + (threadIdx.x & 1);
    if (tile_c < col_tiles) {
      PrefetchL2(p.q + (std::int64_t{then % row_tiles} * 128 + (threadIdx.x >> 1)) * p.ld +
                 std::int64_t{tile_c} * 128);
    }
  }
  // Threads 0..127 hold the scales of the first tile, 128..255 those of the second.
  const int scale_row = threadIdx.x & 127, scale_half = threadIdx.x >> 7;
  float d = kDequantScaleMin;
  if (scale_half < count) {
    d = p.dequant_scale[(row0 + scale_row) * p.row_stride +
                        (first_tile + scale_half) * p.tile_stride];
  }
  const RowOwner owner = FindOwner(p.groups, row0);  // while the loads are on their way
  if (owner.group < 0) {
    return;  // rows of no group are nobody's: not written
  }
  const int real = static_cast<int>(min(std::int64_t{128}, owner.real_end - row0));
  d = scale_row < real ? d : kDequantScaleMin;
  row_scale[scale_half][scale_row] = d;
  const std::uint32_t warp_top = __reduce_max_sync(kFullMask, __float_as_uint(d));
  if (lane == 0) {
    part[warp] = warp_top;
  }
  __syncthreads();

  std::uint32_t lost_total = 0;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if (h >= count) {
      break;
    }
    const std::int64_t tile_c = first_tile + h;
    const std::uint32_t top =
        max(max(part[h * 4], part[h * 4 + 1]), max(part[h * 4 + 2], part[h * 4 + 3]));
    const int top_exponent = static_cast<int>(top >> 23);
    std::uint32_t lost_bytes = 0;  // four counters of a byte each: at most 16 a byte and thread
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int r = first_row + 32 * i;
      std::uint32_t w[4] = {words[h][i].x, words[h][i].y, words[h][i].z, words[h][i].w};
      const int k =
          min(top_exponent - static_cast<int>(__float_as_uint(row_scale[h][r]) >> 23), 20);
      if (r >= real) {
        w[0] = w[1] = w[2] = w[3] = 0;  // padding, whatever it holds
      } else {
        Rescale16(w, k, lost_bytes);
      }
      tile[r][Place(r, chunk)] = make_uint4(w[0], w[1], w[2], w[3]);
    }
    lost_total += (lost_bytes & 0xFFu) + ((lost_bytes >> 8) & 0xFFu) +
                  ((lost_bytes >> 16) & 0xFFu) + (lost_bytes >> 24);
    __syncthreads();

    // Thread: 4 columns (word g of a row) and 16 rows, as four 4×4 byte transposes.
    const int g = threadIdx.x >> 3, rows16 = threadIdx.x & 7;
    const std::uint32_t* column =
        reinterpret_cast<const std::uint32_t*>(&tile[rows16 * 16][Place(rows16 * 16, g >> 2)]) +
        (g & 3);
    std::uint32_t out[4][4];  // [rows / 4][column]
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      std::uint32_t a[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        a[i] = column[(b * 4 + i) * 32];
      }
      Transpose4x4(a, out[b]);
    }
    std::uint8_t* dst = p.out + (tile_c * 128 + g * 4) * p.out_ld + row0 + rows16 * 16;
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      *reinterpret_cast<uint4*>(dst + c * p.out_ld) =
          make_uint4(out[0][c], out[1][c], out[2][c], out[3][c]);
    }
    if (threadIdx.x < 128) {
      p.out_scale[(tile_c * 128 + threadIdx.x) * p.out_row_stride +
                  (row0 / 128) * p.out_tile_stride] = __uint_as_float(top);
    }
    if (h + 1 < count) {
      __syncthreads();  // the tile is read before it is overwritten
    }
  }
  // One atomic a block: data that flushes everywhere would wait for its counter.
  lost_total = __reduce_add_sync(kFullMask, lost_total);
  if (lane == 0) {
    lost_of_warp[warp] = lost_total;
  }
  __syncthreads();
  if (threadIdx.x == 0 && p.stats != nullptr) {
    std::uint32_t lost = 0;
#pragma unroll
    for (int w = 0; w < 8; ++w) {
      lost += lost_of_warp[w];
    }
    AtomicAddNonzero(&p.stats[owner.group].transpose_flushed, lost);
  }
}

}  // namespace

void TransposeScaled(OpsContext* context, const TransposeScaledArgs& a) {
  const std::int64_t rows = a.groups.padded_rows, cols = a.src.cols;
  OCTAVO_CHECK(a.src.format == DType::kE4M3 && a.src.tiling == Tiling::kRow128,
               "the scaling-aware transpose takes E4M3 with 1×128 tiles");
  OCTAVO_CHECK(cols % 128 == 0 && rows % 128 == 0, "[%lld, %lld] must be multiples of 128",
               static_cast<long long>(rows), static_cast<long long>(cols));
  const std::int64_t blocks = (rows / 128) * CeilDiv(cols / 128, 2);
  if (blocks == 0) {
    return;
  }
  const TransposeParams p{a.src.q,
                          a.src.stride(),
                          rows,
                          cols,
                          a.src.dequant_scale,
                          a.src.scale_row_stride,
                          a.src.scale_tile_stride,
                          a.dst.q,
                          a.dst.stride(),
                          a.dst.dequant_scale,
                          a.dst.scale_row_stride,
                          a.dst.scale_tile_stride,
                          MakeGroups(a.groups),
                          a.stats};
  transpose_scaled_kernel<<<static_cast<unsigned>(blocks), 256, 0, context->stream>>>(
      p, static_cast<unsigned>(context->multiprocessors));
  context->Launched("transpose_scaled");
}

}  // namespace octavo::cuda
