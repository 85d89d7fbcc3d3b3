// Which sample is trained when: a pure function of (seed, position), nothing stored, nothing
// shuffled.
//
//   sample = SampleAt({.seed = 1, .samples = 31250}, step * global_batch + sequence);
//
// Position p lies in epoch p / samples; inside an epoch every sample comes once, in an order that
// is a keyed bijection of [0, samples): a four-round Feistel network over the next even power of
// two, walked until it lands inside (fewer than four tries on average). Ranks do not appear: a job
// resumed with another number of ranks goes on with the same samples, in the same order.
#pragma once

#include <cstdint>

namespace octavo {

struct OrderKey {
  std::uint64_t seed = 0;
  std::int64_t samples = 0;  // >= 1
};

// Bijection of [0, key.samples) for each (seed, epoch). REQUIRES: 0 <= index < key.samples.
std::int64_t PermuteIndex(const OrderKey& key, std::int64_t epoch, std::int64_t index);

// The sample at `position` >= 0, counted over epochs.
std::int64_t SampleAt(const OrderKey& key, std::int64_t position);

}  // namespace octavo
