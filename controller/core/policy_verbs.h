// An operator's word about the policy of a job, and the read-only questions: what would another
// policy have decided, which tensors are worst.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "controller/core/state.h"
#include "octavo/v1/job_service.pb.h"

namespace octavo {

// ON, OFF, PIN. Idempotent by request_id. FAILED_PRECONDITION: the job is over; ABORTED: stale
// etag; INVALID_ARGUMENT: layers, ops or action.
absl::StatusOr<v1::JobPrecision> SetPolicy(CoreState& state, const v1::SetPolicyRequest& request,
                                           const std::string& caller, Now now);

// FAILED_PRECONDITION (NO_TELEMETRY): nothing is kept. INVALID_ARGUMENT: the policy's fields.
absl::StatusOr<v1::ReplayPolicyResponse> ReplayPolicy(CoreState& state,
                                                      const v1::ReplayPolicyRequest& request);
absl::StatusOr<v1::JobHealth> GetHealth(CoreState& state, const v1::GetHealthRequest& request);

// The telemetry of a job in the store, with what events of this batch have put since.
absl::StatusOr<std::vector<StoredTelemetry>> TelemetryOf(CoreState& state, const JobRecord& job);

// "layer 1 fc2", "layers 0-3 fc1, fc2", "all layers" (when `layers` is empty).
std::string SitesText(const std::string& layers,
                      const google::protobuf::RepeatedPtrField<std::string>& ops);

v1::ReplayPolicyResponse ReplayToWire(const PolicyReplay& replay);

}  // namespace octavo
