// A job that was suspended or restarted while its checkpoint folder was not mounted began silently
// from step 0: an empty folder looked like a new job.
#include <gmock/gmock.h>

#include "tests/unit/worker/rank/rank_harness.h"

namespace octavo {
namespace {

using ::testing::HasSubstr;
using testing::TestJob;

TEST(CheckpointVanished, AnEmptyFolderIsNoNewJobWhenACheckpointIsKnown) {
  TestJob job;
  job.config.steps = 2;
  EXPECT_ALL_OK(job.Run(2, 1));
  const std::string saved = job.host().checkpoints().back().path();
  job.config.checkpoint.known_step = 2;
  job.config.checkpoint.known_path = saved;
  job.config.steps = 4;

  ASSERT_TRUE(job.fs->Rename(job.dir.File("checkpoints"), job.dir.File("away")).ok());
  const auto outcomes = job.Run(2, 1);
  for (const TrainingOutcome& outcome : outcomes) {
    EXPECT_EQ(outcome.failure, FailureClass::kCheckpointUnusable);
    EXPECT_THAT(outcome.message,
                HasSubstr("the controller knows of a checkpoint of step 2 in " + saved));
    EXPECT_THAT(outcome.message, HasSubstr("is the file system mounted?"));
  }

  // Mounted again, it goes on where it was.
  ASSERT_TRUE(job.fs->RemoveTree(job.dir.File("checkpoints")).ok());
  ASSERT_TRUE(job.fs->Rename(job.dir.File("away"), job.dir.File("checkpoints")).ok());
  job.NewHosts(2);
  EXPECT_ALL_OK(job.Run(2, 1));
  EXPECT_EQ(job.host().steps().front().step(), 3);
}

}  // namespace
}  // namespace octavo
