// Quantisation of rows in tiles of 32 or 128 elements.
#include <algorithm>

#include "base/check.h"

// SSE4 is the least that is vectorised; older machines take Highway's portable target.
#define HWY_DISABLED_TARGETS HWY_SSSE3
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/fp8_tiles.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/fp8_vectors-inl.h"

HWY_BEFORE_NAMESPACE();
namespace octavo::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

template <class Format>
HWY_INLINE ScalePair TileScale(const RowTiles& row, std::uint32_t amax_bits) {
  const float amax = std::bit_cast<float>(amax_bits);
  return row.mx ? MxScaleFromAmax(amax, Format::kMax)
                : ScaleFromAmaxPair(amax, Format::kMax, row.pow2, 0, row.min_dequant_scale);
}

HWY_INLINE void AddTileScale(std::uint32_t amax_bits, float dequant_scale, RowTileCounts* counts) {
  if (amax_bits != 0) {
    const float least = counts->dequant_scale_min;
    counts->dequant_scale_min = least == 0 ? dequant_scale : std::min(least, dequant_scale);
    counts->dequant_scale_max = std::max(counts->dequant_scale_max, dequant_scale);
  }
}

// Counts what a tile has of zeros and non-finite elements; its amax.
template <class T>
HWY_INLINE std::uint32_t ScanTile(const T* x, std::int64_t n, RowTileCounts* counts) {
  ScanCounts scan;
  ScanRowLoop(x, n, &scan);
  counts->scan.nonfinite += scan.nonfinite;
  counts->scan.zeros += scan.zeros;
  return scan.amax_bits;
}

// A tile with non-finite elements.
template <class Format, class T>
HWY_INLINE void EncodeWildTile(const T* x, float quant_scale, std::int64_t n, std::uint8_t* q,
                               RowTileCounts* counts) {
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(F32()));
  const VF factor = hn::Set(F32(), quant_scale);
  Cast cast;
  for (std::int64_t i = 0; i < n; i += lanes) {
    StoreCodes(cast.Add<Format>(hn::Mul(Load(x + i), factor)), q + i);
  }
  counts->cast.saturated += Hits(cast.saturated);
  counts->cast.zero_codes += Hits(cast.zero_codes);
}

// One row. Counting is for the rare tiles that have something to count.
template <class Format, int kVectors, class T>
HWY_INLINE void TileLoop(const RowTiles& row, const T* x, std::uint8_t* q, float* dequant_scale,
                         RowTileCounts* counts) {
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(F32()));
  std::uint32_t row_amax = counts->scan.amax_bits;
  for (std::int64_t begin = 0; begin < row.cols; begin += row.tile) {
    Range range;
    VF held[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      held[v] = Load(x + begin + v * lanes);
      range.Add(held[v]);
    }
    std::uint32_t amax_bits = range.Largest();
    const bool wild = amax_bits >= 0x7F800000u;
    if (wild || range.HasZero()) {
      amax_bits = ScanTile(x + begin, row.tile, counts);
    }
    const ScalePair scale = TileScale<Format>(row, amax_bits);
    if (wild) {
      EncodeWildTile<Format>(x + begin, scale.quant_scale, row.tile, q + begin, counts);
    } else {
      // amax·Q exceeds M by a rounding at most, which is far below the saturation threshold.
      const VF factor = hn::Set(F32(), scale.quant_scale);
      if (AllNormal<Format>(range.Smallest(), scale.quant_scale)) {
        for (int v = 0; v < kVectors; ++v) {
          const VF scaled = hn::Mul(held[v], factor);
          StoreCodes(WithSign(EncodeNormal<Format>(Magnitude(scaled)), scaled),
                     q + begin + v * lanes);
        }
      } else {
        VI least_code = Const(0x7Fu);
        for (int v = 0; v < kVectors; ++v) {
          const VF scaled = hn::Mul(held[v], factor);
          const VI code = EncodeTame<Format>(Magnitude(scaled));
          least_code = hn::Min(least_code, code);
          StoreCodes(WithSign(code, scaled), q + begin + v * lanes);
        }
        if (!hn::AllFalse(I32(), hn::Eq(least_code, hn::Zero(I32())))) {
          counts->cast.zero_codes += CountZeroCodes(q + begin, row.tile);
        }
      }
    }
    dequant_scale[begin / row.tile * row.dequant_scale_stride] = scale.dequant_scale;
    row_amax = std::max(row_amax, amax_bits);
    AddTileScale(amax_bits, scale.dequant_scale, counts);
  }
  counts->scan.amax_bits = row_amax;
}

