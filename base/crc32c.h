// CRC-32C (Castagnoli), the checksum of checkpoint shards and records.
//
//   std::uint32_t crc = Crc32c(bytes, size);
//   crc = Crc32cExtend(crc, more, more_size);   // same as the checksum of the concatenation
//
// Polynomial 0x1EDC6F41 reflected (0x82F63B78), initial and final XOR 0xFFFFFFFF (RFC 3720, B.4).
// Uses the SSE4.2 instruction when the CPU has it; the table version is the reference twin.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace octavo {

namespace crc32c_internal {

constexpr std::array<std::uint32_t, 256> MakeTable() {
  std::array<std::uint32_t, 256> table{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) {
      crc = (crc & 1) != 0 ? (crc >> 1) ^ 0x82F63B78u : crc >> 1;
    }
    table[byte] = crc;
  }
  return table;
}
inline constexpr std::array<std::uint32_t, 256> kTable = MakeTable();
static_assert(kTable[1] == 0xF26B8303u, "first entry of the published CRC-32C table");

// Both take and return the inverted (running) value.
inline std::uint32_t ExtendSoftware(std::uint32_t running, const void* data, std::size_t size) {
  const auto* bytes = static_cast<const unsigned char*>(data);
  for (std::size_t i = 0; i < size; ++i) {
    running = kTable[(running ^ bytes[i]) & 0xFF] ^ (running >> 8);
  }
  return running;
}

#if defined(__x86_64__)
[[gnu::target("sse4.2")]] inline std::uint32_t ExtendHardware(std::uint32_t running,
                                                              const void* data, std::size_t size) {
  const auto* bytes = static_cast<const unsigned char*>(data);
  std::uint64_t wide = running;
  while (size >= 8) {
    std::uint64_t word;
    std::memcpy(&word, bytes, 8);
    wide = _mm_crc32_u64(wide, word);
    bytes += 8;
    size -= 8;
  }
  auto narrow = static_cast<std::uint32_t>(wide);
  while (size > 0) {
    narrow = _mm_crc32_u8(narrow, *bytes);
    ++bytes;
    --size;
  }
  return narrow;
}
inline bool HasHardware() { return __builtin_cpu_supports("sse4.2") != 0; }
#else
inline std::uint32_t ExtendHardware(std::uint32_t running, const void* data, std::size_t size) {
  return ExtendSoftware(running, data, size);
}
inline bool HasHardware() { return false; }
#endif

}  // namespace crc32c_internal

// The checksum of A followed by B, given crc = Crc32c(A).
inline std::uint32_t Crc32cExtend(std::uint32_t crc, const void* data, std::size_t size) {
  static const bool hardware = crc32c_internal::HasHardware();
  const std::uint32_t running = ~crc;
  return ~(hardware ? crc32c_internal::ExtendHardware(running, data, size)
                    : crc32c_internal::ExtendSoftware(running, data, size));
}

inline std::uint32_t Crc32c(const void* data, std::size_t size) {
  return Crc32cExtend(0, data, size);
}

}  // namespace octavo
