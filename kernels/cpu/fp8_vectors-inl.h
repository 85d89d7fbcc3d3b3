// Vector pieces of the FP8 loops: casts of one register of FP32 or BF16 elements, loads, stores and
// counters. Included by fp8_rows.cc and fp8_tiles.cc once per instruction set (Highway's
// foreach_target), hence the guard that toggles instead of #pragma once.
#if defined(OCTAVO_KERNELS_CPU_FP8_VECTORS_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifndef OCTAVO_KERNELS_CPU_FP8_VECTORS_INL_H
#define OCTAVO_KERNELS_CPU_FP8_VECTORS_INL_H
#else
#undef OCTAVO_KERNELS_CPU_FP8_VECTORS_INL_H
#endif

#include <algorithm>
#include <bit>
#include <cstdint>

#include "hwy/highway.h"
#include "kernels/cpu/fp8_rows.h"
#include "kernels/formats/bf16.h"
#include "kernels/formats/fp8.h"
#include "kernels/formats/scale.h"

#undef OCTAVO_PAIRS

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
#define OCTAVO_PAIRS 1  // two BF16 elements a lane; undefined again before the next target

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

inline std::uint64_t CountZeroCodes(const std::uint8_t* q, std::int64_t n) {
  std::uint32_t zeros = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    zeros += (q[i] & 0x7F) == 0 ? 1u : 0u;
  }
  return zeros;
}

}  // namespace HWY_NAMESPACE
}  // namespace octavo::cpu
HWY_AFTER_NAMESPACE();
#endif  // OCTAVO_KERNELS_CPU_FP8_VECTORS_INL_H
