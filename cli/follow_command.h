// Following as `submit --follow` and `watch` share it: view, summary, exit code.
#pragma once

#include <string>

#include "cli/session.h"

namespace octavo {

// Table format: live view and summary on stdout. Json: with `stream_events` one event a line on
// stdout; without, plain progress on stderr and the final job on stdout.
struct FollowCommandArgs {
  std::string job;  // jobs/{job}
  std::int64_t resume_token = 0;
  double give_up_seconds = 300;
  bool stream_events = false;
};
int FollowToTheEnd(Session& session, const FollowCommandArgs& args);

}  // namespace octavo
