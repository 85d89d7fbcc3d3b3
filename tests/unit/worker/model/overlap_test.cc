// Messages beside computing: whatever runs beside them, and however late they run, a step's numbers
// are the same, bit for bit.
#include <cstring>
#include <map>
#include <string>

#include "tests/support/lazy_lanes.h"
#include "tests/unit/worker/model/model_harness.h"

namespace octavo::testing {
namespace {

struct Outcome {
  std::vector<double> values;  // loss, gradient norm and expert load of every step
  std::map<std::string, std::vector<float>> masters;
  std::int64_t put_off = 0;
  std::int64_t most_rounds = 0;
};

enum class Lanes { kAtOnce, kLate };

class Rank {
 public:
  Rank(const ModelConfig& model, const RunConfig& run, const PrecisionPlan& plan,
       InprocRanks::Comms& comms, Lanes lanes)
      : cpu_(CreateCpuBackend()), run_(run), vocab_(model.vocab), comms_(comms) {
    Backend backend = cpu_;
    ModelComms groups{.world = comms.world.get(),
                      .expert_parallel = comms.expert_parallel.get(),
                      .expert_data = comms.expert_data.get()};
    if (lanes == Lanes::kLate) {
      lazy_ = std::make_unique<LazyLanes>(cpu_);
      backend = lazy_->backend();
      for (Communicator** comm : {&groups.world, &groups.expert_parallel, &groups.expert_data}) {
        lazy_comms_.push_back(std::make_unique<LazyComm>(*comm, lazy_.get()));
        *comm = lazy_comms_.back().get();
      }
    }
    auto made = Transformer::Create({.model = model,
                                     .run = run,
                                     .optimizer = {},
                                     .backend = backend,
                                     .comms = groups,
                                     .plan = plan});
    EXPECT_TRUE(made.ok()) << ToString(made.status());
    if (made.ok()) {
      model_ = *std::move(made);
      model_->InitializeParameters();
    }
  }
  ~Rank() {
    model_.reset();
    lazy_comms_.clear();
    lazy_.reset();
    DestroyCpuBackend(&cpu_);
  }
  bool ok() const { return model_ != nullptr; }
  Transformer& model() { return *model_; }
  std::int64_t put_off() const { return lazy_ == nullptr ? 0 : lazy_->put_off(); }

  // The second step measures SQNR; the third runs twice, the second time in BF16.
  absl::Status Step(std::int64_t step, std::vector<double>* values) {
    model_->BeginStep({.target_tokens = run_.tokens() * run_.microbatches * run_.world_size,
                       .sample_sqnr = step == 1});
    RETURN_IF_ERROR(Microbatches(step));
    ASSIGN_OR_RETURN(PassResult pass, model_->FinishPass());
    if (step == 2) {
      model_->RestartPass({});
      RETURN_IF_ERROR(Microbatches(step));
      ASSIGN_OR_RETURN(pass, model_->FinishPass());
    }
    double sums[2] = {pass.loss_sum, pass.grad_norm_squared};
    const CommResult reduced = comms_.world->AllReduce(sums, 2, DType::kF64, ReduceOp::kSum);
    if (!reduced.ok()) {
      return InternalError(reduced.message);
    }
    values->insert(values->end(), sums, sums + 2);
    for (const ExpertLoad& load : model_->expert_load()) {
      values->insert(values->end(), {load.max, load.min, load.mean});
    }
    model_->ApplyOptimizer(
        {.lr = 2e-3, .t = step + 1, .grad_factor = ClipFactor(sums[1], 1.0), .skip = false});
    return model_->EndStep(true);
  }

 private:
  absl::Status Microbatches(std::int64_t step) {
    for (std::int32_t m = 0; m < run_.microbatches; ++m) {
      std::vector<std::int32_t> input, target;
      for (std::int32_t s = 0; s < run_.microbatch_sequences; ++s) {
        const auto sequence =
            Sequence(vocab_, run_.sequence_length, step,
                     (m * run_.world_size + run_.rank) * run_.microbatch_sequences + s);
        input.insert(input.end(), sequence.begin(), sequence.end() - 1);
        target.insert(target.end(), sequence.begin() + 1, sequence.end());
      }
      RETURN_IF_ERROR(model_->ForwardBackward(input.data(), target.data()));
    }
    return absl::OkStatus();
  }

