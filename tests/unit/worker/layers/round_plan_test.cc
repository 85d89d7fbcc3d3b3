// Rounds of a dispatch against a plain re-statement: list all rows, cut, compare.
#include "worker/layers/round_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <tuple>

namespace octavo {
namespace {

// A row's identity: source rank, global expert, position among that pair's rows.
using Row = std::tuple<int, int, std::int64_t>;

TEST(RoundPlan, EveryRowTravelsOnceAndArrivesInItsPlace) {
  const unsigned seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  for (int trial = 0; trial < 200; ++trial) {
    const int ranks = 1 << random() % 3;
    const int local = 1 + static_cast<int>(random() % 3);
    const int experts = ranks * local;
    std::vector<std::int64_t> counts(static_cast<std::size_t>(ranks * experts));
    for (auto& c : counts) {
      c = random() % 3 == 0 ? 0 : static_cast<std::int64_t>(random() % 200);
    }
    const std::int64_t capacity = 1 + static_cast<std::int64_t>(random() % 300);
    const int parts = 1 + static_cast<int>(random() % static_cast<unsigned>(local));
    const auto input = [&](int rank) {
      return RoundPlanInput{.counts = counts,
                            .ranks = ranks,
                            .experts = experts,
                            .rank = rank,
                            .capacity = capacity,
                            .parts = parts};
    };
    const int rounds = CountRounds(input(0));
    // Send order of each source: (expert, position).
    std::map<int, std::vector<Row>> sends;
    for (int s = 0; s < ranks; ++s) {
      for (int e = 0; e < experts; ++e) {
        for (std::int64_t i = 0; i < counts[static_cast<std::size_t>(s * experts + e)]; ++i) {
          sends[s].push_back({s, e, i});
        }
      }
    }
    std::map<Row, int> delivered;
    for (int round = 0; round < rounds; ++round) {
      std::vector<RoundPlan> plans(static_cast<std::size_t>(ranks));
      for (int r = 0; r < ranks; ++r) {
        PlanRound(input(r), round, &plans[static_cast<std::size_t>(r)]);
      }
      for (int d = 0; d < ranks; ++d) {
        const RoundPlan& plan = plans[static_cast<std::size_t>(d)];
        EXPECT_LE(plan.receive_total, capacity);
        EXPECT_LE(plan.padded_rows, PaddedCapacity(capacity, local));
        // Part after part, of each the rows of every source.
        std::vector<Row> arrived;
        for (int p = 0; p < parts; ++p) {
          const int first = FirstExpertOfPart(p, parts, local);
          const int last = FirstExpertOfPart(p + 1, parts, local);
          ASSERT_EQ(plan.receive_begin[static_cast<std::size_t>(p)],
                    static_cast<std::int64_t>(arrived.size()));
          EXPECT_EQ(plan.padded_begin[static_cast<std::size_t>(p)],
                    plan.group_begin[static_cast<std::size_t>(first)]);
          for (int s = 0; s < ranks; ++s) {
            const RoundPlan& source = plans[static_cast<std::size_t>(s)];
            const auto at = static_cast<std::size_t>(p * ranks + d);
            ASSERT_EQ(source.send_rows[at],
                      plan.receive_rows[static_cast<std::size_t>(p * ranks + s)]);
            for (std::int64_t i = 0; i < source.send_rows[at]; ++i) {
              const Row& row = sends[s][static_cast<std::size_t>(source.send_begin[at] + i)];
              const int expert = std::get<1>(row) - d * local;
              EXPECT_TRUE(expert >= first && expert < last) << expert << " in part " << p;
              arrived.push_back(row);
            }
          }
        }
        EXPECT_EQ(plan.receive_begin.back(), plan.receive_total);
        EXPECT_EQ(plan.padded_begin.back(), plan.padded_rows);
        ASSERT_EQ(static_cast<std::int64_t>(arrived.size()), plan.receive_total);
        std::vector<Row> padded(static_cast<std::size_t>(plan.padded_rows), Row{-1, -1, -1});
        for (const RowSegment& segment : plan.segments) {
          for (std::int64_t i = 0; i < segment.rows; ++i) {
            padded[static_cast<std::size_t>(segment.dst_begin + i)] =
                arrived[static_cast<std::size_t>(segment.src_begin + i)];
          }
        }
        for (int l = 0; l < local; ++l) {
          const auto g = static_cast<std::size_t>(l);
          EXPECT_EQ(plan.group_begin[g] % kRowAlign, 0);
          std::vector<Row> group(padded.begin() + plan.group_begin[g],
                                 padded.begin() + plan.group_begin[g] + plan.group_rows[g]);
          // Only this expert's rows, by (source, position).
          EXPECT_TRUE(std::is_sorted(group.begin(), group.end()));
          for (const Row& row : group) {
            EXPECT_EQ(std::get<1>(row), d * local + l);
            ++delivered[row];
          }
        }
      }
    }
    for (const auto& [source, rows] : sends) {
      for (const Row& row : rows) {
        ASSERT_EQ(delivered[row], 1);
      }
    }
  }
}

TEST(RoundPlan, NoRowsIsOneEmptyRound) {
  const std::vector<std::int64_t> counts(8, 0);
  const RoundPlanInput input{.counts = counts, .ranks = 2, .experts = 4, .rank = 1, .capacity = 5};
  EXPECT_EQ(CountRounds(input), 1);
  RoundPlan plan;
  PlanRound(input, 0, &plan);
  EXPECT_EQ(plan.receive_total, 0);
  EXPECT_EQ(plan.padded_rows, 0);
}

}  // namespace
}  // namespace octavo
