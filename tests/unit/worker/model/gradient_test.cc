// Gradients of every parameter of every kind of layer against central differences of the loss,
// FP32.
#include "tests/unit/worker/model/model_harness.h"

namespace octavo::testing {
namespace {

class GradientCheck {
 public:
  explicit GradientCheck(const ModelConfig& model)
      : model_(model),
        ranks_(InprocRanks::Make(1, 1)),
        rank_(model, SmallRun(true), Uniform(model, RecipeKind::kFp32), &ranks_.ranks[0]) {}

  double Loss() {
    rank_.model().BeginStep(rank_.Options());
    EXPECT_TRUE(rank_.RunMicrobatches(0).ok());
    const auto pass = rank_.model().FinishPass();
    EXPECT_TRUE(pass.ok());
    return pass->loss_sum / static_cast<double>(pass->tokens) + pass->aux_loss + pass->z_loss;
  }

  // Derivative along the gradient itself, per parameter: it must be the gradient's norm.
  void Check() {
    // Away from the symmetric start, where norms weigh 1 and some gradients are tiny.
    for (int s = 0; s < 3; ++s) {
      ASSERT_TRUE(rank_.Step(s, 2e-3).ok());
    }
    Loss();
    for (Parameter& p : rank_.model().parameters().all()) {
      const std::vector<float> gradient(p.grad, p.grad + p.count);
      const std::vector<float> start(p.master, p.master + p.count);
      double norm = 0;
      for (float g : gradient) {
        norm += static_cast<double>(g) * g;
      }
      norm = std::sqrt(norm);
      ASSERT_GT(norm, 1e-5) << p.name;
      const auto shifted = [&](double by) {
        for (std::int64_t i = 0; i < p.count; ++i) {
          p.master[i] = static_cast<float>(start[static_cast<std::size_t>(i)] +
                                           by * gradient[static_cast<std::size_t>(i)] / norm);
        }
        rank_.model().ParametersLoaded();
        return Loss();
      };
      // Steps that move the loss by 2e-4 and less; its FP32 noise is 1e-7. A token that changes
      // experts between the two points is a jump that no gradient has, so a smaller step may be
      // needed; a wrong gradient fails at all of them.
      double best = 1e9;
      for (double move : {1e-4, 3e-5, 1e-5}) {
        const double step = std::min(move / norm, 2e-2);
        const double ratio = (shifted(step) - shifted(-step)) / (2 * step) / norm;
        best = std::abs(ratio - 1) < std::abs(best - 1) ? ratio : best;
      }
      std::copy(start.begin(), start.end(), p.master);
      rank_.model().ParametersLoaded();
      EXPECT_NEAR(best, 1, 1e-2) << p.name << ", norm " << norm;
    }
  }

 private:
  const ModelConfig model_;
  InprocRanks ranks_;
  ModelRank rank_;
};

ModelConfig Tiny() {
  ModelConfig model = SmallModel();
  model.hidden = 32;
  model.heads = 4;
  model.kv_heads = 2;
  model.head_dim = 8;
  model.expert_hidden = 24;
  model.vocab = 40;
  model.router.aux_coefficient = 0.1f;
  model.router.z_coefficient = 0.01f;
  return model;
}

TEST(Gradients, Mixtral) { GradientCheck(Tiny()).Check(); }

TEST(Gradients, QwenWithHeadNormsAndTiedEmbeddings) {
  ModelConfig model = Tiny();
  model.family = ModelFamily::kQwen3Moe;
  model.qk_norm = true;
  model.tied_embeddings = true;
  GradientCheck(model).Check();
}

TEST(Gradients, SharedExpertsAndDenseLayers) {
  ModelConfig model = Tiny();
  model.layers = 3;
  model.dense_layers = {0};
  model.dense_hidden = 48;
  model.shared_experts = 2;
  model.shared_expert_hidden = 16;
  model.router.aux_scope = AuxLossScope::kMicrobatch;
  GradientCheck(model).Check();
}

TEST(Gradients, SigmoidScoresWithGroupsScalingAndGlobalBalance) {
  ModelConfig model = Tiny();
  model.experts = 8;
  model.router.score = RouterScore::kSigmoid;
  model.router.n_group = 4;
  model.router.topk_group = 2;
  model.router.routed_scaling_factor = 1.5f;
  model.router.aux_scope = AuxLossScope::kGlobal;
  GradientCheck(model).Check();
}

TEST(Gradients, TopKThenSoftmaxAndUnnormalisedSoftmax) {
  ModelConfig model = Tiny();
  model.router.score = RouterScore::kTopKSoftmax;
  model.router.normalize_topk = false;
  GradientCheck(model).Check();
  model.router.score = RouterScore::kSoftmax;
  GradientCheck(model).Check();
}

}  // namespace
}  // namespace octavo::testing
