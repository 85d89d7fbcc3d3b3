#include "proto/convert/error_detail.h"

#include "base/status.h"
#include "base/str.h"

namespace octavo {
namespace {

constexpr char kPayloadUrl[] = "octavo.v1.ErrorDetail";

// Cuts at a UTF-8 boundary: gRPC percent-encodes the message, but the reader's terminal should not
// see half a character.
std::string CutUtf8(std::string text, std::size_t limit) {
  if (text.size() <= limit) {
    return text;
  }
  while (limit > 0 && (static_cast<unsigned char>(text[limit]) & 0xC0) == 0x80) {
    --limit;
  }
  text.resize(limit);
  return text + "…";
}

}  // namespace

absl::Status WithDetail(const absl::Status& status, std::string_view reason,
                        const std::vector<v1::FieldViolation>& violations) {
  if (status.ok()) {
    return status;
  }
  v1::ErrorDetail detail;
  detail.set_reason(std::string(reason));
  for (const v1::FieldViolation& violation : violations) {
    *detail.add_violations() = violation;
  }
  absl::Status with = status;
  with.SetPayload(kPayloadUrl, absl::Cord(detail.SerializeAsString()));
  return with;
}

std::optional<v1::ErrorDetail> GetErrorDetail(const absl::Status& status) {
  const auto payload = status.GetPayload(kPayloadUrl);
  if (!payload.has_value()) {
    return std::nullopt;
  }
  v1::ErrorDetail detail;
  if (!detail.ParseFromString(std::string(*payload))) {
    return std::nullopt;
  }
  return detail;
}

std::string ErrorReason(const absl::Status& status) {
  const std::optional<v1::ErrorDetail> detail = GetErrorDetail(status);
  return detail.has_value() ? detail->reason() : std::string();
}

std::string ErrorTrailerBytes(const absl::Status& status) {
  std::optional<v1::ErrorDetail> detail = GetErrorDetail(status);
  if (!detail.has_value()) {
    return {};
  }
  int left_out = 0;
  while (detail->ByteSizeLong() > kErrorTrailerBytesMax && detail->violations_size() > 0) {
    if (left_out > 0) {
      detail->mutable_violations()->RemoveLast();  // the note of the last round
    }
    detail->mutable_violations()->RemoveLast();
    ++left_out;
    v1::FieldViolation* note = detail->add_violations();
    note->set_message(StrCat("and ", left_out, " more; correct these first"));
    if (detail->violations_size() == 1) {
      break;
    }
  }
  return detail->SerializeAsString();
}

std::string ErrorWireMessage(const absl::Status& status) {
  return CutUtf8(Message(status), kErrorMessageBytesMax);
}

absl::Status StatusFromWire(int code, const std::string& message,
                            const std::string& trailer_bytes) {
  if (code == 0) {
    return absl::OkStatus();
  }
  const bool known = code >= 1 && code <= 16;
  absl::Status status =
      MakeStatus(known ? static_cast<absl::StatusCode>(code) : absl::StatusCode::kUnknown, message);
  v1::ErrorDetail detail;
  if (!trailer_bytes.empty() && detail.ParseFromString(trailer_bytes)) {
    status.SetPayload(kPayloadUrl, absl::Cord(trailer_bytes));
  }
  return status;
}

}  // namespace octavo
