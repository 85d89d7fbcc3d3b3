// A JobService in this process whose answers a test sets; real gRPC, port 0.
#pragma once

#include <grpcpp/grpcpp.h>
#include <grpcpp/server_posix.h>

#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "octavo/v1/job_service.grpc.pb.h"
#include "proto/convert/error_detail.h"

namespace octavo {

class FakeController final : public v1::JobService::Service {
 public:
  FakeController() {
    grpc::ServerBuilder builder;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port_);
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
  }
  ~FakeController() override { Stop(); }

  void Stop() {
    if (server_ != nullptr) {
      server_->Shutdown(std::chrono::system_clock::now());
      server_.reset();
    }
  }
  // Serves a connection that a test accepted; the descriptor is the server's from now on.
  void Adopt(int fd) { grpc::AddInsecureChannelFromFd(server_.get(), fd); }
  std::string address() const { return "127.0.0.1:" + std::to_string(port_); }

  std::function<absl::Status(const v1::SubmitJobRequest&, v1::Job*)> submit;
  std::function<absl::Status(const v1::GetJobRequest&, v1::Job*)> get;
  std::function<absl::Status(const v1::ListJobsRequest&, v1::ListJobsResponse*)> list;
  std::function<absl::Status(const v1::JobVerbRequest&, v1::Job*)> cancel;
  std::function<absl::Status(const v1::ListWorkersRequest&, v1::ListWorkersResponse*)> workers;
  std::function<absl::Status(const v1::GetPrecisionRequest&, v1::JobPrecision*)> precision;
  std::function<absl::Status(const v1::SetPrecisionRequest&, v1::SetPrecisionResponse*)> set;
  std::function<absl::Status(const v1::ListPlansRequest&, v1::ListPlansResponse*)> plans;
  std::function<absl::Status(const v1::ListEventsRequest&, v1::ListEventsResponse*)> events;
  std::function<absl::Status(const v1::SetPolicyRequest&, v1::JobPrecision*)> set_policy;
  std::function<absl::Status(const v1::ReplayPolicyRequest&, v1::ReplayPolicyResponse*)> replay;
  std::function<absl::Status(const v1::GetHealthRequest&, v1::JobHealth*)> health;
  std::function<absl::Status(const v1::ProfileJobRequest&, v1::JobProfile*)> profile;
  std::function<absl::Status(const v1::GetProfileRequest&, v1::JobProfile*)> get_profile;
  std::function<absl::Status(const v1::WatchJobRequest&, grpc::ServerWriter<v1::JobEvent>*)> watch;
  std::function<absl::Status(const v1::ReadLogsRequest&, grpc::ServerWriter<v1::LogChunk>*)> logs;
  std::string authorization;  // of the last call

  grpc::Status SubmitJob(grpc::ServerContext* context, const v1::SubmitJobRequest* request,
                         v1::Job* response) override {
    return Answer(context, submit, *request, response);
  }
  grpc::Status GetJob(grpc::ServerContext* context, const v1::GetJobRequest* request,
                      v1::Job* response) override {
    return Answer(context, get, *request, response);
  }
  grpc::Status ListJobs(grpc::ServerContext* context, const v1::ListJobsRequest* request,
                        v1::ListJobsResponse* response) override {
    return Answer(context, list, *request, response);
  }
  grpc::Status CancelJob(grpc::ServerContext* context, const v1::JobVerbRequest* request,
                         v1::Job* response) override {
    return Answer(context, cancel, *request, response);
  }
  grpc::Status ListWorkers(grpc::ServerContext* context, const v1::ListWorkersRequest* request,
                           v1::ListWorkersResponse* response) override {
    return Answer(context, workers, *request, response);
  }
  grpc::Status GetPrecision(grpc::ServerContext* context, const v1::GetPrecisionRequest* request,
                            v1::JobPrecision* response) override {
    return Answer(context, precision, *request, response);
  }
  grpc::Status SetPrecision(grpc::ServerContext* context, const v1::SetPrecisionRequest* request,
                            v1::SetPrecisionResponse* response) override {
    return Answer(context, set, *request, response);
  }
  grpc::Status ListPlans(grpc::ServerContext* context, const v1::ListPlansRequest* request,
                         v1::ListPlansResponse* response) override {
    return Answer(context, plans, *request, response);
  }
  grpc::Status ListEvents(grpc::ServerContext* context, const v1::ListEventsRequest* request,
                          v1::ListEventsResponse* response) override {
    return Answer(context, events, *request, response);
  }
  grpc::Status SetPolicy(grpc::ServerContext* context, const v1::SetPolicyRequest* request,
                         v1::JobPrecision* response) override {
    return Answer(context, set_policy, *request, response);
  }
  grpc::Status ReplayPolicy(grpc::ServerContext* context, const v1::ReplayPolicyRequest* request,
                            v1::ReplayPolicyResponse* response) override {
    return Answer(context, replay, *request, response);
  }
  grpc::Status GetHealth(grpc::ServerContext* context, const v1::GetHealthRequest* request,
                         v1::JobHealth* response) override {
    return Answer(context, health, *request, response);
  }
  grpc::Status ProfileJob(grpc::ServerContext* context, const v1::ProfileJobRequest* request,
                          v1::JobProfile* response) override {
    return Answer(context, profile, *request, response);
  }
  grpc::Status GetProfile(grpc::ServerContext* context, const v1::GetProfileRequest* request,
                          v1::JobProfile* response) override {
    return Answer(context, get_profile, *request, response);
  }
  grpc::Status WatchJob(grpc::ServerContext* context, const v1::WatchJobRequest* request,
                        grpc::ServerWriter<v1::JobEvent>* writer) override {
    return Answer(context, watch, *request, writer);
  }
  grpc::Status ReadLogs(grpc::ServerContext* context, const v1::ReadLogsRequest* request,
                        grpc::ServerWriter<v1::LogChunk>* writer) override {
    return Answer(context, logs, *request, writer);
  }

 private:
  template <class Function, class Request, class Response>
  grpc::Status Answer(grpc::ServerContext* context, const Function& function,
                      const Request& request, Response* response) {
    const auto& metadata = context->client_metadata();
    const auto bearer = metadata.find("authorization");
    if (bearer != metadata.end()) {
      authorization = std::string(bearer->second.data(), bearer->second.size());
    }
    const absl::Status status = function(request, response);
    if (status.ok()) {
      return grpc::Status::OK;
    }
    const std::string trailer = ErrorTrailerBytes(status);
    if (!trailer.empty()) {
      context->AddTrailingMetadata(kErrorTrailer, trailer);
    }
    return grpc::Status(static_cast<grpc::StatusCode>(status.code()), ErrorWireMessage(status));
  }

  int port_ = 0;
  std::unique_ptr<grpc::Server> server_;
};

}  // namespace octavo
