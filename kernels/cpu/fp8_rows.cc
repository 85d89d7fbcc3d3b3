#include "kernels/cpu/fp8_rows.h"

#include <algorithm>

#include "base/check.h"

// SSE4 is the least that is vectorised; older machines take Highway's portable target.
#define HWY_DISABLED_TARGETS HWY_SSSE3
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/fp8_rows.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/fp8_vectors-inl.h"

HWY_BEFORE_NAMESPACE();
namespace octavo::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Counting is for the rare pieces that have something to count.
template <class T>
HWY_INLINE void ScanLoop(const Matrix& m, const T* x, ScanCounts* counts) {
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(F32()));
  if (m.cols % lanes == 0 && m.rows > 0) {
    Range range;
    for (std::int64_t r = 0; r < m.rows; ++r) {
      for (std::int64_t i = 0; i < m.cols; i += lanes) {
        range.Add(Load(x + r * m.stride + i));
      }
    }
    if (range.Largest() < 0x7F800000u && !range.HasZero()) {
      counts->amax_bits = std::max(counts->amax_bits, range.Largest());
      return;
    }
  }
  for (std::int64_t r = 0; r < m.rows; ++r) {
    ScanRowLoop(x + r * m.stride, m.cols, counts);
  }
}

void ScanMatrixImpl(const Matrix& m, ScanCounts* counts) {
  m.dtype == DType::kBF16 ? ScanLoop(m, static_cast<const std::uint16_t*>(m.data), counts)
                          : ScanLoop(m, static_cast<const float*>(m.data), counts);
}

// Maxima of kVectors vectors of columns, non-finite elements included. Rows go front to back: whole
// cache lines, whatever the stride.
template <int kVectors, class T>
HWY_INLINE VI MaxColumnsOf(const Matrix& m, const T* x, std::uint32_t* amax_bits) {
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(F32()));
  VI amax[kVectors];
  for (int v = 0; v < kVectors; ++v) {
    amax[v] = hn::Zero(I32());
  }
  for (std::int64_t r = 0; r < m.rows; ++r) {
    for (int v = 0; v < kVectors; ++v) {
      amax[v] = hn::Max(amax[v], Magnitude(Load(x + r * m.stride + v * lanes)));
    }
  }
  VI largest = hn::Zero(I32());
  for (int v = 0; v < kVectors; ++v) {
    largest = hn::Max(largest, amax[v]);
    hn::StoreU(amax[v], I32(), reinterpret_cast<std::int32_t*>(amax_bits + v * lanes));
  }
  return largest;
}

#ifdef OCTAVO_PAIRS
template <int kVectors>
HWY_INLINE VI MaxColumnsOf(const Matrix& m, const std::uint16_t* x, std::uint32_t* amax_bits) {
  if constexpr (kVectors % 2 != 0) {
    return MaxColumnsOf<kVectors, std::uint16_t>(m, x, amax_bits);
  } else {
    const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(U16()));
    VU16 amax[kVectors / 2];
    for (int v = 0; v < kVectors / 2; ++v) {
      amax[v] = hn::Zero(U16());
    }
    for (std::int64_t r = 0; r < m.rows; ++r) {
      for (int v = 0; v < kVectors / 2; ++v) {
        const VU16 magnitude =
            hn::And(hn::LoadU(U16(), x + r * m.stride + v * lanes), Const16(0x7FFF));
        amax[v] = hn::Max(amax[v], magnitude);
      }
    }
    VU16 largest = hn::Zero(U16());
    for (int v = 0; v < kVectors / 2; ++v) {
      largest = hn::Max(largest, amax[v]);
      const VI pairs = hn::BitCast(I32(), amax[v]);
      hn::StoreInterleaved2(hn::ShiftLeft<16>(pairs), hn::And(pairs, Const(0xFFFF0000u)), I32(),
                            reinterpret_cast<std::int32_t*>(amax_bits + v * lanes));
    }
    return Const(Largest16(largest) << 16);
  }
}
#endif

