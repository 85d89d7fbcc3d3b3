// Random values for the kernel tests, in FP32 or BF16 storage, with FP64 views for oracles.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "kernels/formats/bf16.h"
#include "kernels/tensor.h"

namespace octavo {

// A seeded generator that tells its seed when the test fails.
class Random {
 public:
  explicit Random(std::uint32_t seed)
      : trace_(__FILE__, __LINE__, "seed " + std::to_string(seed)), engine_(seed) {}
  float Normal(float deviation = 1.0f) {
    return std::normal_distribution<float>(0.0f, deviation)(engine_);
  }
  std::int64_t Below(std::int64_t n) {
    return std::uniform_int_distribution<std::int64_t>(0, n - 1)(engine_);
  }
  std::vector<float> Normals(std::int64_t n, float deviation = 1.0f) {
    std::vector<float> x(static_cast<std::size_t>(n));
    for (float& v : x) {
      v = Normal(deviation);
    }
    return x;
  }

 private:
  testing::ScopedTrace trace_;
  std::mt19937 engine_;
};

// Values stored as an act dtype.
class Stored {
 public:
  Stored(const std::vector<float>& x, DType dtype) : dtype_(dtype), size_(x.size()) {
    bytes_.resize(x.size() * static_cast<std::size_t>(DTypeBytes(dtype)));
    for (std::size_t i = 0; i < x.size(); ++i) {
      Set(i, x[i]);
    }
  }
  Stored(std::size_t size, float fill, DType dtype)
      : Stored(std::vector<float>(size, fill), dtype) {}

  void* data() { return bytes_.data(); }
  DType dtype() const { return dtype_; }
  std::size_t size() const { return size_; }
  double operator[](std::size_t i) const { return Get(i); }
  float Get(std::size_t i) const {
    if (dtype_ == DType::kF32) {
      float v;
      std::memcpy(&v, bytes_.data() + 4 * i, 4);
      return v;
    }
    std::uint16_t code;
    std::memcpy(&code, bytes_.data() + 2 * i, 2);
    return FloatFromBf16(code);
  }
  void Set(std::size_t i, float v) {
    if (dtype_ == DType::kF32) {
      std::memcpy(bytes_.data() + 4 * i, &v, 4);
      return;
    }
    const std::uint16_t code = Bf16FromFloat(v);
    std::memcpy(bytes_.data() + 2 * i, &code, 2);
  }
  bool operator==(const Stored& o) const { return bytes_ == o.bytes_; }

 private:
  DType dtype_;
  std::size_t size_;
  std::vector<unsigned char> bytes_;
};

// ‖got − want‖ / ‖want‖; any non-finite difference gives infinity.
template <class Got>
double RelativeError(const Got& got, const std::vector<double>& want) {
  double error = 0;
  double norm = 0;
  for (std::size_t i = 0; i < want.size(); ++i) {
    const double d = static_cast<double>(got[i]) - want[i];
    error += d * d;
    norm += want[i] * want[i];
  }
  return std::isfinite(error) ? std::sqrt(error / (norm + 1e-300)) : HUGE_VAL;
}

inline const char* Name(DType t) { return t == DType::kF32 ? "f32" : "bf16"; }

// Bounds for RelativeError. One rounding to BF16 is off by 2^-8 at most, 1.7e-3 in the mean square;
// FP32 paths see sums of some hundred terms at 2^-24 each.
inline double Tolerance(DType t) { return t == DType::kF32 ? 2e-6 : 2.5e-3; }

}  // namespace octavo
