#include "base/credentials.h"

#include <openssl/bio.h>
#include <openssl/crypto.h>
#include <openssl/pem.h>
#include <openssl/x509.h>

#include <memory>
#include <optional>
#include <sstream>
#include <utility>

#include "base/status.h"
#include "base/str.h"

namespace octavo {
namespace {

struct BioFree {
  void operator()(BIO* bio) const { BIO_free(bio); }
};
struct CertFree {
  void operator()(X509* cert) const { X509_free(cert); }
};
struct KeyFree {
  void operator()(EVP_PKEY* key) const { EVP_PKEY_free(key); }
};
using Certificate = std::unique_ptr<X509, CertFree>;
using Key = std::unique_ptr<EVP_PKEY, KeyFree>;

// A key with a pass phrase must fail, not prompt on the terminal of a daemon.
int NoPassphrase(char*, int, int, void*) { return 0; }

Certificate ParseCertificate(const std::string& pem) {
  const std::unique_ptr<BIO, BioFree> bio(
      BIO_new_mem_buf(pem.data(), static_cast<int>(pem.size())));
  return Certificate(PEM_read_bio_X509(bio.get(), nullptr, NoPassphrase, nullptr));
}
Key ParseKey(const std::string& pem) {
  const std::unique_ptr<BIO, BioFree> bio(
      BIO_new_mem_buf(pem.data(), static_cast<int>(pem.size())));
  return Key(PEM_read_bio_PrivateKey(bio.get(), nullptr, NoPassphrase, nullptr));
}

absl::StatusOr<std::string> ReadNamed(const std::string& path, const char* what,
                                      const FileSystem& fs) {
  if (path.empty()) {
    return InvalidArgumentError(
        StrCat("TLS: no ", what, " file given; mutual TLS needs certificate, key and CA together"));
  }
  absl::StatusOr<std::string> text = fs.ReadFile(path);
  if (!text.ok()) {
    return Annotate(text.status(), StrCat("TLS ", what));
  }
  return text;
}

std::optional<Role> ParseRole(std::string_view text) {
  for (const Role role : {Role::kViewer, Role::kSubmitter, Role::kOperator}) {
    if (text == RoleName(role)) {
      return role;
    }
  }
  return std::nullopt;
}

}  // namespace

absl::StatusOr<TlsMaterial> LoadTls(const TlsFiles& files, const FileSystem& fs) {
  TlsMaterial tls;
  ASSIGN_OR_RETURN(tls.cert_pem, ReadNamed(files.cert_path, "certificate", fs));
  ASSIGN_OR_RETURN(tls.key_pem, ReadNamed(files.key_path, "key", fs));
  ASSIGN_OR_RETURN(tls.ca_pem, ReadNamed(files.ca_path, "CA", fs));
  const Certificate cert = ParseCertificate(tls.cert_pem);
  if (cert == nullptr) {
    return InvalidArgumentError(
        StrCat("TLS certificate ", files.cert_path, ": not a PEM certificate"));
  }
  const Key key = ParseKey(tls.key_pem);
  if (key == nullptr) {
    return InvalidArgumentError(
        StrCat("TLS key ", files.key_path, ": not a PEM private key without pass phrase"));
  }
  if (ParseCertificate(tls.ca_pem) == nullptr) {
    return InvalidArgumentError(StrCat("TLS CA ", files.ca_path, ": not a PEM certificate"));
  }
  if (X509_check_private_key(cert.get(), key.get()) != 1) {
    return InvalidArgumentError(
        StrCat("TLS: key ", files.key_path, " does not belong to certificate ", files.cert_path));
  }
  return tls;
}

const char* RoleName(Role role) {
  switch (role) {
    case Role::kViewer:
      return "viewer";
    case Role::kSubmitter:
      return "submitter";
    case Role::kOperator:
      return "operator";
  }
  return "?";
}

absl::StatusOr<TokenTable> TokenTable::Load(const std::string& path, const FileSystem& fs) {
  absl::StatusOr<std::string> text = fs.ReadFile(path);
  if (!text.ok()) {
    return Annotate(text.status(), "token file");
  }
  return Parse(*text, path);
}

absl::StatusOr<TokenTable> TokenTable::Parse(std::string_view text, const std::string& source) {
  TokenTable table;
  int line_number = 0;
  for (const std::string& raw : StrSplit(text, '\n')) {
    ++line_number;
    const std::string_view line = StripSpace(raw);
    if (line.empty() || line[0] == '#') {
      continue;
    }
    std::istringstream words{std::string(line)};
    std::string token, role_text, name, rest;
    words >> token >> role_text >> name;
    const std::string where = StrCat(source, ":", line_number, ": ");
    if (name.empty() || words >> rest) {
      return InvalidArgumentError(where + "want `token role name`");
    }
    const std::optional<Role> role = ParseRole(role_text);
    if (!role.has_value()) {
      // A line with swapped fields would print the token here: show a word only if it is short.
      const std::string shown =
          role_text.size() < kTokenLengthMin ? StrCat(" \"", role_text, "\"") : "";
      return InvalidArgumentError(
          StrCat(where, "unknown role", shown, "; valid: viewer, submitter, operator"));
    }
    if (token.size() < kTokenLengthMin) {
      return InvalidArgumentError(StrCat(where, "token of ", name, " has ", token.size(),
                                         " bytes; at least ", kTokenLengthMin, " are needed"));
    }
    if (table.Find(token) != nullptr) {
      return InvalidArgumentError(
          StrCat(where, "token of ", name, " is the same as that of ", table.Find(token)->name));
    }
    table.entries_.push_back({.token = token, .principal = {.name = name, .role = *role}});
  }
  return table;
}

const Principal* TokenTable::Find(std::string_view token) const {
  const Principal* found = nullptr;
  for (const Entry& entry : entries_) {  // no early exit: time must not tell which one matched
    if (ConstantTimeEquals(entry.token, token)) {
      found = &entry.principal;
    }
  }
  return found;
}

absl::StatusOr<std::string> LoadSecret(const std::string& path, const FileSystem& fs) {
  absl::StatusOr<std::string> text = fs.ReadFile(path);
  if (!text.ok()) {
    return Annotate(text.status(), "token file");
  }
  const std::string secret(StripSpace(StrSplit(*text, '\n')[0]));
  if (secret.empty()) {
    return InvalidArgumentError(StrCat("token file ", path, ": the first line is empty"));
  }
  return secret;
}

bool ConstantTimeEquals(std::string_view a, std::string_view b) {
  return a.size() == b.size() && CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0;
}

}  // namespace octavo
