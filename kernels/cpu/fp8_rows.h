// Vector loops of FP8 quantisation on FP32 rows: scan for amax, encode, decode, transpose codes.
//
// Compiled once per instruction set with Highway's dynamic dispatch. Every loop is element-wise or
// reduces by max and integer addition, so the bits are those of the scalar definitions in
// kernels/formats on every machine (formats_test compares all codes). n is any length >= 0.
#pragma once

#include <cstdint>

#include "kernels/tensor.h"

namespace octavo::cpu {

// What a scan over x saw. amax_bits: FP32 bits of max |x| over finite elements.
struct ScanCounts {
  std::uint32_t amax_bits = 0;
  std::uint64_t nonfinite = 0;
  std::uint64_t zeros = 0;  // x == 0
};

// What a cast of x·Q saw.
struct CastCounts {
  std::uint64_t saturated = 0;   // IsSaturated(format, x·Q)
  std::uint64_t zero_codes = 0;  // q == 0, sign ignored
};

// Adds to counts.
void ScanRow(const float* x, std::int64_t n, ScanCounts* counts);

// amax_bits[i] = max(amax_bits[i], bits of |x[i]| if finite), for column-wise tiles. True when all
// of x is finite.
bool MaxRow(const float* x, std::int64_t n, std::uint32_t* amax_bits);

// q[i] = cast(x[i] · quant_scale); adds to counts.
void EncodeRow(DType format, const float* x, float quant_scale, std::int64_t n, std::uint8_t* q,
               CastCounts* counts);

// q[i] = cast(x[i] · quant_scale[i]); adds to counts.
void EncodeRowByColumn(DType format, const float* x, const float* quant_scale, std::int64_t n,
                       std::uint8_t* q, CastCounts* counts);

// The same without counts. REQUIRES: all of x finite and |x[i]·quant_scale[i]| rounding to at most
// M, as it is with a quant_scale from an amax over x.
void EncodeTameRowByColumn(DType format, const float* x, const float* quant_scale, std::int64_t n,
                           std::uint8_t* q);

// One quant_scale for the row; counts zero codes (nothing can saturate).
void EncodeTameRow(DType format, const float* x, float quant_scale, std::int64_t n, std::uint8_t* q,
                   CastCounts* counts);

// out[i] = RescaleCode(q[i], k) for k >= 0 (NUMERICS 6, E4M3); returns how many nonzero codes
// became zero.
std::uint64_t RescaleRow(const std::uint8_t* q, int k, std::int64_t n, std::uint8_t* out);

// One row of row tiles, the hot path: for each tile of `tile` elements (32 or 128; cols is a
// multiple) finds amax, chooses Q (mx: NUMERICS 7, else NUMERICS 2 with pow2), encodes and stores D
// at dequant_scale[tile · dequant_scale_stride].
struct RowTiles {
  const void* x;  // [cols]
  DType x_dtype;  // kF32 or kBF16
  std::int64_t cols;
  std::int64_t tile;
  DType format;
  bool pow2, mx;
  float min_dequant_scale;  // as in QuantizeRule
  std::uint8_t* q;          // [cols]
  float* dequant_scale;
  std::int64_t dequant_scale_stride;
};
// D over tiles with amax > 0; min 0 while there was none.
struct RowTileCounts {
  ScanCounts scan;
  CastCounts cast;
  float dequant_scale_min = 0, dequant_scale_max = 0;
};
void QuantizeRowTiles(const RowTiles& row, RowTileCounts* counts);

// x[i] = decode(q[i]) · dequant_scale.
void DecodeRow(DType format, const std::uint8_t* q, float dequant_scale, std::int64_t n, float* x);

// dst[c][r] = src[r][c] for a [rows, cols] byte matrix; strides in bytes.
struct ByteMatrix {
  std::uint8_t* data;
  std::int64_t stride;
};
void TransposeBytes(ByteMatrix src, std::int64_t rows, std::int64_t cols, ByteMatrix dst);

}  // namespace octavo::cpu
