// Which rows travel in which round of a dispatch: a pure function of the count matrix (NUMERICS 8).
//
// Every destination's incoming rows, ordered by (local expert, source rank, token), are cut every
// `capacity` rows; round i of the layer moves cut i of every destination. Within one source, the
// rows for one destination and round are one interval of its send order (expert, token), because a
// cut is an interval in an order that refines it.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/ops.h"

namespace octavo {

struct RoundPlanInput {
  std::span<const std::int64_t> counts;  // [R, E] tokens of source rank r for global expert e
  std::int32_t ranks = 1, experts = 1;
  std::int32_t rank = 0;
  std::int64_t capacity = 1;  // rows a rank takes at once
};

// Exact number of rounds: max over destinations of ceil(incoming rows / capacity), at least 1.
std::int32_t CountRounds(const RoundPlanInput& input);

// One round as this rank sees it. Vectors are reused between calls (no allocation once grown).
struct RoundPlan {
  std::vector<std::int64_t> send_begin;  // [R] first row of the interval in this rank's send order
  std::vector<std::int64_t> send_rows;   // [R]
  std::vector<std::int64_t> receive_rows;  // [R] from each source
  std::int64_t receive_total = 0;
  // Layout of what was received: rows by local expert, each group padded to 128.
  std::vector<std::int64_t> group_begin, group_rows;  // [E / R]
  std::int64_t padded_rows = 0;
  // Receive order (source, expert, token) → padded layout (expert, source, token).
  std::vector<RowSegment> segments;  // [R · E/R], empty ones included
};
void PlanRound(const RoundPlanInput& input, std::int32_t round, RoundPlan* plan);

// Rows that PlanRound can need for the padded layout: capacity plus padding of every local expert.
std::int64_t PaddedCapacity(std::int64_t capacity, std::int32_t local_experts);

}  // namespace octavo
