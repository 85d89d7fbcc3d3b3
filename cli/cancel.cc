#include "cli/commands.h"
#include "cli/job_verb.h"

namespace octavo {

void AddCancel(CLI::App& app, Session& session) {
  AddJobVerb(app, session,
             {.name = "cancel",
              .help = "end a job; a checkpoint is written first",
              .done = "cancel requested",
              .method = &JobStub::CancelJob});
}

}  // namespace octavo
