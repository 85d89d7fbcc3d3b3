// octavo explain: what happened to a job and why, in sentences, from its resource, plans and
// events.
#include "base/status.h"
#include "cli/commands.h"
#include "cli/explain_story.h"
#include "cli/output/json.h"
#include "cli/output/text.h"

namespace octavo {
namespace {

struct Flags {
  std::string job;
  bool all = false;
};

absl::StatusOr<StoryInput> Gather(Client& client, const std::string& name) {
  StoryInput input;
  v1::GetJobRequest get;
  get.set_name(name);
  ASSIGN_OR_RETURN(input.job, client.Call(&JobStub::GetJob, get));
  v1::ListPlansRequest plans;
  plans.set_name(name);
  do {
    ASSIGN_OR_RETURN(const v1::ListPlansResponse page, client.Call(&JobStub::ListPlans, plans));
    input.plans.insert(input.plans.end(), page.plans().begin(), page.plans().end());
    plans.set_page_token(page.next_page_token());
  } while (!plans.page_token().empty());
  v1::ListEventsRequest events;
  events.set_name(name);
  do {
    ASSIGN_OR_RETURN(const v1::ListEventsResponse page, client.Call(&JobStub::ListEvents, events));
    input.events.insert(input.events.end(), page.events().begin(), page.events().end());
    events.set_page_token(page.next_page_token());
  } while (!events.page_token().empty());
  v1::GetPrecisionRequest precision;
  precision.set_name(name);
  ASSIGN_OR_RETURN(input.precision, client.Call(&JobStub::GetPrecision, precision));
  return input;
}

int Explain(Session& session, const Flags& flags) {
  const absl::StatusOr<Client*> client = session.client();
  if (!client.ok()) {
    return session.Fail(client.status());
  }
  const absl::StatusOr<StoryInput> input = Gather(**client, JobResource(flags.job));
  if (!input.ok()) {
    return session.Fail(input.status());
  }
  const std::vector<std::string> sentences = flags.all ? FullStory(*input) : ShortStory(*input);
  if (session.json()) {
    JsonWriter json;
    json.BeginObject().Key("sentences").BeginArray();
    for (const std::string& sentence : sentences) {
      json.String(sentence);
    }
    session.out() << json.EndArray().EndObject().Take() << "\n";
    return kExitOk;
  }
  for (const std::string& sentence : sentences) {
    session.out() << Printable(sentence) << "\n";
  }
  return kExitOk;
}

}  // namespace

void AddExplain(CLI::App& app, Session& session) {
  auto flags = std::make_shared<Flags>();
  CLI::App* command = app.add_subcommand("explain", "what happened to a job, and why");
  command->add_option("job", flags->job, "name of the job")->required();
  command->add_flag("--all", flags->all, "every decision and warning by itself");
  command->callback(
      [&session, flags] { session.Run([&session, flags] { return Explain(session, *flags); }); });
}

}  // namespace octavo
