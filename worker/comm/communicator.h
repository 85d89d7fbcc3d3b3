// Communicator: the collectives that training needs, over one group of ranks.
//
// Implementations: self (one rank), gloo (processes or threads over TCP), nccl (in the CUDA
// plug-in). Every rank of the group calls the same operations in the same order, also with zero
// counts. All waits are bounded by the timeout given at creation; a failure names rank and
// operation and leaves the communicator unusable (the attempt must end). Not thread-safe: one
// owner.
//
// Pointers are host pointers for self and gloo, device pointers for nccl (device_pointers()). There
// a call begins after what the compute lane holds, and what is put on that lane later begins after
// the call. Start… calls leave out the second half until Join, so that computing goes on beside
// them; until then their buffers belong to them, sent ones to be read only. Host communicators
// are done when a call returns, started or not.
// Reductions are deterministic for a fixed number of ranks (same bits on every rank, every time).
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "kernels/tensor.h"

namespace octavo {

enum class ReduceOp : std::uint8_t { kSum, kMax };

// Outcome of a collective without absl, because the NCCL implementation lives in the plug-in, where
// absl must not be. ok() or a message; worker/comm/comm_status.h turns it into absl::Status.
struct [[nodiscard]] CommResult {
  enum class Code : std::uint8_t { kOk, kTimeout, kPeerLost, kFault };
  Code code = Code::kOk;
  std::string message;  // "rank 3: all_to_all_v (call 17): ..."
  bool ok() const { return code == Code::kOk; }
};

struct AllToAllVArgs {
  const void* send;                             // rows for rank 0, then rank 1, …
  void* receive;                                // rows from rank 0, then rank 1, …
  std::span<const std::int64_t> send_bytes;     // [size] host
  std::span<const std::int64_t> receive_bytes;  // [size] host
  // Where each rank's bytes begin; empty: one after the other.
  std::span<const std::int64_t> send_offsets = {};
  std::span<const std::int64_t> receive_offsets = {};
};

// Gives a peer's bytes and where they begin, in rank order.
class PeerOffsets {
 public:
  PeerOffsets(std::span<const std::int64_t> bytes, std::span<const std::int64_t> offsets)
      : bytes_(bytes), offsets_(offsets) {}
  // REQUIRES: called once for every peer, from 0 on.
  std::int64_t Next(std::size_t peer) {
    const std::int64_t packed = packed_;
    packed_ += bytes_[peer];
    return offsets_.empty() ? packed : offsets_[peer];
  }

 private:
  const std::span<const std::int64_t> bytes_, offsets_;
  std::int64_t packed_ = 0;
};

// Bytes that left this rank for others, by operation; for metrics and tests.
struct CommCounters {
  std::int64_t all_to_all_bytes = 0, all_reduce_bytes = 0, all_gather_bytes = 0,
               broadcast_bytes = 0;
  std::int64_t all_to_all_calls = 0, all_reduce_calls = 0;
};

class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual bool device_pointers() const = 0;

  // One message per peer. Both sides must agree on counts, zero included.
  virtual CommResult AllToAllV(const AllToAllVArgs& args) = 0;
  // In place, kF32, kF64, kI64 (kBF16 with nccl).
  virtual CommResult AllReduce(void* data, std::int64_t count, DType dtype, ReduceOp op) = 0;
  // receive holds size × bytes, in rank order.
  virtual CommResult AllGather(const void* send, void* receive, std::int64_t bytes) = 0;
  virtual CommResult Broadcast(void* data, std::int64_t bytes, int root) = 0;
  virtual CommResult Barrier() = 0;

  virtual CommResult StartAllToAllV(const AllToAllVArgs& args) { return AllToAllV(args); }
  virtual CommResult StartAllReduce(void* data, std::int64_t count, DType dtype, ReduceOp op) {
    return AllReduce(data, count, dtype, op);
  }
  virtual CommResult StartAllGather(const void* send, void* receive, std::int64_t bytes) {
    return AllGather(send, receive, bytes);
  }
  // The compute lane waits for everything that was started so far.
  virtual void Join() {}

  // Makes a blocked call of this rank return with an error soon. Thread-safe.
  virtual void Abort() = 0;

  // Whether the calls so far went well. For communicators whose calls only enqueue (nccl): to be
  // asked after a wait for the device, before its results are believed, because an operation that
  // was aborted also ends that wait.
  virtual CommResult Check() { return {}; }

  const CommCounters& counters() const { return counters_; }

 protected:
  CommCounters counters_;
};

}  // namespace octavo
