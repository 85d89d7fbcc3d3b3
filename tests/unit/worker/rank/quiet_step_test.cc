// A step neither allocates nor waits beyond what is documented (ARCHITECTURE 5): once per MoE layer
// and microbatch for the counts, once per pass for the sums. On the CPU backend, which counts its
// waits as a device would have them, and on the GPU where there is one (label gpu).
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "tests/support/inproc_comm.h"
#include "worker/comm/self.h"
#include "worker/model/transformer.h"
#include "worker/rank/backend_loader.h"

namespace octavo {
namespace {

constexpr std::int32_t kLayers = 3, kMicrobatches = 2;

ModelConfig Model() {
  ModelConfig model;
  model.layers = kLayers;
  model.hidden = 256;
  model.heads = 4;
  model.kv_heads = 2;
  model.head_dim = 64;
  model.vocab = 256;
  model.experts = 8;
  model.experts_per_token = 2;
  model.expert_hidden = 128;
  model.shared_experts = 1;
  model.shared_expert_hidden = 128;
  model.dense_layers = {0};
  model.dense_hidden = 256;
  model.router.aux_scope = AuxLossScope::kMicrobatch;
  model.router.aux_coefficient = 0.01f;
  return model;
}

// One rank of a step that is the same every time: the same tokens, and a rate of zero, so that no
// routing changes and every shape was seen in the first step.
class QuietRank {
 public:
  QuietRank(const Backend& backend, const ModelComms& comms, RunConfig run, RecipeKind recipe)
      : backend_(backend), run_(run) {
    auto made = Transformer::Create({.model = Model(),
                                     .run = run,
                                     .optimizer = {},
                                     .backend = backend,
                                     .comms = comms,
                                     .plan = BuildPlan(kLayers, DefaultRecipe(recipe), 0, {})});
    EXPECT_TRUE(made.ok()) << ToString(made.status());
    if (!made.ok()) {
      return;
    }
    model_ = *std::move(made);
    model_->InitializeParameters();
    arena_ = std::make_unique<Arena>(backend, "tokens");
    const std::int64_t count = 2 * run.tokens();
    tokens_ = arena_->Take<std::int32_t>(count);
    std::vector<std::int32_t> host;
    for (std::int64_t i = 0; i < count; ++i) {
      host.push_back(static_cast<std::int32_t>((i * 37 + i * i / 5 + run.rank * 11) % 256));
    }
    backend.ops->copy(
        backend.context,
        {.dst = tokens_, .src = host.data(), .bytes = count * 4, .kind = CopyKind::kToDevice});
    backend.ops->synchronize(backend.context);
  }
  bool ok() const { return model_ != nullptr; }

  absl::Status Step() {
    model_->BeginStep({.target_tokens = run_.tokens() * run_.microbatches * run_.world_size});
    for (std::int32_t m = 0; m < run_.microbatches; ++m) {
      RETURN_IF_ERROR(model_->ForwardBackward(tokens_, tokens_ + run_.tokens()));
    }
    ASSIGN_OR_RETURN(const PassResult pass, model_->FinishPass());
    EXPECT_GT(pass.loss_sum, 0);
    model_->ApplyOptimizer({.lr = 0, .t = ++t_, .grad_factor = 1.0f, .skip = false});
    return model_->EndStep(true);
  }
  OpsCounters Counters() const {
    OpsCounters counters{};
    backend_.ops->counters(backend_.context, &counters);
    return counters;
  }

  // Warms up, then counts.
  void ExpectQuiet(std::int64_t waits_of_a_step) {
    ASSERT_TRUE(ok());
    for (int i = 0; i < 3; ++i) {
      ASSERT_TRUE(Step().ok());
    }
    OpsCounters before = Counters();
    EXPECT_GT(before.allocations, 0);
    for (int i = 0; i < 4; ++i) {
      const absl::Status status = Step();
      ASSERT_TRUE(status.ok()) << ToString(status);
      const OpsCounters now = Counters();
      EXPECT_EQ(now.allocations, before.allocations) << "step " << i;
      EXPECT_EQ(now.plans, before.plans) << "step " << i;
      EXPECT_EQ(now.synchronizations - before.synchronizations, waits_of_a_step) << "step " << i;
      before = now;
    }
    char message[512] = "";
    EXPECT_EQ(backend_.ops->poll_error(backend_.context, message, sizeof(message)), 0) << message;
  }

 private:
  const Backend backend_;
  const RunConfig run_;
  std::unique_ptr<Transformer> model_;
  std::unique_ptr<Arena> arena_;
  std::int32_t* tokens_ = nullptr;
  std::int64_t t_ = 0;
};

RunConfig RunOf(int ranks) {
  RunConfig run;
  run.sequence_length = 128;
  run.microbatch_sequences = 2;
  run.microbatches = kMicrobatches;
  run.world_size = run.expert_parallel = ranks;
  run.seed = 3;
  return run;
}

// Counts of every MoE layer and microbatch; the sums of the pass.
constexpr std::int64_t kWaits = (kLayers - 1) * kMicrobatches + 1;

void OneRank(const std::string& device) {
  const absl::StatusOr<std::unique_ptr<LoadedBackend>> loaded = LoadedBackend::Open(device, 0);
  if (!loaded.ok()) {
    GTEST_SKIP() << ToString(loaded.status());
  }
  for (const RecipeKind recipe : {RecipeKind::kBf16, RecipeKind::kFp8Blockwise,
                                  RecipeKind::kFp8Flow, RecipeKind::kFp8Delayed}) {
    SCOPED_TRACE(std::string(Name(recipe)));
    const auto self = CreateSelfCommunicator();
    QuietRank rank((*loaded)->backend(),
                   {.world = self.get(), .expert_parallel = self.get(), .expert_data = self.get()},
                   RunOf(1), recipe);
    rank.ExpectQuiet(kWaits);
  }
}

TEST(QuietStep, OneCpuRankWaitsForCountsAndSumsOnly) { OneRank("cpu"); }

TEST(QuietStep, OneGpuWaitsForCountsAndSumsOnly) { OneRank("cuda"); }

TEST(QuietStep, ExpertParallelRanksWaitNoMore) {
  testing::InprocRanks ranks = testing::InprocRanks::Make(2, 2);
  testing::InprocRanks::Run(2, [&](int r) {
    const absl::StatusOr<std::unique_ptr<LoadedBackend>> loaded = LoadedBackend::Open("cpu", 0);
    ASSERT_TRUE(loaded.ok());
    testing::InprocRanks::Comms& comms = ranks.ranks[static_cast<std::size_t>(r)];
    RunConfig run = RunOf(2);
    run.rank = r;
    QuietRank rank((*loaded)->backend(),
                   {.world = comms.world.get(),
                    .expert_parallel = comms.expert_parallel.get(),
                    .expert_data = comms.expert_data.get()},
                   run, RecipeKind::kFp8Flow);
    rank.ExpectQuiet(kWaits);
  });
}

// A step that does wait once more is seen.
TEST(QuietStep, AnExtraWaitIsCounted) {
  const absl::StatusOr<std::unique_ptr<LoadedBackend>> loaded = LoadedBackend::Open("cpu", 0);
  ASSERT_TRUE(loaded.ok());
  const Backend& backend = (*loaded)->backend();
  OpsCounters before{}, after{};
  backend.ops->counters(backend.context, &before);
  backend.ops->synchronize(backend.context);
  backend.ops->synchronize_lane(backend.context, Lane::kCopy);
  backend.ops->counters(backend.context, &after);
  EXPECT_EQ(after.synchronizations - before.synchronizations, 2);
}

}  // namespace
}  // namespace octavo
