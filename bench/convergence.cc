// Does a recipe train as well as BF16? Validation loss of every recipe over perturbed initialisations.
//
//   bench_convergence [--data FILE.octd | --text FOLDER…] [--recipes …] [--inits 4] [--steps 600]
//                     [--jobs N] [--out FOLDER]
//
// Rule of NUMERICS 12: at step 300 and at the end the mean validation loss of a recipe differs from
// bf16's by at most max(0.25 %, two standard errors). The noise floor (bf16 against bf16: halves of
// its own runs) stands beside it. Same data order for all; initialisation i scales the initial
// weights by 1 + i·1e-6, which is enough to part the trajectories. Natural routing. Every run is one
// process (single-threaded); --jobs of them at a time. Results stay in --out and are not repeated.
#include <sys/wait.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/file.h"
#include "base/status.h"
#include "base/str.h"
#include "kernels/cpu/backend.h"
#include "kernels/cpu/blas.h"
#include "worker/comm/self.h"
#include "worker/data/build.h"
#include "worker/rank/training.h"

namespace octavo {
namespace {

constexpr std::int64_t kEarlyStep = 300;
constexpr double kPerturbation = 1e-6;
constexpr double kAllowedRelative = 0.0025;

struct Flags {
  std::string data, out = "convergence";
  std::vector<std::string> text = {"/usr/share/common-licenses", "/usr/include"};
  std::vector<std::string> recipes = {"bf16",          "fp8_delayed", "fp8_current",
                                      "fp8_blockwise", "fp8_flow",    "mxfp8"};
  int inits = 4, jobs = 2;
  std::int64_t steps = 600, hidden = 128, expert_hidden = 128, sequence = 128, sequences = 8;
  std::int32_t layers = 4, experts = 8, top_k = 2;
};

struct Result {
  double early = NAN, end = NAN;  // validation losses
};

class QuietHost final : public TrainingHost {
 public:
  RankWishes wishes() const override { return {}; }
  std::optional<PrecisionPlan> TakePlan() override { return std::nullopt; }
  bool TryReport(iv1::RankToWorker message) override {
    if (message.has_step() && message.step().has_validation()) {
      validation[message.step().step()] = message.step().validation_loss();
    }
    return true;
  }
  void Deliver(iv1::RankToWorker message) override { TryReport(std::move(message)); }
  std::map<std::int64_t, double> validation;
};

absl::StatusOr<Result> RunOne(const Flags& flags, RecipeKind kind, int init) {
  TrainingConfig config;
  config.job_name = StrCat(Name(kind), "-", init);
  config.model = {.layers = flags.layers,
                  .hidden = flags.hidden,
                  .heads = 4,
                  .kv_heads = 2,
                  .head_dim = static_cast<std::int32_t>(flags.hidden / 4),
                  .vocab = 256,
                  .init_std = static_cast<float>(0.02 * (1 + kPerturbation * init)),
                  .experts = flags.experts,
                  .experts_per_token = flags.top_k,
                  .expert_hidden = flags.expert_hidden};
  config.model.router.aux_coefficient = 0.01f;
  config.run.sequence_length = flags.sequence;
  config.run.microbatch_sequences = static_cast<std::int32_t>(flags.sequences);
  config.run.allow_emulation = true;
  config.run.seed = 1;
  config.steps = flags.steps;
  config.schedule = {.decay = LrDecay::kCosine,
                     .peak = 3e-3,
                     .final = 3e-4,
                     .warmup_steps = 30,
                     .total_steps = flags.steps};
  config.data.path = flags.data;
  config.validation_interval = kEarlyStep;
  config.validation_batches = 64;
  PrecisionPlan plan = BuildPlan(flags.layers, DefaultRecipe(kind), 1, {});
  Backend backend = CreateCpuBackend();
  const auto self = CreateSelfCommunicator();
  QuietHost host;
  const TrainingOutcome outcome = RunTraining(
      {.config = config,
       .plan = plan,
       .backend = backend,
       .comms = {.world = self.get(), .expert_parallel = self.get(), .expert_data = self.get()},
       .host = &host,
       .fs = &PosixFileSystem::Get()});
  DestroyCpuBackend(&backend);
  if (!outcome.ok()) {
    return InternalError(StrCat(config.job_name, ": ", outcome.message));
  }
  Result result;
  result.end = outcome.validation_loss;
  const auto early = host.validation.find(kEarlyStep);
  if (early != host.validation.end()) {
    result.early = early->second;
  }
  return result;
}

std::string ResultPath(const Flags& flags, const std::string& recipe, int init) {
  return JoinPath(flags.out, StrCat(recipe, "-", init, ".json"));
}

// Runs what is missing, --jobs processes at a time.
absl::Status RunAll(const Flags& flags) {
  PosixFileSystem& fs = PosixFileSystem::Get();
  std::vector<std::pair<std::string, int>> missing;
  for (int init = 0; init < flags.inits; ++init) {
    for (const std::string& recipe : flags.recipes) {
      if (!fs.Exists(ResultPath(flags, recipe, init))) {
        missing.emplace_back(recipe, init);
      }
    }
  }
  const std::size_t total = missing.size();
  std::size_t next = 0, done = 0;
  int running = 0;
  while (done < total) {
    while (running < flags.jobs && next < total) {
      const auto [recipe, init] = missing[next++];
      const std::optional<RecipeKind> kind = ParseRecipeKind(recipe);
      if (!kind.has_value()) {
        return InvalidArgumentError(StrCat("--recipes: found \"", recipe, "\"; valid: ",
                                           StrJoin(RecipeKindNames(), ", ")));
      }
      const pid_t child = fork();
      if (child == 0) {
        const absl::StatusOr<Result> result = RunOne(flags, *kind, init);
        if (!result.ok()) {
          std::fprintf(stderr, "%s\n", ToString(result.status()).c_str());
          _exit(1);
        }
        const nlohmann::json j = {{"early", result->early}, {"end", result->end}};
        _exit(fs.WriteFileAtomic(ResultPath(flags, recipe, init), j.dump()).ok() ? 0 : 1);
      }
      ++running;
    }
    int status = 0;
    if (wait(&status) < 0) {
      return InternalError("waiting for a run failed");
    }
    --running;
    ++done;
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
      return InternalError("a run failed; its message is above");
    }
    std::fprintf(stderr, "%zu of %zu runs\n", done, total);
  }
  return absl::OkStatus();
}

struct Summary {
  double mean = 0, standard_error = 0;
};
Summary Summarise(const std::vector<double>& values) {
  Summary s;
  for (double v : values) {
    s.mean += v;
  }
  s.mean /= static_cast<double>(values.size());
  double squares = 0;
  for (double v : values) {
    squares += (v - s.mean) * (v - s.mean);
  }
  if (values.size() > 1) {
    const double n = static_cast<double>(values.size());
    s.standard_error = std::sqrt(squares / (n - 1) / n);
  }
  return s;
}

absl::Status PrintTable(const Flags& flags) {
  std::map<std::string, std::vector<double>> early, end;
  for (const std::string& recipe : flags.recipes) {
    for (int init = 0; init < flags.inits; ++init) {
      ASSIGN_OR_RETURN(const std::string text,
                       PosixFileSystem::Get().ReadFile(ResultPath(flags, recipe, init)));
      const nlohmann::json j = nlohmann::json::parse(text, nullptr, false);
      if (j.is_discarded()) {
        return DataLossError(StrCat(ResultPath(flags, recipe, init), " is damaged; remove it"));
      }
      early[recipe].push_back(j["early"].is_number() ? j["early"].get<double>() : NAN);
      end[recipe].push_back(j["end"].get<double>());
    }
  }
  std::printf("\n%lld steps of %lld tokens, %d layers (first and last bf16), hidden %lld, %d experts top-%d, "
              "%d initialisations\n",
              static_cast<long long>(flags.steps),
              static_cast<long long>(flags.sequence * flags.sequences), flags.layers,
              static_cast<long long>(flags.hidden), flags.experts, flags.top_k, flags.inits);
  std::printf("%-14s %10s %9s %9s %7s   %10s %9s %9s %7s\n", "recipe", "loss@300", "vs bf16",
              "allowed", "", "loss@end", "vs bf16", "allowed", "");
  bool all = true;
  const auto cell = [&](const Summary& base, const Summary& s) {
    const double difference = s.mean / base.mean - 1;
    const double errors =
        2 * std::sqrt(base.standard_error * base.standard_error +
                      s.standard_error * s.standard_error) / base.mean;
    const double allowed = std::max(kAllowedRelative, errors);
    const bool ok = std::fabs(difference) <= allowed;
    all = all && ok;
    std::printf(" %10.4f %+8.3f%% %8.3f%% %7s  ", s.mean, 100 * difference, 100 * allowed,
                ok ? "ok" : "OUTSIDE");
  };
  for (const std::string& recipe : flags.recipes) {
    std::printf("%-14s", recipe.c_str());
    cell(Summarise(early["bf16"]), Summarise(early[recipe]));
    cell(Summarise(end["bf16"]), Summarise(end[recipe]));
    std::printf("\n");
  }
  const auto spread = [](const std::vector<double>& v) {
    const auto [low, high] = std::minmax_element(v.begin(), v.end());
    return 100 * (*high - *low) / Summarise(v).mean;
  };
  std::printf("noise floor: bf16 runs that differ by 1e-6 in their weights spread by %.3f%% at 300, "
              "%.3f%% at the end\n",
              spread(early["bf16"]), spread(end["bf16"]));
  return all ? absl::OkStatus() : FailedPreconditionError("a recipe is outside what is allowed");
}

int Main(int argc, char** argv) {
  MaybeRunBlasProbe(argc, argv);
  EnsureBlasCoreType(argv);
  Flags flags;
  CLI::App app{"validation loss of every recipe beside bf16's"};
  app.add_option("--data", flags.data, "byte dataset (octavo data build), 8 MB or more");
  app.add_option("--text", flags.text, "files or folders to make one from, when --data is absent");
  app.add_option("--recipes", flags.recipes, "recipes; bf16 must be among them");
  app.add_option("--inits", flags.inits, "perturbed initialisations of each");
  app.add_option("--jobs", flags.jobs, "runs at a time, one core each");
  app.add_option("--steps", flags.steps, "steps");
  app.add_option("--layers", flags.layers, "layers");
  app.add_option("--hidden", flags.hidden, "hidden size");
  app.add_option("--expert-hidden", flags.expert_hidden, "hidden size of an expert");
  app.add_option("--sequence", flags.sequence, "tokens per sequence");
  app.add_option("--sequences", flags.sequences, "sequences per step");
  app.add_option("--out", flags.out, "folder of results");
  CLI11_PARSE(app, argc, argv);
  PosixFileSystem& fs = PosixFileSystem::Get();
  absl::Status status = fs.CreateDirectories(flags.out);
  if (status.ok() && flags.data.empty()) {
    flags.data = JoinPath(flags.out, "text.octd");
    if (!fs.Exists(flags.data)) {
      const absl::StatusOr<BuildSummary> built =
          BuildByteDataset(fs, {.inputs = flags.text, .output = flags.data, .max_bytes = 24 << 20});
      status = built.status();
    }
  }
  if (status.ok()) {
    status = RunAll(flags);
  }
  if (status.ok()) {
    status = PrintTable(flags);
  }
  if (!status.ok()) {
    std::fprintf(stderr, "bench_convergence: %s\n", ToString(status).c_str());
  }
  return status.ok() ? 0 : 1;
}

}  // namespace
}  // namespace octavo

int main(int argc, char** argv) { return octavo::Main(argc, argv); }
