#include "worker/checkpoint/shard_plan.h"

#include <gtest/gtest.h>

#include <map>
#include <set>

#include "base/str.h"

namespace octavo {
namespace {

constexpr std::int64_t kExperts = 8;

std::vector<Parameter> Table(std::int32_t ep, std::int32_t rank) {
  std::vector<Parameter> table;
  const auto add = [&](const std::string& name, std::vector<std::int64_t> shape, bool expert) {
    Parameter p;
    p.name = name;
    p.shape = std::move(shape);
    p.region = expert ? ParameterRegion::kExpert : ParameterRegion::kDense;
    p.count = p.full_elements() / (expert ? ep : 1);
    p.first = expert ? p.count * (rank % ep) : 0;
    table.push_back(p);
  };
  add("embedding.weight", {100, 16}, false);
  for (int layer = 0; layer < 3; ++layer) {
    add(StrCat("layers.", layer, ".attn.qkv.weight"), {48, 16}, false);
    add(StrCat("layers.", layer, ".experts.fc1.weight"), {kExperts, 32, 16}, true);
    add(StrCat("layers.", layer, ".experts.fc2.weight"), {kExperts, 16, 16}, true);
  }
  return table;
}

// For every way to spread a job: each stored name has one owner, on which all ranks agree and which
// holds it; the set of names and their element ranges do not depend on the spread.
TEST(ShardPlanTest, EveryTensorIsStoredOnceUnderNamesThatDoNotDependOnTheSpread) {
  std::set<std::string> names_of_one;
  for (const std::int32_t world : {1, 2, 4, 8}) {
    for (std::int32_t ep = 1; ep <= world; ep *= 2) {
      std::map<std::string, std::int32_t> owner;
      std::map<std::string, std::int64_t> global_first;
      std::map<std::string, int> stored;
      std::vector<std::int64_t> written(static_cast<std::size_t>(world));
      for (std::int32_t rank = 0; rank < world; ++rank) {
        const auto table = Table(ep, rank);
        for (const ShardPiece& piece :
             HeldPieces(table, {.world_size = world, .expert_parallel = ep, .rank = rank})) {
          const Parameter& p = table[static_cast<std::size_t>(piece.parameter)];
          EXPECT_GE(piece.local_first, 0);
          EXPECT_LE(piece.local_first + piece.count, p.count);
          const auto [at, fresh] = owner.emplace(piece.base, piece.owner);
          EXPECT_EQ(at->second, piece.owner) << piece.base;
          const auto [first, fresh_first] =
              global_first.emplace(piece.base, p.first + piece.local_first);
          EXPECT_EQ(first->second, p.first + piece.local_first) << piece.base;
          if (piece.owner == rank) {
            ++stored[piece.base];
            written[static_cast<std::size_t>(rank)] += piece.count;
          }
        }
      }
      std::set<std::string> names;
      for (const auto& [base, rank] : owner) {
        EXPECT_EQ(stored[base], 1) << base << " world " << world << " ep " << ep;
        names.insert(base);
      }
      EXPECT_EQ(names.size(), 1 + 3 * (1 + 2 * kExperts));
      if (world == 1) {
        names_of_one = names;
      }
      EXPECT_EQ(names, names_of_one);
      // Work is spread: nobody writes more than twice the fair share.
      std::int64_t total = 0, most = 0;
      for (const std::int64_t w : written) {
        total += w;
        most = std::max(most, w);
      }
      EXPECT_LE(most, 2 * total / world) << "world " << world << " ep " << ep;
    }
  }
}

TEST(ShardPlanTest, StateIsStoredOncePerExpertAndOnceOtherwise) {
  for (const std::int32_t ep : {1, 2, 4}) {
    int dense = 0, expert = 0;
    for (std::int32_t rank = 0; rank < 4; ++rank) {
      const ShardLayout layout{.world_size = 4, .expert_parallel = ep, .rank = rank};
      dense += StoresState(false, layout) ? 1 : 0;
      expert += StoresState(true, layout) ? 1 : 0;
    }
    EXPECT_EQ(dense, 1);
    EXPECT_EQ(expert, ep);
  }
}

}  // namespace
}  // namespace octavo
