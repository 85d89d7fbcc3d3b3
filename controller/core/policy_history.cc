#include "controller/core/policy_history.h"

#include <algorithm>
#include <utility>

namespace octavo {

std::size_t PolicyHistory::CostOf(const HistoryItem& item) {
  const auto* snapshot = std::get_if<HealthSnapshot>(&item);
  return 1 + (snapshot == nullptr ? 0 : snapshot->tensors.size());
}

void PolicyHistory::Add(HistoryItem item) {
  cost_ += CostOf(item);
  items_.push_back(std::move(item));
  while (cost_ > kCostMax && items_.size() > 1) {
    cost_ -= CostOf(items_.front());
    items_.pop_front();
  }
}

std::int64_t PolicyHistory::JudgedStep() const {
  for (auto item = items_.rbegin(); item != items_.rend(); ++item) {
    if (const auto* snapshot = std::get_if<HealthSnapshot>(&*item)) {
      return snapshot->last_step;
    }
    if (const auto* start = std::get_if<AttemptStarted>(&*item)) {
      return start->step;
    }
  }
  return 0;
}

std::vector<HealthSnapshot> PolicyHistory::Recent(std::size_t count) const {
  std::vector<HealthSnapshot> recent;
  for (auto item = items_.rbegin(); item != items_.rend() && recent.size() < count; ++item) {
    if (std::holds_alternative<AttemptStarted>(*item)) {
      break;  // steps before it may have been repeated
    }
    const auto* snapshot = std::get_if<HealthSnapshot>(&*item);
    if (snapshot == nullptr) {
      continue;
    }
    if (!recent.empty() && snapshot->plan_version != recent.back().plan_version) {
      break;
    }
    recent.push_back(*snapshot);
  }
  std::reverse(recent.begin(), recent.end());
  return recent;
}

PolicyHistory::Extent PolicyHistory::Measure() const {
  Extent extent;
  const auto cover = [&extent](std::int64_t first, std::int64_t last) {
    extent.first_step = extent.first_step == 0 ? first : std::min(extent.first_step, first);
    extent.last_step = std::max(extent.last_step, last);
  };
  for (const HistoryItem& item : items_) {
    if (const auto* snapshot = std::get_if<HealthSnapshot>(&item)) {
      extent.oldest_version =
          extent.oldest_version == 0 ? snapshot->plan_version : extent.oldest_version;
      ++extent.snapshots;
      cover(snapshot->first_step, snapshot->last_step);
    } else if (const auto* step = std::get_if<StepHealth>(&item)) {
      ++extent.steps;
      cover(step->step, step->step);
    }
  }
  return extent;
}

}  // namespace octavo
