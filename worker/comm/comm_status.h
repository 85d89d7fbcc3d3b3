// CommResult ↔ absl::Status. Apart from communicator.h because the CUDA plug-in must not see absl.
#pragma once

#include "absl/status/status.h"
#include "base/status.h"
#include "worker/comm/communicator.h"

namespace octavo {

// kTimeout → DEADLINE_EXCEEDED, kPeerLost → UNAVAILABLE, kFault → INTERNAL; the message is kept.
inline absl::Status ToStatus(const CommResult& result) {
  switch (result.code) {
    case CommResult::Code::kOk:
      return absl::OkStatus();
    case CommResult::Code::kTimeout:
      return DeadlineExceededError(result.message);
    case CommResult::Code::kPeerLost:
      return UnavailableError(result.message);
    case CommResult::Code::kFault:
      break;
  }
  return InternalError(result.message);
}

}  // namespace octavo
