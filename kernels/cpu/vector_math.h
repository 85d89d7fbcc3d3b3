// Elementary functions that the compiler can vectorise, and accumulators with a fixed lane order.
//
// The CPU backend is the specification, so the same input must give the same bits on every machine,
// whatever its vector width. Two rules give that, together with -ffp-contract=off:
//  * Element loops are plain scalar code without library calls; OCTAVO_MULTIVERSION compiles them
//    once per instruction set and the loader picks one. Each element sees the same operations.
//  * Reductions add element i to lane i % 16 and the 16 lanes in a fixed tree (Lanes::Total), never
//    in an order that the compiler chose.
// libm's expf is avoided in loops: it neither vectorises nor gives equal bits with and without FMA.
#pragma once

#include <bit>
#include <cstdint>

// Clones of a function per x86-64 level. Sanitizers instrument the resolvers, which run before
// their runtimes are up, and clang 14 lacks the "arch=" form: both get the plain function (same
// bits).
#if defined(__GNUC__) && !defined(__clang__) && defined(__x86_64__) && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define OCTAVO_MULTIVERSION \
  __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define OCTAVO_MULTIVERSION
#endif

namespace octavo::cpu {

// e^x in FP32, at most 1.2 ulp from the exact value (tests/unit/kernels/vector_math_test.cc walks
// all binades), correct limits at both ends (0, subnormals, infinity), NaN stays NaN. x = n·ln2 +
// r, |r| <= ln2/2; e^r by a degree-6 polynomial (Cephes' coefficients); 2^n in two factors, so that
// neither overflow nor subnormal results need a branch.
[[gnu::always_inline]] inline float ExpF32(float x) {
  x = x > 89.0f ? 89.0f : x;             // above: infinity anyway
  x = x < -105.0f ? -105.0f : x;         // below: zero anyway
  constexpr float kRound = 12582912.0f;  // 1.5·2^23: adding it rounds to an integer
  const float shifted = x * 1.44269504088896341f + kRound;
  const std::uint32_t n =
      std::bit_cast<std::uint32_t>(shifted) - std::bit_cast<std::uint32_t>(kRound);
  const float whole = shifted - kRound;
  float r = x - whole * 0.693359375f;  // ln2 in two parts; the first product is exact
  r = r - whole * -2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  const float y = p * (r * r) + r + 1.0f;
  const std::uint32_t half = static_cast<std::uint32_t>(static_cast<std::int32_t>(n) >> 1);
  const std::uint32_t rest = n - half;
  return y * std::bit_cast<float>((half + 127u) << 23) * std::bit_cast<float>((rest + 127u) << 23);
}

// 1 / (1 + e^-x). Saturates to 0 and 1; NaN stays NaN.
[[gnu::always_inline]] inline float SigmoidF32(float x) { return 1.0f / (1.0f + ExpF32(-x)); }

// Sixteen running sums; element i of a row belongs to lane i % 16.
struct alignas(64) Lanes {
  static constexpr std::int64_t kCount = 16;
  float lane[kCount] = {};

  // ((l0+l8) + (l4+l12)) + ...: halves are added until one is left.
  float Total() const {
    float sum[kCount];
    for (int i = 0; i < kCount; ++i) {
      sum[i] = lane[i];
    }
    for (int width = kCount / 2; width > 0; width /= 2) {
      for (int i = 0; i < width; ++i) {
        sum[i] += sum[i + width];
      }
    }
    return sum[0];
  }
};

}  // namespace octavo::cpu
