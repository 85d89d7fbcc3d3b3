#include "cli/commands.h"
#include "cli/job_verb.h"

namespace octavo {

void AddResume(CLI::App& app, Session& session) {
  AddJobVerb(app, session,
             {.name = "resume",
              .help = "let a suspended job run again",
              .done = "resumed",
              .method = &JobStub::ResumeJob});
}

}  // namespace octavo
