// Why a rank ends, carried inside absl::Status to the rim: the failure class of ARCHITECTURE 7.
#pragma once

#include "absl/status/status.h"
#include "proto/jobs/failure_class.h"

namespace octavo {

// Marks an error with its class; a class that is already there stays (the first cause wins).
absl::Status WithFailure(const absl::Status& status, FailureClass failure);

// The class that the error is marked with; kNone when it is not marked (or OK).
FailureClass MarkOf(const absl::Status& status);

// The class of an error: the mark, else by code: DEADLINE_EXCEEDED and UNAVAILABLE come from
// collectives, RESOURCE_EXHAUSTED is memory, INVALID_ARGUMENT the spec, INTERNAL the device.
FailureClass FailureOf(const absl::Status& status);

}  // namespace octavo
