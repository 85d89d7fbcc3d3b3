// octavo eval: loss and perplexity of a checkpoint on a dataset, computed by octavo-rank --offline.
#include "base/str.h"
#include "cli/commands.h"
#include "cli/offline_model.h"
#include "cli/program.h"
#include "cli/validators.h"

namespace octavo {
namespace {

struct Flags {
  OfflineModel model;
  std::string data, documents = "packed", logits;
  std::int64_t sequences = 0;
  std::int32_t batch = 8;
  double validation_fraction = 0;
};

int Eval(Session& session, const Flags& flags) {
  std::vector<std::string> arguments = OfflineArguments("eval", flags.model);
  for (const std::string& argument :
       {StrCat("--data=", flags.data), StrCat("--documents=", flags.documents),
        StrCat("--batch=", flags.batch), StrCat("--sequences=", flags.sequences),
        StrCat("--validation-fraction=", flags.validation_fraction)}) {
    arguments.push_back(argument);
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
  command->add_option("--data", flags->data, "dataset")->required();
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
  AddOfflineModel(command, "--sequence-length", "tokens of a sequence", &flags->model);
  command->add_option("--logits", flags->logits,
                      "safetensors file to write: tokens [n, S] and their logits [n, S, V]");
  command->callback(
      [&session, flags] { session.Run([&session, flags] { return Eval(session, *flags); }); });
}

}  // namespace octavo
