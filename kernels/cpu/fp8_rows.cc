#include "kernels/cpu/fp8_rows.h"

#include <algorithm>
#include <bit>

#include "base/check.h"
#include "kernels/formats/bf16.h"
#include "kernels/formats/fp8.h"
#include "kernels/formats/scale.h"

// SSE4 is the least that is vectorised; older machines take Highway's portable target.
#define HWY_DISABLED_TARGETS HWY_SSSE3
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/fp8_rows.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace octavo::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Magnitudes are below 2^31, so signed comparisons (native everywhere) order them.
using F32 = hn::ScalableTag<float>;
using I32 = hn::RebindToSigned<F32>;
using VF = hn::Vec<F32>;
using VI = hn::Vec<I32>;

HWY_INLINE VI Const(std::uint32_t bits) { return hn::Set(I32(), static_cast<std::int32_t>(bits)); }

HWY_INLINE VI Magnitude(VF x) { return hn::And(hn::BitCast(I32(), x), Const(0x7FFFFFFFu)); }

// v >= bits, for bits > 0.
HWY_INLINE hn::Mask<I32> AtLeast(VI v, std::uint32_t bits) { return hn::Gt(v, Const(bits - 1u)); }

// Vectors of a row that are worked on side by side: as many as registers hold next to constants.
constexpr int kHeld = 8;

// Counters as vectors of −1 per hit.
HWY_INLINE std::uint64_t Hits(VI negative_count) {
  return static_cast<std::uint64_t>(-hn::GetLane(hn::SumOfLanes(I32(), negative_count)));
}

// The scalar Fp8EncodeWide, lane by lane.
template <class Format>
HWY_INLINE VI Encode(VF value) {
  constexpr int kDropped = 23 - Format::kMantissaBits;
  constexpr std::uint32_t kMinNormalBits = static_cast<std::uint32_t>(127 + 1 - Format::kBias)
                                           << 23;
  constexpr std::uint32_t kMagicBits =
      static_cast<std::uint32_t>(127 + 1 - Format::kBias - Format::kMantissaBits + 23) << 23;
  constexpr std::uint32_t kRebias = static_cast<std::uint32_t>(127 - Format::kBias)
                                    << Format::kMantissaBits;
  const VI bits = hn::BitCast(I32(), value);
  const VI magnitude = Magnitude(value);
  const VI clamped = hn::Min(magnitude, Const(std::bit_cast<std::uint32_t>(Format::kMax)));
  const VI odd = hn::And(hn::ShiftRight<kDropped>(clamped), Const(1));
  const VI rounded = hn::Add(clamped, hn::Add(odd, Const((1u << (kDropped - 1)) - 1u)));
  const VI normal = hn::Sub(hn::ShiftRight<kDropped>(rounded), Const(kRebias));
  const VF magic = hn::BitCast(F32(), Const(kMagicBits));
  const VI subnormal =
      hn::Sub(hn::BitCast(I32(), hn::Add(hn::BitCast(F32(), clamped), magic)), Const(kMagicBits));
  VI code = hn::IfThenElse(hn::Lt(clamped, Const(kMinNormalBits)), subnormal, normal);
  code = hn::Or(code, hn::And(hn::ShiftRight<24>(bits), Const(0x80u)));
  return hn::IfThenElse(hn::Gt(magnitude, Const(0x7F800000u)), Const(kFp8Nan), code);
}

