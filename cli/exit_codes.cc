#include "cli/exit_codes.h"

namespace octavo {

ExitCode ExitCodeOf(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kOk:
      return kExitOk;
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kOutOfRange:
      return kExitUsage;
    case absl::StatusCode::kNotFound:
      return kExitNotFound;
    case absl::StatusCode::kFailedPrecondition:
    case absl::StatusCode::kAlreadyExists:
    case absl::StatusCode::kAborted:
      return kExitConflict;
    case absl::StatusCode::kUnavailable:
    case absl::StatusCode::kDeadlineExceeded:
    case absl::StatusCode::kResourceExhausted:
      return kExitUnavailable;
    case absl::StatusCode::kPermissionDenied:
    case absl::StatusCode::kUnauthenticated:
      return kExitPermission;
    case absl::StatusCode::kDataLoss:
      return kExitJobFailed;
    case absl::StatusCode::kCancelled:
      return kExitInterrupted;
    default:
      return kExitInternal;
  }
}

ExitCode LocalExitCodeOf(const absl::Status& status) {
  return status.code() == absl::StatusCode::kResourceExhausted ||
                 status.code() == absl::StatusCode::kUnavailable
             ? kExitJobFailed
             : ExitCodeOf(status);
}

ExitCode ExitCodeOf(v1::JobState state) {
  switch (state) {
    case v1::FAILED:
      return kExitJobFailed;
    case v1::CANCELLED:
      return kExitJobCancelled;
    case v1::SUSPENDED:
      return kExitJobSuspended;
    default:
      return kExitOk;
  }
}

}  // namespace octavo
