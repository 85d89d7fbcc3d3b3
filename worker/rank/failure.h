// Why a rank ends, carried inside absl::Status to the rim: the failure class of ARCHITECTURE 7.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "proto/jobs/failure_class.h"

namespace octavo {

// Marks an error with its class; a class that is already there stays (the first cause wins).
absl::Status WithFailure(const absl::Status& status, FailureClass failure);

// Marks an error about an input that the specification names (a dataset, a checkpoint to start
// from, a folder to write to) SPEC_REJECTED when no other attempt can help: the input is damaged or
// wrong, or it is absent or closed at the first attempt. At a later attempt an absent file may be a
// file system that is briefly away; that error stays unmarked.
absl::Status MarkIfPermanent(const absl::Status& status, std::int32_t attempt);

// The class that the error is marked with; kNone when it is not marked (or OK).
FailureClass MarkOf(const absl::Status& status);

// The class of an error: the mark, else by code: DEADLINE_EXCEEDED and UNAVAILABLE come from
// collectives, RESOURCE_EXHAUSTED is memory, INVALID_ARGUMENT the spec, INTERNAL the device.
FailureClass FailureOf(const absl::Status& status);

}  // namespace octavo
