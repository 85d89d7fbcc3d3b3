// What octavo explain tells in one sentence though it happened often. Pure.
#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "octavo/v1/job_service.pb.h"

namespace octavo {

// Whether the story tells of such events.
bool IsTold(const v1::JobEvent& event);

// Decisions of the policy that differ in layer, step and value alone.
struct DecisionGroup {
  std::string op, tensor, signal;  // the last two are empty when no signal of its own is named
  std::string before, after;       // recipes
  bool fell = false;
  std::set<std::int32_t> layers;
  std::int64_t count = 0, first = 0, last = 0;
  double worst = 0, limit = 0;
  std::int32_t worst_layer = -1;
};

// Of plans, oldest first; most frequent group first.
std::vector<DecisionGroup> Decisions(const std::vector<v1::PrecisionPlan>& plans);

// Warnings whose words are equal without their numbers.
struct WarningGroup {
  std::string text;  // of the first
  std::int64_t count = 0, first = 0, last = 0;
};

// Of events, oldest first; most frequent group first.
std::vector<WarningGroup> Warnings(const std::vector<v1::JobEvent>& events);

}  // namespace octavo
