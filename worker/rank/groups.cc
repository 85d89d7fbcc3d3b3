#include "worker/rank/groups.h"

#include <set>
#include <utility>

#include "base/status.h"
#include "base/str.h"
#include "worker/comm/gloo.h"
#include "worker/comm/self.h"
#include "worker/rank/failure.h"
#include "worker/rank/timed_communicator.h"

namespace octavo {
namespace {

constexpr std::size_t kNcclIdBytes = 128;

// Whether every rank has a device of its own, from what the ranks say of themselves.
absl::StatusOr<bool> DevicesDiffer(const GroupOptions& options) {
  const TrainingConfig& config = options.config;
  const std::string prefix = StrCat("attempt-", config.attempt, "/device/");
  RETURN_IF_ERROR(options.store.Set(StrCat(prefix, config.run.rank), options.device_id));
  std::set<std::string> seen;
  for (std::int32_t r = 0; r < config.run.world_size; ++r) {
    ASSIGN_OR_RETURN(const std::string device,
                     options.store.Get(StrCat(prefix, r), config.gang_timeout_seconds));
    seen.insert(device);
  }
  return static_cast<std::int32_t>(seen.size()) == config.run.world_size;
}

absl::StatusOr<std::unique_ptr<Communicator>> CreateNccl(const GroupOptions& options,
                                                         const GroupPlan& group) {
  const PluginTable& plugin = *options.backend.plugin();
  char message[512] = {};
  const std::string key = group.name + "/nccl-id";
  if (group.rank == 0) {
    std::string id(kNcclIdBytes, '\0');
    if (plugin.nccl_unique_id(reinterpret_cast<std::uint8_t*>(id.data()), message,
                              sizeof(message)) != 0) {
      return InternalError(StrCat("making an NCCL id for ", group.name, ": ", message));
    }
    RETURN_IF_ERROR(options.store.Set(key, id));
  }
  ASSIGN_OR_RETURN(const std::string id,
                   options.store.Get(key, options.config.gang_timeout_seconds));
  if (id.size() != kNcclIdBytes) {
    return InternalError(StrCat("NCCL id of ", group.name, " has ", id.size(), " bytes"));
  }
  Backend backend = options.backend.backend();
  Communicator* made =
      plugin.nccl_create(&backend, reinterpret_cast<const std::uint8_t*>(id.data()), group.rank,
                         static_cast<int>(group.members.size()),
                         options.config.collective_timeout_seconds, message, sizeof(message));
  if (made == nullptr) {
    return InternalError(StrCat("joining NCCL group ", group.name, ": ", message));
  }
  return std::unique_ptr<Communicator>(made);
}

absl::StatusOr<std::unique_ptr<Communicator>> CreateOne(const GroupOptions& options,
                                                        const GroupPlan& group, bool nccl) {
  if (group.members.size() == 1) {
    return CreateSelfCommunicator();
  }
  if (nccl) {
    return CreateNccl(options, group);
  }
  return CreateGlooCommunicator({.rank = group.rank,
                                 .size = static_cast<int>(group.members.size()),
                                 .group = group.name,
                                 .world_ranks = group.members,
                                 .bind_address = options.bind_address,
                                 .store = &options.store,
                                 .connect_timeout_seconds = options.config.gang_timeout_seconds,
                                 .timeout_seconds = options.config.collective_timeout_seconds});
}

}  // namespace

GroupPlans PlanGroups(std::int32_t attempt, std::int32_t world_size, std::int32_t expert_parallel,
                      std::int32_t rank) {
  const std::string prefix = StrCat("attempt-", attempt, "/");
  const std::int32_t group = rank / expert_parallel, position = rank % expert_parallel;
  GroupPlans plans;
  plans.world = {.name = prefix + "world", .rank = rank};
  for (std::int32_t r = 0; r < world_size; ++r) {
    plans.world.members.push_back(r);
  }
  plans.expert_parallel = {.name = StrCat(prefix, "expert-parallel-", group), .rank = position};
  for (std::int32_t p = 0; p < expert_parallel; ++p) {
    plans.expert_parallel.members.push_back(group * expert_parallel + p);
  }
  plans.expert_data = {.name = StrCat(prefix, "expert-data-", position), .rank = group};
  for (std::int32_t g = 0; g < world_size / expert_parallel; ++g) {
    plans.expert_data.members.push_back(g * expert_parallel + position);
  }
  return plans;
}

absl::StatusOr<std::unique_ptr<RankGroups>> RankGroups::Create(const GroupOptions& options) {
  const RunConfig& run = options.config.run;
  auto groups = std::make_unique<RankGroups>();
  bool nccl = false;
  const PluginTable* plugin = options.backend.plugin();
  if (run.world_size > 1 && plugin != nullptr && plugin->nccl_create != nullptr &&
      plugin->nccl_unique_id != nullptr) {
    ASSIGN_OR_RETURN(nccl, DevicesDiffer(options));
  }
  groups->transport_ = run.world_size == 1 ? "self" : nccl ? "nccl" : "gloo";

  const GroupPlans plans =
      PlanGroups(options.config.attempt, run.world_size, run.expert_parallel, run.rank);
  std::vector<std::pair<const std::vector<int>*, Communicator*>> made;
  const auto create = [&](const GroupPlan& plan) -> absl::StatusOr<Communicator*> {
    for (const auto& [members, comm] : made) {
      if (*members == plan.members) {
        return comm;
      }
    }
    absl::StatusOr<std::unique_ptr<Communicator>> comm = CreateOne(options, plan, nccl);
    if (!comm.ok()) {
      return WithFailure(Annotate(comm.status(), StrCat("rank ", run.rank, " meeting its group")),
                         FailureClass::kGangTimeout);
    }
    groups->owned_.push_back(nccl ? *std::move(comm)
                                  : std::make_unique<TimedCommunicator>(
                                        *std::move(comm), groups->all_to_all_seconds_.get()));
    made.emplace_back(&plan.members, groups->owned_.back().get());
    return made.back().second;
  };
  ASSIGN_OR_RETURN(groups->comms_.world, create(plans.world));
  ASSIGN_OR_RETURN(groups->comms_.expert_parallel, create(plans.expert_parallel));
  ASSIGN_OR_RETURN(groups->comms_.expert_data, create(plans.expert_data));
  return groups;
}

void RankGroups::Abort() {
  for (const std::unique_ptr<Communicator>& comm : owned_) {
    comm->Abort();
  }
}

}  // namespace octavo
