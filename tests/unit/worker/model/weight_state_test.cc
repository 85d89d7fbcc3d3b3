// What is left out of a pass because nobody needs it: BF16 copies that no product reads, and zeroed
// gradients of experts.
#include <cmath>
#include <limits>

#include "kernels/formats/bf16.h"
#include "tests/unit/worker/model/model_harness.h"

namespace octavo::testing {
namespace {

// One rank alone.
struct Lone {
  Lone(const RunConfig& run, RecipeKind kind)
      : ranks(InprocRanks::Make(1, 1)),
        rank(SmallModel(), run, Uniform(SmallModel(), kind), &ranks.ranks[0]) {}
  Transformer& model() { return rank.model(); }
  InprocRanks ranks;
  ModelRank rank;
};

bool IsExperts(const Parameter& p) { return p.region == ParameterRegion::kExpert; }

void PoisonExpertGradients(Transformer& model) {
  for (Parameter& p : model.parameters().all()) {
    if (IsExperts(p)) {
      std::fill_n(p.grad, p.count, std::numeric_limits<float>::quiet_NaN());
    }
  }
}

// Gradients of one pass, without the optimizer.
std::vector<float> PassGradients(Lone& lone, bool poisoned) {
  if (poisoned) {
    PoisonExpertGradients(lone.model());
  }
  lone.model().BeginStep(lone.rank.Options());
  EXPECT_TRUE(lone.rank.RunMicrobatches(5).ok());
  EXPECT_TRUE(lone.model().FinishPass().ok());
  std::vector<float> all;
  for (const Parameter& p : lone.model().parameters().all()) {
    all.insert(all.end(), p.grad, p.grad + p.count);
  }
  return all;
}

TEST(WeightState, WhatThePassBeforeLeftInExpertGradientsDoesNotCount) {
  for (RecipeKind kind : {RecipeKind::kBf16, RecipeKind::kFp8Flow, RecipeKind::kFp8Current}) {
    for (float capacity : {2.0f, 0.3f}) {  // 0.3: several rounds
      RunConfig run = SmallRun(false);
      run.microbatches = 2;
      run.recv_capacity = capacity;
      Lone clean(run, kind), poisoned(run, kind);
      const std::vector<float> expected = PassGradients(clean, false);
      const std::vector<float> found = PassGradients(poisoned, true);
      ASSERT_EQ(found.size(), expected.size());
      for (std::size_t i = 0; i < found.size(); ++i) {
        ASSERT_EQ(found[i], expected[i]) << Name(kind) << ", capacity " << capacity << ", " << i;
      }
    }
  }
}

TEST(WeightState, ExpertsThatNoPassReachedHaveZeroGradients) {
  Lone lone(SmallRun(false), RecipeKind::kBf16);
  PoisonExpertGradients(lone.model());
  lone.model().BeginStep(lone.rank.Options());
  EXPECT_TRUE(lone.model().FinishPass().ok());
  for (const Parameter& p : lone.model().parameters().all()) {
    for (std::int64_t i = 0; i < p.count; ++i) {
      ASSERT_EQ(p.grad[i], 0.0f) << p.name;
    }
  }
}

TEST(WeightState, CopiesThatNobodyReadsAreLeftAloneAndMadeAnewForTheFirstReader) {
  Lone lone(SmallRun(false), RecipeKind::kFp8Flow);
  ASSERT_TRUE(lone.rank.Step(0).ok());
  ASSERT_TRUE(lone.rank.Step(1).ok());
  std::int64_t stale = 0;
  for (const Parameter& p : lone.model().parameters().all()) {
    stale += p.state.copy_stale ? p.count : 0;
    if (IsExperts(p)) {
      EXPECT_TRUE(p.state.copy_stale) << p.name;
    }
  }
  EXPECT_GT(stale, 0);

  // Every reader finds the rounded masters: in the step of the switch, after it, and after a step
  // that the optimizer skipped.
  ASSERT_TRUE(lone.model().SetPlan(Uniform(SmallModel(), RecipeKind::kBf16)).ok());
  const auto expect_current = [&lone](const char* when) {
    for (const Parameter& p : lone.model().parameters().all()) {
      const auto* copy = static_cast<const std::uint16_t*>(p.copy);
      for (std::int64_t i = 0; IsExperts(p) && i < p.count; ++i) {
        ASSERT_EQ(copy[i], Bf16FromFloat(p.master[i])) << when << ": " << p.name;
      }
    }
  };
  lone.model().BeginStep(lone.rank.Options());
  ASSERT_TRUE(lone.rank.RunMicrobatches(2).ok());
  expect_current("in the first BF16 step");
  ASSERT_TRUE(lone.model().FinishPass().ok());
  lone.model().ApplyOptimizer({.lr = 1e-3, .t = 3, .grad_factor = 1.0f, .skip = true});
  ASSERT_TRUE(lone.model().EndStep(false).ok());
  expect_current("after a skipped step");
  ASSERT_TRUE(lone.rank.Step(3).ok());
  expect_current("after the optimizer");
}

}  // namespace
}  // namespace octavo::testing
