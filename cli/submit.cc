#include <cerrno>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <system_error>

#include "base/file.h"
#include "base/status.h"
#include "base/str.h"
#include "cli/commands.h"
#include "cli/follow_command.h"
#include "cli/output/json.h"
#include "cli/output/text.h"
#include "cli/validators.h"
#include "proto/convert/error_detail.h"
#include "proto/limits.h"
#include "proto/precision/plan.h"
#include "proto/spec/job_spec.h"

namespace octavo {
namespace {

struct Flags {
  std::string file;
  bool follow = false;
  bool dry_run = false;
  std::string request_id;
  double give_up_seconds = 300;
};

// At most one byte more than a spec may have, so that the check of the size still sees it; a device
// or a pipe by name has no end that could be waited for.
absl::StatusOr<std::string> ReadSpec(const std::string& path) {
  std::string text(static_cast<std::size_t>(kMaxSpecBytes) + 1, '\0');
  std::ifstream file;
  if (path != "-") {
    std::error_code error;
    const std::filesystem::file_status status = std::filesystem::status(path, error);
    if (std::filesystem::exists(status) && !std::filesystem::is_regular_file(status)) {
      return InvalidArgumentError(
          StrCat("reading ", path, ": not a regular file; - reads standard input"));
    }
    errno = 0;
    file.open(path, std::ios::binary);
    if (!file) {
      return ErrnoStatus(errno, StrCat("opening ", path));
    }
  }
  std::istream& in = path == "-" ? std::cin : file;
  in.read(text.data(), static_cast<std::streamsize>(text.size()));
  if (in.bad()) {
    return UnavailableError(StrCat("reading ", path, " failed"));
  }
  text.resize(static_cast<std::size_t>(in.gcount()));
  if (static_cast<std::int64_t>(text.size()) > kMaxSpecBytes) {
    return InvalidArgumentError(StrCat(path == "-" ? "stdin" : path, ": longer than ",
                                       kMaxSpecBytes, " bytes, the most that a job file may have"));
  }
  return text;
}

// Errors of the local check, one a line, as an editor's error list understands them.
int FailSpec(Session& session, const ParsedJobSpec& parsed) {
  session.err() << Printable(parsed.Text(), /*keep_newlines=*/true) << "error: " << parsed.file_name
                << ": " << parsed.violations.size()
                << (parsed.violations.size() == 1 ? " error" : " errors")
                << "; nothing was submitted (octavo spec-reference lists every key)\n";
  return kExitUsage;
}

void PrintDryRun(Session& session, const v1::Job& job) {
  if (session.json()) {
    session.out() << ToJson(job);
    return;
  }
  const v1::JobSpec& spec = job.spec();
  session.out() << "valid: " << BareName(job.name()) << ", " << spec.model().layers() << " layers, "
                << spec.parallel().ranks() << " ranks, expert_parallel "
                << spec.parallel().expert_parallel() << ", " << spec.train().steps()
                << " steps; nothing was submitted\n";
  if (!job.pending().sentence().empty()) {
    session.out() << "now: " << Printable(job.pending().sentence()) << "\n";
  }
  session.out() << "precision plan:\n" << DebugString(BuildPlanFromSpec(spec));
}

int Submit(Session& session, const Flags& flags) {
  const absl::StatusOr<std::string> text = ReadSpec(flags.file);
  if (!text.ok()) {
    // Whatever else is wrong with the file, the command line is.
    return session.Fail(text.status()) == kExitNotFound ? kExitNotFound : kExitUsage;
  }
  const std::string name = flags.file == "-" ? "stdin" : flags.file;
  const ParsedJobSpec parsed = ParseJobSpec(*text, name);
  if (!parsed.ok()) {
    return FailSpec(session, parsed);
  }
  if (flags.follow) {
    session.BlockSignals();
  }
  v1::SubmitJobRequest request;
  // Made before the first attempt: however often this is sent, it is one job.
  request.set_request_id(flags.request_id.empty() ? NewRequestId() : flags.request_id);
  request.set_spec_yaml(*text);
  request.set_file_name(name);
  request.set_validate_only(flags.dry_run);
  const absl::StatusOr<Client*> client = session.client();
  if (!client.ok()) {
    return session.Fail(client.status());
  }
  const absl::StatusOr<v1::Job> job = (*client)->Call(&JobStub::SubmitJob, request);
  if (!job.ok()) {
    const int code = session.Fail(job.status());
    if (!flags.dry_run && (code == kExitUnavailable || code == kExitInternal)) {
      session.err() << "the job may have been accepted; the same command with --request-id "
                    << request.request_id() << " never makes a second one\n";
    }
    return code;
  }
  if (flags.dry_run) {
    PrintDryRun(session, *job);
    return kExitOk;
  }
  if (!flags.follow) {
    if (session.json()) {
      session.out() << ToJson(*job);
    } else {
      session.out() << job->name() << " submitted; octavo watch " << BareName(job->name())
                    << " follows it\n";
    }
    return kExitOk;
  }
  (session.json() ? session.err() : session.out()) << job->name() << " submitted" << std::endl;
  return FollowToTheEnd(session, {.job = job->name(), .give_up_seconds = flags.give_up_seconds});
}

}  // namespace

void AddSubmit(CLI::App& app, Session& session) {
  auto flags = std::make_shared<Flags>();
  CLI::App* command = app.add_subcommand("submit", "check a job file and submit it");
  command->add_option("file", flags->file, "YAML file; - reads standard input")->required();
  command->add_flag("--follow,-f", flags->follow,
                    "stay until the job ends; the exit status is that of the job");
  command->add_flag("--dry-run", flags->dry_run,
                    "only check, here and at the controller, and print the precision plan");
  command
      ->add_option("--request-id", flags->request_id,
                   "send again under the id that a failed submission printed")
      ->check(CLI::Validator(
          [](std::string& id) {
            return id.size() > 128 ? std::string("at most 128 characters") : std::string();
          },
          "", "request id"));
  command
      ->add_option("--give-up", flags->give_up_seconds,
                   "seconds without the controller after which following ends")
      ->check(FiniteRange(0, 1e9))
      ->capture_default_str();
  command->callback(
      [&session, flags] { session.Run([&session, flags] { return Submit(session, *flags); }); });
}

}  // namespace octavo
