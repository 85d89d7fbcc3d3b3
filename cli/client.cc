#include "cli/client.h"

#include <algorithm>
#include <chrono>
#include <cmath>

#include "base/credentials.h"
#include "base/file.h"
#include "base/status.h"
#include "base/str.h"
#include "proto/convert/error_detail.h"
#include "proto/limits.h"

namespace octavo {
namespace {

constexpr double kRetrySecondsMin = 0.2;
constexpr double kRetrySecondsMax = 2.0;

std::chrono::system_clock::time_point In(double seconds) {
  return std::chrono::system_clock::now() +
         std::chrono::duration_cast<std::chrono::system_clock::duration>(
             std::chrono::duration<double>(seconds));
}

bool IsHandshakeText(const std::string& message) {
  for (const char* sign : {"handshake", "Handshake", "certificate", "CERTIFICATE", "SSL", "Ssl"}) {
    if (message.find(sign) != std::string::npos) {
      return true;
    }
  }
  return false;
}

std::string Trailer(const grpc::ClientContext& context) {
  const auto& trailers = context.GetServerTrailingMetadata();
  const auto found = trailers.find(kErrorTrailer);
  return found == trailers.end() ? std::string()
                                 : std::string(found->second.data(), found->second.size());
}

}  // namespace

absl::StatusOr<std::unique_ptr<Client>> Client::Connect(const ClientOptions& options) {
  std::unique_ptr<Client> client(new Client(options));
  PosixFileSystem& fs = PosixFileSystem::Get();
  if (!options.token_file.empty()) {
    ASSIGN_OR_RETURN(client->token_, LoadSecret(options.token_file, fs));
  }
  std::shared_ptr<grpc::ChannelCredentials> credentials = grpc::InsecureChannelCredentials();
  const TlsFiles files{
      .cert_path = options.tls_cert, .key_path = options.tls_key, .ca_path = options.tls_ca};
  client->uses_tls_ = !files.empty();
  if (client->uses_tls_) {
    ASSIGN_OR_RETURN(const TlsMaterial tls, LoadTls(files, fs));
    credentials = grpc::SslCredentials({.pem_root_certs = tls.ca_pem,
                                        .pem_private_key = tls.key_pem,
                                        .pem_cert_chain = tls.cert_pem});
  }
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, kReconnectBackoffMinMs);
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, kConnectTimeoutMs);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, kReconnectBackoffMaxMs);
  arguments.SetMaxReceiveMessageSize(static_cast<int>(kMaxMessageBytes));
  if (!options.tls_server_name.empty()) {
    arguments.SetSslTargetNameOverride(options.tls_server_name);
  }
  client->channel_ = grpc::CreateCustomChannel(options.controller, credentials, arguments);
  client->stub_ = v1::JobService::NewStub(client->channel_);
  return client;
}

void Client::Prepare(grpc::ClientContext* context) const {
  if (!token_.empty()) {
    context->AddMetadata("authorization", "Bearer " + token_);
  }
}

void Client::PrepareUnary(grpc::ClientContext* context) const {
  Prepare(context);
  context->set_deadline(In(options_.timeout_seconds));
}

void Client::AwaitConnection(double seconds) { channel_->WaitForConnected(In(seconds)); }

void Client::AwaitRetry(int attempt) {
  const double limit = std::min(kRetrySecondsMax, kRetrySecondsMin * std::pow(2, attempt - 1));
  AwaitConnection(std::uniform_real_distribution<double>(limit / 2, limit)(rng_));
}

bool Client::IsTransient(const absl::Status& status) const {
  return status.code() == absl::StatusCode::kUnavailable && !IsHandshakeText(Message(status));
}

absl::Status Client::ToAbsl(const grpc::Status& status, const grpc::ClientContext& context) const {
  if (status.ok()) {
    return absl::OkStatus();
  }
  absl::Status result = StatusFromWire(static_cast<int>(status.error_code()),
                                       status.error_message(), Trailer(context));
  if (result.code() == absl::StatusCode::kUnavailable) {
    const std::string who = "the controller at " + options_.controller;
    if (uses_tls_ && IsHandshakeText(status.error_message())) {
      return UnavailableError(StrCat(
          "TLS handshake with ", who, " failed: check that ", options_.tls_ca,
          " is the authority that signed the controller's certificate, that ", options_.tls_cert,
          " is signed by the controller's authority, and that neither is out of date (",
          status.error_message(), ")"));
    }
    if (!uses_tls_ && status.error_message().find("Socket closed") != std::string::npos) {
      return UnavailableError(StrCat(who,
                                     " closed the connection; if it uses TLS, pass --tls-ca, "
                                     "--tls-cert and --tls-key (",
                                     status.error_message(), ")"));
    }
    return Annotate(result, StrCat("reaching ", who));
  }
  if (result.code() == absl::StatusCode::kDeadlineExceeded) {
    return Annotate(result, StrCat("the controller at ", options_.controller,
                                   " did not answer within ", options_.timeout_seconds, " s"));
  }
  return result;
}

std::string NewRequestId() {
  std::random_device random;
  std::string id = "r-";
  for (int i = 0; i < 4; ++i) {
    char text[16];
    std::snprintf(text, sizeof(text), "%08x", static_cast<unsigned>(random()));
    id += text;
  }
  return id;
}

}  // namespace octavo
