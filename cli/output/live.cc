#include "cli/output/live.h"

#include <algorithm>
#include <cmath>

#include "base/str.h"
#include "cli/output/table.h"
#include "cli/output/text.h"

namespace octavo {
namespace {

constexpr int kBarWidth = 20;
constexpr char kClearLine[] = "\r\x1b[K";

double Seconds(const google::protobuf::Timestamp& time) {
  return static_cast<double>(time.seconds()) + time.nanos() * 1e-9;
}

std::string ClockTime(const google::protobuf::Timestamp& time) {
  const std::string full = Rfc3339(time);
  return full.empty() ? "--:--:--" : full.substr(11, 8);
}

std::string Padded(std::string text, std::size_t width) {
  text.resize(std::max(width, text.size()), ' ');
  return text;
}

std::string Bar(const v1::JobProgress& progress) {
  if (progress.total_steps() <= 0) {
    return {};
  }
  const double done = std::clamp(
      static_cast<double>(progress.step()) / static_cast<double>(progress.total_steps()), 0.0, 1.0);
  const int filled = static_cast<int>(done * kBarWidth);
  return "[" + std::string(static_cast<std::size_t>(filled), '#') +
         std::string(static_cast<std::size_t>(kBarWidth - filled), '-') + "] ";
}

bool IsLineOfItsOwn(const v1::JobEvent& event) {
  return event.kind() != "PROGRESS" && event.kind() != "BOOKMARK" && !event.kind().empty();
}

}  // namespace

std::string ProgressText(const v1::Job& job) {
  const v1::JobProgress& p = job.progress();
  std::vector<std::string> parts;
  if (p.total_steps() > 0) {
    parts.push_back(StrCat("step ", p.step(), "/", p.total_steps()));
  } else {
    parts.push_back(StrCat("step ", p.step()));
  }
  if (p.step() > 0) {
    parts.push_back("loss " + LossText(p.loss()));
  }
  if (p.validation_step() > 0) {
    parts.push_back("val " + LossText(p.validation_loss()));
  }
  if (p.tokens_per_second() > 0) {
    parts.push_back(HumanCount(p.tokens_per_second()) + " tok/s");
  }
  if (p.eta_seconds() > 0 && p.step() < p.total_steps()) {
    constexpr double kFarSeconds = 1000.0 * 86400;  // beyond, digits say nothing
    parts.push_back(p.eta_seconds() < kFarSeconds ? "eta " + HumanDuration(p.eta_seconds())
                                                  : std::string("eta over 1000 days"));
  }
  if (!p.recipe_summary().empty()) {
    parts.push_back(Printable(p.recipe_summary()));
  }
  if (p.retried_steps() > 0) {
    parts.push_back(StrCat("retried ", p.retried_steps()));
  }
  if (p.skipped_steps() > 0) {
    parts.push_back(StrCat("skipped ", p.skipped_steps()));
  }
  if (!p.phase().empty() && p.phase() != "training" && p.phase() != "finished") {
    parts.push_back("(" + Printable(p.phase()) + ")");
  }
  return StrJoin(parts, "  ");
}

std::string StatusText(const v1::Job& job) {
  switch (job.state()) {
    case v1::PENDING:
    case v1::RESTARTING:
      return Printable(job.pending().sentence().empty() ? job.message() : job.pending().sentence());
    case v1::RUNNING:
      return ProgressText(job);
    default:
      return Printable(job.message());
  }
}

void LiveView::OnEvent(const v1::JobEvent& event) {
  if (IsLineOfItsOwn(event) && !IsRepeated(event)) {
    const bool warning = event.kind() == "WARNING";
    const bool names_state = event.kind() == "STATE" || event.kind() == "SNAPSHOT";
    const std::string label = names_state ? v1::JobState_Name(event.state()) : event.kind();
    std::string text =
        StrCat(ClockTime(event.time()), "  ", Padded(label, 10), "  ", Printable(event.message()));
    text.erase(text.find_last_not_of(' ') + 1);
    PrintLine(warning && options_.is_terminal ? "\x1b[33m" + text + "\x1b[0m" : text);
  }
  if (!event.has_snapshot()) {
    return;
  }
  if (options_.is_terminal) {
    DrawStatus(event.snapshot());
  } else {
    PlainProgress(event);
  }
}

// A watch begins (and begins again after a lost connection) with what is known already.
bool LiveView::IsRepeated(const v1::JobEvent& event) {
  if (event.kind() == "PENDING") {  // the reason for waiting, which snapshots carry too
    const bool repeated = Printable(event.message()) == waiting_;
    waiting_ = Printable(event.message());
    return repeated;
  }
  if (event.kind() != "STATE" && event.kind() != "SNAPSHOT") {
    return false;
  }
  const std::string shown = StrCat(v1::JobState_Name(event.state()), " ", event.message());
  const bool repeated = event.kind() == "SNAPSHOT" && shown == last_state_;
  last_state_ = shown;
  return repeated;
}

void LiveView::Note(const std::string& text) { PrintLine(text); }

void LiveView::Finish() { ClearStatus(); }

void LiveView::PrintLine(const std::string& text) {
  const std::string status = status_;
  const bool was_drawn = drawn_;
  ClearStatus();
  out_ << text << "\n";
  if (was_drawn) {
    out_ << status;
    drawn_ = true;
    status_ = status;
  }
  out_.flush();
}

void LiveView::DrawStatus(const v1::Job& job) {
  const std::string bar = job.state() == v1::RUNNING ? Bar(job.progress()) : std::string();
  const std::string head =
      job.state() == v1::RUNNING ? std::string() : v1::JobState_Name(job.state()) + "  ";
  // One column less than the terminal has: a full line would wrap and could not be redrawn.
  const std::string text = Truncated(bar + head + StatusText(job), options_.width - 1);
  if (drawn_ && text == status_) {
    return;
  }
  out_ << kClearLine << text;
  out_.flush();
  status_ = text;
  drawn_ = true;
}

void LiveView::ClearStatus() {
  if (drawn_) {
    out_ << kClearLine;
    out_.flush();
    drawn_ = false;
    status_.clear();
  }
}

void LiveView::PlainProgress(const v1::JobEvent& event) {
  const v1::Job& job = event.snapshot();
  if (job.state() == v1::PENDING || job.state() == v1::RESTARTING) {
    const std::string text = StatusText(job);
    if (!text.empty() && text != waiting_) {
      waiting_ = text;
      PrintLine(StrCat(ClockTime(event.time()), "  ", Padded("waiting", 10), "  ", text));
    }
    return;
  }
  if (job.state() != v1::RUNNING || job.progress().step() == last_plain_step_) {
    return;
  }
  const bool last = job.progress().step() == job.progress().total_steps();
  const double now = Seconds(event.time());
  if (!last && now - last_plain_seconds_ < options_.plain_interval_seconds) {
    return;
  }
  last_plain_seconds_ = now;
  last_plain_step_ = job.progress().step();
  PrintLine(StrCat(ClockTime(event.time()), "  ", Padded("progress", 10), "  ", ProgressText(job)));
}

std::string SummaryText(const v1::Job& job) {
  const v1::JobProgress& p = job.progress();
  KeyValues lines;
  lines.Add("job", BareName(job.name()));
  lines.Add("state", v1::JobState_Name(job.state()));
  if (job.failure() != v1::FAILURE_CLASS_UNSPECIFIED) {
    lines.Add("failure", v1::FailureClass_Name(job.failure()));
  }
  lines.Add("message", job.message());
  lines.Add("steps", StrCat(p.step(), " of ", p.total_steps()));
  if (job.attempts_size() > 1) {
    lines.Add("attempts", StrCat(job.attempts_size(), " (", job.restarts(), " failed)"));
  }
  if (p.step() > 0) {
    lines.Add("loss at start", LossText(p.first_loss()));
    lines.Add("loss at end", LossText(p.loss()));
  }
  if (p.validation_step() > 0) {
    lines.Add("validation loss",
              StrCat(LossText(p.validation_loss()), " (step ", p.validation_step(), ")"));
  }
  if (p.step() > 0) {
    lines.Add("tokens", HumanCount(static_cast<double>(p.tokens())));
    lines.Add("tokens/s", HumanCount(p.tokens_per_second()));
    lines.Add("FP8 share of GEMM FLOPs", PercentText(p.fp8_flop_share()));
    lines.Add("all-to-all", HumanBytes(static_cast<double>(p.all_to_all_bytes())));
  }
  lines.Add("recipes", p.recipe_summary());
  if (p.retried_steps() + p.skipped_steps() > 0) {
    lines.Add("non-finite steps",
              StrCat(p.retried_steps(), " retried, ", p.skipped_steps(), " skipped"));
  }
  if (!p.checkpoint_path().empty()) {
    lines.Add("checkpoint", StrCat(p.checkpoint_path(), " (step ", p.checkpoint_step(), ")"));
  }
  return lines.Render();
}

}  // namespace octavo
