#include "controller/scheduler/placement.h"

#include <algorithm>
#include <deque>
#include <utility>

#include "base/check.h"

namespace octavo {
namespace {

// A worker's free slots, of which the first `taken` are given away. No copies: a pass looks at
// every worker for every job.
struct Hole {
  const WorkerView* worker;
  std::size_t taken = 0;

  std::size_t size() const { return worker->free_slots.size() - taken; }
};

// Rule 3 and 4 over the given holes (by worker name); empty when the sum is too small.
std::vector<RankPlacement> Fill(std::vector<Hole> holes, const GangRequest& request) {
  std::int64_t total = 0;
  for (const Hole& hole : holes) {
    total += static_cast<std::int64_t>(hole.size());
  }
  if (total < request.ranks) {
    return {};
  }
  std::vector<RankPlacement> placed;
  placed.reserve(static_cast<std::size_t>(request.ranks));
  const auto take = [&placed](Hole& hole, std::int32_t rank) {
    placed.push_back(
        {.rank = rank, .worker = hole.worker->name, .slot = hole.worker->free_slots[hole.taken++]});
  };

  const auto group_size = static_cast<std::size_t>(request.expert_parallel);
  std::vector<std::int32_t> spread;  // first ranks of groups that fit no single worker
  for (std::int32_t first = 0; first < request.ranks; first += request.expert_parallel) {
    Hole* best = nullptr;
    for (Hole& hole : holes) {
      if (hole.size() >= group_size && (best == nullptr || hole.size() < best->size())) {
        best = &hole;
        if (hole.size() == group_size) {
          break;  // no better fit exists
        }
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
      Hole& largest =
          *std::max_element(holes.begin(), holes.end(),
                            [](const Hole& a, const Hole& b) { return a.size() < b.size(); });
      OCTAVO_CHECK(largest.size() > 0);
      while (rank < first + request.expert_parallel && largest.size() > 0) {
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
    for (const Known& known : known_) {
      if (known.is_cuda == worker.device.is_cuda && known.sm == worker.device.sm) {
        return known.why_not;
      }
    }
    known_.push_back({worker.device.is_cuda, worker.device.sm, WhyNotOn(worker, request_)});
    return known_.back().why_not;
  }

 private:
  struct Known {
    bool is_cuda;
    std::int32_t sm;
    std::string why_not;
  };
  const GangRequest& request_;
  std::deque<Known> known_;  // a deque: references stay valid
};

bool ByName(const WorkerView& a, const WorkerView& b) { return a.name < b.name; }

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
    (is_blamed ? blamed : trusted).push_back({&worker});
  }
  const auto by_name = [](const Hole& a, const Hole& b) { return ByName(*a.worker, *b.worker); };
  if (!std::is_sorted(trusted.begin(), trusted.end(), by_name)) {
    std::sort(trusted.begin(), trusted.end(), by_name);
  }
  std::vector<RankPlacement> placed = Fill(trusted, request);
  if (placed.empty() && !blamed.empty()) {
    trusted.insert(trusted.end(), blamed.begin(), blamed.end());
    std::sort(trusted.begin(), trusted.end(), by_name);
    placed = Fill(std::move(trusted), request);
  }
  return placed;
}

void Occupy(ClusterView& cluster, const std::vector<RankPlacement>& placement) {
  const bool sorted = std::is_sorted(cluster.workers.begin(), cluster.workers.end(), ByName);
  for (const RankPlacement& rank : placement) {
    const auto named = [&rank](const WorkerView& worker) { return worker.name == rank.worker; };
    const auto worker =
        sorted ? std::lower_bound(
                     cluster.workers.begin(), cluster.workers.end(), rank.worker,
                     [](const WorkerView& a, const std::string& name) { return a.name < name; })
               : std::find_if(cluster.workers.begin(), cluster.workers.end(), named);
    OCTAVO_CHECK(worker != cluster.workers.end() && named(*worker));
    std::erase(worker->free_slots, rank.slot);
  }
}

}  // namespace octavo
