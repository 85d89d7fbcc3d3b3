#include "controller/policy/fallback.h"

#include <gtest/gtest.h>

#include "controller/policy/replay.h"
#include "tests/unit/controller/policy/policy_fixture.h"

namespace octavo {
namespace {

constexpr OpSite kBad{2, Op::kFc1};

std::function<void(TensorHealth&)> At(OpSite site, Tensor tensor,
                                      std::function<void(TensorHealth&)> spoil) {
  return [=](TensorHealth& t) {
    if (t.site == site && t.tensor == tensor) {
      spoil(t);
    }
  };
}

TEST(Fallback, HealthyHistoryDecidesNothing) {
  for (RecipeKind kind : {RecipeKind::kFp8Delayed, RecipeKind::kFp8Current,
                          RecipeKind::kFp8Blockwise, RecipeKind::kFp8Flow}) {
    PolicyRun run(4, kind);
    run.Run(200);
    EXPECT_TRUE(run.decisions.empty()) << run.decisions[0].reason;
    EXPECT_TRUE(run.alerts.empty()) << run.alerts[0];
  }
}

TEST(Fallback, LowSqnrInTwoSamplesRunningSendsTheOpToBf16AfterTheGrace) {
  PolicyRun run(4, RecipeKind::kFp8Flow);
  run.spoil = At(kBad, Tensor::kInput, [](TensorHealth& t) { t.noise_energy = t.signal_energy / 10; });
  run.Run(9);  // last_step 90 < grace 100
  EXPECT_TRUE(run.decisions.empty());
  run.Run(1);
  ASSERT_EQ(run.decisions.size(), 1u);
  const PolicyDecision& d = run.decisions[0];
  EXPECT_EQ(d.site, kBad);
  EXPECT_EQ(d.signal, Signal::kSqnr);
  EXPECT_NEAR(d.value, 10.0, 1e-9);
  EXPECT_EQ(d.threshold, 25);
  EXPECT_EQ(d.step, 100);
  EXPECT_EQ(d.plan_before, 1);
  EXPECT_EQ(d.plan_after, 2);
  EXPECT_EQ(run.plan.Resolve(2, Op::kFc1).kind, RecipeKind::kBf16);
  EXPECT_EQ(run.plan.Resolve(2, Op::kFc2).kind, RecipeKind::kFp8Flow);
  EXPECT_NE(d.reason.find("sqnr 10 < 25"), std::string::npos) << d.reason;
}

TEST(Fallback, OneBadSampleIsNotEnough) {
  PolicyRun run(4, RecipeKind::kFp8Flow);
  run.Run(20);
  run.spoil = At(kBad, Tensor::kInput, [](TensorHealth& t) { t.noise_energy = t.signal_energy; });
  run.Run(1);
  run.spoil = [](TensorHealth&) {};
  run.Run(20);
  EXPECT_TRUE(run.decisions.empty());
}

TEST(Fallback, SaturationCountsForDelayedOnly) {
  const auto saturate = At(kBad, Tensor::kInput, [](TensorHealth& t) {
    if (!t.shadow) {
      t.saturated = 2000;
    }
  });
  PolicyRun delayed(4, RecipeKind::kFp8Delayed);
  delayed.Run(20);
  delayed.spoil = saturate;
  delayed.Run(1);
  EXPECT_TRUE(delayed.decisions.empty());
  delayed.Run(1);
  ASSERT_EQ(delayed.decisions.size(), 1u);
  EXPECT_EQ(delayed.decisions[0].signal, Signal::kSaturated);
  for (RecipeKind kind :
       {RecipeKind::kFp8Current, RecipeKind::kFp8Blockwise, RecipeKind::kFp8Flow}) {
    PolicyRun other(4, kind);
    other.spoil = saturate;
    other.Run(60);
    EXPECT_TRUE(other.decisions.empty()) << Name(kind);
  }
}

TEST(Fallback, AmaxJumpActsForDelayedAndAlertsElsewhere) {
  const auto jump = At(kBad, Tensor::kGrad, [](TensorHealth& t) { t.amax = 300; });
  PolicyRun delayed(4, RecipeKind::kFp8Delayed);
  delayed.Run(20);
  delayed.spoil = jump;
  delayed.Run(1);
  ASSERT_EQ(delayed.decisions.size(), 1u);
  EXPECT_EQ(delayed.decisions[0].signal, Signal::kAmaxJump);
  EXPECT_NEAR(delayed.decisions[0].value, 100, 1e-6);
  PolicyRun flow(4, RecipeKind::kFp8Flow);
  flow.Run(20);
  flow.spoil = jump;
  flow.Run(1);
  EXPECT_TRUE(flow.decisions.empty());
  ASSERT_FALSE(flow.alerts.empty());
  EXPECT_NE(flow.alerts[0].find("amax_jump"), std::string::npos);
}

// A plan that mixes recipes mixes gradient formats; only scales of one format are comparable.
TEST(Fallback, DequantScalesAreComparedWithinOneFormat) {
  PolicyRun run(6, RecipeKind::kFp8Delayed);
  for (const std::int32_t layer : {0, 1}) {
    for (int op = 0; op < kOpCount; ++op) {
      run.plan.At(layer, static_cast<Op>(op)) = DefaultRecipe(RecipeKind::kFp8Blockwise);
    }
  }
  float outlier = 1;
  run.spoil = [&outlier](TensorHealth& t) {
    if (t.tensor == Tensor::kGrad) {
      t.e5m2 = t.site.layer >= 2;
      t.dequant_scale_max = t.amax / (t.e5m2 ? 57344.0f : 448.0f);
      t.dequant_scale_max *= t.site == OpSite{4, Op::kFc1} ? outlier : 1;
    }
  };
  run.Run(40);
  EXPECT_TRUE(run.decisions.empty()) << run.decisions[0].reason;
  EXPECT_TRUE(run.alerts.empty()) << run.alerts[0];
  outlier = 20;
  run.Run(3);
  ASSERT_EQ(run.decisions.size(), 1u);
  EXPECT_EQ(run.decisions[0].signal, Signal::kDequantScaleOutlier);
  EXPECT_EQ(run.decisions[0].site, (OpSite{4, Op::kFc1}));
  EXPECT_NEAR(run.decisions[0].value, 20, 1e-3);
}

// The first gradients are many times larger than all later ones; long after the grace, when the window
// still remembers them, that is no variation. Later swings of the same size are.
TEST(Fallback, WhatTheGraceShowedIsNoVariationAfterIt) {
  PolicyRun run(4, RecipeKind::kFp8Delayed);
  run.config.amax_jump = 1e9;
  float factor = 1;
  run.spoil = [&](TensorHealth& t) {
    if (t.site == kBad && t.tensor == Tensor::kGrad) {
      t.amax *= factor;
    }
  };
  factor = 1000;
  run.Run(2);  // steps 1 to 20 of a grace of 100
  factor = 1;
  run.Run(60);
  EXPECT_TRUE(run.decisions.empty()) << run.decisions[0].reason;
  factor = 1000;
  run.Run(1);
  ASSERT_EQ(run.decisions.size(), 1u);
  EXPECT_EQ(run.decisions[0].signal, Signal::kAmaxVariation);
  EXPECT_EQ(run.decisions[0].site, kBad);
}

TEST(Fallback, WorstExpertFiresWhereTheTensorAsAWholeLooksHealthy) {
  PolicyRun run(4, RecipeKind::kFp8Blockwise);
  run.Run(12);
  run.spoil = At(kBad, Tensor::kInput, [](TensorHealth& t) {
    t.worst = {{17, ExpertRatio::kFlushed, 300, 1000}};
  });
  run.Run(3);
  ASSERT_EQ(run.decisions.size(), 1u);
  EXPECT_EQ(run.decisions[0].signal, Signal::kFlushed);
  EXPECT_NE(run.decisions[0].reason.find("expert 17"), std::string::npos);
}

TEST(Fallback, StarvedExpertDecidesNothing) {
  PolicyRun run(4, RecipeKind::kFp8Delayed);
  run.spoil = At(kBad, Tensor::kInput, [](TensorHealth& t) {
    t.elements = t.nonzero = 0;
    t.amax = 0;
    t.signal_energy = t.noise_energy = 0;
  });
  run.Run(100);
  EXPECT_TRUE(run.decisions.empty());
}

TEST(Fallback, FrozenScaleOfDelayedAlertsAsStale) {
  PolicyRun run(4, RecipeKind::kFp8Delayed);
  run.Run(12);
  run.spoil = At(kBad, Tensor::kInput, [](TensorHealth& t) { t.amax = 0; });
  run.Run(8);
  EXPECT_TRUE(run.decisions.empty());
  ASSERT_FALSE(run.alerts.empty());
  EXPECT_NE(run.alerts[0].find("stale"), std::string::npos);
}

TEST(Fallback, TransposeFlushMovesTheWeightGradientFirstThenTheOp) {
  PolicyRun run(4, RecipeKind::kFp8Flow);
  run.Run(12);
  run.spoil =
      At(kBad, Tensor::kInput, [](TensorHealth& t) { t.transpose_flushed = t.nonzero / 5; });
  run.Run(3);
  ASSERT_EQ(run.decisions.size(), 1u);
  EXPECT_EQ(run.plan.Resolve(2, Op::kFc1).kind, RecipeKind::kFp8Flow);
  EXPECT_EQ(run.plan.Resolve(2, Op::kFc1).wgrad, WgradPrecision::kBf16);
  // wgrad no longer transposes: the signal is gone, nothing more happens.
  run.Run(15);
  EXPECT_EQ(run.decisions.size(), 1u);
}

TEST(Fallback, NonfiniteActsInsideTheGraceAndOnlyOnce) {
  PolicyRun run(4, RecipeKind::kFp8Current);
  StepHealth step;
  step.step = 3;
  step.loss = 5;
  step.nonfinite = step.site_known = true;
  step.site = kBad;
  step.tensor = Tensor::kGrad;
  run.Take(PolicyOnStep(run.config, run.state, run.plan, step));
  ASSERT_EQ(run.decisions.size(), 1u);
  EXPECT_EQ(run.decisions[0].signal, Signal::kNonfinite);
  step.step = 4;
  run.Take(PolicyOnStep(run.config, run.state, run.plan, step));
  EXPECT_EQ(run.decisions.size(), 1u);
  EXPECT_EQ(run.alerts.size(), 1u);
}

TEST(Fallback, HalfOfALayersOpsTakeTheWholeLayerDispatchIncluded) {
  PolicyRun run(4, RecipeKind::kFp8Flow);
  run.Run(12);
  run.spoil = [](TensorHealth& t) {
    if (t.site.layer == 1 && (t.site.op == Op::kFc1 || t.site.op == Op::kFc2) &&
        t.tensor == Tensor::kInput) {
      t.noise_energy = t.signal_energy;
    }
  };
  run.Run(2);
  for (int i = 0; i < kOpCount; ++i) {
    // A layer of experts has no dense MLP: nothing would ever be measured there for a return.
    const Op op = static_cast<Op>(i);
    const bool exists = op != Op::kMlpFc1 && op != Op::kMlpFc2;
    EXPECT_EQ(run.plan.Resolve(1, op).kind, exists ? RecipeKind::kBf16 : RecipeKind::kFp8Flow)
        << Name(op);
  }
  EXPECT_EQ(run.plan.Resolve(0, Op::kFc1).kind, RecipeKind::kFp8Flow);
}

TEST(Fallback, LadderIsTakenRungByRung) {
  PolicyRun run(3, RecipeKind::kFp8Delayed);
  run.config.ladder = {DefaultRecipe(RecipeKind::kFp8Delayed), DefaultRecipe(RecipeKind::kFp8Current),
                       DefaultRecipe(RecipeKind::kBf16)};
  run.spoil = At(kBad, Tensor::kInput, [](TensorHealth& t) { t.flushed = t.nonzero / 2; });
  run.Run(11);
  EXPECT_EQ(run.plan.Resolve(2, Op::kFc1).kind, RecipeKind::kFp8Current);
  run.Run(14);
  EXPECT_EQ(run.plan.Resolve(2, Op::kFc1).kind, RecipeKind::kBf16);
}

TEST(Fallback, ReturnsAfterHoldAndFiveGoodShadowsNotBefore) {
  PolicyRun run(4, RecipeKind::kFp8Flow);
  run.spoil = At(kBad, Tensor::kInput, [](TensorHealth& t) { t.noise_energy = t.signal_energy; });
  run.Run(10);
  ASSERT_EQ(run.decisions.size(), 1u);
  const std::int64_t fell = run.decisions[0].step;
  run.Run(30);  // shadows stay bad beyond the hold
  EXPECT_EQ(run.decisions.size(), 1u);
  run.spoil = [](TensorHealth&) {};
  run.Run(4);
  EXPECT_EQ(run.decisions.size(), 1u);
  run.Run(1);
  ASSERT_EQ(run.decisions.size(), 2u);
  EXPECT_EQ(run.decisions[1].direction, Direction::kRestore);
  EXPECT_GE(run.decisions[1].step, fell + run.config.hold_steps);
  EXPECT_EQ(run.plan.Resolve(2, Op::kFc1).kind, RecipeKind::kFp8Flow);
  EXPECT_TRUE(run.plan.shadows.empty());
}

TEST(Fallback, HoldDoublesWithEachRelapseAndFourthRelapsePins) {
  PolicyRun run(4, RecipeKind::kFp8Flow);
  // Bad whenever executed, good as a shadow: the worst case for flapping.
  run.spoil = At(kBad, Tensor::kInput, [](TensorHealth& t) {
    if (!t.shadow) {
      t.noise_energy = t.signal_energy;
    }
  });
  run.Run(2000);
  std::vector<std::int64_t> stays;
  std::int64_t fell = 0;
  int falls = 0;
  for (const PolicyDecision& d : run.decisions) {
    if (d.direction == Direction::kFallback || d.direction == Direction::kPin) {
      fell = d.step;
      ++falls;
    } else {
      stays.push_back(d.step - fell);
    }
  }
  EXPECT_EQ(falls, 1 + run.config.max_flaps);
  ASSERT_EQ(stays.size(), 4u);
  EXPECT_EQ(stays, (std::vector<std::int64_t>{200, 400, 800, 1600}));
  EXPECT_EQ(run.decisions.back().direction, Direction::kPin);
}

TEST(Fallback, LossSpikeSendsTheJobToBf16ForItsHold) {
  PolicyRun run(2, RecipeKind::kFp8Flow);
  for (int i = 1; i <= 150; ++i) {
    StepHealth s;
    s.step = i;
    s.loss = 2 + 0.01 * (i % 7);
    run.Take(PolicyOnStep(run.config, run.state, run.plan, s));
  }
  EXPECT_TRUE(run.decisions.empty());
  StepHealth spike;
  spike.step = 151;
  spike.loss = 4;
  run.step = 151;
  run.Take(PolicyOnStep(run.config, run.state, run.plan, spike));
  EXPECT_EQ(run.decisions.size(), 2u * kOpCount);
  EXPECT_EQ(run.plan.Resolve(1, Op::kDispatch).kind, RecipeKind::kBf16);
  EXPECT_TRUE(std::all_of(run.decisions.begin(), run.decisions.end(),
                          [](const PolicyDecision& d) { return d.signal == Signal::kLossSpike; }));
}

TEST(Fallback, OperatorsSitesAreNeverTouched) {
  PolicyRun run(4, RecipeKind::kFp8Flow);
  PolicyOnOperator(run.state, {kBad}, false);
  run.spoil = At(kBad, Tensor::kInput, [](TensorHealth& t) { t.noise_energy = t.signal_energy; });
  run.Run(100);
  EXPECT_TRUE(run.decisions.empty());
  PolicyOnOperator(run.state, {kBad}, true);
  run.Run(3);
  EXPECT_EQ(run.decisions.size(), 1u);
}

TEST(Fallback, DisabledPolicyDecidesNothing) {
  PolicyRun run(4, RecipeKind::kFp8Flow);
  run.config.enabled = false;
  run.spoil = [](TensorHealth& t) { t.nonfinite = 1; };
  run.Run(50);
  EXPECT_TRUE(run.decisions.empty());
}

TEST(Fallback, SnapshotsOfAnOlderPlanAreNotJudged) {
  PolicyRun run(4, RecipeKind::kFp8Flow);
  run.spoil = At(kBad, Tensor::kInput, [](TensorHealth& t) { t.noise_energy = t.signal_energy; });
  run.Run(10);
  ASSERT_EQ(run.plan.version, 2);
  HealthSnapshot late = run.Snapshot();
  late.plan_version = 1;
  for (TensorHealth& t : late.tensors) {
    t.nonfinite = 1;
  }
  const PolicyOutput out = PolicyOnSnapshot(run.config, run.state, run.plan, late);
  EXPECT_FALSE(out.changed);
}

TEST(Auto, WarmsUpInBf16ThenChoosesTheFirstCandidateThatPasses) {
  PolicyRun run(6, RecipeKind::kBf16);
  run.config.automatic = true;
  run.config.candidates = {DefaultRecipe(RecipeKind::kFp8Flow), DefaultRecipe(RecipeKind::kFp8Current)};
  run.state = PolicyState{};
  PolicyOnStart(run.config, run.state, 0);
  for (std::int32_t layer = 0; layer < 6; ++layer) {
    for (Op op : {Op::kAttnQkv, Op::kAttnOut, Op::kFc1, Op::kFc2}) {
      run.plan.shadows[{layer, op}] = run.config.candidates;
    }
  }
  run.spoil = [](TensorHealth& t) {
    if (t.site == kBad) {  // flow fails here, current passes
      t.noise_energy = t.shadow_recipe == RecipeKind::kFp8Flow ? t.signal_energy : t.noise_energy;
    }
    if (t.site == OpSite{3, Op::kFc2}) {
      t.nonfinite = 1;  // nothing passes
    }
  };
  run.Run(19);
  EXPECT_TRUE(run.decisions.empty());
  run.Run(1);
  EXPECT_EQ(run.plan.Resolve(1, Op::kFc1).kind, RecipeKind::kFp8Flow);
  EXPECT_EQ(run.plan.Resolve(2, Op::kFc1).kind, RecipeKind::kFp8Current);
  EXPECT_EQ(run.plan.Resolve(3, Op::kFc2).kind, RecipeKind::kBf16);
  EXPECT_EQ(run.plan.Resolve(0, Op::kFc1).kind, RecipeKind::kBf16) << "protected";
  EXPECT_EQ(run.plan.Resolve(5, Op::kFc1).kind, RecipeKind::kBf16) << "protected";
  ASSERT_FALSE(run.decisions.empty());
  EXPECT_NE(run.decisions[0].reason.find("31.5 dB"), std::string::npos) << run.decisions[0].reason;
}

TEST(Replay, SameHistorySameDecisionsAndStricterThresholdsDecideMore) {
  PolicyRun run(4, RecipeKind::kFp8Flow);
  run.spoil = At(kBad, Tensor::kInput,
                 [](TensorHealth& t) { t.noise_energy = t.signal_energy / 398; });  // 26 dB
  std::vector<HistoryItem> history;
  for (int i = 0; i < 60; ++i) {
    history.push_back(run.Snapshot());
    run.step += run.interval;
  }
  PolicyConfig config;
  EXPECT_TRUE(Replay(config, run.plan, history).decisions.empty());
  config.sqnr_e4m3_db = 28;
  const ReplayResult a = Replay(config, run.plan, history), b = Replay(config, run.plan, history);
  ASSERT_FALSE(a.decisions.empty());
  EXPECT_EQ(a.decisions[0].site, kBad);
  ASSERT_EQ(a.decisions.size(), b.decisions.size());
  EXPECT_EQ(a.decisions[0].reason, b.decisions[0].reason);
}

}  // namespace
}  // namespace octavo
