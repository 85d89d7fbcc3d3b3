// The model as a GPU sees it: device memory that the host cannot touch
// (tests/support/guarded_ops.h). Every recipe, one rank and expert parallel, with SQNR samples,
// shadows, retries and recompute, ends with the numbers of the plain CPU backend, so nothing reads
// or writes device memory on the host.
#include "tests/support/guarded_ops.h"
#include "tests/unit/worker/model/model_harness.h"

namespace octavo::testing {
namespace {

// One rank whose tokens are uploaded, as worker/rank's feed does.
class DeviceRank {
 public:
  DeviceRank(const ModelConfig& model, const RunConfig& run, const PrecisionPlan& plan,
             InprocRanks::Comms& comms, bool guarded)
      : cpu_(CreateCpuBackend()), backend_(cpu_), run_(run), vocab_(model.vocab), comms_(comms) {
    GuardedMemory::Of(cpu_.context).operations = 0;  // contexts reuse addresses
    if (guarded) {
      backend_.ops = GuardedOps(cpu_);
    }
    arena_ = std::make_unique<Arena>(backend_, "tokens");
    tokens_ = arena_->Take<std::int32_t>(2 * run.tokens());
    auto made = Transformer::Create({.model = model,
                                     .run = run,
                                     .optimizer = {},
                                     .backend = backend_,
                                     .comms = {.world = comms.world.get(),
                                               .expert_parallel = comms.expert_parallel.get(),
                                               .expert_data = comms.expert_data.get()},
                                     .plan = plan});
    EXPECT_TRUE(made.ok()) << ToString(made.status());
    if (made.ok()) {
      model_ = *std::move(made);
      model_->InitializeParameters();
    }
  }
  ~DeviceRank() {
    model_.reset();
    arena_.reset();
    DestroyCpuBackend(&cpu_);
  }
  bool ok() const { return model_ != nullptr; }
  Transformer& model() { return *model_; }
  std::int64_t operations() const { return GuardedMemory::Of(cpu_.context).operations; }

  // Mean token loss of the step over all ranks.
  absl::StatusOr<double> Step(std::int64_t step, bool sample, bool retry) {
    model_->BeginStep({.target_tokens = run_.tokens() * run_.world_size, .sample_sqnr = sample});
    Upload(step);
    RETURN_IF_ERROR(model_->ForwardBackward(tokens_, tokens_ + run_.tokens()));
    ASSIGN_OR_RETURN(PassResult pass, model_->FinishPass());
    if (retry) {
      model_->RestartPass({});
      RETURN_IF_ERROR(model_->ForwardBackward(tokens_, tokens_ + run_.tokens()));
      ASSIGN_OR_RETURN(pass, model_->FinishPass());
    }
    double sums[3] = {pass.loss_sum, static_cast<double>(pass.tokens), pass.grad_norm_squared};
    const CommResult reduced = comms_.world->AllReduce(sums, 3, DType::kF64, ReduceOp::kSum);
    if (!reduced.ok()) {
      return InternalError(reduced.message);
    }
    model_->ApplyOptimizer(
        {.lr = 2e-3, .t = step + 1, .grad_factor = ClipFactor(sums[2], 1.0), .skip = false});
    RETURN_IF_ERROR(model_->EndStep(true));
    return sums[0] / sums[1];
  }
  absl::StatusOr<double> Evaluate() {
    Upload(99);
    double sum = 0;
    RETURN_IF_ERROR(model_->Evaluate(tokens_, tokens_ + run_.tokens(), &sum));
    std::vector<float> logits(static_cast<std::size_t>(3 * vocab_));
    RETURN_IF_ERROR(model_->Logits(tokens_, 5, 3, logits.data()));
    return sum + logits.front() + logits.back();
  }

 private:
  void Upload(std::int64_t step) {
    std::vector<std::int32_t> both(static_cast<std::size_t>(2 * run_.tokens()));
    for (std::int32_t s = 0; s < run_.microbatch_sequences; ++s) {
      const auto sequence =
          Sequence(vocab_, run_.sequence_length, step, run_.rank * run_.microbatch_sequences + s);
      std::copy_n(sequence.begin(), run_.sequence_length, both.begin() + s * run_.sequence_length);
      std::copy_n(sequence.begin() + 1, run_.sequence_length,
                  both.begin() + run_.tokens() + s * run_.sequence_length);
    }
    backend_.ops->copy(backend_.context, {.dst = tokens_,
                                          .src = both.data(),
                                          .bytes = 2 * run_.tokens() * 4,
                                          .kind = CopyKind::kToDevice});
    backend_.ops->synchronize(backend_.context);
  }

