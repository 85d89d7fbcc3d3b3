// A save that failed on a full disk left its partial folder, so that the disk stayed full and every
// later save failed too; those of an older attempt stayed until a save succeeded.
#include <gmock/gmock.h>

#include "base/str.h"
#include "tests/support/faulty_fs.h"
#include "tests/unit/worker/rank/rank_harness.h"
#include "worker/checkpoint/store.h"

namespace octavo {
namespace {

using testing::TestJob;

std::vector<std::string> Leavings(const FileSystem& fs, const std::string& root) {
  std::vector<std::string> found;
  const auto names = fs.ListDirectory(root);
  EXPECT_TRUE(names.ok());
  const std::vector<std::string> all = names.ok() ? *names : std::vector<std::string>();
  for (const std::string& name : all) {
    if (EndsWith(name, ".partial") || EndsWith(name, ".deleting")) {
      found.push_back(name);
    }
  }
  return found;
}

TEST(FullDisk, AFailedSaveLeavesNothing) {
  TestJob job;
  FaultyFileSystem faulty(&PosixFileSystem::Get());
  job.fs = &faulty;
  job.config.steps = 3;
  job.NewHosts(2);
  job.host().on_message = [&](const iv1::RankToWorker& m) {
    if (m.has_step()) {
      faulty.FailWritesAfterBytes(1000);
    }
  };
  EXPECT_EQ(job.Run(2, 1)[0].failure, FailureClass::kCheckpointUnusable);
  EXPECT_THAT(Leavings(PosixFileSystem::Get(), job.config.checkpoint.root), ::testing::IsEmpty());
}

TEST(FullDisk, AnAttemptRemovesWhatOlderOnesLeftBeforeItWrites) {
  TempDir dir;
  FileSystem& fs = PosixFileSystem::Get();
  CheckpointStore older(fs, dir.path(), "uid", 1);
  CheckpointStore mine(fs, dir.path(), "uid", 2);
  ASSERT_TRUE(older.Begin(0).ok());
  ASSERT_TRUE(fs.CreateDirectories(older.PartialPath(7)).ok());
  ASSERT_TRUE(fs.CreateDirectories(older.FinalPath(5) + ".deleting").ok());
  ASSERT_TRUE(fs.CreateDirectories(mine.PartialPath(9)).ok());
  ASSERT_TRUE(mine.Begin(0).ok());
  EXPECT_FALSE(fs.Exists(older.PartialPath(7)));
  EXPECT_FALSE(fs.Exists(older.FinalPath(5) + ".deleting"));
  EXPECT_TRUE(fs.Exists(mine.PartialPath(9)));
  // A zombie removes nothing of a newer attempt.
  CheckpointStore zombie(fs, dir.path(), "uid", 1);
  EXPECT_FALSE(zombie.Begin(0).ok());
  EXPECT_TRUE(fs.Exists(mine.PartialPath(9)));
}

}  // namespace
}  // namespace octavo
