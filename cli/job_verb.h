// cancel, suspend, resume and checkpoint: one request, one answer.
#pragma once

#include <string>

#include "cli/session.h"

namespace octavo {

struct JobVerb {
  const char* name;  // of the command
  const char* help;
  const char* done;  // "cancelling"
  grpc::Status (JobStub::*method)(grpc::ClientContext*, const v1::JobVerbRequest&, v1::Job*);
};

void AddJobVerb(CLI::App& app, Session& session, const JobVerb& verb);

}  // namespace octavo