  Backend cpu_, backend_;
  const RunConfig run_;
  const std::int64_t vocab_;
  InprocRanks::Comms& comms_;
  std::unique_ptr<Arena> arena_;
  std::int32_t* tokens_ = nullptr;
  std::unique_ptr<Transformer> model_;
};

// Losses of three steps (the second samples SQNR, the third runs twice, the second time in BF16),
// then an evaluation, on rank 0.
std::vector<double> Values(const ModelConfig& model, const RunConfig& run,
                           const PrecisionPlan& plan, bool guarded) {
  InprocRanks ranks = InprocRanks::Make(run.world_size, run.expert_parallel);
  std::vector<double> values;
  InprocRanks::Run(run.world_size, [&](int r) {
    RunConfig mine = run;
    mine.rank = r;
    InprocRanks::Comms& comms = ranks.ranks[static_cast<std::size_t>(r)];
    DeviceRank rank(model, mine, plan, comms, guarded);
    const auto keep = [&](const absl::StatusOr<double>& value) {
      EXPECT_TRUE(value.ok()) << ToString(value.status());
      if (r == 0 && value.ok()) {
        values.push_back(*value);
      }
      return value.ok();
    };
    if (!rank.ok() || !keep(rank.Step(0, false, false)) || !keep(rank.Step(1, true, false)) ||
        !keep(rank.Step(2, false, true))) {
      comms.world->Abort();
      return;
    }
    keep(rank.Evaluate());
    const std::vector<StateTensor> state = rank.model().ExportState();
    EXPECT_TRUE(rank.model().ImportState(state).ok());
    rank.model().ParametersLoaded();
    EXPECT_EQ(rank.operations() > 100, guarded);
  });
  return values;
}

void ExpectEqualValues(const ModelConfig& model, const RunConfig& run, const PrecisionPlan& plan,
                       const std::string& what) {
  const std::vector<double> plain = Values(model, run, plan, false);
  ASSERT_EQ(plain.size(), 4u) << what;
  EXPECT_EQ(Values(model, run, plan, true), plain) << what;
}

TEST(DeviceMemory, TheHostCannotReadIt) {
  Backend backend = CreateCpuBackend();
  const Ops* ops = GuardedOps(backend);
  auto* word = static_cast<volatile int*>(ops->allocate(backend.context, 64, Memory::kDevice));
  EXPECT_DEATH((void)*word, "");
  int host = 7;
  EXPECT_DEATH(ops->copy(backend.context,
                         {.dst = &host, .src = &host, .bytes = 4, .kind = CopyKind::kToDevice}),
               "copy of kind");
  ops->release(backend.context, const_cast<int*>(word), Memory::kDevice);
  DestroyCpuBackend(&backend);
}

TEST(DeviceMemory, NoRecipeTouchesItOnTheHost) {
  const ModelConfig model = SmallModel();
  for (int kind = 0; kind < kRecipeKindCount; ++kind) {
    const auto recipe = static_cast<RecipeKind>(kind);
    ExpectEqualValues(model, SmallRun(recipe == RecipeKind::kFp32), Uniform(model, recipe),
                      std::string(Name(recipe)));
  }
}

TEST(DeviceMemory, ExpertParallelRanksStageThroughPinnedMemory) {
  ModelConfig model = SmallModel();
  model.router.bias_update_rate = 0.01f;
  RunConfig run = SmallRun(false);
  run.world_size = run.expert_parallel = 2;
  run.recv_capacity = 0.6f;  // several receive rounds
  for (RecipeKind kind : {RecipeKind::kFp8Flow, RecipeKind::kFp8Delayed}) {
    ExpectEqualValues(model, run, Uniform(model, kind), std::string(Name(kind)));
  }
}

TEST(DeviceMemory, SharedExpertsDenseLayersHeadNormsRecomputeAndShadows) {
  ModelConfig model = SmallModel();
  model.qk_norm = true;
  model.tied_embeddings = true;
  model.shared_experts = 1;
  model.shared_expert_hidden = 128;
  model.dense_layers = {0};
  model.dense_hidden = 256;
  model.router.aux_scope = AuxLossScope::kGlobal;
  RunConfig run = SmallRun(false);
  run.recompute = {true, true};
  PrecisionPlan plan = Uniform(model, RecipeKind::kFp8Blockwise);
  plan.shadows[{1, Op::kFc1}] = {DefaultRecipe(RecipeKind::kFp8Flow),
                                 DefaultRecipe(RecipeKind::kFp8Current)};
  plan.shadows[{0, Op::kAttnQkv}] = {DefaultRecipe(RecipeKind::kFp8Delayed)};
  ExpectEqualValues(model, run, plan, "everything else");
}

}  // namespace
}  // namespace octavo::testing
