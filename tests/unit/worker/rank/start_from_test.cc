// Jobs that begin with weights of somebody else: another job's checkpoint or an import.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/str.h"
#include "tests/unit/worker/rank/rank_harness.h"
#include "worker/checkpoint/hf_export.h"
#include "worker/checkpoint/hf_import.h"
#include "worker/checkpoint/store.h"

namespace octavo {
namespace {

using ::testing::HasSubstr;
using testing::TestJob;

// One step at a learning rate of zero: what is saved is what was loaded.
std::string SaveWhatIsLoaded(TestJob& job, int ranks, int expert_parallel) {
  job.config.steps = 1;
  job.config.schedule = {.peak = 0, .final = 0, .total_steps = 10};
  EXPECT_ALL_OK(job.Run(ranks, expert_parallel));
  return job.host().checkpoints().back().path();
}

TEST(StartFromTest, ANewJobHasTheWeightsAndNothingElseOfTheOther) {
  TestJob first;
  EXPECT_ALL_OK(first.Run(2, 2));
  const std::string trained = first.host().checkpoints().back().path();

  TestJob second;
  second.config.job_uid = "another";
  second.config.run.seed = 99;
  second.config.model.router.bias_update_rate = 1e-12f;  // training knobs may differ
  second.config.model.router.aux_coefficient = 0;
  second.config.checkpoint.start_from = first.dir.File("checkpoints");
  const std::string saved = SaveWhatIsLoaded(second, 4, 2);
  const auto diff = DiffCheckpoints(*first.fs, trained, saved);
  ASSERT_TRUE(diff.ok()) << ToString(diff.status());
  bool other_moments = false;
  for (const std::string& line : *diff) {
    EXPECT_THAT(line, ::testing::Not(HasSubstr("/master")));
    other_moments = other_moments || line.find("/m:") != std::string::npos;
  }
  EXPECT_TRUE(other_moments) << "moments begin at zero";

  // A later attempt continues its own checkpoint, not the other's.
  second.config.steps = 2;
  EXPECT_ALL_OK(second.Run(4, 2));
  EXPECT_EQ(second.host().steps().back().step(), 2);
}

// With the whole state a new job is the continuation of the other, whatever its ranks: the same
// losses as the job that was never interrupted, bit for bit when the layout is the same.
TEST(StartFromTest, TheWholeStateGoesOnWhereTheOtherJobStoodWithOtherRanks) {
  TestJob whole;
  const std::int64_t half = whole.config.steps;
  whole.config.steps = 2 * half;
  EXPECT_ALL_OK(whole.Run(2, 2));
  const auto expected = whole.host().steps();

  TestJob first;
  first.config.schedule = whole.config.schedule;
  EXPECT_ALL_OK(first.Run(2, 2));
  for (const auto& [ranks, expert_parallel] :
       {std::pair{2, 2}, std::pair{1, 1}, std::pair{4, 2}, std::pair{4, 4}}) {
    TestJob second;
    second.config.job_uid = "another";
    second.config.schedule = whole.config.schedule;
    second.config.steps = 2 * half;
    second.config.checkpoint.start_from = first.dir.File("checkpoints");
    second.config.checkpoint.start_all = true;
    EXPECT_ALL_OK(second.Run(ranks, expert_parallel));
    const auto& steps = second.host().steps();
    ASSERT_EQ(steps.size(), static_cast<std::size_t>(half));
    EXPECT_EQ(steps.front().step(), half + 1);
    for (std::size_t i = 0; i < steps.size(); ++i) {
      const auto& at = expected[static_cast<std::size_t>(half) + i];
      if (ranks == 2) {
        EXPECT_EQ(steps[i].loss(), at.loss()) << "step " << steps[i].step();
      } else {
        // Sums in another order: training_test.cc allows 1e-4 after two steps, here are six.
        EXPECT_NEAR(steps[i].loss(), at.loss(), 1e-3 * at.loss())
            << ranks << " ranks, step " << steps[i].step();
      }
    }
  }

  // Another batch would show data twice: three ranks make three sequences a step, not four.
  TestJob other;
  other.config.job_uid = "another";
  other.config.steps = 2 * half;
  other.config.checkpoint.start_from = first.dir.File("checkpoints");
  other.config.checkpoint.start_all = true;
  const auto outcomes = other.Run(3, 1);
  EXPECT_FALSE(outcomes[0].ok());
  EXPECT_THAT(outcomes[0].message, HasSubstr("train.global_batch must be the same"));
}

// Rank 0 says where its weights came from: the controller's event is made of it.
TEST(StartFromTest, SaysWhoseWeightsItBeginsWith) {
  TestJob first;
  EXPECT_ALL_OK(first.Run());
  const auto start_of = [](TestJob& job) {
    for (const iv1::RankToWorker& m : job.host().messages()) {
      if (m.has_attempt_start()) {
        return m.attempt_start();
      }
    }
    ADD_FAILURE() << "no start was reported";
    return iv1::AttemptStart();
  };
  EXPECT_EQ(start_of(first).loaded_path(), "");
  EXPECT_EQ(start_of(first).note(), "");
  for (const bool all : {false, true}) {
    TestJob second;
    second.config.job_uid = "another";
    second.config.steps = 8;
    second.config.checkpoint.start_from = first.dir.File("checkpoints");
    second.config.checkpoint.start_all = all;
    EXPECT_ALL_OK(second.Run());
    EXPECT_EQ(start_of(second).loaded_path(), first.dir.File("checkpoints"));
    EXPECT_EQ(start_of(second).loaded_step(), all ? first.config.steps : 0);
    EXPECT_EQ(start_of(second).note(), "");
  }
}

TEST(StartFromTest, AnotherArchitectureIsRefusedWithTheFieldsThatDiffer) {
  TestJob first;
  EXPECT_ALL_OK(first.Run());
  TestJob second;
  second.config.model.expert_hidden = 256;
  second.config.checkpoint.start_from = first.dir.File("checkpoints");
  const auto outcomes = second.Run();
  EXPECT_EQ(outcomes[0].failure, FailureClass::kSpecRejected) << "not worth another attempt";
  EXPECT_THAT(outcomes[0].message, HasSubstr("checkpoint.start_from"));
  EXPECT_THAT(outcomes[0].message,
              HasSubstr("model.expert_hidden is 128 in the checkpoint and 256 in the job"));
  // A job never falls back to random weights when it was told where to begin.
  second.config.checkpoint.start_from = first.dir.File("nowhere");
  EXPECT_EQ(second.Run()[0].failure, FailureClass::kCheckpointUnusable)
      << "the second attempt: a file system that is away may come back";
  second.config.attempt = 0;
  EXPECT_EQ(second.Run()[0].failure, FailureClass::kSpecRejected);
}

TEST(StartFromTest, AnImportOfAnExportTrainsOnWithTheRoundedWeights) {
  TestJob first;
  first.config.model.router.bias_update_rate = 0;
  EXPECT_ALL_OK(first.Run(2, 1));
  auto& fs = *first.fs;
  ASSERT_TRUE(ExportToHf(fs, {.checkpoint = first.dir.File("checkpoints"),
                              .folder = first.dir.File("hf"),
                              .format = HfFormat::kBf16})
                  .ok());
  const auto imported =
      ImportFromHf(fs, {.folder = first.dir.File("hf"), .output = first.dir.File("start")});
  ASSERT_TRUE(imported.ok()) << ToString(imported.status());

  TestJob second;
  second.config.model.router.bias_update_rate = 0;
  second.config.checkpoint.start_from = first.dir.File("start");
  const std::string saved = SaveWhatIsLoaded(second, 2, 2);
  const auto diff = DiffCheckpoints(fs, imported->checkpoint, saved);
  ASSERT_TRUE(diff.ok()) << ToString(diff.status());
  for (const std::string& line : *diff) {
    EXPECT_THAT(line, ::testing::Not(HasSubstr("/master")));
  }
}

}  // namespace
}  // namespace octavo
