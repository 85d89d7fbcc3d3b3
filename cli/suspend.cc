#include "cli/commands.h"
#include "cli/job_verb.h"

namespace octavo {

void AddSuspend(CLI::App& app, Session& session) {
  AddJobVerb(app, session,
             {.name = "suspend",
              .help = "save a checkpoint and free the job's slots",
              .done = "suspend requested",
              .method = &JobStub::SuspendJob});
}

}  // namespace octavo
