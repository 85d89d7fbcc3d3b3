// Does a recipe train as well as BF16? Validation loss of every recipe over perturbed
// initialisations.
//
//   bench_convergence [--data FILE.octd | --text FOLDER…] [--recipes …] [--inits 12] [--steps 360]
//                     [--jobs N] [--deadline SECONDS] [--out FOLDER]
//
// Rule of NUMERICS 12: at step 300 and at the end the mean validation loss of a recipe differs from
// bf16's by at most max(0.25 %, two standard errors). The noise floor (bf16 against bf16: halves of
// its own runs) and fp32 stand beside it.
//
// What makes the table mean something:
//  - Initialisation i multiplies every initial weight by 1 + perturbation·noise(i, weight), with
//    noise of the size of FP8's own rounding (1/32), so that bf16 runs lie as far apart from the
//    first step on as a recipe does from bf16. (With 1e-6 they part within 20 to 40 steps.)
//  - Validation text is taken in blocks from all over the data. A tail would be one or two files
//    that are like nothing in training, and how a run fares there is luck.
//  - The rate decays to zero and most of it is gone at step 300, so losses are those of settled
//    weights. Its peak is half of where runs begin to scatter: at 2e-3 the losses of bf16 runs have
//    a standard deviation of 0.8 %, at 1e-3 of 0.13 %.
//  - Same data order for all; natural routing.
// Every run is one process (single-threaded); --jobs of them at a time, initialisation by
// initialisation, so that all recipes progress evenly. bf16, which every comparison shares, gets
// twice as many runs. Results stay in --out and are not repeated. With --deadline no run begins
// that would not end in time, and the table is of what is there.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
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
#include "bench/convergence_stats.h"
#include "bench/process_sweep.h"
#include "kernels/cpu/backend.h"
#include "kernels/cpu/blas.h"
#include "worker/comm/self.h"
#include "worker/data/build.h"
#include "worker/data/dataset_writer.h"
#include "worker/data/token_dataset.h"
#include "worker/rank/training.h"

namespace octavo {
namespace {

using Steady = std::chrono::steady_clock;

constexpr std::int64_t kEarlyStep = 300;
constexpr std::int64_t kValidationBlock = 1024;  // tokens in a row
constexpr std::int64_t kTrainBucket = 20;        // steps whose training losses are averaged

struct Flags {
  std::string data, out = "convergence";
  std::vector<std::string> text = {"/usr/share/common-licenses", "/usr/include"};
  std::vector<std::string> recipes = {"bf16",          "fp32",     "fp8_delayed", "fp8_current",
                                      "fp8_blockwise", "fp8_flow", "mxfp8"};
  int inits = 12, jobs = 2;
  double deadline = 0, peak = 1e-3, perturbation = 1.0 / 32;
  std::int64_t steps = 360, hidden = 128, expert_hidden = 128, sequence = 128, sequences = 12;
  std::int64_t validation_tokens = 128 << 10;
  std::int32_t layers = 4, experts = 8, top_k = 2;

