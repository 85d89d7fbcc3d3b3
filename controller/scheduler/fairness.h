// Who goes first among the waiting jobs. Pure.
//
// Higher priority first; among equals the one that has waited longest since it was submitted. A job
// that restarts keeps its place: its submission time does not change, so a rival that came later
// never overtakes it while it backs off. Running jobs are not preempted.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace octavo {

struct QueueKey {
  std::int32_t priority = 0;
  std::int64_t submit_micros = 0;  // since the epoch
  std::string uid;                 // breaks ties, so that the order is total
};

// True when `a` is served before `b`; a strict total order over distinct uids.
bool GoesBefore(const QueueKey& a, const QueueKey& b);

// Indices of `keys` in the order of service.
std::vector<std::size_t> QueueOrder(const std::vector<QueueKey>& keys);

}  // namespace octavo
