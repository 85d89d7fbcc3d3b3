#include "worker/agent/rank_process.h"

#include <signal.h>

#include <algorithm>
#include <utility>

#include "base/clock.h"
#include "proto/limits.h"

namespace octavo {

const char* RankStateName(RankState state) {
  switch (state) {
    case RankState::kSpawning:
      return "spawning";
    case RankState::kWaitingHello:
      return "waiting for hello";
    case RankState::kRunning:
      return "running";
    case RankState::kStopping:
      return "stopping";
    case RankState::kTerminating:
      return "terminating";
    case RankState::kKilling:
      return "killing";
    case RankState::kUnkillable:
      return "unkillable";
  }
  return "?";
}

RankProcess::RankProcess(iv1::RankAssignment assignment, std::int64_t now_micros)
    : assignment_(std::move(assignment)) {
  progress.set_phase(iv1::RANK_STARTING);
  Enter(RankState::kSpawning, now_micros + kRankHelloTimeoutMs * kMicrosPerMilli);
}

void RankProcess::Enter(RankState state, std::int64_t deadline_micros) {
  state_ = state;
  deadline_micros_ = deadline_micros;
}

void RankProcess::OnSpawned(int pid, std::int64_t now_micros) {
  pid_ = pid;
  if (state_ == RankState::kSpawning) {
    Enter(RankState::kWaitingHello, now_micros + kRankHelloTimeoutMs * kMicrosPerMilli);
  }
}

void RankProcess::OnHello(std::int64_t stream) {
  stream_ = stream;
  if (state_ == RankState::kSpawning || state_ == RankState::kWaitingHello) {
    Enter(RankState::kRunning, std::numeric_limits<std::int64_t>::max());
  }
}

void RankProcess::AskToLeave(const Leave& leave, std::int64_t now_micros) {
  if (!asked_) {
    cause_ = leave.cause;  // a broken link that came before explains nothing
    cause_class_ = leave.failure;
    asked_ = true;
  } else if (state_ == RankState::kStopping && now_micros + leave.grace_micros < deadline_micros_) {
    cause_ = leave.cause;  // asked again, with less time
  }
  ExpectExit(leave.grace_micros, leave.cause, now_micros);
}

void RankProcess::ExpectExit(std::int64_t grace_micros, const std::string& cause,
                             std::int64_t now_micros) {
  if (cause_.empty()) {
    cause_ = cause;
  }
  if (state_ < RankState::kStopping) {
    Enter(RankState::kStopping, now_micros + grace_micros);
  } else if (state_ == RankState::kStopping) {
    deadline_micros_ = std::min(deadline_micros_, now_micros + grace_micros);
  }
}

void RankProcess::KillNow(const std::string& cause, std::int64_t now_micros) {
  if (cause_.empty()) {
    cause_ = cause;
  }
  if (state_ < RankState::kKilling) {
    Enter(RankState::kTerminating, now_micros);  // whose deadline is now: SIGKILL is next
  }
}

std::optional<int> RankProcess::NextSignal(std::int64_t now_micros) {
  if (now_micros < deadline_micros_) {
    return std::nullopt;
  }
  switch (state_) {
    case RankState::kSpawning:
    case RankState::kWaitingHello:
      if (cause_.empty()) {
        cause_ = StrCat("it did not call its worker back within ", kRankHelloTimeoutMs, " ms");
      }
      [[fallthrough]];
    case RankState::kStopping:
      Enter(RankState::kTerminating, now_micros + kRankTermGraceMs * kMicrosPerMilli);
      return SIGTERM;
    case RankState::kTerminating:
      Enter(RankState::kKilling, now_micros + kRankKillGraceMs * kMicrosPerMilli);
      return SIGKILL;
    case RankState::kKilling:
      Enter(RankState::kUnkillable, std::numeric_limits<std::int64_t>::max());
      return std::nullopt;
    case RankState::kRunning:
    case RankState::kUnkillable:
      return std::nullopt;
  }
  return std::nullopt;
}

bool RankProcess::SetControllerWishes(const iv1::Wishes& wishes) {
  // A repeated or reordered message changes nothing; sequence 0 is a sender without numbers.
  if (wishes.sequence() != 0 && wishes.sequence() <= controller_wishes_.sequence()) {
    return false;
  }
  const bool changed_number = wishes.sequence() != controller_wishes_.sequence();
  controller_wishes_ = wishes;
  if (UpdateShown()) {
    return true;
  }
  if (wishes.checkpoint() && changed_number) {
    shown_wishes_.set_sequence(shown_wishes_.sequence() + 1);  // the same wish anew: save once more
    return true;
  }
  return false;
}

bool RankProcess::SetLocalStop(bool with_checkpoint) {
  local_stop_ = true;
  local_stop_with_checkpoint_ = with_checkpoint;
  return UpdateShown();
}

bool RankProcess::UpdateShown() {
  iv1::Wishes next = controller_wishes_;
  if (local_stop_ && local_stop_with_checkpoint_) {
    next.set_stop(true);
  } else if (local_stop_) {
    next.set_stop_without_checkpoint(true);
  }
  next.set_sequence(shown_wishes_.sequence());
  if (next.SerializeAsString() == shown_wishes_.SerializeAsString()) {
    return false;
  }
  next.set_sequence(shown_wishes_.sequence() + 1);
  shown_wishes_ = std::move(next);
  return true;
}

}  // namespace octavo
