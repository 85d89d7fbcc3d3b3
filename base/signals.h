// SIGTERM and SIGINT as something a thread waits for, instead of code that runs anywhere.
//
//   int main() {
//     const StopSignals signals;               // first thing: threads started later inherit the
//     mask
//     ...
//     std::optional<int> got = signals.Wait(DeadlineAfter(std::chrono::seconds(1)));
//     if (got) { drain(); signals.ExitOnNext(); }   // a second Ctrl-C ends the process at once
//
// Blocks SIGTERM and SIGINT in the calling thread and reads them from a signalfd; SIGPIPE is
// ignored (a peer that goes away is an error code). Subprocess clears the mask for children.
#pragma once

#include <optional>

#include "base/bounded_queue.h"

namespace octavo {

class StopSignals {
 public:
  StopSignals();
  ~StopSignals();  // restores the mask of the calling thread
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

  // The signal's number, or nullopt at the deadline. Each signal is reported once.
  std::optional<int> Wait(SteadyTime deadline) const;

  // From now on SIGTERM and SIGINT have their default effect in the calling thread.
  void ExitOnNext() const;

  int fd() const { return fd_; }  // readable when a signal is waiting; for poll loops

 private:
  int fd_ = -1;
};

}  // namespace octavo
