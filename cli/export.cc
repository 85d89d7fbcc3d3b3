// octavo export: a checkpoint as a folder for Hugging Face's transformers; no controller involved.
#include <map>

#include "base/file.h"
#include "base/str.h"
#include "cli/commands.h"
#include "cli/output/json.h"
#include "cli/output/progress.h"
#include "cli/output/table.h"
#include "cli/validators.h"
#include "worker/checkpoint/hf_export.h"

namespace octavo {
namespace {

int Export(Session& session, const HfExportOptions& flags) {
  HfExportOptions options = flags;
  ByteProgress progress(session, "writing");
  options.progress = progress.callback();
  const absl::StatusOr<HfExportSummary> summary = ExportToHf(PosixFileSystem::Get(), options);
  progress.Finish();
  if (!summary.ok()) {
    session.Fail(summary.status());
    return LocalExitCodeOf(summary.status());
  }
  if (session.json()) {
    JsonWriter json;
    json.BeginObject().Key("checkpoint").String(summary->checkpoint).Key("step").Int(summary->step);
    json.Key("folder").String(options.folder).Key("tensors").Int(summary->tensors);
    json.Key("bytes").Int(summary->bytes).Key("shards").Int(summary->shards).EndObject();
    session.out() << json.Take() << "\n";
    return kExitOk;
  }
  KeyValues lines;
  lines.Add("checkpoint", StrCat(summary->checkpoint, " (step ", summary->step, ")"));
  lines.Add("folder", options.folder);
  lines.Add("tensors", StrCat(summary->tensors, " in ", summary->shards, " files, ",
                              HumanBytes(static_cast<double>(summary->bytes))));
  session.out() << lines.Render();
  return kExitOk;
}

}  // namespace

void AddExport(CLI::App& app, Session& session) {
  auto flags = std::make_shared<HfExportOptions>();
  CLI::App* command =
      app.add_subcommand("export", "write a checkpoint as a folder that transformers loads");
  command->add_option("path", flags->checkpoint, "a checkpoint, or a folder of them: the newest")
      ->required();
  command->add_option("folder", flags->folder, "new folder to write")->required();
  const std::map<std::string, HfFormat> formats = {{"bf16", HfFormat::kBf16},
                                                   {"fp8", HfFormat::kFp8}};
  command
      ->add_option("--format", flags->format,
                   "bf16, or fp8: E4M3 with a scale per 128×128 block (weight_scale_inv)")
      ->transform(OneOf(formats))
      ->option_text("bf16|fp8");
  command
      ->add_option("--context-length", flags->max_positions,
                   "longest sequence that the folder's config.json states")
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 30))
      ->capture_default_str();
  command->add_option("--shard-bytes", flags->shard_bytes, "size at which a file ends")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  command->callback(
      [&session, flags] { session.Run([&session, flags] { return Export(session, *flags); }); });
}

}  // namespace octavo
