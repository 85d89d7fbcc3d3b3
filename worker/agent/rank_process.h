// One rank as the agent sees it, and the ladder by which it is made to leave.
//
//   kSpawning → kWaitingHello → kRunning → kStopping → kTerminating → kKilling → kUnkillable
//                                          (wish)      (SIGTERM)      (SIGKILL)   (slot poisoned)
//
// Every state but kRunning has a deadline, after which NextSignal takes the next rung; so no rank
// can hold its slot for longer than the sum of the bounds. Pure; time is an argument.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <string>

#include "base/subprocess.h"
#include "worker/agent/rank_key.h"

namespace octavo {

enum class RankState {
  kSpawning,
  kWaitingHello,
  kRunning,
  kStopping,
  kTerminating,
  kKilling,
  kUnkillable,
};
const char* RankStateName(RankState state);

class RankProcess {
 public:
  RankProcess(iv1::RankAssignment assignment, std::int64_t now_micros);

  void OnSpawned(int pid, std::int64_t now_micros);
  void OnHello(std::int64_t stream);
  // It was asked to leave and has so long to do it. `failure` is what its end is if it has to be
  // forced or leaves without a last word.
  struct Leave {
    std::int64_t grace_micros;
    std::string cause;
    v1::FailureClass failure;
  };
  void AskToLeave(const Leave& leave, std::int64_t now_micros);
  // The stream broke or the rank said its last word: the process has to end soon by itself. `cause`
  // is told only if it has to be forced.
  void ExpectExit(std::int64_t grace_micros, const std::string& cause, std::int64_t now_micros);
  // Skips the rungs before SIGKILL.
  void KillNow(const std::string& cause, std::int64_t now_micros);

  // The signal that is due now, once per rung. After SIGKILL's bound: nullopt and kUnkillable.
  std::optional<int> NextSignal(std::int64_t now_micros);

  // The wishes to show the rank: what the controller asked for and what this host wants itself.
  // True when they changed; the sequence then has grown.
  bool SetControllerWishes(const iv1::Wishes& wishes);
  bool SetLocalStop(bool with_checkpoint);
  const iv1::Wishes& wishes() const { return shown_wishes_; }

  iv1::RankAssignment& assignment() { return assignment_; }
  const iv1::RankAssignment& assignment() const { return assignment_; }
  RankKey key() const { return KeyOf(assignment_); }
  int slot() const { return assignment_.slot(); }
  int pid() const { return pid_; }
  RankState state() const { return state_; }
  bool connected() const { return stream_ != 0; }
  std::int64_t stream() const { return stream_; }  // 0: none
  void clear_stream() { stream_ = 0; }
  // Why this host made it leave; the first cause is kept. Empty: it left by itself.
  v1::FailureClass cause_class() const { return cause_class_; }
  std::string cause() const { return asked_ || state_ >= RankState::kTerminating ? cause_ : ""; }

  iv1::RankProgress progress;
  std::optional<iv1::RankOutcome> outcome;   // its last word
  std::optional<iv1::StepReport> last_step;  // its newest report

  // The process has ended, but its stream may still deliver what it wrote before.
  struct Ended {
    ExitReason exit;
    std::string log_tail;
    bool out_of_memory = false;
    std::int64_t report_by_micros = 0;
  };
  std::optional<Ended> ended;

 private:
  void Enter(RankState state, std::int64_t deadline_micros);
  bool UpdateShown();

  iv1::RankAssignment assignment_;
  RankState state_ = RankState::kSpawning;
  std::int64_t deadline_micros_ = std::numeric_limits<std::int64_t>::max();
  int pid_ = 0;
  std::int64_t stream_ = 0;
  std::string cause_;
  v1::FailureClass cause_class_ = v1::RANK_EXIT;
  bool asked_ = false;
  iv1::Wishes controller_wishes_;
  bool local_stop_ = false;
  bool local_stop_with_checkpoint_ = true;
  iv1::Wishes shown_wishes_;
};

}  // namespace octavo
