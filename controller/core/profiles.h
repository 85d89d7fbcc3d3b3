// Profiles of running jobs: a wish to the ranks, and what they answer. Kept in memory only: a
// profile is for the person who asked.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "controller/core/state.h"
#include "octavo/v1/job_service.pb.h"

namespace octavo {

struct ProfileArgs {
  std::string name;
  std::string request_id;
  std::int32_t steps = 0;
  std::string caller;
};

// Asks every rank of the current attempt to time its next steps. INVALID_ARGUMENT: steps;
// FAILED_PRECONDITION: the job does not run.
absl::StatusOr<v1::JobProfile> StartProfile(CoreState& state, const ProfileArgs& args, Now now);

// What has come so far. NOT_FOUND: no such profile (any more). ABORTED: a newer one replaced it.
absl::StatusOr<v1::JobProfile> ReadProfile(CoreState& state, const v1::GetProfileRequest& request);

// REQUIRES: of the job's current attempt.
void OnRankProfile(JobRecord& job, const v1::RankProfile& profile);

}  // namespace octavo
