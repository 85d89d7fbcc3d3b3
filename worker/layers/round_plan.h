// Which rows travel in which round of a dispatch: a pure function of the count matrix (NUMERICS 8).
//
// Every destination's incoming rows, ordered by (local expert, source rank, token), are cut every
// `capacity` rows; round i of the layer moves cut i of every destination. Within one source, the
// rows for one destination and round are one interval of its send order (expert, token), because a
// cut is an interval in an order that refines it.
//
// A round may travel in parts, so that one part's products run while the next is under way: every
// destination's local experts are cut into ranges, and part p moves the rows of range p. Within a
// round a part changes nothing but the order of messages.
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
  std::int32_t parts = 1;     // 1 .. experts / ranks
};

// First local expert of a part; of part `parts`: their number.
constexpr std::int32_t FirstExpertOfPart(std::int32_t part, std::int32_t parts,
                                         std::int32_t local_experts) {
  return local_experts * part / parts;
}

// Exact number of rounds: max over destinations of ceil(incoming rows / capacity), at least 1.
std::int32_t CountRounds(const RoundPlanInput& input);

// One round as this rank sees it. Vectors are reused between calls (no allocation once grown).
struct RoundPlan {
  std::int32_t parts = 1;
  // By (part, peer): first row of the interval in this rank's send order, and rows.
  std::vector<std::int64_t> send_begin, send_rows;
  std::vector<std::int64_t> receive_rows;   // by (part, source)
  std::vector<std::int64_t> receive_begin;  // [parts + 1] first row of each part's arrivals
  std::int64_t receive_total = 0;
  // Layout of what was received: rows by local expert, each group padded to 128.
  std::vector<std::int64_t> group_begin, group_rows;  // [E / R]
  std::vector<std::int64_t> padded_begin;             // [parts + 1] first row of each part
  std::int64_t padded_rows = 0;
  // Receive order (part, source, expert, token) → padded layout (expert, source, token).
  std::vector<RowSegment> segments;  // [R · E/R], empty ones included
};
void PlanRound(const RoundPlanInput& input, std::int32_t round, RoundPlan* plan);

// Rows that PlanRound can need for the padded layout: capacity plus padding of every local expert.
std::int64_t PaddedCapacity(std::int64_t capacity, std::int32_t local_experts);

}  // namespace octavo
