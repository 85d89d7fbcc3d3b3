#include "worker/rank/offline_main.h"

#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <cstring>
#include <functional>
#include <map>

#include "base/file.h"
#include "base/log.h"
#include "base/status.h"
#include "base/str.h"
#include "cli/validators.h"
#include "kernels/cpu/blas.h"
#include "worker/data/loader.h"
#include "worker/rank/backend_loader.h"
#include "worker/rank/offline.h"

namespace octavo {
namespace {

// The exit codes of `octavo`, which passes them on.
constexpr int kExitOk = 0;
constexpr int kExitUsage = 2;

struct Flags {
  std::string path, device = "cpu", recipe = "bf16", documents = "packed";
  int device_ordinal = 0;
  std::int64_t sequence_length = 0;  // 0: what the weights are for
  std::int32_t sequences = 1;
  bool json = false;
  std::string data, logits;  // eval
  double validation_fraction = 0;
  std::int64_t sequences_max = 0;
  std::string prompt, prompt_tokens, output_tokens;  // generate
  SamplingOptions sampling;
};

PosixFileSystem& Fs() { return PosixFileSystem::Get(); }

absl::StatusOr<std::unique_ptr<OfflineModel>> OpenModel(const Flags& flags,
                                                        const Backend& backend) {
  return OfflineModel::Open(Fs(), {.path = flags.path,
                                   .backend = backend,
                                   .sequence_length = flags.sequence_length,
                                   .sequences = flags.sequences,
                                   .recipe = *ParseRecipeKind(flags.recipe)});
}

absl::Status Evaluate(const Flags& flags, const Backend& backend) {
  ASSIGN_OR_RETURN(std::shared_ptr<const TokenDataset> dataset, OpenTokenDataset(Fs(), flags.data));
  ASSIGN_OR_RETURN(const std::unique_ptr<OfflineModel> model, OpenModel(flags, backend));
  const std::map<std::string, DocumentMode> modes = {{"packed", DocumentMode::kPacked},
                                                     {"masked", DocumentMode::kMasked},
                                                     {"separate", DocumentMode::kSeparate}};
  EvaluationOptions options{.documents = modes.at(flags.documents),
                            .sequences_max = flags.sequences_max,
                            .logits_file = flags.logits};
  if (flags.validation_fraction > 0) {
    options.region = SplitTail(dataset->token_count(), flags.validation_fraction).validation;
  }
  const bool terminal = ::isatty(STDERR_FILENO) == 1 && !flags.json;
  if (terminal) {
    options.progress = [](std::int64_t done, std::int64_t total) {
      std::fprintf(stderr, "\r\x1b[K%lld/%lld sequences", static_cast<long long>(done),
                   static_cast<long long>(total));
    };
  }
  const absl::StatusOr<EvaluationResult> result =
      EvaluateDataset(Fs(), *model, std::move(dataset), options);
  if (terminal) {
    std::fprintf(stderr, "\r\x1b[K");
  }
  RETURN_IF_ERROR(result.status());
  std::printf(
      flags.json ? "{\"step\":%lld,\"sequence_length\":%lld,\"sequences\":%lld,\"tokens\":%lld,"
                   "\"loss\":%.9g,"
                   "\"perplexity\":%.9g}\n"
                 : "step:        %lld\nlength:      %lld\nsequences:   %lld\ntokens:      %lld\n"
                   "loss:        %.6f\nperplexity:  %.4f\n",
      static_cast<long long>(model->step()), static_cast<long long>(model->sequence_length()),
      static_cast<long long>(result->sequences), static_cast<long long>(result->tokens),
      result->loss, result->perplexity);
  return absl::OkStatus();
}

// The prompt as tokens: given as such, or bytes of text for a model of bytes.
absl::StatusOr<std::vector<std::int32_t>> PromptTokens(const Flags& flags) {
  if (flags.prompt_tokens.empty()) {
    std::vector<std::int32_t> tokens;
    for (const char c : flags.prompt) {
      tokens.push_back(static_cast<unsigned char>(c));
    }
    return tokens;
  }
  ASSIGN_OR_RETURN(const std::string bytes, Fs().ReadFile(flags.prompt_tokens));
  std::vector<std::int32_t> tokens(bytes.size() / sizeof(std::int32_t));
  std::memcpy(tokens.data(), bytes.data(), tokens.size() * sizeof(std::int32_t));
  return tokens;
}

// A byte as it may go to a terminal: control characters could be commands to it.
int Shown(std::int32_t byte, bool terminal) {
  const bool control = (byte < 32 && byte != '\n' && byte != '\t') || byte == 127;
  return terminal && control ? '?' : byte;
}

absl::Status GenerateText(const Flags& flags, const Backend& backend) {
  ASSIGN_OR_RETURN(const std::vector<std::int32_t> prompt, PromptTokens(flags));
  ASSIGN_OR_RETURN(const std::unique_ptr<OfflineModel> model, OpenModel(flags, backend));
  const bool bytes = flags.output_tokens.empty();
  if (bytes && model->model().vocab != 256) {
    return InvalidArgumentError(StrCat(model->source(), ": a vocabulary of ", model->model().vocab,
                                       " is not bytes; name its tokenizer (--tokenizer sp:MODEL)"));
  }
  std::vector<std::int32_t> text = prompt;
  std::fprintf(stderr, "context: %lld tokens\n",
               static_cast<long long>(model->sequence_length()));  // stdout is the text's
  const bool terminal = ::isatty(STDOUT_FILENO) == 1;
  if (bytes) {
    std::fwrite(flags.prompt.data(), 1, flags.prompt.size(), stdout);
  }
  RETURN_IF_ERROR(Generate(*model, prompt, flags.sampling, [&](std::int32_t token) {
    text.push_back(token);
    if (bytes) {
      std::fputc(Shown(token, terminal), stdout);
      std::fflush(stdout);
    }
    return true;
  }));
  if (bytes) {
    std::fputc('\n', stdout);
    return absl::OkStatus();
  }
  return Fs().WriteFileAtomic(flags.output_tokens, {reinterpret_cast<const char*>(text.data()),
                                                    text.size() * sizeof(std::int32_t)});
}

}  // namespace

bool IsOffline(int argc, char** argv) { return argc > 1 && std::strcmp(argv[1], "--offline") == 0; }

int OfflineMain(int argc, char** argv) {
  Flags flags;
  absl::Status (*body)(const Flags&, const Backend&) = nullptr;
  CLI::App app{"octavo-rank --offline: a model without a job", "octavo-rank --offline"};
  app.require_subcommand(1);
  const auto command = [&](const char* name, const char* help,
                           absl::Status (*function)(const Flags&, const Backend&)) {
    CLI::App* sub = app.add_subcommand(name, help);
    sub->callback([&body, function] { body = function; });
    sub->add_option("path", flags.path, "checkpoint, folder of them, or Hugging Face folder")
        ->required();
    sub->add_option("--device", flags.device, "cpu or cuda")->check(CLI::IsMember({"cpu", "cuda"}));
    sub->add_option("--device-ordinal", flags.device_ordinal, "which device");
    sub->add_option("--recipe", flags.recipe, "precision")->check(CLI::IsMember(RecipeKindNames()));
    sub->add_option("--sequence-length", flags.sequence_length, "tokens a pass can see")
        ->check(CLI::Range(std::int64_t{2}, std::int64_t{1} << 20));
    return sub;
  };
  CLI::App* eval = command("eval", "loss and perplexity on a dataset", Evaluate);
  eval->add_option("--data", flags.data, "dataset")->required();
  eval->add_option("--batch", flags.sequences, "sequences in a pass")->check(CLI::Range(1, 4096));
  eval->add_option("--sequences", flags.sequences_max, "at most so many; 0: all");
  eval->add_option("--validation-fraction", flags.validation_fraction, "only this tail")
      ->check(FiniteRange(0.0, 0.5));
  eval->add_option("--documents", flags.documents, "packed, masked or separate")
      ->check(CLI::IsMember({"packed", "masked", "separate"}));
  eval->add_option("--logits", flags.logits, "safetensors file for tokens and logits");
  eval->add_flag("--json", flags.json, "print JSON");
  CLI::App* generate = command("generate", "continue a prompt", GenerateText);
  generate->add_option("--prompt", flags.prompt, "bytes to continue");
  generate->add_option("--prompt-tokens", flags.prompt_tokens, "file of int32 tokens instead");
  generate->add_option("--output-tokens", flags.output_tokens, "file for int32 tokens");
  generate->add_option("--tokens", flags.sampling.tokens, "to generate")
      ->check(CLI::Range(1, 1 << 20));
  generate->add_option("--temperature", flags.sampling.temperature, "0: the likeliest always")
      ->check(FiniteRange(0.0, 100.0));
  generate->add_option("--top-p", flags.sampling.top_p, "probability kept")
      ->check(FiniteRange(0.0, 1.0));
  generate->add_option("--seed", flags.sampling.seed, "of the choice");
  try {
    app.parse(argc - 1, argv + 1);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? kExitOk : kExitUsage;
  }
  if (flags.device == "cpu") {
    EnsureBlasCoreType(argv);  // may start this program again, before there are threads
  }
  absl::Status status = InitLog({.component = "octavo-rank", .min_level = LogLevel::kWarning});
  if (status.ok()) {
    const auto backend = LoadedBackend::Open(flags.device, flags.device_ordinal);
    // What is wrong then is the argument: this machine or this build has no such device.
    status = backend.ok() ? body(flags, (*backend)->backend())
                          : InvalidArgumentError(
                                StrCat("--device ", flags.device, ": ", Message(backend.status())));
  }
  if (!status.ok()) {
    std::fflush(stdout);
    std::fprintf(stderr, "error: %s\n", Message(status).c_str());
  }
  return OfflineExitCode(status);
}

}  // namespace octavo
