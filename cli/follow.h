// Follows a job to its end over a connection that may break: the controller may restart while the
// training goes on.
#pragma once

#include <functional>
#include <string>

#include "absl/status/statusor.h"
#include "base/signals.h"
#include "cli/client.h"
#include "octavo/v1/job.pb.h"

namespace octavo {

struct FollowArgs {
  std::string job;                       // jobs/{job}
  std::int64_t resume_token = 0;         // last revision seen; 0: from now
  double give_up_seconds = 300;          // without a connection
  const StopSignals* signals = nullptr;  // Ctrl-C ends the follow; null: it does not
  std::function<void(const v1::JobEvent&)> on_event;
  std::function<void(const std::string&)> on_note;  // "connection lost; …", once per outage
};

// The job once it has ended or is suspended. CANCELLED: interrupted. NOT_FOUND: no such job.
// UNAVAILABLE: no connection for give_up_seconds (the job goes on).
absl::StatusOr<v1::Job> Follow(Client& client, const FollowArgs& args);

}  // namespace octavo
