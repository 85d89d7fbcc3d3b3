// Random faults from a seed: first a safety phase in which nothing that was promised may break,
// then a liveness phase in which everything must come to an end.
//
//   cluster_sim_test                               a few seeds, fresh ones
//   OCTAVO_SIM_SEED=1234 cluster_sim_test          that run again
//   OCTAVO_SIM_RUNS=1000 cluster_sim_test          a long search
#include <cstdlib>
#include <iostream>
#include <random>

#include "base/str.h"
#include "gtest/gtest.h"
#include "tests/sim/sim_cluster.h"

namespace octavo::sim {
namespace {

std::int64_t FromEnvironment(const char* name, std::int64_t otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : ParseInt64(text).value_or(otherwise);
}

void RunSeed(std::uint64_t seed, Cluster::Counts* sum, std::map<std::string, int>* ends) {
  SCOPED_TRACE(testing::Message() << "run again with OCTAVO_SIM_SEED=" << seed);
  Cluster cluster({.seed = seed,
                   .workers = 2 + static_cast<int>(seed % 4),
                   .slots = 2,
                   .jobs = 3 + static_cast<int>(seed % 5)});
  cluster.SafetyPhase(240);
  ASSERT_EQ(cluster.violation(), "");
  cluster.LivenessPhase(3600);
  ASSERT_EQ(cluster.violation(), "");
  ASSERT_EQ(cluster.Unfinished(), "");
  const Cluster::Counts& counts = cluster.counts();
  sum->controller_crashes += counts.controller_crashes;
  sum->agent_crashes += counts.agent_crashes;
  sum->cuts += counts.cuts;
  sum->kills += counts.kills;
  sum->plans += counts.plans;
  sum->retries += counts.retries;
  for (const auto& [name, count] : cluster.ends()) {
    (*ends)[name] += count;
  }
}

TEST(ClusterSim, PromisesHoldUnderFaultsAndEverythingEndsAfterwards) {
  const std::int64_t fixed = FromEnvironment("OCTAVO_SIM_SEED", -1);
  const std::int64_t runs = fixed >= 0 ? 1 : FromEnvironment("OCTAVO_SIM_RUNS", 40);
  Cluster::Counts sum;
  std::map<std::string, int> ends;
  std::random_device random;
  for (std::int64_t run = 0; run < runs; ++run) {
    const std::uint64_t seed =
        fixed >= 0 ? static_cast<std::uint64_t>(fixed) : random() % 1000000000;
    RunSeed(seed, &sum, &ends);
    if (HasFatalFailure()) {
      return;
    }
  }
  std::cout << "faults: " << sum.controller_crashes << " controller crashes, " << sum.agent_crashes
            << " worker crashes, " << sum.cuts << " cuts, " << sum.kills << " kills; " << sum.plans
            << " plans, " << sum.retries << " repeated submits\n";
  for (const auto& [name, count] : ends) {
    std::cout << "  attempts ended by " << name << ": " << count << "\n";
  }
  if (fixed < 0) {
    // The faults were real: a simulator that breaks nothing proves nothing.
    EXPECT_GT(sum.controller_crashes, 0);
    EXPECT_GT(sum.agent_crashes, 0);
    EXPECT_GT(sum.cuts, 0);
    EXPECT_GT(ends["RANK_EXIT"], 0);
    EXPECT_GT(ends["WORKER_LOST"], 0);
  }
}

TEST(ClusterSim, TheSameSeedGivesTheSameRun) {
  const auto run = [] {
    Cluster cluster({.seed = 7, .workers = 3, .slots = 2, .jobs = 4});
    cluster.SafetyPhase(120);
    return StrCat(cluster.violation(), cluster.Unfinished(), cluster.attempts(),
                  cluster.counts().kills, cluster.counts().controller_crashes);
  };
  EXPECT_EQ(run(), run());
}

TEST(ClusterSim, WithoutFaultsEveryJobSucceedsAtItsFirstAttempt) {
  Cluster cluster({.seed = 3, .workers = 4, .slots = 2, .jobs = 5});
  cluster.LivenessPhase(1800);
  EXPECT_EQ(cluster.violation(), "");
  EXPECT_EQ(cluster.Unfinished(), "");
}

}  // namespace
}  // namespace octavo::sim
