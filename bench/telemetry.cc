// Cost of statistics and reporting on the CPU: blocks of steps with and without, in turn, in one
// run.
//
//   bench_telemetry [--steps 200] [--blocks 3] [--recipe fp8_flow] [--interval 10] [--sqnr 50]
//
// With: SQNR sampled, slots merged every pass, a snapshot built and serialised every interval, a
// step report every step. Without: none of these. The counters inside the casting kernels stay on
// in both, because the step guard (non-finite values) and delayed scaling need them; bench_ops_cpu
// shows the casts. Processor time, so a busy machine does not count. Fails above 3 %.
#include <time.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "base/status.h"
#include "kernels/cpu/backend.h"
#include "kernels/cpu/blas.h"
#include "worker/comm/self.h"
#include "worker/rank/reporter.h"

namespace octavo {
namespace {

constexpr double kLimitPercent = 3;

double CpuSeconds() {
  timespec now{};
  ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// Serialises, as the writer of a session does.
class SerialisingHost final : public TrainingHost {
 public:
  RankWishes wishes() const override { return {}; }
  std::optional<PrecisionPlan> TakePlan() override { return std::nullopt; }
  bool TryReport(iv1::RankToWorker message) override {
    bytes += static_cast<std::int64_t>(message.SerializeAsString().size());
    return true;
  }
  void Deliver(iv1::RankToWorker message) override { TryReport(std::move(message)); }
  std::int64_t bytes = 0;
};

struct Flags {
  std::string recipe = "fp8_flow";
  std::int64_t steps = 200, interval = 10, sqnr = 50;
  int blocks = 3;
};

absl::Status Bench(const Flags& flags, double* percent) {
  const auto kind = ParseRecipeKind(flags.recipe);
  if (!kind.has_value()) {
    return InvalidArgumentError("unknown recipe " + flags.recipe);
  }
  ModelConfig model{.layers = 4,
                    .hidden = 256,
                    .heads = 4,
                    .kv_heads = 4,
                    .head_dim = 64,
                    .vocab = 256,
                    .experts = 8,
                    .experts_per_token = 2,
                    .expert_hidden = 256};
  RunConfig run;
  run.sequence_length = 128;
  run.microbatch_sequences = 2;
  run.microbatches = 1;
  PrecisionPlan plan = BuildPlan(model.layers, DefaultRecipe(*kind), 0, {});
  plan.version = 1;
  Backend backend = CreateCpuBackend();
  const auto self = CreateSelfCommunicator();
  ASSIGN_OR_RETURN(
      const std::unique_ptr<Transformer> transformer,
      Transformer::Create(
          {.model = model,
           .run = run,
           .backend = backend,
           .comms = {.world = self.get(), .expert_parallel = self.get(), .expert_data = self.get()},
           .plan = plan}));
  transformer->InitializeParameters();
  const std::int64_t tokens = run.tokens();
  std::vector<std::int32_t> inputs(static_cast<std::size_t>(tokens)), targets(inputs.size());
  SerialisingHost host;
  Reporter reporter(host, {self.get()}, 0, {});
  std::uint32_t random = 1;
  std::int64_t t = 0;
  const auto step = [&](bool with, std::int64_t index) -> absl::Status {
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      random = random * 1664525u + 1013904223u;
      inputs[i] = static_cast<std::int32_t>(random >> 24);
      targets[i] = (inputs[i] + 1) % 256;
    }
    const bool sample = with && (index + 1) % flags.sqnr == 0;
    transformer->BeginStep({.target_tokens = tokens, .sample_sqnr = sample});
    RETURN_IF_ERROR(transformer->ForwardBackward(inputs.data(), targets.data(), tokens));
    ASSIGN_OR_RETURN(const PassResult pass, transformer->FinishPass());
    if (with) {
      reporter.AddPass(*transformer, false);
    }
    transformer->ApplyOptimizer({.lr = 1e-3, .t = ++t});
    RETURN_IF_ERROR(transformer->EndStep(true));
    if (with) {
      if (sample) {
        reporter.AddSample(*transformer);
      }
      iv1::StepReport report;
      report.set_step(index + 1);
      report.set_loss(pass.loss_sum / static_cast<double>(pass.tokens));
      reporter.ReportStep(report);
      if ((index + 1) % flags.interval == 0) {
        reporter.Snapshot(*transformer,
                          {.first_step = index + 2 - flags.interval, .last_step = index + 1});
      }
    }
    return absl::OkStatus();
  };
  for (int i = 0; i < 5; ++i) {
    RETURN_IF_ERROR(step(true, i));  // caches and first touches
  }
  std::vector<double> seconds[2];  // of each step, by with
  std::printf(
      "1 rank, %lld layers, hidden %lld, %lld experts, %lld tokens a step; blocks of %lld steps; "
      "processor time of a step\n"
      "with: SQNR of every quantised tensor each %lld steps, slots merged every pass, a step "
      "report "
      "every step,\n      a snapshot built and serialised each %lld steps; without: none of these\n"
      "in both: the counters inside the casting kernels (step guard and delayed scaling need "
      "them)\n",
      static_cast<long long>(model.layers), static_cast<long long>(model.hidden),
      static_cast<long long>(model.experts), static_cast<long long>(tokens),
      static_cast<long long>(flags.steps), static_cast<long long>(flags.sqnr),
      static_cast<long long>(flags.interval));
  std::printf("%-8s %12s %12s %8s\n", "block", "without", "with", "cost");
  for (int block = 0; block < flags.blocks; ++block) {
    double sum[2] = {};
    for (const bool with : {false, true}) {
      for (std::int64_t i = 0; i < flags.steps; ++i) {
        const double begin = CpuSeconds();
        RETURN_IF_ERROR(step(with, i));
        seconds[with ? 1 : 0].push_back(CpuSeconds() - begin);
        sum[with ? 1 : 0] += seconds[with ? 1 : 0].back();
      }
    }
    std::printf("%-8d %9.3f ms %9.3f ms %6.2f %%\n", block + 1,
                1e3 * sum[0] / static_cast<double>(flags.steps),
                1e3 * sum[1] / static_cast<double>(flags.steps), 100 * (sum[1] / sum[0] - 1));
  }
  double mean[2] = {};
  for (int with = 0; with < 2; ++with) {
    for (double s : seconds[with]) {
      mean[with] += s / static_cast<double>(seconds[with].size());
    }
  }
  *percent = 100 * (mean[1] / mean[0] - 1);
  std::printf("%s: statistics and reporting cost %.2f %% (limit %.0f %%); %lld bytes reported\n",
              flags.recipe.c_str(), *percent, kLimitPercent, static_cast<long long>(host.bytes));
  DestroyCpuBackend(&backend);
  return absl::OkStatus();
}

int Main(int argc, char** argv) {
  MaybeRunBlasProbe(argc, argv);
  EnsureBlasCoreType(argv);
  Flags flags;
  CLI::App app{"cost of statistics and reporting, in blocks with and without"};
  app.add_option("--recipe", flags.recipe, "recipe of all layers");
  app.add_option("--steps", flags.steps, "steps of a block");
  app.add_option("--blocks", flags.blocks, "pairs of blocks");
  app.add_option("--interval", flags.interval, "steps of a snapshot");
  app.add_option("--sqnr", flags.sqnr, "steps between SQNR samples");
  CLI11_PARSE(app, argc, argv);
  double percent = 0;
  const absl::Status status = Bench(flags, &percent);
  if (!status.ok()) {
    std::fprintf(stderr, "bench_telemetry: %s\n", ToString(status).c_str());
    return 1;
  }
  return percent <= kLimitPercent ? 0 : 1;
}

}  // namespace
}  // namespace octavo

int main(int argc, char** argv) { return octavo::Main(argc, argv); }
