#include "cli/commands.h"
#include "cli/job_verb.h"

namespace octavo {

void AddCheckpoint(CLI::App& app, Session& session) {
  AddJobVerb(app, session,
             {.name = "checkpoint",
              .help = "save a checkpoint at the next step",
              .done = "checkpoint requested",
              .method = &JobStub::CheckpointJob});
}

}  // namespace octavo
