// Whole steps on one and several ranks: the loss falls, expert-parallel sizes agree, recompute and
// receive rounds change nothing that they should not.
#include "tests/unit/worker/model/model_harness.h"

namespace octavo::testing {
namespace {

double Tail(const std::vector<StepOutcome>& steps) {
  double sum = 0;
  for (std::size_t i = steps.size() - 5; i < steps.size(); ++i) {
    sum += steps[i].loss / 5;
  }
  return sum;
}

TEST(Training, LossFallsUnderEveryRecipeAndEndsNearBf16) {
  const ModelConfig model = SmallModel();
  RunConfig run = SmallRun(false);
  run.microbatch_sequences = 4;
  const auto reference = Train(model, run, Uniform(model, RecipeKind::kBf16), 25, 4e-3);
  const double bf16 = Tail(reference), first = reference.front().loss;
  for (int kind = 0; kind < kRecipeKindCount; ++kind) {
    const auto recipe = static_cast<RecipeKind>(kind);
    run.fp32 = recipe == RecipeKind::kFp32;
    const auto steps = Train(model, run, Uniform(model, recipe), 25, 4e-3);
    EXPECT_NEAR(steps.front().loss, first, 0.01) << Name(recipe);
    // Trajectories diverge by themselves: two seeds differ by about 0.1 here.
    EXPECT_NEAR(Tail(steps), bf16, 0.25) << Name(recipe);
    EXPECT_LT(Tail(steps), steps.front().loss - 1.5) << Name(recipe);
  }
}

// The same four sequences a step on 1, 2 or 4 ranks.
RunConfig Spread(int world, int expert_parallel, bool fp32) {
  RunConfig run = SmallRun(fp32);
  run.world_size = world;
  run.expert_parallel = expert_parallel;
  run.microbatch_sequences = 4 / world;
  run.microbatches = 2;
  return run;
}

TEST(Training, ExpertParallelSizesAgreeInFp32) {
  const ModelConfig model = SmallModel();  // auxiliary loss per sequence
  const PrecisionPlan plan = Uniform(model, RecipeKind::kFp32);
  const auto one = Train(model, Spread(1, 1, true), plan, 5);
  const std::pair<int, int> kSpreads[] = {{2, 1}, {2, 2}, {4, 1}, {4, 2}, {4, 4}};
  for (const auto& [world, ep] : kSpreads) {
    const auto many = Train(model, Spread(world, ep, true), plan, 5);
    EXPECT_NEAR(many[0].loss / one[0].loss, 1, 1e-5) << world << " ranks, ep " << ep;
    EXPECT_NEAR(many[0].grad_norm / one[0].grad_norm, 1, 1e-5) << world << " ranks, ep " << ep;
    EXPECT_NEAR(many[0].aux / one[0].aux, 1, 1e-5) << world << " ranks, ep " << ep;
    EXPECT_NEAR(many[0].z / one[0].z, 1, 1e-5) << world << " ranks, ep " << ep;
    EXPECT_NEAR(many[4].loss, one[4].loss, 1e-4) << world << " ranks, ep " << ep;
  }
}

TEST(Training, ExpertParallelSizesAgreeUnderEveryFp8Recipe) {
  const ModelConfig model = SmallModel();
  for (RecipeKind kind : {RecipeKind::kBf16, RecipeKind::kFp8Current, RecipeKind::kFp8Delayed,
                          RecipeKind::kFp8Blockwise, RecipeKind::kFp8Flow, RecipeKind::kMxfp8}) {
    const PrecisionPlan plan = Uniform(model, kind);
    const auto one = Train(model, Spread(4, 1, false), plan, 3);
    for (const int ep : {2, 4}) {
      const auto many = Train(model, Spread(4, ep, false), plan, 3);
      // The loss of step 1 comes from forward alone, where each expert sees the same rows in the
      // same order; gradients of current scaling take the amax of other row sets.
      EXPECT_NEAR(many[0].loss / one[0].loss, 1, 2e-3) << Name(kind) << " ep " << ep;
      EXPECT_NEAR(many[0].grad_norm / one[0].grad_norm, 1, 2e-2) << Name(kind) << " ep " << ep;
      EXPECT_NEAR(many[2].loss / one[2].loss, 1, 2e-2) << Name(kind) << " ep " << ep;
    }
  }
}

TEST(Training, GlobalAuxiliaryLossSeesAllRanksAndEarlierMicrobatches) {
  ModelConfig model = SmallModel();
  model.router.aux_scope = AuxLossScope::kGlobal;
  model.router.aux_coefficient = 0.1f;
  const PrecisionPlan plan = Uniform(model, RecipeKind::kFp32);
  const auto dp = Train(model, Spread(2, 1, true), plan, 2);
  const auto ep = Train(model, Spread(2, 2, true), plan, 2);
  EXPECT_NEAR(ep[0].aux / dp[0].aux, 1, 1e-6);
  // One rank's first microbatch has other counts, so a local f would give another value.
  model.router.aux_scope = AuxLossScope::kMicrobatch;
  const auto local = Train(model, Spread(2, 1, true), plan, 2);
  EXPECT_GT(std::abs(local[0].aux / dp[0].aux - 1), 1e-5);
}

TEST(Training, RecomputeIsBitwiseTheSame) {
  ModelConfig model = SmallModel();
  model.shared_experts = 1;
  model.shared_expert_hidden = 128;
  for (RecipeKind kind :
       {RecipeKind::kFp32, RecipeKind::kBf16, RecipeKind::kFp8Flow, RecipeKind::kFp8Delayed,
        RecipeKind::kFp8Current, RecipeKind::kFp8Blockwise, RecipeKind::kMxfp8}) {
    RunConfig run = Spread(2, 2, kind == RecipeKind::kFp32);
    const auto kept = Train(model, run, Uniform(model, kind), 3);
    run.recompute = {true, true};
    const auto again = Train(model, run, Uniform(model, kind), 3);
    for (std::size_t s = 0; s < kept.size(); ++s) {
      EXPECT_EQ(kept[s].loss, again[s].loss) << Name(kind) << " step " << s;
      EXPECT_EQ(kept[s].grad_norm, again[s].grad_norm) << Name(kind) << " step " << s;
    }
  }
}

TEST(Training, ReceiveRoundsGiveTheSameModel) {
  const ModelConfig model = SmallModel();
  RunConfig run = Spread(2, 2, true);
  const auto one_round = Train(model, run, Uniform(model, RecipeKind::kFp32), 3);
  run.recv_capacity = 0.2f;  // at least five rounds
  std::int64_t layers = 0;
  const auto rounds = Train(model, run, Uniform(model, RecipeKind::kFp32), 3, 2e-3,
                            [&layers](int r, ModelRank& rank, InprocRanks::Comms&) {
                              if (r == 0) {
                                layers = rank.model().multi_round_layers();
                              }
                            });
  EXPECT_EQ(layers, 2 * 2 * 3);  // layers × microbatches × steps
  EXPECT_NEAR(rounds[0].loss / one_round[0].loss, 1, 1e-6);
  EXPECT_NEAR(rounds[0].grad_norm / one_round[0].grad_norm, 1, 1e-5);
  EXPECT_NEAR(rounds[2].loss, one_round[2].loss, 1e-4);
  // FP8: another cut of the rows, so other tiles; close, not equal.
  run.fp32 = false;
  run.recompute = {true, false};
  const auto flow_rounds = Train(model, run, Uniform(model, RecipeKind::kFp8Flow), 3);
  run.recv_capacity = 2.0f;
  const auto flow = Train(model, run, Uniform(model, RecipeKind::kFp8Flow), 3);
  EXPECT_EQ(flow_rounds[0].loss, flow[0].loss);  // row-wise casts do not depend on the cut
  EXPECT_NEAR(flow_rounds[0].grad_norm / flow[0].grad_norm, 1, 1e-2);
}

TEST(Training, AllTokensToOneExpertLeavesRanksWithNothing) {
  // Sigmoid scores with one expert a token, and a router that knows one direction only: with weight
  // decay off and zero weights every token ties, and ties go to expert 0.
  ModelConfig model = SmallModel();
  model.experts_per_token = 1;
  model.router.score = RouterScore::kSigmoid;
  for (RecipeKind kind : {RecipeKind::kFp32, RecipeKind::kFp8Flow, RecipeKind::kFp8Delayed}) {
    RunConfig run = Spread(4, 4, kind == RecipeKind::kFp32);
    InprocRanks ranks = InprocRanks::Make(4, 4);
    InprocRanks::Run(4, [&](int r) {
      RunConfig mine = run;
      mine.rank = r;
      ModelRank rank(model, mine, Uniform(model, kind), &ranks.ranks[static_cast<std::size_t>(r)]);
      for (Parameter& p : rank.model().parameters().all()) {
        if (p.name.find("router") != std::string::npos) {
          std::fill_n(p.master, p.count, 0.0f);
        }
      }
      for (int s = 0; s < 3; ++s) {
        const auto outcome = rank.Step(s, 0.0);
        ASSERT_TRUE(outcome.ok()) << ToString(outcome.status());
        EXPECT_TRUE(std::isfinite(outcome->grad_norm));
        const auto load = rank.model().expert_load();
        EXPECT_EQ(load[0].max, 2 * 4 * 32);  // microbatches × sequences × tokens
        EXPECT_EQ(load[0].min, 0);
        EXPECT_NEAR(load[0].cv, std::sqrt(3.0), 1e-9);
      }
    });
  }
}

}  // namespace
}  // namespace octavo::testing
