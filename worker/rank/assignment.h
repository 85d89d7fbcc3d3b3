// The worker's assignment → the values that training runs on. The spec was validated by client and
// controller; what would crash or silently mean something else is checked again here (pair checks).
#pragma once

#include "absl/status/statusor.h"
#include "octavo/internal/v1/rank_service.pb.h"
#include "proto/precision/plan.h"
#include "worker/rank/training_config.h"

namespace octavo {

// INVALID_ARGUMENT names the field.
absl::StatusOr<TrainingConfig> ConfigFromAssignment(const internal::v1::RankAssignment& assignment);

// The same from a spec alone, for an offline run of one process per rank.
absl::StatusOr<TrainingConfig> ConfigFromSpec(const v1::JobSpec& spec);

// Folder of one job's checkpoints below the spec's checkpoint.path: <name>-<uid>, so that a job
// never takes another's checkpoints for its own.
std::string CheckpointRoot(const std::string& path, const std::string& job_name,
                           const std::string& job_uid);

}  // namespace octavo
