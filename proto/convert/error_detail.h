// Machine-readable errors: absl::Status with an octavo.v1.ErrorDetail ↔ a gRPC status with the
// trailer "octavo-error-bin". No gRPC types here: both sides deal in code, message and bytes.
//
//   server:  absl::Status s = WithDetail(InvalidArgumentError("…"), "SPEC_INVALID", violations);
//            context->AddTrailingMetadata(kErrorTrailer, ErrorTrailerBytes(s));
//   client:  absl::Status s = StatusFromWire(code, message, trailer_bytes);
//            if (auto detail = GetErrorDetail(s)) …
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "octavo/v1/job.pb.h"

namespace octavo {

inline constexpr char kErrorTrailer[] = "octavo-error-bin";

// gRPC refuses metadata above 8 KiB altogether (GRPC_ARG_MAX_METADATA_SIZE), so that the client
// would lose the error; details are cut below that, and say how many violations were left out.
inline constexpr std::size_t kErrorTrailerBytesMax = 6000;
// The message itself travels in metadata as well.
inline constexpr std::size_t kErrorMessageBytesMax = 1500;

// reason: UPPER_SNAKE.
absl::Status WithDetail(const absl::Status& status, std::string_view reason,
                        const std::vector<v1::FieldViolation>& violations = {});
std::optional<v1::ErrorDetail> GetErrorDetail(const absl::Status& status);
// Reason of the detail, or "".
std::string ErrorReason(const absl::Status& status);

// Empty when the status has no detail.
std::string ErrorTrailerBytes(const absl::Status& status);
// The message, cut to what metadata can carry.
std::string ErrorWireMessage(const absl::Status& status);
// `code` as of gRPC (equal to absl's); out of range becomes UNKNOWN. Bytes that are no ErrorDetail
// are ignored.
absl::Status StatusFromWire(int code, const std::string& message, const std::string& trailer_bytes);

}  // namespace octavo
