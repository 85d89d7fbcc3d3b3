#include "cli/commands.h"
#include "proto/spec/job_spec.h"

namespace octavo {

void AddSpecReference(CLI::App& app, Session& session) {
  CLI::App* command =
      app.add_subcommand("spec-reference", "every key of a job file: meaning, default, bounds");
  command->callback([&session] {
    session.Run([&session] {
      session.out() << SpecReference();
      return int{kExitOk};
    });
  });
}

}  // namespace octavo
