// Communicator over TCP, for CPU jobs (full mesh, up to 64 ranks) and for ranks that share a GPU.
//
//   ASSIGN_OR_RETURN(auto world, CreateGlooCommunicator({
//       .rank = 2, .size = 4, .group = "attempt-1/world", .bind_address = "127.0.0.1",
//       .store = &store, .connect_timeout_seconds = 60, .timeout_seconds = 300}));
//
// Gloo provides connections and messages; the collectives are ours (gloo.cc), because gloo's do not
// say which rank is missing and leave the order of a reduction to the algorithm. Here a reduction
// adds in rank order, ((r0 + r1) + r2) + …: the same bits as a loop over the ranks.
// A sub-group (expert parallel, data parallel) is a communicator of its own with its own name.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "worker/comm/communicator.h"
#include "worker/comm/rendezvous.h"

namespace octavo {

struct GlooOptions {
  int rank = 0, size = 1;          // within the group
  std::string group;               // unique per attempt and group: prefix of the rendezvous keys
  std::vector<int> world_ranks;    // [size] names of the members in messages; empty: 0..size-1
  std::string bind_address;        // of this host, as peers reach it
  KeyValueStore* store = nullptr;  // used while connecting only
  double connect_timeout_seconds = 0;
  double timeout_seconds = 0;  // of every collective
};

// Connects to all members. Blocks until everyone is there; the error names who is missing.
// size 1 needs neither store nor address (it is the self communicator).
absl::StatusOr<std::unique_ptr<Communicator>> CreateGlooCommunicator(const GlooOptions& options);

}  // namespace octavo
