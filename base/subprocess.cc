#include "base/subprocess.h"

#include <fcntl.h>
#include <linux/close_range.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdlib>
#include <cstring>

#include "base/check.h"
#include "base/file.h"
#include "base/status.h"
#include "base/str.h"

extern char** environ;

namespace octavo {
namespace {

// Everything the child needs after fork, prepared before it: between fork and exec only
// async-signal-safe calls are allowed (another thread may hold the heap's lock).
struct ChildPlan {
  std::vector<std::string> candidates;  // paths to try in order
  std::vector<char*> argv;
  std::vector<std::string> environment_text;
  std::vector<char*> environment;
  const char* working_directory = nullptr;
  int stdin_fd = -1;
  int stdout_fd = -1;
  int stderr_fd = -1;
  int error_pipe = -1;
  bool new_process_group = true;
  bool kill_on_parent_death = true;
  pid_t parent = 0;
};

struct ChildError {
  int step;  // index into kSteps
  int error;
};
constexpr const char* kSteps[] = {"creating its process group", "changing to its folder",
                                  "redirecting its output", "executing"};

[[noreturn]] void FailInChild(const ChildPlan& plan, int step, int error) {
  const ChildError report = {step, error};
  // Nothing useful can be done when the pipe is broken: the exit code still tells the parent.
  [[maybe_unused]] const ssize_t ignored = ::write(plan.error_pipe, &report, sizeof(report));
  ::_exit(127);
}

[[noreturn]] void RunChild(const ChildPlan& plan) {
  if (plan.new_process_group && ::setpgid(0, 0) != 0) {
    FailInChild(plan, 0, errno);
  }
  if (plan.kill_on_parent_death) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    // The parent may have died before prctl: then we have been re-parented already.
    if (::getppid() != plan.parent) {
      ::_exit(127);
    }
  }
  if (plan.working_directory != nullptr && ::chdir(plan.working_directory) != 0) {
    FailInChild(plan, 1, errno);
  }
  if (::dup2(plan.stdin_fd, STDIN_FILENO) < 0 ||
      (plan.stdout_fd >= 0 && ::dup2(plan.stdout_fd, STDOUT_FILENO) < 0) ||
      (plan.stderr_fd >= 0 && ::dup2(plan.stderr_fd, STDERR_FILENO) < 0)) {
    FailInChild(plan, 2, errno);
  }
  // Libraries open descriptors without O_CLOEXEC; a rank must not hold the daemon's sockets open.
  ::close_range(3, ~0U, CLOSE_RANGE_CLOEXEC);
  for (int signal = 1; signal < NSIG; ++signal) {
    ::signal(signal, SIG_DFL);
  }
  sigset_t none;
  ::sigemptyset(&none);
  ::sigprocmask(SIG_SETMASK, &none, nullptr);
  int error = ENOENT;
  for (const std::string& path : plan.candidates) {
    ::execve(path.c_str(), plan.argv.data(), plan.environment.data());
    if (errno != ENOENT && errno != ENOTDIR) {
      error = errno;
      break;
    }
  }
  FailInChild(plan, 3, error);
}

std::vector<std::string> ProgramCandidates(const std::string& program) {
  if (program.find('/') != std::string::npos) {
    return {program};
  }
  const char* path = std::getenv("PATH");
  std::vector<std::string> candidates;
  for (const std::string& folder : StrSplit(path == nullptr ? "/usr/bin:/bin" : path, ':')) {
    candidates.push_back(JoinPath(folder.empty() ? "." : folder, program));
  }
  return candidates;
}

std::vector<std::string> MergedEnvironment(
    const std::vector<std::pair<std::string, std::string>>& additions) {
  std::vector<std::string> merged;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    const bool replaced = std::any_of(additions.begin(), additions.end(), [&](const auto& pair) {
      return StartsWith(*entry, pair.first + "=");
    });
    if (!replaced) {
      merged.emplace_back(*entry);
    }
  }
  for (const auto& [name, value] : additions) {
    merged.push_back(StrCat(name, "=", value));
  }
  return merged;
}

