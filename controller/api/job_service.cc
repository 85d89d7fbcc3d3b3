#include "controller/api/job_service.h"

#include "proto/limits.h"
#include "proto/spec/job_spec.h"

namespace octavo {
namespace {

constexpr std::size_t kRequestIdBytesMax = 128;

absl::Status CheckRequestId(const std::string& request_id) {
  if (request_id.size() <= kRequestIdBytesMax) {
    return absl::OkStatus();
  }
  return WithDetail(InvalidArgumentError(StrCat("request_id has ", request_id.size(),
                                                " bytes; at most ", kRequestIdBytesMax)),
                    "REQUEST_ID_INVALID");
}

// An answer without the core: a wrong request.
absl::StatusOr<v1::JobSpec> ParseSubmission(const v1::SubmitJobRequest& request) {
  RETURN_IF_ERROR(CheckRequestId(request.request_id()));
  if (static_cast<std::int64_t>(request.spec_yaml().size()) > kMaxSpecBytes) {
    return WithDetail(
        InvalidArgumentError(StrCat("the specification has ", request.spec_yaml().size(),
                                    " bytes; at most ", kMaxSpecBytes)),
        "SPEC_INVALID");
  }
  const ParsedJobSpec parsed = ParseJobSpec(
      request.spec_yaml(), request.file_name().empty() ? "job.yaml" : request.file_name());
  RETURN_IF_ERROR(parsed.status());
  return parsed.spec;
}

}  // namespace

JobServiceImpl::Unary* JobServiceImpl::SubmitJob(Context* context,
                                                 const v1::SubmitJobRequest* request,
                                                 v1::Job* response) {
  return RunUnary(
      rpc_, context, "SubmitJob", Role::kSubmitter, response,
      [spec = ParseSubmission(*request), request](
          Core& core, Now now, const std::string& caller) mutable -> absl::StatusOr<v1::Job> {
        RETURN_IF_ERROR(spec.status());
        return core.Submit({.request_id = request->request_id(),
                            .spec = *std::move(spec),
                            .spec_yaml = request->spec_yaml(),
                            .caller = caller,
                            .validate_only = request->validate_only()},
                           now);
      });
}

JobServiceImpl::Unary* JobServiceImpl::GetJob(Context* context, const v1::GetJobRequest* request,
                                              v1::Job* response) {
  return RunUnary(
      rpc_, context, "GetJob", Role::kViewer, response,
      [request](Core& core, Now, const std::string&) { return core.Get(request->name()); });
}

JobServiceImpl::Unary* JobServiceImpl::ListJobs(Context* context,
                                                const v1::ListJobsRequest* request,
                                                v1::ListJobsResponse* response) {
  return RunUnary(rpc_, context, "ListJobs", Role::kViewer, response,
                  [request](Core& core, Now, const std::string&) { return core.List(*request); });
}

grpc::ServerWriteReactor<v1::JobEvent>* JobServiceImpl::WatchJob(
    Context* context, const v1::WatchJobRequest* request) {
  return watches_->Open(context, request);
}

JobServiceImpl::Unary* JobServiceImpl::ListEvents(Context* context,
                                                  const v1::ListEventsRequest* request,
                                                  v1::ListEventsResponse* response) {
  return RunUnary(rpc_, context, "ListEvents", Role::kViewer, response,
                  [request](Core& core, Now, const std::string&) { return core.Events(*request); });
}

JobServiceImpl::Unary* JobServiceImpl::Verb(Context* context, const char* method, JobVerb verb,
                                            const v1::JobVerbRequest* request, v1::Job* response) {
  return RunUnary(
      rpc_, context, method, Role::kSubmitter, response,
      [request, verb](Core& core, Now now, const std::string& caller) -> absl::StatusOr<v1::Job> {
        RETURN_IF_ERROR(CheckRequestId(request->request_id()));
        return core.Verb(verb,
                         {.name = request->name(),
                          .request_id = request->request_id(),
                          .etag = request->etag(),
                          .reason = request->reason(),
                          .caller = caller},
                         now);
      });
}

JobServiceImpl::Unary* JobServiceImpl::CancelJob(Context* context,
                                                 const v1::JobVerbRequest* request,
                                                 v1::Job* response) {
  return Verb(context, "CancelJob", JobVerb::kCancel, request, response);
}

JobServiceImpl::Unary* JobServiceImpl::SuspendJob(Context* context,
                                                  const v1::JobVerbRequest* request,
                                                  v1::Job* response) {
  return Verb(context, "SuspendJob", JobVerb::kSuspend, request, response);
}

JobServiceImpl::Unary* JobServiceImpl::ResumeJob(Context* context,
                                                 const v1::JobVerbRequest* request,
                                                 v1::Job* response) {
  return Verb(context, "ResumeJob", JobVerb::kResume, request, response);
}

JobServiceImpl::Unary* JobServiceImpl::CheckpointJob(Context* context,
                                                     const v1::JobVerbRequest* request,
                                                     v1::Job* response) {
  return Verb(context, "CheckpointJob", JobVerb::kCheckpoint, request, response);
}

JobServiceImpl::Unary* JobServiceImpl::ProfileJob(Context* context,
                                                  const v1::ProfileJobRequest* request,
                                                  v1::JobProfile* response) {
  return RunUnary(
      rpc_, context, "ProfileJob", Role::kOperator, response,
      [request](Core& core, Now now, const std::string& caller) -> absl::StatusOr<v1::JobProfile> {
        RETURN_IF_ERROR(CheckRequestId(request->request_id()));
        return core.StartProfile({.name = request->name(),
                                  .request_id = request->request_id(),
                                  .steps = request->steps(),
                                  .caller = caller},
                                 now);
      });
}

JobServiceImpl::Unary* JobServiceImpl::GetProfile(Context* context,
                                                  const v1::GetProfileRequest* request,
                                                  v1::JobProfile* response) {
  return RunUnary(
      rpc_, context, "GetProfile", Role::kViewer, response,
      [request](Core& core, Now, const std::string&) { return core.ReadProfile(*request); });
}

grpc::ServerWriteReactor<v1::LogChunk>* JobServiceImpl::ReadLogs(
    Context* context, const v1::ReadLogsRequest* request) {
  return logs_->Open(context, request);
}

JobServiceImpl::Unary* JobServiceImpl::ListWorkers(Context* context,
                                                   const v1::ListWorkersRequest* request,
                                                   v1::ListWorkersResponse* response) {
  return RunUnary(
      rpc_, context, "ListWorkers", Role::kViewer, response,
      [request](Core& core, Now, const std::string&) { return core.Workers(*request); });
}

JobServiceImpl::Unary* JobServiceImpl::DrainWorker(Context* context,
                                                   const v1::DrainWorkerRequest* request,
                                                   v1::Worker* response) {
  return RunUnary(
      rpc_, context, "DrainWorker", Role::kOperator, response,
      [request](Core& core, Now now, const std::string& caller) -> absl::StatusOr<v1::Worker> {
        RETURN_IF_ERROR(CheckRequestId(request->request_id()));
        return core.Drain({.name = request->name(),
                           .request_id = request->request_id(),
                           .reason = request->reason(),
                           .undo = request->undo(),
                           .caller = caller},
                          now);
      });
}

JobServiceImpl::Unary* JobServiceImpl::GetVersion(Context* context, const v1::GetVersionRequest*,
                                                  v1::Version* response) {
  return RunUnary(
      rpc_, context, "GetVersion", Role::kViewer, response,
      [version = version_](Core&, Now, const std::string&) -> absl::StatusOr<v1::Version> {
        v1::Version answer;
        answer.set_version(version);
        answer.set_api("octavo.v1");
        return answer;
      });
}

JobServiceImpl::Unary* JobServiceImpl::GetPrecision(Context* context,
                                                    const v1::GetPrecisionRequest* request,
                                                    v1::JobPrecision* response) {
  return RunUnary(
      rpc_, context, "GetPrecision", Role::kViewer, response,
      [request](Core& core, Now, const std::string&) { return core.Precision(request->name()); });
}

JobServiceImpl::Unary* JobServiceImpl::ListPlans(Context* context,
                                                 const v1::ListPlansRequest* request,
                                                 v1::ListPlansResponse* response) {
  return RunUnary(rpc_, context, "ListPlans", Role::kViewer, response,
                  [request](Core& core, Now, const std::string&) { return core.Plans(*request); });
}

JobServiceImpl::Unary* JobServiceImpl::SetPrecision(Context* context,
                                                    const v1::SetPrecisionRequest* request,
                                                    v1::SetPrecisionResponse* response) {
  return RunUnary(rpc_, context, "SetPrecision", Role::kOperator, response,
                  [request](Core& core, Now now,
                            const std::string& caller) -> absl::StatusOr<v1::SetPrecisionResponse> {
                    RETURN_IF_ERROR(CheckRequestId(request->request_id()));
                    return core.SetPlan(
                        {.name = request->name(),
                         .request_id = request->request_id(),
                         .etag = request->etag(),
                         .overrides = {request->overrides().begin(), request->overrides().end()},
                         .rollback_to = request->rollback_to(),
                         .reason = request->reason(),
                         .caller = caller,
                         .validate_only = request->validate_only()},
                        now);
                  });
}

JobServiceImpl::Unary* JobServiceImpl::SetPolicy(Context* context,
                                                 const v1::SetPolicyRequest* request,
                                                 v1::JobPrecision* response) {
  return RunUnary(rpc_, context, "SetPolicy", Role::kOperator, response,
                  [request](Core& core, Now now,
                            const std::string& caller) -> absl::StatusOr<v1::JobPrecision> {
                    RETURN_IF_ERROR(CheckRequestId(request->request_id()));
                    return core.SetPolicy(*request, caller, now);
                  });
}

JobServiceImpl::Unary* JobServiceImpl::ReplayPolicy(Context* context,
                                                    const v1::ReplayPolicyRequest* request,
                                                    v1::ReplayPolicyResponse* response) {
  return RunUnary(rpc_, context, "ReplayPolicy", Role::kViewer, response,
                  [request](Core& core, Now, const std::string&) { return core.Replay(*request); });
}

JobServiceImpl::Unary* JobServiceImpl::GetHealth(Context* context,
                                                 const v1::GetHealthRequest* request,
                                                 v1::JobHealth* response) {
  return RunUnary(rpc_, context, "GetHealth", Role::kViewer, response,
                  [request](Core& core, Now, const std::string&) { return core.Health(*request); });
}

}  // namespace octavo
