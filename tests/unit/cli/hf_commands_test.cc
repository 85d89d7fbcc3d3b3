// export, import and checkpoints diff: arguments in, text, files and exit status out.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <sstream>

#include "base/str.h"
#include "cli/cli.h"
#include "tests/support/temp_dir.h"
#include "tests/unit/worker/checkpoint/hf_fixture.h"

namespace octavo {
namespace {

using ::testing::HasSubstr;

struct Result {
  int code;
  std::string out, err;
};

Result RunCommand(const std::vector<std::string>& arguments) {
  std::ostringstream out, err;
  const int code = RunCli(arguments, {}, out, err);
  return {code, out.str(), err.str()};
}

class HfCommandsTest : public ::testing::Test {
 protected:
  HfCommandsTest()
      : checkpoint_(WriteCheckpoint(PosixFileSystem::Get(), dir_.File("job"), SmallQwen(),
                                    RandomWeights(SmallQwen(), 3))) {}
  TempDir dir_;
  const std::string checkpoint_;
};

TEST_F(HfCommandsTest, AnExportImportsAgainAndTheDifferencesAreShown) {
  const Result exported =
      RunCommand({"export", dir_.File("job"), dir_.File("hf"), "--format", "fp8"});
  EXPECT_EQ(exported.code, 0) << exported.err;
  EXPECT_THAT(exported.out, HasSubstr(checkpoint_ + " (step 12)"));
  const Result imported = RunCommand({"import", dir_.File("hf"), dir_.File("start")});
  EXPECT_EQ(imported.code, 0) << imported.err;
  EXPECT_THAT(imported.out, HasSubstr("model:\n  family: qwen3_moe\n  layers: 3\n"));
  EXPECT_THAT(imported.out, HasSubstr("checkpoint:\n  start_from: " + dir_.File("start")));
  EXPECT_THAT(imported.err, HasSubstr("from FP8 blocks"));

  const Result diff = RunCommand({"checkpoints", "diff", dir_.File("job"), dir_.File("start")});
  EXPECT_EQ(diff.code, 1);
  EXPECT_THAT(diff.out, HasSubstr("step: 12 | 0"));
  EXPECT_THAT(diff.out, HasSubstr("layers.0.attn.qkv.weight/master: "));
  const Result same = RunCommand({"checkpoints", "diff", checkpoint_, checkpoint_});
  EXPECT_EQ(same.code, 0);
  EXPECT_EQ(same.out, "identical\n");
  EXPECT_THAT(RunCommand({"-o", "json", "checkpoints", "diff", checkpoint_, checkpoint_}).out,
              HasSubstr("\"identical\": true"));
}

TEST_F(HfCommandsTest, ExitCodesSayWhatWentWrong) {
  EXPECT_EQ(RunCommand({"export", dir_.File("none"), dir_.File("hf")}).code, 3);
  EXPECT_EQ(RunCommand({"export", checkpoint_, dir_.File("hf"), "--format", "int4"}).code, 2);
  ASSERT_EQ(RunCommand({"export", checkpoint_, dir_.File("hf")}).code, 0);
  const Result again = RunCommand({"export", checkpoint_, dir_.File("hf")});
  EXPECT_EQ(again.code, 4);
  EXPECT_THAT(again.err, HasSubstr("exists; name a new folder"));
  EXPECT_EQ(RunCommand({"import", dir_.File("job"), dir_.File("start")}).code, 3)
      << "no config.json";

  ModelConfig model = SmallQwen();
  model.router.score = RouterScore::kSigmoid;
  const std::string sigmoid =
      WriteCheckpoint(PosixFileSystem::Get(), dir_.File("sigmoid"), model, RandomWeights(model, 3));
  const Result refused = RunCommand({"export", sigmoid, dir_.File("hf2")});
  EXPECT_EQ(refused.code, 2);
  EXPECT_THAT(refused.err, HasSubstr("sigmoid scores (model.moe.router.score)"));
  EXPECT_EQ(
      RunCommand({"data", "build", dir_.path(), "--output", dir_.File("d"), "--tokenizer", "bpe"})
          .code,
      2);
}

TEST_F(HfCommandsTest, AFlippedByteOrAMissingShardEndsAnExportWithOneAndTheFilesName) {
  PosixFileSystem& fs = PosixFileSystem::Get();
  const std::string shard = JoinPath(checkpoint_, "rank-00000.safetensors");
  const std::string good = *fs.ReadFile(shard);
  const auto expect_damage = [&](const std::string& what) {
    const Result result = RunCommand({"export", dir_.File("job"), dir_.File("hf")});
    EXPECT_EQ(result.code, 1) << what << result.err;
    EXPECT_THAT(result.err, HasSubstr(shard)) << what;
    EXPECT_FALSE(fs.Exists(dir_.File("hf"))) << what;
  };
  std::string flipped = good;
  flipped[flipped.size() - 3] ^= 0x40;
  ASSERT_TRUE(fs.WriteFileAtomic(shard, flipped).ok());
  expect_damage("flipped");
  std::string header = good;
  header[9] = '#';
  ASSERT_TRUE(fs.WriteFileAtomic(shard, header).ok());
  expect_damage("header");
  ASSERT_TRUE(fs.WriteFileAtomic(shard, good.substr(0, good.size() / 2)).ok());
  expect_damage("cut");
  ASSERT_TRUE(fs.Remove(shard).ok());
  expect_damage("missing");
  ASSERT_TRUE(fs.WriteFileAtomic(shard, good).ok());
  EXPECT_EQ(RunCommand({"export", dir_.File("job"), dir_.File("hf")}).code, 0) << "whole again";
}

TEST_F(HfCommandsTest, AnImportPrintsAPathThatAJobAccepts) {
  ASSERT_EQ(RunCommand({"export", checkpoint_, dir_.File("hf")}).code, 0);
  const std::string relative =
      std::filesystem::relative(dir_.File("start"), std::filesystem::current_path()).string();
  const Result imported = RunCommand({"import", dir_.File("hf"), relative});
  ASSERT_EQ(imported.code, 0) << imported.err;
  EXPECT_THAT(imported.out,
              HasSubstr("start_from: " +
                        std::filesystem::weakly_canonical(dir_.File("start")).string() + "/step-"));
}

}  // namespace
}  // namespace octavo
