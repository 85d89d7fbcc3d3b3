// State of one CPU backend: scratch memory that grows to the largest request and stays.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <vector>

#include "base/check.h"
#include "kernels/ops.h"

namespace octavo {

// The tag type of ops.h. It is empty, so that the CPU library and a plug-in loaded beside it share
// no member functions; each backend derives its own state from it.
struct OpsContext {};

namespace cpu {

// A 64-byte aligned buffer that never shrinks. Contents are undefined after a growth.
class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() { std::free(data_); }

  template <class T>
  T* Get(std::int64_t count) {
    const std::int64_t bytes = RoundUp(count * static_cast<std::int64_t>(sizeof(T)), 64);
    if (bytes > bytes_) {
      std::free(data_);
      data_ = std::aligned_alloc(64, static_cast<std::size_t>(bytes));
      ++growths_;
      OCTAVO_CHECK(data_ != nullptr, "no memory for %lld bytes of scratch",
                   static_cast<long long>(bytes));
      bytes_ = bytes;
    }
    return static_cast<T*>(data_);
  }
  std::int64_t growths() const { return growths_; }

 private:
  void* data_ = nullptr;
  std::int64_t bytes_ = 0, growths_ = 0;
};

// One thread uses a context at a time.
struct Context final : OpsContext {
  Scratch operand_a, operand_b, product, wide_c;  // FP32 panels of the matrix products
  Scratch block, row;                             // FP32: a 128×128 block; one row
  Scratch codes, band_codes;                      // FP8: a 128×128 block; 128 rows
  std::int64_t allocations = 0, synchronizations = 0;
  std::vector<double> marks;  // seconds of the steady clock
};

inline Context& Get(OpsContext* context) { return *static_cast<Context*>(context); }

}  // namespace cpu
}  // namespace octavo
