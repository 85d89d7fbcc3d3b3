// Whole trainings on memory that the host cannot touch (tests/support/guarded_ops.h): the feed, the
// control vector, checkpoints and loading go through copies, and the numbers are the plain
// backend's.
#include "tests/support/guarded_ops.h"
#include "tests/unit/worker/rank/rank_harness.h"

namespace octavo::testing {
namespace {

// Ten steps with a checkpoint in the middle, an end, and a second attempt that loads it.
std::vector<double> Losses(RecipeKind recipe, int ranks, bool guarded) {
  TestJob job(recipe);
  if (guarded) {
    job.wrap = [](const Backend& backend) { return GuardedOps(backend); };
  }
  job.config.steps = 5;
  job.config.checkpoint.interval_steps = 3;
  job.config.validation_interval = 5;
  job.config.validation_batches = 2;
  EXPECT_ALL_OK(job.Run(ranks, ranks));
  job.config.steps = 8;
  EXPECT_ALL_OK(job.Run(ranks, ranks));
  std::vector<double> losses = job.host().losses();
  EXPECT_EQ(losses.size(), 8u);
  losses.push_back(job.host().steps().back().validation_loss());
  return losses;
}

TEST(DeviceMemory, TrainingSavingAndLoadingNeverTouchItOnTheHost) {
  for (RecipeKind recipe : {RecipeKind::kBf16, RecipeKind::kFp8Delayed, RecipeKind::kFp8Flow}) {
    EXPECT_EQ(Losses(recipe, 1, true), Losses(recipe, 1, false)) << Name(recipe);
  }
}

TEST(DeviceMemory, TwoRanksStageThroughPinnedMemory) {
  EXPECT_EQ(Losses(RecipeKind::kFp8Flow, 2, true), Losses(RecipeKind::kFp8Flow, 2, false));
}

}  // namespace
}  // namespace octavo::testing
