// octavo generate: text from a checkpoint, by octavo-rank --offline; with a SentencePiece model
// octavo-tokenizer turns the prompt into tokens and the tokens into text.
#include <stdlib.h>

#include "base/file.h"
#include "base/status.h"
#include "base/str.h"
#include "cli/commands.h"
#include "cli/offline_model.h"
#include "cli/output/text.h"
#include "cli/program.h"
#include "cli/validators.h"

namespace octavo {
namespace {

struct Flags {
  OfflineModel model;
  std::string prompt, tokenizer = "bytes";
  std::int64_t tokens = 200;
  double temperature = 0.8, top_p = 0.95;
  std::uint64_t seed = 1;
};

// Removed with everything in it at the end of the scope.
class ScratchFolder {
 public:
  static absl::StatusOr<ScratchFolder> Create() {
    const char* root = std::getenv("TMPDIR");
    std::string path = JoinPath(root == nullptr ? "/tmp" : root, "octavo-generate.XXXXXX");
    if (::mkdtemp(path.data()) == nullptr) {
      return ErrnoStatus(errno, StrCat("creating ", path));
    }
    return ScratchFolder(std::move(path));
  }
  ScratchFolder(ScratchFolder&& other) noexcept : path_(std::exchange(other.path_, {})) {}
  ScratchFolder& operator=(ScratchFolder&&) = delete;
  ~ScratchFolder() {
    if (!path_.empty()) {
      PosixFileSystem::Get().RemoveTree(path_).IgnoreError();
    }
  }
  std::string File(std::string_view name) const { return JoinPath(path_, name); }

 private:
  explicit ScratchFolder(std::string path) : path_(std::move(path)) {}
  std::string path_;
};

std::vector<std::string> RankArguments(const Flags& flags) {
  std::vector<std::string> arguments = OfflineArguments("generate", flags.model);
  for (const std::string& argument :
       {StrCat("--tokens=", flags.tokens), StrCat("--temperature=", flags.temperature),
        StrCat("--top-p=", flags.top_p), StrCat("--seed=", flags.seed)}) {
    arguments.push_back(argument);
  }
  return arguments;
}

int Generate(Session& session, const Flags& flags) {
  std::vector<std::string> arguments = RankArguments(flags);
  const std::optional<std::string> model = SentencePieceModel(flags.tokenizer);
  if (!model.has_value()) {
    arguments.push_back(StrCat("--prompt=", flags.prompt));
    return RunProgram(session, "octavo-rank", std::move(arguments));
  }
  const absl::StatusOr<ScratchFolder> scratch = ScratchFolder::Create();
  if (!scratch.ok()) {
    return session.Fail(scratch.status());
  }
  PosixFileSystem& fs = PosixFileSystem::Get();
  const std::string prompt = scratch->File("prompt"),
                    prompt_tokens = scratch->File("prompt.tokens"),
                    text_tokens = scratch->File("text.tokens"), text = scratch->File("text");
  const absl::Status written = fs.WriteFileAtomic(prompt, flags.prompt);
  if (!written.ok()) {
    return session.Fail(written);
  }
  int code =
      RunProgram(session, "octavo-tokenizer",
                 {"encode", "--model", *model, "--input", prompt, "--output", prompt_tokens});
  if (code != kExitOk) {
    return code;
  }
  arguments.insert(arguments.end(),
                   {"--prompt-tokens", prompt_tokens, "--output-tokens", text_tokens});
  code = RunProgram(session, "octavo-rank", std::move(arguments));
  if (code != kExitOk) {
    return code;
  }
  code = RunProgram(session, "octavo-tokenizer",
                    {"decode", "--model", *model, "--input", text_tokens, "--output", text});
  if (code != kExitOk) {
    return code;
  }
  const absl::StatusOr<std::string> result = fs.ReadFile(text);
  if (!result.ok()) {
    return session.Fail(result.status());
  }
  session.out() << Printable(*result, /*keep_newlines=*/true) << "\n";
  return kExitOk;
}

}  // namespace

void AddGenerate(CLI::App& app, Session& session) {
  auto flags = std::make_shared<Flags>();
  CLI::App* command = app.add_subcommand("generate", "let trained weights continue a text");
  command->add_option("--prompt", flags->prompt, "text to continue")->required();
  AddTokenizer(command, "what turned text into the model's tokens", &flags->tokenizer);
  command->add_option("--tokens", flags->tokens, "to generate")
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 20).description(""))
      ->capture_default_str();
  command->add_option("--temperature", flags->temperature, "0: the likeliest token always")
      ->check(FiniteRange(0.0, 100.0))
      ->capture_default_str();
  command
      ->add_option("--top-p", flags->top_p,
                   "choose among the likeliest tokens that together have this probability")
      ->check(FiniteRange(0.0, 1.0))
      ->capture_default_str();
  command->add_option("--seed", flags->seed, "the same seed gives the same text")
      ->capture_default_str();
  AddOfflineModel(command, "--context", "tokens that the model sees at once", &flags->model);
  command->callback(
      [&session, flags] { session.Run([&session, flags] { return Generate(session, *flags); }); });
}

}  // namespace octavo
