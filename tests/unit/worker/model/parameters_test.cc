// Initial values, shards and orders that other parts rely on.
#include <map>
#include <set>

#include "tests/unit/worker/model/model_harness.h"
#include "worker/model/execution_order.h"
#include "worker/model/lr_schedule.h"

namespace octavo::testing {
namespace {

TEST(Parameters, InitialValuesDoNotDependOnTheNumberOfRanks) {
  ModelConfig model = SmallModel();
  model.experts = 8;
  RunConfig run = SmallRun(true);
  std::map<std::string, std::vector<float>> full;
  Train(model, run, Uniform(model, RecipeKind::kFp32), 0, 0,
        [&full](int, ModelRank& rank, InprocRanks::Comms&) {
          for (const Parameter& p : rank.model().parameters().all()) {
            full[p.name].assign(p.master, p.master + p.count);
          }
        });
  run.world_size = 4;
  run.expert_parallel = 4;
  Train(model, run, Uniform(model, RecipeKind::kFp32), 0, 0,
        [&full](int r, ModelRank& rank, InprocRanks::Comms&) {
          for (const Parameter& p : rank.model().parameters().all()) {
            if (p.region == ParameterRegion::kExpert) {
              EXPECT_EQ(p.expert_first(), 2 * r);
              EXPECT_EQ(p.expert_count(), 2);
            }
            for (std::int64_t i = 0; i < p.count; ++i) {
              ASSERT_EQ(p.master[i], full[p.name][static_cast<std::size_t>(p.first + i)]) << p.name;
            }
          }
        });
}

TEST(Parameters, NormalsHaveTheirMoments) {
  double sum = 0, squares = 0, fourth = 0;
  constexpr int kCount = 200000;
  for (int i = 0; i < kCount; ++i) {
    const double x = InitialNormal(11, "layers.0.attn.qkv.weight", i);
    sum += x;
    squares += x * x;
    fourth += x * x * x * x;
  }
  EXPECT_NEAR(sum / kCount, 0, 0.01);  // 4.5 standard errors
  EXPECT_NEAR(squares / kCount, 1, 0.015);
  EXPECT_NEAR(fourth / kCount, 3, 0.1);
  EXPECT_NE(InitialNormal(11, "a", 0), InitialNormal(12, "a", 0));
  EXPECT_NE(InitialNormal(11, "a", 0), InitialNormal(11, "b", 0));
}

TEST(Parameters, CountsFollowTheTable) {
  const ModelConfig model = SmallModel();
  const std::int64_t attention = 256 * 128 + 128 * 128, router = 4 * 128, norms = 2 * 128;
  const std::int64_t expert = 3 * 128 * 128, ends = 2 * 64 * 128 + 128;
  EXPECT_EQ(CountParameters(model).total, 2 * (attention + router + norms + 4 * expert) + ends);
  EXPECT_EQ(CountParameters(model).active, 2 * (attention + router + norms + 2 * expert) + ends);
}

TEST(ExecutionOrder, PositionsRoundTripAndForwardComesFirst) {
  constexpr std::int32_t kLayers = 3;
  std::set<std::int64_t> seen;
  for (std::int32_t layer = 0; layer < kLayers; ++layer) {
    for (int op = 0; op < kOpCount; ++op) {
      for (int t = 0; t < kTensorCount; ++t) {
        const OpSite site{layer, static_cast<Op>(op)};
        const std::int64_t position = ExecutionPosition(site, static_cast<Tensor>(t), kLayers);
        EXPECT_TRUE(seen.insert(position).second);
        const NonfiniteSite back = DecodeExecution(position, kLayers);
        EXPECT_EQ(back.site, site);
        EXPECT_EQ(back.tensor, static_cast<Tensor>(t));
      }
    }
  }
  EXPECT_LT(ExecutionPosition({2, Op::kFc2}, Tensor::kWeight, kLayers),
            ExecutionPosition({2, Op::kDispatch}, Tensor::kGrad, kLayers));
  EXPECT_LT(ExecutionPosition({2, Op::kAttnQkv}, Tensor::kGrad, kLayers),
            ExecutionPosition({0, Op::kFc2}, Tensor::kGrad, kLayers));
  EXPECT_LT(ExecutionPosition({0, Op::kFc2}, Tensor::kInput, kLayers),
            ExecutionPosition({1, Op::kAttnQkv}, Tensor::kInput, kLayers));
}

TEST(LrSchedule, WarmsUpAndDecays) {
  LrSchedule s{
      .decay = LrDecay::kCosine, .peak = 1, .final = 0.1, .warmup_steps = 10, .total_steps = 110};
  EXPECT_DOUBLE_EQ(LearningRate(s, 0), 0.1);
  EXPECT_DOUBLE_EQ(LearningRate(s, 9), 1.0);
  EXPECT_DOUBLE_EQ(LearningRate(s, 10), 1.0);
  EXPECT_NEAR(LearningRate(s, 10 + 99 / 2), 0.55, 0.01);
  EXPECT_DOUBLE_EQ(LearningRate(s, 109), 0.1);
  EXPECT_DOUBLE_EQ(LearningRate(s, 5000), 0.1);
  s.decay = LrDecay::kWsd;
  s.decay_steps = 20;
  EXPECT_DOUBLE_EQ(LearningRate(s, 89), 1.0);
  EXPECT_LT(LearningRate(s, 100), 0.6);
  EXPECT_DOUBLE_EQ(LearningRate(s, 109), 0.1);
  s.decay = LrDecay::kConstant;
  EXPECT_DOUBLE_EQ(LearningRate(s, 109), 1.0);
}

TEST(ModelCheck, NamesDimensionValueAndValidOnes) {
  const auto message = [](const ModelConfig& model, const RunConfig& run, RecipeKind kind) {
    InprocRanks ranks = InprocRanks::Make(1, 1);
    Backend backend = CreateCpuBackend();
    const auto made =
        Transformer::Create({.model = model,
                             .run = run,
                             .optimizer = {},
                             .backend = backend,
                             .comms = {.world = ranks.ranks[0].world.get(),
                                       .expert_parallel = ranks.ranks[0].expert_parallel.get(),
                                       .expert_data = ranks.ranks[0].expert_data.get()},
                             .plan = Uniform(model, kind)});
    DestroyCpuBackend(&backend);
    return made.ok() ? std::string("OK") : Message(made.status());
  };
  ModelConfig model = SmallModel();
  model.hidden = 192;
  EXPECT_EQ(
      message(model, SmallRun(false), RecipeKind::kFp8Flow),
      "layer 0, attn_qkv: hidden is 192; recipe fp8_flow needs a multiple of 128, for example "
      "128 or 256");
  model = SmallModel();
  model.kv_heads = 3;
  EXPECT_NE(message(model, SmallRun(false), RecipeKind::kBf16).find("kv_heads is 3"),
            std::string::npos);
  model = SmallModel();
  model.experts_per_token = 5;
  EXPECT_NE(message(model, SmallRun(false), RecipeKind::kBf16).find("valid is 1 to 4"),
            std::string::npos);
  RunConfig run = SmallRun(false);
  run.world_size = 2;
  EXPECT_NE(message(SmallModel(), run, RecipeKind::kBf16).find("communicators"), std::string::npos);
}

}  // namespace
}  // namespace octavo::testing
