// Scaling-aware transpose (NUMERICS 6): codes move between row tiles and column tiles by exponent
// arithmetic alone, so nothing is rounded twice.
//
// For each 128×128 tile the column tile's exponent is the largest of the rows'; row r loses
// k = e* − e_row exponent steps (byte_tiles.h); k = 0 is a copy.
#include <algorithm>
#include <bit>
#include <cstring>

#include "base/check.h"
#include "kernels/cpu/byte_tiles.h"
#include "kernels/cpu/ops_cpu.h"
#include "kernels/formats/scale.h"
#include "kernels/quantize/quantize_block.h"

namespace octavo::cpu {
namespace {

int ExponentField(float power_of_two) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(power_of_two);
  OCTAVO_CHECK((bits & 0x807FFFFFu) == 0 && bits != 0,
               "transpose_scaled needs power-of-two dequant_scales, found bits %08x", bits);
  return static_cast<int>(bits >> 23);
}

}  // namespace

void TransposeScaled(OpsContext*, const TransposeScaledArgs& args) {
  const QTensor& src = args.src;
  const QTensor& dst = args.dst;
  OCTAVO_CHECK(src.tiling == Tiling::kRow128 && dst.tiling == Tiling::kRow128 &&
                   src.format == DType::kE4M3 && dst.format == DType::kE4M3,
               "transpose_scaled takes 1×128 tiles of E4M3");
  OCTAVO_CHECK(src.cols % kTile == 0, "transpose_scaled: cols = %lld is not a multiple of 128",
               static_cast<long long>(src.cols));
  CheckQTensor(src, args.groups.padded_rows, src.cols, "transpose_scaled, src");
  CheckQTensor(dst, src.cols, RoundUp(src.rows, kTile), "transpose_scaled, dst");
  ForEachBand(args.groups, [&](const Band& band) {
    std::uint64_t flushed = 0;
    for (std::int64_t c = 0; c < src.cols; c += kTile) {
      int shift[kTile];
      int largest = 1;  // 2^-126, what padding and all-zero rows carry
      int least = 255;
      for (std::int64_t r = 0; r < band.real; ++r) {
        shift[r] = ExponentField(src.dequant_scale[(band.row + r) * src.scale_row_stride +
                                                   c / kTile * src.scale_tile_stride]);
        largest = std::max(largest, shift[r]);
        least = std::min(least, shift[r]);
      }
      for (std::int64_t r = 0; r < band.real; ++r) {
        shift[r] = largest - shift[r];
      }
      flushed += TransposeTile({.src = {src.q + band.row * src.stride() + c, src.stride()},
                                .rows = band.real,
                                .padded_rows = kTile,
                                .cols = kTile,
                                .shift = least == largest ? nullptr : shift,
                                .dst = {dst.q + c * dst.stride() + band.row, dst.stride()}});
      for (std::int64_t i = 0; i < kTile; ++i) {
        dst.dequant_scale[(c + i) * dst.scale_row_stride +
                          band.row / kTile * dst.scale_tile_stride] = PowerOfTwo(largest - 127);
      }
    }
    if (args.stats != nullptr) {
      args.stats[band.group].transpose_flushed += flushed;
    }
  });
}

}  // namespace octavo::cpu
