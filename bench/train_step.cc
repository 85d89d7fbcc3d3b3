// Tokens per second of whole training steps on the CPU backend, beside the floor: the model's FLOPs
// over the measured sgemm rate of the fastest OpenBLAS kernels.
//
//   bench_train_step [--recipe bf16|fp8_flow|…] [--steps N] [--layers N] [--hidden N] …
//
// The step is the rank's own (worker/rank/training.h): data, forward, backward, control vector,
// AdamW, telemetry. One rank, no checkpoints. The floor counts the model's FLOPs (6 × active
// parameters + attention) and nothing that training has to do besides; 100 % is not attainable.
#include <time.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "base/file.h"
#include "base/status.h"
#include "kernels/cpu/backend.h"
#include "kernels/cpu/blas.h"
#include "worker/comm/self.h"
#include "worker/data/dataset_writer.h"
#include "worker/rank/training.h"

namespace octavo {
namespace {

// Processor time of this process. Ranks are single-threaded, so on an idle machine it is the time
// on the clock; on a busy one it does not count the others.
double CpuSeconds() {
  timespec now{};
  ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

class CollectingHost final : public TrainingHost {
 public:
  RankWishes wishes() const override { return {}; }
  std::optional<PrecisionPlan> TakePlan() override { return std::nullopt; }
  bool TryReport(iv1::RankToWorker message) override {
    if (message.has_step()) {
      steps.push_back(message.step());
      const double now = CpuSeconds();
      cpu_seconds.push_back(now - std::exchange(before_, now));
    }
    return true;
  }
  void Deliver(iv1::RankToWorker message) override { TryReport(std::move(message)); }

  std::vector<iv1::StepReport> steps;
  std::vector<double> cpu_seconds;  // of each step; the first one's includes the start

 private:
  double before_ = CpuSeconds();
};

// Best of several products of the size that the model's own are about: [m, k] × [k, n].
double SgemmRate(std::int64_t m, std::int64_t n, std::int64_t k) {
  std::vector<float> a(static_cast<std::size_t>(m * k), 0.5f),
      b(static_cast<std::size_t>(k * n), 0.25f), c(static_cast<std::size_t>(m * n));
  double best = 0;
  for (int i = 0; i < 8; ++i) {
    const double begin = CpuSeconds();
    Sgemm({.m = m,
           .n = n,
           .k = k,
           .a = a.data(),
           .a_transposed = Transposed::kNo,
           .lda = k,
           .b = b.data(),
           .b_transposed = Transposed::kNo,
           .ldb = n,
           .c = c.data(),
           .ldc = n,
           .beta = 0});
    const double seconds = CpuSeconds() - begin;
    best = std::max(best, 2.0 * static_cast<double>(m * n) * static_cast<double>(k) / seconds);
  }
  return best;
}

absl::Status WriteData(const std::string& path) {
  ASSIGN_OR_RETURN(auto writer, DatasetWriter::Create(PosixFileSystem::Get(), path, 1, 256));
  std::string text;
  std::uint32_t state = 1;
  for (int i = 0; i < 1 << 20; ++i) {
    state = state * 1664525u + 1013904223u;
    text += static_cast<char>("etaoin shrdlu"[state >> 28 & 7] + (state >> 20 & 3));
  }
  RETURN_IF_ERROR(writer->AppendBytes(text));
  return writer->Finish();
}

struct Flags {
  std::vector<std::string> recipes = {"bf16", "fp8_flow"};
  std::int64_t steps = 6, sequence = 256, sequences = 4, hidden = 256, expert_hidden = 512;
  std::int32_t layers = 4, experts = 8, top_k = 2;
};

absl::Status Bench(const Flags& flags) {
  char folder[] = "/tmp/octavo_bench.XXXXXX";
  if (::mkdtemp(folder) == nullptr) {
    return ErrnoStatus(errno, "making a temporary folder");
  }
  const std::string data = JoinPath(folder, "data");
  RETURN_IF_ERROR(WriteData(data));
  TrainingConfig config;
  config.model = {.layers = flags.layers,
                  .hidden = flags.hidden,
                  .heads = static_cast<std::int32_t>(flags.hidden / 64),
                  .kv_heads = static_cast<std::int32_t>(flags.hidden / 64),
                  .head_dim = 64,
                  .vocab = 256,
                  .experts = flags.experts,
                  .experts_per_token = flags.top_k,
                  .expert_hidden = flags.expert_hidden};
  config.run.sequence_length = flags.sequence;
  config.run.microbatch_sequences = static_cast<std::int32_t>(flags.sequences);
  config.run.allow_emulation = true;
  config.steps = flags.steps;
  config.schedule = {.decay = LrDecay::kConstant, .peak = 1e-3};
  config.data.path = data;

  const std::int64_t tokens = config.step_tokens();
  const double rate = SgemmRate(tokens, flags.expert_hidden, flags.hidden);
  const double flops = TrainFlopsPerToken(config.model, flags.sequence);
  const double floor = rate / flops;  // tokens/s
  std::printf("model: %d layers, hidden %lld, %d experts of %lld, top-%d; %lld tokens a step\n",
              flags.layers, static_cast<long long>(flags.hidden), flags.experts,
              static_cast<long long>(flags.expert_hidden), flags.top_k,
              static_cast<long long>(tokens));
  std::printf(
      "sgemm: %.1f GFLOP/s (%s kernels, one thread); %.2f MFLOP a token; floor %.0f tokens/s\n",
      rate / 1e9, BlasCoreType(), flops / 1e6, floor);
  std::printf("%-14s %10s %9s %10s %9s %9s %9s\n", "recipe", "tokens/s", "of floor", "on clock",
              "forward", "backward", "optimizer");
  for (const std::string& name : flags.recipes) {
    const auto kind = ParseRecipeKind(name);
    if (!kind.has_value()) {
      return InvalidArgumentError("unknown recipe " + name);
    }
    config.run.fp32 = *kind == RecipeKind::kFp32;
    PrecisionPlan plan = BuildPlan(flags.layers, DefaultRecipe(*kind), 0, {});
    plan.version = 1;
    Backend backend = CreateCpuBackend();
    const auto self = CreateSelfCommunicator();
    CollectingHost host;
    const TrainingOutcome outcome = RunTraining(
        {.config = config,
         .plan = plan,
         .backend = backend,
         .comms = {.world = self.get(), .expert_parallel = self.get(), .expert_data = self.get()},
         .host = &host,
         .fs = &PosixFileSystem::Get()});
    DestroyCpuBackend(&backend);
    if (!outcome.ok()) {
      return InternalError(outcome.message);
    }
    // The fastest step: caches and page faults can only slow one down.
    const auto best = std::min_element(host.cpu_seconds.begin(), host.cpu_seconds.end());
    const iv1::StepReport& report =
        host.steps[static_cast<std::size_t>(best - host.cpu_seconds.begin())];
    const double speed = static_cast<double>(tokens) / *best;
    std::printf("%-14s %10.0f %8.1f%% %10.0f %7.1fms %7.1fms %7.1fms\n", name.c_str(), speed,
                100 * speed / floor, static_cast<double>(tokens) / report.step_seconds(),
                1e3 * report.phase_forward_seconds(), 1e3 * report.phase_backward_seconds(),
                1e3 * report.phase_optimizer_seconds());
  }
  return PosixFileSystem::Get().RemoveTree(folder);
}

int Main(int argc, char** argv) {
  MaybeRunBlasProbe(argc, argv);
  EnsureBlasCoreType(argv);
  Flags flags;
  CLI::App app{"tokens/s of training steps on the CPU beside the sgemm floor"};
  app.add_option("--recipe", flags.recipes, "recipes to run");
  app.add_option("--steps", flags.steps, "steps of each");
  app.add_option("--sequence", flags.sequence, "tokens per sequence");
  app.add_option("--sequences", flags.sequences, "sequences per step");
  app.add_option("--hidden", flags.hidden, "hidden size");
  app.add_option("--expert-hidden", flags.expert_hidden, "hidden size of an expert");
  app.add_option("--layers", flags.layers, "layers");
  app.add_option("--experts", flags.experts, "experts");
  app.add_option("--top-k", flags.top_k, "experts per token");
  CLI11_PARSE(app, argc, argv);
  const absl::Status status = Bench(flags);
  if (!status.ok()) {
    std::fprintf(stderr, "bench_train_step: %s\n", ToString(status).c_str());
  }
  return status.ok() ? 0 : 1;
}

}  // namespace
}  // namespace octavo

int main(int argc, char** argv) { return octavo::Main(argc, argv); }
