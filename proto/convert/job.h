// Job enumerations: wire ↔ value. The numbers are equal (proved in job.cc), so a cast is exact; an
// unknown number from a newer peer becomes nullopt.
#pragma once

#include <optional>

#include "octavo/v1/job.pb.h"
#include "proto/jobs/failure_class.h"
#include "proto/jobs/job_state.h"
#include "proto/jobs/pending_reason.h"

namespace octavo {

v1::JobState ToWire(JobState state);
v1::FailureClass ToWire(FailureClass failure);
v1::PendingReason ToWire(PendingReason reason);

// UNSPECIFIED and unknown: nullopt.
std::optional<JobState> FromWire(v1::JobState wire);
// UNSPECIFIED: kNone. Unknown: nullopt.
std::optional<FailureClass> FromWire(v1::FailureClass wire);
std::optional<FailureClass> FailureClassFromNumber(int number);
std::optional<PendingReason> FromWire(v1::PendingReason wire);

}  // namespace octavo
