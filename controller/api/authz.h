// Who may call what. Off unless a token file or roles for certificates are configured; then every
// RPC needs a principal: a bearer token (metadata "authorization"), or the common name of the
// client's verified certificate.
//
//   viewer     Get, List, Watch, ReadLogs, GetVersion
//   submitter  and Submit, Cancel, Suspend, Resume, Checkpoint
//   operator   and Drain, SetPrecision; workers' sessions
//
// Thread-safe after construction.
#pragma once

#include <map>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "base/credentials.h"
#include "grpcpp/server_context.h"

namespace octavo {

class Authorizer {
 public:
  Authorizer() = default;  // off: everybody may do everything
  // `names`: common name of a client certificate → role.
  Authorizer(std::optional<TokenTable> tokens, std::map<std::string, Role> names);

  // The caller's name ("" when off and unknown). UNAUTHENTICATED: no known token or certificate;
  // PERMISSION_DENIED: the role is too low; both say what is needed and how to give it.
  absl::StatusOr<std::string> Check(const grpc::ServerContextBase& context, Role needed) const;

  bool enabled() const { return tokens_.has_value() || !names_.empty(); }

 private:
  std::optional<TokenTable> tokens_;
  std::map<std::string, Role> names_;
};

}  // namespace octavo
