#include "worker/checkpoint/store.h"

#include <gtest/gtest.h>
#include <stdlib.h>
#include <unistd.h>

#include <cstring>

#include "base/status.h"
#include "base/str.h"
#include "tests/support/faulty_fs.h"
#include "tests/support/temp_dir.h"
#include "worker/checkpoint/reader.h"
#include "worker/checkpoint/writer.h"

namespace octavo {
namespace {

// Thousands of fsyncs: in memory where the machine has /dev/shm (an explicit TMPDIR wins).
[[maybe_unused]] const bool kInMemory =
    ::access("/dev/shm", W_OK) == 0 && ::setenv("TMPDIR", "/dev/shm", 0) == 0;

PosixFileSystem& Posix() { return PosixFileSystem::Get(); }

OwnedTensor Tensor(const std::string& name, std::size_t elements, float value) {
  OwnedTensor t{.name = name, .shape = {static_cast<std::int64_t>(elements)}};
  t.bytes.resize(elements * 4);
  for (std::size_t i = 0; i < elements; ++i) {
    std::memcpy(&t.bytes[i * 4], &value, 4);
  }
  return t;
}

Manifest TestManifest(std::int64_t step, std::int32_t attempt) {
  Manifest m;
  m.job_uid = "uid";
  m.job_name = "name";
  m.attempt = attempt;
  m.world_size = 2;
  m.model.layers = 3;
  m.model.dense_layers = {0, 2};
  m.model.norm_eps = 1e-5f;
  m.state.step = step;
  m.state.adam_t = step - 1;
  m.state.losses = {5.25, 0.1, 1.0 / 3};
  m.state.plan_hash = 0xFEDCBA9876543210ull;
  return m;
}

// Two ranks write, the store publishes.
absl::Status Save(FileSystem& fs, const std::string& root, std::int64_t step,
                  std::int32_t attempt) {
  CheckpointStore store(fs, root, "uid", attempt);
  Manifest m = TestManifest(step, attempt);
  for (std::int32_t rank = 0; rank < 2; ++rank) {
    ASSIGN_OR_RETURN(
        ShardFile shard,
        WriteShard(fs, {.folder = store.PartialPath(step),
                        .rank = rank,
                        .tensors = {Tensor(StrCat("t", rank), 100, static_cast<float>(step))}}));
    m.shards.push_back(shard);
  }
  return store.Publish(m);
}

std::vector<std::int64_t> UsableSteps(FileSystem& fs, const std::string& root,
                                      std::int32_t attempt = 99) {
  CheckpointStore store(fs, root, "uid", attempt);
  std::vector<std::int64_t> steps;
  const auto found = store.Candidates();
  EXPECT_TRUE(found.ok()) << ToString(found.status());
  for (const CheckpointInfo& info : *found) {
    if (info.usable) {
      steps.push_back(info.step);
    }
  }
  return steps;
}

using Steps = std::vector<std::int64_t>;

TEST(ManifestTest, RoundTripsExactly) {
  const Manifest m = TestManifest(12, 3);
  const auto back = ParseManifest(SerializeManifest(m), "m");
  ASSERT_TRUE(back.ok()) << ToString(back.status());
  EXPECT_EQ(back->state.losses, m.state.losses);  // bit for bit
  EXPECT_EQ(back->state.plan_hash, m.state.plan_hash);
  EXPECT_EQ(back->model.dense_layers, m.model.dense_layers);
  EXPECT_TRUE(CompareModels(back->model, m.model).ok());
  EXPECT_EQ(SerializeManifest(*back), SerializeManifest(m));
}

TEST(ManifestTest, EveryFlippedByteIsFound) {
  const std::string text = SerializeManifest(TestManifest(12, 3));
  int harmless = 0;
  for (std::size_t i = 0; i < text.size(); ++i) {
    std::string bad = text;
    bad[i] = static_cast<char>(bad[i] ^ 1);
    harmless += ParseManifest(bad, "m").ok() ? 1 : 0;
  }
  // White space between JSON tokens carries no meaning; a flipped line end or space is refused or
  // not.
  EXPECT_LT(harmless, static_cast<int>(text.size() / 5));
  for (std::size_t keep = 0; keep + 2 < text.size(); keep += 7) {
    EXPECT_FALSE(ParseManifest(text.substr(0, keep), "m").ok()) << keep;
  }
}

TEST(ManifestTest, AnotherModelIsNamedFieldByField) {
  ModelConfig a, b;
  a.hidden = 128;
  b.hidden = 256;
  b.router.aux_coefficient = 0.5f;
  const absl::Status status = CompareModels(a, b);
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_NE(Message(status).find("model.hidden is 128 in the checkpoint and 256 in the job"),
            std::string::npos);
  EXPECT_NE(Message(status).find("model.router.aux_coefficient"), std::string::npos);
}

TEST(CheckpointStoreTest, NewestCompleteComesFirstAndReadsBack) {
  TempDir dir;
  ASSERT_TRUE(Save(Posix(), dir.path(), 10, 1).ok());
  ASSERT_TRUE(Save(Posix(), dir.path(), 20, 1).ok());
  EXPECT_EQ(UsableSteps(Posix(), dir.path()), (Steps{20, 10}));
  EXPECT_EQ(Save(Posix(), dir.path(), 20, 1).code(), absl::StatusCode::kAlreadyExists);
  const auto list = ListCheckpoints(Posix(), dir.path());
  ASSERT_TRUE(list.ok());
  const auto reader = CheckpointReader::Open(Posix(), list->front().path);
  ASSERT_TRUE(reader.ok()) << ToString(reader.status());
  std::vector<float> values(100);
  ASSERT_TRUE(
      (*reader)
          ->Read("t1", DType::kF32, {reinterpret_cast<char*>(values.data()), values.size() * 4})
          .ok());
  EXPECT_EQ(values[99], 20.0f);
  EXPECT_EQ((*reader)->Read("t2", DType::kF32, {}).code(), absl::StatusCode::kDataLoss);
}

TEST(CheckpointStoreTest, CutAndMissingShardsAreUnusableWithTheReason) {
  TempDir dir;
  ASSERT_TRUE(Save(Posix(), dir.path(), 10, 1).ok());
  ASSERT_TRUE(Save(Posix(), dir.path(), 20, 1).ok());
  const std::string shard =
      ListCheckpoints(Posix(), dir.path())->front().path + "/rank-00001.safetensors";
  const std::string good = *Posix().ReadFile(shard);
  ASSERT_EQ(::truncate(shard.c_str(), static_cast<off_t>(good.size() - 1)), 0);
  EXPECT_EQ(UsableSteps(Posix(), dir.path()), (Steps{10}));
  EXPECT_NE(ListCheckpoints(Posix(), dir.path())->front().problem.find("cut at byte offset"),
            std::string::npos);
  ASSERT_TRUE(Posix().Remove(shard).ok());
  EXPECT_EQ(UsableSteps(Posix(), dir.path()), (Steps{10}));
}

// Sentences about files: an operator reads them, and no code of ours belongs before them.
TEST(CheckpointStoreTest, ProblemsBeginWithWhatIsWrongAndNotWithAStatusCode) {
  TempDir dir;
  for (const std::int64_t step : {10, 20, 30}) {
    ASSERT_TRUE(Save(Posix(), dir.path(), step, 1).ok());
  }
  const std::vector<CheckpointInfo> whole = *ListCheckpoints(Posix(), dir.path());
  ASSERT_EQ(whole.size(), 3u);
  ASSERT_TRUE(Posix().Remove(whole[0].path + "/rank-00001.safetensors").ok());
  ASSERT_TRUE(Posix().WriteFileAtomic(whole[1].path + "/manifest.json", "{\"step\": 20").ok());
  ASSERT_TRUE(Posix().Remove(whole[2].path + "/manifest.json").ok());
  const std::vector<CheckpointInfo> found = *ListCheckpoints(Posix(), dir.path());
  EXPECT_GE(found.size(), 2u);
  for (const CheckpointInfo& info : found) {
    EXPECT_FALSE(info.usable) << info.path;
    EXPECT_NE(info.problem.find(info.path), std::string::npos) << info.problem;
    for (const char* code : {"DATA_LOSS", "NOT_FOUND"}) {
      EXPECT_EQ(info.problem.find(code), std::string::npos) << info.problem;
    }
  }
  const absl::Status none = FindCheckpoint(Posix(), dir.path()).status();
  EXPECT_EQ(Message(none).find("DATA_LOSS"), std::string::npos) << Message(none);
}

TEST(CheckpointStoreTest, VerifyFindsAFlippedBitThatSizesDoNotShow) {
  TempDir dir;
  ASSERT_TRUE(Save(Posix(), dir.path(), 10, 1).ok());
  const std::string path = ListCheckpoints(Posix(), dir.path())->front().path;
  EXPECT_TRUE(VerifyCheckpoint(Posix(), path).ok());
  const std::string shard = path + "/rank-00000.safetensors";
  std::string bytes = *Posix().ReadFile(shard);
  bytes[bytes.size() - 5] = static_cast<char>(bytes[bytes.size() - 5] ^ 4);
  ASSERT_TRUE(Posix().WriteFileAtomic(shard, bytes).ok());
  const absl::Status status = VerifyCheckpoint(Posix(), path);
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_NE(Message(status).find("rank-00000"), std::string::npos);
}

TEST(CheckpointStoreTest, AZombiesWorkBeyondTheNewAttemptsStartIsIgnoredAndCannotBePublished) {
  TempDir dir;
  CheckpointStore first(Posix(), dir.path(), "uid", 1);
  ASSERT_TRUE(first.Begin(0).ok());
  ASSERT_TRUE(Save(Posix(), dir.path(), 10, 1).ok());
  // Attempt 2 begins from 10; attempt 1 is still alive somewhere.
  CheckpointStore second(Posix(), dir.path(), "uid", 2);
  ASSERT_TRUE(second.Begin(10).ok());
  const absl::Status late = Save(Posix(), dir.path(), 20, 1);
  EXPECT_EQ(late.code(), absl::StatusCode::kAborted) << ToString(late);
  EXPECT_EQ(first.Begin(10).code(), absl::StatusCode::kAborted);
  EXPECT_EQ(second.Begin(10).code(), absl::StatusCode::kAborted);  // only once
  // The race in which attempt 1 had checked just before: its checkpoint appears, and does not
  // count.
  ASSERT_TRUE(Posix().Remove(dir.File("attempt-000002.json")).ok());
  ASSERT_TRUE(Save(Posix(), dir.path(), 30, 1).ok());
  ASSERT_TRUE(second.Begin(10).ok());
  EXPECT_EQ(UsableSteps(Posix(), dir.path()), (Steps{10}));
  ASSERT_TRUE(Save(Posix(), dir.path(), 12, 2).ok());
  EXPECT_EQ(UsableSteps(Posix(), dir.path()), (Steps{12, 10}));
  ASSERT_TRUE(second.Retain(2).ok());
  EXPECT_EQ(ListCheckpoints(Posix(), dir.path())->size(), 2u);  // the zombie's is gone
}

TEST(CheckpointStoreTest, RetainKeepsTheNewestAndCleansLeavings) {
  TempDir dir;
  for (const std::int64_t step : {10, 20, 30, 40}) {
    ASSERT_TRUE(Save(Posix(), dir.path(), step, 3).ok());
  }
  CheckpointStore store(Posix(), dir.path(), "uid", 3);
  CheckpointStore old(Posix(), dir.path(), "uid", 2);
  ASSERT_TRUE(Posix().CreateDirectories(old.PartialPath(50)).ok());
  ASSERT_TRUE(Posix().CreateDirectories(store.PartialPath(35)).ok());
  ASSERT_TRUE(Posix().CreateDirectories(store.PartialPath(50)).ok());  // perhaps being written
  ASSERT_TRUE(Posix().CreateDirectories(dir.File("notes")).ok());
  ASSERT_TRUE(store.Retain(2).ok());
  EXPECT_EQ(UsableSteps(Posix(), dir.path()), (Steps{40, 30}));
  EXPECT_FALSE(Posix().Exists(old.PartialPath(50)));
  EXPECT_FALSE(Posix().Exists(store.PartialPath(35)));
  EXPECT_TRUE(Posix().Exists(store.PartialPath(50)));
  EXPECT_TRUE(Posix().Exists(dir.File("notes")));
}

TEST(CheckpointStoreTest, AnotherJobsCheckpointsAreNotTaken) {
  TempDir dir;
  ASSERT_TRUE(Save(Posix(), dir.path(), 10, 1).ok());
  CheckpointStore other(Posix(), dir.path(), "other", 1);
  const auto found = other.Candidates();
  ASSERT_EQ(found->size(), 1u);
  EXPECT_FALSE(found->front().usable);
  EXPECT_NE(found->front().problem.find("belongs to job uid"), std::string::npos);
}

// kill -9 or a power cut after every single file operation, and in the middle of writes: the older
// checkpoint stays usable, and the newer is whole or invisible.
TEST(CheckpointStoreTest, AKillAtAnyInstantLeavesTheOlderGoodAndTheNewerWholeOrInvisible) {
  std::int64_t total_operations = 0, total_bytes = 0;
  {
    TempDir dir;
    FaultyFileSystem fs(&Posix());
    ASSERT_TRUE(Save(Posix(), dir.path(), 10, 1).ok());
    ASSERT_TRUE(Save(fs, dir.path(), 20, 1).ok());
    total_operations = fs.operations();
    total_bytes = fs.bytes_written();
  }
  ASSERT_GT(total_operations, 10);
  const auto check = [](FaultyFileSystem& fs, const std::string& root, bool saved,
                        const std::string& what) {
    const Steps steps = UsableSteps(Posix(), root);
    if (saved) {
      EXPECT_EQ(steps, (Steps{20, 10})) << what;
    } else {
      EXPECT_TRUE(steps == (Steps{10}) || steps == (Steps{20, 10})) << what;
    }
    const auto list = ListCheckpoints(Posix(), root);
    ASSERT_TRUE(list.ok()) << what;
    for (const CheckpointInfo& info : *list) {
      EXPECT_TRUE(VerifyCheckpoint(Posix(), info.path).ok()) << what << " " << info.path;
    }
    // The next attempt writes the same step without trouble.
    EXPECT_TRUE(Save(Posix(), root, 21, 2).ok()) << what;
  };
  for (std::int64_t n = 0; n <= total_operations; ++n) {
    for (const bool power_cut : {false, true}) {
      TempDir dir;
      ASSERT_TRUE(Save(Posix(), dir.path(), 10, 1).ok());
      FaultyFileSystem fs(&Posix());
      fs.StopAfterOperations(n);
      const bool saved = Save(fs, dir.path(), 20, 1).ok();
      EXPECT_EQ(saved, n == total_operations);
      power_cut ? fs.LosePower() : fs.ClearFaults();
      check(fs, dir.path(), saved, StrCat("after operation ", n, " power_cut ", power_cut));
    }
  }
  for (std::int64_t bytes = 0; bytes < total_bytes; bytes += 37) {
    TempDir dir;
    ASSERT_TRUE(Save(Posix(), dir.path(), 10, 1).ok());
    FaultyFileSystem fs(&Posix());
    fs.StopAfterBytes(bytes);
    EXPECT_FALSE(Save(fs, dir.path(), 20, 1).ok());
    fs.LosePower();
    check(fs, dir.path(), false, StrCat("after byte ", bytes));
  }
}

TEST(CheckpointStoreTest, AFullDiskIsReportedAndLosesNothing) {
  TempDir dir;
  ASSERT_TRUE(Save(Posix(), dir.path(), 10, 1).ok());
  FaultyFileSystem fs(&Posix());
  for (const std::int64_t room : {0, 100, 600, 1000}) {
    fs.FailWritesAfterBytes(room);
    EXPECT_EQ(Save(fs, dir.path(), 20, 1).code(), absl::StatusCode::kResourceExhausted) << room;
    EXPECT_EQ(UsableSteps(Posix(), dir.path()), (Steps{10}));
  }
  fs.ClearFaults();
  EXPECT_TRUE(Save(fs, dir.path(), 20, 1).ok());  // space is back
  EXPECT_EQ(UsableSteps(Posix(), dir.path()), (Steps{20, 10}));
}

// At the start of a save, or in its middle: the device failed and the kernel remounted it.
TEST(CheckpointStoreTest, AReadOnlyDiskIsReportedAndLosesNothing) {
  TempDir dir;
  ASSERT_TRUE(Save(Posix(), dir.path(), 10, 1).ok());
  FaultyFileSystem fs(&Posix());
  fs.TurnReadOnly();
  const absl::Status refused = Save(fs, dir.path(), 20, 1);
  EXPECT_EQ(refused.code(), absl::StatusCode::kPermissionDenied);
  EXPECT_NE(Message(refused).find("Read-only file system"), std::string::npos) << Message(refused);
  EXPECT_EQ(UsableSteps(Posix(), dir.path()), (Steps{10}));
  fs.ClearFaults();
  ShardWriter writer(fs);
  writer.Start({.folder = dir.File("q"), .tensors = {Tensor("a", 1000, 2)}});
  ASSERT_TRUE(writer.Finish().ok());
  fs.TurnReadOnly();
  writer.Start({.folder = dir.File("q"), .tensors = {Tensor("a", 1000, 2)}});
  EXPECT_EQ(writer.Finish().status().code(), absl::StatusCode::kPermissionDenied);
  fs.ClearFaults();
  EXPECT_TRUE(Save(fs, dir.path(), 20, 1).ok());  // writable again
  EXPECT_EQ(UsableSteps(Posix(), dir.path()), (Steps{20, 10}));
}

TEST(ShardWriterTest, WritesInTheBackgroundAndReturnsTheDigestOrTheError) {
  TempDir dir;
  FaultyFileSystem fs(&Posix());
  ShardWriter writer(fs);
  EXPECT_TRUE(writer.done());
  writer.Start({.folder = dir.File("p"), .rank = 3, .tensors = {Tensor("a", 1000, 2)}});
  const auto shard = writer.Finish();
  ASSERT_TRUE(shard.ok()) << ToString(shard.status());
  EXPECT_EQ(shard->file, "rank-00003.safetensors");
  EXPECT_EQ(DigestFile(Posix(), dir.File("p/rank-00003.safetensors"))->crc32c, shard->crc32c);
  fs.FailWritesAfterBytes(10);
  writer.Start({.folder = dir.File("q"), .tensors = {Tensor("a", 1000, 2)}});
  EXPECT_EQ(writer.Finish().status().code(), absl::StatusCode::kResourceExhausted);
}

TEST(DiffCheckpointsTest, NamesWhatDiffers) {
  TempDir dir;
  ASSERT_TRUE(Save(Posix(), dir.path(), 10, 1).ok());
  ASSERT_TRUE(Save(Posix(), dir.path(), 20, 1).ok());
  const auto list = *ListCheckpoints(Posix(), dir.path());
  const auto same = DiffCheckpoints(Posix(), list[0].path, list[0].path);
  ASSERT_TRUE(same.ok());
  EXPECT_TRUE(same->empty());
  const auto diff = DiffCheckpoints(Posix(), list[1].path, list[0].path);
  ASSERT_TRUE(diff.ok());
  EXPECT_EQ(diff->front(), "step: 10 | 20");
  EXPECT_EQ(diff->back(), "t1: 100 of 100 elements differ, at most by 10");
}

}  // namespace
}  // namespace octavo
