#include "base/str.h"
#include "cli/commands.h"
#include "cli/output/json.h"
#include "cli/output/table.h"
#include "cli/output/text.h"

namespace octavo {
namespace {

struct Flags {
  std::string job;
};

int Events(Session& session, const Flags& flags) {
  const absl::StatusOr<Client*> client = session.client();
  if (!client.ok()) {
    return session.Fail(client.status());
  }
  v1::ListEventsRequest request;
  request.set_name(JobResource(flags.job));
  Table table({{"TIME"}, {"REVISION", Align::kRight}, {"KIND"}, {"STEP", Align::kRight}, {"WHAT"}});
  JsonWriter json;
  json.BeginObject().Key("events").BeginArray();
  do {
    const absl::StatusOr<v1::ListEventsResponse> page =
        (*client)->Call(&JobStub::ListEvents, request);
    if (!page.ok()) {
      return session.Fail(page.status());
    }
    for (const v1::JobEvent& event : page->events()) {
      json.Proto(event);
      std::string what = event.message();
      if (event.kind() == "STATE") {
        what = v1::JobState_Name(event.state()) + (what.empty() ? "" : ": " + what);
      }
      table.AddRow({Rfc3339(event.time()), std::to_string(event.revision()), event.kind(),
                    event.step() > 0 ? std::to_string(event.step()) : "", what});
    }
    request.set_page_token(page->next_page_token());
  } while (!request.page_token().empty());
  json.EndArray().EndObject();
  session.out() << (session.json() ? json.Take() + "\n" : table.Render());
  return kExitOk;
}

}  // namespace

void AddEvents(CLI::App& app, Session& session) {
  auto flags = std::make_shared<Flags>();
  CLI::App* command = app.add_subcommand("events", "the history of a job");
  command->add_option("job", flags->job, "name of the job")->required();
  command->callback(
      [&session, flags] { session.Run([&session, flags] { return Events(session, *flags); }); });
}

}  // namespace octavo
