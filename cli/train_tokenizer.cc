// octavo data train-tokenizer: a SentencePiece model from text, made by octavo-tokenizer.
#include "base/str.h"
#include "cli/commands.h"
#include "cli/program.h"
#include "cli/validators.h"

namespace octavo {
namespace {

struct Flags {
  std::vector<std::string> inputs;
  std::string path, type = "bpe";
  std::int64_t vocab_size = 32000, max_bytes = 100 << 20;
  double character_coverage = 0.9995;
  std::int32_t threads = 0;
  bool overwrite = false;
};

int Train(Session& session, const Flags& flags) {
  std::vector<std::string> arguments = {"train",
                                        "--output",
                                        flags.path,
                                        "--type",
                                        flags.type,
                                        StrCat("--vocab-size=", flags.vocab_size),
                                        StrCat("--max-bytes=", flags.max_bytes),
                                        StrCat("--character-coverage=", flags.character_coverage),
                                        StrCat("--threads=", flags.threads)};
  if (flags.overwrite) {
    arguments.push_back("--overwrite");
  }
  if (session.json()) {
    arguments.push_back("--json");
  }
  arguments.push_back("--");
  arguments.insert(arguments.end(), flags.inputs.begin(), flags.inputs.end());
  return RunProgram(session, "octavo-tokenizer", std::move(arguments));
}

}  // namespace

void AddDataTrainTokenizer(CLI::App& group, Session& session) {
  auto flags = std::make_shared<Flags>();
  CLI::App* command =
      group.add_subcommand("train-tokenizer", "learn a SentencePiece model from text");
  command->add_option("inputs", flags->inputs, "files and folders")->required();
  command->add_option("--output", flags->path, "model to write")->required();
  command->add_flag("--overwrite", flags->overwrite, "replace an existing file");
  command->add_option("--vocab-size", flags->vocab_size, "pieces, 259 special ones included")
      ->check(CLI::Range(std::int64_t{260}, std::int64_t{1} << 24).description(""))
      ->capture_default_str();
  command->add_option("--type", flags->type, "kind of model")
      ->check(CLI::IsMember({"bpe", "unigram"}).description(""))
      ->option_text("bpe|unigram");
  command->add_option("--max-bytes", flags->max_bytes, "of text to learn from")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  command
      ->add_option("--character-coverage", flags->character_coverage,
                   "share of characters with a piece; the rest become bytes")
      ->check(FiniteRange(0.5, 1.0))
      ->capture_default_str();
  command->add_option("--threads", flags->threads, "0: one a core")
      ->check(CLI::Range(0, 1024))
      ->capture_default_str();
  command->callback(
      [&session, flags] { session.Run([&session, flags] { return Train(session, *flags); }); });
}

}  // namespace octavo
