// Cast and Axpby: plain element loops over FP32 and BF16.
#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "kernels/cpu/ops_cpu.h"
#include "kernels/cpu/rows.h"

namespace octavo::cpu {
namespace {

OCTAVO_MULTIVERSION void ScaleAdd(const float* x, float a, float* y, float b, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) {
    y[i] = a * x[i] + b * y[i];
  }
}

bool IsRowType(DType t) { return t == DType::kF32 || t == DType::kBF16; }

}  // namespace

void Cast(OpsContext*, const CastArgs& a) {
  OCTAVO_CHECK_EQ(a.src.rows, a.dst.rows);
  OCTAVO_CHECK_EQ(a.src.cols, a.dst.cols);
  if (a.src.dtype == a.dst.dtype) {
    const std::int64_t bytes = DTypeBytes(a.src.dtype);
    for (std::int64_t r = 0; r < a.src.rows; ++r) {
      std::memmove(static_cast<char*>(a.dst.data) + r * a.dst.stride() * bytes,
                   static_cast<const char*>(a.src.data) + r * a.src.stride() * bytes,
                   static_cast<std::size_t>(a.src.cols * bytes));
    }
    return;
  }
  OCTAVO_CHECK(IsRowType(a.src.dtype) && IsRowType(a.dst.dtype),
               "casts between kF32 and kBF16 only, src %d, dst %d", static_cast<int>(a.src.dtype),
               static_cast<int>(a.dst.dtype));
  float buffer[kChunk];
  for (std::int64_t r = 0; r < a.src.rows; ++r) {
    for (std::int64_t c = 0; c < a.src.cols; c += kChunk) {
      const std::int64_t n = std::min(kChunk, a.src.cols - c);
      const float* x = LoadRow(a.src.data, a.src.dtype, r * a.src.stride() + c, n, buffer);
      StoreRow(x, n, a.dst.data, a.dst.dtype, r * a.dst.stride() + c);
    }
  }
}

// b == 0 overwrites y without reading it, so that stale memory cannot leak NaN into the result.
void Axpby(OpsContext*, const AxpbyArgs& a) {
  float x_buffer[kChunk];
  float y_buffer[kChunk];
  for (std::int64_t i = 0; i < a.n; i += kChunk) {
    const std::int64_t n = std::min(kChunk, a.n - i);
    const float* x = LoadRow(a.x, a.x_dtype, i, n, x_buffer);
    if (a.b == 0.0f) {
      ScaleRow(x, n, a.a, y_buffer);
    } else {
      const float* y = LoadRow(a.y, a.y_dtype, i, n, y_buffer);
      if (y != y_buffer) {
        std::copy(y, y + n, y_buffer);
      }
      ScaleAdd(x, a.a, y_buffer, a.b, n);
    }
    StoreRow(y_buffer, n, a.y, a.y_dtype, i);
  }
}

}  // namespace octavo::cpu