template <class T>
HWY_INLINE bool MaxColumnsLoop(const Matrix& m, const T* x, std::uint32_t* amax_bits) {
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(F32()));
  VI largest = hn::Zero(I32());
  std::int64_t c = 0;
  for (; c + kHeld * lanes <= m.cols; c += kHeld * lanes) {
    largest = hn::Max(largest, MaxColumnsOf<kHeld>(m, x + c, amax_bits + c));
  }
  for (; c + lanes <= m.cols; c += lanes) {
    largest = hn::Max(largest, MaxColumnsOf<1>(m, x + c, amax_bits + c));
  }
  bool tame = hn::GetLane(hn::MaxOfLanes(I32(), largest)) < 0x7F800000;
  for (c = tame ? c : 0; c < m.cols; ++c) {
    amax_bits[c] = 0;
    for (std::int64_t r = 0; r < m.rows; ++r) {
      const float value = Scalar(x[r * m.stride + c]);
      amax_bits[c] = std::max(amax_bits[c], FiniteMagnitudeBits(value));
      tame = tame && (std::bit_cast<std::uint32_t>(value) & 0x7FFFFFFFu) < 0x7F800000u;
    }
  }
  return tame;
}

bool MaxColumnsImpl(const Matrix& m, std::uint32_t* amax_bits) {
  return m.dtype == DType::kBF16
             ? MaxColumnsLoop(m, static_cast<const std::uint16_t*>(m.data), amax_bits)
             : MaxColumnsLoop(m, static_cast<const float*>(m.data), amax_bits);
}

// kByColumn: quant_scale is [n], else [1].
template <class Format, bool kByColumn>
HWY_INLINE void EncodeLoop(const float* x, const float* quant_scale, std::int64_t n,
                           std::uint8_t* q, CastCounts* counts) {
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(F32()));
  Cast cast;
  const VF common = hn::Set(F32(), quant_scale[0]);
  std::int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    const VF factor = kByColumn ? Load(quant_scale + i) : common;
    StoreCodes(cast.Add<Format>(hn::Mul(Load(x + i), factor)), q + i);
  }
  counts->saturated += Hits(cast.saturated);
  counts->zero_codes += Hits(cast.zero_codes);
  for (; i < n; ++i) {
    const float scaled = x[i] * quant_scale[kByColumn ? i : 0];
    q[i] = Fp8Encode<Format>(scaled);
    counts->saturated += IsSaturated(Format::kDType, scaled) ? 1u : 0u;
    counts->zero_codes += (q[i] & 0x7F) == 0 ? 1u : 0u;
  }
}

// kVectors vectors of columns of a tame matrix; factor v multiplies vector v, or 0 all of them.
// Returns the least magnitude codes.
template <class Format, bool kByColumn, int kVectors, class T>
HWY_INLINE VI EncodeTameOf(const Matrix& m, const T* x, const float* quant_scale, ByteMatrix q) {
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(F32()));
  VF factor[kVectors];
  for (int v = 0; v < kVectors; ++v) {
    factor[v] = kByColumn ? Load(quant_scale + v * lanes) : hn::Set(F32(), quant_scale[0]);
  }
  VI least = Const(0x7Fu);
  for (std::int64_t r = 0; r < m.rows; ++r) {
    for (int v = 0; v < kVectors; ++v) {
      const VF scaled = hn::Mul(Load(x + r * m.stride + v * lanes), factor[v]);
      const VI code = EncodeTame<Format>(Magnitude(scaled));
      least = hn::Min(least, code);
      StoreCodes(WithSign(code, scaled), q.data + r * q.stride + v * lanes);
    }
  }
  return least;
}

#ifdef OCTAVO_PAIRS
template <class Format, bool kByColumn, int kVectors>
HWY_INLINE VI EncodeTameOf(const Matrix& m, const std::uint16_t* x, const float* quant_scale,
                           ByteMatrix q) {
  if constexpr (kVectors % 2 != 0) {
    return EncodeTameOf<Format, kByColumn, kVectors, std::uint16_t>(m, x, quant_scale, q);
  } else {
    const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(U16()));
    VF even[kVectors / 2];
    VF odd[kVectors / 2];
    for (int v = 0; v < kVectors / 2; ++v) {
      if constexpr (kByColumn) {
        hn::LoadInterleaved2(F32(), quant_scale + v * lanes, even[v], odd[v]);
      } else {
        even[v] = odd[v] = hn::Set(F32(), quant_scale[0]);
      }
    }
    VU16 least = Const16(0x7F);
    for (std::int64_t r = 0; r < m.rows; ++r) {
      for (int v = 0; v < kVectors / 2; ++v) {
        const VU16 elements = hn::LoadU(U16(), x + r * m.stride + v * lanes);
        const VU16 code = EncodeTamePair<Format>(elements, even[v], odd[v]);
        least = hn::Min(least, code);
        StorePair(code, elements, q.data + r * q.stride + v * lanes);
      }
    }
    return Const(HasZero16(least) ? 0u : 0x7Fu);
  }
}
#endif

