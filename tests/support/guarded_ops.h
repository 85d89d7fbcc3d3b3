// The CPU backend with memory that only operations can touch, as a GPU's is.
//
// Device memory is PROT_NONE outside operations, pinned memory is ordinary; copies check their
// direction. A host access to device memory ends the process at the instruction that made it. The
// table has a name of its own, so code that asks for "cpu" stages through pinned memory as on a
// GPU.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "base/check.h"
#include "kernels/cpu/backend.h"
#include "kernels/ops.h"
#include "kernels/ops_list.h"

namespace octavo::testing {

// Device memory of one backend. Used by its one thread.
class GuardedMemory {
 public:
  // The memory of a context of the CPU backend.
  static GuardedMemory& Of(OpsContext* context) {
    static std::mutex mutex;
    static std::map<OpsContext*, std::unique_ptr<GuardedMemory>> all;
    const std::lock_guard lock(mutex);
    std::unique_ptr<GuardedMemory>& memory = all[context];
    if (memory == nullptr) {
      memory = std::make_unique<GuardedMemory>();
    }
    return *memory;
  }

  void* Allocate(std::int64_t bytes) {
    const std::int64_t whole = RoundUp(bytes, kPage);
    void* begin = ::mmap(nullptr, static_cast<std::size_t>(whole), PROT_NONE,
                         MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    OCTAVO_CHECK(begin != MAP_FAILED, "%lld bytes", static_cast<long long>(whole));
    blocks_.push_back({static_cast<std::uint8_t*>(begin), whole});
    return begin;
  }
  void Release(void* begin) {
    const auto found = std::find_if(blocks_.begin(), blocks_.end(),
                                    [begin](const Block& b) { return b.begin == begin; });
    OCTAVO_CHECK(found != blocks_.end(), "released memory that was not allocated");
    ::munmap(found->begin, static_cast<std::size_t>(found->bytes));
    blocks_.erase(found);
  }
  bool Holds(const void* at, std::int64_t bytes) const {
    const auto* p = static_cast<const std::uint8_t*>(at);
    return std::any_of(blocks_.begin(), blocks_.end(), [&](const Block& b) {
      return p >= b.begin && p + bytes <= b.begin + b.bytes;
    });
  }
  void Protect(int protection) {
    for (const Block& block : blocks_) {
      OCTAVO_CHECK_EQ(::mprotect(block.begin, static_cast<std::size_t>(block.bytes), protection),
                      0);
    }
  }
  std::int64_t operations = 0;

 private:
  static constexpr std::int64_t kPage = 4096;
  struct Block {
    std::uint8_t* begin;
    std::int64_t bytes;
  };
  std::vector<Block> blocks_;
};

// For the length of one operation.
class Unguarded {
 public:
  explicit Unguarded(OpsContext* context) : memory_(GuardedMemory::Of(context)) {
    memory_.Protect(PROT_READ | PROT_WRITE);
    ++memory_.operations;
  }
  ~Unguarded() { memory_.Protect(PROT_NONE); }
  Unguarded(const Unguarded&) = delete;
  Unguarded& operator=(const Unguarded&) = delete;

 private:
  GuardedMemory& memory_;
};

inline const Ops* cpu_table = nullptr;

inline void GuardedCopy(OpsContext* context, const CopyArgs& args) {
  const GuardedMemory& memory = GuardedMemory::Of(context);
  if (args.bytes > 0) {
    OCTAVO_CHECK(memory.Holds(args.dst, args.bytes) == (args.kind != CopyKind::kToHost),
                 "a copy of kind %d to %p", static_cast<int>(args.kind), args.dst);
    OCTAVO_CHECK(memory.Holds(args.src, args.bytes) == (args.kind != CopyKind::kToDevice),
                 "a copy of kind %d from %p", static_cast<int>(args.kind), args.src);
  }
  const Unguarded open(context);
  cpu_table->copy(context, args);
}

// One table a process. `backend` is any CPU backend.
inline const Ops* GuardedOps(const Backend& backend) {
  static const Ops table = [](const Ops& cpu) {
    cpu_table = &cpu;
    Ops ops = cpu;
    ops.name = "guarded";
    ops.allocate = [](OpsContext* c, std::int64_t bytes, Memory memory) {
      return memory == Memory::kDevice ? GuardedMemory::Of(c).Allocate(bytes)
                                       : cpu_table->allocate(c, bytes, memory);
    };
    ops.release = [](OpsContext* c, void* at, Memory memory) {
      memory == Memory::kDevice ? GuardedMemory::Of(c).Release(at)
                                : cpu_table->release(c, at, memory);
    };
    ops.copy = GuardedCopy;
    ops.zero = [](OpsContext* c, void* at, std::int64_t bytes) {
      OCTAVO_CHECK(bytes == 0 || GuardedMemory::Of(c).Holds(at, bytes), "zero of host memory");
      const Unguarded open(c);
      cpu_table->zero(c, at, bytes);
    };
    ops.stats_reset = [](OpsContext* c, StatSlot* slots, std::int64_t count) {
      const Unguarded open(c);
      cpu_table->stats_reset(c, slots, count);
    };
#define OCTAVO_GUARD(field, Name, Args)             \
  ops.field = [](OpsContext* c, const Args& args) { \
    const Unguarded open(c);                        \
    cpu_table->field(c, args);                      \
  };
    OCTAVO_COMPUTE_OPS(OCTAVO_GUARD)
#undef OCTAVO_GUARD
    return ops;
  }(*backend.ops);
  return &table;
}

}  // namespace octavo::testing
