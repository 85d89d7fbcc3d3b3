#include "cli/session.h"

#include "base/status.h"
#include "base/str.h"
#include "cli/output/text.h"
#include "proto/convert/error_detail.h"

namespace octavo {

int Session::Execute() {
  if (!body_) {
    return kExitOk;
  }
  const int code = body_();
  out_.flush();
  return code;
}

absl::StatusOr<Client*> Session::client() {
  if (client_ == nullptr) {
    ASSIGN_OR_RETURN(client_, Client::Connect(options));
  }
  return client_.get();
}

const StopSignals* Session::BlockSignals() {
  if (handles_signals && signals_ == nullptr) {
    signals_ = std::make_unique<StopSignals>();
  }
  return signals_.get();
}

int Session::Fail(const absl::Status& status) {
  const std::optional<v1::ErrorDetail> detail = GetErrorDetail(status);
  // A message that lists its violations itself has them on further lines: show each once.
  const std::string message = Message(status);
  err_ << "error: " << Printable(message.substr(0, message.find('\n'))) << "\n";
  if (detail.has_value() && detail->violations_size() > 0) {
    for (const v1::FieldViolation& violation : detail->violations()) {
      std::string place;
      if (violation.line() > 0) {
        place = StrCat(violation.line(), ":", violation.column(), ": ");
      }
      err_ << Printable(
                  StrCat("  ", place, violation.field(), violation.field().empty() ? "" : ": ",
                         violation.found().empty() ? std::string()
                                                   : StrCat("found ", violation.found(), "; "),
                         violation.message()))
           << "\n";
    }
  } else if (message.find('\n') != std::string::npos) {
    err_ << Printable(message.substr(message.find('\n') + 1), /*keep_newlines=*/true) << "\n";
  }
  return ExitCodeOf(status);
}

}  // namespace octavo