// counts null: nobody counts. Nothing saturates in a tame matrix.
template <class Format, bool kByColumn, class T>
HWY_INLINE void EncodeTameLoop(const Matrix& m, const T* x, const float* quant_scale, ByteMatrix q,
                               CastCounts* counts) {
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(F32()));
  VI least = Const(0x7Fu);
  std::int64_t c = 0;
  const auto part = [&](std::int64_t at) { return ByteMatrix{q.data + at, q.stride}; };
  for (; c + kHeld * lanes <= m.cols; c += kHeld * lanes) {
    least = hn::Min(least, EncodeTameOf<Format, kByColumn, kHeld>(
                               m, x + c, quant_scale + (kByColumn ? c : 0), part(c)));
  }
  for (; c + lanes <= m.cols; c += lanes) {
    least = hn::Min(least, EncodeTameOf<Format, kByColumn, 1>(
                               m, x + c, quant_scale + (kByColumn ? c : 0), part(c)));
  }
  bool zero = !hn::AllFalse(I32(), hn::Eq(least, hn::Zero(I32())));
  for (; c < m.cols; ++c) {
    for (std::int64_t r = 0; r < m.rows; ++r) {
      const float scaled = Scalar(x[r * m.stride + c]) * quant_scale[kByColumn ? c : 0];
      q.data[r * q.stride + c] = Fp8Encode<Format>(scaled);
      zero = zero || (q.data[r * q.stride + c] & 0x7F) == 0;
    }
  }
  for (std::int64_t r = 0; counts != nullptr && zero && r < m.rows; ++r) {
    counts->zero_codes += CountZeroCodes(q.data + r * q.stride, m.cols);
  }
}

template <class Format, bool kByColumn>
HWY_INLINE void EncodeTameMatrix(const Matrix& m, const float* quant_scale, ByteMatrix q,
                                 CastCounts* counts) {
  if (m.dtype == DType::kBF16) {
    EncodeTameLoop<Format, kByColumn>(m, static_cast<const std::uint16_t*>(m.data), quant_scale, q,
                                      counts);
  } else {
    EncodeTameLoop<Format, kByColumn>(m, static_cast<const float*>(m.data), quant_scale, q, counts);
  }
}

void EncodeTameImpl(DType format, const Matrix& m, const float* quant_scale, bool by_column,
                    ByteMatrix q, CastCounts* counts) {
  if (format == DType::kE4M3) {
    by_column ? EncodeTameMatrix<E4M3, true>(m, quant_scale, q, counts)
              : EncodeTameMatrix<E4M3, false>(m, quant_scale, q, counts);
  } else {
    by_column ? EncodeTameMatrix<E5M2, true>(m, quant_scale, q, counts)
              : EncodeTameMatrix<E5M2, false>(m, quant_scale, q, counts);
  }
}

void EncodeRowImpl(DType format, const float* x, const float* quant_scale, bool by_column,
                   std::int64_t n, std::uint8_t* q, CastCounts* counts) {
  if (n == 0) {
    return;
  }
  if (format == DType::kE4M3) {
    by_column ? EncodeLoop<E4M3, true>(x, quant_scale, n, q, counts)
              : EncodeLoop<E4M3, false>(x, quant_scale, n, q, counts);
  } else {
    by_column ? EncodeLoop<E5M2, true>(x, quant_scale, n, q, counts)
              : EncodeLoop<E5M2, false>(x, quant_scale, n, q, counts);
  }
}

HWY_INLINE void StoreDecoded(VF x, float* out) { hn::StoreU(x, F32(), out); }
HWY_INLINE void StoreDecoded(VF x, std::uint16_t* out) {
  const VI bits = hn::BitCast(I32(), x);
  const hn::RebindToUnsigned<F32> du;
  const hn::Rebind<std::uint16_t, F32> d16;
  const VI odd = hn::And(hn::ShiftRight<16>(bits), Const(1));
  const VI rounded = hn::Add(bits, hn::Add(odd, Const(0x7FFFu)));
  VI code = hn::BitCast(I32(), hn::ShiftRight<16>(hn::BitCast(du, rounded)));
  code = hn::IfThenElse(hn::Gt(Magnitude(x), Const(0x7F800000u)), Const(0x7FFFu), code);
  hn::StoreU(hn::DemoteTo(d16, code), d16, out);
}
HWY_INLINE void SetDecoded(float x, float* out) { *out = x; }
HWY_INLINE void SetDecoded(float x, std::uint16_t* out) { *out = Bf16FromFloat(x); }

