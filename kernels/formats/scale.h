// quant_scale and dequant_scale from amax (NUMERICS 2, 7), the counting thresholds (NUMERICS 9) and
// the exponent arithmetic of the scaling-aware transpose (NUMERICS 6).
//
//   quant_scale   Q  multiplies before the cast:  q = cast(x · Q)
//   dequant_scale D = 1/Q multiplies after:       x̂ = q · D      (what is stored)
//
// Comparisons with tiny numbers are made on bits, so that results do not depend on a device's
// flush-to-zero mode.
#pragma once

#include <bit>
#include <cstdint>

#include "kernels/formats/fp8.h"
#include "kernels/formats/host_device.h"
#include "kernels/stats.h"
#include "kernels/tensor.h"

namespace octavo {

// Q never exceeds this and D is never below its reciprocal (never subnormal).
inline constexpr float kQuantScaleMax = 0x1p126f;
inline constexpr float kDequantScaleMin = 0x1p-126f;

struct ScalePair {
  float quant_scale;
  float dequant_scale;
};

// |x| as ordered bits; a non-finite x counts as zero. max over these is amax over finite elements.
OCTAVO_HD constexpr OCTAVO_INLINE std::uint32_t FiniteMagnitudeBits(float x) {
  const std::uint32_t magnitude = std::bit_cast<std::uint32_t>(x) & 0x7FFFFFFFu;
  return magnitude < 0x7F800000u ? magnitude : 0u;
}

OCTAVO_HD constexpr OCTAVO_INLINE float ClearMantissa(float positive) {
  return std::bit_cast<float>(std::bit_cast<std::uint32_t>(positive) & 0x7F800000u);
}

// 2^exponent for -126 <= exponent <= 127.
OCTAVO_HD constexpr OCTAVO_INLINE float PowerOfTwo(int exponent) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(exponent + 127) << 23);
}

// NUMERICS 2. `format_max` is 448 or 57344; `margin` 0..8 (per-tensor recipes; 0 elsewhere);
// `min_dequant_scale` > 0 keeps Q at or below its reciprocal (NUMERICS 3), 0 is off.
// amax must be finite and not negative (the amax of finite elements is).
// Q below 2^-126 could only come from a margin of 7 or 8 with amax near the end of FP32; it is
// raised to 2^-126, which still cannot saturate.
OCTAVO_HD constexpr OCTAVO_INLINE float QuantScaleFromAmax(float amax, float format_max, bool pow2,
                                                           int margin,
                                                           float min_dequant_scale = 0) {
  const std::uint32_t amax_bits = std::bit_cast<std::uint32_t>(amax) & 0x7FFFFFFFu;
  if (amax_bits == 0) {
    return pow2 ? kQuantScaleMax : 1.0f;
  }
  const float reach = format_max * PowerOfTwo(-margin);
  // reach/amax >= 2^126 exactly when amax <= reach·2^-126; decided here so that nothing overflows.
  const bool clamped = amax_bits <= std::bit_cast<std::uint32_t>(reach) - (126u << 23);
  float quant_scale = clamped ? kQuantScaleMax : reach / amax;
  if (min_dequant_scale > 0) {
    const float limit = 1.0f / min_dequant_scale;
    quant_scale = quant_scale < limit ? quant_scale : limit;
  }
  if (std::bit_cast<std::uint32_t>(quant_scale) < 0x00800000u) {
    return kDequantScaleMin;
  }
  return pow2 ? ClearMantissa(quant_scale) : quant_scale;
}

// D of a Q made by QuantScaleFromAmax: IEEE 1/Q, exact for powers of two.
OCTAVO_HD constexpr OCTAVO_INLINE float DequantScaleFromQuantScale(float quant_scale) {
  return 1.0f / quant_scale;
}

OCTAVO_HD constexpr OCTAVO_INLINE ScalePair ScaleFromAmaxPair(float amax, float format_max,
                                                              bool pow2, int margin,
                                                              float min_dequant_scale = 0) {
  const float quant_scale = QuantScaleFromAmax(amax, format_max, pow2, margin, min_dequant_scale);
  return ScalePair{quant_scale, DequantScaleFromQuantScale(quant_scale)};
}

