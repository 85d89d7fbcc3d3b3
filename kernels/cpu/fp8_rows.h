// Vector loops of FP8 quantisation: scan for amax, encode, decode.
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

// A [rows, cols] piece of an FP32 or BF16 matrix; stride in elements.
struct Matrix {
  const void* data;
  DType dtype;
  std::int64_t stride, rows, cols;
};

// Codes; stride in bytes.
struct ByteMatrix {
  std::uint8_t* data;
  std::int64_t stride;
};

// Adds to counts.
void ScanMatrix(const Matrix& m, ScanCounts* counts);

// amax_bits[c] = bits of max |m(r, c)| over finite elements of column c, 0 without one. True when
// all elements are finite.
bool MaxColumns(const Matrix& m, std::uint32_t* amax_bits);

// q(r, c) = cast(m(r, c) · quant_scale[c]). REQUIRES: tame, that is all elements finite and every
// |m(r, c)·quant_scale[c]| rounding to at most M, as with quant_scales from MaxColumns.
void EncodeTameColumns(DType format, const Matrix& m, const float* quant_scale, ByteMatrix q);

// q[i] = cast(x[i] · quant_scale); adds to counts.
void EncodeRow(DType format, const float* x, float quant_scale, std::int64_t n, std::uint8_t* q,
               CastCounts* counts);

// q[i] = cast(x[i] · quant_scale[i]); adds to counts.
void EncodeRowByColumn(DType format, const float* x, const float* quant_scale, std::int64_t n,
                       std::uint8_t* q, CastCounts* counts);

// q(r, c) = cast(m(r, c) · quant_scale) of a tame matrix, in which nothing can saturate; adds to
// counts.
void EncodeTame(DType format, const Matrix& m, float quant_scale, ByteMatrix q, CastCounts* counts);

// Rows of row tiles, the hot path: for each tile of `tile` elements (32 or 128; cols is a multiple)
// finds amax, chooses Q (mx: NUMERICS 7, else NUMERICS 2 with pow2), encodes and stores D at
// dequant_scale[row · dequant_scale_row_stride + tile · dequant_scale_stride].
struct RowTiles {
  const void* x;  // [rows, cols]
  DType x_dtype;  // kF32 or kBF16
  std::int64_t rows, x_stride, cols;
  std::int64_t tile;
  DType format;
  bool pow2, mx;
  float min_dequant_scale;  // as in QuantizeRule
  std::uint8_t* q;          // [rows, cols]
  std::int64_t q_stride;
  float* dequant_scale;
  std::int64_t dequant_scale_row_stride, dequant_scale_stride;
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

// One row of tiles: x[c] = decode(q[c]) · dequant_scale[c / tile · dequant_scale_stride], rounded
// to x_dtype (kF32 or kBF16).
struct DecodeTilesArgs {
  DType format;
  const std::uint8_t* q;  // [cols]
  std::int64_t cols, tile;
  const float* dequant_scale;
  std::int64_t dequant_scale_stride;
  void* x;  // [cols]
  DType x_dtype;
};
void DecodeTiles(const DecodeTilesArgs& args);

}  // namespace octavo::cpu
