#include "kernels/cpu/byte_tiles.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "kernels/formats/scale.h"

#define HWY_DISABLED_TARGETS HWY_SSSE3
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/byte_tiles.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

#ifndef OCTAVO_KERNELS_CPU_BYTE_TILES_TABLE
#define OCTAVO_KERNELS_CPU_BYTE_TILES_TABLE
namespace octavo::cpu {

// RescaleCode(·, k) on magnitudes m: below `base` nothing is left, from base + 32 on the exponent
// field suffices (m − 8k), between them the result is `code[m − base]`.
struct RescaleTable {
  alignas(16) std::uint8_t code[32];
  std::uint8_t base, subtract;
};
inline constexpr int kRescaleShifts = 20;  // from 19 on every finite code is zero

constexpr std::array<RescaleTable, kRescaleShifts> MakeRescaleTables() {
  std::array<RescaleTable, kRescaleShifts> tables{};
  for (int k = 0; k < kRescaleShifts; ++k) {
    RescaleTable& table = tables[static_cast<std::size_t>(k)];
    const int base = k < 3 ? 0 : (k - 3) * 8;
    table.base = static_cast<std::uint8_t>(base < 127 ? base : 127);
    table.subtract = static_cast<std::uint8_t>(8 * k);
    for (int i = 0; i < 32; ++i) {
      const int magnitude = table.base + i;
      table.code[i] =
          magnitude < kFp8Nan ? RescaleCode(static_cast<std::uint8_t>(magnitude), k) : 0;
    }
  }
  return tables;
}
inline constexpr std::array<RescaleTable, kRescaleShifts> kRescaleTables = MakeRescaleTables();

// What the vector code relies on.
constexpr bool RescaleTablesHold() {
  for (int k = 0; k < kRescaleShifts; ++k) {
    const RescaleTable& table = kRescaleTables[static_cast<std::size_t>(k)];
    for (int m = 0; m < kFp8Nan; ++m) {
      const int want = RescaleCode(static_cast<std::uint8_t>(m), k);
      const int index = m < table.base ? 0 : m - table.base;
      if ((index < 32 ? table.code[index] : m - table.subtract) != want) {
        return false;
      }
    }
  }
  return true;
}
static_assert(RescaleTablesHold());

inline constexpr std::int64_t kTileRows = 128;

}  // namespace octavo::cpu
#endif  // OCTAVO_KERNELS_CPU_BYTE_TILES_TABLE

HWY_BEFORE_NAMESPACE();
namespace octavo::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

#if HWY_TARGET != HWY_SCALAR  // which has no blocks

// 16 rows by as many columns as a vector has bytes; a vector's 16-byte blocks are matrices of
// their own.
constexpr std::int64_t kEdge = 16;
using Wide = hn::CappedTag<std::uint8_t, 64>;
using Narrow = hn::CappedTag<std::uint8_t, 16>;

// Interleaves halves of rows i and i + 8; four rounds of it transpose every 16×16 block.
template <class D, class V>
HWY_INLINE void Interleave16(D d, const V* in, V* out) {
  for (int i = 0; i < 8; ++i) {
    out[2 * i] = hn::InterleaveLower(d, in[i], in[i + 8]);
    out[2 * i + 1] = hn::InterleaveUpper(d, in[i], in[i + 8]);
  }
}

// Block b of v to rows 16·b of `to`.
template <class D, class V>
HWY_INLINE void StoreBlocks(D d, V v, std::uint8_t* to) {
  if constexpr (hn::MaxLanes(D()) > 16) {
    const hn::Half<D> half;
    StoreBlocks(half, hn::LowerHalf(half, v), to);
    StoreBlocks(half, hn::UpperHalf(half, v),
                to + static_cast<std::int64_t>(hn::Lanes(half)) * kTileRows);
  } else {
    hn::StoreU(v, d, to);
  }
}

template <class D, class V>
HWY_INLINE V Rescale(D d, V code, int k, std::uint64_t* flushed) {
  const hn::RebindToSigned<D> di;
  const RescaleTable& table = kRescaleTables[static_cast<std::size_t>(k)];
  const V magnitude = hn::And(code, hn::Set(d, std::uint8_t{0x7F}));
  const V index = hn::SaturatedSub(magnitude, hn::Set(d, table.base));
  const auto index_signed = hn::BitCast(di, index);  // at most 127
  const V low_bits = hn::And(index, hn::Set(d, std::uint8_t{15}));
  const V low = hn::TableLookupBytes(hn::LoadDup128(d, table.code), low_bits);
  const V high = hn::TableLookupBytes(hn::LoadDup128(d, table.code + 16), low_bits);
  const auto in_high = hn::RebindMask(d, hn::Gt(index_signed, hn::Set(di, std::int8_t{15})));
  const auto beyond = hn::RebindMask(d, hn::Gt(index_signed, hn::Set(di, std::int8_t{31})));
  V result = hn::IfThenElse(in_high, high, low);
  result = hn::IfThenElse(beyond, hn::Sub(magnitude, hn::Set(d, table.subtract)), result);
  const auto is_nan = hn::Eq(magnitude, hn::Set(d, static_cast<std::uint8_t>(kFp8Nan)));
  result = hn::IfThenElse(is_nan, magnitude, result);
  const V zero = hn::Zero(d);
  // Zero now but not before: the magnitudes' difference to the result is all that is left of it.
  const auto gone = hn::AndNot(hn::Eq(magnitude, zero), hn::Eq(result, zero));
  *flushed += hn::CountTrue(d, gone);
  return hn::Or(result, hn::AndNot(hn::Set(d, std::uint8_t{0x7F}), code));
}

