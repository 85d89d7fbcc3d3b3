// Child processes whose end is known from the kernel and that never outlive us.
//
//   ASSIGN_OR_RETURN(std::unique_ptr<Subprocess> child, Subprocess::Spawn({
//       .argv = {"/usr/bin/octavo-rank", "--socket", path},
//       .stdout_path = dir + "/rank.log", .stderr_path = dir + "/rank.log"}));
//   std::optional<ExitReason> exit = child->Wait(DeadlineAfter(std::chrono::seconds(5)));
//   if (!exit) { child->SignalGroup(SIGKILL); }
//
// Facts:
//  - A pidfd is used for waiting and signalling, so a recycled process id is never hit.
//  - The child leads a new process group; SignalGroup reaches its own children as well, and what is
//    left of the group when the leader ends is killed before the leader is reaped.
//  - Parent-death: the child gets SIGKILL when the THREAD that called Spawn ends, also by kill -9
//  of
//    the whole process (that is what PR_SET_PDEATHSIG means). Spawn from a thread that lives as
//    long as the child may, e.g. the owner's loop; a short-lived thread would kill its children.
//  - The child starts with an empty signal mask and default handlers; stdin is /dev/null; all other
//    descriptors of ours are close-on-exec.
//  - Destroying a Subprocess kills the group and waits at most kDestroyWait for it.
// Thread-safe: Wait, Signal and exit() may be called from several threads.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/bounded_queue.h"

namespace octavo {

// How a process ended, as the kernel reported it: exactly one of exit code or signal.
struct ExitReason {
  int code = -1;   // exit code, or -1 when a signal ended it
  int signal = 0;  // 0 when it exited by itself
  bool core_dumped = false;

  bool success() const { return code == 0 && signal == 0; }
  std::string DebugString()
      const;  // "exit code 3", "signal 9 (SIGKILL)", "signal 6 (SIGABRT), core dumped"
  bool operator==(const ExitReason&) const = default;
};

struct SpawnOptions {
  std::vector<std::string> argv;  // argv[0] is a path, or a name looked up in PATH
  std::vector<std::pair<std::string, std::string>>
      environment;                // added to ours, replaces same names
  std::string working_directory;  // empty: ours
  std::string stdout_path;        // appended to, created; empty: inherited
  std::string stderr_path;        // likewise; the same path as stdout_path shares one descriptor
  bool new_process_group = true;
  bool kill_on_parent_death = true;
};

class Subprocess {
 public:
  static constexpr std::chrono::seconds kDestroyWait{2};

  // Errors: NOT_FOUND or PERMISSION_DENIED for the program (exec's own errno is passed back), files
  // that cannot be opened, RESOURCE_EXHAUSTED for processes.
  static absl::StatusOr<std::unique_ptr<Subprocess>> Spawn(const SpawnOptions& options);
  ~Subprocess();
  Subprocess(const Subprocess&) = delete;
  Subprocess& operator=(const Subprocess&) = delete;

  // The exit reason, or nullopt when the process still runs at the deadline.
  std::optional<ExitReason> Wait(SteadyTime deadline);
  std::optional<ExitReason> Poll() { return Wait(SteadyTime::min()); }

  // OK also when the process has ended already.
  absl::Status Signal(int signal);
  // The whole process group; OK also when it has ended. Without new_process_group: same as Signal.
  absl::Status SignalGroup(int signal);

  pid_t pid() const { return pid_; }
  int pidfd() const { return pidfd_; }  // readable when the process has ended; for poll loops

 private:
  Subprocess(pid_t pid, int pidfd, bool own_group);

  const pid_t pid_;
  const int pidfd_;
  const bool own_group_;
  std::mutex mutex_;
  std::optional<ExitReason> exit_;  // guarded by mutex_
};

}  // namespace octavo
