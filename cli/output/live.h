// The view of a job that is followed: one status line that is redrawn on a terminal, plain lines
// elsewhere. What happened (states, attempts, plans, warnings, checkpoints) is a line of its own in
// both.
//
//   13:40:42  RUNNING     attempt 1 on 2 workers
//   [########------------] step 120/300  loss 2.3145  12.3k tok/s  eta 1m20s  fp8_flow 4/6, bf16
//   2/6
#pragma once

#include <ostream>
#include <string>

#include "octavo/v1/job.pb.h"

namespace octavo {

struct LiveOptions {
  bool is_terminal = false;
  int width = 80;
  // Off a terminal: no more than one progress line in so many seconds (by the events' own time).
  double plain_interval_seconds = 5;
};

// "step 120/300 (40 %)  loss 2.3145  12.3k tok/s  eta 1m20s  fp8_flow 4/6 layers": what is known.
std::string ProgressText(const v1::Job& job);
// The text for any state: progress, the reason for waiting, or the message.
std::string StatusText(const v1::Job& job);

class LiveView {
 public:
  LiveView(std::ostream& out, const LiveOptions& options) : out_(out), options_(options) {}

  void OnEvent(const v1::JobEvent& event);
  // A line about following itself, e.g. a lost connection.
  void Note(const std::string& text);
  // Removes the status line; nothing is drawn after it.
  void Finish();

 private:
  void PrintLine(const std::string& text);
  void DrawStatus(const v1::Job& job);
  void ClearStatus();
  bool IsRepeated(const v1::JobEvent& event);
  void PlainProgress(const v1::JobEvent& event);

  std::ostream& out_;
  const LiveOptions options_;
  bool drawn_ = false;
  std::string status_;
  std::string last_state_;  // state and message shown last
  std::string waiting_;     // last reason shown: shown again only when it changes
  double last_plain_seconds_ = -1e18;
  std::int64_t last_plain_step_ = -1;
};

// Facts of a job that ended (or was suspended): losses, throughput, FP8 share, bytes, checkpoint.
std::string SummaryText(const v1::Job& job);

}  // namespace octavo
