// Jobs as resources: submit, find, verbs, transitions and events. What runs is attempts.h's matter.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "controller/core/state.h"
#include "proto/jobs/failure_class.h"

namespace octavo {

struct SubmitArgs {
  std::string request_id;  // empty: not idempotent
  v1::JobSpec spec;        // validated, defaults filled in
  std::string spec_yaml;   // as submitted
  std::string caller;      // who asks; owner unless the spec names one
  bool validate_only = false;
};

struct VerbArgs {
  std::string name;  // jobs/{job}, or the bare id, or a uid
  std::string request_id;
  std::string etag;  // empty: whatever it is now
  std::string reason;
  std::string caller;
};

enum class JobVerb { kCancel, kSuspend, kResume, kCheckpoint };

// The job with that name: the live one, else the newest that had the name. NOT_FOUND otherwise.
absl::StatusOr<JobRecord*> FindJob(CoreState& state, const std::string& name);
JobRecord* FindJobByUid(CoreState& state, const std::string& uid);  // nullptr when unknown

// Stores the job, its first event and version 1 of its plan. ALREADY_EXISTS (JOB_NAME_TAKEN) while
// a job of that name lives; the same request_id gives the same job, with other content
// INVALID_ARGUMENT (REQUEST_ID_REUSED).
absl::StatusOr<v1::Job> SubmitJob(CoreState& state, const SubmitArgs& args, Now now);

// FAILED_PRECONDITION (ILLEGAL_TRANSITION) when the state does not allow it, ABORTED (STALE_ETAG).
absl::StatusOr<v1::Job> ApplyVerb(CoreState& state, JobVerb verb, const VerbArgs& args, Now now);

// Takes the transition of the table, with an event. REQUIRES: it is legal (callers ask NextState).
void Transition(CoreState& state, JobRecord& job, JobTrigger trigger, const std::string& message,
                Now now);

// Appends an event to the job's history and publishes it.
void EmitEvent(CoreState& state, JobRecord& job, const std::string& kind,
               const std::string& message, Now now);
// A PROGRESS event with a snapshot, to watchers only.
void PublishProgress(CoreState& state, JobRecord& job, Now now);

void SaveJob(CoreState& state, JobRecord& job, Now now);
// Marks progress; stored at most every progress_store_ms.
void TouchProgress(CoreState& state, JobRecord& job, Now now);

// The resource as clients see it. `full`: with spec_yaml.
v1::Job RenderJob(const JobRecord& job, bool full);

// Removes the oldest ended jobs beyond options.ended_jobs_kept.
void ForgetOldJobs(CoreState& state);

// Idempotency, shared by all mutations. Found and equal: the uid or worker name it belongs to;
// not found: empty. Same id with other method or content: INVALID_ARGUMENT.
absl::StatusOr<std::string> FindRequest(const CoreState& state, const std::string& request_id,
                                        const std::string& method, std::uint64_t fingerprint);
void RememberRequest(CoreState& state, const std::string& request_id, const std::string& method,
                     const std::string& target, std::uint64_t fingerprint);
std::uint64_t Fingerprint(std::string_view content);

void SetTimestamp(google::protobuf::Timestamp* timestamp, std::int64_t unix_micros);
std::int64_t UnixMicros(const google::protobuf::Timestamp& timestamp);
// "jobs/x" → "x"; other text unchanged.
std::string StripPrefix(const std::string& name, const std::string& prefix);

}  // namespace octavo
