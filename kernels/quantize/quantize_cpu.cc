// Quantisation on the CPU: the definition of the casts that the CUDA kernels must equal bit for
// bit. The loops over elements are in kernels/cpu/fp8_rows.cc; here are tiles, groups, padding,
// statistics.
#include <algorithm>
#include <bit>
#include <cstring>

#include "base/check.h"
#include "kernels/cpu/byte_tiles.h"
#include "kernels/cpu/ops_cpu.h"
#include "kernels/cpu/rows.h"
#include "kernels/formats/scale.h"
#include "kernels/quantize/quantize_block.h"

namespace octavo::cpu {
namespace {

void CheckInput(DType dtype, std::int64_t cols, const char* what) {
  OCTAVO_CHECK(dtype == DType::kF32 || dtype == DType::kBF16,
               "%s: input dtype %d is not FP32 or BF16", what, static_cast<int>(dtype));
  OCTAVO_CHECK(cols >= 0, "%s: cols = %lld", what, static_cast<long long>(cols));
}

// Elements [offset, offset + n) of x as a pointer.
const void* At(const void* x, DType dtype, std::int64_t offset) {
  return static_cast<const std::uint8_t*>(x) + offset * DTypeBytes(dtype);
}

StatSlot* SlotOf(StatSlot* stats, std::int64_t group) {
  return stats == nullptr ? nullptr : stats + group;
}

void AddScan(const ScanCounts& scan, ScanCounts* total) {
  total->amax_bits = std::max(total->amax_bits, scan.amax_bits);
  total->nonfinite += scan.nonfinite;
  total->zeros += scan.zeros;
}

void AddGroupScale(float dequant_scale, RowTileCounts* counts) {
  if (counts->scan.amax_bits != 0) {
    counts->dequant_scale_min = dequant_scale;
    counts->dequant_scale_max = dequant_scale;
  }
}

}  // namespace

void QuantizeRows(OpsContext* ops_context, const QuantizeRowsArgs& args) {
  Context& context = Get(ops_context);
  const std::int64_t tile = TileLength(args.rule.tiling);
  const std::int64_t rows = args.groups.padded_rows;
  CheckInput(args.x_dtype, args.cols, "quantize_rows");
  OCTAVO_CHECK(args.cols % tile == 0,
               "quantize_rows: cols = %lld is not a multiple of the tile %lld",
               static_cast<long long>(args.cols), static_cast<long long>(tile));
  OCTAVO_CHECK(args.row.present() || args.col.present(), "quantize_rows: no output");
  if (args.row.present()) {
    CheckQTensor(args.row, rows, args.cols, "quantize_rows, row");
  }
  if (args.col.present()) {
    CheckQTensor(args.col, args.cols, RoundUp(rows, kTile), "quantize_rows, col");
  }
  ForEachBand(args.groups, [&](const Band& band) {
    RowTileCounts counts;
    if (!args.col.present()) {
      QuantizeRowTiles(
          {.x = At(args.x, args.x_dtype, band.row * args.cols),
           .x_dtype = args.x_dtype,
           .rows = band.real,
           .x_stride = args.cols,
           .cols = args.cols,
           .tile = tile,
           .format = args.rule.format,
           .pow2 = args.rule.pow2,
           .mx = args.rule.tiling == Tiling::kRow32,
           .min_dequant_scale = args.rule.min_dequant_scale,
           .q = args.row.q + band.row * args.row.stride(),
           .q_stride = args.row.stride(),
           .dequant_scale = args.row.dequant_scale + band.row * args.row.scale_row_stride,
           .dequant_scale_row_stride = args.row.scale_row_stride,
           .dequant_scale_stride = args.row.scale_tile_stride},
          &counts);
      PadBandRows(band, args.rule, args.row);
    } else {
      for (std::int64_t c = 0; c < args.cols; c += kTile) {
        const std::int64_t width = std::min(kTile, args.cols - c);
        QuantizeBand(context,
                     {.band = band,
                      .col_begin = c,
                      .width = width,
                      .block = {.data = At(args.x, args.x_dtype, band.row * args.cols + c),
                                .dtype = args.x_dtype,
                                .stride = args.cols,
                                .rows = band.real,
                                .cols = width},
                      .rule = args.rule,
                      .row = &args.row,
                      .col = &args.col},
                     &counts);
      }
    }
    AddToSlot(counts, band.real * args.cols, SlotOf(args.stats, band.group));
  });
}

void QuantizeBlocks(OpsContext* ops_context, const QuantizeBlocksArgs& args) {
  OCTAVO_CHECK(args.rule.tiling == Tiling::kBlock128, "quantize_blocks: tiling %d is not kBlock128",
               static_cast<int>(args.rule.tiling));
  OCTAVO_CHECK(args.n % kTile == 0 && args.k % kTile == 0,
               "quantize_blocks: [%lld, %lld] must be multiples of 128",
               static_cast<long long>(args.n), static_cast<long long>(args.k));
  CheckQTensor(args.row, args.groups * args.n, args.k, "quantize_blocks, row");
  if (args.col.present()) {
    CheckQTensor(args.col, args.groups * args.k, args.n, "quantize_blocks, col");
  }
  const float format_max = Fp8Max(args.rule.format);
  for (std::int64_t g = 0; g < args.groups; ++g) {
    RowTileCounts counts;
    for (std::int64_t n = 0; n < args.n; n += kTile) {
      for (std::int64_t k = 0; k < args.k; k += kTile) {
        const float* w = args.w + (g * args.n + n) * args.k + k;
        ScanCounts scan;
        const Matrix block = {w, DType::kF32, args.k, kTile, kTile};
        ScanMatrix(block, &scan);
        const ScalePair scale = ScaleFromAmaxPair(std::bit_cast<float>(scan.amax_bits), format_max,
                                                  args.rule.pow2, 0, args.rule.min_dequant_scale);
        std::uint8_t* q = args.row.q + (g * args.n + n) * args.row.stride() + k;
        // Without non-finite elements amax·Q is M at most, but for a rounding.
        if (scan.nonfinite == 0) {
          EncodeTame(args.rule.format, block, scale.quant_scale, {q, args.row.stride()},
                     &counts.cast);
        } else {
          for (std::int64_t r = 0; r < kTile; ++r) {
            EncodeRow(args.rule.format, w + r * args.k, scale.quant_scale, kTile,
                      q + r * args.row.stride(), &counts.cast);
          }
        }
        args.row.dequant_scale[(g * args.n + n) / kTile * args.row.scale_row_stride +
                               k / kTile * args.row.scale_tile_stride] = scale.dequant_scale;
        if (args.col.present()) {
          TransposeBytes(
              {q, args.row.stride()}, kTile, kTile,
              {args.col.q + (g * args.k + k) * args.col.stride() + n, args.col.stride()});
          args.col.dequant_scale[(g * args.k + k) / kTile * args.col.scale_row_stride +
                                 n / kTile * args.col.scale_tile_stride] = scale.dequant_scale;
        }
        AddScan(scan, &counts.scan);
        if (scan.amax_bits != 0) {
          const float d = scale.dequant_scale;
          counts.dequant_scale_min =
              counts.dequant_scale_min == 0 ? d : std::min(counts.dequant_scale_min, d);
          counts.dequant_scale_max = std::max(counts.dequant_scale_max, d);
        }
      }
    }
    AddToSlot(counts, args.n * args.k, SlotOf(args.stats, g));
  }
}

void Amax(OpsContext*, const AmaxArgs& args) {
  CheckInput(args.x_dtype, args.cols, "amax");
  for (std::int64_t g = 0; g < args.groups.count; ++g) {
    ScanCounts scan;
    ScanMatrix({At(args.x, args.x_dtype, args.groups.host_begin[g] * args.cols), args.x_dtype,
                args.cols, args.groups.host_rows[g], args.cols},
               &scan);
    args.amax[g] = std::bit_cast<float>(scan.amax_bits);
    if (args.has_nonfinite != nullptr) {
      args.has_nonfinite[g] = scan.nonfinite != 0 ? 1 : 0;
    }
  }
}

void ScaleFromAmax(OpsContext*, const ScaleFromAmaxArgs& args) {
  OCTAVO_CHECK(args.rule.margin >= 0 && args.rule.margin <= 8, "margin = %d, valid are 0 to 8",
               args.rule.margin);
  for (std::int64_t i = 0; i < args.n; ++i) {
    const ScalePair scale =
        ScaleFromAmaxPair(args.amax[i], Fp8Max(args.rule.format), args.rule.pow2, args.rule.margin,
                          args.rule.min_dequant_scale);
    args.quant_scale[i] = scale.quant_scale;
    args.dequant_scale[i] = scale.dequant_scale;
  }
}

void QuantizeTensor(OpsContext* ops_context, const QuantizeTensorArgs& args) {
  Context& context = Get(ops_context);
  const std::int64_t rows = args.groups.padded_rows;
  CheckInput(args.x_dtype, args.cols, "quantize_tensor");
  OCTAVO_CHECK(args.row.present() || args.col.present(), "quantize_tensor: no output");
  if (args.row.present()) {
    CheckQTensor(args.row, rows, args.cols, "quantize_tensor, row");
  }
  if (args.col.present()) {
    CheckQTensor(args.col, args.cols, RoundUp(rows, kTile), "quantize_tensor, col");
  }
  for (std::int64_t g = 0; g < args.groups.count; ++g) {
    const float dequant_scale = DequantScaleFromQuantScale(args.quant_scale[g]);
    if (args.row.present()) {
      args.row.dequant_scale[g] = dequant_scale;
    }
    if (args.col.present()) {
      args.col.dequant_scale[g] = dequant_scale;
    }
  }
  float* buffer = context.row.Get<float>(args.cols);
  auto* codes = context.band_codes.Get<std::uint8_t>(kTile * args.cols);
  ForEachBand(args.groups, [&](const Band& band) {
    const float quant_scale = args.quant_scale[band.group];
    RowTileCounts counts;
    const ByteMatrix q = args.row.present() ? ByteMatrix{args.row.q + band.row * args.row.stride(),
                                                         args.row.stride()}
                                            : ByteMatrix{codes, args.cols};
    const Matrix m = {At(args.x, args.x_dtype, band.row * args.cols), args.x_dtype, args.cols,
                      band.real, args.cols};
    ScanMatrix(m, &counts.scan);
    const float reach = std::bit_cast<float>(counts.scan.amax_bits) * quant_scale;
    if (counts.scan.nonfinite == 0 && reach <= Fp8Max(args.format)) {
      EncodeTame(args.format, m, quant_scale, q, &counts.cast);
    } else {
      for (std::int64_t r = 0; r < band.real; ++r) {
        EncodeRow(args.format,
                  LoadRow(args.x, args.x_dtype, (band.row + r) * args.cols, args.cols, buffer),
                  quant_scale, args.cols, q.data + r * q.stride, &counts.cast);
      }
    }
    for (std::int64_t r = band.real; args.row.present() && r < band.stored; ++r) {
      std::memset(q.data + r * q.stride, 0, static_cast<std::size_t>(args.cols));
    }
    if (args.col.present()) {
      TransposeTile({.src = q,
                     .rows = band.real,
                     .padded_rows = kTile,
                     .cols = args.cols,
                     .shift = nullptr,
                     .dst = {args.col.q + band.row, args.col.stride()}});
    }
    AddGroupScale(DequantScaleFromQuantScale(quant_scale), &counts);
    AddToSlot(counts, band.real * args.cols, SlotOf(args.stats, band.group));
  });
}

void Dequantize(OpsContext*, const DequantizeArgs& args) {
  const QTensor& src = args.src;
  CheckQTensor(src, src.rows, src.cols, "dequantize");
  OCTAVO_CHECK(args.dst_dtype == DType::kF32 || args.dst_dtype == DType::kBF16,
               "dequantize: output dtype %d is not FP32 or BF16", static_cast<int>(args.dst_dtype));
  const bool one_scale = src.tiling == Tiling::kTensor;
  const auto decode = [&](std::int64_t row, std::int64_t group) {
    const std::int64_t scale_row = src.tiling == Tiling::kBlock128 ? row / kTile : row;
    DecodeTiles(
        {.format = src.format,
         .q = src.q + row * src.stride(),
         .cols = src.cols,
         .tile = one_scale ? std::max<std::int64_t>(src.cols, 1)
                           : (src.tiling == Tiling::kRow32 ? kMxBlock : kTile),
         .dequant_scale =
             src.dequant_scale + (one_scale ? group : scale_row * src.scale_row_stride),
         .dequant_scale_stride = src.scale_tile_stride,
         .x = static_cast<std::uint8_t*>(args.dst) + row * src.cols * DTypeBytes(args.dst_dtype),
         .x_dtype = args.dst_dtype});
  };
  if (args.groups.count == 0) {
    for (std::int64_t r = 0; r < src.rows; ++r) {
      decode(r, 0);
    }
    return;
  }
  ForEachBand(args.groups, [&](const Band& band) {
    for (std::int64_t r = 0; r < band.real; ++r) {
      decode(band.row + r, band.group);
    }
    const std::int64_t bytes = src.cols * DTypeBytes(args.dst_dtype);
    std::memset(static_cast<std::uint8_t*>(args.dst) + (band.row + band.real) * bytes, 0,
                static_cast<std::size_t>((band.stored - band.real) * bytes));
  });
}

}  // namespace octavo::cpu