// Magnitude codes of |value| that are finite and round to at most M, plus TameBias: neither
// clamping nor NaN. The addend has its last place where the result's is (never below the
// subnormals'), so the addition rounds there, ties to even: the same operations for normal and
// subnormal results. For value in [2^e, 2^(e+1)) the sum is 2^(e+kDropped) + value: its low bits
// are the significand with the hidden one, which counts as one step of the exponent field.
template <class Format>
HWY_INLINE VI EncodeTameBiased(VI magnitude) {
  constexpr int kDropped = 23 - Format::kMantissaBits;
  constexpr std::uint32_t kMinNormalBits = static_cast<std::uint32_t>(127 + 1 - Format::kBias)
                                           << 23;
  const VI exponent = hn::Max(hn::And(magnitude, Const(0x7F800000u)), Const(kMinNormalBits));
  const VI addend = hn::Add(exponent, Const(static_cast<std::uint32_t>(kDropped) << 23));
  const VF sum = hn::Add(hn::BitCast(F32(), magnitude), hn::BitCast(F32(), addend));
  return hn::Add(hn::Sub(hn::BitCast(I32(), sum), addend), hn::ShiftRight<kDropped>(exponent));
}
template <class Format>
constexpr std::uint32_t kTameBias = static_cast<std::uint32_t>(127 - Format::kBias + 1)
                                    << Format::kMantissaBits;

template <class Format>
HWY_INLINE VI EncodeTame(VI magnitude) {
  return hn::Sub(EncodeTameBiased<Format>(magnitude), Const(kTameBias<Format>));
}

// The same where every result is normal.
template <class Format>
HWY_INLINE VI EncodeNormal(VI magnitude) {
  constexpr int kDropped = 23 - Format::kMantissaBits;
  constexpr std::uint32_t kRebias = static_cast<std::uint32_t>(127 - Format::kBias) << 23;
  const VI odd = hn::And(hn::ShiftRight<kDropped>(magnitude), Const(1));
  const VI rounded = hn::Add(hn::Add(magnitude, odd), Const((1u << (kDropped - 1)) - 1u - kRebias));
  return hn::ShiftRight<kDropped>(rounded);
}
// `smallest` of a tile says whether they are.
template <class Format>
HWY_INLINE bool AllNormal(std::uint32_t smallest, float quant_scale) {
  return std::bit_cast<float>(smallest) * quant_scale >= PowerOfTwo(1 - Format::kBias);
}

HWY_INLINE VI WithSign(VI magnitude_code, VF value) {
  return hn::Or(magnitude_code,
                hn::And(hn::ShiftRight<24>(hn::BitCast(I32(), value)), Const(0x80u)));
}

template <class Format>
HWY_INLINE VF Decode(VI code) {
  constexpr int kShift = 23 - Format::kMantissaBits;
  const VI magnitude = hn::And(code, Const(0x7Fu));
  // The code as FP32 bits times 2^(127-bias); a subnormal one by its integer, so that the machine's
  // slow path for subnormal FP32 operands is never taken.
  const VF unbias = hn::Set(
      F32(), std::bit_cast<float>(static_cast<std::uint32_t>(127 + 127 - Format::kBias) << 23));
  const VF smallest = hn::Set(
      F32(),
      std::bit_cast<float>(
          static_cast<std::uint32_t>(127 + 1 - Format::kBias - Format::kMantissaBits) << 23));
  const auto is_subnormal = hn::Lt(magnitude, Const(1u << Format::kMantissaBits));
  const VI shifted = hn::IfThenZeroElse(is_subnormal, hn::ShiftLeft<kShift>(magnitude));
  const VF normal = hn::Mul(hn::BitCast(F32(), shifted), unbias);
  const VF tiny = hn::Mul(hn::ConvertTo(F32(), magnitude), smallest);
  VI bits = hn::BitCast(I32(), hn::IfThenElse(hn::RebindMask(F32(), is_subnormal), tiny, normal));
  bits = hn::IfThenElse(AtLeast(magnitude, Format::kFirstNonFiniteCode), Const(0x7FC00000u), bits);
  if (Format::kDType == DType::kE5M2) {
    bits = hn::IfThenElse(hn::Eq(magnitude, Const(0x7Cu)), Const(0x7F800000u), bits);
  }
  bits = hn::Or(bits, hn::ShiftLeft<24>(hn::And(code, Const(0x80u))));
  return hn::BitCast(F32(), bits);
}

