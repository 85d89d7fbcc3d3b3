// Precision inside a rank: what is cast where, switches between steps, retry, windows, accounting.
#include <atomic>
#include <set>

#include "base/str.h"
#include "tests/unit/worker/model/counting_ops.h"
#include "tests/unit/worker/model/model_harness.h"

namespace octavo::testing {
namespace {

// One rank alone, driven step by step.
struct Solo {
  explicit Solo(const ModelConfig& model, const PrecisionPlan& plan,
                RunConfig run = SmallRun(false), bool count = false)
      : ranks(InprocRanks::Make(1, 1)),
        backend(CreateCpuBackend()),
        rank(model, run, plan, &ranks.ranks[0], count ? CountingOps(backend) : nullptr) {}
  ~Solo() { DestroyCpuBackend(&backend); }
  Transformer& model() { return rank.model(); }
  double Loss(std::int64_t step, double lr = 2e-3, bool sqnr = false) {
    const auto outcome = rank.Step(step, lr, sqnr);
    EXPECT_TRUE(outcome.ok()) << ToString(outcome.status());
    return outcome.ok() ? outcome->loss : 0;
  }
  InprocRanks ranks;
  Backend backend;
  ModelRank rank;
};

const StatSlot& Slot(Transformer& model, const OpSite& site, Tensor tensor, std::int32_t expert) {
  for (std::size_t i = 0; i < model.stat_sites().size(); ++i) {
    const TensorSite& s = model.stat_sites()[i];
    if (s.site == site && s.tensor == tensor && s.expert == expert) {
      return model.stats()[i];
    }
  }
  ADD_FAILURE() << "no slot";
  static const StatSlot kNone;
  return kNone;
}

TEST(Precision, AStepAllocatesNothing) {
  const ModelConfig model = SmallModel();
  for (RecipeKind kind :
       {RecipeKind::kBf16, RecipeKind::kFp8Flow, RecipeKind::kFp8Delayed, RecipeKind::kMxfp8}) {
    Solo solo(model, Uniform(model, kind), SmallRun(false), true);
    EXPECT_GT(op_counts.allocate, 0);
    op_counts = OpCounts{};
    solo.Loss(0);
    solo.Loss(1);
    EXPECT_EQ(op_counts.allocate, 0) << Name(kind);
    EXPECT_GT(solo.model().memory().activations, 0);
  }
}

TEST(Precision, FlowNeverDequantisesAndCastsTwicePerLayer) {
  const ModelConfig model = SmallModel();
  Solo solo(model, Uniform(model, RecipeKind::kFp8Flow), SmallRun(false), true);
  op_counts = OpCounts{};
  solo.Loss(0);
  EXPECT_EQ(op_counts.dequantize, 0);
  // Per layer: x and dY of the MoE once each; x and dY of the two attention projections.
  EXPECT_EQ(op_counts.quantize_rows, model.layers * (2 + 4));
  // wgrad operands of fc1 and fc2.
  EXPECT_EQ(op_counts.transpose_scaled, model.layers * 4);
  EXPECT_EQ(op_counts.quantize_blocks, model.layers * 4);  // weights, once per step
  EXPECT_EQ(op_counts.quantize_tensor, 0);

  // Blockwise on the same payload must dequantise for its column-wise copies: x and dY.
  Solo blockwise(model, Uniform(model, RecipeKind::kFp8Blockwise), SmallRun(false), true);
  op_counts = OpCounts{};
  blockwise.Loss(0);
  EXPECT_EQ(op_counts.dequantize, model.layers * 2);
  EXPECT_EQ(op_counts.transpose_scaled, 0);
  EXPECT_EQ(op_counts.dequantize_before_fc1, 0);

  // Per tensor: the payload is dequantised at arrival, before fc1.
  Solo delayed(model, Uniform(model, RecipeKind::kFp8Delayed), SmallRun(false), true);
  op_counts = OpCounts{};
  delayed.Loss(0);
  EXPECT_EQ(op_counts.dequantize_before_fc1, model.layers * 2);
}

TEST(Precision, WeightsAreCastOncePerStepAcrossMicrobatches) {
  const ModelConfig model = SmallModel();
  RunConfig run = SmallRun(false);
  run.microbatches = 3;
  Solo solo(model, Uniform(model, RecipeKind::kFp8Blockwise), run, true);
  op_counts = OpCounts{};
  solo.Loss(0);
  EXPECT_EQ(op_counts.quantize_blocks, model.layers * 4);
}

TEST(Precision, Fp8DispatchCarriesAtMost55PercentOfBf16Bytes) {
  const ModelConfig model = SmallModel();
  RunConfig run = SmallRun(false);
  run.world_size = run.expert_parallel = 2;
  // Bytes that left all ranks: dispatch of x and of dY, and the two combines (BF16 always).
  const auto bytes = [&](RecipeKind kind) {
    std::atomic<std::int64_t> total = 0;
    Train(model, run, Uniform(model, kind), 1, 0.0,
          [&total](int, ModelRank&, InprocRanks::Comms& comms) {
            total += comms.expert_parallel->counters().all_to_all_bytes;
          });
    return total.load();
  };
  const std::int64_t bf16 = bytes(RecipeKind::kBf16), flow = bytes(RecipeKind::kFp8Flow);
  // Every remote row travels four times: 272 bytes with p, back 256, dY 256, back 272 with dp.
  const std::int64_t rows = bf16 / (256 + 272 + 272 + 256);
  const std::int64_t combine = rows * (256 + 272);
  EXPECT_EQ(bf16 % (256 + 272 + 272 + 256), 0);
  // Routing differs a little where casts moved the second layer's input.
  EXPECT_LE(static_cast<double>(flow - combine) / static_cast<double>(bf16 - combine), 0.55);
  EXPECT_GE(static_cast<double>(flow - combine) / static_cast<double>(bf16 - combine), 0.45);
}

TEST(Precision, DispatchAndExpertsMayDiffer) {
  ModelConfig model = SmallModel();
  model.layers = 1;
  const double reference = Solo(model, Uniform(model, RecipeKind::kBf16)).Loss(0);
  for (RecipeKind dispatch :
       {RecipeKind::kBf16, RecipeKind::kFp8Blockwise, RecipeKind::kFp8Flow, RecipeKind::kMxfp8}) {
    for (RecipeKind fc1 : {RecipeKind::kBf16, RecipeKind::kFp8Delayed, RecipeKind::kFp8Current,
                           RecipeKind::kFp8Blockwise, RecipeKind::kFp8Flow, RecipeKind::kMxfp8}) {
      for (RecipeKind fc2 : {RecipeKind::kBf16, RecipeKind::kFp8Flow}) {
        for (WgradPrecision wgrad : {WgradPrecision::kFp8, WgradPrecision::kBf16}) {
          PrecisionPlan plan = Uniform(model, RecipeKind::kBf16);
          Recipe r1 = DefaultRecipe(fc1), r2 = DefaultRecipe(fc2);
          if (wgrad == WgradPrecision::kBf16 && !r1.is_fp8() && !r2.is_fp8()) {
            continue;
          }
          if (r1.is_fp8()) {
            r1.wgrad = wgrad;
          }
          if (r2.is_fp8()) {
            r2.wgrad = wgrad;
          }
          ApplyOverride(plan, {0, 0, {Op::kFc1}, r1});
          ApplyOverride(plan, {0, 0, {Op::kFc2}, r2});
          ApplyOverride(plan, {0, 0, {Op::kDispatch}, DefaultRecipe(dispatch)});
          Solo solo(model, plan);
          const std::string what =
              std::string(Name(dispatch)) + " → " + DebugString(r1) + ", " + DebugString(r2);
          EXPECT_NEAR(solo.Loss(0), reference, 0.05) << what;
          EXPECT_LT(solo.Loss(0), reference) << what;  // the same batch after one update
        }
      }
    }
  }
}

TEST(Precision, SwitchesBetweenStepsWithoutAStaleCopy) {
  const ModelConfig model = SmallModel();
  Solo solo(model, Uniform(model, RecipeKind::kBf16));
  Solo plain(model, Uniform(model, RecipeKind::kBf16));
  std::int64_t step = 0;
  for (RecipeKind kind : {RecipeKind::kFp8Flow, RecipeKind::kFp8Delayed, RecipeKind::kMxfp8,
                          RecipeKind::kFp8Blockwise, RecipeKind::kFp8Current, RecipeKind::kBf16}) {
    ASSERT_TRUE(solo.model().SetPlan(Uniform(model, kind)).ok());
    for (int i = 0; i < 2; ++i, ++step) {
      // Chaotic small models: the usual distance of two recipes here is below 0.15.
      EXPECT_NEAR(solo.Loss(step), plain.Loss(step), 0.3) << Name(kind) << " step " << step;
    }
  }
}

TEST(Precision, DelayedWindowsPrimePushAndForgetOnASwitch) {
  const ModelConfig model = SmallModel();
  Solo solo(model, Uniform(model, RecipeKind::kFp8Delayed));
  EXPECT_TRUE(solo.model().ExportState().empty());
  const double primed = solo.Loss(0);
  const auto first = solo.model().ExportState();
  // qkv, out, and fc1, fc2 of four experts: three tensors each, in two layers.
  EXPECT_EQ(first.size(), 2u * 3u * (2u + 2u * 4u));
  for (const StateTensor& s : first) {
    EXPECT_EQ(s.values.size(), 3u) << s.name;  // quant_scale, age, one amax
    EXPECT_GT(s.values[2], 0) << s.name;
  }
  solo.Loss(1);
  EXPECT_EQ(solo.model().ExportState()[0].values.size(), 4u);
  // Priming is current scaling: the first loss is that recipe's.
  EXPECT_EQ(primed, Solo(model, Uniform(model, RecipeKind::kFp8Current)).Loss(0));
  // Away and back: the windows start again.
  ASSERT_TRUE(solo.model().SetPlan(Uniform(model, RecipeKind::kBf16)).ok());
  solo.Loss(2);
  ASSERT_TRUE(solo.model().SetPlan(Uniform(model, RecipeKind::kFp8Delayed)).ok());
  EXPECT_TRUE(solo.model().ExportState().empty());
  // A skipped step pushes nothing.
  solo.model().BeginStep(solo.rank.Options());
  ASSERT_TRUE(solo.rank.RunMicrobatches(3).ok());
  ASSERT_TRUE(solo.model().FinishPass().ok());
  ASSERT_TRUE(solo.model().EndStep(false).ok());
  EXPECT_TRUE(solo.model().ExportState().empty());
}

// Everything a checkpoint carries, from one rank to another.
void CopyState(Solo& from, Solo& to) {
  Parameters& a = from.model().parameters();
  Parameters& b = to.model().parameters();
  std::copy_n(a.master(), a.total_elements(), b.master());
  std::copy_n(static_cast<float*>(a.m()), a.total_elements(), static_cast<float*>(b.m()));
  std::copy_n(static_cast<float*>(a.v()), a.total_elements(), static_cast<float*>(b.v()));
  to.model().ParametersLoaded();
  const auto state = from.model().ExportState();
  ASSERT_TRUE(to.model().ImportState(state).ok());
}

TEST(Precision, ResumeIsBitwiseUnderEveryRecipe) {
  ModelConfig model = SmallModel();
  model.router.bias_update_rate = 1e-2f;
  for (RecipeKind kind : {RecipeKind::kBf16, RecipeKind::kFp8Delayed, RecipeKind::kFp8Current,
                          RecipeKind::kFp8Blockwise, RecipeKind::kFp8Flow, RecipeKind::kMxfp8}) {
    Solo whole(model, Uniform(model, kind));
    for (int s = 0; s < 3; ++s) {
      whole.Loss(s);
    }
    Solo resumed(model, Uniform(model, kind));
    CopyState(whole, resumed);
    // Evaluation in between changes nothing.
    double loss = 0;
    const auto tokens = Sequence(64, 64, 9, 9);
    ASSERT_TRUE(resumed.model().Evaluate(tokens.data(), tokens.data() + 1, &loss).ok());
    EXPECT_GT(loss, 0);
    for (int s = 3; s < 6; ++s) {
      EXPECT_EQ(whole.Loss(s), resumed.Loss(s)) << Name(kind) << " step " << s;
    }
  }
}

TEST(Precision, NonFiniteWeightIsFoundRetriedInBf16AndCounted) {
  const ModelConfig model = SmallModel();
  Solo solo(model, Uniform(model, RecipeKind::kFp8Flow));
  solo.Loss(0);
  // A NaN that only layer 1's fc2 weight holds.
  Parameter& weight = solo.model().parameters().At("layers.1.experts.fc2.weight");
  const float kept = weight.master[5];
  weight.master[5] = std::nanf("");
  solo.model().ParametersLoaded();
  solo.model().BeginStep(solo.rank.Options());
  ASSERT_TRUE(solo.rank.RunMicrobatches(1).ok());
  auto pass = solo.model().FinishPass();
  ASSERT_TRUE(pass.ok());
  ASSERT_NE(pass->first_nonfinite, kNoNonfinite);
  const NonfiniteSite site = solo.model().SiteOfExecution(pass->first_nonfinite);
  EXPECT_EQ(site.site, (OpSite{1, Op::kFc2}));
  EXPECT_EQ(site.tensor, Tensor::kWeight);
  EXPECT_FALSE(std::isfinite(pass->grad_norm_squared));

  // The retry: the fault is gone (as a saturating cast's would be), the layer runs in BF16.
  weight.master[5] = kept;
  solo.model().ParametersLoaded();
  const std::int32_t layers[] = {1};
  const double fp8_before = solo.model().executed().flops(FlopPrecision::kFp8);
  solo.model().RestartPass(layers);
  ASSERT_TRUE(solo.rank.RunMicrobatches(1).ok());
  pass = solo.model().FinishPass();
  ASSERT_TRUE(pass.ok());
  EXPECT_EQ(pass->first_nonfinite, kNoNonfinite);
  EXPECT_TRUE(std::isfinite(pass->grad_norm_squared));
  EXPECT_EQ(pass->tokens, 64);  // of one pass, not of two
  EXPECT_GT(solo.model().executed().flops(FlopPrecision::kFp8), fp8_before);
  // Statistics are those of the pass that counts, but non-finite elements stay reported.
  EXPECT_GT(Slot(solo.model(), {1, Op::kFc2}, Tensor::kWeight, 0).nonfinite, 0u);
  EXPECT_EQ(Slot(solo.model(), {1, Op::kFc2}, Tensor::kWeight, 0).elements, 0u);
  EXPECT_GT(Slot(solo.model(), {0, Op::kFc2}, Tensor::kWeight, 0).elements, 0u);
  EXPECT_GT(solo.model().executed().mismatches(), 0);
  bool found = false;
  for (const ExecutedEntry& entry : solo.model().executed().entries()) {
    found |= entry.mismatch() && entry.site == OpSite{1, Op::kDispatch} &&
             entry.planned.kind == RecipeKind::kFp8Flow &&
             entry.executed.kind == RecipeKind::kBf16 && !entry.reason.empty();
    EXPECT_TRUE(entry.site.layer == 1 || !entry.mismatch());
  }
  EXPECT_TRUE(found);
  ASSERT_TRUE(solo.model().EndStep(true).ok());
  solo.Loss(2);  // the hold ended with the step
  EXPECT_EQ(Slot(solo.model(), {1, Op::kFc2}, Tensor::kWeight, 0).nonfinite, 0u);
  EXPECT_GT(Slot(solo.model(), {1, Op::kFc2}, Tensor::kWeight, 0).elements, 0u);
}

TEST(Precision, StrictModeRefusesADifference) {
  const ModelConfig model = SmallModel();
  RunConfig run = SmallRun(false);
  run.strict_precision = true;
  Solo solo(model, Uniform(model, RecipeKind::kFp8Flow), run);
  solo.Loss(0);
  solo.model().BeginStep(solo.rank.Options());
  solo.model().RestartPass({});
  ASSERT_TRUE(solo.rank.RunMicrobatches(1).ok());
  const auto pass = solo.model().FinishPass();
  ASSERT_FALSE(pass.ok());
  EXPECT_NE(Message(pass.status()).find("planned as fp8_flow and ran as bf16"), std::string::npos)
      << ToString(pass.status());
}

TEST(Precision, StatisticsCountEveryCastOnce) {
  const ModelConfig model = SmallModel();
  RunConfig run = SmallRun(false);
  run.microbatches = 2;
  run.recompute = {true, false};
  Solo solo(model, Uniform(model, RecipeKind::kFp8Flow), run);
  solo.Loss(0, 2e-3, true);
  const std::uint64_t tokens = 64 * 2;
  for (std::int32_t layer : {0, 1}) {
    // Recompute casts again and does not count again.
    EXPECT_EQ(Slot(solo.model(), {layer, Op::kDispatch}, Tensor::kInput, -1).elements,
              tokens * 128);
    EXPECT_EQ(Slot(solo.model(), {layer, Op::kDispatch}, Tensor::kGrad, -1).elements, tokens * 128);
    EXPECT_EQ(Slot(solo.model(), {layer, Op::kAttnQkv}, Tensor::kInput, -1).elements, tokens * 128);
    EXPECT_EQ(Slot(solo.model(), {layer, Op::kAttnQkv}, Tensor::kGrad, -1).elements, tokens * 256);
    // Weights once per step.
    EXPECT_EQ(Slot(solo.model(), {layer, Op::kAttnQkv}, Tensor::kWeight, -1).elements, 256u * 128u);
    std::uint64_t rows = 0;
    for (int e = 0; e < 4; ++e) {
      rows += Slot(solo.model(), {layer, Op::kFc2}, Tensor::kInput, e).elements;
    }
    EXPECT_EQ(rows, tokens * 2 * 128);
  }
  // Energies of this sampled step: near-Gaussian activations give about 31.5 dB.
  std::set<std::string> measured;
  for (std::size_t i = 0; i < solo.model().sqnr_sites().size(); ++i) {
    const SqnrSlot& slot = solo.model().sqnr()[i];
    const TensorSite& site = solo.model().sqnr_sites()[i];
    if (slot.signal == 0) {
      continue;
    }
    const double decibel = 10 * std::log10(slot.signal / slot.noise);
    EXPECT_GT(decibel, 24) << Name(site.site.op) << " " << Name(site.tensor);
    EXPECT_LT(decibel, 45) << Name(site.site.op) << " " << Name(site.tensor);
    measured.insert(std::string(Name(site.site.op)) + "/" + std::string(Name(site.tensor)));
  }
  for (const char* name :
       {"attn_qkv/input", "attn_qkv/weight", "attn_qkv/grad", "attn_out/input", "dispatch/input",
        "dispatch/grad", "fc1/weight", "fc1/grad", "fc2/input", "fc2/weight"}) {
    EXPECT_TRUE(measured.contains(name)) << name;
  }
}

TEST(Precision, ExecutedFlopsShareFollowsThePlan) {
  ModelConfig model = SmallModel();
  model.layers = 4;
  Solo solo(model, BuildPlan(4, DefaultRecipe(RecipeKind::kFp8Flow), 1, {}));
  solo.Loss(0);
  const ExecutedCounters& executed = solo.model().executed();
  const double fp8 = executed.flops(FlopPrecision::kFp8),
               bf16 = executed.flops(FlopPrecision::kBf16);
  // Half of the layers; the head's share (128·64 of about 4·(128·256+128·128+2·3·128·128) weights)
  // is BF16, the router's FP32.
  EXPECT_GT(fp8 / (fp8 + bf16), 0.40);
  EXPECT_LT(fp8 / (fp8 + bf16), 0.50);
  EXPECT_EQ(executed.mismatches(), 0);
  EXPECT_GT(executed.flops(FlopPrecision::kFp32), 0);
  // fc1: three GEMMs of 2·rows·n·k.
  const auto& fc1 = executed.At({1, Op::kFc1});
  ASSERT_EQ(fc1.size(), 1u);
  EXPECT_EQ(fc1[0].calls, 3);
  EXPECT_DOUBLE_EQ(fc1[0].flops, 3 * 2.0 * (64 * 2) * 256 * 128);
}

TEST(Precision, WrongPlansAreRefusedAndChangeNothing) {
  ModelConfig model = SmallModel();
  model.expert_hidden = 96;
  Solo solo(model, Uniform(model, RecipeKind::kBf16));
  const auto refused = [&](const PrecisionPlan& plan, const std::string& text) {
    const absl::Status status = solo.model().SetPlan(plan);
    EXPECT_FALSE(status.ok());
    EXPECT_NE(Message(status).find(text), std::string::npos) << ToString(status);
    EXPECT_EQ(SemanticHash(solo.model().plan()), SemanticHash(Uniform(model, RecipeKind::kBf16)));
  };
  refused(Uniform(model, RecipeKind::kFp8Flow), "expert_hidden is 96");
  refused(Uniform(model, RecipeKind::kFp32), "fp32");
  refused(BuildPlan(3, DefaultRecipe(RecipeKind::kBf16), 0, {}), "3 layers");
  EXPECT_TRUE(solo.model().SetPlan(Uniform(model, RecipeKind::kMxfp8)).ok());
}

TEST(Precision, MxNeedsTheJobsConsent) {
  const ModelConfig model = SmallModel();
  RunConfig run = SmallRun(false);
  run.allow_emulation = false;
  Solo solo(model, Uniform(model, RecipeKind::kBf16), run);
  const absl::Status status = solo.model().SetPlan(Uniform(model, RecipeKind::kMxfp8));
  EXPECT_NE(Message(status).find("allow_emulation"), std::string::npos) << ToString(status);
}

TEST(Precision, BalanceBiasMovesAgainstTheLoad) {
  ModelConfig model = SmallModel();
  model.router.score = RouterScore::kSigmoid;
  model.router.aux_scope = AuxLossScope::kNone;
  model.router.bias_update_rate = 0.05f;
  Solo solo(model, Uniform(model, RecipeKind::kBf16));
  // Far off balance: expert 0 of layer 0 is in every selection.
  const StateTensor skewed{.name = "layers.0.router.bias", .values = {1.0f, 0, 0, 0}};
  ASSERT_TRUE(solo.model().ImportState({&skewed, 1}).ok());
  solo.Loss(0, 0.0);
  EXPECT_EQ(solo.model().expert_load()[0].max, 64);
  for (int s = 1; s < 30; ++s) {
    solo.Loss(s, 0.0);
  }
  EXPECT_LT(solo.model().expert_load()[0].cv, 0.5);
  const auto state = solo.model().ExportState();
  ASSERT_EQ(state.size(), 2u);
  EXPECT_EQ(state[0].name, "layers.0.router.bias");
  EXPECT_EQ(state[0].values.size(), 4u);
  EXPECT_LT(state[0].values[0], 0.5f);
}

TEST(Precision, ShadowsMeasureWhatTheOtherRecipeWouldSeeAndChangeNothing) {
  const ModelConfig model = SmallModel();
  PrecisionPlan plan = Uniform(model, RecipeKind::kBf16);
  Solo plain(model, plan);
  for (int i = 0; i < kOpCount; ++i) {
    plan.shadows[{1, static_cast<Op>(i)}] = {DefaultRecipe(RecipeKind::kFp8Flow),
                                             DefaultRecipe(RecipeKind::kFp8Delayed)};
  }
  Solo solo(model, plan);
  Solo flow(model, [&] {
    PrecisionPlan executed = Uniform(model, RecipeKind::kBf16);
    ApplyOverride(executed, {1, 1, {}, DefaultRecipe(RecipeKind::kFp8Flow)});
    return executed;
  }());
  EXPECT_EQ(solo.Loss(0, 2e-3, true), plain.Loss(0));
  EXPECT_EQ(solo.Loss(1, 2e-3, false), plain.Loss(1));
  flow.Loss(0, 2e-3, true);
  // qkv, out, fc1, fc2: input, weight, grad by two recipes; dispatch: input, grad by flow alone (a
  // per-tensor payload is refused).
  ASSERT_EQ(solo.model().shadows().size(), 4u * 3u * 2u + 2u);
  for (const ShadowResult& shadow : solo.model().shadows()) {
    const std::string what =
        StrCat(Name(shadow.site.op), "/", Name(shadow.tensor), " by ", DebugString(shadow.recipe));
    EXPECT_EQ(shadow.site.layer, 1);
    EXPECT_GT(shadow.stats.elements, 0u) << what;
    EXPECT_GT(shadow.stats.amax, 0) << what;
    EXPECT_GT(10 * std::log10(shadow.energy.signal / shadow.energy.noise), 20) << what;
    if (shadow.recipe.kind != RecipeKind::kFp8Flow || shadow.tensor == Tensor::kGrad) {
      continue;
    }
    // Forward of layer 1 saw the same tensors when flow ran there.
    StatSlot executed;
    for (std::size_t i = 0; i < flow.model().stat_sites().size(); ++i) {
      const TensorSite& site = flow.model().stat_sites()[i];
      if (site.site == shadow.site && site.tensor == shadow.tensor) {
        MergeInto(flow.model().stats()[i], &executed);
      }
    }
    const bool arrives_cast = shadow.site.op == Op::kFc1 && shadow.tensor == Tensor::kInput;
    if (!arrives_cast) {
      EXPECT_EQ(shadow.stats.elements, executed.elements) << what;
      EXPECT_NEAR(shadow.stats.amax / executed.amax, 1, 0.15) << what;
    }
  }
  // The hold of a layer that was never measured reports nothing.
  EXPECT_TRUE(plain.model().shadows().empty());
}

TEST(Precision, DoubleQuantisationHasNoErrorWithPowerOfTwoScales) {
  const ModelConfig model = SmallModel();
  // Energy of the second cast of the payload's rows, which fc1's wgrad reads column-wise.
  const auto noise = [&](bool pow2) {
    Recipe recipe = DefaultRecipe(RecipeKind::kFp8Blockwise);
    recipe.pow2_scales = pow2;
    Solo solo(model, BuildPlan(model.layers, recipe, 0, {}));
    solo.Loss(0, 2e-3, true);
    for (std::size_t i = 0; i < solo.model().sqnr_sites().size(); ++i) {
      const TensorSite& site = solo.model().sqnr_sites()[i];
      if (site.site == OpSite{0, Op::kFc1} && site.tensor == Tensor::kInput) {
        return solo.model().sqnr()[i].noise / solo.model().sqnr()[i].signal;
      }
    }
    return -1.0;
  };
  EXPECT_GT(noise(false), 1e-5);  // a second rounding error of FP8's size
  // In the normal range it vanishes; values that a larger neighbour pushed into the subnormals of
  // the column's scale round once more, which is all that is left.
  EXPECT_LT(noise(true), 1e-6);
}

}  // namespace
}  // namespace octavo::testing
