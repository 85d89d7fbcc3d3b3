// A checkpoint belongs to the model, not to a recipe: whatever it was trained in, it goes on in any
// other. Masters and moments are FP32 everywhere; what only one recipe needs (amax windows) is left
// behind or starts by priming.
#include <gtest/gtest.h>

#include <filesystem>

#include "tests/unit/worker/rank/rank_harness.h"

namespace octavo {
namespace {

using testing::TestJob;

bool IsFp8(RecipeKind kind) { return DefaultRecipe(kind).is_fp8(); }

class RecipePairs : public ::testing::TestWithParam<int> {};

TEST_P(RecipePairs, ACheckpointOfAnyRecipeResumesUnderAnyOther) {
  const auto before = static_cast<RecipeKind>(GetParam());
  TestJob first(before);
  first.config.steps = 20;
  EXPECT_ALL_OK(first.Run());
  TestJob whole(before);
  whole.config.steps = 22;
  EXPECT_ALL_OK(whole.Run());
  const std::vector<double> expected = whole.host().losses();
  ASSERT_EQ(expected.size(), 22u);
  ASSERT_LT(expected[20], expected[0] - 0.3) << "what is resumed must have learnt something";
  for (int kind = 0; kind < kRecipeKindCount; ++kind) {
    const auto after = static_cast<RecipeKind>(kind);
    SCOPED_TRACE(std::string(Name(before)) + " → " + std::string(Name(after)));
    TestJob job(after);
    std::filesystem::copy(first.config.checkpoint.root, job.config.checkpoint.root,
                          std::filesystem::copy_options::recursive);
    job.plan.version = 2;
    job.config.attempt = first.config.attempt;
    job.config.steps = 22;
    EXPECT_ALL_OK(job.Run());
    const auto steps = job.host().steps();
    ASSERT_EQ(steps.size(), 2u);
    EXPECT_EQ(steps[0].step(), 21) << "it must not begin again";
    EXPECT_EQ(steps[0].plan_version(), 2);
    if (before == after) {
      EXPECT_EQ(steps[0].loss(), expected[20]);
      EXPECT_EQ(steps[1].loss(), expected[21]);
      continue;
    }
    // The same weights and tokens: another recipe moves the loss by its rounding.
    EXPECT_NEAR(steps[0].loss(), expected[20], 0.05);
    EXPECT_NEAR(steps[1].loss(), expected[21], 0.1);
    // FP8 recipes may agree to the bit here: priming is current scaling, and powers of two round
    // alike whatever they are.
    if (IsFp8(before) != IsFp8(after)) {
      EXPECT_NE(steps[0].loss(), expected[20]) << "nothing was switched";
    }
  }
}

INSTANTIATE_TEST_SUITE_P(From, RecipePairs, ::testing::Range(0, kRecipeKindCount),
                         [](const auto& info) {
                           return std::string(Name(static_cast<RecipeKind>(info.param)));
                         });

}  // namespace
}  // namespace octavo
