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
  const auto ranks = static_cast<std::size_t>(in.ranks), parts = static_cast<std::size_t>(in.parts);
  OCTAVO_CHECK(in.parts >= 1 && in.parts <= local, "%d parts of %d experts", in.parts, local);
  const std::int64_t begin = round * in.capacity, end = begin + in.capacity;
  plan->parts = in.parts;
  plan->send_begin.assign(parts * ranks, 0);
  plan->send_rows.assign(parts * ranks, 0);
  plan->receive_rows.assign(parts * ranks, 0);
  plan->receive_begin.assign(parts + 1, 0);
  plan->padded_begin.assign(parts + 1, 0);
  plan->group_begin.assign(static_cast<std::size_t>(local), 0);
  plan->group_rows.assign(static_cast<std::size_t>(local), 0);
  const auto first_of = [&](std::int32_t part) { return FirstExpertOfPart(part, in.parts, local); };

  // What this rank sends: its send order is (expert, token) over all experts.
  std::int64_t send_position = 0;
  for (std::int32_t d = 0; d < in.ranks; ++d) {
    std::int64_t position = 0;
    for (std::int32_t part = 0; part < in.parts; ++part) {
      const std::size_t at = static_cast<std::size_t>(part) * ranks + static_cast<std::size_t>(d);
      bool found = false;
      plan->send_begin[at] = send_position;
      for (std::int32_t e = d * local + first_of(part); e < d * local + first_of(part + 1); ++e) {
        for (std::int32_t s = 0; s < in.ranks; ++s) {
          const std::int64_t rows = CountOf(in, s, e);
          if (s == in.rank) {
            const Interval cut = Intersect(position, rows, begin, end);
            if (cut.rows > 0 && !found) {
              plan->send_begin[at] = send_position + cut.first;
              found = true;
            }
            plan->send_rows[at] += cut.rows;
            send_position += rows;
          }
          position += rows;
        }
      }
    }
  }

  // What it receives, by local expert, and where each piece goes. Segments are stored in the order
  // of arrival: (part, source, expert).
  std::vector<RowSegment>& segments = plan->segments;
  segments.resize(ranks * static_cast<std::size_t>(local));
  std::int64_t position = 0, padded = 0;
  std::size_t first_segment = 0;
  for (std::int32_t part = 0; part < in.parts; ++part) {
    const std::int32_t first = first_of(part), count = first_of(part + 1) - first;
    plan->padded_begin[static_cast<std::size_t>(part)] = padded;
    for (std::int32_t i = 0; i < count; ++i) {
      const auto group = static_cast<std::size_t>(first + i);
      plan->group_begin[group] = padded;
      std::int64_t rows_here = 0;
      for (std::int32_t s = 0; s < in.ranks; ++s) {
        const std::int64_t rows = CountOf(in, s, in.rank * local + first + i);
        const Interval cut = Intersect(position, rows, begin, end);
        segments[first_segment + static_cast<std::size_t>(s * count + i)] = {
            .dst_begin = padded + rows_here, .rows = cut.rows};
        plan->receive_rows[static_cast<std::size_t>(part) * ranks + static_cast<std::size_t>(s)] +=
            cut.rows;
        rows_here += cut.rows;
        position += rows;
      }
      plan->group_rows[group] = rows_here;
      padded += RoundUp(rows_here, kRowAlign);
    }
    first_segment += ranks * static_cast<std::size_t>(count);
  }
  plan->padded_rows = plan->padded_begin[parts] = padded;
  std::int64_t arrived = 0;
  for (RowSegment& segment : segments) {
    segment.src_begin = arrived;
    arrived += segment.rows;
  }
  plan->receive_total = plan->receive_begin[parts] = arrived;
  std::int64_t before = 0;
  for (std::size_t part = 0; part < parts; ++part) {
    plan->receive_begin[part] = before;
    for (std::size_t s = 0; s < ranks; ++s) {
      before += plan->receive_rows[part * ranks + s];
    }
  }
}

std::int64_t PaddedCapacity(std::int64_t capacity, std::int32_t local_experts) {
  return RoundUp(capacity + local_experts * (kRowAlign - 1), kRowAlign);
}

}  // namespace octavo
