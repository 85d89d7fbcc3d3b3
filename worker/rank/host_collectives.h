// Collectives over small host values, whatever kind of pointers the communicator wants: with NCCL
// they pass through a device buffer taken at start. For control vectors, statuses and file records,
// not for tensors. An error of a collective itself is marked COLLECTIVE_TIMEOUT (failure.h), which
// tells it from an error that a rank brought in.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/arena.h"
#include "kernels/ops.h"
#include "worker/comm/communicator.h"

namespace octavo {

// Not thread-safe; every rank of the communicator makes the same calls.
class HostCollectives {
 public:
  // Largest message of one call, and the size of the device buffers.
  static constexpr std::int64_t kMaxBytes = 64 << 10;

  HostCollectives(const Backend& backend, Communicator* comm, Arena& device);

  absl::Status AllReduce(std::span<double> values, ReduceOp op);
  // Sums and maxima over all ranks with one wait for the device.
  absl::Status AllReduce(std::span<double> sums, std::span<double> maxima);
  // mine.size() bytes from every rank, in rank order; the same size everywhere.
  absl::StatusOr<std::string> AllGather(std::string_view mine);
  // The root's text on every rank, however long.
  absl::Status Broadcast(std::string* text, int root);
  // The first error in rank order, on every rank, with the rank's number and its failure class; OK
  // when all are.
  absl::Status Agree(const absl::Status& mine);
  // True on every rank when it is true on any.
  absl::StatusOr<bool> Any(bool mine);

  int rank() const { return comm_->rank(); }
  int size() const { return comm_->size(); }

 private:
  const Backend backend_;
  Communicator* const comm_;
  void* device_send_ = nullptr;     // null when the communicator takes host pointers
  void* device_receive_ = nullptr;  // size × kMaxBytes would be wasteful: AllGather goes in parts
};

}  // namespace octavo
