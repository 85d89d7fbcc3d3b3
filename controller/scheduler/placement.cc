#include "controller/scheduler/placement.h"

#include <algorithm>
#include <map>
#include <utility>

#include "base/check.h"

namespace octavo {
namespace {

struct Hole {
  const WorkerView* worker;
  std::vector<std::int32_t> slots;  // free, ascending; taken from the front
};

// Rule 3 and 4 over the given holes; empty when the sum is too small.
std::vector<RankPlacement> Fill(std::vector<Hole> holes, const GangRequest& request) {
  std::int64_t total = 0;
  for (const Hole& hole : holes) {
    total += static_cast<std::int64_t>(hole.slots.size());
  }
  if (total < request.ranks) {
    return {};
  }
  std::sort(holes.begin(), holes.end(),
            [](const Hole& a, const Hole& b) { return a.worker->name < b.worker->name; });
  std::vector<RankPlacement> placed;
  placed.reserve(static_cast<std::size_t>(request.ranks));
  const auto take = [&placed](Hole& hole, std::int32_t rank) {
    placed.push_back({.rank = rank, .worker = hole.worker->name, .slot = hole.slots.front()});
    hole.slots.erase(hole.slots.begin());
  };

  const auto group_size = static_cast<std::size_t>(request.expert_parallel);
  std::vector<std::int32_t> spread;  // first ranks of groups that fit no single worker
  for (std::int32_t first = 0; first < request.ranks; first += request.expert_parallel) {
    Hole* best = nullptr;
    for (Hole& hole : holes) {
      if (hole.slots.size() >= group_size &&
          (best == nullptr || hole.slots.size() < best->slots.size())) {
        best = &hole;
      }
    }
    if (best == nullptr) {
      spread.push_back(first);
      continue;
    }
    for (std::int32_t rank = first; rank < first + request.expert_parallel; ++rank) {
      take(*best, rank);
    }
  }
  for (const std::int32_t first : spread) {
    std::int32_t rank = first;
    while (rank < first + request.expert_parallel) {
      Hole& largest = *std::max_element(
          holes.begin(), holes.end(),
          [](const Hole& a, const Hole& b) { return a.slots.size() < b.slots.size(); });
      OCTAVO_CHECK(!largest.slots.empty());
      while (rank < first + request.expert_parallel && !largest.slots.empty()) {
        take(largest, rank++);
      }
    }
  }
  std::sort(placed.begin(), placed.end(),
            [](const RankPlacement& a, const RankPlacement& b) { return a.rank < b.rank; });
  return placed;
}

// Workers of a cluster have few distinct devices; the recipes are judged once per device.
class Matcher {
 public:
  explicit Matcher(const GangRequest& request) : request_(request) {}

  const std::string& WhyNot(const WorkerView& worker) {
    const auto key = std::make_pair(worker.device.is_cuda, worker.device.sm);
    const auto found = known_.find(key);
    return found != known_.end() ? found->second
                                 : known_.emplace(key, WhyNotOn(worker, request_)).first->second;
  }

 private:
  const GangRequest& request_;
  std::map<std::pair<bool, std::int32_t>, std::string> known_;
};

}  // namespace

std::string WhyNotOn(const WorkerView& worker, const GangRequest& request) {
  if (worker.device.is_cuda != request.cuda) {
    return std::string("the job asks for device ") + (request.cuda ? "cuda" : "cpu") +
           ", the worker has " + (worker.device.is_cuda ? "cuda" : "cpu");
  }
  for (const Recipe& recipe : request.recipes) {
    std::string refusal = RefusalReason(recipe, worker.device, request.allow_emulation);
    if (!refusal.empty()) {
      return refusal;
    }
  }
  return {};
}

Capacity CapacityFor(const ClusterView& cluster, const GangRequest& request) {
  Capacity capacity;
  Matcher matcher(request);
  for (const WorkerView& worker : cluster.workers) {
    const bool ready = worker.condition == WorkerCondition::kReady;
    if (!ready && worker.condition != WorkerCondition::kDraining) {
      continue;
    }
    ++capacity.workers_known;
    const std::string& why_not = matcher.WhyNot(worker);
    if (!why_not.empty()) {
      if (capacity.refusal.empty()) {
        capacity.refusal = why_not;
      }
      continue;
    }
    ++capacity.workers_matching;
    if (ready) {
      capacity.free += static_cast<std::int32_t>(worker.free_slots.size());
      capacity.largest += worker.usable_slots;
    } else {
      capacity.draining += worker.usable_slots;
    }
  }
  return capacity;
}

std::vector<RankPlacement> Place(const ClusterView& cluster, const GangRequest& request) {
  OCTAVO_CHECK(request.ranks >= 1 && request.expert_parallel >= 1);
  OCTAVO_CHECK(request.ranks % request.expert_parallel == 0);
  Matcher matcher(request);
  std::vector<Hole> trusted, blamed;
  for (const WorkerView& worker : cluster.workers) {
    if (worker.condition != WorkerCondition::kReady || worker.free_slots.empty() ||
        !matcher.WhyNot(worker).empty()) {
      continue;
    }
    const auto& names = request.blamed_workers;
    const bool is_blamed = std::find(names.begin(), names.end(), worker.name) != names.end();
    (is_blamed ? blamed : trusted).push_back({&worker, worker.free_slots});
  }
  std::vector<RankPlacement> placed = Fill(trusted, request);
  if (placed.empty() && !blamed.empty()) {
    trusted.insert(trusted.end(), blamed.begin(), blamed.end());
    placed = Fill(std::move(trusted), request);
  }
  return placed;
}

void Occupy(ClusterView& cluster, const std::vector<RankPlacement>& placement) {
  std::map<std::string, std::vector<std::int32_t>> taken;
  for (const RankPlacement& rank : placement) {
    taken[rank.worker].push_back(rank.slot);
  }
  for (WorkerView& worker : cluster.workers) {
    const auto found = taken.find(worker.name);
    if (found == taken.end()) {
      continue;
    }
    std::erase_if(worker.free_slots, [&found](std::int32_t slot) {
      return std::find(found->second.begin(), found->second.end(), slot) != found->second.end();
    });
  }
}

}  // namespace octavo
