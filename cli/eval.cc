// octavo eval: loss and perplexity of a checkpoint on a dataset, computed by octavo-rank --offline.
#include "base/str.h"
#include "cli/commands.h"
#include "cli/program.h"
#include "cli/validators.h"

namespace octavo {
namespace {

struct Flags {
  std::string path, data, device = "cpu", recipe = "bf16", documents = "packed", logits;
  std::int64_t sequence_length = 0, sequences = 0;  // length 0: as trained
  std::int32_t batch = 8, device_ordinal = 0;
  double validation_fraction = 0;
};

int Eval(Session& session, const Flags& flags) {
  std::vector<std::string> arguments = {
      "--offline",
      "eval",
      flags.path,
      "--data",
      flags.data,
      "--device",
      flags.device,
      "--recipe",
      flags.recipe,
      "--documents",
      flags.documents,
      StrCat("--device-ordinal=", flags.device_ordinal),
      StrCat("--batch=", flags.batch),
      StrCat("--sequences=", flags.sequences),
      StrCat("--validation-fraction=", flags.validation_fraction)};
  if (flags.sequence_length > 0) {
    arguments.push_back(StrCat("--sequence-length=", flags.sequence_length));
  }
  if (!flags.logits.empty()) {
    arguments.insert(arguments.end(), {"--logits", flags.logits});
  }
  if (session.json()) {
    arguments.push_back("--json");
  }
  return RunProgram(session, "octavo-rank", std::move(arguments));
}

}  // namespace

void AddEval(CLI::App& app, Session& session) {
  auto flags = std::make_shared<Flags>();
  CLI::App* command = app.add_subcommand("eval", "loss and perplexity of weights on a dataset");
  command
      ->add_option("path", flags->path,
                   "a checkpoint, a folder of them (the newest), or a Hugging Face folder")
      ->required();
  command->add_option("--data", flags->data, "dataset")->required();
  command
      ->add_option("--sequence-length", flags->sequence_length,
                   "tokens of a sequence; without it as the weights were trained, 256 if that is "
                   "not recorded")
      ->check(CLI::Range(std::int64_t{2}, std::int64_t{1} << 20).description(""));
  command->add_option("--batch", flags->batch, "sequences in a pass")
      ->check(CLI::Range(1, 4096))
      ->capture_default_str();
  command->add_option("--sequences", flags->sequences, "at most so many; 0: all")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  command
      ->add_option("--validation-fraction", flags->validation_fraction,
                   "only this tail of the dataset; 0: all of it")
      ->check(FiniteRange(0.0, 0.5))
      ->capture_default_str();
  command->add_option("--documents", flags->documents, "as data.documents of a job")
      ->check(CLI::IsMember({"packed", "masked", "separate"}).description(""))
      ->option_text("packed|masked|separate");
  command->add_option("--recipe", flags->recipe, "precision of all layers")->capture_default_str();
  command->add_option("--device", flags->device, "where it runs")
      ->check(CLI::IsMember({"cpu", "cuda"}).description(""))
      ->option_text("cpu|cuda");
  command->add_option("--device-ordinal", flags->device_ordinal, "which device")
      ->check(CLI::NonNegativeNumber);
  command->add_option("--logits", flags->logits,
                      "safetensors file to write: tokens [n, S] and their logits [n, S, V]");
  command->callback(
      [&session, flags] { session.Run([&session, flags] { return Eval(session, *flags); }); });
}

}  // namespace octavo
