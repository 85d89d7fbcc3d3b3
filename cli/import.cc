// octavo import: a Hugging Face folder as a checkpoint that jobs start from; no controller
// involved.
#include <filesystem>

#include "base/file.h"
#include "base/str.h"
#include "cli/commands.h"
#include "cli/output/json.h"
#include "cli/output/progress.h"
#include "cli/output/table.h"
#include "worker/checkpoint/hf_import.h"

namespace octavo {
namespace {

int Import(Session& session, const HfImportOptions& flags) {
  HfImportOptions options = flags;
  ByteProgress progress(session, "reading");
  options.progress = progress.callback();
  const absl::StatusOr<HfImportSummary> summary = ImportFromHf(PosixFileSystem::Get(), options);
  progress.Finish();
  if (!summary.ok()) {
    session.Fail(summary.status());
    return LocalExitCodeOf(summary.status());
  }
  // A job's start_from is read by workers, whose current folder is another.
  const std::string checkpoint =
      std::filesystem::absolute(summary->checkpoint).lexically_normal().string();
  const std::string model = ModelAsJobYaml(summary->model);
  if (session.json()) {
    JsonWriter json;
    json.BeginObject().Key("checkpoint").String(checkpoint);
    json.Key("tensors").Int(summary->tensors).Key("bytes").Int(summary->bytes);
    json.Key("fp8").Bool(summary->fp8).Key("model").String(model).EndObject();
    session.out() << json.Take() << "\n";
    return kExitOk;
  }
  session.err() << summary->tensors << " tensors, "
                << HumanBytes(static_cast<double>(summary->bytes))
                << (summary->fp8 ? ", from FP8 blocks" : "")
                << "; for a job that starts from it:\n";
  session.out() << model << "checkpoint:\n  start_from: " << checkpoint << "\n";
  return kExitOk;
}

}  // namespace

void AddImport(CLI::App& app, Session& session) {
  auto flags = std::make_shared<HfImportOptions>();
  CLI::App* command = app.add_subcommand(
      "import",
      "make a Hugging Face folder (Mixtral, Qwen3-MoE) a checkpoint that jobs start from");
  command->add_option("path", flags->folder, "folder with config.json and *.safetensors")
      ->required();
  command->add_option("output", flags->output, "folder that gets the checkpoint")->required();
  command->callback(
      [&session, flags] { session.Run([&session, flags] { return Import(session, *flags); }); });
}

}  // namespace octavo
