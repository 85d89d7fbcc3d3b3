// The public API: each handler checks its arguments, posts one event to the mailbox and answers
// when what it did is stored. Specs are parsed on gRPC's threads, by the same code as the client's;
// no decision is made here. Thread-safe.
#pragma once

#include <string>

#include "controller/api/log_relay.h"
#include "controller/api/rpc.h"
#include "controller/api/watch_hub.h"
#include "octavo/v1/job_service.grpc.pb.h"

namespace octavo {

class JobServiceImpl final : public v1::JobService::CallbackService {
 public:
  JobServiceImpl(const RpcContext& rpc, WatchHub* watches, LogRelay* logs, std::string version)
      : rpc_(rpc), watches_(watches), logs_(logs), version_(std::move(version)) {}

  using Unary = grpc::ServerUnaryReactor;
  using Context = grpc::CallbackServerContext;

  Unary* SubmitJob(Context*, const v1::SubmitJobRequest*, v1::Job*) override;
  Unary* GetJob(Context*, const v1::GetJobRequest*, v1::Job*) override;
  Unary* ListJobs(Context*, const v1::ListJobsRequest*, v1::ListJobsResponse*) override;
  grpc::ServerWriteReactor<v1::JobEvent>* WatchJob(Context*, const v1::WatchJobRequest*) override;
  Unary* ListEvents(Context*, const v1::ListEventsRequest*, v1::ListEventsResponse*) override;
  Unary* CancelJob(Context*, const v1::JobVerbRequest*, v1::Job*) override;
  Unary* SuspendJob(Context*, const v1::JobVerbRequest*, v1::Job*) override;
  Unary* ResumeJob(Context*, const v1::JobVerbRequest*, v1::Job*) override;
  Unary* CheckpointJob(Context*, const v1::JobVerbRequest*, v1::Job*) override;
  Unary* ProfileJob(Context*, const v1::ProfileJobRequest*, v1::JobProfile*) override;
  Unary* GetProfile(Context*, const v1::GetProfileRequest*, v1::JobProfile*) override;
  grpc::ServerWriteReactor<v1::LogChunk>* ReadLogs(Context*, const v1::ReadLogsRequest*) override;
  Unary* ListWorkers(Context*, const v1::ListWorkersRequest*, v1::ListWorkersResponse*) override;
  Unary* DrainWorker(Context*, const v1::DrainWorkerRequest*, v1::Worker*) override;
  Unary* GetVersion(Context*, const v1::GetVersionRequest*, v1::Version*) override;
  Unary* GetPrecision(Context*, const v1::GetPrecisionRequest*, v1::JobPrecision*) override;
  Unary* ListPlans(Context*, const v1::ListPlansRequest*, v1::ListPlansResponse*) override;
  Unary* SetPrecision(Context*, const v1::SetPrecisionRequest*, v1::SetPrecisionResponse*) override;
  Unary* SetPolicy(Context*, const v1::SetPolicyRequest*, v1::JobPrecision*) override;
  Unary* ReplayPolicy(Context*, const v1::ReplayPolicyRequest*, v1::ReplayPolicyResponse*) override;
  Unary* GetHealth(Context*, const v1::GetHealthRequest*, v1::JobHealth*) override;

 private:
  Unary* Verb(Context* context, const char* method, JobVerb verb, const v1::JobVerbRequest* request,
              v1::Job* response);

  const RpcContext rpc_;
  WatchHub* const watches_;
  LogRelay* const logs_;
  const std::string version_;
};

}  // namespace octavo
