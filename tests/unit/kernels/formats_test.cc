// The formats against an exhaustive nearest-even search in FP64, against NVIDIA's host functions,
// and the vector loops against the scalar definitions under every instruction set of this machine.
#include <gtest/gtest.h>

#include <bit>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "kernels/cpu/byte_tiles.h"
#include "kernels/cpu/fp8_rows.h"
#include "kernels/formats/bf16.h"
#include "kernels/formats/e8m0.h"
#include "kernels/formats/fp8.h"
#include "kernels/formats/scale.h"
#include "tests/unit/kernels/targets.h"

#if __has_include(<cuda_fp8.h>)
#include <cuda_fp8.h>
#define OCTAVO_HAVE_CUDA_FP8 1
#endif

namespace octavo {
namespace {

constexpr DType kFormats[] = {DType::kE4M3, DType::kE5M2};

// The value of a finite magnitude code from the format's definition, in FP64.
double DefinedValue(DType format, int code) {
  const int mantissa_bits = format == DType::kE4M3 ? 3 : 2;
  const int bias = format == DType::kE4M3 ? 7 : 15;
  const int exponent = code >> mantissa_bits;
  const int mantissa = code & ((1 << mantissa_bits) - 1);
  const double fraction = std::ldexp(mantissa, -mantissa_bits);
  return exponent == 0 ? std::ldexp(fraction, 1 - bias) : std::ldexp(1 + fraction, exponent - bias);
}

int MaxCode(DType format) { return format == DType::kE4M3 ? 0x7E : 0x7B; }

// Nearest code by search over all magnitudes; a tie goes to the even code; saturating.
std::uint8_t NearestCode(DType format, float x) {
  if (std::isnan(x)) {
    return 0x7F;
  }
  const double magnitude = std::fabs(static_cast<double>(x));
  int best = MaxCode(format);
  // Beyond M everything saturates; FP64 distances would be equal for huge numbers.
  double best_distance = magnitude > DefinedValue(format, best) ? -1.0 : HUGE_VAL;
  for (int code = 0; code <= MaxCode(format); ++code) {
    const double distance = std::fabs(DefinedValue(format, code) - magnitude);
    if (distance < best_distance || (distance == best_distance && code % 2 == 0)) {
      best = code;
      best_distance = distance;
    }
  }
  return static_cast<std::uint8_t>(best | (std::signbit(x) ? 0x80 : 0));
}

// All BF16 numbers, and FP32 numbers within 16 steps of every code and of every midpoint.
std::vector<float> Probes(DType format) {
  std::vector<float> probes;
  for (std::uint32_t i = 0; i < 0x10000u; ++i) {
    probes.push_back(FloatFromBf16(static_cast<std::uint16_t>(i)));
  }
  for (int code = 0; code <= MaxCode(format); ++code) {
    const double here = DefinedValue(format, code);
    const double next = code < MaxCode(format) ? DefinedValue(format, code + 1) : 1.07 * here;
    for (const double center : {here, (here + next) / 2}) {
      const std::uint32_t bits = std::bit_cast<std::uint32_t>(static_cast<float>(center));
      for (std::uint32_t step = 0; step <= 32; ++step) {
        if (bits + step >= 16) {
          const float x = std::bit_cast<float>(bits + step - 16);
          probes.push_back(x);
          probes.push_back(-x);
        }
      }
    }
  }
  return probes;
}

TEST(Formats, Fp8DecodeIsTheDefinition) {
  for (const DType format : kFormats) {
    for (int code = 0; code <= MaxCode(format); ++code) {
      const auto byte = static_cast<std::uint8_t>(code);
      EXPECT_EQ(Fp8Decode(format, byte), DefinedValue(format, code));
      EXPECT_EQ(Fp8Decode(format, byte | 0x80), -DefinedValue(format, code));
    }
    EXPECT_TRUE(std::isnan(Fp8Decode(format, 0x7F)));
    EXPECT_TRUE(std::isnan(Fp8Decode(format, 0xFF)));
  }
  EXPECT_TRUE(std::signbit(E4M3Decode(0x80)));
  EXPECT_EQ(E5M2Decode(0x7C), INFINITY);
  EXPECT_EQ(E5M2Decode(0xFC), -INFINITY);
  EXPECT_TRUE(std::isnan(E5M2Decode(0x7D)));
  EXPECT_TRUE(std::isnan(E5M2Decode(0x7E)));
}

TEST(Formats, Fp8EncodeIsNearestEvenAndSaturates) {
  for (const DType format : kFormats) {
    for (const float x : Probes(format)) {
      ASSERT_EQ(Fp8Encode(format, x), NearestCode(format, x))
          << "format " << static_cast<int>(format) << " x " << x << " bits " << std::hex
          << std::bit_cast<std::uint32_t>(x);
    }
  }
}

TEST(Formats, Fp8RoundTripsEveryFiniteCode) {
  for (const DType format : kFormats) {
    for (int code = 0; code < 256; ++code) {
      const auto byte = static_cast<std::uint8_t>(code);
      if ((code & 0x7F) <= MaxCode(format)) {
        EXPECT_EQ(Fp8Encode(format, Fp8Decode(format, byte)), byte);
      }
    }
  }
}

TEST(Formats, Fp8EqualsCudaHostFunctions) {
#ifdef OCTAVO_HAVE_CUDA_FP8
  for (const DType format : kFormats) {
    const auto kind = format == DType::kE4M3 ? __NV_E4M3 : __NV_E5M2;
    for (const float x : Probes(format)) {
      ASSERT_EQ(Fp8Encode(format, x), __nv_cvt_float_to_fp8(x, __NV_SATFINITE, kind)) << x;
    }
    for (int code = 0; code < 256; ++code) {
      const auto byte = static_cast<std::uint8_t>(code);
      const __half_raw half = __nv_cvt_fp8_to_halfraw(byte, kind);
      const float want = static_cast<float>(__half(half));
      const float got = Fp8Decode(format, byte);
      EXPECT_TRUE(got == want || (std::isnan(got) && std::isnan(want))) << code;
    }
  }
#else
  GTEST_SKIP() << "cuda_fp8.h is not installed; Fp8EncodeIsNearestEvenAndSaturates covers the same "
                  "inputs with an oracle of our own";
#endif
}

TEST(Formats, Bf16IsNearestEven) {
  for (std::uint32_t i = 0; i < 0x10000u; ++i) {
    const auto code = static_cast<std::uint16_t>(i);
    const float x = FloatFromBf16(code);
    if (std::isnan(x)) {
      EXPECT_EQ(Bf16FromFloat(x), 0x7FFF);
      continue;
    }
    ASSERT_EQ(Bf16FromFloat(x), code);
    if (std::isinf(x) || (i & 0x7FFFu) == 0x7F7Fu) {
      continue;  // no finite neighbour above
    }
    // Between a code and the next the FP32 steps 0..0x10000 are divided at 0x8000.
    const std::uint16_t next = static_cast<std::uint16_t>(i + 1);
    const std::uint16_t tie = (i & 1u) != 0 ? next : code;
    ASSERT_EQ(Bf16FromFloat(std::bit_cast<float>((i << 16) | 0x7FFFu)), code);
    ASSERT_EQ(Bf16FromFloat(std::bit_cast<float>((i << 16) | 0x8000u)), tie);
    ASSERT_EQ(Bf16FromFloat(std::bit_cast<float>((i << 16) | 0x8001u)), next);
  }
  EXPECT_EQ(FloatFromBf16(Bf16FromFloat(FLT_MAX)), INFINITY);
}

TEST(Formats, E8M0IsAPowerOfTwo) {
  for (int code = 0; code < 255; ++code) {
    const float value = FloatFromE8M0(static_cast<std::uint8_t>(code));
    EXPECT_EQ(value, std::ldexp(1.0, code - 127));
    if (code > 0) {
      EXPECT_EQ(E8M0FromPowerOfTwo(value), code);
    }
  }
  EXPECT_TRUE(std::isnan(FloatFromE8M0(0xFF)));
  for (const float bad : {3.0f, 0.0f, -2.0f, INFINITY, NAN}) {
    EXPECT_EQ(E8M0FromPowerOfTwo(bad), kE8M0Nan);
  }
}

// a·Q <= M always and > M/2 unless Q met its limit, for every mantissa of FP32.
TEST(Scale, PowerOfTwoFloorHoldsForEveryMantissa) {
  for (const DType format : kFormats) {
    const double format_max = Fp8Max(format);
    for (std::uint32_t mantissa = 0; mantissa < (1u << 23); ++mantissa) {
      const float amax = std::bit_cast<float>(0x3F800000u | mantissa);
      const float q = QuantScaleFromAmax(amax, Fp8Max(format), true, 0);
      const double reached = static_cast<double>(amax) * q;
      ASSERT_TRUE((std::bit_cast<std::uint32_t>(q) & 0x7FFFFFu) == 0 && reached <= format_max &&
                  reached > format_max / 2)
          << amax;
    }
  }
}

TEST(Scale, MxExponentIsTheLeastThatDoesNotSaturate) {
  for (const DType format : kFormats) {
    const double format_max = Fp8Max(format);
    for (std::uint32_t mantissa = 0; mantissa < (1u << 23); ++mantissa) {
      const float amax = std::bit_cast<float>(0x3F800000u | mantissa);
      const double d = std::ldexp(1.0, MxE8M0FromAmax(amax, Fp8Max(format)) - 127);
      ASSERT_TRUE(amax / d <= format_max && amax / (d / 2) > format_max) << amax;
    }
  }
}

TEST(Scale, EdgesOfAmax) {
  const float smallest = std::numeric_limits<float>::denorm_min();
  EXPECT_EQ(QuantScaleFromAmax(0.0f, 448.0f, false, 0), 1.0f);
  EXPECT_EQ(QuantScaleFromAmax(-0.0f, 448.0f, false, 0), 1.0f);
  EXPECT_EQ(QuantScaleFromAmax(0.0f, 448.0f, true, 0), 0x1p126f);
  EXPECT_EQ(QuantScaleFromAmax(smallest, 448.0f, false, 0), 0x1p126f);
  EXPECT_EQ(QuantScaleFromAmax(448.0f * 0x1p-126f, 448.0f, false, 0), 0x1p126f);
  // The first amax beyond the clamp: the quotient, below 2^126.
  const float above = std::nextafter(448.0f * 0x1p-126f, 1.0f);
  EXPECT_EQ(QuantScaleFromAmax(above, 448.0f, false, 0), 448.0f / above);
  EXPECT_LT(QuantScaleFromAmax(above, 448.0f, false, 0), 0x1p126f);
  EXPECT_EQ(QuantScaleFromAmax(FLT_MAX, 448.0f, false, 0), 448.0f / FLT_MAX);
  EXPECT_EQ(MxE8M0FromAmax(smallest, 448.0f), 1);
  EXPECT_EQ(MxE8M0FromAmax(FLT_MAX, 448.0f), 247);
  // 2^-127·448 needs exponent code 0, which is clamped to 1.
  EXPECT_EQ(MxE8M0FromAmax(448.0f * 0x1p-127f, 448.0f), 1);
  for (int margin = 0; margin <= 8; ++margin) {
    for (const bool pow2 : {false, true}) {
      const ScalePair scale = ScaleFromAmaxPair(FLT_MAX, 448.0f, pow2, margin);
      EXPECT_TRUE(std::isnormal(scale.quant_scale) && std::isnormal(scale.dequant_scale));
      // Without the floor to a power of two Q may be half a step above M/a.
      EXPECT_LE(static_cast<double>(FLT_MAX) * scale.quant_scale, 448.0 * (1 + 0x1p-23));
    }
    EXPECT_EQ(QuantScaleFromAmax(1.0f, 448.0f, false, margin), std::ldexp(448.0f, -margin));
  }
}

TEST(Scale, DequantScaleIsNeverSubnormal) {
  for (std::uint32_t exponent = 0; exponent < 255; ++exponent) {
    for (const std::uint32_t mantissa : {0u, 1u, 0x400000u, 0x600000u, 0x7FFFFFu}) {
      const float amax = std::bit_cast<float>((exponent << 23) | mantissa);
      for (const DType format : kFormats) {
        for (const bool pow2 : {false, true}) {
          const ScalePair scale = ScaleFromAmaxPair(amax, Fp8Max(format), pow2, 0);
          ASSERT_GE(scale.dequant_scale, 0x1p-126f);
          ASSERT_TRUE(std::isfinite(scale.dequant_scale));
        }
        ASSERT_TRUE(std::isnormal(MxScaleFromAmax(amax, Fp8Max(format)).quant_scale));
      }
    }
  }
}

TEST(Scale, MinDequantScaleLimitsQ) {
  EXPECT_EQ(QuantScaleFromAmax(1e-20f, 448.0f, false, 0, 0x1p-10f), 0x1p10f);
  EXPECT_EQ(QuantScaleFromAmax(1e-20f, 448.0f, true, 0, 0x1.8p-10f), 0x1p9f);
  EXPECT_EQ(QuantScaleFromAmax(448.0f, 448.0f, false, 0, 0x1p-10f), 1.0f);
  EXPECT_EQ(QuantScaleFromAmax(0x1p-149f, 448.0f, false, 0, 0x1p-10f), 0x1p10f);
}

TEST(Scale, SaturationCountsWhatTheCastChangedBeyondRounding) {
  EXPECT_FALSE(IsSaturated(DType::kE4M3, 464.0f));
  EXPECT_TRUE(IsSaturated(DType::kE4M3, std::nextafter(464.0f, 1e3f)));
  EXPECT_TRUE(IsSaturated(DType::kE4M3, -INFINITY));
  EXPECT_FALSE(IsSaturated(DType::kE4M3, NAN));
  EXPECT_TRUE(IsSaturated(DType::kE5M2, 61440.0f));
  EXPECT_FALSE(IsSaturated(DType::kE5M2, std::nextafter(61440.0f, 0.0f)));
}

// Every instruction set that this build has and this machine runs.
class VectorLoops : public OnTarget {};

TEST_P(VectorLoops, EncodeEqualsTheScalarDefinition) {
  for (const DType format : kFormats) {
    const std::vector<float> x = Probes(format);
    const auto n = static_cast<std::int64_t>(x.size());
    std::uint64_t saturated = 0;
    std::uint64_t zero_codes = 0;
    for (const float value : x) {
      saturated += IsSaturated(format, value) ? 1u : 0u;
      zero_codes += (Fp8Encode(format, value) & 0x7F) == 0 ? 1u : 0u;
    }
    std::vector<std::uint8_t> q(x.size());
    cpu::CastCounts counts;
    cpu::EncodeRow(format, x.data(), 1.0f, n, q.data(), &counts);
    EXPECT_EQ(counts.saturated, saturated);
    EXPECT_EQ(counts.zero_codes, zero_codes);
    for (std::size_t i = 0; i < x.size(); ++i) {
      ASSERT_EQ(q[i], Fp8Encode(format, x[i])) << x[i];
    }
    const std::vector<float> halves(x.size(), 0.5f);
    cpu::EncodeRowByColumn(format, x.data(), halves.data(), n, q.data(), &counts);
    for (std::size_t i = 0; i < x.size(); ++i) {
      ASSERT_EQ(q[i], Fp8Encode(format, x[i] * 0.5f)) << x[i];
    }
  }
}

TEST_P(VectorLoops, TameEncodeEqualsTheScalarDefinition) {
  for (const DType format : kFormats) {
    std::vector<float> x;
    for (const float value : Probes(format)) {
      if (std::fabs(value) <= Fp8Max(format) * (1.0f + 0x1p-22f)) {
        x.push_back(value);
      }
    }
    const std::vector<float> ones(x.size(), 1.0f);
    std::vector<std::uint8_t> q(x.size());
    const auto n = static_cast<std::int64_t>(x.size());
    cpu::EncodeTameColumns(format, {x.data(), DType::kF32, n, 1, n}, ones.data(), {q.data(), n});
    for (std::size_t i = 0; i < x.size(); ++i) {
      ASSERT_EQ(q[i], Fp8Encode(format, x[i])) << x[i];
    }
  }
}

// Row k of the tile holds all codes and is shifted by k; shapes leave ragged rows and columns.
TEST_P(VectorLoops, TransposeTileRescalesAsTheScalarDefinition) {
  for (const std::int64_t cols : {std::int64_t{256 + 5}, std::int64_t{48}, std::int64_t{7}}) {
    constexpr std::int64_t kRows = 251, kPadded = 259;
    std::vector<std::uint8_t> codes(static_cast<std::size_t>(kRows * cols));
    std::vector<int> shift(kRows);
    for (std::int64_t r = 0; r < kRows; ++r) {
      shift[static_cast<std::size_t>(r)] = static_cast<int>(r);
      for (std::int64_t c = 0; c < cols; ++c) {
        codes[static_cast<std::size_t>(r * cols + c)] = static_cast<std::uint8_t>(c * 37 + r);
      }
    }
    std::vector<std::uint8_t> out(static_cast<std::size_t>(kPadded * cols), 0xA5);
    for (const bool rescale : {true, false}) {
      const std::uint64_t counted = cpu::TransposeTile({.src = {codes.data(), cols},
                                                        .rows = kRows,
                                                        .padded_rows = kPadded,
                                                        .cols = cols,
                                                        .shift = rescale ? shift.data() : nullptr,
                                                        .dst = {out.data(), kPadded}});
      std::uint64_t flushed = 0;
      for (std::int64_t c = 0; c < cols; ++c) {
        for (std::int64_t r = 0; r < kPadded; ++r) {
          const std::uint8_t got = out[static_cast<std::size_t>(c * kPadded + r)];
          if (r >= kRows) {
            ASSERT_EQ(got, 0) << "padding";
            continue;
          }
          const std::uint8_t code = codes[static_cast<std::size_t>(r * cols + c)];
          ASSERT_EQ(got, rescale ? RescaleCode(code, static_cast<int>(r)) : code)
              << "code " << static_cast<int>(code) << " k " << r;
          flushed += (code & 0x7F) != 0 && (got & 0x7F) == 0 ? 1u : 0u;
        }
      }
      EXPECT_EQ(counted, flushed);
      EXPECT_EQ(flushed > 0, rescale);
    }
  }
}

TEST_P(VectorLoops, DecodeEqualsTheScalarDefinition) {
  std::vector<std::uint8_t> codes(256 + 7);
  for (std::size_t i = 0; i < codes.size(); ++i) {
    codes[i] = static_cast<std::uint8_t>(i);
  }
  std::vector<float> x(codes.size());
  for (const DType format : kFormats) {
    cpu::DecodeRow(format, codes.data(), 0x1.8p-3f, static_cast<std::int64_t>(codes.size()),
                   x.data());
    for (std::size_t i = 0; i < codes.size(); ++i) {
      const float want = Fp8Decode(format, codes[i]) * 0x1.8p-3f;
      EXPECT_TRUE(x[i] == want || (std::isnan(x[i]) && std::isnan(want))) << i;
    }
  }
}

TEST_P(VectorLoops, DecodeOfTilesRoundsToBf16) {
  constexpr std::int64_t kCols = 256 + 128 + 9;
  std::vector<std::uint8_t> codes(kCols);
  for (std::size_t i = 0; i < codes.size(); ++i) {
    codes[i] = static_cast<std::uint8_t>(i * 5);
  }
  // One D in every second place; with all 24 bits, so that BF16 must round.
  const std::vector<float> d = {0x1.234567p-3f, NAN, 0x1.fedcbap7f, NAN, 0x1p-120f, NAN, 0x1.8p0f};
  for (const DType format : kFormats) {
    std::vector<float> wide(codes.size());
    std::vector<std::uint16_t> narrow(codes.size());
    cpu::DecodeTilesArgs args{.format = format,
                              .q = codes.data(),
                              .cols = kCols,
                              .tile = 128,
                              .dequant_scale = d.data(),
                              .dequant_scale_stride = 2,
                              .x = wide.data(),
                              .x_dtype = DType::kF32};
    cpu::DecodeTiles(args);
    args.x = narrow.data();
    args.x_dtype = DType::kBF16;
    cpu::DecodeTiles(args);
    for (std::size_t i = 0; i < codes.size(); ++i) {
      const float want = Fp8Decode(format, codes[i]) * d[i / 128 * 2];
      EXPECT_TRUE(wide[i] == want || (std::isnan(wide[i]) && std::isnan(want))) << i;
      EXPECT_EQ(narrow[i], Bf16FromFloat(want)) << i;
    }
  }
}

TEST_P(VectorLoops, ScanFindsAmaxZerosAndNonfinite) {
  for (const std::int64_t n : {0, 1, 5, 16, 33, 128, 150}) {
    std::vector<float> x(static_cast<std::size_t>(n), -0.5f);
    cpu::ScanCounts counts;
    if (n > 3) {
      x[0] = NAN;
      x[1] = -INFINITY;
      x[2] = -0.0f;
      x[x.size() - 1] = -3.0f;
    }
    const cpu::Matrix row = {x.data(), DType::kF32, n, 1, n};
    cpu::ScanMatrix(row, &counts);
    EXPECT_EQ(std::bit_cast<float>(counts.amax_bits), n > 3 ? 3.0f : (n == 0 ? 0.0f : 0.5f));
    EXPECT_EQ(counts.nonfinite, n > 3 ? 2u : 0u);
    EXPECT_EQ(counts.zeros, n > 3 ? 1u : 0u);
    std::vector<std::uint32_t> amax_bits(x.size(), 7u);
    EXPECT_EQ(cpu::MaxColumns(row, amax_bits.data()), n <= 3);
    for (std::size_t i = 0; i < x.size(); ++i) {
      EXPECT_EQ(amax_bits[i], FiniteMagnitudeBits(x[i]));
    }
  }
}

// Tiles that take every way through the loop (all results normal, some subnormal or zero, zeros,
// non-finite elements) against the scalar definitions, in both dtypes and for every kind of scale.
TEST_P(VectorLoops, RowTilesEqualTheScalarDefinition) {
  constexpr std::int64_t kRows = 4, kCols = 256, kXStride = 288, kQStride = 260;
  enum Scale { kFp32, kPow2, kMx };
  std::uint32_t state = 12345;
  const auto random = [&] { return state = state * 1664525u + 1013904223u; };
  for (const DType format : kFormats) {
    for (const Scale kind : {kFp32, kPow2, kMx}) {
      const std::int64_t tile = kind == kMx ? 32 : 128;
      for (const DType dtype : {DType::kF32, DType::kBF16}) {
        std::vector<float> wide(kRows * kXStride, NAN);
        for (std::int64_t r = 0; r < kRows; ++r) {
          for (std::int64_t c = 0; c < kCols; ++c) {
            // Row 0: exponents within the normal range of any tile; 1: over 2^40; 2: with zeros;
            // 3: with non-finite elements. All 16 or 24 bits are random, so ties occur in BF16.
            const int spread = r == 0 ? 3 : 40;
            const auto exponent =
                static_cast<std::uint32_t>(127 - 20 + static_cast<int>(random() >> 16) % spread);
            const std::uint32_t bits = (random() & 0x807FFFFFu) | (exponent << 23);
            float value = std::bit_cast<float>(bits);
            value = r >= 2 && random() >> 28 == 0 ? -0.0f : value;
            value = r == 3 && random() >> 28 == 0 ? (c % 2 == 0 ? NAN : -INFINITY) : value;
            wide[static_cast<std::size_t>(r * kXStride + c)] =
                dtype == DType::kBF16 ? FloatFromBf16(Bf16FromFloat(value)) : value;
          }
        }
        std::vector<std::uint16_t> narrow(wide.size());
        for (std::size_t i = 0; i < wide.size(); ++i) {
          narrow[i] = Bf16FromFloat(wide[i]);
        }
        std::vector<std::uint8_t> q(kRows * kQStride, 0xA5);
        std::vector<float> d(kRows * kCols / tile);
        cpu::RowTileCounts counts;
        cpu::QuantizeRowTiles(
            {.x = dtype == DType::kBF16 ? static_cast<const void*>(narrow.data()) : wide.data(),
             .x_dtype = dtype,
             .rows = kRows,
             .x_stride = kXStride,
             .cols = kCols,
             .tile = tile,
             .format = format,
             .pow2 = kind == kPow2,
             .mx = kind == kMx,
             .min_dequant_scale = 0,
             .q = q.data(),
             .q_stride = kQStride,
             .dequant_scale = d.data(),
             .dequant_scale_row_stride = 1,
             .dequant_scale_stride = kRows},
            &counts);
        cpu::RowTileCounts want;
        std::uint64_t subnormal = 0;
        for (std::int64_t r = 0; r < kRows; ++r) {
          for (std::int64_t t = 0; t < kCols; t += tile) {
            const float* x = wide.data() + r * kXStride + t;
            std::uint32_t amax_bits = 0;
            for (std::int64_t c = 0; c < tile; ++c) {
              amax_bits = std::max(amax_bits, FiniteMagnitudeBits(x[c]));
              want.scan.zeros += x[c] == 0 ? 1u : 0u;
              want.scan.nonfinite += std::isfinite(x[c]) ? 0u : 1u;
            }
            want.scan.amax_bits = std::max(want.scan.amax_bits, amax_bits);
            const float amax = std::bit_cast<float>(amax_bits);
            const ScalePair scale = kind == kMx
                                        ? MxScaleFromAmax(amax, Fp8Max(format))
                                        : ScaleFromAmaxPair(amax, Fp8Max(format), kind == kPow2, 0);
            ASSERT_EQ(d[static_cast<std::size_t>(t / tile * kRows + r)], scale.dequant_scale);
            for (std::int64_t c = 0; c < tile; ++c) {
              const std::uint8_t code = Fp8Encode(format, x[c] * scale.quant_scale);
              ASSERT_EQ(q[static_cast<std::size_t>(r * kQStride + t + c)], code)
                  << "row " << r << " column " << t + c << " x " << x[c];
              want.cast.zero_codes += (code & 0x7F) == 0 ? 1u : 0u;
              want.cast.saturated += IsSaturated(format, x[c] * scale.quant_scale) ? 1u : 0u;
              subnormal +=
                  r == 1 && (code & 0x7F) != 0 && (code & 0x7F) < (format == DType::kE4M3 ? 8 : 4)
                      ? 1u
                      : 0u;
            }
          }
          ASSERT_EQ(q[static_cast<std::size_t>(r * kQStride + kCols)], 0xA5) << "beyond the row";
        }
        EXPECT_GT(subnormal, 0u);
        EXPECT_EQ(counts.scan.amax_bits, want.scan.amax_bits);
        EXPECT_EQ(counts.scan.zeros, want.scan.zeros);
        EXPECT_EQ(counts.scan.nonfinite, want.scan.nonfinite);
        EXPECT_EQ(counts.cast.zero_codes, want.cast.zero_codes);
        EXPECT_EQ(counts.cast.saturated, want.cast.saturated);
      }
    }
  }
}

// A strided BF16 matrix, tame but for the cases that put one element in: what is between the rows
// must not be read, and one odd element must be found wherever it is.
TEST_P(VectorLoops, MatrixScansSeeEveryElementAndNothingElse) {
  constexpr std::int64_t kStride = 160;
  for (const std::int64_t cols : {std::int64_t{128}, std::int64_t{140}}) {
    for (std::int64_t odd = -1; odd < 3 * cols; odd += odd < 0 ? 1 : 17) {
      for (const float element : {INFINITY, -0.0f, 9.0f}) {
        std::vector<std::uint16_t> x(3 * kStride, Bf16FromFloat(NAN));
        for (std::int64_t r = 0; r < 3; ++r) {
          for (std::int64_t c = 0; c < cols; ++c) {
            x[static_cast<std::size_t>(r * kStride + c)] =
                Bf16FromFloat(r * cols + c == odd ? element : 1.5f);
          }
        }
        const cpu::Matrix m = {x.data(), DType::kBF16, kStride, 3, cols};
        const bool wild = odd >= 0 && std::isinf(element);
        cpu::ScanCounts counts;
        cpu::ScanMatrix(m, &counts);
        EXPECT_EQ(std::bit_cast<float>(counts.amax_bits), odd >= 0 && element == 9 ? 9.0f : 1.5f);
        EXPECT_EQ(counts.nonfinite, wild ? 1u : 0u);
        EXPECT_EQ(counts.zeros, odd >= 0 && element == 0 ? 1u : 0u);
        std::vector<std::uint32_t> amax_bits(static_cast<std::size_t>(cols));
        EXPECT_EQ(cpu::MaxColumns(m, amax_bits.data()), !wild);
        for (std::int64_t c = 0; c < cols; ++c) {
          EXPECT_EQ(std::bit_cast<float>(amax_bits[static_cast<std::size_t>(c)]),
                    odd >= 0 && odd % cols == c && element == 9 ? 9.0f : 1.5f);
        }
        if (wild) {
          continue;
        }
        std::vector<std::uint8_t> q(3 * kStride, 0xA5);
        cpu::CastCounts cast;
        cpu::EncodeTame(DType::kE4M3, m, 3.0f, {q.data(), kStride}, &cast);
        EXPECT_EQ(cast.zero_codes, odd >= 0 && element == 0 ? 1u : 0u);
        EXPECT_EQ(cast.saturated, 0u);
        for (std::int64_t r = 0; r < 3; ++r) {
          for (std::int64_t c = 0; c < kStride; ++c) {
            EXPECT_EQ(q[static_cast<std::size_t>(r * kStride + c)],
                      c >= cols ? 0xA5 : E4M3Encode(r * cols + c == odd ? 3 * element : 4.5f));
          }
        }
      }
    }
  }
}

TEST_P(VectorLoops, TransposeBytesMovesEveryByte) {
  for (const std::int64_t rows : {1, 15, 16, 40, 128}) {
    for (const std::int64_t cols : {1, 16, 31, 128}) {
      std::vector<std::uint8_t> src(static_cast<std::size_t>(rows * cols));
      for (std::size_t i = 0; i < src.size(); ++i) {
        src[i] = static_cast<std::uint8_t>(i * 167 + i / 251);
      }
      std::vector<std::uint8_t> dst(src.size(), 0);
      cpu::TransposeBytes({src.data(), cols}, rows, cols, {dst.data(), rows});
      for (std::int64_t r = 0; r < rows; ++r) {
        for (std::int64_t c = 0; c < cols; ++c) {
          ASSERT_EQ(dst[static_cast<std::size_t>(c * rows + r)],
                    src[static_cast<std::size_t>(r * cols + c)]);
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Machine, VectorLoops, testing::ValuesIn(Targets()), TargetName);

}  // namespace
}  // namespace octavo
