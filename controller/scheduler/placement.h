// Placement: which slot each rank of a gang runs in. Pure: a cluster and a request in, a placement
// of ALL ranks out, or none.
//
//   cluster:  a [0 . 2 3]   b [. . . .]        request: 4 ranks, expert_parallel 2
//   placed:   ranks 0,1 -> a:1?  no, one slot is free there -> group {0,1} on b, {2,3} on b
//
// Rules, in order:
//  1. only READY workers with the device, whose hardware can run every recipe of the plan;
//  2. never a poisoned or occupied slot; a blamed worker only when the gang fits no other way;
//  3. an expert-parallel group (ranks g*ep .. g*ep+ep-1: its all-to-all is the heaviest traffic) on
//     one worker where it fits, on the fullest worker that still holds it (best fit, so that large
//     holes survive for large groups);
//  4. what does not fit on one worker is spread over as few as possible, largest holes first.
// Deterministic: ties go to the smaller worker name and slot.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "proto/precision/recipe.h"

namespace octavo {

enum class WorkerCondition { kReady, kDraining, kSilent, kLost };

struct WorkerView {
  std::string name;
  WorkerCondition condition = WorkerCondition::kReady;
  DeviceAbility device;
  std::vector<std::int32_t> free_slots;  // ascending; neither occupied nor poisoned
  std::int32_t usable_slots = 0;         // free or occupied, not poisoned
};

struct ClusterView {
  std::vector<WorkerView> workers;
};

struct GangRequest {
  std::int32_t ranks = 1;
  std::int32_t expert_parallel = 1;  // divides ranks
  bool cuda = false;                 // device: cuda
  std::vector<Recipe> recipes;       // distinct recipes of the newest plan
  bool allow_emulation = false;
  std::vector<std::string> blamed_workers;  // repeatedly at fault for this job
};

struct RankPlacement {
  std::int32_t rank = 0;
  std::string worker;
  std::int32_t slot = 0;

  friend bool operator==(const RankPlacement&, const RankPlacement&) = default;
};

// What the cluster could offer to this request.
struct Capacity {
  std::int32_t free = 0;           // on READY workers that match
  std::int32_t largest = 0;        // usable on READY workers that match: if every other job ended
  std::int32_t draining = 0;       // usable on draining workers that match
  std::int32_t workers_known = 0;  // READY or DRAINING, any device
  std::int32_t workers_matching = 0;  // READY or DRAINING, matching
  std::string refusal;                // first hardware refusal, when nothing matches
};

// Empty when the worker's hardware can run the request, else the reason.
std::string WhyNotOn(const WorkerView& worker, const GangRequest& request);

Capacity CapacityFor(const ClusterView& cluster, const GangRequest& request);

// All ranks (ascending), or empty when they do not all fit. Does not change the cluster.
std::vector<RankPlacement> Place(const ClusterView& cluster, const GangRequest& request);

// Removes the placed slots from the cluster's free slots.
void Occupy(ClusterView& cluster, const std::vector<RankPlacement>& placement);

}  // namespace octavo
