#include "kernels/cpu/rows.h"

#include <bit>
#include <cstring>
#include <limits>

#include "base/check.h"
#include "kernels/formats/bf16.h"

namespace octavo::cpu {
namespace {

OCTAVO_MULTIVERSION void WidenBf16(const std::uint16_t* src, std::int64_t n, float* dst) {
  for (std::int64_t i = 0; i < n; ++i) {
    dst[i] = FloatFromBf16(src[i]);
  }
}

OCTAVO_MULTIVERSION void NarrowBf16(const float* src, std::int64_t n, std::uint16_t* dst) {
  for (std::int64_t i = 0; i < n; ++i) {
    dst[i] = Bf16FromFloat(src[i]);
  }
}

OCTAVO_MULTIVERSION void RoundBf16(float* x, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) {
    x[i] = FloatFromBf16(Bf16FromFloat(x[i]));
  }
}

// Vectors of the language extension: sixteen lanes whatever the machine's registers hold.
typedef float Vec __attribute__((vector_size(64)));
typedef float LooseVec __attribute__((vector_size(64), aligned(4), may_alias));

}  // namespace

const float* LoadRow(const void* base, DType dtype, std::int64_t offset, std::int64_t n,
                     float* buffer) {
  if (dtype == DType::kF32) {
    return static_cast<const float*>(base) + offset;
  }
  OCTAVO_CHECK(dtype == DType::kBF16, "rows are FP32 or BF16, dtype = %d", static_cast<int>(dtype));
  WidenBf16(static_cast<const std::uint16_t*>(base) + offset, n, buffer);
  return buffer;
}

void StoreRow(const float* x, std::int64_t n, void* base, DType dtype, std::int64_t offset) {
  if (dtype == DType::kF32) {
    std::memmove(static_cast<float*>(base) + offset, x,
                 static_cast<std::size_t>(n) * sizeof(float));
    return;
  }
  OCTAVO_CHECK(dtype == DType::kBF16, "rows are FP32 or BF16, dtype = %d", static_cast<int>(dtype));
  NarrowBf16(x, n, static_cast<std::uint16_t*>(base) + offset);
}

void RoundRow(float* x, std::int64_t n, DType dtype) {
  if (dtype == DType::kBF16) {
    RoundBf16(x, n);
  }
}

OCTAVO_MULTIVERSION void AddDot(const float* a, const float* b, std::int64_t n, Lanes* sum) {
  Vec acc = *reinterpret_cast<const LooseVec*>(sum->lane);
  std::int64_t i = 0;
  for (; i + Lanes::kCount <= n; i += Lanes::kCount) {
    const Vec x = *reinterpret_cast<const LooseVec*>(a + i);
    const Vec y = *reinterpret_cast<const LooseVec*>(b + i);
    acc += x * y;
  }
  *reinterpret_cast<LooseVec*>(sum->lane) = acc;
  for (; i < n; ++i) {
    sum->lane[i % Lanes::kCount] += a[i] * b[i];
  }
}

OCTAVO_MULTIVERSION void AddDot3(const float* a, const float* b, const float* c, std::int64_t n,
                                 Lanes* sum) {
  Vec acc = *reinterpret_cast<const LooseVec*>(sum->lane);
  std::int64_t i = 0;
  for (; i + Lanes::kCount <= n; i += Lanes::kCount) {
    const Vec x = *reinterpret_cast<const LooseVec*>(a + i);
    const Vec y = *reinterpret_cast<const LooseVec*>(b + i);
    const Vec z = *reinterpret_cast<const LooseVec*>(c + i);
    acc += x * y * z;
  }
  *reinterpret_cast<LooseVec*>(sum->lane) = acc;
  for (; i < n; ++i) {
    sum->lane[i % Lanes::kCount] += a[i] * b[i] * c[i];
  }
}

OCTAVO_MULTIVERSION float RowMax(const float* x, std::int64_t n) {
  float lane[Lanes::kCount];
  for (int j = 0; j < Lanes::kCount; ++j) {
    lane[j] = -std::numeric_limits<float>::infinity();
  }
  Vec best = *reinterpret_cast<const LooseVec*>(lane);
  std::int64_t i = 0;
  for (; i + Lanes::kCount <= n; i += Lanes::kCount) {
    const Vec v = *reinterpret_cast<const LooseVec*>(x + i);
    best = v > best ? v : best;  // false for NaN
  }
  *reinterpret_cast<LooseVec*>(lane) = best;
  for (; i < n; ++i) {
    lane[0] = x[i] > lane[0] ? x[i] : lane[0];
  }
  float result = lane[0];
  for (int j = 1; j < Lanes::kCount; ++j) {
    result = lane[j] > result ? lane[j] : result;
  }
  return result;
}

OCTAVO_MULTIVERSION void ExpRow(const float* x, std::int64_t n, float factor, float shift, float* y,
                                Lanes* sum) {
  for (std::int64_t i = 0; i < n; ++i) {
    y[i] = ExpF32(x[i] * factor - shift);
  }
  Vec acc = *reinterpret_cast<const LooseVec*>(sum->lane);
  std::int64_t i = 0;
  for (; i + Lanes::kCount <= n; i += Lanes::kCount) {
    const Vec v = *reinterpret_cast<const LooseVec*>(y + i);
    acc += v;
  }
  *reinterpret_cast<LooseVec*>(sum->lane) = acc;
  for (; i < n; ++i) {
    sum->lane[i % Lanes::kCount] += y[i];
  }
}

OCTAVO_MULTIVERSION void ScaleRow(const float* x, std::int64_t n, float factor, float* y) {
  for (std::int64_t i = 0; i < n; ++i) {
    y[i] = x[i] * factor;
  }
}

OCTAVO_MULTIVERSION void AddRow(const float* x, std::int64_t n, float* y) {
  for (std::int64_t i = 0; i < n; ++i) {
    y[i] += x[i];
  }
}

}  // namespace octavo::cpu
