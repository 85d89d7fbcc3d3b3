// Many independent computations, each in a process of its own, so many at a time, until a deadline.
//
//   ASSIGN_OR_RETURN(std::size_t done, SweepProcesses(runs.size(), {.jobs = 24, .deadline = 350},
//                                                     [&](std::size_t i) { return RunOne(i); }));
#pragma once

#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <ctime>
#include <functional>
#include <map>

#include "absl/status/statusor.h"
#include "base/status.h"
#include "base/str.h"

namespace octavo {

struct SweepOptions {
  int jobs = 1;          // processes at a time
  double deadline = 0;   // seconds from the call; 0: none
  bool progress = true;  // a line on stderr for every end
};

// Runs task(i) for i = 0, 1, … count − 1 in forked children and returns how many ended well. A task
// leaves its result in a file. With a deadline none is started that would end after it, judged by
// the slowest so far, and what runs then is killed. INTERNAL when a task fails (its status is on
// stderr); the others are killed. REQUIRES: no other threads or children in this process.
inline absl::StatusOr<std::size_t> SweepProcesses(
    std::size_t count, const SweepOptions& options,
    const std::function<absl::Status(std::size_t)>& task) {
  using Steady = std::chrono::steady_clock;
  const auto begin = Steady::now();
  const auto elapsed = [&] { return std::chrono::duration<double>(Steady::now() - begin).count(); };
  sigset_t child_ended, before;
  sigemptyset(&child_ended);
  sigaddset(&child_ended, SIGCHLD);
  sigprocmask(SIG_BLOCK, &child_ended, &before);

  std::map<pid_t, double> running;  // when each began
  std::size_t next = 0, done = 0;
  double slowest = 0;
  bool failed = false, killed = false;
  while (true) {
    while (!failed && running.size() < static_cast<std::size_t>(options.jobs) && next < count &&
           (options.deadline <= 0 || elapsed() + slowest < options.deadline)) {
      const double began = elapsed();
      const pid_t child = fork();
      if (child < 0) {
        std::fprintf(stderr, "no further process could be started\n");
        failed = true;
        break;
      }
      if (child == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        sigprocmask(SIG_SETMASK, &before, nullptr);
        const absl::Status status = task(next);
        if (!status.ok()) {
          std::fprintf(stderr, "%s\n", ToString(status).c_str());
        }
        _exit(status.ok() ? 0 : 1);
      }
      running[child] = began;
      ++next;
    }
    if (running.empty()) {
      break;
    }
    if (failed || (options.deadline > 0 && elapsed() >= options.deadline)) {
      killed = true;
      for (const auto& [pid, began] : running) {
        kill(pid, SIGKILL);
      }
    }
    // Ends early when a child ends; a signal that was missed costs a second.
    const double left = options.deadline > 0 ? options.deadline - elapsed() : 1;
    const timespec limit = {left >= 1 ? 1 : 0,
                            left >= 1 ? 0 : static_cast<long>(1e9 * std::max(left, 0.001))};
    sigtimedwait(&child_ended, nullptr, &limit);
    int status = 0;
    for (pid_t pid = 0; (pid = waitpid(-1, &status, WNOHANG)) > 0;) {
      slowest = std::max(slowest, elapsed() - running[pid]);
      running.erase(pid);
      if (WIFEXITED(status) && WEXITSTATUS(status) == 0) {
        ++done;
        if (options.progress) {
          std::fprintf(stderr, "%zu of %zu runs, %.0f s\n", done, count, elapsed());
        }
      } else if (!killed) {
        failed = true;
      }
    }
  }
  sigprocmask(SIG_SETMASK, &before, nullptr);
  if (failed) {
    return InternalError("a run failed; its message is above");
  }
  return done;
}

}  // namespace octavo
