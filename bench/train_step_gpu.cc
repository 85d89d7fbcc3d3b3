// Whole training steps on a GPU, beside PyTorch on the same card and the goals: tokens/s, MFU,
// memory.
//
//   bench_train_step_gpu [--config A,B] [--recipe bf16,fp8_blockwise,…] [--steps N] [--by-op]
//
// A step is forward, backward, gradient norm, statistics to the host, AdamW and the FP8 windows on
// 16384 random tokens (8 sequences of 2048), as worker/rank runs it, without reports. Steps are
// timed to the end of the device's work; medians. MFU counts 6·active + 6·layers·seq·heads·head_dim
// FLOPs a token over 989 TFLOP/s. The peers were measured on an H200 with PyTorch 2.11, CUDA 13.0.
// --by-op also times one step with a wait after every operation: where its time goes.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "base/status.h"
#include "kernels/ops_list.h"
#include "worker/comm/self.h"
#include "worker/model/transformer.h"
#include "worker/rank/backend_loader.h"

namespace octavo {
namespace {

constexpr double kPeakFlops = 989e12;  // dense BF16 of an H200
constexpr double kGiB = 1073741824.0;
constexpr std::int64_t kBatches = 16;  // of random tokens, in turn: none is learnt by heart

double Now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// ---------------------------------------------------------------- time by operation

struct OpTime {
  double seconds = 0;
  std::int64_t calls = 0;
};
const Ops* inner = nullptr;
bool by_op = false;
std::map<std::string, OpTime> op_times;

template <class Call>
void Timed(OpsContext* context, const char* name, const Call& call) {
  if (!by_op) {
    call();
    return;
  }
  inner->synchronize(context);
  const double begin = Now();
  call();
  inner->synchronize(context);
  OpTime& time = op_times[name];
  time.seconds += Now() - begin;
  ++time.calls;
}

const Ops* TimedOps(const Ops* ops) {
  inner = ops;
  static Ops table;
  table = *ops;
  table.zero = [](OpsContext* c, void* at, std::int64_t bytes) {
    Timed(c, "zero", [&] { inner->zero(c, at, bytes); });
  };
  table.copy = [](OpsContext* c, const CopyArgs& args) {
    Timed(c, "copy", [&] { inner->copy(c, args); });
  };
#define OCTAVO_TIMED(field, Name, Args)               \
  table.field = [](OpsContext* c, const Args& args) { \
    Timed(c, #field, [&] { inner->field(c, args); }); \
  };
  OCTAVO_COMPUTE_OPS(OCTAVO_TIMED)
#undef OCTAVO_TIMED
  return &table;
}

void PrintOpTimes() {
  std::vector<std::pair<double, std::string>> order;
  double total = 0;
  for (const auto& [name, time] : op_times) {
    order.emplace_back(time.seconds, name);
    total += time.seconds;
  }
  std::sort(order.rbegin(), order.rend());
  for (const auto& [seconds, name] : order) {
    if (seconds > 0.005 * total) {
      std::printf("    %-22s %6lld calls %9.3f ms %5.1f%%\n", name.c_str(),
                  static_cast<long long>(op_times[name].calls), 1e3 * seconds,
                  100 * seconds / total);
    }
  }
}

// ---------------------------------------------------------------- configurations

struct Config {
  const char* name;
  ModelConfig model;
  // Tokens/s of PyTorch: eager and compiled BF16, the better FP8 row-wise; GiB of compiled BF16.
  double eager, compiled, fp8, gib;
  double goal_bf16, goal_fp8;
};

ModelConfig Shape(std::int32_t layers, std::int64_t hidden, std::int32_t head_dim,
                  std::int32_t experts, std::int32_t top_k, std::int64_t expert_hidden) {
  ModelConfig model;
  model.layers = layers;
  model.hidden = hidden;
  model.heads = 16;
  model.kv_heads = 4;
  model.head_dim = head_dim;
  model.vocab = 32768;
  model.experts = experts;
  model.experts_per_token = top_k;
  model.expert_hidden = expert_hidden;
  model.router.aux_scope = AuxLossScope::kMicrobatch;
  model.router.aux_coefficient = 0.01f;
  return model;
}

std::vector<Config> Configs() {
  return {{"A", Shape(16, 1024, 64, 32, 4, 512), 132.2e3, 181.8e3, 129.5e3, 24.0, 236e3, 327e3},
          {"B", Shape(8, 2048, 128, 64, 8, 1024), 69.6e3, 83.4e3, 69.6e3, 64.0, 108e3, 150e3},
          // A shape to try the program with, also on a CPU; no peers.
          {"tiny", Shape(2, 256, 16, 8, 2, 128), 0, 0, 0, 0, 0, 0}};
}

struct Flags {
  std::string device = "cuda";
  int ordinal = 0;
  std::vector<std::string> configs = {"A", "B"};
  std::vector<std::string> recipes = {"bf16", "fp8_blockwise", "fp8_flow"};
  std::int64_t sequence = 2048;
  std::int32_t sequences = 8;
  int steps = 10, warmup = 3;
  bool by_op = false, sqnr = false;
};

// ---------------------------------------------------------------- steps

class Runner {
 public:
  Runner(const Backend& backend, Transformer& model, const std::int32_t* tokens, std::int64_t count)
      : backend_(backend), model_(model), tokens_(tokens), count_(count) {}

  // Seconds to the end of the device's work.
  absl::StatusOr<double> Step(bool sqnr) {
    const double begin = Now();
    model_.BeginStep({.target_tokens = count_, .sample_sqnr = sqnr});
    const std::int32_t* batch = tokens_ + step_ % kBatches * 2 * count_;
    RETURN_IF_ERROR(model_.ForwardBackward(batch, batch + count_));
    ASSIGN_OR_RETURN(const PassResult pass, model_.FinishPass());
    loss_ = pass.loss_sum / static_cast<double>(pass.tokens);
    model_.ApplyOptimizer({.lr = 1e-4,
                           .t = ++step_,
                           .grad_factor = ClipFactor(pass.grad_norm_squared, 1.0),
                           .skip = pass.first_nonfinite != kNoNonfinite});
    RETURN_IF_ERROR(model_.EndStep(true));
    backend_.ops->synchronize(backend_.context);
    return Now() - begin;
  }
  double loss() const { return loss_; }

 private:
  const Backend backend_;
  Transformer& model_;
  const std::int32_t* const tokens_;
  const std::int64_t count_;
  std::int64_t step_ = 0;
  double loss_ = 0;
};

absl::Status BenchRecipe(const Config& config, const Flags& flags, const std::string& recipe,
                         Transformer& model, Runner& runner) {
  const auto kind = ParseRecipeKind(recipe);
  if (!kind.has_value()) {
    return InvalidArgumentError("unknown recipe " + recipe);
  }
  PrecisionPlan plan = BuildPlan(config.model.layers, DefaultRecipe(*kind), 0, {});
  plan.version = model.plan().version + 1;
  RETURN_IF_ERROR(model.SetPlan(plan));
  double first_loss = 0;
  for (int i = 0; i < flags.warmup; ++i) {
    RETURN_IF_ERROR(runner.Step(false).status());
    first_loss = i == 0 ? runner.loss() : first_loss;
  }
  std::vector<double> seconds;
  const Transformer::PhaseSeconds before = model.phase_seconds();
  for (int i = 0; i < flags.steps; ++i) {
    ASSIGN_OR_RETURN(const double one, runner.Step(flags.sqnr));
    seconds.push_back(one);
  }
  const Transformer::PhaseSeconds after = model.phase_seconds();
  std::nth_element(seconds.begin(), seconds.begin() + flags.steps / 2, seconds.end());
  const double median = seconds[static_cast<std::size_t>(flags.steps / 2)];
  const double speed = static_cast<double>(flags.sequence * flags.sequences) / median;
  const double flops = TrainFlopsPerToken(config.model, flags.sequence);
  const bool fp8 = recipe != "bf16" && recipe != "fp32";
  const double goal = fp8 ? config.goal_fp8 : config.goal_bf16;
  std::printf("%-6s %-14s %9.0f %6.1f%% %8.1f %9.2f %8.1f/%-8.1f %8.4f→%-8.4f", config.name,
              recipe.c_str(), speed, 100 * speed * flops / kPeakFlops,
              static_cast<double>(model.memory().total()) / kGiB, 1e3 * median,
              1e3 * (after.forward - before.forward) / flags.steps,
              1e3 * (after.backward - before.backward) / flags.steps, first_loss, runner.loss());
  if (goal > 0) {
    std::printf(" %5.2f %5.2f %5.2f", speed / config.compiled, speed / config.fp8, speed / goal);
  }
  std::printf("\n");
  if (flags.by_op) {
    by_op = true;
    op_times.clear();
    const absl::StatusOr<double> timed = runner.Step(false);
    by_op = false;
    RETURN_IF_ERROR(timed.status());
    PrintOpTimes();
  }
  std::fflush(stdout);
  return absl::OkStatus();
}

absl::Status BenchConfig(const Config& config, const Flags& flags, const Backend& backend) {
  const auto self = CreateSelfCommunicator();
  RunConfig run;
  run.sequence_length = flags.sequence;
  run.microbatch_sequences = flags.sequences;
  run.seed = 1;
  const std::int64_t count = run.tokens();
  const double begin = Now();
  Arena arena(backend, "tokens");
  auto* tokens = arena.Take<std::int32_t>(kBatches * 2 * count);
  if (tokens == nullptr) {
    return ResourceExhaustedError("no memory for tokens");
  }
  std::vector<std::int32_t> host(static_cast<std::size_t>(kBatches * 2 * count));
  std::mt19937 random(7);
  for (std::int32_t& token : host) {
    token = static_cast<std::int32_t>(random() % static_cast<unsigned>(config.model.vocab));
  }
  backend.ops->copy(
      backend.context,
      {.dst = tokens,
       .src = host.data(),
       .bytes = kBatches * 2 * count * 4,
       .kind = CopyKind::kToDevice});
  backend.ops->synchronize(backend.context);
  PrecisionPlan plan = BuildPlan(config.model.layers, DefaultRecipe(RecipeKind::kBf16), 0, {});
  ASSIGN_OR_RETURN(
      const std::unique_ptr<Transformer> model,
      Transformer::Create(
          {.model = config.model,
           .run = run,
           .optimizer = {},
           .backend = backend,
           .comms = {.world = self.get(), .expert_parallel = self.get(), .expert_data = self.get()},
           .plan = plan}));
  const double created = Now();
  model->InitializeParameters();
  backend.ops->synchronize(backend.context);
  const ParameterCounts parameters = CountParameters(config.model);
  const ModelMemory memory = model->memory();
  std::printf(
      "# %s: %.0f M parameters, %.0f M active; created in %.1f s, initialised in %.1f s; GiB: "
      "parameters %.1f, activations %.1f, workspace %.1f, precision %.1f\n",
      config.name, static_cast<double>(parameters.total) / 1e6,
      static_cast<double>(parameters.active) / 1e6, created - begin, Now() - created,
      static_cast<double>(memory.parameters) / kGiB, static_cast<double>(memory.activations) / kGiB,
      static_cast<double>(memory.workspace) / kGiB, static_cast<double>(memory.precision) / kGiB);
  Runner runner(backend, *model, tokens, count);
  for (const std::string& recipe : flags.recipes) {
    RETURN_IF_ERROR(BenchRecipe(config, flags, recipe, *model, runner));
  }
  if (config.compiled > 0) {
    std::printf(
        "%-6s PyTorch: eager BF16 %.1fk, compiled BF16 %.1fk tokens/s (%.1f GiB), FP8 "
        "%.1fk; goals: bf16 %.0fk, fp8_flow %.0fk\n",
        config.name, config.eager / 1e3, config.compiled / 1e3, config.gib, config.fp8 / 1e3,
        config.goal_bf16 / 1e3, config.goal_fp8 / 1e3);
  }
  return absl::OkStatus();
}

absl::Status Bench(const Flags& flags) {
  ASSIGN_OR_RETURN(const std::string facts, ProbeDevice(flags.device, flags.ordinal));
  std::printf("# device %s\n", facts.c_str());
  ASSIGN_OR_RETURN(const std::unique_ptr<LoadedBackend> loaded,
                   LoadedBackend::Open(flags.device, flags.ordinal));
  Backend backend = loaded->backend();
  backend.ops = TimedOps(backend.ops);
  std::printf("%-6s %-14s %9s %7s %8s %9s %17s %17s %5s %5s %5s\n", "config", "recipe", "tokens/s",
              "MFU", "GiB", "ms/step", "host fwd/bwd ms", "loss", "/bf16", "/fp8", "/goal");
  for (const Config& config : Configs()) {
    if (std::find(flags.configs.begin(), flags.configs.end(), config.name) != flags.configs.end()) {
      RETURN_IF_ERROR(BenchConfig(config, flags, backend));
    }
  }
  return absl::OkStatus();
}

int Main(int argc, char** argv) {
  Flags flags;
  CLI::App app{"tokens/s of training steps on a GPU beside PyTorch"};
  app.add_option("--device", flags.device, "cuda or cpu");
  app.add_option("--device-ordinal", flags.ordinal, "which device");
  app.add_option("--config", flags.configs, "A, B or tiny")->delimiter(',');
  app.add_option("--recipe", flags.recipes, "recipes to run")->delimiter(',');
  app.add_option("--sequence", flags.sequence, "tokens per sequence");
  app.add_option("--sequences", flags.sequences, "sequences per step");
  app.add_option("--steps", flags.steps, "timed steps")->check(CLI::PositiveNumber);
  app.add_option("--warmup", flags.warmup, "steps before them")->check(CLI::PositiveNumber);
  app.add_flag("--by-op", flags.by_op, "time one step operation by operation");
  app.add_flag("--sqnr", flags.sqnr, "sample SQNR in every timed step");
  CLI11_PARSE(app, argc, argv);
  const absl::Status status = Bench(flags);
  if (!status.ok()) {
    std::fprintf(stderr, "bench_train_step_gpu: %s\n", ToString(status).c_str());
  }
  return status.ok() ? 0 : 1;
}

}  // namespace
}  // namespace octavo

int main(int argc, char** argv) { return octavo::Main(argc, argv); }
