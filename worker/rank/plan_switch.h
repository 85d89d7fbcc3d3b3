// When a new precision plan takes effect (ARCHITECTURE 6, invariant 3). Pure.
//
//   PlanSwitch plans(1);                         // version in force
//   plans.Offer(plan);                           // from the worker, any time
//   control.SetPlanHeld(plans.newest_held());    // in every pass
//   if (auto next = plans.Agree(all.plan_held_min, all.plan_held_max)) model.SetPlan(*next);
//
// Every rank announces the newest version it holds; all switch at the first step boundary where the
// announcements are equal and newer than what is in force. So no rank runs a plan that another does
// not have yet, and a late rank delays the switch, never the training. Versions between may be
// skipped: only the newest matters.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "proto/precision/plan.h"

namespace octavo {

// Not thread-safe.
class PlanSwitch {
 public:
  explicit PlanSwitch(std::int64_t version_in_force) : in_force_(version_in_force) {}

  // Older or equal versions are ignored. A plan that was announced is kept until it is agreed on or
  // overtaken, so one that arrives between announcement and agreement does no harm.
  void Offer(PrecisionPlan plan);
  std::int64_t newest_held() const {
    return pending_.empty() ? in_force_ : pending_.back().version;
  }
  std::int64_t in_force() const { return in_force_; }

  // The plan to switch to now, at most once per version; it counts as in force from here on.
  std::optional<PrecisionPlan> Agree(std::int64_t held_min, std::int64_t held_max);

 private:
  std::int64_t in_force_;
  std::vector<PrecisionPlan> pending_;  // rising versions, all newer than in_force_
};

}  // namespace octavo
