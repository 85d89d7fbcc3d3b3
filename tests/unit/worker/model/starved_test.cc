// A thousand steps in which most ranks get no rows: nothing hangs, nothing becomes non-finite.
#include "tests/unit/worker/model/model_harness.h"

namespace octavo::testing {
namespace {

TEST(Starved, ZeroTokenRanksAndExpertsRunAThousandSteps) {
  ModelConfig model = SmallModel();
  model.layers = 1;
  model.vocab = 16;
  model.experts = 4;
  model.experts_per_token = 1;
  model.router.aux_scope = AuxLossScope::kNone;
  model.router.z_coefficient = 0;
  model.router.score = RouterScore::kSigmoid;
  for (RecipeKind kind : {RecipeKind::kFp8Delayed, RecipeKind::kFp8Flow}) {
    RunConfig run = SmallRun(false);
    run.sequence_length = 8;
    run.microbatch_sequences = 1;
    run.world_size = run.expert_parallel = 4;
    InprocRanks ranks = InprocRanks::Make(4, 4);
    InprocRanks::Run(4, [&](int r) {
      RunConfig mine = run;
      mine.rank = r;
      ModelRank rank(model, mine, Uniform(model, kind), &ranks.ranks[static_cast<std::size_t>(r)]);
      // Zero router weights tie all scores, and ties go to expert 0; without a learning rate they
      // stay.
      Parameter& router = rank.model().parameters().At("layers.0.router.weight");
      std::fill_n(router.master, router.count, 0.0f);
      double first = 0;
      for (int s = 0; s < 500; ++s) {
        const auto outcome = rank.Step(s % 7, 0.0);
        ASSERT_TRUE(outcome.ok()) << ToString(outcome.status());
        ASSERT_TRUE(std::isfinite(outcome->grad_norm)) << s;
        ASSERT_EQ(rank.model().expert_load()[0].max, 32);
        if (s == 7) {
          first = outcome->loss;
        }
        if (s % 7 == 0 && s > 7) {
          ASSERT_NEAR(outcome->loss, first, 0.02) << s;  // the windows have the same values in them
        }
      }
      // Starved experts have no window to speak of: their inputs prime when tokens come.
      for (const StateTensor& state : rank.model().ExportState()) {
        if (state.name.find("fc1.input.") != std::string::npos) {
          EXPECT_EQ(state.name, "precision.0.fc1.input.0");
        }
      }
    });
  }
}

}  // namespace
}  // namespace octavo::testing
