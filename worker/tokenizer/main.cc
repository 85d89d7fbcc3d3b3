// octavo-tokenizer: SentencePiece in a process of its own, started by the octavo commands that need
// it. Debian's libsentencepiece brings a copy of protobuf along, which breaks every process that
// has gRPC; this one has none.
//
//   build   text to a dataset        train   text to a model
//   encode  a file to tokens         decode  tokens to text
// Token files are int32, little-endian, as they lie in memory.
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <cstring>
#include <functional>
#include <map>

#include "base/file.h"
#include "base/status.h"
#include "base/str.h"
#include "base/version.h"
#include "cli/validators.h"
#include "worker/tokenizer/sentencepiece_tokenizer.h"

namespace octavo {
namespace {

// The exit codes of `octavo`, which passes them on.
constexpr int kExitOk = 0;
constexpr int kExitUsage = 2;
constexpr int kExitNotFound = 3;
constexpr int kExitConflict = 4;
constexpr int kExitInternal = 7;

struct Flags {
  std::vector<std::string> inputs;
  std::string model, input, output;
  std::int64_t max_bytes = 0, train_bytes = 100 << 20, vocab_size = 32000;
  std::int32_t threads = 0;
  double character_coverage = 0.9995;
  SentencePieceType type = SentencePieceType::kBpe;
  bool json = false, overwrite = false;
};

PosixFileSystem& Fs() { return PosixFileSystem::Get(); }

// Jobs may be training on the file, and datasets are made with the model.
absl::Status CheckNew(const Flags& flags) {
  return flags.overwrite || !Fs().Exists(flags.output)
             ? absl::OkStatus()
             : AlreadyExistsError(StrCat("writing ", flags.output,
                                         ": there is one already; give another --output, or "
                                         "--overwrite to replace it"));
}

absl::Status Build(const Flags& flags) {
  RETURN_IF_ERROR(CheckNew(flags));
  ASSIGN_OR_RETURN(const auto tokenizer, SentencePieceTokenizer::Load(Fs(), flags.model));
  BuildSentencePieceOptions options{.inputs = flags.inputs,
                                    .output = flags.output,
                                    .max_bytes = flags.max_bytes,
                                    .threads = flags.threads};
  const bool terminal = ::isatty(STDERR_FILENO) == 1 && !flags.json;
  if (terminal) {
    options.progress = [](const BuildProgress& p) {
      std::fprintf(stderr, "\r\x1b[K%lld/%lld files, %s", static_cast<long long>(p.files_done),
                   static_cast<long long>(p.files_total),
                   HumanBytes(static_cast<double>(p.bytes_done)).c_str());
    };
  }
  const absl::StatusOr<BuildSummary> built = BuildSentencePieceDataset(Fs(), *tokenizer, options);
  if (terminal) {
    std::fprintf(stderr, "\r\x1b[K");
  }
  RETURN_IF_ERROR(built.status());
  std::printf(flags.json ? "{\"files\":%lld,\"skipped\":%lld,\"documents\":%lld,\"tokens\":%lld,"
                           "\"unigram_entropy\":%.6g}\n"
                         : "files:            %lld (%lld skipped)\ndocuments:        %lld\n"
                           "tokens:           %lld\nunigram entropy:  %.4f nats per token\n",
              static_cast<long long>(built->files), static_cast<long long>(built->skipped),
              static_cast<long long>(built->documents), static_cast<long long>(built->tokens),
              built->unigram_entropy);
  return absl::OkStatus();
}

absl::Status Train(const Flags& flags) {
  RETURN_IF_ERROR(CheckNew(flags));
  ASSIGN_OR_RETURN(const TrainSentencePieceSummary trained,
                   TrainSentencePiece(Fs(), {.inputs = flags.inputs,
                                             .output = flags.output,
                                             .vocab_size = flags.vocab_size,
                                             .type = flags.type,
                                             .max_bytes = flags.train_bytes,
                                             .character_coverage = flags.character_coverage,
                                             .threads = flags.threads}));
  std::printf(flags.json ? "{\"files\":%lld,\"lines\":%lld,\"bytes\":%lld,\"vocab_size\":%lld}\n"
                         : "files:       %lld\nlines:       %lld\nbytes:       %lld\n"
                           "vocabulary:  %lld\n",
              static_cast<long long>(trained.files), static_cast<long long>(trained.lines),
              static_cast<long long>(trained.bytes), static_cast<long long>(trained.vocab_size));
  return absl::OkStatus();
}

absl::Status Encode(const Flags& flags) {
  ASSIGN_OR_RETURN(const auto tokenizer, SentencePieceTokenizer::Load(Fs(), flags.model));
  ASSIGN_OR_RETURN(const std::string text, Fs().ReadFile(flags.input));
  ASSIGN_OR_RETURN(const std::vector<std::int32_t> tokens, tokenizer->Encode(text));
  return Fs().WriteFileAtomic(flags.output, {reinterpret_cast<const char*>(tokens.data()),
                                             tokens.size() * sizeof(std::int32_t)});
}

absl::Status Decode(const Flags& flags) {
  ASSIGN_OR_RETURN(const auto tokenizer, SentencePieceTokenizer::Load(Fs(), flags.model));
  ASSIGN_OR_RETURN(const std::string bytes, Fs().ReadFile(flags.input));
  std::vector<std::int32_t> tokens(bytes.size() / sizeof(std::int32_t));
  std::memcpy(tokens.data(), bytes.data(), tokens.size() * sizeof(std::int32_t));
  ASSIGN_OR_RETURN(const std::string text, tokenizer->Decode(tokens));
  return Fs().WriteFileAtomic(flags.output, text);
}

int Main(int argc, char** argv) {
  Flags flags;
  std::function<absl::Status(const Flags&)> body;
  CLI::App app{"octavo-tokenizer: SentencePiece for the octavo commands", "octavo-tokenizer"};
  app.set_version_flag("--version", kVersion);
  app.require_subcommand(1);
  const auto command = [&](const char* name, const char* help,
                           absl::Status (*function)(const Flags&)) {
    CLI::App* sub = app.add_subcommand(name, help);
    sub->callback([&body, function] { body = function; });
    sub->add_option("--output", flags.output, "file to write")->required();
    return sub;
  };
  CLI::App* build = command("build", "a dataset from text", Build);
  CLI::App* train = command("train", "a model from text", Train);
  for (CLI::App* sub : {build, train}) {
    sub->add_option("inputs", flags.inputs, "files and folders, in this order")->required();
    sub->add_option("--threads", flags.threads, "0: one a core")->check(CLI::Range(0, 1024));
    sub->add_flag("--json", flags.json, "print the summary as JSON");
    sub->add_flag("--overwrite", flags.overwrite, "replace an existing file");
  }
  build->add_option("--max-bytes", flags.max_bytes, "stop after so much text; 0: no limit")
      ->check(CLI::NonNegativeNumber);
  train->add_option("--vocab-size", flags.vocab_size, "pieces")
      ->check(CLI::Range(std::int64_t{16}, std::int64_t{1} << 24));
  train->add_option("--max-bytes", flags.train_bytes, "of text to learn from")
      ->check(CLI::PositiveNumber);
  train->add_option("--character-coverage", flags.character_coverage, "rarer ones become bytes")
      ->check(FiniteRange(0.5, 1.0));
  const std::map<std::string, SentencePieceType> types = {{"bpe", SentencePieceType::kBpe},
                                                          {"unigram", SentencePieceType::kUnigram}};
  train->add_option("--type", flags.type, "bpe or unigram")
      ->transform(CLI::CheckedTransformer(types));
  CLI::App* encode = command("encode", "tokens of a text file", Encode);
  CLI::App* decode = command("decode", "text of a token file", Decode);
  for (CLI::App* sub : {encode, decode}) {
    sub->add_option("--input", flags.input, "file to read")->required();
  }
  for (CLI::App* sub : {build, encode, decode}) {
    sub->add_option("--model", flags.model, "SentencePiece model")->required();
  }
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? kExitOk : kExitUsage;
  }
  const absl::Status status = body(flags);
  if (status.ok()) {
    return kExitOk;
  }
  std::fprintf(stderr, "error: %s\n", Message(status).c_str());
  return status.code() == absl::StatusCode::kNotFound          ? kExitNotFound
         : status.code() == absl::StatusCode::kAlreadyExists   ? kExitConflict
         : status.code() == absl::StatusCode::kInvalidArgument ? kExitUsage
                                                               : kExitInternal;
}

}  // namespace
}  // namespace octavo

int main(int argc, char** argv) { return octavo::Main(argc, argv); }
