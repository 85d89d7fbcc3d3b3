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

// Start… begins a collective that computing may go on beside, until Join; its buffers belong to it
// until then (communicator.h). Where it has to be staged, and on the CPU, it is done at once.
//
// Not thread-safe. The communicator is not owned.
class Exchange {
 public:
  // stage_bytes: the largest message of this rank (AllToAllV: each direction; reductions go in
  // pieces).
  // overlap: Start… leaves the compute lane free; else it joins at once.
  Exchange(const Backend& backend, Communicator* comm, std::int64_t stage_bytes, Arena& device,
           Arena& pinned, bool overlap = true);

  int rank() const { return comm_->rank(); }
  int size() const { return comm_->size(); }
  Communicator& comm() { return *comm_; }

  // Device buffers, rows for (from) rank 0, 1, …; bytes on the host.
  absl::Status AllToAllV(const void* send, std::span<const std::int64_t> send_bytes, void* receive,
                         std::span<const std::int64_t> receive_bytes);
  absl::Status StartAllToAllV(const AllToAllVArgs& args);
  // Device buffer, in place. One rank: nothing.
  absl::Status AllReduce(void* data, std::int64_t count, DType dtype, ReduceOp op);
  absl::Status StartAllReduce(void* data, std::int64_t count, DType dtype, ReduceOp op);
  // The compute lane waits for all that was started.
  void Join() {
    if (overlaps()) {
      comm_->Join();
    }
  }
  // Whether the calls so far went well: to be asked after a wait for the device, before what it
  // computed is believed (communicator.h).
  absl::Status Check() { return StatusOf(comm_->Check()); }
  // Whether computing goes on beside what was started.
  bool overlaps() const { return overlap_ && device_staged() && size() > 1; }
  // Host values.
  absl::Status AllReduceHost(void* data, std::int64_t count, DType dtype, ReduceOp op);
  // Each rank gives `count` device values, all get size × count in rank order, in pinned memory.
  // They are there after FinishGather, which is the host's one wait: for the copy lane, so for what
  // the compute lane held at StartGather and not for what it was given since. One at a time.
  absl::Status StartGather(const std::int64_t* send, std::int64_t count, std::int64_t* all);
  absl::Status FinishGather();

 private:
  bool host_staged() const { return on_device_ && !comm_->device_pointers(); }
  bool device_staged() const { return on_device_ && comm_->device_pointers(); }
  void Copy(void* dst, const void* src, std::int64_t bytes, CopyKind kind,
            Lane lane = Lane::kCompute);
  // Stages what AllToAllV moves: offsets are those of the device's buffers.
  absl::Status StagedAllToAllV(const AllToAllVArgs& args);

  const Backend backend_;
  Communicator* const comm_;
  const bool on_device_;  // the backend's memory is not the host's
  const bool overlap_;
  std::int64_t stage_bytes_;
  std::uint8_t* stage_send_ = nullptr;  // pinned, when host_staged
  std::uint8_t* stage_receive_ = nullptr;
  std::uint8_t* device_small_ = nullptr;  // device, when device_staged: host values pass through
  std::int64_t* gather_small_ = nullptr;  // pinned, when host_staged: this rank's part of a gather
  std::int64_t gather_count_ = 0;
  std::int64_t* gather_all_ = nullptr;
};

}  // namespace octavo