template <class Format, class T>
HWY_INLINE void DecodeLoop(const std::uint8_t* q, float dequant_scale, std::int64_t n, T* x) {
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(F32()));
  const hn::Rebind<std::uint8_t, F32> d8;
  const VF factor = hn::Set(F32(), dequant_scale);
  std::int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    const VI code = hn::PromoteTo(I32(), hn::LoadU(d8, q + i));
    StoreDecoded(hn::Mul(Decode<Format>(code), factor), x + i);
  }
  for (; i < n; ++i) {
    SetDecoded(Fp8Decode<Format>(q[i]) * dequant_scale, x + i);
  }
}

void DecodeRowImpl(DType format, const std::uint8_t* q, float dequant_scale, std::int64_t n,
                   float* x) {
  format == DType::kE4M3 ? DecodeLoop<E4M3>(q, dequant_scale, n, x)
                         : DecodeLoop<E5M2>(q, dequant_scale, n, x);
}

template <class Format, class T>
HWY_INLINE void DecodeTilesLoop(const DecodeTilesArgs& a, T* x) {
  for (std::int64_t at = 0; at < a.cols; at += a.tile) {
    DecodeLoop<Format>(a.q + at, a.dequant_scale[at / a.tile * a.dequant_scale_stride],
                       std::min(a.tile, a.cols - at), x + at);
  }
}

void DecodeTilesImpl(const DecodeTilesArgs& a) {
  auto* narrow = static_cast<std::uint16_t*>(a.x);
  auto* wide = static_cast<float*>(a.x);
  if (a.format == DType::kE4M3) {
    a.x_dtype == DType::kBF16 ? DecodeTilesLoop<E4M3>(a, narrow) : DecodeTilesLoop<E4M3>(a, wide);
  } else {
    a.x_dtype == DType::kBF16 ? DecodeTilesLoop<E5M2>(a, narrow) : DecodeTilesLoop<E5M2>(a, wide);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace octavo::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace octavo::cpu {
HWY_EXPORT(ScanMatrixImpl);
HWY_EXPORT(MaxColumnsImpl);
HWY_EXPORT(EncodeRowImpl);
HWY_EXPORT(EncodeTameImpl);
HWY_EXPORT(DecodeRowImpl);
HWY_EXPORT(DecodeTilesImpl);

void ScanMatrix(const Matrix& m, ScanCounts* counts) {
  HWY_DYNAMIC_DISPATCH(ScanMatrixImpl)(m, counts);
}

bool MaxColumns(const Matrix& m, std::uint32_t* amax_bits) {
  return HWY_DYNAMIC_DISPATCH(MaxColumnsImpl)(m, amax_bits);
}

void EncodeTameColumns(DType format, const Matrix& m, const float* quant_scale, ByteMatrix q) {
  HWY_DYNAMIC_DISPATCH(EncodeTameImpl)(format, m, quant_scale, true, q, nullptr);
}

void EncodeRow(DType format, const float* x, float quant_scale, std::int64_t n, std::uint8_t* q,
               CastCounts* counts) {
  HWY_DYNAMIC_DISPATCH(EncodeRowImpl)(format, x, &quant_scale, false, n, q, counts);
}

void EncodeRowByColumn(DType format, const float* x, const float* quant_scale, std::int64_t n,
                       std::uint8_t* q, CastCounts* counts) {
  HWY_DYNAMIC_DISPATCH(EncodeRowImpl)(format, x, quant_scale, true, n, q, counts);
}

void EncodeTame(DType format, const Matrix& m, float quant_scale, ByteMatrix q,
                CastCounts* counts) {
  HWY_DYNAMIC_DISPATCH(EncodeTameImpl)(format, m, &quant_scale, false, q, counts);
}

void DecodeRow(DType format, const std::uint8_t* q, float dequant_scale, std::int64_t n, float* x) {
  HWY_DYNAMIC_DISPATCH(DecodeRowImpl)(format, q, dequant_scale, n, x);
}

void DecodeTiles(const DecodeTilesArgs& args) {
  OCTAVO_CHECK(args.tile > 0, "tile = %lld", static_cast<long long>(args.tile));
  HWY_DYNAMIC_DISPATCH(DecodeTilesImpl)(args);
}

}  // namespace octavo::cpu
#endif  // HWY_ONCE
