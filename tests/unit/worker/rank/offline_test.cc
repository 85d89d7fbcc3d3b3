#include "worker/rank/offline.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <set>

#include "base/str.h"
#include "proto/spec/job_spec.h"
#include "tests/support/faulty_fs.h"
#include "tests/unit/worker/checkpoint/hf_fixture.h"
#include "tests/unit/worker/rank/rank_harness.h"
#include "worker/checkpoint/hf_export.h"
#include "worker/checkpoint/hf_import.h"
#include "worker/checkpoint/manifest.h"
#include "worker/checkpoint/store.h"
#include "worker/data/loader.h"
#include "worker/rank/assignment.h"

namespace octavo {
namespace {

using ::testing::HasSubstr;
using testing::TestJob;

PosixFileSystem& Fs() { return PosixFileSystem::Get(); }

// A job that has trained, and an offline model of what it saved.
class OfflineTest : public ::testing::Test {
 protected:
  OfflineTest() : backend_(CreateCpuBackend()) {}
  ~OfflineTest() override { DestroyCpuBackend(&backend_); }

  std::unique_ptr<OfflineModel> Open(const std::string& path, RecipeKind recipe,
                                     std::int32_t sequences = 4, std::int64_t length = 16) {
    auto model = OfflineModel::Open(Fs(), {.path = path,
                                           .backend = backend_,
                                           .sequence_length = length,
                                           .sequences = sequences,
                                           .recipe = recipe});
    EXPECT_TRUE(model.ok()) << ToString(model.status());
    return *std::move(model);
  }
  EvaluationResult Evaluate(OfflineModel& model, const std::string& data,
                            const EvaluationOptions& options) {
    const auto result = EvaluateDataset(
        Fs(), model, std::shared_ptr<const TokenDataset>(*OpenTokenDataset(Fs(), data)), options);
    EXPECT_TRUE(result.ok()) << ToString(result.status());
    return *result;
  }
  static std::vector<std::int32_t> Run(OfflineModel& model, const SamplingOptions& options) {
    std::vector<std::int32_t> out;
    const std::vector<std::int32_t> prompt = {3, 18, 29};
    EXPECT_TRUE(Generate(model, prompt, options, [&](std::int32_t token) {
                  out.push_back(token);
                  return true;
                }).ok());
    return out;
  }

