// The world's errors as absl::Status: macros to pass them on and constructors that take
// std::string.
//
//   absl::StatusOr<Config> Load(const std::string& path) {
//     ASSIGN_OR_RETURN(std::string text, fs.ReadFile(path));
//     RETURN_IF_ERROR(Annotate(Validate(text), StrCat("loading ", path)));
//     return InvalidArgumentError(StrCat(path, ": found ", n, " rows; valid is 1 to 4"));
//   }
//
// Debian 12's Abseil has its own string_view (not std::string_view) and no status macros; this
// header has the shape of upstream's, so that moving to a newer Abseil is a change of include.
// Codes are chosen by "may the caller retry?": UNAVAILABLE yes, FAILED_PRECONDITION no.
#pragma once

#include <string>
#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/cord.h"

namespace octavo {

inline absl::Status MakeStatus(absl::StatusCode code, std::string_view message) {
  return absl::Status(code, absl::string_view(message.data(), message.size()));
}

inline absl::Status InvalidArgumentError(std::string_view message) {
  return MakeStatus(absl::StatusCode::kInvalidArgument, message);
}
inline absl::Status NotFoundError(std::string_view message) {
  return MakeStatus(absl::StatusCode::kNotFound, message);
}
inline absl::Status FailedPreconditionError(std::string_view message) {
  return MakeStatus(absl::StatusCode::kFailedPrecondition, message);
}
inline absl::Status UnavailableError(std::string_view message) {
  return MakeStatus(absl::StatusCode::kUnavailable, message);
}
inline absl::Status DeadlineExceededError(std::string_view message) {
  return MakeStatus(absl::StatusCode::kDeadlineExceeded, message);
}
inline absl::Status ResourceExhaustedError(std::string_view message) {
  return MakeStatus(absl::StatusCode::kResourceExhausted, message);
}
inline absl::Status AbortedError(std::string_view message) {
  return MakeStatus(absl::StatusCode::kAborted, message);
}
inline absl::Status CancelledError(std::string_view message) {
  return MakeStatus(absl::StatusCode::kCancelled, message);
}
inline absl::Status AlreadyExistsError(std::string_view message) {
  return MakeStatus(absl::StatusCode::kAlreadyExists, message);
}
inline absl::Status InternalError(std::string_view message) {
  return MakeStatus(absl::StatusCode::kInternal, message);
}
inline absl::Status OutOfRangeError(std::string_view message) {
  return MakeStatus(absl::StatusCode::kOutOfRange, message);
}
inline absl::Status DataLossError(std::string_view message) {
  return MakeStatus(absl::StatusCode::kDataLoss, message);
}
inline absl::Status PermissionDeniedError(std::string_view message) {
  return MakeStatus(absl::StatusCode::kPermissionDenied, message);
}
inline absl::Status UnauthenticatedError(std::string_view message) {
  return MakeStatus(absl::StatusCode::kUnauthenticated, message);
}
// The request is understood but this build, device or file format cannot do it (code
// UNIMPLEMENTED).
inline absl::Status UnsupportedError(std::string_view message) {
  return MakeStatus(absl::StatusCode::kUnimplemented, message);
}

inline std::string Message(const absl::Status& status) {
  return std::string(status.message().data(), status.message().size());
}

// "OK" or "CODE_NAME: message".
inline std::string ToString(const absl::Status& status) {
  if (status.ok()) {
    return "OK";
  }
  return absl::StatusCodeToString(status.code()) + ": " + Message(status);
}

// Prefixes the message with what was attempted; keeps code and payloads; OK stays OK.
inline absl::Status Annotate(const absl::Status& status, std::string_view context) {
  if (status.ok()) {
    return status;
  }
  std::string text(context);
  text += ": ";
  text += Message(status);
  absl::Status annotated = MakeStatus(status.code(), text);
  status.ForEachPayload([&annotated](absl::string_view url, const absl::Cord& payload) {
    annotated.SetPayload(url, payload);
  });
  return annotated;
}

// The first error is kept: clean-up that fails later never hides it.
inline void UpdateStatus(absl::Status* first, const absl::Status& next) {
  if (first->ok()) {
    *first = next;
  }
}

namespace status_internal {
inline const absl::Status& GetStatus(const absl::Status& status) { return status; }
template <class T>
const absl::Status& GetStatus(const absl::StatusOr<T>& status_or) {
  return status_or.status();
}
}  // namespace status_internal

}  // namespace octavo

// Returns the Status (of a Status or StatusOr expression) from the enclosing function unless OK.
#define RETURN_IF_ERROR(expr)                                          \
  do {                                                                 \
    const auto& octavo_status_expr = (expr);                           \
    if (!octavo_status_expr.ok()) {                                    \
      return ::octavo::status_internal::GetStatus(octavo_status_expr); \
    }                                                                  \
  } while (false)

#define OCTAVO_STATUS_CAT2(a, b) a##b
#define OCTAVO_STATUS_CAT(a, b) OCTAVO_STATUS_CAT2(a, b)

// ASSIGN_OR_RETURN(std::string text, ReadFile(path)); a type with commas needs (parentheses) or an
// alias.
#define ASSIGN_OR_RETURN(lhs, expr) \
  OCTAVO_ASSIGN_OR_RETURN_IMPL(OCTAVO_STATUS_CAT(octavo_status_or_, __COUNTER__), lhs, expr)
#define OCTAVO_ASSIGN_OR_RETURN_IMPL(temporary, lhs, expr) \
  auto temporary = (expr);                                 \
  if (!temporary.ok()) {                                   \
    return std::move(temporary).status();                  \
  }                                                        \
  lhs = *std::move(temporary)
