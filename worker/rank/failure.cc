#include "worker/rank/failure.h"

#include <optional>
#include <string>

#include "base/status.h"
#include "base/str.h"

namespace octavo {
namespace {

constexpr char kPayload[] = "octavo/failure-class";

}  // namespace

absl::Status WithFailure(const absl::Status& status, FailureClass failure) {
  if (status.ok() || status.GetPayload(kPayload).has_value()) {
    return status;
  }
  absl::Status marked = status;
  marked.SetPayload(kPayload, absl::Cord(std::to_string(static_cast<int>(failure))));
  return marked;
}

absl::Status MarkIfPermanent(const absl::Status& status, std::int32_t attempt) {
  switch (status.code()) {
    case absl::StatusCode::kDataLoss:
    case absl::StatusCode::kInvalidArgument:
      return WithFailure(status, FailureClass::kSpecRejected);
    case absl::StatusCode::kNotFound:
    case absl::StatusCode::kFailedPrecondition:  // a file where a folder should be, for example
    case absl::StatusCode::kPermissionDenied:
      return attempt <= 1 ? WithFailure(status, FailureClass::kSpecRejected) : status;
    default:
      return status;
  }
}

FailureClass MarkOf(const absl::Status& status) {
  const auto mark = status.GetPayload(kPayload);
  return mark.has_value() ? static_cast<FailureClass>(ParseInt64(std::string(*mark)).value_or(0))
                          : FailureClass::kNone;
}

FailureClass FailureOf(const absl::Status& status) {
  if (status.ok()) {
    return FailureClass::kNone;
  }
  if (const FailureClass mark = MarkOf(status); mark != FailureClass::kNone) {
    return mark;
  }
  switch (status.code()) {
    case absl::StatusCode::kDeadlineExceeded:
    case absl::StatusCode::kUnavailable:
      return FailureClass::kCollectiveTimeout;
    case absl::StatusCode::kResourceExhausted:
      return FailureClass::kRankOom;
    case absl::StatusCode::kInvalidArgument:
      return FailureClass::kSpecRejected;
    case absl::StatusCode::kInternal:
      return FailureClass::kDeviceFault;
    default:
      return FailureClass::kRankExit;
  }
}

}  // namespace octavo
