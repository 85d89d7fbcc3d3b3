// What happened to a job and why, in sentences: the words of octavo explain. Pure.
#pragma once

#include <string>
#include <vector>

#include "octavo/v1/job_service.pb.h"

namespace octavo {

struct StoryInput {
  v1::Job job;
  std::vector<v1::PrecisionPlan> plans;  // any order
  std::vector<v1::JobEvent> events;      // oldest first; only WARNING and POLICY are told
  v1::JobPrecision precision;
};

// The most sentences of ShortStory.
inline constexpr int kShortStorySentences = 25;

// Similar events are one sentence with how often, when and the worst value: decisions of the policy
// by (op, tensor, signal) over layers, warnings by their words without the numbers, sites by op.
std::vector<std::string> ShortStory(const StoryInput& input);
// Every attempt, plan version, warning, site and mismatch has its own.
std::vector<std::string> FullStory(const StoryInput& input);

}  // namespace octavo
