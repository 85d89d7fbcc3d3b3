// A small model on the CPU backend with ranks as threads: steps on seeded random tokens.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <memory>
#include <random>
#include <vector>

#include "base/status.h"
#include "kernels/cpu/backend.h"
#include "tests/support/inproc_comm.h"
#include "worker/model/transformer.h"

namespace octavo::testing {

inline ModelConfig SmallModel() {
  ModelConfig model;
  model.layers = 2;
  model.hidden = 128;
  model.heads = 4;
  model.kv_heads = 2;
  model.head_dim = 32;
  model.vocab = 64;
  model.experts = 4;
  model.experts_per_token = 2;
  model.expert_hidden = 128;
  model.init_std = 0.08f;
  model.router.aux_scope = AuxLossScope::kSequence;
  model.router.aux_coefficient = 0.01f;
  model.router.z_coefficient = 1e-3f;
  return model;
}

inline RunConfig SmallRun(bool fp32) {
  RunConfig run;
  run.sequence_length = 32;
  run.microbatch_sequences = 2;
  run.microbatches = 1;
  run.fp32 = fp32;
  run.seed = 7;
  run.allow_emulation = true;
  return run;
}

inline PrecisionPlan Uniform(const ModelConfig& model, RecipeKind kind) {
  return BuildPlan(model.layers, DefaultRecipe(kind), 0, {});
}

// Tokens of global sequence `index` of step `step`: the same however sequences are spread over
// ranks. A noisy walk that a model can learn.
inline std::vector<std::int32_t> Sequence(std::int64_t vocab, std::int64_t length,
                                          std::int64_t step, std::int64_t index) {
  std::mt19937 random(static_cast<unsigned>(step * 1009 + index * 7919 + 3));
  std::vector<std::int32_t> tokens;
  auto state = static_cast<std::int64_t>(random() % static_cast<unsigned>(vocab));
  for (std::int64_t i = 0; i <= length; ++i) {
    tokens.push_back(static_cast<std::int32_t>(state));
    state = (state * 5 + 3 + (random() % 4 == 0 ? random() % 3 : 0)) % vocab;
  }
  return tokens;
}

struct StepOutcome {
  double loss = 0;  // mean token loss of the step
  double aux = 0, z = 0;
  double grad_norm = 0;
};

// One rank.
class ModelRank {
 public:
  ModelRank(const ModelConfig& model, RunConfig run, const PrecisionPlan& plan,
            InprocRanks::Comms* comms, const Ops* ops = nullptr)
      : backend_(CreateCpuBackend()), run_(run), model_config_(model), comms_(comms) {
    Backend backend = backend_;
    if (ops != nullptr) {
      backend.ops = ops;
    }
    absl::StatusOr<std::unique_ptr<Transformer>> made =
        Transformer::Create({.model = model,
                             .run = run,
                             .optimizer = {},
                             .backend = backend,
                             .comms = {.world = comms->world.get(),
                                       .expert_parallel = comms->expert_parallel.get(),
                                       .expert_data = comms->expert_data.get()},
                             .plan = plan});
    if (!made.ok()) {
      ADD_FAILURE() << ToString(made.status());
      return;
    }
    model_ = *std::move(made);
    model_->InitializeParameters();
  }
  ~ModelRank() {
    model_.reset();
    DestroyCpuBackend(&backend_);
  }

  Transformer& model() { return *model_; }
  bool ok() const { return model_ != nullptr; }