// Columns [0, Lanes(d)) of up to 128 rows beginning at `first`, into dst rows of their own.
template <class D>
HWY_INLINE std::uint64_t TransposeStrip(D d, const TransposeTileArgs& args, std::int64_t first,
                                        const std::uint8_t* src, std::uint8_t* dst) {
  using V = hn::Vec<D>;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  alignas(64) std::uint8_t buffer[64 * kTileRows];
  const std::int64_t length = std::min(kTileRows, args.padded_rows - first);
  std::uint64_t flushed = 0;
  // Rows lie far apart, which hardware does not foresee: what the next tile reads and writes is
  // fetched here. (Addresses beyond the matrices are harmless.)
  for (std::int64_t r = 0; r < length; r += kEdge) {
    V a[kEdge];
    V b[kEdge];
    const std::int64_t real = args.rows - first - r;
    for (std::int64_t i = 0; i < kEdge; ++i) {
      a[i] = hn::Zero(d);
      if (i < real) {
        const std::uint8_t* from = src + (first + r + i) * args.src.stride;
        __builtin_prefetch(from + kTileRows);
        a[i] = hn::LoadU(d, from);
        if (args.shift != nullptr) {
          const int k = args.shift[first + r + i];
          a[i] = k == 0 ? a[i] : Rescale(d, a[i], std::min(k, kRescaleShifts - 1), &flushed);
        }
      }
    }
    Interleave16(d, a, b);
    Interleave16(d, b, a);
    Interleave16(d, a, b);
    Interleave16(d, b, a);
    for (std::int64_t i = 0; i < kEdge; ++i) {
      StoreBlocks(d, a[i], buffer + i * kTileRows + r);
    }
  }
  for (std::int64_t c = 0; c < lanes; ++c) {
    std::uint8_t* to = dst + c * args.dst.stride + first;
    __builtin_prefetch(to + kTileRows * args.dst.stride, 1);
    __builtin_prefetch(to + kTileRows * args.dst.stride + kTileRows / 2, 1);
    if (length == kTileRows) {  // whole cache lines at once
      for (std::int64_t i = 0; i < kTileRows; i += lanes) {
        hn::StoreU(hn::Load(d, buffer + c * kTileRows + i), d, to + i);
      }
    } else {
      std::memcpy(to, buffer + c * kTileRows, static_cast<std::size_t>(length));
    }
  }
  return flushed;
}

#endif  // HWY_TARGET != HWY_SCALAR

// Columns [begin, cols) of rows [first, end).
std::uint64_t TransposeRest(const TransposeTileArgs& args, std::int64_t first, std::int64_t end,
                            std::int64_t begin) {
  std::uint64_t flushed = 0;
  for (std::int64_t c = begin; c < args.cols; ++c) {
    for (std::int64_t r = first; r < end; ++r) {
      const std::uint8_t code = r < args.rows ? args.src.data[r * args.src.stride + c] : 0;
      const std::uint8_t now =
          args.shift == nullptr || r >= args.rows ? code : RescaleCode(code, args.shift[r]);
      flushed += (code & 0x7F) != 0 && (now & 0x7F) == 0 ? 1u : 0u;
      args.dst.data[c * args.dst.stride + r] = now;
    }
  }
  return flushed;
}

std::uint64_t TransposeTileImpl(const TransposeTileArgs& args) {
  std::uint64_t flushed = 0;
  for (std::int64_t first = 0; first < args.padded_rows; first += kTileRows) {
    std::int64_t c = 0;
#if HWY_TARGET != HWY_SCALAR
    const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(Wide()));
    for (; c + lanes <= args.cols; c += lanes) {
      flushed += TransposeStrip(Wide(), args, first, args.src.data + c,
                                args.dst.data + c * args.dst.stride);
    }
    for (; c + kEdge <= args.cols; c += kEdge) {
      flushed += TransposeStrip(Narrow(), args, first, args.src.data + c,
                                args.dst.data + c * args.dst.stride);
    }
#endif
    flushed += TransposeRest(args, first, std::min(first + kTileRows, args.padded_rows), c);
  }
  return flushed;
}

}  // namespace HWY_NAMESPACE
}  // namespace octavo::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace octavo::cpu {
HWY_EXPORT(TransposeTileImpl);

std::uint64_t TransposeTile(const TransposeTileArgs& args) {
  return HWY_DYNAMIC_DISPATCH(TransposeTileImpl)(args);
}

void TransposeBytes(ByteMatrix src, std::int64_t rows, std::int64_t cols, ByteMatrix dst) {
  TransposeTile(
      {.src = src, .rows = rows, .padded_rows = rows, .cols = cols, .shift = nullptr, .dst = dst});
}

}  // namespace octavo::cpu
#endif  // HWY_ONCE
