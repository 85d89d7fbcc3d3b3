#include "cli/job_verb.h"

#include "cli/output/json.h"
#include "cli/output/text.h"

namespace octavo {
namespace {

struct Flags {
  std::string job;
  std::string reason;
  std::string etag;
  std::string request_id;
};

int RunVerb(Session& session, const JobVerb& verb, const Flags& flags) {
  v1::JobVerbRequest request;
  request.set_name(JobResource(flags.job));
  request.set_reason(flags.reason);
  request.set_etag(flags.etag);
  request.set_request_id(flags.request_id.empty() ? NewRequestId() : flags.request_id);
  const absl::StatusOr<Client*> client = session.client();
  if (!client.ok()) {
    return session.Fail(client.status());
  }
  const absl::StatusOr<v1::Job> job = (*client)->Call(verb.method, request);
  if (!job.ok()) {
    const int code = session.Fail(job.status());
    if (code == kExitUnavailable) {
      session.err() << "it may have been done; --request-id " << request.request_id()
                    << " repeats it safely\n";
    }
    return code;
  }
  if (session.json()) {
    session.out() << ToJson(*job);
  } else {
    session.out() << BareName(job->name()) << ": " << verb.done << " ("
                  << v1::JobState_Name(job->state()) << ")\n";
  }
  return kExitOk;
}

}  // namespace

void AddJobVerb(CLI::App& app, Session& session, const JobVerb& verb) {
  auto flags = std::make_shared<Flags>();
  CLI::App* command = app.add_subcommand(verb.name, verb.help);
  command->add_option("job", flags->job, "name of the job")->required();
  command->add_option("--reason", flags->reason, "kept in the job's history");
  command->add_option("--etag", flags->etag, "only if the job still has this etag");
  command->add_option("--request-id", flags->request_id, "repeat under this id");
  command->callback([&session, verb, flags] {
    session.Run([&session, verb, flags] { return RunVerb(session, verb, *flags); });
  });
}

}  // namespace octavo
