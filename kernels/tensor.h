// Views over memory that somebody else owns: dense tensors, quantised tensors, row groups.
//
// Everything is row-major. A quantised tensor is a payload of FP8 codes plus dequant_scales with
// explicit strides, so that one type describes every layout in use:
//   activations, GEMM operand  1×128 along columns, D stored [cols/128][rows]  (row_stride 1)
//   activations, on the wire   1×128 along columns, D stored [rows][cols/128]  (tile_stride 1)
//   weights                    128×128,             D stored [rows/128][ceil4(cols/128)]
//   per tensor and expert      one D a group
// "Column-wise copies" are row-tiled tensors of the transposed matrix: payload [cols, rows],
// tiles along the former rows. Every FP8 GEMM operand is therefore K-contiguous (Hopper demands it).
#pragma once

#include <cstddef>
#include <cstdint>

namespace octavo {

enum class DType : std::uint8_t { kF32, kBF16, kE4M3, kE5M2, kE8M0, kI32, kI64, kF64, kU8 };

constexpr std::int64_t DTypeBytes(DType t) {
  switch (t) {
    case DType::kF32:
    case DType::kI32:
      return 4;
    case DType::kBF16:
      return 2;
    case DType::kI64:
    case DType::kF64:
      return 8;
    case DType::kE4M3:
    case DType::kE5M2:
    case DType::kE8M0:
    case DType::kU8:
      return 1;
  }
  return 0;
}

constexpr bool IsFp8(DType t) { return t == DType::kE4M3 || t == DType::kE5M2; }

constexpr std::int64_t CeilDiv(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }
constexpr std::int64_t RoundUp(std::int64_t a, std::int64_t b) { return CeilDiv(a, b) * b; }

// Rows of one expert are padded to this, so that no tile spans two experts (NUMERICS 6).
inline constexpr std::int64_t kRowAlign = 128;
// Edge of a blockwise tile.
inline constexpr std::int64_t kTile = 128;
// Edge of an MX block.
inline constexpr std::int64_t kMxBlock = 32;

// What one dequant_scale covers.
enum class Tiling : std::uint8_t {
  kNone,      // not quantised
  kTensor,    // one per group (a dense tensor is one group)
  kRow128,    // 1×128 along columns
  kBlock128,  // 128×128
  kRow32,     // 1×32 along columns (MX)
};

// A dense matrix [rows, cols], row stride ld elements.
struct Mat {
  void* data = nullptr;
  DType dtype = DType::kF32;
  std::int64_t rows = 0, cols = 0;
  std::int64_t ld = 0;  // elements; 0 means cols
  std::int64_t stride() const { return ld == 0 ? cols : ld; }
};

// A quantised matrix [rows, cols] (or [groups × rows, cols] for grouped weights).
// x̂(r, c) = decode(q[r·ld + c]) · D(r, c), D at dequant_scale[r'·row_stride + c'·tile_stride] with
//   kRow128: r' = r, c' = c/128     kRow32: r' = r, c' = c/32
//   kBlock128: r' = r/128, c' = c/128
//   kTensor: dequant_scale[group]   (row_stride, tile_stride unused)
struct QTensor {
  std::uint8_t* q = nullptr;  // FP8 codes
  DType format = DType::kE4M3;
  Tiling tiling = Tiling::kNone;
  std::int64_t rows = 0, cols = 0;
  std::int64_t ld = 0;  // elements; 0 means cols
  float* dequant_scale = nullptr;
  std::int64_t scale_row_stride = 0;
  std::int64_t scale_tile_stride = 0;
  std::int64_t stride() const { return ld == 0 ? cols : ld; }
  bool present() const { return q != nullptr; }
};

// Rows of a buffer by local expert. Group g owns rows [begin[g], begin[g] + rows[g]); begin is a
// multiple of kRowAlign and the rows up to the next multiple are padding (zeros, D = 2^-126).
// Arrays exist on the device and, for implementations that loop on the host, on the host too
// (on the CPU backend these are the same memory). count == 1 with rows == all rows is a dense tensor.
struct RowGroups {
  std::int32_t count = 0;
  const std::int64_t* begin = nullptr;       // device [count]
  const std::int64_t* rows = nullptr;        // device [count], may hold zeros
  const std::int64_t* host_begin = nullptr;  // host [count]
  const std::int64_t* host_rows = nullptr;   // host [count]
  std::int64_t padded_rows = 0;              // rows of the whole buffer, multiple of kRowAlign
};

}  // namespace octavo
