// octavo data build|inspect (train-tokenizer: train_tokenizer.cc): datasets on this machine's disk;
// no controller involved.
#include "base/file.h"
#include "base/status.h"
#include "base/str.h"
#include "cli/commands.h"
#include "cli/offline_model.h"
#include "cli/output/json.h"
#include "cli/output/table.h"
#include "cli/output/text.h"
#include "cli/program.h"
#include "cli/validators.h"
#include "worker/data/build.h"
#include "worker/data/loader.h"
#include "worker/data/token_dataset.h"

namespace octavo {
namespace {

struct Flags {
  std::vector<std::string> inputs;
  std::string path;
  std::uint64_t max_bytes = 0;
  double validation_fraction = 0.02;  // as data.validation_fraction of a job
  bool verify = false;
  bool overwrite = false;
  std::string tokenizer = "bytes";
  std::int32_t threads = 0;
};

std::string Nats(double entropy) { return LossText(entropy) + " nats per token"; }

// SentencePiece lives in a program of its own.
int BuildWithModel(Session& session, const Flags& flags, const std::string& model) {
  std::vector<std::string> arguments = {"build", "--model", model, "--output", flags.path};
  for (const std::string& argument :
       {StrCat("--max-bytes=", flags.max_bytes), StrCat("--threads=", flags.threads)}) {
    arguments.push_back(argument);
  }
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

int Build(Session& session, const Flags& flags) {
  if (!flags.overwrite && PosixFileSystem::Get().Exists(flags.path)) {
    return session.Fail(AlreadyExistsError(
        StrCat("building ", flags.path,
               ": there is one already, and jobs may be training on it; give another --output, or "
               "--overwrite to replace it")));
  }
  if (const auto model = SentencePieceModel(flags.tokenizer); model.has_value()) {
    return BuildWithModel(session, flags, *model);
  }
  BuildByteOptions options{.inputs = flags.inputs,
                           .output = flags.path,
                           .max_bytes = static_cast<std::int64_t>(flags.max_bytes)};
  if (session.is_terminal && !session.json()) {
    options.progress = [&session](const BuildProgress& progress) {
      session.err() << "\r\x1b[K" << progress.files_done << "/" << progress.files_total
                    << " files, " << HumanBytes(static_cast<double>(progress.bytes_done))
                    << std::flush;
    };
  }
  const absl::StatusOr<BuildSummary> summary = BuildByteDataset(PosixFileSystem::Get(), options);
  if (options.progress) {
    session.err() << "\r\x1b[K" << std::flush;
  }
  if (!summary.ok()) {
    return session.Fail(summary.status());
  }
  if (session.json()) {
    JsonWriter json;
    json.BeginObject().Key("path").String(flags.path).Key("files").Int(summary->files);
    json.Key("skipped").Int(summary->skipped).Key("tokens").Int(summary->tokens);
    json.Key("documents").Int(summary->documents);
    json.Key("unigram_entropy").Double(summary->unigram_entropy).EndObject();
    session.out() << json.Take() << "\n";
    return kExitOk;
  }
  KeyValues lines;
  lines.Add("dataset", flags.path);
  lines.Add("files", StrCat(summary->files, " (", summary->skipped, " skipped)"));
  lines.Add("documents", std::to_string(summary->documents));
  lines.Add("tokens", std::to_string(summary->tokens));
  lines.Add("unigram entropy", Nats(summary->unigram_entropy));
  session.out() << lines.Render();
  return kExitOk;
}

struct Inspection {
  std::unique_ptr<TokenDataset> dataset;
  double entropy = 0;
  TokenRegion validation;
  double validation_entropy = 0;
};

absl::StatusOr<Inspection> InspectDataset(const Flags& flags) {
  Inspection found;
  ASSIGN_OR_RETURN(found.dataset, OpenTokenDataset(PosixFileSystem::Get(), flags.path));
  const std::int64_t tokens = found.dataset->token_count();
  if (flags.verify) {
    RETURN_IF_ERROR(found.dataset->Verify());
  }
  if (tokens > 0) {
    ASSIGN_OR_RETURN(found.entropy, UnigramEntropy(*found.dataset, 0, tokens));
  }
  found.validation = SplitTail(tokens, flags.validation_fraction).validation;
  if (found.validation.size() > 0) {
    ASSIGN_OR_RETURN(found.validation_entropy,
                     UnigramEntropy(*found.dataset, found.validation.begin, found.validation.end));
  }
  return found;
}

int Inspect(Session& session, const Flags& flags) {
  const absl::StatusOr<Inspection> found = InspectDataset(flags);
  if (!found.ok()) {
    return session.Fail(found.status());
  }
  const TokenDataset& dataset = *found->dataset;
  if (session.json()) {
    JsonWriter json;
    json.BeginObject().Key("path").String(flags.path).Key("format").String(dataset.format_name());
    json.Key("tokens").Int(dataset.token_count()).Key("documents").Int(dataset.document_count());
    json.Key("vocab_size").Int(dataset.vocab_size()).Key("token_bytes").Int(dataset.token_bytes());
    json.Key("unigram_entropy").Double(found->entropy);
    json.Key("validation_tokens").Int(found->validation.size());
    json.Key("validation_unigram_entropy").Double(found->validation_entropy);
    json.Key("verified").Bool(flags.verify).EndObject();
    session.out() << json.Take() << "\n";
    return kExitOk;
  }
  KeyValues lines;
  lines.Add("dataset", flags.path);
  lines.Add("format", dataset.format_name());
  lines.Add("tokens", std::to_string(dataset.token_count()));
  lines.Add("documents", std::to_string(dataset.document_count()));
  lines.Add("vocabulary",
            dataset.vocab_size() > 0 ? std::to_string(dataset.vocab_size()) : "not stated");
  lines.Add("bytes per token", std::to_string(dataset.token_bytes()));
  lines.Add("unigram entropy", Nats(found->entropy));
  if (found->validation.size() > 0) {
    lines.Add("validation tail", StrCat(found->validation.size(), " tokens, unigram entropy ",
                                        Nats(found->validation_entropy)));
  }
  lines.Add("checksums", flags.verify ? "verified" : "not verified (--verify)");
  session.out() << lines.Render();
  return kExitOk;
}

}  // namespace

void AddData(CLI::App& app, Session& session) {
  auto flags = std::make_shared<Flags>();
  CLI::App* group = app.add_subcommand("data", "build and inspect datasets on this machine");
  group->require_subcommand(1);
  CLI::App* build =
      group->add_subcommand("build", "text of files as tokens; every file is a document");
  build->add_option("inputs", flags->inputs, "files and folders, in this order")->required();
  build->add_option("--output", flags->path, "file to write")->required();
  build->add_flag("--overwrite", flags->overwrite, "replace an existing file");
  build
      ->add_option("--max-bytes", flags->max_bytes,
                   "stop after so much text, e.g. 24MB or 16MiB; 0: no limit")
      ->transform(CLI::AsSizeValue(/*kb_is_1000=*/true).description(""))
      ->capture_default_str();
  AddTokenizer(build, "bytes, or sp:MODEL for a SentencePiece model (octavo data train-tokenizer)",
               &flags->tokenizer);
  build->add_option("--threads", flags->threads, "that encode with sp:MODEL; 0: one a core")
      ->check(CLI::Range(0, 1024))
      ->capture_default_str();
  build->callback(
      [&session, flags] { session.Run([&session, flags] { return Build(session, *flags); }); });
  CLI::App* inspect = group->add_subcommand("inspect", "size, format and entropy of a dataset");
  inspect->add_option("path", flags->path, "dataset")->required();
  inspect
      ->add_option("--validation-fraction", flags->validation_fraction,
                   "tail held out, as in a job's data.validation_fraction")
      ->check(FiniteRange(0.0, 0.5))
      ->capture_default_str();
  inspect->add_flag("--verify", flags->verify, "read everything and check the checksums");
  inspect->callback(
      [&session, flags] { session.Run([&session, flags] { return Inspect(session, *flags); }); });
  AddDataTrainTokenizer(*group, session);
}

}  // namespace octavo