#ifdef OCTAVO_PAIRS
// The same for BF16: two elements share a 32-bit lane until they are multiplied, so that maxima,
// signs and stores take half the operations.
template <class Format, int kVectors>
HWY_INLINE void TileLoop(const RowTiles& row, const std::uint16_t* x, std::uint8_t* q,
                         float* dequant_scale, RowTileCounts* counts) {
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(U16()));
  std::uint32_t row_amax = counts->scan.amax_bits;
  for (std::int64_t begin = 0; begin < row.cols; begin += row.tile) {
    VU16 held[kVectors];
    VU16 largest = hn::Zero(U16());
    VU16 smallest = Const16(0x7FFF);
    for (int v = 0; v < kVectors; ++v) {
      held[v] = hn::LoadU(U16(), x + begin + v * lanes);
      const VU16 magnitude = hn::And(held[v], Const16(0x7FFF));
      largest = hn::Max(largest, magnitude);
      smallest = hn::Min(smallest, magnitude);
    }
    std::uint32_t amax_bits = Largest16(largest) << 16;
    const bool wild = amax_bits >= 0x7F800000u;
    if (wild || HasZero16(smallest)) {
      amax_bits = ScanTile(x + begin, row.tile, counts);
    }
    const ScalePair scale = TileScale<Format>(row, amax_bits);
    if (wild) {
      EncodeWildTile<Format>(x + begin, scale.quant_scale, row.tile, q + begin, counts);
    } else {
      const VF factor = hn::Set(F32(), scale.quant_scale);
      if (!AllNormal<Format>(Smallest16(smallest) << 16, scale.quant_scale)) {
        VU16 least = Const16(0x7F);
        for (int v = 0; v < kVectors; ++v) {
          const VU16 code = EncodeTamePair<Format>(held[v], factor, factor);
          least = hn::Min(least, code);
          StorePair(code, held[v], q + begin + v * lanes);
        }
        if (HasZero16(least)) {
          counts->cast.zero_codes += CountZeroCodes(q + begin, row.tile);
        }
      } else if (row.pow2 || row.mx) {
        const int exponent =
            static_cast<int>(std::bit_cast<std::uint32_t>(scale.quant_scale) >> 23) - 127;
        for (int v = 0; v < kVectors; ++v) {
          StorePair(EncodeNormalShifted<Format>(held[v], exponent), held[v], q + begin + v * lanes);
        }
      } else {
        for (int v = 0; v < kVectors; ++v) {
          StorePair(EncodeNormalPair<Format>(held[v], factor), held[v], q + begin + v * lanes);
        }
      }
    }
    dequant_scale[begin / row.tile * row.dequant_scale_stride] = scale.dequant_scale;
    row_amax = std::max(row_amax, amax_bits);
    AddTileScale(amax_bits, scale.dequant_scale, counts);
  }
  counts->scan.amax_bits = row_amax;
}
#endif

template <class Format, int kVectors, class T>
HWY_INLINE void TileRows(const RowTiles& tiles, const T* x, RowTileCounts* counts) {
  // Blocks of a matrix come column by column, which hardware does not foresee: what the next one
  // reads and writes is fetched here. (Addresses beyond the matrices are harmless.)
  const bool block = tiles.cols <= 128 && tiles.cols < tiles.x_stride;
  const std::int64_t line = 64 / static_cast<std::int64_t>(sizeof(T));
  for (std::int64_t r = 0; r < tiles.rows; ++r) {
    for (std::int64_t c = tiles.cols; block && c < 2 * tiles.cols; c += line) {
      __builtin_prefetch(x + r * tiles.x_stride + c);
    }
    for (std::int64_t c = tiles.cols; block && c < 2 * tiles.cols; c += 64) {
      __builtin_prefetch(tiles.q + r * tiles.q_stride + c, 1);
    }
    TileLoop<Format, kVectors>(tiles, x + r * tiles.x_stride, tiles.q + r * tiles.q_stride,
                               tiles.dequant_scale + r * tiles.dequant_scale_row_stride, counts);
  }
}

// Tiles of 32 and 128 are this many vectors.
template <class Format, class T>
HWY_INLINE void TileLoops(const RowTiles& tiles, const T* x, RowTileCounts* counts) {
#ifdef OCTAVO_PAIRS
  constexpr int kLanes = static_cast<int>(hn::MaxLanes(F32()) * sizeof(float) / sizeof(T));
#else
  constexpr int kLanes = static_cast<int>(hn::MaxLanes(F32()));
#endif
  static_assert(kLanes <= 32, "the smallest tile holds whole vectors");
  tiles.tile == 32 ? TileRows<Format, 32 / kLanes>(tiles, x, counts)
                   : TileRows<Format, 128 / kLanes>(tiles, x, counts);
}

void QuantizeRowTilesImpl(const RowTiles& row, RowTileCounts* counts) {
  const bool bf16 = row.x_dtype == DType::kBF16;
  const auto* narrow = static_cast<const std::uint16_t*>(row.x);
  const auto* wide = static_cast<const float*>(row.x);
  if (row.format == DType::kE4M3) {
    bf16 ? TileLoops<E4M3>(row, narrow, counts) : TileLoops<E4M3>(row, wide, counts);
  } else {
    bf16 ? TileLoops<E5M2>(row, narrow, counts) : TileLoops<E5M2>(row, wide, counts);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace octavo::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace octavo::cpu {
HWY_EXPORT(QuantizeRowTilesImpl);

void QuantizeRowTiles(const RowTiles& row, RowTileCounts* counts) {
  OCTAVO_CHECK(row.tile == 32 || row.tile == 128, "tiles are 32 or 128 wide, tile = %lld",
               static_cast<long long>(row.tile));
  OCTAVO_CHECK(row.cols % row.tile == 0, "cols = %lld must be a multiple of the tile %lld",
               static_cast<long long>(row.cols), static_cast<long long>(row.tile));
  OCTAVO_CHECK(row.x_dtype == DType::kF32 || row.x_dtype == DType::kBF16);
  HWY_DYNAMIC_DISPATCH(QuantizeRowTilesImpl)(row, counts);
}

}  // namespace octavo::cpu
#endif  // HWY_ONCE
