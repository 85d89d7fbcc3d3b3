// Slots of the per-rank statistics buffer (NUMERICS 9).
//
// Every quantising kernel adds what it saw to the slot of its (layer, op, tensor, local expert) in
// the pass that casts; the buffer is copied to the host once per step. A slot is filled by max/min
// and integer addition only, so the result does not depend on the order of threads. Slots are
// cleared by StatSlotInit / ops.stats_reset before a step.
#pragma once

#include <cstdint>

namespace octavo {

struct alignas(64) StatSlot {
  float amax = 0;                       // max |x| over finite elements
  float dequant_scale_min = 0;          // over groups with amax > 0; 0 while none was seen
  float dequant_scale_max = 0;          // likewise
  float reserved = 0;                   // keeps the counters 8-byte aligned
  std::uint64_t elements = 0;           // real rows only, padding takes no part
  std::uint64_t nonfinite = 0;          // counted before the cast, saturation would hide them
  std::uint64_t saturated = 0;          // |x·Q| > 464 (E4M3), >= 61440 (E5M2)
  std::uint64_t nonzero = 0;            // x != 0
  std::uint64_t flushed = 0;            // x != 0 and q == 0
  std::uint64_t transpose_flushed = 0;  // code != 0 before, 0 after the scaling-aware transpose
};
static_assert(sizeof(StatSlot) == 64, "the host reads an array of 64-byte slots");

// Saturation thresholds of NUMERICS 9 on |x·Q|.
inline constexpr float kSaturatedAboveE4M3 = 464.0f;     // strictly above
inline constexpr float kSaturatedFromE5M2 = 61440.0f;    // from here on

// Energies for SQNR = 10·log10(signal / noise), sampled.
struct SqnrSlot {
  double signal = 0;  // Σ x²
  double noise = 0;   // Σ (x − x̂)²
};
static_assert(sizeof(SqnrSlot) == 16);

}  // namespace octavo
