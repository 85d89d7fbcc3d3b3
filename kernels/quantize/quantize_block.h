// Pieces that every quantising CPU operation shares: bands of rows, the two-way quantisation of one
// block, decoding of any layout, and statistics.
//
// A row group is walked in bands of 128 rows. A band never holds rows of two groups (begin is a
// multiple of 128), so a column tile never mixes experts; the last band of a group is filled with
// padding, which is written and never counted.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/cpu/context.h"
#include "kernels/cpu/fp8_rows.h"
#include "kernels/ops.h"

namespace octavo::cpu {

// Rows [row, row + 128) of a buffer: `real` of them hold data, `stored` exist in row-wise copies
// (less than 128 only at the end of a dense tensor).
struct Band {
  std::int64_t group, row, real, stored;
};

// Calls body(const Band&) for all bands, groups in order. A dense tensor may have any number of
// rows.
template <class Body>
void ForEachBand(const RowGroups& groups, Body body) {
  for (std::int64_t g = 0; g < groups.count; ++g) {
    const std::int64_t begin = groups.host_begin[g];
    const std::int64_t rows = groups.host_rows[g];
    OCTAVO_CHECK(begin % kRowAlign == 0 && rows >= 0 && begin + rows <= groups.padded_rows,
                 "group %lld has rows [%lld, %lld) of %lld; begin must be a multiple of 128",
                 static_cast<long long>(g), static_cast<long long>(begin),
                 static_cast<long long>(begin + rows), static_cast<long long>(groups.padded_rows));
    for (std::int64_t r = 0; r < rows; r += kRowAlign) {
      body(Band{.group = g,
                .row = begin + r,
                .real = std::min(kRowAlign, rows - r),
                .stored = std::min(kRowAlign, groups.padded_rows - begin - r)});
    }
  }
}

// Elements a tile holds along its direction.
std::int64_t TileLength(Tiling tiling);

// The D that all-zero tiles and padding get: 2^-126 in power-of-two and MX recipes, else 1.
float EmptyDequantScale(const QuantizeRule& rule);

// Quantises a band's columns [col_begin, col_begin + width), width <= 128 and a multiple of the
// tile, given as FP32 `block` [band.real, width], into whichever of row and col is present, padding
// of the band included. counts: of `row` when present, else of `col`.
struct BlockQuantizeArgs {
  Band band;
  std::int64_t col_begin, width;
  Matrix block;
  QuantizeRule rule;
  const QTensor* row;  // may be absent (present() false)
  const QTensor* col;
};
void QuantizeBand(Context& context, const BlockQuantizeArgs& args, RowTileCounts* counts);

// Writes zero codes and the empty D to rows [row + real, row + stored) of a row-tiled copy.
void PadBandRows(const Band& band, const QuantizeRule& rule, const QTensor& row);

// Adds what was seen of `elements` elements to a slot (null: nowhere).
void AddToSlot(const RowTileCounts& counts, std::int64_t elements, StatSlot* slot);

// out[i] = x̂(r, col_begin + i) for i < n: decode(q) · D. `group` chooses D of a kTensor operand.
struct DecodeArgs {
  const QTensor* src;
  std::int64_t row, col_begin, n, group;
};
void DecodeElements(const DecodeArgs& args, float* out);

// Shape checks of a quantised output; `what` names it in the message.
void CheckQTensor(const QTensor& tensor, std::int64_t rows, std::int64_t cols, const char* what);

}  // namespace octavo::cpu
