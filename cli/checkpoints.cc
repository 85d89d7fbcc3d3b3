// octavo checkpoints list|verify (diff: checkpoints_diff.cc): folders on this machine's disk; no
// controller involved.
#include "base/file.h"
#include "base/status.h"
#include "base/str.h"
#include "cli/commands.h"
#include "cli/output/json.h"
#include "cli/output/table.h"
#include "cli/output/text.h"
#include "worker/checkpoint/store.h"

namespace octavo {
namespace {

struct Flags {
  std::string path;
};

std::string StateText(const CheckpointInfo& info) {
  return info.usable ? "usable" : info.fenced ? "fenced" : "unusable";
}

void WriteInfo(const CheckpointInfo& info, JsonWriter& json) {
  json.Key("path").String(info.path).Key("step").Int(info.step).Key("attempt").Int(info.attempt);
  json.Key("state").String(StateText(info)).Key("problem").String(info.problem);
  json.Key("job").String(info.manifest.job_name).Key("bytes").Int(info.manifest.total_bytes());
  json.Key("shards").Int(static_cast<std::int64_t>(info.manifest.shards.size()));
}

int ListAll(Session& session, const Flags& flags) {
  const auto found = ListCheckpoints(PosixFileSystem::Get(), flags.path);
  if (!found.ok()) {
    return session.Fail(found.status());
  }
  if (session.json()) {
    JsonWriter json;
    json.BeginObject().Key("checkpoints").BeginArray();
    for (const CheckpointInfo& info : *found) {
      json.BeginObject();
      WriteInfo(info, json);
      json.EndObject();
    }
    session.out() << json.EndArray().EndObject().Take() << "\n";
    return kExitOk;
  }
  Table table({{"STEP", Align::kRight},
               {"ATTEMPT", Align::kRight},
               {"STATE"},
               {"JOB"},
               {"SIZE", Align::kRight},
               {"PATH", Align::kLeft, 200},
               {"PROBLEM"}});
  for (const CheckpointInfo& info : *found) {
    table.AddRow({std::to_string(info.step), std::to_string(info.attempt), StateText(info),
                  info.manifest.job_name,
                  HumanBytes(static_cast<double>(info.manifest.total_bytes())), info.path,
                  info.problem});
  }
  session.out() << (found->empty() ? "no checkpoints\n" : table.Render());
  return kExitOk;
}

int Verify(Session& session, const Flags& flags) {
  PosixFileSystem& fs = PosixFileSystem::Get();
  const auto found = ListCheckpoints(fs, flags.path);
  if (!found.ok()) {
    return session.Fail(found.status());
  }
  if (found->empty()) {
    return session.Fail(NotFoundError(StrCat("no checkpoint in ", flags.path)));
  }
  int code = kExitOk;
  JsonWriter json;
  json.BeginObject().Key("checkpoints").BeginArray();
  for (const CheckpointInfo& info : *found) {
    const absl::Status status = VerifyCheckpoint(fs, info.path);
    // A fenced checkpoint is left over, not damaged: nobody loads it.
    const bool good = status.ok() && (info.usable || info.fenced);
    const std::string problem =
        status.ok() ? (info.usable ? std::string() : info.problem) : Message(status);
    if (!good) {
      code = kExitJobFailed;
    }
    if (session.json()) {
      json.BeginObject();
      WriteInfo(info, json);
      json.Key("verified").Bool(good).Key("damage").String(good ? "" : problem).EndObject();
    } else {
      session.out() << (good ? "ok       " : "DAMAGED  ") << Printable(info.path)
                    << (problem.empty() ? "" : "  " + Printable(problem)) << "\n";
    }
  }
  json.EndArray().EndObject();
  if (session.json()) {
    session.out() << json.Take() << "\n";
  }
  return code;
}

}  // namespace

void AddCheckpoints(CLI::App& app, Session& session) {
  auto flags = std::make_shared<Flags>();
  CLI::App* group =
      app.add_subcommand("checkpoints", "list, verify and compare checkpoints on this disk");
  group->require_subcommand(1);
  CLI::App* list = group->add_subcommand("list", "newest first, unusable ones with their reason");
  list->add_option("path", flags->path, "a job's checkpoint.path, or one checkpoint")->required();
  list->callback(
      [&session, flags] { session.Run([&session, flags] { return ListAll(session, *flags); }); });
  CLI::App* verify = group->add_subcommand("verify", "read every byte and check the checksums");
  verify->add_option("path", flags->path, "a job's checkpoint.path, or one checkpoint")->required();
  verify->callback(
      [&session, flags] { session.Run([&session, flags] { return Verify(session, *flags); }); });
  AddCheckpointsDiff(*group, session);
}

}  // namespace octavo
