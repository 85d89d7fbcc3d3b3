#include "controller/scheduler/placement.h"

#include <algorithm>
#include <random>
#include <set>

#include "gtest/gtest.h"

namespace octavo {
namespace {

WorkerView Worker(const std::string& name, std::vector<std::int32_t> free,
                  std::int32_t usable = -1) {
  WorkerView worker{.name = name, .free_slots = std::move(free)};
  worker.usable_slots = usable < 0 ? static_cast<std::int32_t>(worker.free_slots.size()) : usable;
  return worker;
}

std::set<std::string> WorkersOf(const std::vector<RankPlacement>& placement, std::int32_t first,
                                std::int32_t count) {
  std::set<std::string> names;
  for (std::int32_t rank = first; rank < first + count; ++rank) {
    names.insert(placement[static_cast<std::size_t>(rank)].worker);
  }
  return names;
}

TEST(Placement, PlacesAllRanksOrNone) {
  const ClusterView cluster{{Worker("a", {0, 1}), Worker("b", {0})}};
  EXPECT_EQ(Place(cluster, {.ranks = 3, .expert_parallel = 1}).size(), 3u);
  EXPECT_TRUE(Place(cluster, {.ranks = 4, .expert_parallel = 1}).empty());
}

TEST(Placement, KeepsAnExpertParallelGroupOnOneWorkerWhereItFits) {
  const ClusterView cluster{{Worker("a", {1}), Worker("b", {0, 1, 2, 3}), Worker("c", {0, 1})}};
  const auto placed = Place(cluster, {.ranks = 4, .expert_parallel = 2});
  ASSERT_EQ(placed.size(), 4u);
  EXPECT_EQ(WorkersOf(placed, 0, 2).size(), 1u);
  EXPECT_EQ(WorkersOf(placed, 2, 2).size(), 1u);
}

TEST(Placement, TakesTheFullestWorkerThatHoldsTheGroup) {
  const ClusterView cluster{{Worker("big", {0, 1, 2, 3}), Worker("small", {5, 6})}};
  const auto placed = Place(cluster, {.ranks = 2, .expert_parallel = 2});
  EXPECT_EQ(placed, (std::vector<RankPlacement>{{0, "small", 5}, {1, "small", 6}}));
}

TEST(Placement, SpreadsAGroupThatFitsNoWorkerOverAsFewAsPossible) {
  const ClusterView cluster{{Worker("a", {0}), Worker("b", {0, 1, 2}), Worker("c", {0, 1})}};
  const auto placed = Place(cluster, {.ranks = 5, .expert_parallel = 5});
  ASSERT_EQ(placed.size(), 5u);
  EXPECT_EQ(WorkersOf(placed, 0, 5), (std::set<std::string>{"b", "c"}));
}

TEST(Placement, UsesABlamedWorkerOnlyWhenNothingElseFits) {
  const ClusterView cluster{{Worker("a", {0, 1}), Worker("b", {0, 1})}};
  const auto one = Place(cluster, {.ranks = 2, .expert_parallel = 2, .blamed_workers = {"a"}});
  EXPECT_EQ(WorkersOf(one, 0, 2), (std::set<std::string>{"b"}));
  const auto all = Place(cluster, {.ranks = 4, .expert_parallel = 2, .blamed_workers = {"a"}});
  EXPECT_EQ(all.size(), 4u);
}

TEST(Placement, IgnoresWorkersThatAreNotReadyOrLackTheDevice) {
  ClusterView cluster{{Worker("a", {0}), Worker("b", {0}), Worker("c", {0}), Worker("d", {0})}};
  cluster.workers[0].condition = WorkerCondition::kDraining;
  cluster.workers[1].condition = WorkerCondition::kSilent;
  cluster.workers[2].device = {.is_cuda = true, .sm = 90};
  const auto placed = Place(cluster, {.ranks = 1, .expert_parallel = 1});
  EXPECT_EQ(placed, (std::vector<RankPlacement>{{0, "d", 0}}));
  EXPECT_TRUE(Place(cluster, {.ranks = 2, .expert_parallel = 1}).empty());
  const Capacity capacity = CapacityFor(cluster, {.ranks = 2, .expert_parallel = 1});
  EXPECT_EQ(capacity.free, 1);
  EXPECT_EQ(capacity.draining, 1);
  EXPECT_EQ(capacity.workers_known, 3);
  EXPECT_EQ(capacity.workers_matching, 2);
}

TEST(Placement, RefusesADeviceThatCannotRunTheRecipeWithTheReason) {
  ClusterView cluster{{Worker("old", {0})}};
  cluster.workers[0].device = {.is_cuda = true, .sm = 80};
  const GangRequest request{.ranks = 1,
                            .expert_parallel = 1,
                            .cuda = true,
                            .recipes = {DefaultRecipe(RecipeKind::kFp8Flow)}};
  EXPECT_TRUE(Place(cluster, request).empty());
  EXPECT_FALSE(CapacityFor(cluster, request).refusal.empty());
}

// Against the definition: a placement exists exactly when the free slots suffice; it uses each slot
// once; a group is split only when no worker had room for it whole.
TEST(Placement, RandomClustersObeyTheRules) {
  const std::uint32_t seed = std::random_device()();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937 rng(seed);
  for (int round = 0; round < 2000; ++round) {
    ClusterView cluster;
    std::int32_t free = 0;
    const int workers = static_cast<int>(rng() % 6);
    for (int w = 0; w < workers; ++w) {
      std::vector<std::int32_t> slots;
      for (std::int32_t slot = 0; slot < 6; ++slot) {
        if (rng() % 2 == 0) {
          slots.push_back(slot);
        }
      }
      free += static_cast<std::int32_t>(slots.size());
      cluster.workers.push_back(Worker("w" + std::to_string(w), slots));
    }
    const auto group = static_cast<std::int32_t>(1 + rng() % 4);
    const auto ranks = group * static_cast<std::int32_t>(1 + rng() % 4);
    const auto placed = Place(cluster, {.ranks = ranks, .expert_parallel = group});
    ASSERT_EQ(placed.empty(), ranks > free);
    if (placed.empty()) {
      continue;
    }
    std::set<std::pair<std::string, std::int32_t>> used;
    for (std::int32_t rank = 0; rank < ranks; ++rank) {
      const RankPlacement& p = placed[static_cast<std::size_t>(rank)];
      ASSERT_EQ(p.rank, rank);
      ASSERT_TRUE(used.insert({p.worker, p.slot}).second) << "slot used twice";
      const auto owner = std::find_if(cluster.workers.begin(), cluster.workers.end(),
                                      [&p](const WorkerView& w) { return w.name == p.worker; });
      ASSERT_NE(owner, cluster.workers.end());
      ASSERT_TRUE(std::find(owner->free_slots.begin(), owner->free_slots.end(), p.slot) !=
                  owner->free_slots.end());
    }
    // How many whole groups fit at most: the sum of floors. Best fit reaches it.
    std::int32_t whole_possible = 0;
    for (const WorkerView& worker : cluster.workers) {
      whole_possible += static_cast<std::int32_t>(worker.free_slots.size()) / group;
    }
    std::int32_t whole = 0;
    for (std::int32_t first = 0; first < ranks; first += group) {
      whole += WorkersOf(placed, first, group).size() == 1 ? 1 : 0;
    }
    ASSERT_GE(whole, std::min(whole_possible, ranks / group));
    ClusterView after = cluster;
    Occupy(after, placed);
    std::int32_t left = 0;
    for (const WorkerView& worker : after.workers) {
      left += static_cast<std::int32_t>(worker.free_slots.size());
    }
    ASSERT_EQ(left, free - ranks);
  }
}

}  // namespace
}  // namespace octavo
