// Bump arenas over Ops::allocate, and tensors with a name.
//
// All device memory of a rank comes from arenas that are filled while the model is created; a step
// allocates nothing. An arena hands out pieces until it is destroyed and frees them all at once.
//
//   Arena arena(backend, "activations", Memory::kDevice);
//   auto* x = arena.Take<std::uint16_t>(tokens * hidden);   // null when the device is full
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "base/check.h"
#include "kernels/ops.h"
#include "kernels/tensor.h"

namespace octavo {

// A dense row-major tensor with the name that files and messages use.
struct NamedTensor {
  std::string name;
  DType dtype = DType::kF32;
  std::vector<std::int64_t> shape;
  void* data = nullptr;

  std::int64_t elements() const {
    std::int64_t n = 1;
    for (std::int64_t d : shape) {
      n *= d;
    }
    return n;
  }
  std::int64_t bytes() const { return elements() * DTypeBytes(dtype); }
};

// Owns its memory. Pieces are aligned to 256 bytes and zeroed. Not thread-safe.
class Arena {
 public:
  static constexpr std::int64_t kAlign = 256;

  Arena(const Backend& backend, std::string name, Memory memory = Memory::kDevice)
      : backend_(backend), name_(std::move(name)), memory_(memory) {}
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  ~Arena() {
    for (void* block : blocks_) {
      backend_.ops->release(backend_.context, block, memory_);
    }
  }

  // Returns null when the memory is exhausted; failed() then stays true, so that a caller may check
  // once after a series of takes.
  void* TakeBytes(std::int64_t bytes) {
    OCTAVO_CHECK(bytes >= 0, "arena %s: %lld bytes", name_.c_str(), static_cast<long long>(bytes));
    bytes = RoundUp(std::max<std::int64_t>(bytes, 1), kAlign);
    if (bytes > left_ && !Grow(bytes)) {
      return nullptr;
    }
    void* piece = next_;
    next_ += bytes;
    left_ -= bytes;
    used_bytes_ += bytes;
    return piece;
  }
  template <class T>
  T* Take(std::int64_t count) {
    return static_cast<T*>(TakeBytes(count * static_cast<std::int64_t>(sizeof(T))));
  }

  bool failed() const { return failed_; }
  std::int64_t used_bytes() const { return used_bytes_; }
  std::int64_t reserved_bytes() const { return reserved_bytes_; }
  // Bytes that could not be had, for the message.
  std::int64_t failed_bytes() const { return failed_bytes_; }
  const std::string& name() const { return name_; }

 private:
  // Blocks are large so that small pieces share them; a piece never spans two.
  static constexpr std::int64_t kBlockBytes = 4 << 20;

  bool Grow(std::int64_t bytes) {
    const std::int64_t block_bytes = std::max(bytes, kBlockBytes);
    void* block =
        failed_ ? nullptr : backend_.ops->allocate(backend_.context, block_bytes, memory_);
    if (block == nullptr) {
      failed_ = true;
      failed_bytes_ += bytes;
      return false;
    }
    if (memory_ == Memory::kDevice) {
      backend_.ops->zero(backend_.context, block, block_bytes);
    } else {
      std::fill_n(static_cast<std::uint8_t*>(block), block_bytes, std::uint8_t{0});
    }
    blocks_.push_back(block);
    next_ = static_cast<std::uint8_t*>(block);
    left_ = block_bytes;
    reserved_bytes_ += block_bytes;
    return true;
  }

  const Backend backend_;
  const std::string name_;
  const Memory memory_;
  std::vector<void*> blocks_;
  std::uint8_t* next_ = nullptr;
  std::int64_t left_ = 0, used_bytes_ = 0, reserved_bytes_ = 0, failed_bytes_ = 0;
  bool failed_ = false;
};

}  // namespace octavo
