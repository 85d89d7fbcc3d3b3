#include "cli/commands.h"
#include "cli/output/json.h"
#include "cli/output/text.h"

namespace octavo {
namespace {

struct Flags {
  std::string worker;
  std::string reason;
  bool undo = false;
};

int Drain(Session& session, const Flags& flags) {
  const absl::StatusOr<Client*> client = session.client();
  if (!client.ok()) {
    return session.Fail(client.status());
  }
  v1::DrainWorkerRequest request;
  request.set_name(WorkerResource(flags.worker));
  request.set_request_id(NewRequestId());
  request.set_reason(flags.reason);
  request.set_undo(flags.undo);
  const absl::StatusOr<v1::Worker> worker = (*client)->Call(&JobStub::DrainWorker, request);
  if (!worker.ok()) {
    return session.Fail(worker.status());
  }
  if (session.json()) {
    session.out() << ToJson(*worker);
  } else {
    session.out() << BareName(worker->name()) << ": " << Printable(worker->state()) << "\n";
  }
  return kExitOk;
}

}  // namespace

void AddDrain(CLI::App& app, Session& session) {
  auto flags = std::make_shared<Flags>();
  CLI::App* command =
      app.add_subcommand("drain", "give a worker no new ranks; its jobs save and move elsewhere");
  command->add_option("worker", flags->worker, "name of the worker")->required();
  command->add_option("--reason", flags->reason, "shown in octavo workers");
  command->add_flag("--undo", flags->undo, "let it take ranks again");
  command->callback(
      [&session, flags] { session.Run([&session, flags] { return Drain(session, *flags); }); });
}

}  // namespace octavo
