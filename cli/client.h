// The connection to the controller: deadlines, bounded retries, credentials, errors with their
// detail.
//
//   ASSIGN_OR_RETURN(std::unique_ptr<Client> client, Client::Connect(options));
//   ASSIGN_OR_RETURN(v1::Job job, client->Call(&JobStub::GetJob, request));
//
// Retries UNAVAILABLE only, a few times, and never a failed TLS handshake (gRPC reports that as
// UNAVAILABLE too; waiting does not help, so the text says which file to look at). Every mutation
// carries a request_id, which makes repeating it safe.
#pragma once

#include <grpcpp/grpcpp.h>

#include <memory>
#include <random>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "octavo/v1/job_service.grpc.pb.h"

namespace octavo {

using JobStub = v1::JobService::Stub;

struct ClientOptions {
  std::string controller = "127.0.0.1:7070";
  std::string tls_ca, tls_cert, tls_key;
  std::string tls_server_name;  // when the certificate names another host
  std::string token_file;
  double timeout_seconds = 10;  // of one unary call, retries not included
  int attempts_max = 5;         // of one unary call
};

class Client {
 public:
  static absl::StatusOr<std::unique_ptr<Client>> Connect(const ClientOptions& options);

  // One unary call, with retries.
  template <class Request, class Response>
  absl::StatusOr<Response> Call(grpc::Status (JobStub::*method)(grpc::ClientContext*,
                                                                const Request&, Response*),
                                const Request& request) {
    Response response;
    absl::Status status = CallWithRetries([&](grpc::ClientContext* context) {
      return ((*stub_).*method)(context, request, &response);
    });
    if (!status.ok()) {
      return status;
    }
    return response;
  }

  // For streams: credentials are set, a deadline is not.
  void Prepare(grpc::ClientContext* context) const;
  JobStub& stub() { return *stub_; }
  // gRPC status → absl status with ErrorDetail, handshake failures explained.
  absl::Status ToAbsl(const grpc::Status& status, const grpc::ClientContext& context) const;
  // Waits until the channel is connected or `seconds` are over.
  void AwaitConnection(double seconds);
  // Whether a new try can help.
  bool IsTransient(const absl::Status& status) const;

  const ClientOptions& options() const { return options_; }

 private:
  explicit Client(const ClientOptions& options) : options_(options), rng_(std::random_device{}()) {}

  template <class Function>
  absl::Status CallWithRetries(const Function& call) {
    for (int attempt = 1;; ++attempt) {
      grpc::ClientContext context;
      PrepareUnary(&context);
      const grpc::Status status = call(&context);
      absl::Status result = ToAbsl(status, context);
      if (result.ok() || attempt >= options_.attempts_max || !IsTransient(result)) {
        return result;
      }
      AwaitRetry(attempt);
    }
  }
  void PrepareUnary(grpc::ClientContext* context) const;
  void AwaitRetry(int attempt);

  const ClientOptions options_;
  std::string token_;
  bool uses_tls_ = false;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<JobStub> stub_;
  std::minstd_rand rng_;
};

// Random, unique: identifies one intent however often it is sent.
std::string NewRequestId();

}  // namespace octavo
