// BF16 as raw 16-bit codes: the upper half of an IEEE FP32 number.
#pragma once

#include <bit>
#include <cstdint>

#include "kernels/formats/host_device.h"

namespace octavo {

// Exact.
OCTAVO_HD constexpr OCTAVO_INLINE float FloatFromBf16(std::uint16_t code) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(code) << 16);
}

// Round to nearest, ties to even. NaN becomes 0x7FFF, as the hardware's cvt.rn.bf16.f32 does
// (adding the rounding constant would turn some NaNs into infinity or zero). Overflow goes to
// infinity.
OCTAVO_HD constexpr OCTAVO_INLINE std::uint16_t Bf16FromFloat(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  const bool nan = (bits & 0x7FFFFFFFu) > 0x7F800000u;
  return static_cast<std::uint16_t>(nan ? 0x7FFFu : rounded);
}

static_assert(Bf16FromFloat(1.0f) == 0x3F80);
static_assert(Bf16FromFloat(std::bit_cast<float>(0x3F808000u)) == 0x3F80, "a tie goes to even");
static_assert(Bf16FromFloat(std::bit_cast<float>(0x3F818000u)) == 0x3F82, "a tie goes to even");
static_assert(Bf16FromFloat(std::bit_cast<float>(0x7F7FFFFFu)) == 0x7F80, "overflow is infinity");
static_assert(Bf16FromFloat(std::bit_cast<float>(0xFFFFFFFFu)) == 0x7FFF, "NaN stays NaN");
static_assert(FloatFromBf16(0xC040) == -3.0f);

}  // namespace octavo
