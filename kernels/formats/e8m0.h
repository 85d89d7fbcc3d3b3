// E8M0: an exponent alone, 2^(code-127), 0xFF is NaN. Dequant_scales of MX blocks, and of
// power-of-two recipes on the wire.
#pragma once

#include <bit>
#include <cstdint>

#include "kernels/formats/host_device.h"

namespace octavo {

inline constexpr std::uint8_t kE8M0Nan = 0xFF;

// Exact. Code 0 is 2^-127, a subnormal FP32 number.
OCTAVO_HD constexpr OCTAVO_INLINE float FloatFromE8M0(std::uint8_t code) {
  const std::uint32_t bits = code == 0          ? 0x00400000u
                             : code == kE8M0Nan ? 0x7FC00000u
                                                : static_cast<std::uint32_t>(code) << 23;
  return std::bit_cast<float>(bits);
}

// Exact for powers of two from 2^-126 to 2^127, which is all that dequant_scales of power-of-two
// recipes can be; anything else gives kE8M0Nan, so that a broken scale is seen on the other side.
OCTAVO_HD constexpr OCTAVO_INLINE std::uint8_t E8M0FromPowerOfTwo(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  const bool power = (bits & 0x807FFFFFu) == 0 && bits != 0 && bits != 0x7F800000u;
  return power ? static_cast<std::uint8_t>(bits >> 23) : kE8M0Nan;
}

static_assert(FloatFromE8M0(127) == 1.0f && FloatFromE8M0(1) == 0x1p-126f);
static_assert(FloatFromE8M0(0) == 0x1p-127f && FloatFromE8M0(254) == 0x1p127f);
static_assert(E8M0FromPowerOfTwo(0x1p-126f) == 1 && E8M0FromPowerOfTwo(8.0f) == 130);
static_assert(E8M0FromPowerOfTwo(3.0f) == kE8M0Nan && E8M0FromPowerOfTwo(0.0f) == kE8M0Nan);

}  // namespace octavo
