// Element-wise reduction of host buffers, the arithmetic of an all-reduce.
#pragma once

#include <cstdint>

#include "base/check.h"
#include "kernels/tensor.h"
#include "worker/comm/communicator.h"

namespace octavo {

template <class T>
void Accumulate(const void* from, void* to, std::int64_t n, ReduceOp op) {
  const T* x = static_cast<const T*>(from);
  T* y = static_cast<T*>(to);
  if (op == ReduceOp::kSum) {
    for (std::int64_t i = 0; i < n; ++i) {
      y[i] = static_cast<T>(y[i] + x[i]);
    }
    return;
  }
  for (std::int64_t i = 0; i < n; ++i) {
    // NaN wins: a maximum must not hide it.
    y[i] = (x[i] > y[i] || x[i] != x[i]) ? x[i] : y[i];
  }
}

// to = to (op) from; dtype kF32, kF64 or kI64.
inline void Accumulate(const void* from, void* to, std::int64_t n, DType dtype, ReduceOp op) {
  switch (dtype) {
    case DType::kF32:
      return Accumulate<float>(from, to, n, op);
    case DType::kF64:
      return Accumulate<double>(from, to, n, op);
    case DType::kI64:
      return Accumulate<std::int64_t>(from, to, n, op);
    default:
      OCTAVO_CHECK(false, "all_reduce takes kF32, kF64, kI64, dtype = %d", static_cast<int>(dtype));
  }
}

}  // namespace octavo
