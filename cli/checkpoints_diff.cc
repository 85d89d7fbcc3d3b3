// octavo checkpoints diff: what differs between two checkpoints on this disk.
#include "base/file.h"
#include "base/status.h"
#include "cli/commands.h"
#include "cli/output/json.h"
#include "cli/output/text.h"
#include "worker/checkpoint/store.h"

namespace octavo {
namespace {

struct Flags {
  std::string a, b;
};

absl::StatusOr<std::vector<std::string>> FindAndDiff(const Flags& flags) {
  const PosixFileSystem& fs = PosixFileSystem::Get();
  ASSIGN_OR_RETURN(const std::string a, FindCheckpoint(fs, flags.a));
  ASSIGN_OR_RETURN(const std::string b, FindCheckpoint(fs, flags.b));
  return DiffCheckpoints(fs, a, b);
}

int Diff(Session& session, const Flags& flags) {
  const absl::StatusOr<std::vector<std::string>> lines = FindAndDiff(flags);
  if (!lines.ok()) {
    return session.Fail(lines.status());
  }
  if (session.json()) {
    JsonWriter json;
    json.BeginObject().Key("identical").Bool(lines->empty()).Key("differences").BeginArray();
    for (const std::string& line : *lines) {
      json.String(line);
    }
    session.out() << json.EndArray().EndObject().Take() << "\n";
  } else if (lines->empty()) {
    session.out() << "identical\n";
  } else {
    for (const std::string& line : *lines) {
      session.out() << Printable(line) << "\n";
    }
  }
  return lines->empty() ? kExitOk : kExitJobFailed;
}

}  // namespace

void AddCheckpointsDiff(CLI::App& group, Session& session) {
  auto flags = std::make_shared<Flags>();
  CLI::App* command = group.add_subcommand(
      "diff", "steps, model and weights that differ; exit status 1 when anything does");
  command->add_option("path", flags->a, "a checkpoint, or a folder of them: the newest")
      ->required();
  command->add_option("other", flags->b, "what it is compared with")->required();
  command->callback(
      [&session, flags] { session.Run([&session, flags] { return Diff(session, *flags); }); });
}

}  // namespace octavo
