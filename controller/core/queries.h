// What clients read: lists by page, events, watches, numbers for the metrics. Nothing here changes
// a job.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "controller/core/state.h"
#include "octavo/v1/job_service.pb.h"

namespace octavo {

// Newest first. Tokens are opaque and name the last job seen, so pages neither skip nor repeat when
// jobs come and go. INVALID_ARGUMENT: negative page_size, unknown token or selector.
absl::StatusOr<v1::ListJobsResponse> ListJobs(CoreState& state, const v1::ListJobsRequest& request);
absl::StatusOr<v1::ListWorkersResponse> ListWorkers(CoreState& state,
                                                    const v1::ListWorkersRequest& request);
// Oldest first.
absl::StatusOr<v1::ListEventsResponse> ListEvents(CoreState& state,
                                                  const v1::ListEventsRequest& request);
// Newest first.
absl::StatusOr<v1::ListPlansResponse> ListPlans(CoreState& state,
                                                const v1::ListPlansRequest& request);

struct WatchStart {
  std::string job_uid;
  std::vector<v1::JobEvent> backlog;  // missed events, then one event with a snapshot
  std::int64_t revision = 0;          // everything up to here is in the backlog
  bool over = false;                  // the job has ended: nothing will follow
};
// Registers one watcher. OUT_OF_RANGE (WATCH_TOKEN_TOO_OLD): events after the token are gone, or
// the token is from another store; list and watch from 0.
absl::StatusOr<WatchStart> StartWatch(CoreState& state, const v1::WatchJobRequest& request,
                                      Now now);
void StopWatch(CoreState& state, const std::string& job_uid);

Census TakeCensus(const CoreState& state);

}  // namespace octavo
