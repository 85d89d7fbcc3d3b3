#include <algorithm>
#include <bit>
#include <cstring>

#include "base/check.h"
#include "kernels/cpu/byte_tiles.h"
#include "kernels/cpu/rows.h"
#include "kernels/formats/fp8.h"
#include "kernels/formats/scale.h"
#include "kernels/quantize/quantize_block.h"

namespace octavo::cpu {
namespace {

float* DequantScaleAt(const QTensor& tensor, std::int64_t row, std::int64_t tile) {
  return tensor.dequant_scale + row * tensor.scale_row_stride + tile * tensor.scale_tile_stride;
}

const void* RowOf(const Matrix& m, std::int64_t row) {
  return static_cast<const std::uint8_t*>(m.data) + row * m.stride * DTypeBytes(m.dtype);
}

void QuantizeBandRows(const BlockQuantizeArgs& args, RowTileCounts* counts) {
  const QTensor& row = *args.row;
  const std::int64_t tile = TileLength(args.rule.tiling);
  QuantizeRowTiles({.x = args.block.data,
                    .x_dtype = args.block.dtype,
                    .rows = args.band.real,
                    .x_stride = args.block.stride,
                    .cols = args.width,
                    .tile = tile,
                    .format = args.rule.format,
                    .pow2 = args.rule.pow2,
                    .mx = args.rule.tiling == Tiling::kRow32,
                    .min_dequant_scale = args.rule.min_dequant_scale,
                    .q = row.q + args.band.row * row.stride() + args.col_begin,
                    .q_stride = row.stride(),
                    .dequant_scale = DequantScaleAt(row, args.band.row, args.col_begin / tile),
                    .dequant_scale_row_stride = row.scale_row_stride,
                    .dequant_scale_stride = row.scale_tile_stride},
                   counts);
  const std::int64_t first_pad = args.band.row + args.band.real;
  const std::int64_t end = args.band.row + args.band.stored;
  for (std::int64_t at = first_pad; at < end; ++at) {
    std::memset(row.q + at * row.stride() + args.col_begin, 0,
                static_cast<std::size_t>(args.width));
    for (std::int64_t c = 0; c < args.width; c += tile) {
      *DequantScaleAt(row, at, (args.col_begin + c) / tile) = EmptyDequantScale(args.rule);
    }
  }
}

// Tiles along the rows: amax of each column over `tile` rows, then codes, then their transpose.
// `counts` null: somebody else counts.
void QuantizeBandColumns(Context& context, const BlockQuantizeArgs& args, RowTileCounts* counts) {
  const QTensor& col = *args.col;
  const std::int64_t tile = TileLength(args.rule.tiling);
  const float format_max = Fp8Max(args.rule.format);
  auto* codes = context.codes.Get<std::uint8_t>(kTile * kTile);
  std::uint32_t amax_bits[kTile];
  float quant_scale[kTile];
  for (std::int64_t first = 0; first < kTile; first += tile) {
    const std::int64_t real = std::clamp<std::int64_t>(args.band.real - first, 0, tile);
    const Matrix piece = {.data = RowOf(args.block, first),
                          .dtype = args.block.dtype,
                          .stride = args.block.stride,
                          .rows = real,
                          .cols = args.width};
    const bool tame = MaxColumns(piece, amax_bits);
    for (std::int64_t c = 0; c < args.width; ++c) {
      const float amax = std::bit_cast<float>(amax_bits[c]);
      const ScalePair scale =
          args.rule.tiling == Tiling::kRow32
              ? MxScaleFromAmax(amax, format_max)
              : ScaleFromAmaxPair(amax, format_max, args.rule.pow2, 0, args.rule.min_dequant_scale);
      quant_scale[c] = scale.quant_scale;
      *DequantScaleAt(col, args.col_begin + c, (args.band.row + first) / tile) =
          scale.dequant_scale;
      if (counts != nullptr && amax_bits[c] != 0) {
        const float least = counts->dequant_scale_min;
        counts->dequant_scale_min =
            least == 0 ? scale.dequant_scale : std::min(least, scale.dequant_scale);
        counts->dequant_scale_max = std::max(counts->dequant_scale_max, scale.dequant_scale);
      }
    }
    if (tame && counts == nullptr) {
      EncodeTameColumns(args.rule.format, piece, quant_scale, {codes + first * kTile, kTile});
    } else {
      CastCounts unused;
      float buffer[kTile];
      for (std::int64_t r = 0; r < real; ++r) {
        const float* x = LoadRow(RowOf(piece, r), piece.dtype, 0, args.width, buffer);
        if (counts != nullptr) {
          ScanMatrix({x, DType::kF32, args.width, 1, args.width}, &counts->scan);
        }
        EncodeRowByColumn(args.rule.format, x, quant_scale, args.width, codes + (first + r) * kTile,
                          counts != nullptr ? &counts->cast : &unused);
      }
    }
  }
  // Rows from band.real on are read as zero. A tile of MX that has no real row was not encoded.
  TransposeTile({.src = {codes, kTile},
                 .rows = args.band.real,
                 .padded_rows = kTile,
                 .cols = args.width,
                 .shift = nullptr,
                 .dst = {col.q + args.col_begin * col.stride() + args.band.row, col.stride()}});
}

}  // namespace

std::int64_t TileLength(Tiling tiling) {
  OCTAVO_CHECK(tiling == Tiling::kRow128 || tiling == Tiling::kRow32,
               "row tiles are kRow128 or kRow32, tiling = %d", static_cast<int>(tiling));
  return tiling == Tiling::kRow32 ? kMxBlock : kTile;
}

float EmptyDequantScale(const QuantizeRule& rule) {
  return rule.pow2 || rule.tiling == Tiling::kRow32 ? kDequantScaleMin : 1.0f;
}

void QuantizeBand(Context& context, const BlockQuantizeArgs& args, RowTileCounts* counts) {
  if (args.row->present()) {
    QuantizeBandRows(args, counts);
  }
  if (args.col->present()) {
    QuantizeBandColumns(context, args, args.row->present() ? nullptr : counts);
  }
}

void PadBandRows(const Band& band, const QuantizeRule& rule, const QTensor& row) {
  const std::int64_t tile = TileLength(rule.tiling);
  for (std::int64_t at = band.row + band.real; at < band.row + band.stored; ++at) {
    std::memset(row.q + at * row.stride(), 0, static_cast<std::size_t>(row.cols));
    for (std::int64_t t = 0; t < row.cols / tile; ++t) {
      *DequantScaleAt(row, at, t) = EmptyDequantScale(rule);
    }
  }
}

void AddToSlot(const RowTileCounts& counts, std::int64_t elements, StatSlot* slot) {
  if (slot == nullptr || elements == 0) {
    return;
  }
  slot->amax = std::max(slot->amax, std::bit_cast<float>(counts.scan.amax_bits));
  if (counts.dequant_scale_min > 0) {
    slot->dequant_scale_min = slot->dequant_scale_min == 0
                                  ? counts.dequant_scale_min
                                  : std::min(slot->dequant_scale_min, counts.dequant_scale_min);
    slot->dequant_scale_max = std::max(slot->dequant_scale_max, counts.dequant_scale_max);
  }
  slot->elements += static_cast<std::uint64_t>(elements);
  slot->nonfinite += counts.scan.nonfinite;
  slot->saturated += counts.cast.saturated;
  slot->nonzero += static_cast<std::uint64_t>(elements) - counts.scan.zeros;
  // x == 0 always gives a zero code.
  slot->flushed += counts.cast.zero_codes - counts.scan.zeros;
}

void DecodeElements(const DecodeArgs& args, float* out) {
  const QTensor& src = *args.src;
  const std::uint8_t* q = src.q + args.row * src.stride() + args.col_begin;
  if (src.tiling == Tiling::kTensor) {
    DecodeRow(src.format, q, src.dequant_scale[args.group], args.n, out);
    return;
  }
  const std::int64_t tile = src.tiling == Tiling::kRow32 ? kMxBlock : kTile;
  const std::int64_t scale_row = src.tiling == Tiling::kBlock128 ? args.row / kTile : args.row;
  for (std::int64_t i = 0; i < args.n;) {
    const std::int64_t at = args.col_begin + i;
    const std::int64_t n = std::min(args.n - i, tile - at % tile);
    DecodeRow(src.format, q + i, *DequantScaleAt(src, scale_row, at / tile), n, out + i);
    i += n;
  }
}

void CheckQTensor(const QTensor& tensor, std::int64_t rows, std::int64_t cols, const char* what) {
  OCTAVO_CHECK(IsFp8(tensor.format), "%s: format %d is not FP8", what,
               static_cast<int>(tensor.format));
  OCTAVO_CHECK(tensor.dequant_scale != nullptr, "%s: no memory for dequant_scales", what);
  OCTAVO_CHECK(tensor.rows == rows && tensor.cols == cols,
               "%s: is [%lld, %lld], needs [%lld, %lld]", what, static_cast<long long>(tensor.rows),
               static_cast<long long>(tensor.cols), static_cast<long long>(rows),
               static_cast<long long>(cols));
}

}  // namespace octavo::cpu
