// The two FP8 formats as raw 8-bit codes: decoding is exact, encoding rounds to nearest even and
// saturates (NUMERICS 1).
//
//   E4M3  S.EEEE.MMM   bias 7    max 448    no infinity, NaN = S.1111.111
//   E5M2  S.EEEEE.MM   bias 15   max 57344  infinity S.11111.00, NaN above it
//
// Codes of one sign are ordered like the magnitudes they stand for, in steps of one: the magnitude
// code (code & 0x7F) plus one is the next larger number. Rounding, the scaling-aware transpose and
// "one code apart" in tests all rest on that.
//
// One definition serves static_assert, the CPU's vector loops (branch-free, so that compilers
// vectorise it) and CUDA device code; the hardware's cvt.rn.satfinite gives the same codes. NaN
// becomes 0x7F in both formats, as in hardware and in cuda_fp8.h's host functions.
#pragma once

#include <bit>
#include <cstdint>

#include "kernels/formats/host_device.h"
#include "kernels/tensor.h"

namespace octavo {

// Constants of a format with `kExponentBits` and `kMantissaBits`; kMax is the largest finite
// number.
struct E4M3 {
  static constexpr DType kDType = DType::kE4M3;
  static constexpr int kMantissaBits = 3;
  static constexpr int kBias = 7;
  static constexpr float kMax = 448.0f;
  static constexpr std::uint8_t kMaxCode = 0x7E;
  static constexpr std::uint8_t kFirstNonFiniteCode = 0x7F;
};
struct E5M2 {
  static constexpr DType kDType = DType::kE5M2;
  static constexpr int kMantissaBits = 2;
  static constexpr int kBias = 15;
  static constexpr float kMax = 57344.0f;
  static constexpr std::uint8_t kMaxCode = 0x7B;
  static constexpr std::uint8_t kFirstNonFiniteCode = 0x7C;
};

inline constexpr std::uint8_t kFp8Nan = 0x7F;

// Nearest-even, saturating to ±kMax (infinities too); NaN becomes kFp8Nan. The sign of zero stays.
// The code as a 32-bit number, which vector loops count and compare without narrowing first.
template <class Format>
OCTAVO_HD constexpr OCTAVO_INLINE std::uint32_t Fp8EncodeWide(float value) {
  constexpr int kDropped = 23 - Format::kMantissaBits;
  constexpr std::uint32_t kMaxBits = std::bit_cast<std::uint32_t>(Format::kMax);
  // Smallest normal number 2^(1-bias), and the FP32 number whose last place is the format's
  // smallest subnormal 2^(1-bias-mantissa): adding it rounds to that place, ties to even, and
  // leaves the code in the low bits.
  constexpr std::uint32_t kMinNormalBits = static_cast<std::uint32_t>(127 + 1 - Format::kBias)
                                           << 23;
  constexpr std::uint32_t kMagicBits =
      static_cast<std::uint32_t>(127 + 1 - Format::kBias - Format::kMantissaBits + 23) << 23;
  // Difference of the exponent biases, in units of the code's last place.
  constexpr std::uint32_t kRebias = static_cast<std::uint32_t>(127 - Format::kBias)
                                    << Format::kMantissaBits;

  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t magnitude = bits & 0x7FFFFFFFu;
  const std::uint32_t clamped = magnitude < kMaxBits ? magnitude : kMaxBits;
  const std::uint32_t half = (1u << (kDropped - 1)) - 1u;
  const std::uint32_t normal =
      ((clamped + half + ((clamped >> kDropped) & 1u)) >> kDropped) - kRebias;
  const std::uint32_t subnormal = std::bit_cast<std::uint32_t>(std::bit_cast<float>(clamped) +
                                                               std::bit_cast<float>(kMagicBits)) -
                                  kMagicBits;
  const std::uint32_t code =
      (clamped < kMinNormalBits ? subnormal : normal) | ((bits >> 24) & 0x80u);
  return magnitude > 0x7F800000u ? std::uint32_t{kFp8Nan} : code;
}

template <class Format>
OCTAVO_HD constexpr OCTAVO_INLINE std::uint8_t Fp8Encode(float value) {
  return static_cast<std::uint8_t>(Fp8EncodeWide<Format>(value));
}

// Exact.
template <class Format>
OCTAVO_HD constexpr OCTAVO_INLINE float Fp8Decode(std::uint8_t code) {
  constexpr int kShift = 23 - Format::kMantissaBits;
  // As FP32 bits the code is the number times 2^(bias-127), subnormals included; the product below
  // is exact because every FP8 number is a normal FP32 number.
  constexpr float kUnbias =
      std::bit_cast<float>(static_cast<std::uint32_t>(127 + 127 - Format::kBias) << 23);
  const std::uint32_t magnitude = code & 0x7Fu;
  // Device code may flush FP32 subnormals when asked to, so subnormal codes are built as integers.
  constexpr float kSmallest = std::bit_cast<float>(
      static_cast<std::uint32_t>(127 + 1 - Format::kBias - Format::kMantissaBits) << 23);
  const float subnormal = static_cast<float>(static_cast<std::int32_t>(magnitude)) * kSmallest;
  const float normal = std::bit_cast<float>(magnitude << kShift) * kUnbias;
  const float finite = (magnitude >> Format::kMantissaBits) == 0 ? subnormal : normal;
  std::uint32_t bits = std::bit_cast<std::uint32_t>(finite);
  bits = magnitude >= Format::kFirstNonFiniteCode
             ? (Format::kDType == DType::kE5M2 && magnitude == 0x7Cu ? 0x7F800000u : 0x7FC00000u)
             : bits;
  return std::bit_cast<float>(bits | (static_cast<std::uint32_t>(code & 0x80u) << 24));
}

OCTAVO_HD constexpr float E4M3Decode(std::uint8_t code) { return Fp8Decode<E4M3>(code); }
OCTAVO_HD constexpr float E5M2Decode(std::uint8_t code) { return Fp8Decode<E5M2>(code); }
OCTAVO_HD constexpr std::uint8_t E4M3Encode(float value) { return Fp8Encode<E4M3>(value); }
OCTAVO_HD constexpr std::uint8_t E5M2Encode(float value) { return Fp8Encode<E5M2>(value); }

// By run-time format; REQUIRES: IsFp8(format).
OCTAVO_HD constexpr float Fp8Decode(DType format, std::uint8_t code) {
  return format == DType::kE5M2 ? E5M2Decode(code) : E4M3Decode(code);
}
OCTAVO_HD constexpr std::uint8_t Fp8Encode(DType format, float value) {
  return format == DType::kE5M2 ? E5M2Encode(value) : E4M3Encode(value);
}
OCTAVO_HD constexpr float Fp8Max(DType format) {
  return format == DType::kE5M2 ? E5M2::kMax : E4M3::kMax;
}

static_assert(E4M3Decode(0x7E) == 448.0f && E4M3Decode(0x08) == 0x1p-6f);
static_assert(E4M3Decode(0x01) == 0x1p-9f && E4M3Decode(0x38) == 1.0f && E4M3Decode(0xB8) == -1.0f);
static_assert(E4M3Decode(0x7F) != E4M3Decode(0x7F), "NaN");
static_assert(E5M2Decode(0x7B) == 57344.0f && E5M2Decode(0x04) == 0x1p-14f);
static_assert(E5M2Decode(0x01) == 0x1p-16f && E5M2Decode(0x3C) == 1.0f);
static_assert(E4M3Encode(1e30f) == 0x7E && E4M3Encode(-1e30f) == 0xFE, "saturates");
static_assert(E5M2Encode(1e30f) == 0x7B);
static_assert(E4M3Encode(0x1p-10f) == 0x00, "half of the smallest subnormal ties to zero");
static_assert(E4M3Encode(0x1.8p-9f) == 0x02, "a tie goes to even");
static_assert(E4M3Encode(0x1.FFp-7f) == 0x08, "rounding up may leave the subnormals");
static_assert(E4M3Encode(-0.0f) == 0x80);

}  // namespace octavo
