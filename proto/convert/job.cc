#include "proto/convert/job.h"

namespace octavo {
namespace {

constexpr bool Same(int wire, JobState value) { return wire == static_cast<int>(value); }
static_assert(Same(v1::PENDING, JobState::kPending) && Same(v1::STARTING, JobState::kStarting) &&
              Same(v1::RUNNING, JobState::kRunning) &&
              Same(v1::SUSPENDING, JobState::kSuspending) &&
              Same(v1::SUSPENDED, JobState::kSuspended) &&
              Same(v1::RESTARTING, JobState::kRestarting) &&
              Same(v1::CANCELLING, JobState::kCancelling) &&
              Same(v1::SUCCEEDED, JobState::kSucceeded) && Same(v1::FAILED, JobState::kFailed) &&
              Same(v1::CANCELLED, JobState::kCancelled));
static_assert(v1::JobState_MAX == v1::CANCELLED && v1::FailureClass_MAX == v1::NO_PROGRESS &&
              v1::PendingReason_MAX == v1::WORKERS_DRAINING);
static_assert(v1::NO_PROGRESS == static_cast<int>(FailureClass::kNoProgress));
static_assert(v1::WORKERS_DRAINING == static_cast<int>(PendingReason::kWorkersDraining));

}  // namespace

v1::JobState ToWire(JobState state) { return static_cast<v1::JobState>(state); }
v1::FailureClass ToWire(FailureClass failure) { return static_cast<v1::FailureClass>(failure); }
v1::PendingReason ToWire(PendingReason reason) { return static_cast<v1::PendingReason>(reason); }

std::optional<JobState> FromWire(v1::JobState wire) {
  if (!v1::JobState_IsValid(wire) || wire == v1::JOB_STATE_UNSPECIFIED) {
    return std::nullopt;
  }
  return static_cast<JobState>(wire);
}

std::optional<FailureClass> FromWire(v1::FailureClass wire) {
  return FailureClassFromNumber(static_cast<int>(wire));
}

std::optional<FailureClass> FailureClassFromNumber(int number) {
  if (!v1::FailureClass_IsValid(number)) {
    return std::nullopt;
  }
  return static_cast<FailureClass>(number);
}

std::optional<PendingReason> FromWire(v1::PendingReason wire) {
  if (!v1::PendingReason_IsValid(wire)) {
    return std::nullopt;
  }
  return static_cast<PendingReason>(wire);
}

}  // namespace octavo