  std::string train_path() const { return JoinPath(out, "train.octd"); }
  std::string validation_path() const { return JoinPath(out, "validation.octd"); }
  // What the results depend on; results of other settings are not mixed in.
  std::string Fingerprint() const {
    return StrCat("layers ", layers, ", hidden ", hidden, ", experts ", experts, " top-", top_k,
                  " of ", expert_hidden, ", batch ", sequences, "x", sequence, ", steps ", steps,
                  ", peak ", peak, ", perturbation ", perturbation, ", validation ",
                  validation_tokens);
  }
};

struct Run {
  std::string recipe;
  RecipeKind kind;
  int init;
};

struct Result {
  double early = NAN, end = NAN;  // validation losses
  double seconds = 0;
  std::vector<double> train;  // means of kTrainBucket steps
};

class QuietHost final : public TrainingHost {
 public:
  RankWishes wishes() const override { return {}; }
  std::optional<PrecisionPlan> TakePlan() override { return std::nullopt; }
  bool TryReport(iv1::RankToWorker message) override {
    if (message.has_step()) {
      losses.push_back(message.step().loss());
      if (message.step().has_validation()) {
        validation[message.step().step()] = message.step().validation_loss();
      }
    }
    return true;
  }
  void Deliver(iv1::RankToWorker message) override { TryReport(std::move(message)); }
  std::map<std::int64_t, double> validation;
  std::vector<double> losses;
};

// The CPU backend's device memory is host memory.
void Perturb(double perturbation, int init, Transformer& model) {
  for (Parameter& parameter : model.parameters().all()) {
    for (std::int64_t i = 0; parameter.init_std > 0 && i < parameter.count; ++i) {
      const float noise = InitialNormal(1000 + static_cast<std::uint64_t>(init), parameter.name, i);
      parameter.master[i] *= 1.0f + static_cast<float>(perturbation) * noise;
    }
  }
  model.ParametersLoaded();
}

absl::StatusOr<Result> RunOne(const Flags& flags, const Run& run) {
  const auto begin = Steady::now();
  TrainingConfig config;
  config.job_name = StrCat(run.recipe, "-", run.init);
  config.model = {.layers = flags.layers,
                  .hidden = flags.hidden,
                  .heads = 4,
                  .kv_heads = 2,
                  .head_dim = static_cast<std::int32_t>(flags.hidden / 4),
                  .vocab = 256,
                  .experts = flags.experts,
                  .experts_per_token = flags.top_k,
                  .expert_hidden = flags.expert_hidden};
  config.model.router.aux_coefficient = 0.01f;
  config.run.sequence_length = flags.sequence;
  config.run.microbatch_sequences = static_cast<std::int32_t>(flags.sequences);
  config.run.allow_emulation = true;
  config.run.fp32 = run.kind == RecipeKind::kFp32;
  config.run.seed = 1;
  config.steps = flags.steps;
  config.schedule = {.decay = LrDecay::kCosine,
                     .peak = flags.peak,
                     .final = 0,
                     .warmup_steps = 30,
                     .total_steps = flags.steps};
  config.data.path = flags.train_path();
  config.data.validation_path = flags.validation_path();
  config.validation_interval = kEarlyStep;
  config.validation_batches =
      static_cast<std::int32_t>(flags.validation_tokens / (flags.sequence * flags.sequences));
  PrecisionPlan plan = BuildPlan(flags.layers, DefaultRecipe(run.kind), 1, {});
  Backend backend = CreateCpuBackend();
  const auto self = CreateSelfCommunicator();
  QuietHost host;
  const TrainingOutcome outcome = RunTraining(
      {.config = config,
       .plan = plan,
       .backend = backend,
       .comms = {.world = self.get(), .expert_parallel = self.get(), .expert_data = self.get()},
       .host = &host,
       .fs = &PosixFileSystem::Get(),
       .hooks = {.before_pass = [&](std::int64_t step, int pass, Transformer& model) {
         if (step == 1 && pass == 0) {
           Perturb(flags.perturbation, run.init, model);
         }
       }}});
  DestroyCpuBackend(&backend);
  if (!outcome.ok()) {
    return InternalError(StrCat(config.job_name, ": ", outcome.message));
  }
  Result result{.end = outcome.validation_loss,
                .seconds = std::chrono::duration<double>(Steady::now() - begin).count()};
  const auto early = host.validation.find(kEarlyStep);
  if (early != host.validation.end()) {
    result.early = early->second;
  }
  for (std::size_t i = 0; i + kTrainBucket <= host.losses.size(); i += kTrainBucket) {
    result.train.push_back(
        Summarise(std::span<const double>(host.losses).subspan(i, kTrainBucket)).mean);
  }
  return result;
}

std::string ResultPath(const Flags& flags, const std::string& recipe, int init) {
  return JoinPath(flags.out, StrCat(recipe, "-", init, ".json"));
}

absl::Status WriteResult(const Flags& flags, const Run& run, const Result& result) {
  const nlohmann::json j = {{"settings", flags.Fingerprint()},
                            {"early", result.early},
                            {"end", result.end},
                            {"seconds", result.seconds},
                            {"train", result.train}};
  return PosixFileSystem::Get().WriteFileAtomic(ResultPath(flags, run.recipe, run.init), j.dump());
}

// Nullopt when there is none yet.
absl::StatusOr<std::optional<Result>> ReadResult(const Flags& flags, const std::string& recipe,
                                                 int init) {
  const std::string path = ResultPath(flags, recipe, init);
  if (!PosixFileSystem::Get().Exists(path)) {
    return std::optional<Result>();
  }
  ASSIGN_OR_RETURN(const std::string text, PosixFileSystem::Get().ReadFile(path));
  const nlohmann::json j = nlohmann::json::parse(text, nullptr, false);
  if (!j.is_object() || !j.contains("early") || !j.contains("end")) {
    return DataLossError(StrCat(path, " is damaged; remove it"));
  }
  const std::string settings = j.value("settings", "");
  if (settings != flags.Fingerprint()) {
    return FailedPreconditionError(StrCat(path, " is of other settings (", settings, "), not of (",
                                          flags.Fingerprint(), "); choose another --out"));
  }
  const auto number = [](const nlohmann::json& v) { return v.is_number() ? v.get<double>() : NAN; };
  return std::optional<Result>(Result{.early = number(j["early"]),  // null: NaN, or not reached
                                      .end = number(j["end"]),
                                      .seconds = j.value("seconds", 0.0)});
}

// Blocks from all over the data for validation, the rest for training.
absl::Status SplitData(const Flags& flags) {
  PosixFileSystem& fs = PosixFileSystem::Get();
  if (fs.Exists(flags.train_path()) && fs.Exists(flags.validation_path())) {
    return absl::OkStatus();
  }
  std::string source = flags.data;
  if (source.empty()) {
    source = JoinPath(flags.out, "text.octd");
    if (!fs.Exists(source)) {
      RETURN_IF_ERROR(
          BuildByteDataset(fs, {.inputs = flags.text, .output = source, .max_bytes = 24 << 20})
              .status());
    }
  }
  ASSIGN_OR_RETURN(const auto dataset, OpenTokenDataset(fs, source));
  const std::int64_t blocks = dataset->token_count() / kValidationBlock;
  // One block more than asked for: a sequence has a target one token further.
  const std::int64_t held_out = flags.validation_tokens / kValidationBlock + 1;
  if (blocks < 10 * held_out) {
    return InvalidArgumentError(StrCat(source, " has ", dataset->token_count(), " tokens; ",
                                       flags.validation_tokens,
                                       " of validation need ten times as many"));
  }
  ASSIGN_OR_RETURN(const auto train, DatasetWriter::Create(fs, flags.train_path(), 1, 256));
  ASSIGN_OR_RETURN(const auto validation,
                   DatasetWriter::Create(fs, flags.validation_path(), 1, 256));
  std::vector<std::int32_t> tokens(kValidationBlock);
  for (std::int64_t b = 0; b < blocks; ++b) {
    RETURN_IF_ERROR(dataset->Read(b * kValidationBlock, tokens));
    // Evenly spread: block b where b·held_out passes a multiple of the number of blocks.
    const bool out = (b + 1) * held_out / blocks > b * held_out / blocks;
    RETURN_IF_ERROR((out ? validation : train)->Append(tokens));
  }
  train->EndDocument();
  validation->EndDocument();
  RETURN_IF_ERROR(validation->Finish());
  return train->Finish();
}

// All runs, the first ones first. bf16 comes twice per initialisation of the others.
absl::StatusOr<std::vector<Run>> AllRuns(const Flags& flags) {
  std::vector<Run> runs;
  for (int init = 0; init < flags.inits; ++init) {
    for (const std::string& recipe : flags.recipes) {
      const std::optional<RecipeKind> kind = ParseRecipeKind(recipe);
      if (!kind.has_value()) {
        return InvalidArgumentError(
            StrCat("--recipes: found \"", recipe, "\"; valid: ", StrJoin(RecipeKindNames(), ", ")));
      }
      if (recipe == "bf16") {
        runs.push_back({recipe, *kind, 2 * init});
        runs.push_back({recipe, *kind, 2 * init + 1});
      } else {
        runs.push_back({recipe, *kind, init});
      }
    }
  }
  return runs;
}

// Runs what is missing.
absl::Status RunMissing(const Flags& flags) {
  ASSIGN_OR_RETURN(const std::vector<Run> runs, AllRuns(flags));
  std::vector<Run> missing;
  for (const Run& run : runs) {
    ASSIGN_OR_RETURN(const std::optional<Result> result, ReadResult(flags, run.recipe, run.init));
    if (!result.has_value()) {
      missing.push_back(run);
    }
  }
  ASSIGN_OR_RETURN(const std::size_t done,
                   SweepProcesses(missing.size(), {.jobs = flags.jobs, .deadline = flags.deadline},
                                  [&](std::size_t i) -> absl::Status {
                                    ASSIGN_OR_RETURN(const Result result,
                                                     RunOne(flags, missing[i]));
                                    return WriteResult(flags, missing[i], result);
                                  }));
  if (done < missing.size()) {
    std::fprintf(stderr, "deadline: %zu of %zu missing runs were made\n", done, missing.size());
  }
  return absl::OkStatus();
}

struct Losses {
  std::vector<double> early, end;
  double seconds = 0;
};

std::string Percent(double fraction, const char* format) {
  char text[32];
  std::snprintf(text, sizeof(text), format, 100 * fraction);
  return std::isnan(fraction) ? "-" : text;
}

// Without `compare` only loss and SD: bf16 beside itself.
void PrintCell(const Comparison& c, const Sample& s, bool compare) {
  if (std::isnan(s.mean)) {
    std::printf("  %8s %7s %9s %8s %9s %6s  %-10s", "-", "-", "-", "-", "-", "-", "unknown");
  } else if (!compare) {
    std::printf("  %8.4f %7s %9s %8s %9s %6s  %-10s", s.mean,
                Percent(s.sd / s.mean, "%.3f%%").c_str(), "", "", "", "", "");
  } else {
    std::printf("  %8.4f %7s %9s %8s %9s %6.3f  %-10s", s.mean,
                Percent(s.sd / s.mean, "%.3f%%").c_str(), Percent(c.difference, "%+.3f%%").c_str(),
                Percent(c.standard_error, "%.3f%%").c_str(), Percent(c.allowed, "%.3f%%").c_str(),
                c.p, Text(c.verdict));
  }
}

absl::Status PrintTable(const Flags& flags) {
  std::map<std::string, Losses> all;
  ASSIGN_OR_RETURN(const std::vector<Run> runs, AllRuns(flags));
  for (const Run& run : runs) {
    ASSIGN_OR_RETURN(const std::optional<Result> result, ReadResult(flags, run.recipe, run.init));
    if (result.has_value()) {
      Losses& losses = all[run.recipe];
      losses.early.push_back(result->early);
      losses.end.push_back(result->end);
      losses.seconds += result->seconds;
    }
  }
  std::printf("\n%s tokens, first and last layer bf16\n", flags.Fingerprint().c_str());
  std::printf("%-15s %3s %5s  %-66s  at the end\n", "", "", "", "at step 300");
  std::printf("%-15s %3s %5s", "recipe", "n", "s/run");
  for (int i = 0; i < 2; ++i) {
    std::printf("  %8s %7s %9s %8s %9s %6s  %-10s", "loss", "SD", "vs bf16", "SE", "allowed", "p",
                "verdict");
  }
  std::printf("\n");
  bool within = true;
  const Losses& base = all["bf16"];
  const auto row = [&](const std::string& name, const Losses& from, const Losses& losses) {
    std::printf("%-15s %3zu %5.0f", name.c_str(), losses.end.size(),
                losses.seconds / static_cast<double>(std::max<std::size_t>(1, losses.end.size())));
    for (const auto member : {&Losses::early, &Losses::end}) {
      const Sample s = Summarise(losses.*member);
      const Comparison c = Compare(Summarise(from.*member), s);
      PrintCell(c, s, &from != &losses);
      within = within && (c.verdict == Verdict::kWithin || c.verdict == Verdict::kCoarse ||
                          (member == &Losses::early && flags.steps < kEarlyStep));
    }
    std::printf("\n");
  };
  Losses halves[2], fp8;
  for (std::size_t i = 0; i < base.end.size(); ++i) {
    halves[i % 2].early.push_back(base.early[i]);
    halves[i % 2].end.push_back(base.end[i]);
    halves[i % 2].seconds += base.seconds / static_cast<double>(base.end.size());
  }
  for (const std::string& recipe : flags.recipes) {
    row(recipe, base, all[recipe]);
  }
  const bool recipes_within = within;
  for (const std::string& recipe : flags.recipes) {
    if (recipe != "bf16" && recipe != "fp32") {
      fp8.early.insert(fp8.early.end(), all[recipe].early.begin(), all[recipe].early.end());
      fp8.end.insert(fp8.end.end(), all[recipe].end.begin(), all[recipe].end.end());
      fp8.seconds += all[recipe].seconds;
    }
  }
  row("all FP8 runs", base, fp8);
  row("bf16 (floor)", halves[0], halves[1]);
  std::printf(
      "floor: every second bf16 run against the others. SE: of the difference (Welch), p: "
      "two-sided Student. Of k comparisons about k/20 are outside two SE by chance.\n");
  return recipes_within ? absl::OkStatus()
                        : FailedPreconditionError(
                              "a recipe is outside what is allowed, or has "
                              "fewer than two runs");
}

int Main(int argc, char** argv) {
  MaybeRunBlasProbe(argc, argv);
  EnsureBlasCoreType(argv);
  Flags flags;
  CLI::App app{"validation loss of every recipe beside bf16's"};
  app.add_option("--data", flags.data, "byte dataset (octavo data build), 8 MB or more");
  app.add_option("--text", flags.text, "files or folders to make one from, when --data is absent");
  app.add_option("--recipes", flags.recipes, "recipes; bf16 must be among them");
  app.add_option("--inits", flags.inits,
                 "perturbed initialisations of each; bf16 gets twice as many");
  app.add_option("--perturbation", flags.perturbation, "relative noise on initial weights");
  app.add_option("--jobs", flags.jobs, "runs at a time, one core each");
  app.add_option("--deadline", flags.deadline, "seconds after which no run goes on; 0: none");
  app.add_option("--steps", flags.steps, "steps");
  app.add_option("--peak", flags.peak, "highest learning rate");
  app.add_option("--layers", flags.layers, "layers");
  app.add_option("--hidden", flags.hidden, "hidden size");
  app.add_option("--expert-hidden", flags.expert_hidden, "hidden size of an expert");
  app.add_option("--sequence", flags.sequence, "tokens per sequence");
  app.add_option("--sequences", flags.sequences, "sequences per step");
  app.add_option("--validation-tokens", flags.validation_tokens, "tokens of validation");
  app.add_option("--out", flags.out, "folder of results");
  CLI11_PARSE(app, argc, argv);
  absl::Status status = PosixFileSystem::Get().CreateDirectories(flags.out);
  if (status.ok() &&
      std::find(flags.recipes.begin(), flags.recipes.end(), "bf16") == flags.recipes.end()) {
    status = InvalidArgumentError("--recipes: bf16 must be among them");
  }
  if (status.ok()) {
    status = SplitData(flags);
  }
  if (status.ok()) {
    status = RunMissing(flags);
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
