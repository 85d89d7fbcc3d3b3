#include "worker/rank/plan_switch.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace octavo {

void PlanSwitch::Offer(PrecisionPlan plan) {
  if (plan.version > newest_held()) {
    pending_.push_back(std::move(plan));
  }
}

std::optional<PrecisionPlan> PlanSwitch::Agree(std::int64_t held_min, std::int64_t held_max) {
  if (held_min != held_max || held_min <= in_force_) {
    return std::nullopt;
  }
  const auto agreed = std::find_if(pending_.begin(), pending_.end(),
                                   [&](const PrecisionPlan& p) { return p.version == held_min; });
  OCTAVO_CHECK(agreed != pending_.end(), "plan %lld was announced and is not held",
               static_cast<long long>(held_min));
  in_force_ = held_min;
  std::optional<PrecisionPlan> next = std::move(*agreed);
  pending_.erase(pending_.begin(), agreed + 1);
  return next;
}

}  // namespace octavo
