#include "base/version.h"

#include "cli/commands.h"
#include "cli/output/json.h"
#include "cli/output/text.h"

namespace octavo {
namespace {

struct Flags {
  bool client_only = false;
};

void Print(Session& session, const v1::Version* server) {
  if (session.json()) {
    JsonWriter json;
    json.BeginObject().Key("client").String(kVersion);
    if (server != nullptr) {
      json.Key("controller").String(server->version()).Key("api").String(server->api());
    }
    session.out() << json.EndObject().Take() << "\n";
    return;
  }
  session.out() << "octavo      " << kVersion << "\n";
  if (server != nullptr) {
    session.out() << "controller  " << Printable(server->version()) << " (API "
                  << Printable(server->api()) << ")\n";
  }
}

int ShowVersion(Session& session, const Flags& flags) {
  if (flags.client_only) {
    Print(session, nullptr);
    return kExitOk;
  }
  const absl::StatusOr<Client*> client = session.client();
  if (!client.ok()) {
    return session.Fail(client.status());
  }
  const absl::StatusOr<v1::Version> version =
      (*client)->Call(&JobStub::GetVersion, v1::GetVersionRequest());
  Print(session, version.ok() ? &*version : nullptr);
  return version.ok() ? int{kExitOk} : session.Fail(version.status());
}

}  // namespace

void AddVersion(CLI::App& app, Session& session) {
  auto flags = std::make_shared<Flags>();
  CLI::App* command = app.add_subcommand("version", "versions of this program and the controller");
  command->add_flag("--client", flags->client_only, "only this program; asks nobody");
  command->callback([&session, flags] {
    session.Run([&session, flags] { return ShowVersion(session, *flags); });
  });
}

}  // namespace octavo