// E8M0 code of an MX block (NUMERICS 7): exponent of amax/M rounded up to a power of two, clamped
// to 1..254; a zero block has code 1. Both formats' maxima are 1.75 · 2^e, so the quotient's
// ceiling is decided exactly by comparing amax's mantissa with 1.75's.
OCTAVO_HD constexpr OCTAVO_INLINE std::uint8_t MxE8M0FromAmax(float amax, float format_max) {
  const std::uint32_t amax_bits = std::bit_cast<std::uint32_t>(amax) & 0x7FFFFFFFu;
  const std::uint32_t max_bits = std::bit_cast<std::uint32_t>(format_max);
  const int exponent = static_cast<int>(amax_bits >> 23) - static_cast<int>(max_bits >> 23) +
                       ((amax_bits & 0x7FFFFFu) > (max_bits & 0x7FFFFFu) ? 1 : 0);
  const int code = exponent + 127;
  return static_cast<std::uint8_t>(code < 1 ? 1 : (code > 254 ? 254 : code));
}

OCTAVO_HD constexpr OCTAVO_INLINE ScalePair MxScaleFromAmax(float amax, float format_max) {
  const int code = MxE8M0FromAmax(amax, format_max);
  // A code from a finite amax is at most 247, so 2^(127-code) is normal.
  return ScalePair{PowerOfTwo(127 - code), PowerOfTwo(code - 127)};
}

// NUMERICS 9 on the product x·Q as FP32; infinity counts, NaN does not.
OCTAVO_HD constexpr OCTAVO_INLINE bool IsSaturated(DType format, float scaled) {
  const std::uint32_t magnitude = std::bit_cast<std::uint32_t>(scaled) & 0x7FFFFFFFu;
  const std::uint32_t first = format == DType::kE5M2
                                  ? std::bit_cast<std::uint32_t>(kSaturatedFromE5M2)
                                  : std::bit_cast<std::uint32_t>(kSaturatedAboveE4M3) + 1u;
  // One comparison (magnitudes below `first` wrap around), so that loops need no branch.
  return magnitude - first <= 0x7F800000u - first;
}

// E4M3 code of decode(code) · 2^-k for k >= 0, nearest even, NaN kept (NUMERICS 6). From k = 19 on
// every finite code becomes zero.
OCTAVO_HD constexpr OCTAVO_INLINE std::uint8_t RescaleCode(std::uint8_t code, int k) {
  const int sign = code & 0x80;
  const int magnitude = code & 0x7F;
  if (magnitude == kFp8Nan) {
    return code;
  }
  const int exponent = magnitude >> 3;
  const int mantissa = magnitude & 7;
  if (exponent - k >= 1) {
    return static_cast<std::uint8_t>(sign | (magnitude - (k << 3)));
  }
  const int significand = exponent > 0 ? 8 + mantissa : mantissa;
  const int shift = exponent > 0 ? k - (exponent - 1) : k;
  int result = 0;
  if (shift == 0) {
    result = significand;
  } else if (shift <= 10) {
    result = (significand + (1 << (shift - 1)) - 1 + ((significand >> shift) & 1)) >> shift;
  }
  return static_cast<std::uint8_t>(sign | result);
}

static_assert(QuantScaleFromAmax(448.0f, 448.0f, false, 0) == 1.0f);
static_assert(QuantScaleFromAmax(0.0f, 448.0f, false, 0) == 1.0f);
static_assert(QuantScaleFromAmax(0.0f, 448.0f, true, 0) == kQuantScaleMax);
static_assert(QuantScaleFromAmax(0x1p-149f, 448.0f, false, 0) == kQuantScaleMax);
static_assert(QuantScaleFromAmax(448.1f, 448.0f, true, 0) == 0.5f);
static_assert(QuantScaleFromAmax(448.0f, 448.0f, false, 2) == 0.25f);
static_assert(QuantScaleFromAmax(1.0f, 448.0f, false, 0, 0.25f) == 4.0f);
static_assert(QuantScaleFromAmax(1.0f, 448.0f, true, 0, 0.3f) == 2.0f);
static_assert(MxE8M0FromAmax(448.0f, 448.0f) == 127);
static_assert(MxE8M0FromAmax(0x1.C00002p8f, 448.0f) == 128, "rounded up, never down");
static_assert(MxE8M0FromAmax(0.0f, 448.0f) == 1);
static_assert(!IsSaturated(DType::kE4M3, 464.0f) && IsSaturated(DType::kE4M3, 464.1f));
static_assert(IsSaturated(DType::kE5M2, -61440.0f) && !IsSaturated(DType::kE5M2, 61439.0f));
static_assert(RescaleCode(0x7F, 5) == 0x7F && RescaleCode(0x7E, 19) == 0);
static_assert(RescaleCode(0x08, 1) == 0x04 && RescaleCode(0x09, 1) == 0x04, "a tie goes to even");

}  // namespace octavo