  Backend cpu_;
  const RunConfig run_;
  const std::int64_t vocab_;
  InprocRanks::Comms& comms_;
  std::unique_ptr<LazyLanes> lazy_;
  std::vector<std::unique_ptr<LazyComm>> lazy_comms_;
  std::unique_ptr<Transformer> model_;
};

Outcome Run(const ModelConfig& model, const RunConfig& run, const PrecisionPlan& plan,
            Lanes lanes) {
  InprocRanks ranks = InprocRanks::Make(run.world_size, run.expert_parallel);
  Outcome outcome;
  InprocRanks::Run(run.world_size, [&](int r) {
    RunConfig mine = run;
    mine.rank = r;
    InprocRanks::Comms& comms = ranks.ranks[static_cast<std::size_t>(r)];
    Rank rank(model, mine, plan, comms, lanes);
    std::vector<double> values;
    for (int step = 0; step < 4; ++step) {
      const absl::Status status = rank.ok() ? rank.Step(step, &values) : InternalError("no model");
      EXPECT_TRUE(status.ok()) << "rank " << r << ": " << ToString(status);
      if (!status.ok()) {
        comms.world->Abort();
        comms.expert_parallel->Abort();
        comms.expert_data->Abort();
        return;
      }
    }
    if (r == 0) {
      outcome.values = values;
      outcome.put_off = rank.put_off();
      outcome.most_rounds = rank.model().multi_round_layers();
      for (const Parameter& p : rank.model().parameters().all()) {
        outcome.masters[p.name].assign(p.master, p.master + p.count);
      }
    }
  });
  return outcome;
}

// Bits, so that NaNs compare too.
bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

void ExpectSame(const Outcome& got, const Outcome& want, const std::string& what) {
  EXPECT_EQ(got.values, want.values) << what;
  ASSERT_EQ(got.masters.size(), want.masters.size()) << what;
  for (const auto& [name, values] : want.masters) {
    EXPECT_TRUE(SameBits(got.masters.at(name), values)) << what << ": " << name;
  }
}

// Everything at once without overlap is the reference.
Outcome Check(const ModelConfig& model, RunConfig run, const PrecisionPlan& plan,
              const std::string& what) {
  run.overlap = false;
  run.dispatch_parts = 1;
  const Outcome want = Run(model, run, plan, Lanes::kAtOnce);
  EXPECT_FALSE(want.values.empty()) << what;
  ExpectSame(Run(model, run, plan, Lanes::kLate), want, what + ", late lanes, no overlap");
  run.overlap = true;
  for (const std::int32_t parts : {1, 2}) {
    run.dispatch_parts = parts;
    const std::string now = what + ", parts " + std::to_string(parts);
    ExpectSame(Run(model, run, plan, Lanes::kAtOnce), want, now);
    const Outcome late = Run(model, run, plan, Lanes::kLate);
    ExpectSame(late, want, now + ", late lanes");
    EXPECT_GT(late.put_off, 50) << now;
  }
  return want;
}

RunConfig TwoRanks(RecipeKind kind = RecipeKind::kBf16) {
  RunConfig run = SmallRun(kind == RecipeKind::kFp32);
  run.world_size = run.expert_parallel = 2;
  run.microbatches = 2;
  return run;
}

TEST(Overlap, EveryRecipeGivesTheSameBits) {
  const ModelConfig model = SmallModel();
  for (int kind = 0; kind < kRecipeKindCount; ++kind) {
    const auto recipe = static_cast<RecipeKind>(kind);
    Check(model, TwoRanks(recipe), Uniform(model, recipe), std::string(Name(recipe)));
  }
}

TEST(Overlap, SharedExpertsDenseLayersRecomputeAndShadows) {
  ModelConfig model = SmallModel();
  model.layers = 4;
  model.shared_experts = 1;
  model.shared_expert_hidden = 128;
  model.dense_layers = {1};
  model.dense_hidden = 256;
  model.router.aux_scope = AuxLossScope::kGlobal;
  model.router.bias_update_rate = 0.01f;
  RunConfig run = TwoRanks();
  run.recompute = {true, false, true, false};
  PrecisionPlan plan = Uniform(model, RecipeKind::kFp8Blockwise);
  plan.shadows[{0, Op::kFc1}] = {DefaultRecipe(RecipeKind::kFp8Flow),
                                 DefaultRecipe(RecipeKind::kFp8Current)};
  plan.shadows[{3, Op::kFc2}] = {DefaultRecipe(RecipeKind::kFp8Delayed)};
  Check(model, run, plan, "mixed layers");
}

TEST(Overlap, SeveralRounds) {
  const ModelConfig model = SmallModel();
  RunConfig run = TwoRanks();
  run.recv_capacity = 0.6f;
  const Outcome want = Check(model, run, Uniform(model, RecipeKind::kFp8Flow), "rounds");
  EXPECT_GT(want.most_rounds, 0);
}

TEST(Overlap, TwoExpertGroupsReduceTheirExperts) {
  ModelConfig model = SmallModel();
  model.tied_embeddings = true;
  RunConfig run = TwoRanks();
  run.world_size = 4;
  run.microbatch_sequences = 1;
  Check(model, run, Uniform(model, RecipeKind::kFp8Current), "four ranks");
}

// A recipe's wgrad in BF16 keeps operands in scratch that the next dispatch writes.
TEST(Overlap, WgradInBf16) {
  const ModelConfig model = SmallModel();
  Recipe recipe = DefaultRecipe(RecipeKind::kFp8Blockwise);
  recipe.wgrad = WgradPrecision::kBf16;
  Check(model, TwoRanks(), BuildPlan(model.layers, recipe, 0, {}), "wgrad in bf16");
}

}  // namespace
}  // namespace octavo::testing
