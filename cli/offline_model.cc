#include "cli/offline_model.h"

#include "base/str.h"

namespace octavo {
namespace {

constexpr std::string_view kSentencePiece = "sp:";

}  // namespace

void AddOfflineModel(CLI::App* command, const std::string& length_flag,
                     const std::string& length_help, OfflineModel* model) {
  command
      ->add_option("path", model->path,
                   "a checkpoint, a folder of them (the newest), or a Hugging Face folder")
      ->required();
  command
      ->add_option(length_flag, model->sequence_length,
                   length_help +
                       "; without it as a checkpoint was trained, for a Hugging Face folder the "
                       "longest that it takes, 2048 at most")
      ->check(CLI::Range(std::int64_t{2}, std::int64_t{1} << 20).description(""));
  command->add_option("--recipe", model->recipe, "precision of all layers")->capture_default_str();
  command->add_option("--device", model->device, "where it runs")
      ->check(CLI::IsMember({"cpu", "cuda"}).description(""))
      ->option_text("cpu|cuda");
  command->add_option("--device-ordinal", model->device_ordinal, "which device")
      ->check(CLI::NonNegativeNumber);
}

std::vector<std::string> OfflineArguments(const std::string& verb, const OfflineModel& model) {
  std::vector<std::string> arguments = {
      "--offline",  verb,       model.path,   "--device",
      model.device, "--recipe", model.recipe, StrCat("--device-ordinal=", model.device_ordinal)};
  if (model.sequence_length > 0) {
    arguments.push_back(StrCat("--sequence-length=", model.sequence_length));
  }
  return arguments;
}

void AddTokenizer(CLI::App* command, const std::string& help, std::string* tokenizer) {
  command->add_option("--tokenizer", *tokenizer, help)
      ->check([](const std::string& text) {
        return text == "bytes" || SentencePieceModel(text).value_or("") != ""
                   ? std::string()
                   : "found " + text + "; valid are bytes and sp:MODEL";
      })
      ->option_text("bytes|sp:MODEL");
}

std::optional<std::string> SentencePieceModel(const std::string& tokenizer) {
  return StartsWith(tokenizer, kSentencePiece)
             ? std::optional<std::string>(tokenizer.substr(kSentencePiece.size()))
             : std::nullopt;
}

}  // namespace octavo