class ScopedFd {
 public:
  ScopedFd() = default;
  ScopedFd(const ScopedFd&) = delete;
  ScopedFd& operator=(const ScopedFd&) = delete;
  ~ScopedFd() { Reset(-1); }
  void Reset(int fd) {
    if (fd_ >= 0) {
      ::close(fd_);
    }
    fd_ = fd;
  }
  int get() const { return fd_; }

 private:
  int fd_ = -1;
};

absl::Status OpenOutput(const std::string& path, ScopedFd* fd) {
  fd->Reset(::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644));
  if (fd->get() < 0) {
    return ErrnoStatus(errno, StrCat("opening output file ", path));
  }
  return absl::OkStatus();
}

// Signals are blocked around fork so that no handler of ours runs in the child.
class BlockAllSignals {
 public:
  BlockAllSignals() {
    sigset_t all;
    ::sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~BlockAllSignals() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  BlockAllSignals(const BlockAllSignals&) = delete;
  BlockAllSignals& operator=(const BlockAllSignals&) = delete;

 private:
  sigset_t before_;
};

}  // namespace

std::string ExitReason::DebugString() const {
  if (signal == 0) {
    return StrCat("exit code ", code);
  }
  const char* name = ::sigabbrev_np(signal);
  return StrCat("signal ", signal, " (", name == nullptr ? "?" : StrCat("SIG", name), ")",
                core_dumped ? ", core dumped" : "");
}

