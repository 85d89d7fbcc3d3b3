#include "base/clock.h"
#include "base/str.h"
#include "cli/commands.h"
#include "cli/output/json.h"
#include "cli/output/table.h"
#include "cli/output/text.h"

namespace octavo {
namespace {

std::string RunningCell(const v1::Worker& worker) {
  std::vector<std::string> running;
  for (const std::string& rank : worker.running()) {
    running.push_back(BareName(rank));
  }
  return StrJoin(running, " ");
}

int Workers(Session& session) {
  const absl::StatusOr<Client*> client = session.client();
  if (!client.ok()) {
    return session.Fail(client.status());
  }
  v1::ListWorkersRequest request;
  std::vector<v1::Worker> workers;
  do {
    absl::StatusOr<v1::ListWorkersResponse> page = (*client)->Call(&JobStub::ListWorkers, request);
    if (!page.ok()) {
      return session.Fail(page.status());
    }
    for (v1::Worker& worker : *page->mutable_workers()) {
      workers.push_back(std::move(worker));
    }
    request.set_page_token(page->next_page_token());
  } while (!request.page_token().empty());
  if (session.json()) {
    JsonWriter json;
    json.BeginObject().Key("workers").BeginArray();
    for (const v1::Worker& worker : workers) {
      json.Proto(worker);
    }
    session.out() << json.EndArray().EndObject().Take() << "\n";
    return kExitOk;
  }
  Table table({{"WORKER"},
               {"STATE"},
               {"DEVICE"},
               {"SLOTS", Align::kRight},
               {"FREE", Align::kRight},
               {"ADDRESS"},
               {"LAST SEEN"},
               {"RUNNING"},
               {"MESSAGE"}});
  const std::int64_t now = RealClock::Get().UnixMicros();
  for (const v1::Worker& worker : workers) {
    table.AddRow({BareName(worker.name()), worker.state(), worker.device(),
                  std::to_string(worker.slots()), std::to_string(worker.slots_free()),
                  worker.address(), Ago(worker.last_seen_time(), now), RunningCell(worker),
                  worker.message()});
  }
  session.out() << (workers.empty() ? "no workers\n" : table.Render());
  return kExitOk;
}

}  // namespace

void AddWorkers(CLI::App& app, Session& session) {
  CLI::App* command = app.add_subcommand("workers", "list workers, silent ones too");
  command->callback([&session] { session.Run([&session] { return Workers(session); }); });
}

}  // namespace octavo
