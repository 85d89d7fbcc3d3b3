// A thousand steps in which a rank gets no rows and most experts starve: nothing hangs, nothing
// becomes non-finite, the model learns with what it has, and experts begin well when tokens come.
#include "tests/unit/worker/model/model_harness.h"

namespace octavo::testing {
namespace {

class Starved : public ::testing::TestWithParam<RecipeKind> {};

TEST_P(Starved, ZeroTokenRanksAndExpertsTrainForAThousandSteps) {
  constexpr int kSteps = 1000;
  ModelConfig model = SmallModel();
  model.layers = 1;
  model.vocab = 16;
  model.experts = 4;
  model.experts_per_token = 1;
  model.router.aux_scope = AuxLossScope::kNone;
  model.router.z_coefficient = 0;
  model.router.score = RouterScore::kSigmoid;
  model.router.bias_update_rate = 1e-9f;  // the bias exists and stays where it is put
  RunConfig run = SmallRun(false);
  run.sequence_length = 8;
  run.microbatch_sequences = 1;
  run.world_size = run.expert_parallel = 2;
  const auto bias = [](float first) {
    return StateTensor{.name = "layers.0.router.bias", .values = {first, 0, 0, 0}};
  };
  InprocRanks ranks = InprocRanks::Make(2, 2);
  InprocRanks::Run(2, [&](int r) {
    RunConfig mine = run;
    mine.rank = r;
    ModelRank rank(model, mine, Uniform(model, GetParam()),
                   &ranks.ranks[static_cast<std::size_t>(r)]);
    const StateTensor all_to_one = bias(100);
    ASSERT_TRUE(rank.model().ImportState({&all_to_one, 1}).ok());
    double first = 0, last = 0;
    for (int s = 0; s < kSteps; ++s) {
      const auto outcome = rank.Step(s, 1e-3);
      ASSERT_TRUE(outcome.ok()) << "step " << s << ": " << ToString(outcome.status());
      ASSERT_TRUE(std::isfinite(outcome->grad_norm)) << s;
      ASSERT_EQ(rank.model().expert_load()[0].max, 16) << s;
      (s < 50 ? first : last) += s < 50 || s >= kSteps - 50 ? outcome->loss / 50 : 0;
    }
    EXPECT_LT(last, first - 0.5);
    // Starved experts have no window to speak of: their inputs prime when tokens come.
    for (const StateTensor& state : rank.model().ExportState()) {
      if (state.name.find("fc1.input.") != std::string::npos) {
        EXPECT_EQ(state.name, "precision.0.fc1.input.0");
      }
    }
    const StateTensor to_others = bias(-100);
    ASSERT_TRUE(rank.model().ImportState({&to_others, 1}).ok());
    for (int s = kSteps; s < kSteps + 20; ++s) {
      const auto outcome = rank.Step(s, 1e-3);
      ASSERT_TRUE(outcome.ok()) << "step " << s << ": " << ToString(outcome.status());
      ASSERT_TRUE(std::isfinite(outcome->loss) && std::isfinite(outcome->grad_norm)) << s;
      ASSERT_LT(outcome->loss, std::log(16.0)) << "step " << s << ": worse than no model";
      ASSERT_EQ(rank.model().expert_load()[0].min, 0) << s;
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Recipes, Starved,
                         ::testing::Values(RecipeKind::kBf16, RecipeKind::kFp8Delayed,
                                           RecipeKind::kFp8Current, RecipeKind::kFp8Blockwise,
                                           RecipeKind::kFp8Flow, RecipeKind::kMxfp8),
                         [](const auto& info) { return std::string(Name(info.param)); });

}  // namespace
}  // namespace octavo::testing
