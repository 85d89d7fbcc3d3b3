// Profiles of running trainings, and what a step does to its backend.
#include "worker/rank/profiler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <thread>

#include "kernels/cpu/backend.h"
#include "kernels/ops_range.h"
#include "tests/unit/worker/rank/rank_harness.h"
#include "worker/rank/op_work.h"

namespace octavo {
namespace {

using testing::TestJob;

const v1::ProfileEntry* Find(const v1::RankProfile& profile, const std::string& phase,
                             const std::string& layer, const std::string& site,
                             const std::string& op) {
  for (const v1::ProfileEntry& entry : profile.entries()) {
    if (entry.phase() == phase && entry.layer() == layer && entry.site() == site &&
        entry.op() == op) {
      return &entry;
    }
  }
  return nullptr;
}

double SumOfSeconds(const v1::RankProfile& profile) {
  double sum = 0;
  for (const v1::ProfileEntry& entry : profile.entries()) {
    sum += entry.seconds();
  }
  return sum;
}

// An operation with nothing to do, whatever its arguments.
void Zero(const Backend& backend) {
  std::int64_t word = 1;
  backend.ops->zero(backend.context, &word, sizeof(word));
}

class OpProfilerTest : public ::testing::Test {
 protected:
  OpProfilerTest() : real_(CreateCpuBackend()) {}
  ~OpProfilerTest() override { DestroyCpuBackend(&real_); }

