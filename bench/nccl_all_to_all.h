// NCCL's own all-to-all (ncclAlltoAll, equal parts) on the GPUs of a bench's ranks: what the
// product's exchange is measured against. Through a communicator of its own and without the
// product's code; NCCL is opened at run time as the plug-in opens it (OCTAVO_NCCL names a file), so
// the program needs neither its headers nor CUDA's.
#pragma once

#include <dlfcn.h>

#include <array>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>

#include "base/status.h"
#include "base/str.h"
#include "bench/bench_ranks.h"
#include "worker/layers/exchange.h"

namespace octavo::bench {

class NcclAllToAll {
 public:
  NcclAllToAll(const NcclAllToAll&) = delete;
  NcclAllToAll& operator=(const NcclAllToAll&) = delete;
  ~NcclAllToAll() {
    if (comm_ != nullptr) {
      (void)abort_(comm_);
    }
  }

  // Called by every rank's thread, with its device current. UNAVAILABLE where the libraries are not
  // there or are older than ncclAlltoAll (2.28).
  static absl::StatusOr<std::unique_ptr<NcclAllToAll>> Open(const BenchRank& rank,
                                                            Exchange& exchange) {
    std::unique_ptr<NcclAllToAll> made(new NcclAllToAll);
    const char* named = std::getenv("OCTAVO_NCCL");
    void* nccl = dlopen(named != nullptr ? named : "libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
    void* driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    int (*init)(void**, int, UniqueId, int) = nullptr;
    if (!Load(nccl, "ncclAlltoAll", &made->all_to_all_) || !Load(nccl, "ncclCommInitRank", &init) ||
        !Load(nccl, "ncclCommAbort", &made->abort_) ||
        !Load(driver, "cuCtxSynchronize", &made->synchronize_)) {
      return UnavailableError("no NCCL with ncclAlltoAll, or no CUDA driver");
    }
    // From rank 0 to all as a sum in which the others' part is zero.
    std::array<std::int64_t, 16> words{};
    static_assert(sizeof(words) == sizeof(UniqueId));
    if (rank.rank == 0) {
      char message[512] = {};
      if (rank.plugin->nccl_unique_id(reinterpret_cast<std::uint8_t*>(words.data()), message,
                                      sizeof(message)) != 0) {
        return InternalError(message);
      }
    }
    RETURN_IF_ERROR(exchange.AllReduceHost(words.data(), 16, DType::kI64, ReduceOp::kSum));
    UniqueId id;
    std::memcpy(&id, words.data(), sizeof(id));
    if (const int code = init(&made->comm_, rank.size, id, rank.rank); code != 0) {
      return InternalError(StrCat("ncclCommInitRank: error ", code));
    }
    return made;
  }

  // bytes_per_rank to and from every rank, on the device's default stream.
  absl::Status Run(const void* send, void* receive, std::int64_t bytes_per_rank) {
    constexpr int kUint8 = 1;  // ncclUint8
    const int code = all_to_all_(send, receive, static_cast<std::size_t>(bytes_per_rank), kUint8,
                                 comm_, nullptr);
    return code == 0 ? absl::OkStatus() : InternalError(StrCat("ncclAlltoAll: error ", code));
  }
  void Wait() { (void)synchronize_(); }

 private:
  struct UniqueId {
    char internal[128];
  };

  NcclAllToAll() = default;

  template <class F>
  static bool Load(void* library, const char* symbol, F* function) {
    *function = library == nullptr ? nullptr : reinterpret_cast<F>(dlsym(library, symbol));
    return *function != nullptr;
  }

  int (*all_to_all_)(const void*, void*, std::size_t, int, void*, void*) = nullptr;
  int (*abort_)(void*) = nullptr;
  int (*synchronize_)() = nullptr;
  void* comm_ = nullptr;
};

}  // namespace octavo::bench
