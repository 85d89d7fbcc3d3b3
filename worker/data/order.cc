#include "worker/data/order.h"

#include <bit>

#include "base/check.h"

namespace octavo {
namespace {

constexpr int kRounds = 4;

// SplitMix64's finaliser: every input bit reaches every output bit.
std::uint64_t Mix(std::uint64_t x) {
  x += 0x9E3779B97F4A7C15ull;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

}  // namespace

std::int64_t PermuteIndex(const OrderKey& key, std::int64_t epoch, std::int64_t index) {
  OCTAVO_CHECK(key.samples >= 1 && index >= 0 && index < key.samples && epoch >= 0);
  const auto samples = static_cast<std::uint64_t>(key.samples);
  const int bits = std::bit_width(samples - 1);
  const int half = bits < 2 ? 1 : (bits + 1) / 2;
  const std::uint64_t mask = (1ull << half) - 1;
  const std::uint64_t base = Mix(key.seed ^ Mix(static_cast<std::uint64_t>(epoch)));
  auto value = static_cast<std::uint64_t>(index);
  do {
    std::uint64_t left = value >> half, right = value & mask;
    for (int round = 0; round < kRounds; ++round) {
      const std::uint64_t next =
          left ^ (Mix(base + right * kRounds + static_cast<std::uint64_t>(round)) & mask);
      left = right;
      right = next;
    }
    value = left << half | right;
  } while (value >= samples);  // a bijection of the power of two: walking its cycle ends inside
  return static_cast<std::int64_t>(value);
}

std::int64_t SampleAt(const OrderKey& key, std::int64_t position) {
  OCTAVO_CHECK(position >= 0);
  return PermuteIndex(key, position / key.samples, position % key.samples);
}

}  // namespace octavo
