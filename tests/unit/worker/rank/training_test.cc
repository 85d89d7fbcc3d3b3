#include "worker/rank/training.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "tests/support/faulty_fs.h"
#include "tests/unit/worker/rank/rank_harness.h"
#include "worker/checkpoint/store.h"

namespace octavo {
namespace {

using testing::TestJob;

// Puts a NaN into a gradient of one rank, in chosen passes of chosen steps.
TrainingHooks Poison(std::function<bool(std::int64_t step, int pass)> when) {
  return {.before_finish_pass = [when](std::int64_t step, int pass, Transformer& model) {
    if (when(step, pass)) {
      model.parameters().dense_grad()[0] = std::numeric_limits<float>::quiet_NaN();
    }
  }};
}

TEST(TrainingTest, OneRankLearnsAndSavesItsLastStep) {
  TestJob job;
  job.config.steps = 40;
  job.config.validation_interval = 20;
  job.config.validation_batches = 2;
  job.config.data.validation_fraction = 0.1;
  const auto outcomes = job.Run();
  EXPECT_ALL_OK(outcomes);
  EXPECT_EQ(outcomes[0].step, 40);
  const auto steps = job.host().steps();
  ASSERT_EQ(steps.size(), 40u);
  EXPECT_NEAR(steps[0].loss(), std::log(256.0), 0.5);
  EXPECT_LT(steps[39].loss(), steps[0].loss() - 1.0);
  EXPECT_TRUE(steps[19].has_validation());
  EXPECT_TRUE(steps[39].has_validation());
  EXPECT_FALSE(steps[18].has_validation());
  EXPECT_LT(outcomes[0].validation_loss, steps[0].loss() - 1.0);
  EXPECT_EQ(steps[5].tokens(), 64);
  const auto saved = job.host().checkpoints();
  ASSERT_EQ(saved.size(), 1u);
  EXPECT_TRUE(saved[0].ok()) << saved[0].error();
  EXPECT_EQ(saved[0].step(), 40);
  EXPECT_TRUE(VerifyCheckpoint(*job.fs, saved[0].path()).ok());
}

class ResumeTest : public ::testing::TestWithParam<RecipeKind> {};

// N + M steps equal N, save, load, M, bit for bit, whatever the recipe keeps as state.
TEST_P(ResumeTest, ResumedLossesAreBitIdentical) {
  for (const int ranks : {1, 2}) {
    TestJob whole(GetParam());
    whole.config.steps = 9;
    EXPECT_ALL_OK(whole.Run(ranks, ranks));
    const std::vector<double> expected = whole.host().losses();

    TestJob parts(GetParam());
    parts.config.steps = 5;
    EXPECT_ALL_OK(parts.Run(ranks, ranks));
    parts.config.steps = 9;
    EXPECT_ALL_OK(parts.Run(ranks, ranks));
    EXPECT_EQ(parts.host().losses(), expected) << ranks << " ranks";  // doubles, exactly
    const auto diff = DiffCheckpoints(*whole.fs, whole.host().checkpoints().back().path(),
                                      parts.host().checkpoints().back().path());
    ASSERT_TRUE(diff.ok()) << ToString(diff.status());
    EXPECT_EQ(*diff, std::vector<std::string>{});
  }
}

INSTANTIATE_TEST_SUITE_P(Recipes, ResumeTest,
                         ::testing::Values(RecipeKind::kFp32, RecipeKind::kBf16,
                                           RecipeKind::kFp8Delayed, RecipeKind::kFp8Current,
                                           RecipeKind::kFp8Blockwise, RecipeKind::kFp8Flow,
                                           RecipeKind::kMxfp8),
                         [](const auto& info) { return std::string(Name(info.param)); });

// Saved by any spread, continued by any other: the same losses within rounding, in fp32.
TEST(ReshardTest, EveryPairOfSpreadsContinuesTheSameTraining) {
  const std::pair<int, int> spreads[] = {{1, 1}, {2, 1}, {2, 2}, {4, 1}, {4, 2}, {4, 4}};
  TestJob reference(RecipeKind::kFp32);
  reference.config.steps = 4;
  EXPECT_ALL_OK(reference.Run());
  const std::vector<double> expected = reference.host().losses();
  for (const auto& [ranks, ep] : spreads) {
    for (const auto& [ranks_after, ep_after] : spreads) {
      TestJob job(RecipeKind::kFp32);
      job.config.steps = 2;
      EXPECT_ALL_OK(job.Run(ranks, ep));
      job.NewHosts(ranks_after);
      job.config.steps = 4;
      EXPECT_ALL_OK(job.Run(ranks_after, ep_after));
      const std::vector<double> losses = job.host().losses();
      ASSERT_EQ(losses.size(), 2u);
      EXPECT_NEAR(losses[0], expected[2], 1e-4 * expected[2]) << ranks << " " << ep;
      EXPECT_NEAR(losses[1], expected[3], 1e-4 * expected[3])
          << ranks << "/" << ep << " to " << ranks_after << "/" << ep_after;
    }
  }
}

class ReshardStateTest : public ::testing::TestWithParam<RecipeKind> {};

// Masters, moments and the recipe's own state belong to global experts: saved and loaded by one
// spread after the other, without a step that counts, they stay what they were, bit for bit.
TEST_P(ReshardStateTest, StateFollowsTheExpertsThroughEverySpread) {
  TestJob job(GetParam());
  job.config.steps = 3;
  EXPECT_ALL_OK(job.Run(4, 4));
  const std::string first = job.host().checkpoints().back().path();
  // Every step is skipped; its save is another spread's of the same state.
  job.hooks = Poison([](std::int64_t, int) { return true; });
  job.config.max_skips_in_a_row = 100;
  for (const auto& [ranks, ep] : {std::pair{1, 1}, std::pair{2, 1}, std::pair{4, 2},
                                  std::pair{2, 2}, std::pair{4, 1}, std::pair{4, 4}}) {
    job.NewHosts(ranks);
    ++job.config.steps;
    EXPECT_ALL_OK(job.Run(ranks, ep));
    ASSERT_FALSE(job.host().checkpoints().empty());
    const auto diff = DiffCheckpoints(*job.fs, first, job.host().checkpoints().back().path());
    ASSERT_TRUE(diff.ok()) << ToString(diff.status());
    for (const std::string& line : *diff) {
      const bool of_state = line.find("state/") == 0 || line.find("master") != std::string::npos ||
                            line.find("/m:") != std::string::npos ||
                            line.find("/v:") != std::string::npos;
      EXPECT_FALSE(of_state) << ranks << "/" << ep << ": " << line;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Recipes, ReshardStateTest,
                         ::testing::Values(RecipeKind::kFp32, RecipeKind::kBf16,
                                           RecipeKind::kFp8Delayed, RecipeKind::kFp8Current,
                                           RecipeKind::kFp8Blockwise, RecipeKind::kFp8Flow,
                                           RecipeKind::kMxfp8),
                         [](const auto& info) { return std::string(Name(info.param)); });

TEST(WishTest, CheckpointStopAndSuspendAreServedTogetherAndOnce) {
  for (const int asked : {0, 1}) {  // whichever rank hears of it
    TestJob job;
    job.config.steps = 30;
    job.NewHosts(2);
    job.host(0).on_message = [&](const iv1::RankToWorker& m) {
      if (m.has_step() && m.step().step() == 3) {
        job.host(asked).Wish([](RankWishes& w) { w.checkpoint = true; });
      }
      if (m.has_step() && m.step().step() == 12) {
        job.host(asked).Wish([](RankWishes& w) { w.suspend = true; });
      }
    };
    const auto outcomes = job.Run(2, 2);
    EXPECT_ALL_OK(outcomes);
    EXPECT_TRUE(outcomes[0].suspended);
    EXPECT_TRUE(outcomes[1].suspended);
    EXPECT_EQ(outcomes[0].step, 13);
    const auto saved = job.host().checkpoints();
    ASSERT_EQ(saved.size(), 2u);
    EXPECT_EQ(saved[0].step(), 4);
    EXPECT_EQ(saved[1].step(), 13);

    job.NewHosts(2);
    job.host(0).on_message = [&](const iv1::RankToWorker& m) {
      if (m.has_step() && m.step().step() == 15) {
        job.host(asked).Wish([](RankWishes& w) { w.stop = true; });
      }
    };
    const auto stopped = job.Run(2, 2);
    EXPECT_TRUE(stopped[0].stopped && stopped[1].stopped);
    EXPECT_FALSE(stopped[0].suspended);
    EXPECT_EQ(job.host().steps().front().step(), 14);  // went on from 13
    EXPECT_EQ(job.host().checkpoints().back().step(), 16);

    job.NewHosts(2);
    job.host(0).on_message = [&](const iv1::RankToWorker& m) {
      if (m.has_step() && m.step().step() == 18) {
        job.host(asked).Wish([](RankWishes& w) { w.stop_without_checkpoint = true; });
      }
    };
    const auto left = job.Run(2, 2);
    EXPECT_TRUE(left[0].stopped && left[1].stopped);
    EXPECT_TRUE(job.host().checkpoints().empty());
  }
}

TEST(WishTest, AWishDuringLoadingOrValidationIsHeard) {
  TestJob job;
  job.config.steps = 4;
  EXPECT_ALL_OK(job.Run(2, 2));
  job.config.steps = 8;
  job.config.validation_interval = 1;
  job.config.data.validation_fraction = 0.1;
  job.NewHosts(2);
  job.host(1).Wish([](RankWishes& w) { w.stop = true; });
  const auto loading = job.Run(2, 2);
  EXPECT_ALL_OK(loading);
  EXPECT_TRUE(loading[0].stopped);
  EXPECT_EQ(job.host().steps().size(), 0u);

  job.NewHosts(2);
  job.host(1).on_message = [&](const iv1::RankToWorker& m) {
    if (m.has_progress() && m.progress().phase() == iv1::RANK_VALIDATING) {
      job.host(1).Wish([](RankWishes& w) { w.stop = true; });
    }
  };
  const auto validating = job.Run(2, 2);
  EXPECT_ALL_OK(validating);
  EXPECT_TRUE(validating[0].stopped);
  EXPECT_LE(validating[0].step, 6);
  EXPECT_EQ(job.host().checkpoints().back().step(), validating[0].step);
}

TEST(PlanSwitchTest, ALateRankDelaysTheSwitchAndAllSwitchAtTheSameStep) {
  TestJob job(RecipeKind::kFp8Flow);
  job.config.steps = 14;
  job.NewHosts(2);
  PrecisionPlan next = BuildPlan(2, DefaultRecipe(RecipeKind::kBf16), 0, {});
  next.version = 2;
  job.host(0).on_message = [&](const iv1::RankToWorker& m) {
    if (m.has_step() && m.step().step() == 2) {
      job.host(0).OfferPlan(next);
    }
    if (m.has_step() && m.step().step() == 7) {
      job.host(1).OfferPlan(next);
    }
  };
  EXPECT_ALL_OK(job.Run(2, 2));
  std::vector<std::pair<std::int64_t, std::int64_t>> applied;
  for (const auto& m : job.host().messages()) {
    if (m.has_plan_applied()) {
      applied.emplace_back(m.plan_applied().version(), m.plan_applied().step());
    }
  }
  // Rank 1 may hear of it in step 8 or 9; the switch is at the next boundary.
  ASSERT_EQ(applied.size(), 2u);
  EXPECT_EQ(applied[0], (std::pair<std::int64_t, std::int64_t>{1, 1}));
  EXPECT_EQ(applied[1].first, 2);
  const std::int64_t first_step = applied[1].second;
  EXPECT_GE(first_step, 9);
  EXPECT_LE(first_step, 10);
  for (const auto& step : job.host().steps()) {
    EXPECT_EQ(step.plan_version(), step.step() < first_step ? 1 : 2) << step.step();
  }
  // Both ranks report what they executed: flow before, bf16 after, never mixed in one snapshot.
  for (int rank : {0, 1}) {
    for (const auto& m : job.host(rank).messages()) {
      if (m.has_telemetry()) {
        const auto& t = m.telemetry();
        EXPECT_TRUE(t.last_step() < first_step || t.first_step() >= first_step);
        EXPECT_EQ(t.plan_version(), t.last_step() < first_step ? 1 : 2);
        const std::string& recipe = t.recipes_in_force(static_cast<int>(Op::kFc1));
        EXPECT_EQ(recipe.find("bf16") == 0, t.first_step() >= first_step) << recipe;
      }
    }
  }
  // A change of recipe family takes a checkpoint first; steps go on until it is complete.
  EXPECT_LE(job.host().checkpoints().front().step(), first_step - 1);
}

TEST(PlanSwitchTest, RanksGivenDifferentPlansBeginWithRankZerosAndCatchUp) {
  TestJob job(RecipeKind::kBf16);
  job.NewHosts(2);
  PrecisionPlan next = BuildPlan(2, DefaultRecipe(RecipeKind::kFp8Flow), 0, {});
  next.version = 2;
  job.host(1).OfferPlan(next);
  job.host(0).on_message = [&](const iv1::RankToWorker& m) {
    if (m.has_step() && m.step().step() == 1) {
      job.host(0).OfferPlan(next);
    }
  };
  EXPECT_ALL_OK(job.Run(2, 2));
  EXPECT_EQ(job.host().steps().front().plan_version(), 1);
  EXPECT_EQ(job.host().steps().back().plan_version(), 2);
}

TEST(RetryTest, ANonfiniteGradientIsRetriedInBf16AndTheStepIsApplied) {
  TestJob job(RecipeKind::kFp8Flow);
  job.hooks = Poison([](std::int64_t step, int pass) { return step == 3 && pass == 0; });
  EXPECT_ALL_OK(job.Run(2, 2));
  const auto steps = job.host().steps();
  ASSERT_EQ(steps.size(), 6u);
  EXPECT_EQ(steps[2].outcome(), 1);
  EXPECT_EQ(steps[2].nonfinite_op(), "the gradient or the loss");
  EXPECT_TRUE(std::isfinite(steps[2].loss()));
  EXPECT_EQ(steps[3].outcome(), 0);
  EXPECT_LT(steps[5].loss(), steps[0].loss());
  // The retried pass ran in bf16, and says so.
  bool mismatch = false;
  for (const auto& m : job.host().messages()) {
    if (m.has_telemetry()) {
      for (const auto& e : m.telemetry().executed()) {
        mismatch = mismatch ||
                   (e.planned() == "fp8_flow" && e.executed() == "bf16" && !e.reason().empty());
      }
    }
  }
  EXPECT_TRUE(mismatch);
}

TEST(RetryTest, AStepThatStaysNonfiniteIsSkippedAndChangesNothing) {
  TestJob job(RecipeKind::kFp8Flow);
  job.hooks = Poison([](std::int64_t step, int) { return step == 3; });
  EXPECT_ALL_OK(job.Run());
  const auto steps = job.host().steps();
  ASSERT_EQ(steps.size(), 6u);
  EXPECT_EQ(steps[2].outcome(), 2);
  const auto list = ListCheckpoints(*job.fs, job.config.checkpoint.root);
  EXPECT_EQ(list->front().manifest.state.adam_t, 5);  // Adam's t stands still
  EXPECT_EQ(list->front().manifest.state.step, 6);    // data order and schedule advance
  EXPECT_EQ(list->front().manifest.state.skipped_steps, 1);
  for (std::size_t i = 3; i < 6; ++i) {
    EXPECT_TRUE(std::isfinite(steps[i].loss()));
  }
}

TEST(RetryTest, TooManySkipsInARowFailTheAttemptWithTheReason) {
  TestJob job(RecipeKind::kBf16);
  job.config.steps = 20;
  job.config.checkpoint.interval_steps = 2;
  job.hooks = Poison([](std::int64_t step, int) { return step >= 4; });
  const auto outcomes = job.Run(2, 1);
  for (const auto& outcome : outcomes) {
    EXPECT_EQ(outcome.failure, FailureClass::kNumericFailure);
    EXPECT_EQ(outcome.step, 6);
    EXPECT_NE(outcome.message.find("3 steps in a row"), std::string::npos) << outcome.message;
  }
  EXPECT_EQ(job.host().steps().size(), 6u);  // the failing step is reported too
  EXPECT_EQ(job.host().steps().back().outcome(), 2);
}

TEST(CheckpointingTest, AFullDiskCostsTheCheckpointNotTheTraining) {
  TestJob job;
  FaultyFileSystem faulty(&PosixFileSystem::Get());
  job.fs = &faulty;
  job.config.checkpoint.interval_steps = 2;
  job.config.steps = 12;
  job.NewHosts(2);
  job.host().on_message = [&](const iv1::RankToWorker& m) {
    if (m.has_checkpoint() && m.checkpoint().ok() && m.checkpoint().step() == 2) {
      faulty.FailWritesAfterBytes(1000);  // the disk fills up after the first
    }
    if (m.has_checkpoint() && !m.checkpoint().ok()) {
      faulty.ClearFaults();  // and somebody makes room
    }
  };
  EXPECT_ALL_OK(job.Run(2, 2));
  const auto saved = job.host().checkpoints();
  ASSERT_GE(saved.size(), 3u);
  EXPECT_TRUE(saved[0].ok());
  EXPECT_FALSE(saved[1].ok());
  EXPECT_NE(saved[1].error().find("rank"), std::string::npos) << saved[1].error();
  EXPECT_TRUE(saved.back().ok());
  EXPECT_EQ(saved.back().step(), 12);
}

TEST(CheckpointingTest, ADiskThatStaysFullFailsTheLastSaveWithTheReason) {
  TestJob job;
  FaultyFileSystem faulty(&PosixFileSystem::Get());
  job.fs = &faulty;
  job.config.steps = 3;
  job.NewHosts(1);
  job.host().on_message = [&](const iv1::RankToWorker& m) {
    if (m.has_step()) {
      faulty.FailWritesAfterBytes(0);
    }
  };
  const auto outcomes = job.Run();
  EXPECT_EQ(outcomes[0].failure, FailureClass::kCheckpointUnusable);
  EXPECT_NE(outcomes[0].message.find("saving step 3"), std::string::npos) << outcomes[0].message;
}

TEST(CheckpointingTest, TheLastStepIsSavedWhenSomebodyMakesRoom) {
  TestJob job;
  FaultyFileSystem faulty(&PosixFileSystem::Get());
  job.fs = &faulty;
  job.config.steps = 3;
  job.config.checkpoint.interval_steps = 1;
  job.NewHosts(2);
  job.host().on_message = [&](const iv1::RankToWorker& m) {
    if (m.has_step() && m.step().step() == 2) {
      faulty.FailWritesAfterBytes(0);
    }
    if (m.has_checkpoint() && !m.checkpoint().ok() && m.checkpoint().step() == 3) {
      faulty.ClearFaults();
    }
  };
  EXPECT_ALL_OK(job.Run(2, 1));
  const auto saved = job.host().checkpoints();
  ASSERT_GE(saved.size(), 2u);
  const auto& failed = saved[saved.size() - 2];
  EXPECT_FALSE(failed.ok());
  EXPECT_EQ(failed.step(), 3);
  EXPECT_NE(failed.error().find("free in " + job.config.checkpoint.root), std::string::npos)
      << failed.error();
  EXPECT_NE(failed.error().find("3 times in all"), std::string::npos) << failed.error();
  EXPECT_TRUE(saved.back().ok());
  EXPECT_EQ(saved.back().step(), 3);
}

TEST(CheckpointingTest, ADamagedNewestIsPassedOverAndSaid) {
  TestJob job;
  job.config.steps = 4;
  job.config.checkpoint.interval_steps = 2;
  EXPECT_ALL_OK(job.Run(2, 2));
  const std::string newest = job.host().checkpoints().back().path();
  const std::string shard = newest + "/rank-00001.safetensors";
  std::string bytes = *job.fs->ReadFile(shard);
  bytes[bytes.size() / 2] = static_cast<char>(bytes[bytes.size() / 2] ^ 1);
  ASSERT_TRUE(job.fs->WriteFileAtomic(shard, bytes).ok());
  job.config.steps = 5;
  job.NewHosts(2);
  EXPECT_ALL_OK(job.Run(2, 2));
  for (const auto& m : job.host().messages()) {
    if (m.has_attempt_start()) {
      EXPECT_EQ(m.attempt_start().loaded_step(), 2);
      EXPECT_NE(m.attempt_start().note().find("damaged"), std::string::npos);
    }
  }
  EXPECT_EQ(job.host().steps().front().step(), 3);
}

TEST(CheckpointingTest, WithEveryCheckpointDamagedItFailsInsteadOfStartingOver) {
  TestJob job;
  job.config.steps = 2;
  EXPECT_ALL_OK(job.Run());
  const std::string path = job.host().checkpoints().back().path();
  ASSERT_TRUE(job.fs->Remove(path + "/rank-00000.safetensors").ok());
  job.config.steps = 5;
  const auto outcomes = job.Run();
  EXPECT_EQ(outcomes[0].failure, FailureClass::kCheckpointUnusable);
  EXPECT_NE(outcomes[0].message.find("no usable checkpoint"), std::string::npos);
}

TEST(CheckpointingTest, AnotherModelsCheckpointIsRefusedFieldByField) {
  TestJob job;
  job.config.steps = 2;
  EXPECT_ALL_OK(job.Run());
  job.config.model.rope_theta = 50000;
  job.config.steps = 4;
  const auto outcomes = job.Run();
  EXPECT_EQ(outcomes[0].failure, FailureClass::kSpecRejected) << "not worth another attempt";
  EXPECT_NE(outcomes[0].message.find("model.rope_theta is 10000 in the checkpoint and 50000"),
            std::string::npos)
      << outcomes[0].message;
}

TEST(CheckpointingTest, AFencedAttemptEndsAtItsNextSave) {
  TestJob job;
  job.config.steps = 20;
  job.config.checkpoint.interval_steps = 5;
  job.NewHosts(1);
  job.host().on_message = [&](const iv1::RankToWorker& m) {
    if (m.has_step() && m.step().step() == 2) {
      CheckpointStore newer(*job.fs, job.config.checkpoint.root, "uid", 9);
      EXPECT_TRUE(newer.Begin(0).ok());
    }
  };
  const auto outcomes = job.Run();
  EXPECT_FALSE(outcomes[0].ok());
  EXPECT_NE(outcomes[0].message.find("fenced"), std::string::npos) << outcomes[0].message;
  EXPECT_LT(outcomes[0].step, 20);
  EXPECT_TRUE(ListCheckpoints(*job.fs, job.config.checkpoint.root)->empty());
}

TEST(TelemetryTest, DroppedReportsAreCountedAndNeverStopTraining) {
  TestJob job(RecipeKind::kFp8Flow);
  job.NewHosts(1);
  job.host().drop_all = true;
  job.config.steps = 7;
  job.hooks.before_finish_pass = [&](std::int64_t step, int, Transformer&) {
    if (step == 7) {
      job.host().drop_all = false;
    }
  };
  EXPECT_ALL_OK(job.Run());
  std::int64_t dropped = 0;
  for (const auto& m : job.host().messages()) {
    if (m.has_telemetry()) {
      dropped += m.telemetry().dropped_reports();
    }
  }
  EXPECT_GE(dropped, 8);  // six steps, two snapshots, and heartbeats
}

TEST(TelemetryTest, TheReportOfTheLastStepIsDeliveredAlsoWhenItWasDroppedFirst) {
  TestJob job;
  job.NewHosts(1);
  job.host().drop_all = true;  // what must arrive waits for room; the rest is dropped
  EXPECT_ALL_OK(job.Run());
  const std::vector<iv1::StepReport> steps = job.host().steps();
  ASSERT_EQ(steps.size(), 1u);
  EXPECT_EQ(steps[0].step(), job.config.steps);
}

TEST(TelemetryTest, SnapshotsCarryCountsEnergiesFlopsAndLoads) {
  TestJob job(RecipeKind::kFp8Flow);
  EXPECT_ALL_OK(job.Run(2, 2));
  double fp8 = 0, all = 0;
  std::int64_t bytes = 0;
  bool energy = false;
  int snapshots = 0;
  for (const auto& m : job.host().messages()) {
    if (!m.has_telemetry()) {
      continue;
    }
    ++snapshots;
    const auto& t = m.telemetry();
    EXPECT_EQ(t.last_step() - t.first_step(), 2);
    EXPECT_EQ(t.recipes_in_force_size(), 2 * kOpCount);
    EXPECT_EQ(t.loads_size(), 2);
    EXPECT_GE(t.loads(0).max_ratio(), 1.0);
    EXPECT_GT(t.memory_bytes(), 0);
    EXPECT_GT(t.tensors_size(), 5);
    for (const auto& stats : t.tensors()) {
      EXPECT_GT(stats.amax(), 0);
      EXPECT_GE(stats.elements(), stats.nonzero());
      energy = energy || (stats.signal_energy() > 0 && stats.noise_energy() > 0);
    }
    for (const auto& [kind, flops] : t.flops()) {
      all += flops;
      fp8 += kind == "fp8" ? flops : 0;
    }
    bytes += t.all_to_all_bytes();
  }
  EXPECT_EQ(snapshots, 2);
  EXPECT_TRUE(energy);
  EXPECT_GT(fp8, 0);
  EXPECT_LT(fp8, all);
  EXPECT_GT(bytes, 0);
}

TEST(TrainingTest, ABadDatasetEndsTheWholeGangWithItsReason) {
  TestJob job;
  job.config.data.path = job.dir.File("absent");
  for (const auto& outcome : job.Run(2, 2)) {
    EXPECT_FALSE(outcome.ok());
    EXPECT_NE(outcome.message.find("absent"), std::string::npos) << outcome.message;
    EXPECT_EQ(outcome.failure, FailureClass::kSpecRejected) << "not worth another attempt";
  }
}

}  // namespace
}  // namespace octavo
