#include "base/signals.h"

#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>

#include "base/check.h"

namespace octavo {
namespace {

sigset_t StopSet() {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGTERM);
  sigaddset(&set, SIGINT);
  return set;
}

}  // namespace

StopSignals::StopSignals() {
  const sigset_t set = StopSet();
  OCTAVO_CHECK(pthread_sigmask(SIG_BLOCK, &set, nullptr) == 0);
  ::signal(SIGPIPE, SIG_IGN);
  fd_ = ::signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
  OCTAVO_CHECK(fd_ >= 0, "signalfd failed: errno %d", errno);
}

StopSignals::~StopSignals() {
  ::close(fd_);
  ExitOnNext();
}

std::optional<int> StopSignals::Wait(SteadyTime deadline) const {
  while (true) {
    signalfd_siginfo info;
    if (::read(fd_, &info, sizeof(info)) == static_cast<ssize_t>(sizeof(info))) {
      return static_cast<int>(info.ssi_signo);
    }
    const auto now = std::chrono::steady_clock::now();
    if (now >= deadline) {
      return std::nullopt;
    }
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - now).count();
    pollfd ready = {.fd = fd_, .events = POLLIN, .revents = 0};
    ::poll(&ready, 1, static_cast<int>(std::min<std::int64_t>(left, 60'000)));
  }
}

void StopSignals::ExitOnNext() const {
  const sigset_t set = StopSet();
  pthread_sigmask(SIG_UNBLOCK, &set, nullptr);
}

}  // namespace octavo