  // Microbatches of the step: sequences [first, first + microbatch_sequences) of global order,
  // where ranks take contiguous blocks of each microbatch.
  absl::Status RunMicrobatches(std::int64_t step) {
    const std::int64_t tokens = run_.tokens();
    for (std::int32_t m = 0; m < run_.microbatches; ++m) {
      std::vector<std::int32_t> input, target;
      for (std::int32_t s = 0; s < run_.microbatch_sequences; ++s) {
        const std::int64_t index = (static_cast<std::int64_t>(m) * run_.world_size + run_.rank) *
                                       run_.microbatch_sequences +
                                   s;
        const auto sequence = Sequence(model_config_.vocab, run_.sequence_length, step, index);
        input.insert(input.end(), sequence.begin(), sequence.end() - 1);
        target.insert(target.end(), sequence.begin() + 1, sequence.end());
      }
      OCTAVO_CHECK_EQ(static_cast<std::int64_t>(input.size()), tokens);
      RETURN_IF_ERROR(model_->ForwardBackward(input.data(), target.data()));
    }
    return absl::OkStatus();
  }

  StepOptions Options(bool sqnr = false) const {
    return {.target_tokens = run_.tokens() * run_.microbatches * run_.world_size,
            .sample_sqnr = sqnr};
  }

  absl::StatusOr<StepOutcome> Outcome(const PassResult& pass) {
    double sums[5] = {pass.loss_sum, static_cast<double>(pass.tokens), pass.aux_loss, pass.z_loss,
                      pass.grad_norm_squared};
    const CommResult reduced = comms_->world->AllReduce(sums, 5, DType::kF64, ReduceOp::kSum);
    if (!reduced.ok()) {
      return InternalError(reduced.message);
    }
    return StepOutcome{sums[0] / sums[1], sums[2], sums[3], std::sqrt(sums[4])};
  }

  absl::StatusOr<StepOutcome> Step(std::int64_t step, double lr = 2e-3, bool sqnr = false) {
    model_->BeginStep(Options(sqnr));
    RETURN_IF_ERROR(RunMicrobatches(step));
    ASSIGN_OR_RETURN(const PassResult pass, model_->FinishPass());
    ASSIGN_OR_RETURN(const StepOutcome outcome, Outcome(pass));
    model_->ApplyOptimizer({.lr = lr,
                            .t = step + 1,
                            .grad_factor = ClipFactor(outcome.grad_norm * outcome.grad_norm, 1.0),
                            .skip = false});
    RETURN_IF_ERROR(model_->EndStep(true));
    return outcome;
  }

 private:
  Backend backend_;
  const RunConfig run_;
  const ModelConfig model_config_;
  InprocRanks::Comms* const comms_;
  std::unique_ptr<Transformer> model_;
};

// Runs `steps` steps on world ranks and returns rank 0's outcomes; fails the test on any error.
// visit(rank, model rank) runs on each rank's thread at the end.
inline std::vector<StepOutcome> Train(
    const ModelConfig& model, RunConfig run, const PrecisionPlan& plan, int steps, double lr = 2e-3,
    const std::function<void(int, ModelRank&, InprocRanks::Comms&)>& visit = nullptr) {
  InprocRanks ranks = InprocRanks::Make(run.world_size, run.expert_parallel);
  std::vector<StepOutcome> outcomes;
  std::mutex mu;
  InprocRanks::Run(run.world_size, [&](int r) {
    RunConfig mine = run;
    mine.rank = r;
    ModelRank rank(model, mine, plan, &ranks.ranks[static_cast<std::size_t>(r)]);
    if (!rank.ok()) {
      ranks.ranks[static_cast<std::size_t>(r)].world->Abort();
      return;
    }
    for (int s = 0; s < steps; ++s) {
      const absl::StatusOr<StepOutcome> outcome = rank.Step(s, lr);
      const std::lock_guard lock(mu);
      if (!outcome.ok()) {
        ADD_FAILURE() << "rank " << r << " step " << s << ": " << ToString(outcome.status());
        ranks.ranks[static_cast<std::size_t>(r)].world->Abort();
        return;
      }
      if (r == 0) {
        outcomes.push_back(*outcome);
      }
    }
    if (visit) {
      visit(r, rank, ranks.ranks[static_cast<std::size_t>(r)]);
    }
  });
  outcomes.resize(static_cast<std::size_t>(steps));
  return outcomes;
}

}  // namespace octavo::testing
