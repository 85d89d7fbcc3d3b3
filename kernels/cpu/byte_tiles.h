// Tiles of FP8 codes: transposition, plain and with the rescaling of NUMERICS 6.
//
// Compiled once per instruction set, as fp8_rows.h. Codes stay bytes all the way: a rescaled code
// is found in a table of 32, so a register holds 16 to 64 of them.
#pragma once

#include <cstdint>

#include "kernels/cpu/fp8_rows.h"

namespace octavo::cpu {

// dst[c][r] = src[r][c] for a [rows, cols] byte matrix.
void TransposeBytes(ByteMatrix src, std::int64_t rows, std::int64_t cols, ByteMatrix dst);

// dst[c][r] = RescaleCode(src[r][c], shift[r]) (E4M3, shift[r] >= 0) for r < rows, 0 for rows <= r
// < padded_rows. shift null: nothing is rescaled. Returns how many nonzero codes became zero.
struct TransposeTileArgs {
  ByteMatrix src;
  std::int64_t rows, padded_rows, cols;
  const int* shift;
  ByteMatrix dst;
};
std::uint64_t TransposeTile(const TransposeTileArgs& args);

}  // namespace octavo::cpu
