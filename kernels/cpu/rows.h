// Row primitives that the element-wise and reducing CPU operations are written in: load and store
// with conversion, dot products, maxima, exponentials. Bits do not depend on the vector width
// (vector_math.h). Rows are contiguous; offsets and lengths count elements.
#pragma once

#include <cstdint>

#include "kernels/cpu/vector_math.h"
#include "kernels/tensor.h"

namespace octavo::cpu {

// Rows are processed in chunks of this many elements, so that converted copies stay on the stack.
// A multiple of Lanes::kCount: chunk by chunk the lanes see what they would see in one pass.
inline constexpr std::int64_t kChunk = 512;

// Elements [offset, offset + n) of base as FP32: base itself when it is kF32, else converted into
// buffer [n]. dtype kF32 or kBF16.
const float* LoadRow(const void* base, DType dtype, std::int64_t offset, std::int64_t n,
                     float* buffer);

// Writes x [n] to elements [offset, offset + n) of base, rounding to nearest even for kBF16.
void StoreRow(const float* x, std::int64_t n, void* base, DType dtype, std::int64_t offset);

// Rounds in place to the values that dtype can hold (kF32: nothing).
void RoundRow(float* x, std::int64_t n, DType dtype);

// sum += Σ a·b by lanes. n a multiple of Lanes::kCount but for the last chunk of a row.
void AddDot(const float* a, const float* b, std::int64_t n, Lanes* sum);

// sum += Σ a·b·c by lanes, (a·b)·c.
void AddDot3(const float* a, const float* b, const float* c, std::int64_t n, Lanes* sum);

// max x; NaN elements are passed over; −∞ when there is nothing else.
float RowMax(const float* x, std::int64_t n);

// y = exp(x·factor − shift), adding y to sum by lanes; y may alias x.
void ExpRow(const float* x, std::int64_t n, float factor, float shift, float* y, Lanes* sum);

// y = x·factor; y may alias x.
void ScaleRow(const float* x, std::int64_t n, float factor, float* y);

// y += x.
void AddRow(const float* x, std::int64_t n, float* y);

}  // namespace octavo::cpu