HWY_INLINE VF Load(const float* x) { return hn::LoadU(F32(), x); }
HWY_INLINE VF Load(const std::uint16_t* x) {
  const hn::Rebind<std::uint16_t, F32> d16;
  const hn::RebindToUnsigned<F32> du;
  return hn::BitCast(F32(), hn::ShiftLeft<16>(hn::PromoteTo(du, hn::LoadU(d16, x))));
}
HWY_INLINE float Scalar(float x) { return x; }
HWY_INLINE float Scalar(std::uint16_t x) { return FloatFromBf16(x); }
HWY_INLINE void StoreCodes(VI code, std::uint8_t* q) {
  const hn::Rebind<std::uint8_t, F32> d8;
  hn::StoreU(hn::DemoteTo(d8, code), d8, q);
}

#if HWY_TARGET != HWY_SCALAR
#define OCTAVO_PAIRS 1  // undefined at the end of this pass

// Pairs of BF16 elements: lane i of U16 is element i; the 32-bit lane over lanes 2i and 2i + 1
// holds the even element below the odd one.
using U16 = hn::Repartition<std::uint16_t, F32>;
using VU16 = hn::Vec<U16>;

HWY_INLINE VU16 Const16(std::uint16_t bits) { return hn::Set(U16(), bits); }
HWY_INLINE std::uint32_t Largest16(VU16 v) {
  const VI pairs = hn::BitCast(I32(), v);
  const hn::RebindToUnsigned<F32> du;
  const VI odd = hn::BitCast(I32(), hn::ShiftRight<16>(hn::BitCast(du, pairs)));
  return static_cast<std::uint32_t>(
      hn::GetLane(hn::MaxOfLanes(I32(), hn::Max(odd, hn::And(pairs, Const(0xFFFFu))))));
}
HWY_INLINE std::uint32_t Smallest16(VU16 v) {
  return 0xFFFFu - Largest16(hn::Xor(v, Const16(0xFFFF)));
}
HWY_INLINE bool HasZero16(VU16 v) { return !hn::AllFalse(U16(), hn::Eq(v, hn::Zero(U16()))); }

