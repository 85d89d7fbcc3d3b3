#include "base/file.h"

#include <array>

#include "base/status.h"
#include "base/str.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/faulty_fs.h"
#include "tests/support/temp_dir.h"

namespace octavo {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

PosixFileSystem& Posix() { return PosixFileSystem::Get(); }

TEST(PosixFileSystem, WritesReadsListsRenamesAndRemoves) {
  const TempDir dir;
  const std::string folder = dir.File("a/b");
  ASSERT_TRUE(Posix().CreateDirectories(folder).ok());
  ASSERT_TRUE(Posix().CreateDirectories(folder).ok()) << "existing is fine";
  ASSERT_TRUE(Posix().WriteFileAtomic(folder + "/two", "22").ok());
  ASSERT_TRUE(Posix().WriteFileAtomic(folder + "/one", std::string("1\0", 2)).ok());
  EXPECT_EQ(*Posix().ReadFile(folder + "/one"), std::string("1\0", 2));
  EXPECT_EQ(*Posix().FileSize(folder + "/two"), 2);
  EXPECT_THAT(*Posix().ListDirectory(folder), ElementsAre("one", "two"));  // no temporaries left
  ASSERT_TRUE(Posix().Rename(folder + "/one", folder + "/two").ok());
  EXPECT_THAT(*Posix().ListDirectory(folder), ElementsAre("two"));
  EXPECT_TRUE(*Posix().IsDirectory(folder));
  EXPECT_EQ(Posix().Remove(folder).code(), absl::StatusCode::kFailedPrecondition);
  ASSERT_TRUE(Posix().RemoveTree(dir.File("a")).ok());
  EXPECT_FALSE(Posix().Exists(folder));
  EXPECT_TRUE(Posix().RemoveTree(dir.File("a")).ok()) << "missing is fine";
  EXPECT_GT(*Posix().FreeBytes(dir.path()), 0);
}

TEST(PosixFileSystem, AppendContinuesAndReadAtAndMapSeeTheBytes) {
  const TempDir dir;
  const std::string path = dir.File("log");
  for (const char* part : {"hello ", "world"}) {
    auto file = *Posix().OpenForAppend(path);
    ASSERT_TRUE(file->Append(part).ok());
    ASSERT_TRUE(file->Sync().ok());
    ASSERT_TRUE(file->Close().ok());
    ASSERT_TRUE(file->Close().ok()) << "idempotent";
  }
  const auto file = *Posix().OpenForRead(path);
  EXPECT_EQ(file->size_bytes(), 11);
  std::array<char, 5> out;
  ASSERT_TRUE(file->ReadAt(6, out).ok());
  EXPECT_EQ(std::string_view(out.data(), out.size()), "world");
  EXPECT_EQ(file->ReadAt(7, out).code(), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(*file->Map(), "hello world");
}

TEST(PosixFileSystem, ErrorsNameThePathAndHaveTheRightCode) {
  const TempDir dir;
  const std::string missing = dir.File("missing");
  for (const absl::Status& status :
       {Posix().ReadFile(missing).status(), Posix().OpenForRead(missing).status(),
        Posix().ListDirectory(missing).status(), Posix().Remove(missing),
        Posix().Rename(missing, dir.File("x")), Posix().FileSize(missing).status(),
        Posix().FreeBytes(missing).status(), Posix().SyncDirectory(missing),
        Posix().WriteFileAtomic(missing + "/x", "1")}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kNotFound) << ToString(status);
    EXPECT_THAT(Message(status), HasSubstr(missing));
  }
  EXPECT_EQ(Posix().ReadFile(dir.path()).status().code(), absl::StatusCode::kFailedPrecondition);
  ASSERT_TRUE(Posix().WriteFileAtomic(dir.File("file"), "").ok());
  EXPECT_EQ(Posix().CreateDirectories(dir.File("file/sub")).code(),
            absl::StatusCode::kFailedPrecondition);
}

TEST(PosixFileSystem, LockIsExclusiveUntilDropped) {
  const TempDir dir;
  auto lock = *Posix().LockFile(dir.File("lock"));
  const auto second = Posix().LockFile(dir.File("lock"));
  EXPECT_EQ(second.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(Message(second.status()), HasSubstr("another process"));
  lock.reset();
  EXPECT_TRUE(Posix().LockFile(dir.File("lock")).ok());
}

TEST(Path, JoinAndSplit) {
  EXPECT_EQ(JoinPath("a", "b"), "a/b");
  EXPECT_EQ(JoinPath("a/", "b"), "a/b");
  EXPECT_EQ(JoinPath("a", "/b"), "/b");
  EXPECT_EQ(DirectoryName("/a/b"), "/a");
  EXPECT_EQ(DirectoryName("b"), ".");
  EXPECT_EQ(DirectoryName("/b"), "/");
  EXPECT_EQ(BaseName("/a/b"), "b");
}

TEST(FaultyFileSystem, FullDiskCutsTheWriteAndLeavesTheOldFile) {
  const TempDir dir;
  FaultyFileSystem fs(&Posix());
  const std::string path = dir.File("manifest");
  ASSERT_TRUE(fs.WriteFileAtomic(path, "old").ok());
  fs.FailWritesAfterBytes(4);
  const absl::Status status = fs.WriteFileAtomic(path, "new content");
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << ToString(status);
  EXPECT_THAT(Message(status), HasSubstr(path));
  EXPECT_EQ(*fs.ReadFile(path), "old");
  EXPECT_THAT(*fs.ListDirectory(dir.path()), ElementsAre("manifest"));
  fs.ClearFaults();
  EXPECT_TRUE(fs.WriteFileAtomic(path, "new content").ok());
}

TEST(FaultyFileSystem, UnsyncedBytesAndNamesAreLostWithPower) {
  const TempDir dir;
  FaultyFileSystem fs(&Posix());
  const std::string kept = dir.File("kept"), lost = dir.File("lost");
  auto file = *fs.OpenForWrite(kept);
  ASSERT_TRUE(file->Append("abc").ok());
  ASSERT_TRUE(file->Sync().ok());
  ASSERT_TRUE(file->Append("def").ok());
  ASSERT_TRUE(fs.SyncDirectory(dir.path()).ok());
  auto other = *fs.OpenForWrite(lost);
  ASSERT_TRUE(other->Append("x").ok());
  ASSERT_TRUE(other->Sync().ok());  // the bytes, but not the name
  fs.LosePower();
  EXPECT_EQ(*fs.ReadFile(kept), "abc");
  EXPECT_FALSE(fs.Exists(lost));
}

// The property that every durable writer builds on: at any instant, old or new, never a mixture.
TEST(FileSystem, WriteFileAtomicSurvivesAKillAndPowerCutAtEveryInstant) {
  const TempDir dir;
  const std::string path = dir.File("manifest");
  FaultyFileSystem fs(&Posix());
  ASSERT_TRUE(fs.WriteFileAtomic(path, "old").ok());
  const std::int64_t before = fs.operations();
  ASSERT_TRUE(fs.WriteFileAtomic(path, "old").ok());
  const std::int64_t total = fs.operations() - before;
  ASSERT_GE(total, 5);  // open, append, sync, rename, sync folder
  for (std::int64_t n = 0; n <= total; ++n) {
    fs.StopAfterOperations(n);
    const absl::Status status = fs.WriteFileAtomic(path, "new");
    fs.LosePower();
    EXPECT_EQ(*fs.ReadFile(path), status.ok() ? "new" : "old") << "after " << n << " operations";
    ASSERT_TRUE(fs.WriteFileAtomic(path, "old").ok());
  }
  for (std::int64_t bytes = 0; bytes < 3; ++bytes) {
    fs.StopAfterBytes(bytes);
    EXPECT_FALSE(fs.WriteFileAtomic(path, "new").ok());
    EXPECT_TRUE(fs.stopped());
    fs.LosePower();
    EXPECT_EQ(*fs.ReadFile(path), "old");
  }
  fs.FailNextSync("manifest");
  EXPECT_FALSE(fs.WriteFileAtomic(path, "new").ok());
  EXPECT_EQ(*fs.ReadFile(path), "old");
}

}  // namespace
}  // namespace octavo
