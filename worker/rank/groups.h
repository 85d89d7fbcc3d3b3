// The communicators of one rank: all ranks, its expert-parallel group, its expert-data group.
//
// Groups that have the same members share one communicator; a group of one is the self
// communicator. GPUs talk through NCCL when every rank has a GPU of its own and the plug-in has
// NCCL; ranks that share a GPU, and CPU ranks, through Gloo.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "worker/comm/communicator.h"
#include "worker/comm/rendezvous.h"
#include "worker/model/transformer.h"
#include "worker/rank/backend_loader.h"
#include "worker/rank/training_config.h"

namespace octavo {

// Members of each group by world rank, and this rank's place; pure.
struct GroupPlan {
  std::string name;          // prefix of rendezvous keys
  std::vector<int> members;  // world ranks, rising
  int rank = 0;              // within the group
};
struct GroupPlans {
  GroupPlan world, expert_parallel, expert_data;
};
GroupPlans PlanGroups(std::int32_t attempt, std::int32_t world_size, std::int32_t expert_parallel,
                      std::int32_t rank);

struct GroupOptions {
  const TrainingConfig& config;
  LoadedBackend& backend;
  KeyValueStore& store;
  std::string bind_address;
  std::string device_id;  // the same for ranks that share a device: its UUID
};

// Owns the communicators. Abort may be called from another thread.
class RankGroups {
 public:
  // Meets the other ranks. GANG_TIMEOUT names who is missing.
  static absl::StatusOr<std::unique_ptr<RankGroups>> Create(const GroupOptions& options);

  ModelComms comms() const { return comms_; }
  const std::string& transport() const { return transport_; }  // "self", "gloo", "nccl"
  // Seconds that this rank has spent in all-to-alls; null with NCCL, whose calls only enqueue.
  const double* all_to_all_seconds() const {
    return transport_ == "nccl" ? nullptr : all_to_all_seconds_.get();
  }
  void Abort();

 private:
  std::vector<std::unique_ptr<Communicator>> owned_;
  ModelComms comms_;
  std::string transport_;
  std::unique_ptr<double> all_to_all_seconds_ = std::make_unique<double>(0);
};

}  // namespace octavo
