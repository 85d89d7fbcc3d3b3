// Inputs that a job names: a dataset that was replaced while the job did not run, and which errors
// end a job at once.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/str.h"
#include "tests/unit/worker/rank/rank_harness.h"
#include "worker/checkpoint/reader.h"
#include "worker/data/dataset_writer.h"
#include "worker/rank/dataset_identity.h"
#include "worker/rank/failure.h"

namespace octavo {
namespace {

using ::testing::HasSubstr;
using testing::TestJob;

void WriteDataset(const std::string& path, const std::string& text) {
  auto writer = DatasetWriter::Create(PosixFileSystem::Get(), path, 1, 256);
  ASSERT_TRUE(writer.ok());
  ASSERT_TRUE((*writer)->AppendBytes(text).ok());
  ASSERT_TRUE((*writer)->Finish().ok());
}

// llm.c's format, which has no checksum of its own.
void WriteLlmc(const std::string& path, const std::vector<std::uint16_t>& tokens) {
  std::vector<std::int32_t> head(256);
  head[0] = 20240520;
  head[1] = 1;
  head[2] = static_cast<std::int32_t>(tokens.size());
  std::string bytes(reinterpret_cast<const char*>(head.data()), 1024);
  bytes.append(reinterpret_cast<const char*>(tokens.data()), tokens.size() * 2);
  ASSERT_TRUE(PosixFileSystem::Get().WriteFileAtomic(path, bytes).ok());
}

DatasetIdentity Identity(const std::string& path) {
  const auto dataset = OpenTokenDataset(PosixFileSystem::Get(), path);
  EXPECT_TRUE(dataset.ok()) << ToString(dataset.status());
  const auto identity = IdentifyDataset(**dataset);
  EXPECT_TRUE(identity.ok()) << ToString(identity.status());
  return *identity;
}

TEST(DatasetIdentityTest, TellsContentsOfTheSameSizeApartAndNotPaths) {
  TempDir dir;
  WriteDataset(dir.File("a"), std::string(5000, 'a'));
  WriteDataset(dir.File("same"), std::string(5000, 'a'));
  WriteDataset(dir.File("b"), std::string(4999, 'a') + "b");
  EXPECT_EQ(Identity(dir.File("a")), Identity(dir.File("same")));
  EXPECT_NE(Identity(dir.File("a")), Identity(dir.File("b")));

  // Longer than the sample: both ends and what lies between are looked at.
  std::vector<std::uint16_t> tokens(1 << 20, 7);
  WriteLlmc(dir.File("c"), tokens);
  const DatasetIdentity before = Identity(dir.File("c"));
  EXPECT_EQ(before.format, "llm.c");
  EXPECT_EQ(before.tokens, 1 << 20);
  for (const std::size_t changed : {std::size_t{0}, tokens.size() - 1}) {
    tokens[changed] = 8;
    WriteLlmc(dir.File("c"), tokens);
    EXPECT_NE(Identity(dir.File("c")), before) << "token " << changed;
    tokens[changed] = 7;
  }
  std::fill(tokens.begin() + (1 << 19), tokens.begin() + (1 << 19) + 40000, std::uint16_t{8});
  WriteLlmc(dir.File("c"), tokens);
  EXPECT_NE(Identity(dir.File("c")), before);
}

TEST(DatasetIdentityTest, OfABlendKnowsPartsAndWeights) {
  TempDir dir;
  WriteDataset(dir.File("a"), std::string(5000, 'a'));
  WriteDataset(dir.File("b"), std::string(5000, 'b'));
  const auto blend = [&dir](const std::string& lines) {
    EXPECT_TRUE(PosixFileSystem::Get()
                    .WriteFileAtomic(dir.File("blend"), "octavo-blend v1\n" + lines)
                    .ok());
    return Identity(dir.File("blend"));
  };
  const DatasetIdentity before = blend("0.5 a\n0.5 b\n");
  EXPECT_EQ(blend("# a comment\n0.5 a\n0.5 b\n"), before);
  EXPECT_NE(blend("0.6 a\n0.4 b\n"), before);
  WriteDataset(dir.File("b"), std::string(5000, 'c'));
  EXPECT_NE(blend("0.5 a\n0.5 b\n"), before);
}

TEST(InputsTest, AResumedJobRefusesADatasetThatWasReplaced) {
  TestJob job;
  EXPECT_ALL_OK(job.Run(2, 1));
  const auto former = PosixFileSystem::Get().ReadFile(job.config.data.path);
  ASSERT_TRUE(former.ok());
  WriteDataset(job.config.data.path, std::string(8000, 'x'));
  job.config.steps = 8;
  for (const TrainingOutcome& outcome : job.Run(2, 1)) {
    EXPECT_EQ(outcome.failure, FailureClass::kSpecRejected);
    EXPECT_THAT(outcome.message, HasSubstr(job.config.data.path + " has changed"));
    EXPECT_THAT(outcome.message, HasSubstr("8000 tokens, fingerprint"));
    EXPECT_THAT(outcome.message, HasSubstr("Put the former file back"));
  }
  ASSERT_TRUE(PosixFileSystem::Get().WriteFileAtomic(job.config.data.path, *former).ok());
  EXPECT_ALL_OK(job.Run(2, 1));
  EXPECT_EQ(job.host().steps().back().step(), 8);
}

TEST(InputsTest, AResumedJobRefusesAValidationDatasetThatWasReplaced) {
  TestJob job;
  job.config.validation_interval = 2;
  job.config.validation_batches = 1;
  job.config.data.validation_path = job.dir.File("validation");
  WriteDataset(job.config.data.validation_path, std::string(4000, 'v'));
  EXPECT_ALL_OK(job.Run(2, 1));
  const std::string manifest_path = job.host().checkpoints().back().path() + "/manifest.json";
  auto manifest = ParseManifest(*PosixFileSystem::Get().ReadFile(manifest_path), manifest_path);
  ASSERT_TRUE(manifest.ok()) << ToString(manifest.status());
  EXPECT_EQ(manifest->validation, Identity(job.config.data.validation_path));
  WriteDataset(job.config.data.validation_path, std::string(4000, 'w'));
  job.config.steps = 8;
  for (const TrainingOutcome& outcome : job.Run(2, 1)) {
    EXPECT_EQ(outcome.failure, FailureClass::kSpecRejected);
    EXPECT_THAT(outcome.message, HasSubstr("the validation dataset " +
                                           job.config.data.validation_path + " has changed"));
    EXPECT_THAT(outcome.message, HasSubstr("Put the former file back"));
  }
  // A checkpoint of an older program does not say what it was validated on.
  manifest->validation.reset();
  ASSERT_TRUE(
      PosixFileSystem::Get().WriteFileAtomic(manifest_path, SerializeManifest(*manifest)).ok());
  EXPECT_ALL_OK(job.Run(2, 1));
  EXPECT_EQ(job.host().steps().back().step(), 8);
}

TEST(InputsTest, AnotherJobMayGoOnWithOtherData) {
  TestJob first;
  EXPECT_ALL_OK(first.Run());
  for (const bool all : {false, true}) {
    TestJob second;
    second.config.job_uid = "another";
    second.config.steps = 8;
    WriteDataset(second.config.data.path, std::string(8000, 'x'));
    second.config.checkpoint.start_from = first.dir.File("checkpoints");
    second.config.checkpoint.start_all = all;
    EXPECT_ALL_OK(second.Run());
  }
}

TEST(InputsTest, ACheckpointWithoutTheRecordIsAccepted) {
  TestJob job;
  EXPECT_ALL_OK(job.Run());
  const std::string path = job.host().checkpoints().back().path() + "/manifest.json";
  const auto text = PosixFileSystem::Get().ReadFile(path);
  ASSERT_TRUE(text.ok());
  auto manifest = ParseManifest(*text, path);
  ASSERT_TRUE(manifest.ok());
  ASSERT_TRUE(manifest->dataset.has_value());
  EXPECT_EQ(*manifest->dataset, Identity(job.config.data.path));
  manifest->dataset.reset();
  ASSERT_TRUE(PosixFileSystem::Get().WriteFileAtomic(path, SerializeManifest(*manifest)).ok());
  WriteDataset(job.config.data.path, std::string(8000, 'x'));
  job.config.steps = 8;
  EXPECT_ALL_OK(job.Run());
}

TEST(InputsTest, AMissingDatasetIsPermanentAtTheFirstAttemptOnly) {
  TestJob job;
  EXPECT_ALL_OK(job.Run());
  ASSERT_TRUE(
      PosixFileSystem::Get().Rename(job.config.data.path, job.config.data.path + ".away").ok());
  job.config.steps = 8;
  EXPECT_EQ(job.Run()[0].failure, FailureClass::kRankExit) << "it may come back";
  job.config.attempt = 0;
  EXPECT_EQ(job.Run()[0].failure, FailureClass::kSpecRejected);
}

TEST(InputsTest, DamagedDataIsPermanentAtEveryAttempt) {
  TestJob job;
  auto bytes = *PosixFileSystem::Get().ReadFile(job.config.data.path);
  bytes[1000] = static_cast<char>(bytes[1000] ^ 1);  // found when it is read
  ASSERT_TRUE(PosixFileSystem::Get().WriteFileAtomic(job.config.data.path, bytes).ok());
  job.config.attempt = 4;
  const auto outcomes = job.Run();
  EXPECT_EQ(outcomes[0].failure, FailureClass::kSpecRejected);
  EXPECT_THAT(outcomes[0].message, HasSubstr("damaged between byte offsets"));
}

TEST(InputsTest, AnImpossibleCheckpointFolderIsPermanentAtTheFirstAttempt) {
  TestJob job;
  job.config.checkpoint.root = job.config.data.path + "/below-a-file";
  EXPECT_EQ(job.Run()[0].failure, FailureClass::kSpecRejected);
  EXPECT_EQ(job.Run()[0].failure, FailureClass::kCheckpointUnusable);
}

TEST(InputsTest, WhichErrorsArePermanent) {
  const absl::Status absent = NotFoundError("absent");
  EXPECT_EQ(MarkOf(MarkIfPermanent(absent, 1)), FailureClass::kSpecRejected);
  EXPECT_EQ(MarkOf(MarkIfPermanent(absent, 2)), FailureClass::kNone);
  EXPECT_EQ(MarkOf(MarkIfPermanent(DataLossError("damaged"), 7)), FailureClass::kSpecRejected);
  EXPECT_EQ(MarkOf(MarkIfPermanent(UnavailableError("peer"), 1)), FailureClass::kNone);
  EXPECT_TRUE(MarkIfPermanent(absl::OkStatus(), 1).ok());
}

}  // namespace
}  // namespace octavo