absl::StatusOr<std::unique_ptr<Subprocess>> Subprocess::Spawn(const SpawnOptions& options) {
  if (options.argv.empty() || options.argv[0].empty()) {
    return InvalidArgumentError("starting a process: argv is empty");
  }
  const std::string attempted = StrCat("starting ", options.argv[0]);
  ChildPlan plan;
  plan.candidates = ProgramCandidates(options.argv[0]);
  for (const std::string& argument : options.argv) {
    plan.argv.push_back(const_cast<char*>(argument.c_str()));
  }
  plan.argv.push_back(nullptr);
  plan.environment_text = MergedEnvironment(options.environment);
  for (const std::string& entry : plan.environment_text) {
    plan.environment.push_back(const_cast<char*>(entry.c_str()));
  }
  plan.environment.push_back(nullptr);
  if (!options.working_directory.empty()) {
    plan.working_directory = options.working_directory.c_str();
  }
  plan.new_process_group = options.new_process_group;
  plan.kill_on_parent_death = options.kill_on_parent_death;
  plan.parent = ::getpid();

  ScopedFd stdin_fd, stdout_fd, stderr_fd, pipe_read, pipe_write;
  stdin_fd.Reset(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  if (stdin_fd.get() < 0) {
    return ErrnoStatus(errno, StrCat(attempted, ": opening /dev/null"));
  }
  plan.stdin_fd = stdin_fd.get();
  if (!options.stdout_path.empty()) {
    RETURN_IF_ERROR(Annotate(OpenOutput(options.stdout_path, &stdout_fd), attempted));
    plan.stdout_fd = stdout_fd.get();
  }
  if (!options.stderr_path.empty()) {
    if (options.stderr_path == options.stdout_path) {
      plan.stderr_fd = stdout_fd.get();
    } else {
      RETURN_IF_ERROR(Annotate(OpenOutput(options.stderr_path, &stderr_fd), attempted));
      plan.stderr_fd = stderr_fd.get();
    }
  }
  int pipe_fds[2];
  if (::pipe2(pipe_fds, O_CLOEXEC) != 0) {
    return ErrnoStatus(errno, StrCat(attempted, ": creating a pipe"));
  }
  pipe_read.Reset(pipe_fds[0]);
  pipe_write.Reset(pipe_fds[1]);
  plan.error_pipe = pipe_write.get();

  pid_t pid;
  {
    const BlockAllSignals block;
    pid = ::fork();
    if (pid == 0) {
      RunChild(plan);
    }
  }
  if (pid < 0) {
    return errno == EAGAIN ? ResourceExhaustedError(StrCat(attempted, ": no more processes"))
                           : ErrnoStatus(errno, StrCat(attempted, ": fork"));
  }
  pipe_write.Reset(-1);
  // Ends with zero bytes when exec closed the pipe. Bounded by the child's few calls up to exec.
  ChildError report;
  ssize_t count;
  do {
    count = ::read(pipe_read.get(), &report, sizeof(report));
  } while (count < 0 && errno == EINTR);
  if (count == static_cast<ssize_t>(sizeof(report))) {
    ::waitpid(pid, nullptr, 0);
    return ErrnoStatus(report.error,
                       StrCat(attempted, ": ", kSteps[report.step], report.step == 1 ? " " : "",
                              report.step == 1 ? options.working_directory : ""));
  }
  const int pidfd = static_cast<int>(::syscall(SYS_pidfd_open, pid, 0));
  if (pidfd < 0) {
    const int error = errno;
    ::kill(pid, SIGKILL);
    ::waitpid(pid, nullptr, 0);
    return ErrnoStatus(error, StrCat(attempted, ": opening a pidfd"));
  }
  ::fcntl(pidfd, F_SETFD, FD_CLOEXEC);
  return std::unique_ptr<Subprocess>(new Subprocess(pid, pidfd, options.new_process_group));
}

Subprocess::Subprocess(pid_t pid, int pidfd, bool own_group)
    : pid_(pid), pidfd_(pidfd), own_group_(own_group) {}

Subprocess::~Subprocess() {
  if (!Poll().has_value()) {
    SignalGroup(SIGKILL).IgnoreError();  // fails only when it has just ended
    Wait(DeadlineAfter(kDestroyWait));
  }
  ::close(pidfd_);
}

std::optional<ExitReason> Subprocess::Wait(SteadyTime deadline) {
  while (true) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (exit_.has_value()) {
        return exit_;
      }
      siginfo_t info;
      std::memset(&info, 0, sizeof(info));
      if (::waitid(P_PIDFD, static_cast<id_t>(pidfd_), &info, WEXITED | WNOHANG | WNOWAIT) == 0 &&
          info.si_pid != 0) {
        if (own_group_) {
          ::kill(-pid_, SIGKILL);  // before reaping: until then the id cannot be anybody else's
        }
        ::waitid(P_PIDFD, static_cast<id_t>(pidfd_), &info, WEXITED | WNOHANG);
        ExitReason reason;
        if (info.si_code == CLD_EXITED) {
          reason.code = info.si_status;
        } else {
          reason.signal = info.si_status;
          reason.core_dumped = info.si_code == CLD_DUMPED;
        }
        exit_ = reason;
        return exit_;
      }
    }
    const auto now = std::chrono::steady_clock::now();
    if (now >= deadline) {
      return std::nullopt;
    }
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - now).count();
    pollfd ready = {.fd = pidfd_, .events = POLLIN, .revents = 0};
    ::poll(&ready, 1, static_cast<int>(std::min<std::int64_t>(left, 60'000)));
  }
}

absl::Status Subprocess::Signal(int signal) {
  if (::syscall(SYS_pidfd_send_signal, pidfd_, signal, nullptr, 0) != 0 && errno != ESRCH) {
    return ErrnoStatus(errno, StrCat("sending signal ", signal, " to process ", pid_));
  }
  return absl::OkStatus();
}

absl::Status Subprocess::SignalGroup(int signal) {
  if (!own_group_) {
    return Signal(signal);
  }
  std::lock_guard<std::mutex> lock(mutex_);
  if (exit_.has_value()) {
    return absl::OkStatus();  // reaped, its group killed: the id may belong to somebody else now
  }
  if (::kill(-pid_, signal) != 0 && errno != ESRCH) {
    return ErrnoStatus(errno, StrCat("sending signal ", signal, " to process group ", pid_));
  }
  return absl::OkStatus();
}

}  // namespace octavo
