// Collectives on device memory whatever the communicator wants: CPU backends and NCCL pass pointers
// through; a GPU with a host communicator (Gloo) stages through pinned memory.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "kernels/arena.h"
#include "kernels/ops.h"
#include "worker/comm/communicator.h"

namespace octavo {

// The collective's error with its own message: DEADLINE_EXCEEDED, UNAVAILABLE (peer) or INTERNAL.
absl::Status StatusOf(const CommResult& result);

// Not thread-safe. The communicator is not owned.
class Exchange {
 public:
  // stage_bytes: the largest message of this rank (AllToAllV: each direction; reductions go in
  // pieces).
  Exchange(const Backend& backend, Communicator* comm, std::int64_t stage_bytes, Arena& device,
           Arena& pinned);

  int rank() const { return comm_->rank(); }
  int size() const { return comm_->size(); }
  Communicator& comm() { return *comm_; }

  // Device buffers, rows for (from) rank 0, 1, …; bytes on the host.
  absl::Status AllToAllV(const void* send, std::span<const std::int64_t> send_bytes, void* receive,
                         std::span<const std::int64_t> receive_bytes);
  // Device buffer, in place. One rank: nothing.
  absl::Status AllReduce(void* data, std::int64_t count, DType dtype, ReduceOp op);
  // Host values.
  absl::Status AllReduceHost(void* data, std::int64_t count, DType dtype, ReduceOp op);
  // Host values: each rank gives `count`, all get size × count in rank order.
  absl::Status AllGatherHost(const std::int64_t* send, std::int64_t count, std::int64_t* all);

 private:
  bool host_staged() const { return on_device_ && !comm_->device_pointers(); }
  bool device_staged() const { return on_device_ && comm_->device_pointers(); }
  void Copy(void* dst, const void* src, std::int64_t bytes, CopyKind kind);

  const Backend backend_;
  Communicator* const comm_;
  const bool on_device_;  // the backend's memory is not the host's
  std::int64_t stage_bytes_;
  std::uint8_t* stage_send_ = nullptr;  // pinned, when host_staged
  std::uint8_t* stage_receive_ = nullptr;
  std::uint8_t* device_small_ = nullptr;  // device, when device_staged: host values pass through
};

}  // namespace octavo
