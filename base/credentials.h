// Who may do what: TLS key material and bearer tokens, as plain values (gRPC is wired elsewhere).
//
//   ASSIGN_OR_RETURN(TlsMaterial tls, LoadTls({.cert_path = c, .key_path = k, .ca_path = a}, fs));
//   ASSIGN_OR_RETURN(TokenTable tokens, TokenTable::Load("/etc/octavo/tokens", fs));
//   const Principal* who = tokens.Find(bearer);   // nullptr: unknown token
//
// Token file: one `token role name` a line; '#' begins a comment; roles are viewer < submitter <
// operator. Tokens are compared in constant time, and error messages and logs never contain one.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/file.h"

namespace octavo {

struct TlsFiles {
  std::string cert_path;  // PEM chain, own certificate first
  std::string key_path;   // PEM private key
  std::string ca_path;    // PEM, the authority that peers must be signed by (mTLS)

  bool empty() const { return cert_path.empty() && key_path.empty() && ca_path.empty(); }
};

struct TlsMaterial {
  std::string cert_pem;
  std::string key_pem;
  std::string ca_pem;
};

// Reads and checks: all three are present, are PEM of the right kind, and key and certificate
// belong together. Errors: INVALID_ARGUMENT or the file error, always with the path and what to do.
absl::StatusOr<TlsMaterial> LoadTls(const TlsFiles& files, const FileSystem& fs);

enum class Role { kViewer, kSubmitter, kOperator };  // each may do all that the ones before may
const char* RoleName(Role role);

struct Principal {
  std::string name;
  Role role = Role::kViewer;
};

class TokenTable {
 public:
  static constexpr std::size_t kTokenLengthMin = 16;  // bytes; shorter ones can be guessed

  static absl::StatusOr<TokenTable> Load(const std::string& path, const FileSystem& fs);
  // `source` names the text in errors: "tokens:3: unknown role \"admin\"".
  static absl::StatusOr<TokenTable> Parse(std::string_view text, const std::string& source);

  // The owner of the token, or nullptr. Takes the same time for every token of the same length.
  const Principal* Find(std::string_view token) const;

  std::size_t size() const { return entries_.size(); }

 private:
  struct Entry {
    std::string token;
    Principal principal;
  };
  std::vector<Entry> entries_;
};

// One secret from a file (first line, spaces stripped), for clients.
absl::StatusOr<std::string> LoadSecret(const std::string& path, const FileSystem& fs);

// Equality in time that depends on the lengths only.
bool ConstantTimeEquals(std::string_view a, std::string_view b);

}  // namespace octavo