  Backend real_;
  ExecutedCounters executed_;
};

TEST_F(OpProfilerTest, CallsAreFiledUnderTheRangesThatAreOpen) {
  OpProfiler profiler(real_);
  const Backend backend{.ops = profiler.ops(), .context = real_.context};
  Zero(backend);  // before: not timed
  profiler.Begin({.id = 7, .steps = 2}, 11, executed_);
  for (int step = 0; step < 2; ++step) {
    profiler.BeginStep();
    Zero(backend);
    {
      const OpsRange phase(backend, "forward");
      const OpsRange layer(backend, "layer 3");
      Zero(backend);
      const OpsRange site(backend, "fc1");
      Zero(backend);
      Zero(backend);
    }
    EXPECT_FALSE(profiler.done());
    profiler.EndStep(executed_);
    Zero(backend);  // between steps: not timed
  }
  EXPECT_FALSE(profiler.active());
  ASSERT_TRUE(profiler.done());
  const v1::RankProfile profile = profiler.Take();
  EXPECT_EQ(profile.id(), 7);
  EXPECT_EQ(profile.first_step(), 11);
  EXPECT_EQ(profile.steps(), 2);
  EXPECT_EQ(profile.backend(), "cpu");
  ASSERT_EQ(profile.entries_size(), 3);
  const v1::ProfileEntry* outside = Find(profile, "", "", "", "zero");
  const v1::ProfileEntry* layer = Find(profile, "forward", "layer 3", "", "zero");
  const v1::ProfileEntry* site = Find(profile, "forward", "layer 3", "fc1", "zero");
  ASSERT_TRUE(outside != nullptr && layer != nullptr && site != nullptr);
  EXPECT_EQ(outside->calls(), 2);
  EXPECT_EQ(layer->calls(), 2);
  EXPECT_EQ(site->calls(), 4);
  EXPECT_EQ(site->bytes(), 4 * 8.0);
  EXPECT_GE(site->seconds(), 0);
  EXPECT_LE(SumOfSeconds(profile), profile.seconds());
  EXPECT_FALSE(profiler.done());
}

TEST_F(OpProfilerTest, CallsOfOtherThreadsPassThroughUntimed) {
  OpProfiler profiler(real_);
  const Backend backend{.ops = profiler.ops(), .context = real_.context};
  profiler.Begin({.id = 1, .steps = 1}, 1, executed_);
  profiler.BeginStep();
  std::int64_t word = 1;
  std::jthread([&] { backend.ops->zero(backend.context, &word, sizeof(word)); }).join();
  profiler.EndStep(executed_);
  EXPECT_EQ(word, 0) << "it was done";
  EXPECT_EQ(profiler.Take().entries_size(), 0);
}

TEST_F(OpProfilerTest, CallsBeyondTheMarksAreCountedAndStillDone) {
  OpProfiler profiler(real_);
  const Backend backend{.ops = profiler.ops(), .context = real_.context};
  profiler.Begin({.id = 1, .steps = 1}, 1, executed_);
  profiler.BeginStep();
  for (int i = 0; i < 20000; ++i) {
    Zero(backend);
  }
  profiler.EndStep(executed_);
  const v1::RankProfile profile = profiler.Take();
  ASSERT_EQ(profile.entries_size(), 1);
  EXPECT_GT(profile.untimed_calls(), 0);
  EXPECT_EQ(profile.entries(0).calls() + profile.untimed_calls(), 20000);
}

TEST(OpWorkTest, CountsFlopsAndBytesOfProducts) {
  GemmArgs gemm{};
  gemm.m = 3;
  gemm.n = 5;
  gemm.k = 7;
  gemm.a.dtype = gemm.b.dtype = DType::kBF16;
  gemm.c_dtype = DType::kF32;
  EXPECT_EQ(WorkOf(gemm).flops, 2 * 3 * 5 * 7);
  EXPECT_EQ(WorkOf(gemm).bytes, 2 * (3 * 7 + 5 * 7) + 4 * 3 * 5);
  const std::int64_t rows[] = {2, 0, 4};
  GroupedGemmArgs grouped{};
  grouped.groups.count = 3;
  grouped.groups.host_rows = rows;
  grouped.groups.padded_rows = 256;
  grouped.n = 5;
  grouped.k = 7;
  EXPECT_EQ(WorkOf(grouped).flops, 2 * 6 * 5 * 7) << "padding is no work";
  EXPECT_EQ(WorkOf(RopeArgs{}).bytes, 0) << "not counted";
}

// ---------------------------------------------------------------- in a training

TEST(ProfiledTraining, RanksAnswerAWishWithTheirNextSteps) {
  TestJob job(RecipeKind::kFp8Blockwise);
  job.config.steps = 6;
  job.NewHosts(2);
  for (int r = 0; r < 2; ++r) {
    job.host(r).WishProfile({.id = 42, .steps = 3});
  }
  EXPECT_ALL_OK(job.Run(2, 2));
  for (int r = 0; r < 2; ++r) {
    const std::vector<v1::RankProfile> profiles = job.host(r).profiles();
    ASSERT_EQ(profiles.size(), 1u) << "served once";
    const v1::RankProfile& profile = profiles[0];
    EXPECT_EQ(profile.id(), 42);
    EXPECT_EQ(profile.first_step(), 1);
    EXPECT_EQ(profile.steps(), 3);
    EXPECT_EQ(profile.untimed_calls(), 0);
    EXPECT_LE(SumOfSeconds(profile), profile.seconds());
    const v1::ProfileEntry* fc1 = Find(profile, "forward", "layer 1", "fc1", "grouped_gemm");
    const v1::ProfileEntry* wgrad = Find(profile, "backward", "layer 1", "fc1", "grouped_wgrad");
    ASSERT_TRUE(fc1 != nullptr && wgrad != nullptr);
    EXPECT_EQ(fc1->calls(), 3);
    // In two halves; the second runs within the layer below, or behind the last one.
    EXPECT_EQ(wgrad->calls(), 3 * 2);
    const v1::ProfileEntry* below = Find(profile, "backward", "layer 0", "fc1", "grouped_wgrad");
    ASSERT_NE(below, nullptr);
    EXPECT_EQ(below->calls(), 3 * 2);
    EXPECT_GT(fc1->seconds(), 0);
    EXPECT_NE(Find(profile, "optimizer", "", "", "adamw"), nullptr);
    EXPECT_NE(Find(profile, "gradients", "", "", "all_reduce"), nullptr);
    std::int64_t dispatched = 0;
    std::map<std::string, double> by_site;
    for (const v1::ProfileEntry& entry : profile.entries()) {
      dispatched += entry.op() == "all_to_all_v" ? entry.calls() : 0;
      by_site[entry.site()] += entry.flops();
    }
    EXPECT_GE(dispatched, 3 * 2 * 2) << "forward and backward of two layers";
    // The counters of executed products know the same work.
    std::map<std::string, double> planned;
    for (const v1::ProfilePrecision& p : profile.precision()) {
      EXPECT_EQ(p.planned(), p.executed());
      planned[p.op()] += p.flops();
    }
    for (const char* site : {"fc1", "fc2"}) {
      EXPECT_GT(planned[site], 0) << site;
      EXPECT_NEAR(by_site[site] / planned[site], 1, 1e-9) << site;
    }
    for (const char* site : {"attn_qkv", "attn_out"}) {
      EXPECT_GT(planned[site], 0) << site;
      EXPECT_GE(by_site[site], planned[site]) << site << ": rows are padded for wgrad";
    }
  }
}

TEST(ProfiledTraining, AProfileChangesNoBit) {
  TestJob plain(RecipeKind::kFp8Flow), profiled(RecipeKind::kFp8Flow);
  EXPECT_ALL_OK(plain.Run());
  profiled.NewHosts(1);
  profiled.host().WishProfile({.id = 1, .steps = 4});
  EXPECT_ALL_OK(profiled.Run());
  EXPECT_EQ(profiled.host().losses(), plain.host().losses());  // doubles, exactly
}

TEST(ProfiledTraining, ProductsThatFellBackToBf16AreNamed) {
  TestJob job(RecipeKind::kFp8Current);
  job.config.steps = 3;
  job.hooks.before_finish_pass = [](std::int64_t step, int pass, Transformer& model) {
    if (step == 2 && pass == 0) {
      model.parameters().dense_grad()[0] = std::numeric_limits<float>::quiet_NaN();
    }
  };
  job.NewHosts(1);
  job.host().WishProfile({.id = 1, .steps = 3});
  EXPECT_ALL_OK(job.Run());
  const std::vector<v1::RankProfile> profiles = job.host().profiles();
  ASSERT_EQ(profiles.size(), 1u);
  int fallen = 0;
  for (const v1::ProfilePrecision& p : profiles[0].precision()) {
    if (p.planned() != p.executed()) {
      EXPECT_EQ(p.executed(), "bf16");
      EXPECT_EQ(p.reason(), "retry after a non-finite value");
      if (p.op() != "dispatch") {  // a payload, in blocks of its own
        ++fallen;
        EXPECT_THAT(p.planned(), ::testing::HasSubstr("fp8_current"));
        EXPECT_EQ(p.calls(), 3) << "fprop, dgrad and wgrad of one pass";
      }
    }
  }
  EXPECT_GE(fallen, 2 * 4) << "every product of both layers";
}

// ---------------------------------------------------------------- a step that never waits

// After its first steps a training neither allocates nor waits for the device but where
// ARCHITECTURE 5 says so: the counts of each MoE layer, and the sums of the step.
TEST(StepCosts, StepsAllocateNothingAndWaitOnlyForCountsAndSums) {
  for (const RecipeKind kind : {RecipeKind::kBf16, RecipeKind::kFp8Delayed, RecipeKind::kFp8Flow}) {
    TestJob job(kind);
    job.config.steps = 8;
    job.config.sqnr_interval = 100;
    Backend seen;
    job.wrap = [&](const Backend& backend) {
      seen = backend;
      return backend.ops;
    };
    std::vector<OpsCounters> counters;
    job.hooks.before_pass = [&](std::int64_t, int, Transformer&) {
      seen.ops->counters(seen.context, &counters.emplace_back());
    };
    EXPECT_ALL_OK(job.Run());
    ASSERT_EQ(counters.size(), 8u);
    for (std::size_t step = 4; step < 8; ++step) {
      EXPECT_EQ(counters[step].allocations, counters[3].allocations) << "step " << step;
      EXPECT_LE(counters[step].synchronizations - counters[step - 1].synchronizations,
                job.config.model.layers + 1)
          << "step " << step;
    }
  }
}

}  // namespace
}  // namespace octavo
