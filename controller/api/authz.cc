#include "controller/api/authz.h"

#include <utility>
#include <vector>

#include "base/status.h"
#include "base/str.h"
#include "proto/convert/error_detail.h"

namespace octavo {
namespace {

std::string BearerToken(const grpc::ServerContextBase& context) {
  const auto& metadata = context.client_metadata();
  const auto found = metadata.find("authorization");
  if (found == metadata.end()) {
    return {};
  }
  const std::string value(found->second.data(), found->second.size());
  constexpr std::string_view kScheme = "Bearer ";
  return StartsWith(value, kScheme) ? value.substr(kScheme.size()) : std::string();
}

std::string CommonName(const grpc::ServerContextBase& context) {
  const std::shared_ptr<const grpc::AuthContext> auth = context.auth_context();
  if (auth == nullptr || !auth->IsPeerAuthenticated()) {
    return {};
  }
  const std::vector<grpc::string_ref> names = auth->FindPropertyValues("x509_common_name");
  return names.empty() ? std::string() : std::string(names[0].data(), names[0].size());
}

}  // namespace

Authorizer::Authorizer(std::optional<TokenTable> tokens, std::map<std::string, Role> names)
    : tokens_(std::move(tokens)), names_(std::move(names)) {}

absl::StatusOr<std::string> Authorizer::Check(const grpc::ServerContextBase& context,
                                              Role needed) const {
  const std::string common_name = CommonName(context);
  if (!enabled()) {
    return common_name;
  }
  std::optional<Principal> who;
  if (tokens_.has_value()) {
    if (const Principal* known = tokens_->Find(BearerToken(context))) {
      who = *known;
    }
  }
  const auto named = names_.find(common_name);
  if (!who.has_value() && !common_name.empty() && named != names_.end()) {
    who = Principal{.name = common_name, .role = named->second};
  }
  if (!who.has_value()) {
    return WithDetail(
        UnauthenticatedError(StrCat("no known token or certificate was presented",
                                    common_name.empty() ? "" : " (certificate: ", common_name,
                                    common_name.empty() ? "" : ")",
                                    "; give a token with --token-file or OCTAVO_TOKEN_FILE")),
        "UNAUTHENTICATED");
  }
  if (who->role < needed) {
    return WithDetail(PermissionDeniedError(StrCat(who->name, " is a ", RoleName(who->role),
                                                   "; this needs the role ", RoleName(needed))),
                      "PERMISSION_DENIED");
  }
  return who->name;
}

}  // namespace octavo