// Magnitude codes of tame elements; even and odd are the factors of even and odd ones.
template <class Format>
HWY_INLINE VU16 EncodeTamePair(VU16 x, VF even, VF odd) {
  const VI magnitude = hn::BitCast(I32(), hn::And(x, Const16(0x7FFF)));
  const VF low = hn::BitCast(F32(), hn::ShiftLeft<16>(magnitude));
  const VF high = hn::BitCast(F32(), hn::And(magnitude, Const(0xFFFF0000u)));
  const VI low_code = EncodeTameBiased<Format>(hn::BitCast(I32(), hn::Mul(low, even)));
  const VI high_code = EncodeTameBiased<Format>(hn::BitCast(I32(), hn::Mul(high, odd)));
  const VI both = hn::Or(low_code, hn::ShiftLeft<16>(high_code));
  return hn::Sub(hn::BitCast(U16(), both), Const16(static_cast<std::uint16_t>(kTameBias<Format>)));
}
// The same where every result is normal.
template <class Format>
HWY_INLINE VU16 EncodeNormalPair(VU16 x, VF factor) {
  constexpr int kDropped = 23 - Format::kMantissaBits;
  constexpr std::uint32_t kRebias = static_cast<std::uint32_t>(127 - Format::kBias) << 23;
  constexpr std::uint32_t kAdd = (1u << (kDropped - 1)) - 1u - kRebias;
  const VI magnitude = hn::BitCast(I32(), hn::And(x, Const16(0x7FFF)));
  const auto rounded = [&](VF value) HWY_ATTR {
    const VI bits = hn::BitCast(I32(), hn::Mul(value, factor));
    const VI odd = hn::And(hn::ShiftRight<kDropped>(bits), Const(1));
    return hn::Add(hn::Add(bits, odd), Const(kAdd));
  };
  const VI low = rounded(hn::BitCast(F32(), hn::ShiftLeft<16>(magnitude)));
  const VI high = rounded(hn::BitCast(F32(), hn::And(magnitude, Const(0xFFFF0000u))));
  return hn::BitCast(U16(),
                     hn::Or(hn::ShiftRight<kDropped>(low),
                            hn::And(hn::ShiftRight<kDropped - 16>(high), Const(0xFFFF0000u))));
}
// The same where the factor is 2^exponent: products are BF16 again, so nothing leaves 16 bits.
template <class Format>
HWY_INLINE VU16 EncodeNormalShifted(VU16 x, int exponent) {
  constexpr int kDropped = 7 - Format::kMantissaBits;
  const int add = (1 << (kDropped - 1)) - 1 + ((exponent - 127 + Format::kBias) << 7);
  const VU16 magnitude = hn::And(x, Const16(0x7FFF));
  const VU16 odd = hn::And(hn::ShiftRight<kDropped>(magnitude), Const16(1));
  const VU16 rounded = hn::Add(hn::Add(magnitude, odd), Const16(static_cast<std::uint16_t>(add)));
  return hn::ShiftRight<kDropped>(rounded);
}
// Stores codes with the signs of x.
HWY_INLINE void StorePair(VU16 code, VU16 x, std::uint8_t* q) {
  const hn::Rebind<std::uint8_t, U16> d8;
  const hn::RebindToSigned<U16> d16;
  const VU16 with_sign = hn::Or(code, hn::And(hn::ShiftRight<8>(x), Const16(0x80)));
  hn::StoreU(hn::DemoteTo(d8, hn::BitCast(d16, with_sign)), d8, q);
}
#endif  // HWY_TARGET != HWY_SCALAR

// Vector counters of a scan or a cast over less than 2^31 elements. Constructors are written out:
// implicit ones would be compiled for the baseline instruction set.
struct Scan {
  VI amax, nonfinite, zeros;
  HWY_INLINE Scan() {
    amax = hn::Zero(I32());
    nonfinite = hn::Zero(I32());
    zeros = hn::Zero(I32());
  }
  HWY_INLINE void Add(VF x) {
    const VI magnitude = Magnitude(x);
    const auto wild = AtLeast(magnitude, 0x7F800000u);
    amax = hn::Max(amax, hn::IfThenZeroElse(wild, magnitude));
    nonfinite = hn::Add(nonfinite, hn::VecFromMask(I32(), wild));
    zeros = hn::Add(zeros, hn::VecFromMask(I32(), hn::Eq(magnitude, hn::Zero(I32()))));
  }
};
struct Cast {
  VI saturated, zero_codes;
  HWY_INLINE Cast() {
    saturated = hn::Zero(I32());
    zero_codes = hn::Zero(I32());
  }
  template <class Format>
  HWY_INLINE VI Add(VF scaled) {
    constexpr std::uint32_t kFirst = Format::kDType == DType::kE5M2
                                         ? std::bit_cast<std::uint32_t>(kSaturatedFromE5M2)
                                         : std::bit_cast<std::uint32_t>(kSaturatedAboveE4M3) + 1u;
    const VI code = Encode<Format>(scaled);
    const VI magnitude = Magnitude(scaled);
    // −1 where magnitude >= first, +1 back where it is a NaN.
    saturated = hn::Add(saturated, hn::VecFromMask(I32(), AtLeast(magnitude, kFirst)));
    saturated = hn::Sub(saturated, hn::VecFromMask(I32(), hn::Gt(magnitude, Const(0x7F800000u))));
    const VI low = hn::And(code, Const(0x7Fu));
    zero_codes = hn::Add(zero_codes, hn::VecFromMask(I32(), hn::Eq(low, hn::Zero(I32()))));
    return code;
  }
};

