// The policy behind the core's hook: evidence of all workers is joined, decisions become plans, and
// a restarted controller knows who fell.
#include "controller/core/policy_driver.h"

#include "controller/core/core.h"
#include "controller/store/memory_store.h"
#include "gtest/gtest.h"
#include "proto/convert/precision.h"
#include "tests/unit/controller/core/test_spec.h"

namespace octavo {
namespace {

v1::Job MakeJob() {
  v1::Job job;
  job.set_uid("u");
  *job.mutable_spec() = TestSpec("job", [](v1::JobSpec& spec) {
    spec.mutable_train()->set_steps(1000);
    spec.mutable_precision()->set_recipe("fp8_blockwise");
  });
  return job;
}

// One worker's view of layer 1 fc1's input; a third of what is not zero became zero when `bad`.
internal::v1::TelemetrySnapshot Snapshot(std::int64_t last_step, bool bad,
                                         std::int64_t plan_version = 1) {
  internal::v1::TelemetrySnapshot snapshot;
  snapshot.set_first_step(last_step - 9);
  snapshot.set_last_step(last_step);
  snapshot.set_plan_version(plan_version);
  snapshot.set_ranks(1);
  internal::v1::TensorStats& tensor = *snapshot.add_tensors();
  tensor.set_layer(1);
  tensor.set_op(static_cast<std::int32_t>(Op::kFc1));
  tensor.set_tensor(static_cast<std::int32_t>(Tensor::kInput));
  tensor.set_amax(1);
  tensor.set_dequant_scale_min(0.01F);
  tensor.set_dequant_scale_max(0.02F);
  tensor.set_elements(1000);
  tensor.set_nonzero(900);
  tensor.set_flushed(bad ? 300 : 0);
  return snapshot;
}

TEST(JoinHealth, TakesMaximaAndAddsCounts) {
  TensorHealth a{.site = {1, Op::kFc1}, .amax = 2, .dequant_scale_min = 1, .dequant_scale_max = 3};
  a.elements = 10;
  a.worst = {{.expert = 5, .ratio = ExpertRatio::kFlushed, .count = 1, .total = 4}};
  TensorHealth b = a;
  b.amax = 7;
  b.dequant_scale_min = 0.5;
  b.worst[0].count = 2;
  HealthSnapshot joined;
  JoinHealth({.first_step = 1, .last_step = 10, .plan_version = 1, .tensors = {a}}, &joined);
  JoinHealth({.first_step = 1, .last_step = 10, .plan_version = 1, .tensors = {b}}, &joined);
  ASSERT_EQ(joined.tensors.size(), 1u);
  EXPECT_EQ(joined.tensors[0].amax, 7);
  EXPECT_EQ(joined.tensors[0].elements, 20u);
  EXPECT_EQ(joined.tensors[0].dequant_scale_min, 0.5F);
  ASSERT_EQ(joined.tensors[0].worst.size(), 1u);
  EXPECT_EQ(joined.tensors[0].worst[0].count, 3u);
  EXPECT_EQ(joined.tensors[0].worst[0].total, 8u);
}

class PolicyDriverTest : public testing::Test {
 protected:
  // Both workers report; the answer of the second one counts.
  PolicyAnswer Interval(std::int64_t last_step, bool bad) {
    const auto first = driver_.OnSnapshot(job_, plan_, Snapshot(last_step, bad));
    EXPECT_FALSE(first.plan.has_value()) << "half of the ranks";
    return driver_.OnSnapshot(job_, plan_, Snapshot(last_step, bad));
  }
  v1::Job job_ = MakeJob();
  PrecisionPlan plan_ = [this] {
    PrecisionPlan plan = BuildPlanFromSpec(job_.spec());
    plan.version = 1;
    return plan;
  }();
  PolicyDriver driver_;
};

TEST_F(PolicyDriverTest, ThreeBadIntervalsOfAllWorkersMakeAFallback) {
  driver_.OnAttempt(job_, {}, 0);
  std::int64_t step = 200;  // beyond the grace
  EXPECT_FALSE(Interval(step += 10, true).plan.has_value());
  EXPECT_FALSE(Interval(step += 10, true).plan.has_value());
  const PolicyAnswer answer = Interval(step += 10, true);
  ASSERT_TRUE(answer.plan.has_value());
  EXPECT_EQ(answer.plan->Resolve(1, Op::kFc1).kind, RecipeKind::kBf16);
  EXPECT_EQ(answer.plan->Resolve(2, Op::kFc1), plan_.Resolve(2, Op::kFc1));
  ASSERT_FALSE(answer.changes.empty());
  EXPECT_EQ(answer.changes[0].first, "fallback");
}

TEST_F(PolicyDriverTest, AnIntervalWithAMissingWorkerIsJudgedWhenTheNextBegins) {
  driver_.OnAttempt(job_, {}, 0);
  bool fell = false;
  for (std::int64_t step = 210; step <= 250 && !fell; step += 10) {
    fell = driver_.OnSnapshot(job_, plan_, Snapshot(step, true)).plan.has_value();
  }
  EXPECT_TRUE(fell);
}

TEST_F(PolicyDriverTest, APolicyThatIsOffDecidesNothing) {
  job_.mutable_spec()->mutable_precision()->mutable_policy()->set_enabled(false);
  driver_.OnAttempt(job_, {}, 0);
  for (std::int64_t step = 210; step <= 300; step += 10) {
    EXPECT_FALSE(Interval(step, true).plan.has_value());
  }
}

TEST_F(PolicyDriverTest, AnOperatorsSiteIsLeftAlone) {
  driver_.OnAttempt(job_, {}, 0);
  PrecisionPlan before = plan_;
  before.At(1, Op::kFc1) = DefaultRecipe(RecipeKind::kBf16);
  driver_.OnOperatorPlan(job_, before, plan_);  // he wants FP8 there
  for (std::int64_t step = 210; step <= 300; step += 10) {
    EXPECT_FALSE(Interval(step, true).plan.has_value());
  }
}

TEST_F(PolicyDriverTest, ARestartedControllerKnowsWhoFell) {
  PrecisionPlan fallen = plan_;
  fallen.version = 2;
  fallen.author = PlanAuthor::kPolicy;
  fallen.At(1, Op::kFc1) = DefaultRecipe(RecipeKind::kBf16);
  driver_.Restore(job_, {plan_, fallen}, nullptr);
  driver_.OnAttempt(job_, {}, 0);
  plan_ = fallen;
  // Good shadow evidence beyond the hold: it returns to what it fell from, which only the history
  // knows.
  bool returned = false;
  for (std::int64_t step = 510; step <= 800 && !returned; step += 10) {
    internal::v1::TelemetrySnapshot snapshot = Snapshot(step, false, 2);
    snapshot.set_ranks(2);
    internal::v1::TensorStats& tensor = *snapshot.mutable_tensors(0);
    tensor.set_shadow(true);
    tensor.set_shadow_recipe("fp8_blockwise");
    tensor.set_signal_energy(1e4);
    tensor.set_noise_energy(1);
    internal::v1::TensorStats weight = tensor;
    weight.set_tensor(static_cast<std::int32_t>(Tensor::kWeight));
    internal::v1::TensorStats grad = tensor;
    grad.set_tensor(static_cast<std::int32_t>(Tensor::kGrad));
    *snapshot.add_tensors() = weight;
    *snapshot.add_tensors() = grad;
    const PolicyAnswer answer = driver_.OnSnapshot(job_, plan_, snapshot);
    returned = answer.plan.has_value() &&
               answer.plan->Resolve(1, Op::kFc1).kind == RecipeKind::kFp8Blockwise;
  }
  EXPECT_TRUE(returned);
}

TEST_F(PolicyDriverTest, AnAlertIsSaidOnceUntilItsTimeIsOver) {
  driver_.OnAttempt(job_, {}, 0);
  std::map<std::int64_t, std::size_t> said;  // last step → alerts
  for (std::int64_t step = 110; step <= 900; step += 10) {
    internal::v1::TelemetrySnapshot snapshot = Snapshot(step, false);
    snapshot.set_ranks(2);
    // Blockwise recipes adapt to any amax: a jump is told and changes nothing.
    snapshot.mutable_tensors(0)->set_amax(step % 20 == 0 ? 1000.0F : 1.0F);
    const PolicyAnswer answer = driver_.OnSnapshot(job_, plan_, snapshot);
    EXPECT_FALSE(answer.plan.has_value());
    if (!answer.alerts.empty()) {
      said[step] = answer.alerts.size();
    }
  }
  ASSERT_FALSE(said.empty());
  EXPECT_LE(said.size(), 4u) << "two sentences at most twice each in 800 steps";
}

TEST_F(PolicyDriverTest, WhatIsSavedComesBackWholeInAnotherController) {
  driver_.OnAttempt(job_, {.is_cuda = true, .sm = 90}, 0);
  std::int64_t step = 200;
  std::optional<PrecisionPlan> fallen;
  while (!fallen.has_value() && step < 300) {
    fallen = Interval(step += 10, true).plan;
  }
  ASSERT_TRUE(fallen.has_value());
  driver_.SetOperatorSites(job_, {{2, Op::kFc2}}, /*release=*/false);
  driver_.SetEnabled(job_, false);
  const internal::v1::StoredPolicy saved = driver_.Save(job_);
  PolicyDriver other;
  other.Restore(job_, {plan_}, &saved);
  EXPECT_FALSE(other.Enabled(job_));
  EXPECT_EQ(other.Save(job_).SerializeAsString(), saved.SerializeAsString());
  bool found = false;
  for (const internal::v1::StoredPolicy::Site& site : saved.sites()) {
    if (site.layer() == 1 && site.op() == static_cast<std::int32_t>(Op::kFc1)) {
      found = true;
      EXPECT_EQ(site.since_step(), step);
      EXPECT_EQ(site.hold_steps(), job_.spec().precision().policy().hold_steps());
      EXPECT_TRUE(site.switching());
    }
  }
  EXPECT_TRUE(found);
  other.SetEnabled(job_, true);
  EXPECT_TRUE(other.Enabled(job_));
}

TEST_F(PolicyDriverTest, AReplayDecidesLikeTheRunAndAnotherPolicyOtherwise) {
  driver_.OnAttempt(job_, {}, 0);
  const auto plan_of = [this](std::int64_t version) -> absl::StatusOr<PrecisionPlan> {
    EXPECT_EQ(version, 1);
    return plan_;
  };
  EXPECT_EQ(driver_.Replay(job_, nullptr, {}, plan_of).status().code(),
            absl::StatusCode::kFailedPrecondition);
  std::int64_t fell = 0;
  for (std::int64_t step = 210; step <= 300; step += 10) {
    if (Interval(step, true).plan.has_value() && fell == 0) {
      fell = step;
    }
  }
  ASSERT_GT(fell, 0);
  const auto same = driver_.Replay(job_, nullptr, {}, plan_of);
  ASSERT_TRUE(same.ok());
  EXPECT_EQ(same->snapshots, 10);
  EXPECT_EQ(same->last_step, 300);
  ASSERT_FALSE(same->result.decisions.empty());
  EXPECT_EQ(same->result.decisions[0].step, fell);
  v1::PolicySpec tolerant = job_.spec().precision().policy();
  tolerant.set_flushed_ratio(0.9);
  const auto other = driver_.Replay(job_, &tolerant, {}, plan_of);
  ASSERT_TRUE(other.ok());
  EXPECT_TRUE(other->result.decisions.empty());
}

TEST_F(PolicyDriverTest, TheWorstTensorComesFirstWithItsReason) {
  driver_.OnAttempt(job_, {}, 0);
  for (std::int64_t step = 10; step <= 50; step += 10) {
    internal::v1::TelemetrySnapshot snapshot = Snapshot(step, true);
    snapshot.set_ranks(2);
    internal::v1::TensorStats healthy = snapshot.tensors(0);
    healthy.set_layer(2);
    healthy.set_flushed(9);
    *snapshot.add_tensors() = healthy;
    auto& worst = *snapshot.mutable_tensors(0)->add_worst();
    worst.set_expert(5);
    worst.set_ratio(1);
    worst.set_count(90);
    worst.set_total(100);
    driver_.OnSnapshot(job_, plan_, snapshot);
  }
  const auto health = driver_.Health(job_, plan_);
  ASSERT_TRUE(health.ok());
  ASSERT_EQ(health->tensors.size(), 2u);
  EXPECT_EQ(health->tensors[0].tensor.site, (OpSite{1, Op::kFc1}));
  EXPECT_EQ(health->tensors[0].signal, Signal::kFlushed);
  EXPECT_EQ(health->tensors[0].expert, 5);
  EXPECT_NEAR(health->tensors[0].severity, 0.9 / 0.05, 1e-9);
  EXPECT_NE(health->tensors[0].reason.find("expert 5"), std::string::npos);
  EXPECT_LT(health->tensors[1].severity, 1);
}

TEST(RecentHealth, HoldsTheNewestSnapshotsOfOneAttemptAndPlan) {
  RecentHealth recent;
  HealthSnapshot snapshot{.plan_version = 1};
  const auto add = [&](std::int64_t step) {
    snapshot.first_step = snapshot.last_step = step;
    recent.Add(snapshot);
  };
  for (std::int64_t step = 1; step <= 100; ++step) {
    add(step);
    recent.Add(StepHealth{.step = step});
  }
  ASSERT_EQ(recent.Snapshots().size(), RecentHealth::kSnapshots);
  EXPECT_EQ(recent.Snapshots().back().last_step, 100);
  EXPECT_EQ(recent.Snapshots().front().last_step, 101 - static_cast<int>(RecentHealth::kSnapshots));
  snapshot.plan_version = 2;
  add(101);
  EXPECT_EQ(recent.Snapshots().size(), 1u) << "another plan";
  add(102);
  EXPECT_EQ(recent.Snapshots().size(), 2u);
  recent.Add(AttemptStarted{90});
  EXPECT_TRUE(recent.Snapshots().empty()) << "steps after 90 come again";
  EXPECT_EQ(recent.last_step(), 90);
}

}  // namespace
}  // namespace octavo
