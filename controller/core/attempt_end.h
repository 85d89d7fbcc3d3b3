// How an attempt ends: what one process's exit means, which of many ends is the cause, and what the
// job does next. The first two are pure.
#pragma once

#include <cstdint>
#include <string>

#include "controller/core/state.h"
#include "proto/jobs/failure_class.h"

namespace octavo {

struct RankEndContext {
  std::string worker;
  std::int64_t asked_for_ms = -1;  // how long ago the rank was asked to stop; -1: it was not
  std::int64_t grace_ms = 0;       // after which its worker sends SIGTERM
};

// From the evidence of the worker to class and sentence. An exit counts as a success only with the
// rank's own word that it finished; an end is collateral when it is what we asked for.
internal::v1::StoredRank JudgeRankEnd(const internal::v1::RankEnded& ended,
                                      const RankEndContext& context);

struct AttemptCause {
  FailureClass failure = FailureClass::kNone;
  std::string reason;
};

// Over all ranks and the controller's own reason: a death explains a broken collective, and not the
// other way round. REQUIRES: not every rank succeeded.
AttemptCause CauseOf(const internal::v1::StoredAttempt& attempt);

// When every rank has ended: closes the attempt and decides what the job does next.
void FinishAttemptIfOver(CoreState& state, JobRecord& job, Now now);

}  // namespace octavo