// Largest and smallest magnitude of a run, which say whether anything in it needs counting.
struct Range {
  VI largest, smallest;
  HWY_INLINE Range() {
    largest = hn::Zero(I32());
    smallest = Const(0x7FFFFFFFu);
  }
  HWY_INLINE void Add(VF x) {
    const VI magnitude = Magnitude(x);
    largest = hn::Max(largest, magnitude);
    smallest = hn::Min(smallest, magnitude);
  }
  HWY_INLINE std::uint32_t Largest() const {
    return static_cast<std::uint32_t>(hn::GetLane(hn::MaxOfLanes(I32(), largest)));
  }
  HWY_INLINE std::uint32_t Smallest() const {
    return static_cast<std::uint32_t>(hn::GetLane(hn::MinOfLanes(I32(), smallest)));
  }
  HWY_INLINE bool HasZero() const {
    return !hn::AllFalse(I32(), hn::Eq(smallest, hn::Zero(I32())));
  }
};

template <class T>
HWY_INLINE void ScanRowLoop(const T* x, std::int64_t n, ScanCounts* counts) {
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(F32()));
  const std::int64_t whole = n / lanes * lanes;
  Scan scan;
  for (std::int64_t i = 0; i < whole; i += lanes) {
    scan.Add(Load(x + i));
  }
  std::uint32_t amax_bits =
      static_cast<std::uint32_t>(hn::GetLane(hn::MaxOfLanes(I32(), scan.amax)));
  counts->nonfinite += Hits(scan.nonfinite);
  counts->zeros += Hits(scan.zeros);
  for (std::int64_t i = whole; i < n; ++i) {
    const float value = Scalar(x[i]);
    const std::uint32_t magnitude = std::bit_cast<std::uint32_t>(value) & 0x7FFFFFFFu;
    amax_bits = std::max(amax_bits, FiniteMagnitudeBits(value));
    counts->nonfinite += magnitude >= 0x7F800000u ? 1u : 0u;
    counts->zeros += magnitude == 0 ? 1u : 0u;
  }
  counts->amax_bits = std::max(counts->amax_bits, amax_bits);
}

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

std::uint64_t CountZeroCodes(const std::uint8_t* q, std::int64_t n) {
  std::uint32_t zeros = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    zeros += (q[i] & 0x7F) == 0 ? 1u : 0u;
  }
  return zeros;
}

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
      ScanCounts scan;
      ScanRowLoop(x + begin, row.tile, &scan);
      amax_bits = scan.amax_bits;
      counts->scan.nonfinite += scan.nonfinite;
      counts->scan.zeros += scan.zeros;
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
      ScanCounts scan;
      ScanRowLoop(x + begin, row.tile, &scan);
      amax_bits = scan.amax_bits;
      counts->scan.nonfinite += scan.nonfinite;
      counts->scan.zeros += scan.zeros;
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

#undef OCTAVO_PAIRS
}  // namespace HWY_NAMESPACE
}  // namespace octavo::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace octavo::cpu {
HWY_EXPORT(ScanMatrixImpl);
HWY_EXPORT(MaxColumnsImpl);
HWY_EXPORT(EncodeRowImpl);
HWY_EXPORT(EncodeTameImpl);
HWY_EXPORT(QuantizeRowTilesImpl);
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

void QuantizeRowTiles(const RowTiles& row, RowTileCounts* counts) {
  OCTAVO_CHECK(row.tile == 32 || row.tile == 128, "tiles are 32 or 128 wide, tile = %lld",
               static_cast<long long>(row.tile));
  OCTAVO_CHECK(row.cols % row.tile == 0, "cols = %lld must be a multiple of the tile %lld",
               static_cast<long long>(row.cols), static_cast<long long>(row.tile));
  OCTAVO_CHECK(row.x_dtype == DType::kF32 || row.x_dtype == DType::kBF16);
  HWY_DYNAMIC_DISPATCH(QuantizeRowTilesImpl)(row, counts);
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
