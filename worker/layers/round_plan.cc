#include "worker/layers/round_plan.h"

#include <algorithm>

#include "base/check.h"

namespace octavo {
namespace {

std::int64_t CountOf(const RoundPlanInput& in, std::int32_t source, std::int32_t expert) {
  return in.counts[static_cast<std::size_t>(source) * static_cast<std::size_t>(in.experts) +
                   static_cast<std::size_t>(expert)];
}

// Rows [first, last) of (source, expert), counted from that pair's first token, that lie in the
// window [begin, end) of the destination's order; `position` is where the pair's rows start in it.
struct Interval {
  std::int64_t first, rows;
};
Interval Intersect(std::int64_t position, std::int64_t rows, std::int64_t begin, std::int64_t end) {
  const std::int64_t first = std::clamp(begin - position, std::int64_t{0}, rows);
  const std::int64_t last = std::clamp(end - position, std::int64_t{0}, rows);
  return {first, std::max<std::int64_t>(last - first, 0)};
}

}  // namespace

std::int32_t CountRounds(const RoundPlanInput& in) {
  OCTAVO_CHECK(in.capacity > 0);
  const std::int32_t local = in.experts / in.ranks;
  std::int64_t rounds = 1;
  for (std::int32_t d = 0; d < in.ranks; ++d) {
    std::int64_t incoming = 0;
    for (std::int32_t e = d * local; e < (d + 1) * local; ++e) {
      for (std::int32_t s = 0; s < in.ranks; ++s) {
        incoming += CountOf(in, s, e);
      }
    }
    rounds = std::max(rounds, CeilDiv(incoming, in.capacity));
  }
  return static_cast<std::int32_t>(rounds);
}

void PlanRound(const RoundPlanInput& in, std::int32_t round, RoundPlan* plan) {
  const std::int32_t local = in.experts / in.ranks;
  const auto ranks = static_cast<std::size_t>(in.ranks);
  const std::int64_t begin = round * in.capacity, end = begin + in.capacity;
  plan->send_begin.assign(ranks, 0);
  plan->send_rows.assign(ranks, 0);
  plan->receive_rows.assign(ranks, 0);
  plan->group_begin.assign(static_cast<std::size_t>(local), 0);
  plan->group_rows.assign(static_cast<std::size_t>(local), 0);
  plan->segments.clear();

  // What this rank sends: its send order is (expert, token) over all experts.
  std::int64_t send_position = 0;
  for (std::int32_t d = 0; d < in.ranks; ++d) {
    const auto peer = static_cast<std::size_t>(d);
    std::int64_t position = 0;
    bool found = false;
    plan->send_begin[peer] = send_position;
    for (std::int32_t e = d * local; e < (d + 1) * local; ++e) {
      for (std::int32_t s = 0; s < in.ranks; ++s) {
        const std::int64_t rows = CountOf(in, s, e);
        if (s == in.rank) {
          const Interval part = Intersect(position, rows, begin, end);
          if (part.rows > 0 && !found) {
            plan->send_begin[peer] = send_position + part.first;
            found = true;
          }
          plan->send_rows[peer] += part.rows;
          send_position += rows;
        }
        position += rows;
      }
    }
  }

  // What it receives, by local expert, and where each piece goes.
  std::int64_t position = 0, padded = 0;
  std::vector<RowSegment>& segments = plan->segments;
  segments.resize(ranks * static_cast<std::size_t>(local));
  for (std::int32_t l = 0; l < local; ++l) {
    plan->group_begin[static_cast<std::size_t>(l)] = padded;
    std::int64_t rows_here = 0;
    for (std::int32_t s = 0; s < in.ranks; ++s) {
      const std::int64_t rows = CountOf(in, s, in.rank * local + l);
      const Interval part = Intersect(position, rows, begin, end);
      segments[static_cast<std::size_t>(s) * static_cast<std::size_t>(local) +
               static_cast<std::size_t>(l)] = {.dst_begin = padded + rows_here, .rows = part.rows};
      plan->receive_rows[static_cast<std::size_t>(s)] += part.rows;
      rows_here += part.rows;
      position += rows;
    }
    plan->group_rows[static_cast<std::size_t>(l)] = rows_here;
    padded += RoundUp(rows_here, kRowAlign);
  }
  plan->padded_rows = padded;
  // Segments are stored by (source, expert), which is the order of arrival.
  std::int64_t arrived = 0;
  for (RowSegment& segment : segments) {
    segment.src_begin = arrived;
    arrived += segment.rows;
  }
  plan->receive_total = arrived;
}

std::int64_t PaddedCapacity(std::int64_t capacity, std::int32_t local_experts) {
  return RoundUp(capacity + local_experts * (kRowAlign - 1), kRowAlign);
}

}  // namespace octavo
