#include "base/str.h"
#include "cli/commands.h"
#include "cli/output/json.h"
#include "cli/output/log_lines.h"
#include "cli/output/text.h"
#include "cli/validators.h"

namespace octavo {
namespace {

struct Flags {
  std::string job;
  int rank = -1;
  int attempt = 0;
  bool follow = false;
  std::int64_t tail = 0;
};

int Logs(Session& session, const Flags& flags) {
  const absl::StatusOr<Client*> client = session.client();
  if (!client.ok()) {
    return session.Fail(client.status());
  }
  v1::ReadLogsRequest request;
  request.set_name(JobResource(flags.job));
  request.set_rank(flags.rank);
  request.set_attempt(flags.attempt);
  request.set_follow(flags.follow);
  request.set_tail_lines(flags.tail);
  LogLines lines([&](const LogLines::Source& source, std::string_view line) {
    if (session.json()) {
      session.out() << JsonWriter(0)
                           .BeginObject()
                           .Key("attempt")
                           .Int(source.attempt)
                           .Key("rank")
                           .Int(source.rank)
                           .Key("line")
                           .String(line)
                           .EndObject()
                           .Take();
    } else {
      if (flags.rank < 0) {
        session.out() << "rank " << source.rank << " | ";
      }
      // A log may hold anything; a terminal must not obey it. Files and pipes get the bytes.
      session.out() << (session.is_terminal ? Printable(line, /*keep_newlines=*/true)
                                            : std::string(line));
    }
    session.out() << "\n";
  });
  grpc::ClientContext context;
  (*client)->Prepare(&context);
  const auto reader = (*client)->stub().ReadLogs(&context, request);
  v1::LogChunk chunk;
  bool printed = false;
  while (reader->Read(&chunk)) {
    printed = true;
    lines.Add({.attempt = chunk.attempt(), .rank = chunk.rank()}, chunk.text());
    session.out().flush();
    if (!session.out()) {  // the reader of our output is gone
      context.TryCancel();
      break;
    }
  }
  lines.Flush();
  const absl::Status status = (*client)->ToAbsl(reader->Finish(), context);
  if (!status.ok() && session.out()) {
    // Without this a cut connection looks like the end of the log.
    const int code = session.Fail(status);
    if (printed) {
      session.err() << "the log above may be incomplete\n";
    }
    return code;
  }
  return kExitOk;
}

}  // namespace

void AddLogs(CLI::App& app, Session& session) {
  auto flags = std::make_shared<Flags>();
  CLI::App* command = app.add_subcommand("logs", "what the ranks of a job printed");
  command->add_option("job", flags->job, "name of the job")->required();
  command->add_option("--rank", flags->rank, "one rank; default: all, with a prefix")
      ->check(AtLeast(0));
  command->add_option("--attempt", flags->attempt, "which attempt; default: the newest")
      ->check(AtLeast(1));
  command->add_option("--tail", flags->tail, "only the last so many lines; default: all kept")
      ->check(AtLeast(1));
  command->add_flag("--follow,-f", flags->follow, "stay and print what comes");
  command->callback(
      [&session, flags] { session.Run([&session, flags] { return Logs(session, *flags); }); });
}

}  // namespace octavo