  Backend backend_;
};

TEST_F(OfflineTest, TheLossIsTheOneThatTheJobReported) {
  for (const RecipeKind recipe : {RecipeKind::kBf16, RecipeKind::kFp32}) {
    TestJob job(recipe);
    job.config.validation_interval = 6;
    job.config.validation_batches = 3;
    job.config.data.validation_fraction = 0.1;
    const auto outcomes = job.Run();
    EXPECT_ALL_OK(outcomes);
    const auto model = Open(job.dir.File("checkpoints"), recipe);
    EXPECT_EQ(model->step(), 6);
    const auto dataset = OpenTokenDataset(Fs(), job.config.data.path);
    const EvaluationResult result = Evaluate(
        *model, job.config.data.path,
        {.region = SplitTail((*dataset)->token_count(), 0.1).validation, .sequences_max = 12});
    EXPECT_EQ(result.tokens, 12 * 16);
    EXPECT_DOUBLE_EQ(result.loss, outcomes[0].validation_loss);
    EXPECT_DOUBLE_EQ(result.perplexity, std::exp(result.loss));
  }
}

TEST_F(OfflineTest, TheNumberOfSequencesInAPassChangesNothing) {
  TestJob job(RecipeKind::kFp32);
  EXPECT_ALL_OK(job.Run());
  const EvaluationOptions options{.sequences_max = 10};
  const std::string data = job.config.data.path;
  const double one =
      Evaluate(*Open(job.dir.File("checkpoints"), RecipeKind::kFp32, 1), data, options).loss;
  const EvaluationResult four =
      Evaluate(*Open(job.dir.File("checkpoints"), RecipeKind::kFp32, 4), data, options);
  EXPECT_EQ(four.tokens, 160) << "the last pass is padded without loss";
  EXPECT_NEAR(four.loss, one, 1e-6 * one);
}

TEST_F(OfflineTest, AHuggingFaceFolderEvaluatesLikeItsImport) {
  TestJob job(RecipeKind::kFp32);
  job.config.model.router.bias_update_rate = 0;
  EXPECT_ALL_OK(job.Run());
  for (const HfFormat format : {HfFormat::kBf16, HfFormat::kFp8}) {
    const std::string folder = job.dir.File(format == HfFormat::kFp8 ? "fp8" : "bf16");
    ASSERT_TRUE(
        ExportToHf(Fs(),
                   {.checkpoint = job.dir.File("checkpoints"), .folder = folder, .format = format})
            .ok());
    ASSERT_TRUE(ImportFromHf(Fs(), {.folder = folder, .output = folder + ".ckpt"}).ok());
    const EvaluationOptions options{.sequences_max = 8};
    const double of_folder =
        Evaluate(*Open(folder, RecipeKind::kFp32), job.config.data.path, options).loss;
    const double of_import =
        Evaluate(*Open(folder + ".ckpt", RecipeKind::kFp32), job.config.data.path, options).loss;
    const double of_masters = Evaluate(*Open(job.dir.File("checkpoints"), RecipeKind::kFp32),
                                       job.config.data.path, options)
                                  .loss;
    EXPECT_EQ(of_folder, of_import);
    EXPECT_NE(of_folder, of_masters) << "weights were rounded";
    EXPECT_NEAR(of_folder, of_masters, 0.02);
  }
}

// Logits against the loss: −log softmax in FP64 at the target.
TEST_F(OfflineTest, LogitsGiveTheLossAndNeverSeeWhatFollows) {
  TestJob job(RecipeKind::kFp32);
  EXPECT_ALL_OK(job.Run());
  const auto model = Open(job.dir.File("checkpoints"), RecipeKind::kFp32, 2);
  std::vector<std::int32_t> tokens(32), targets(32);
  for (std::size_t i = 0; i < 32; ++i) {
    tokens[i] = static_cast<std::int32_t>(i * 7 % 64);
    targets[i] = static_cast<std::int32_t>(i * 5 % 64);
  }
  std::vector<float> logits(32 * 256);
  ASSERT_TRUE(model->Logits(tokens, 0, 32, logits).ok());
  double expected = 0;
  for (std::size_t i = 0; i < 32; ++i) {
    double sum = 0;
    for (std::size_t v = 0; v < 256; ++v) {
      sum += std::exp(static_cast<double>(logits[i * 256 + v]));
    }
    expected +=
        std::log(sum) - static_cast<double>(logits[i * 256 + static_cast<std::size_t>(targets[i])]);
  }
  double loss = 0;
  ASSERT_TRUE(model->Loss(tokens, targets, &loss).ok());
  EXPECT_NEAR(loss, expected, 1e-4 * expected);

  std::vector<float> row(256);
  tokens[6] = 1;  // after row 5 of the first sequence
  ASSERT_TRUE(model->Logits(tokens, 5, 1, row).ok());
  for (std::size_t v = 0; v < 256; ++v) {
    EXPECT_NEAR(row[v], logits[5 * 256 + v], 1e-5f) << v;
  }
}

TEST_F(OfflineTest, TheSameSeedGivesTheSameTextAndATrainedModelKnowsItsData) {
  TestJob job;
  job.config.steps = 120;
  job.config.schedule = {.peak = 3e-3, .final = 3e-4, .warmup_steps = 5, .total_steps = 120};
  EXPECT_ALL_OK(job.Run());
  const auto model = Open(job.dir.File("checkpoints"), RecipeKind::kBf16, 1);
  const auto greedy = Run(*model, {.tokens = 40});
  ASSERT_EQ(greedy.size(), 40u) << "longer than the window of 16 tokens";
  EXPECT_EQ(Run(*model, {.tokens = 40}), greedy);
  EXPECT_EQ(Run(*model, {.tokens = 40, .temperature = 1e-6}), greedy);
  EXPECT_EQ(Run(*model, {.tokens = 40, .temperature = 1, .top_p = 1e-9}), greedy);
  // The data: next = 5 · last + 3, or one more; modulo 64.
  int expected = 0, last = 29;
  for (const std::int32_t token : greedy) {
    const int step = (token - last * 5 - 3) & 63;
    expected += step == 0 || step == 1 ? 1 : 0;
    last = token;
  }
  EXPECT_GE(expected, 30) << "of 40";

  const SamplingOptions warm{.tokens = 40, .temperature = 1.5, .seed = 7};
  const auto sampled = Run(*model, warm);
  EXPECT_EQ(Run(*model, warm), sampled);
  SamplingOptions other = warm;
  other.seed = 8;
  EXPECT_NE(Run(*model, other), sampled);
}

TEST_F(OfflineTest, MistakesAreErrors) {
  TestJob job;
  EXPECT_ALL_OK(job.Run());
  const auto model = Open(job.dir.File("checkpoints"), RecipeKind::kBf16, 1);
  const auto nothing = [](std::int32_t) { return true; };
  EXPECT_FALSE(Generate(*model, {}, {.tokens = 1}, nothing).ok());
  const std::vector<std::int32_t> outside = {256};
  EXPECT_THAT(Message(Generate(*model, outside, {.tokens = 1}, nothing)), HasSubstr("token 256"));
  EXPECT_EQ(OfflineModel::Open(
                Fs(), {.path = job.dir.File("none"), .backend = backend_, .sequence_length = 16})
                .status()
                .code(),
            absl::StatusCode::kNotFound);
}

TEST_F(OfflineTest, TheLengthIsThatOfTheTrainingWhereNobodySaysOtherwise) {
  TestJob job;
  job.config.model.router.bias_update_rate = 0;
  EXPECT_ALL_OK(job.Run());
  const std::string checkpoints = job.dir.File("checkpoints");
  EXPECT_EQ(Open(checkpoints, RecipeKind::kBf16, 1, 0)->sequence_length(), 16);
  EXPECT_EQ(Open(checkpoints, RecipeKind::kBf16, 1, 8)->sequence_length(), 8);
  for (const auto& [stated, expected] : {std::pair{48, 48}, std::pair{1 << 20, 2048}}) {
    const std::string folder = job.dir.File(StrCat("hf", stated));
    ASSERT_TRUE(
        ExportToHf(Fs(), {.checkpoint = checkpoints, .folder = folder, .max_positions = stated})
            .ok());
    EXPECT_EQ(Open(folder, RecipeKind::kBf16, 1, 0)->sequence_length(), expected);
    ASSERT_TRUE(ImportFromHf(Fs(), {.folder = folder, .output = folder + ".ckpt"}).ok());
    EXPECT_EQ(Open(folder + ".ckpt", RecipeKind::kBf16, 1, 0)->sequence_length(), expected);
  }
}

TEST_F(OfflineTest, DamageEndsWithOneAndNamesTheFile) {
  TestJob job;
  EXPECT_ALL_OK(job.Run());
  const std::string checkpoint = *FindCheckpoint(Fs(), job.dir.File("checkpoints"));
  const std::string shard = JoinPath(checkpoint, ShardFileName(0));
  const std::string good = *Fs().ReadFile(shard);
  const auto expect_damage = [&](const std::string& what) {
    const absl::Status status =
        OfflineModel::Open(Fs(), {.path = checkpoint, .backend = backend_}).status();
    EXPECT_EQ(OfflineExitCode(status), 1) << what << ": " << ToString(status);
    EXPECT_THAT(Message(status), HasSubstr(shard)) << what;
  };
  std::string flipped = good;
  flipped[flipped.size() - 3] ^= 0x40;
  ASSERT_TRUE(Fs().WriteFileAtomic(shard, flipped).ok());
  expect_damage("flipped");
  ASSERT_TRUE(Fs().WriteFileAtomic(shard, good.substr(0, good.size() / 2)).ok());
  expect_damage("cut");
  ASSERT_TRUE(Fs().Remove(shard).ok());
  expect_damage("missing");

  EXPECT_EQ(OfflineExitCode(absl::OkStatus()), 0);
  EXPECT_EQ(OfflineExitCode(ResourceExhaustedError("full")), 1);
  EXPECT_EQ(OfflineExitCode(NotFoundError("none")), 3);
  EXPECT_EQ(OfflineExitCode(InternalError("bug")), 7);
  EXPECT_EQ(OfflineExitCode(OpenTokenDataset(Fs(), job.dir.path()).status()), 2) << "a folder";
  std::string data = *Fs().ReadFile(job.config.data.path);
  data[data.size() - 20] ^= 1;
  ASSERT_TRUE(Fs().WriteFileAtomic(job.config.data.path, data).ok());
  EXPECT_EQ(OfflineExitCode(OpenTokenDataset(Fs(), job.config.data.path).status()), 1);
}

// Finite weights whose logits overflow FP32, in a checkpoint without any damage.
TEST_F(OfflineTest, ALossThatIsNotFiniteIsAnError) {
  TestJob job;
  ModelConfig model = job.config.model;
  model.router.bias_update_rate = 0;
  Weights weights = RandomWeights(model, 1);
  for (float& v : weights.at("lm_head.weight")) {
    v = v < 0 ? -3e38f : 3e38f;
  }
  const std::string checkpoint = WriteCheckpoint(Fs(), job.dir.File("huge"), model, weights);
  const auto open = Open(checkpoint, RecipeKind::kFp32, 1);
  const absl::Status status =
      EvaluateDataset(
          Fs(), *open,
          std::shared_ptr<const TokenDataset>(*OpenTokenDataset(Fs(), job.config.data.path)),
          {.sequences_max = 1, .logits_file = job.dir.File("logits")})
          .status();
  EXPECT_EQ(OfflineExitCode(status), 1) << ToString(status);
  EXPECT_THAT(Message(status), HasSubstr("the loss is "));
  EXPECT_FALSE(Fs().Exists(job.dir.File("logits")));
}

TEST_F(OfflineTest, AFullDiskLeavesNoPartOfTheLogits) {
  TestJob job;
  EXPECT_ALL_OK(job.Run());
  const auto model = Open(job.dir.File("checkpoints"), RecipeKind::kFp32, 1);
  const std::shared_ptr<const TokenDataset> dataset = *OpenTokenDataset(Fs(), job.config.data.path);
  FaultyFileSystem fs(&Fs());
  fs.FailWritesAfterBytes(1000);
  const EvaluationOptions options{.sequences_max = 2, .logits_file = job.dir.File("logits")};
  const absl::Status status = EvaluateDataset(fs, *model, dataset, options).status();
  EXPECT_EQ(OfflineExitCode(status), 1) << ToString(status);
  EXPECT_FALSE(Fs().Exists(options.logits_file));
  EXPECT_FALSE(Fs().Exists(options.logits_file + ".partial"));
  fs.ClearFaults();
  EXPECT_TRUE(EvaluateDataset(fs, *model, dataset, options).ok());
  EXPECT_TRUE(Fs().Exists(options.logits_file));
}

TEST(ChooseTokenTest, FrequenciesAreThoseOfTheTruncatedSoftmax) {
  const std::vector<float> logits = {1.0f, 3.0f, 2.0f, 3.0f, -5.0f};
  for (const double temperature : {0.5, 1.0, 2.0}) {
    std::vector<double> p;
    double total = 0;
    for (const float l : logits) {
      p.push_back(std::exp(l / temperature));
      total += p.back();
    }
    for (const double top_p : {1.0, 0.9, 0.5, 0.01}) {
      // Tokens by falling probability, equal ones by number: 1, 3, 2, 0, 4.
      std::vector<double> expected(5, 0.0);
      double kept = 0;
      for (const std::size_t token : {1u, 3u, 2u, 0u, 4u}) {
        if (kept < top_p * total) {
          expected[token] = p[token];
          kept += p[token];
        }
      }
      constexpr int kDraws = 100000;
      std::vector<double> seen(5, 0.0);
      for (int i = 0; i < kDraws; ++i) {
        seen[static_cast<std::size_t>(ChooseToken(
            logits, {.temperature = temperature, .top_p = top_p}, (i + 0.5) / kDraws))]++;
      }
      for (std::size_t t = 0; t < 5; ++t) {
        EXPECT_NEAR(seen[t] / kDraws, expected[t] / kept, 2.0 / kDraws)
            << "token " << t << ", temperature " << temperature << ", top_p " << top_p;
      }
    }
  }
  EXPECT_EQ(ChooseToken(logits, {}, 0.99), 1) << "ties go to the lower token";
}

// What `octavo import` prints is a job's model section that gives the same architecture.
TEST(ModelAsJobYamlTest, ReadsBackAsTheSameArchitecture) {
  TestJob job;
  ModelConfig model = job.config.model;
  model.router = {.aux_coefficient = 0.03f};
  model.family = ModelFamily::kQwen3Moe;
  model.qk_norm = true;
  model.rope_theta = 1e6f;
  model.norm_eps = 1e-6f;
  model.layers = 4;
  model.dense_layers = {0, 2};
  model.dense_hidden = 192;
  model.head_dim = 48;
  model.tied_embeddings = true;
  const std::string yaml = StrCat("name: a\n", ModelAsJobYaml(model),
                                  "train: {steps: 1, sequence_length: 8, global_batch: 1}\n"
                                  "data: {path: /d}\ncheckpoint: {path: /c, start_from: /s}\n");
  const ParsedJobSpec parsed = ParseJobSpec(yaml, "job.yaml");
  ASSERT_TRUE(parsed.ok()) << ToString(parsed.status()) << yaml;
  const auto config = ConfigFromSpec(parsed.spec);
  ASSERT_TRUE(config.ok()) << ToString(config.status());
  EXPECT_TRUE(CompareModels(model, config->model).ok())
      << ToString(CompareModels(model, config->model));
  EXPECT_EQ(config->checkpoint.start_from, "/s");
}

}  // namespace
}  // namespace octavo
