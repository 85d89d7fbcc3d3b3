#include <gtest/gtest.h>

#include <sstream>

#include "cli/exit_codes.h"
#include "cli/output/live.h"
#include "cli/output/log_lines.h"
#include "cli/output/table.h"
#include "cli/output/text.h"

namespace octavo {
namespace {

TEST(TableTest, AlignsColumnsAndLeavesNoTrailingSpace) {
  Table table({{"JOB"}, {"STEP", Align::kRight}, {"STATUS"}});
  table.AddRow({"a", "7", ""});
  table.AddRow({"longer", "1200", "wärts"});
  EXPECT_EQ(table.Render(),
            "JOB     STEP  STATUS\n"
            "a          7\n"
            "longer  1200  wärts\n");
}

TEST(TableTest, CutsLongCellsButNeverTheLast) {
  Table table({{"A", Align::kLeft, 5}, {"B"}});
  table.AddRow({"123456789", std::string(100, 'x')});
  EXPECT_EQ(table.Render(), "A      B\n1234…  " + std::string(100, 'x') + "\n");
}

TEST(TextTest, MessagesCannotSteerTheTerminal) {
  EXPECT_EQ(Printable("a\x1b[2Jb\r\x07"), "a?[2Jb??");
  EXPECT_EQ(Printable("a\nb\tc"), "a b c");
  EXPECT_EQ(Printable("a\nb", true), "a\nb");
  EXPECT_EQ(Printable("\xC2\x9B"
                      "31m"),
            "?31m");  // an 8-bit control sequence
  EXPECT_EQ(Printable("ok é \xff"), "ok é \xEF\xBF\xBD");
}

TEST(TextTest, HumanNumbers) {
  EXPECT_EQ(HumanCount(0), "0");
  EXPECT_EQ(HumanCount(812), "812");
  EXPECT_EQ(HumanCount(12345), "12.3k");
  EXPECT_EQ(HumanCount(999960), "1.0M");
  EXPECT_EQ(HumanCount(0.5), "0.5");
  EXPECT_EQ(LossText(2.31449), "2.3145");
  EXPECT_EQ(PercentText(0.4567), "45.7 %");
  EXPECT_EQ(Truncated("abcdef", 4), "abc…");
  EXPECT_EQ(Truncated("äöüß", 4), "äöüß");
}

TEST(TextTest, ResourceNames) {
  EXPECT_EQ(JobResource("a"), "jobs/a");
  EXPECT_EQ(JobResource("jobs/a"), "jobs/a");
  EXPECT_EQ(WorkerResource("w"), "workers/w");
  EXPECT_EQ(BareName("jobs/a"), "a");
}

TEST(ExitCodeTest, EveryKindOfErrorHasItsDocumentedCode) {
  using Code = absl::StatusCode;
  const std::pair<Code, int> expected[] = {{Code::kOk, 0},
                                           {Code::kInvalidArgument, 2},
                                           {Code::kOutOfRange, 2},
                                           {Code::kNotFound, 3},
                                           {Code::kFailedPrecondition, 4},
                                           {Code::kAborted, 4},
                                           {Code::kAlreadyExists, 4},
                                           {Code::kUnavailable, 5},
                                           {Code::kDeadlineExceeded, 5},
                                           {Code::kResourceExhausted, 5},
                                           {Code::kPermissionDenied, 8},
                                           {Code::kUnauthenticated, 8},
                                           {Code::kInternal, 7},
                                           {Code::kUnknown, 7},
                                           {Code::kUnimplemented, 7},
                                           {Code::kDataLoss, 1},
                                           {Code::kCancelled, 130}};
  for (const auto& [code, exit_code] : expected) {
    EXPECT_EQ(ExitCodeOf(absl::Status(code, "x")), exit_code) << static_cast<int>(code);
    const bool disk = code == Code::kUnavailable || code == Code::kResourceExhausted;
    EXPECT_EQ(LocalExitCodeOf(absl::Status(code, "x")), disk ? 1 : exit_code)
        << static_cast<int>(code);
    EXPECT_NE(std::string(kExitCodesHelp).find("\n  " + std::to_string(exit_code) + " "),
              std::string::npos)
        << exit_code;
  }
  EXPECT_EQ(ExitCodeOf(v1::SUCCEEDED), 0);
  EXPECT_EQ(ExitCodeOf(v1::FAILED), 1);
  EXPECT_EQ(ExitCodeOf(v1::CANCELLED), 6);
  EXPECT_EQ(ExitCodeOf(v1::SUSPENDED), 9);
}

TEST(LogLinesTest, JoinsChunksOfInterleavedRanksIntoLines) {
  std::string seen;
  LogLines lines([&](const LogLines::Source& source, std::string_view line) {
    seen += std::to_string(source.rank) + ":" + std::string(line) + "\n";
  });
  lines.Add({1, 0}, "ab");
  lines.Add({1, 1}, "x\ny");
  lines.Add({1, 0}, "c\n\nd");
  lines.Flush();
  lines.Flush();
  EXPECT_EQ(seen, "1:x\n0:abc\n0:\n0:d\n1:y\n");
}

v1::JobEvent Event(const std::string& kind, std::int64_t seconds, const std::string& message) {
  v1::JobEvent event;
  event.set_kind(kind);
  event.set_message(message);
  event.mutable_time()->set_seconds(1764423600 + seconds);
  return event;
}

v1::JobEvent Progress(std::int64_t seconds, std::int64_t step) {
  v1::JobEvent event = Event("PROGRESS", seconds, "");
  v1::Job* job = event.mutable_snapshot();
  job->set_state(v1::RUNNING);
  v1::JobProgress* progress = job->mutable_progress();
  progress->set_step(step);
  progress->set_total_steps(300);
  progress->set_loss(2.31449);
  progress->set_tokens_per_second(12345);
  progress->set_eta_seconds(80);
  progress->set_recipe_summary("fp8_flow 4/6 layers, bf16 2/6");
  progress->set_phase("training");
  return event;
}

TEST(LiveViewTest, OffATerminalPrintsPlainLinesAtAnInterval) {
  std::ostringstream out;
  LiveView view(out, {.is_terminal = false, .plain_interval_seconds = 5});
  v1::JobEvent waiting = Event("PROGRESS", 0, "");
  waiting.mutable_snapshot()->set_state(v1::PENDING);
  waiting.mutable_snapshot()->mutable_pending()->set_sentence("needs 2 cpu slots; free now 0");
  view.OnEvent(waiting);
  view.OnEvent(waiting);  // the same reason: said once
  view.OnEvent(Event("PENDING", 1, "needs 2 cpu slots; free now 0"));
  v1::JobEvent running = Event("STATE", 2, "attempt 1");
  running.set_state(v1::RUNNING);
  view.OnEvent(running);
  running.set_kind("SNAPSHOT");  // a reconnection repeats what is known: not shown again
  view.OnEvent(running);
  view.OnEvent(Progress(3, 10));
  view.OnEvent(Progress(4, 11));
  view.OnEvent(Progress(8, 20));
  view.OnEvent(Event("WARNING", 9, "layer 3 fc1 saturates\x1b[31m"));
  view.OnEvent(Event("BOOKMARK", 9, "nothing new"));
  view.OnEvent(Progress(9, 300));
  view.Finish();
  EXPECT_EQ(out.str(),
            "13:40:00  waiting     needs 2 cpu slots; free now 0\n"
            "13:40:02  RUNNING     attempt 1\n"
            "13:40:03  progress    step 10/300  loss 2.3145  12.3k tok/s  eta 1m20s  fp8_flow 4/6 "
            "layers, bf16 2/6\n"
            "13:40:08  progress    step 20/300  loss 2.3145  12.3k tok/s  eta 1m20s  fp8_flow 4/6 "
            "layers, bf16 2/6\n"
            "13:40:09  WARNING     layer 3 fc1 saturates?[31m\n"
            "13:40:09  progress    step 300/300  loss 2.3145  12.3k tok/s  fp8_flow 4/6 layers, "
            "bf16 2/6\n");
}

TEST(LiveViewTest, OnATerminalRedrawsOneLineThatNeverWraps) {
  std::ostringstream out;
  LiveView view(out, {.is_terminal = true, .width = 60});
  view.OnEvent(Progress(3, 150));
  const std::string status = "[##########----------] step 150/300  loss 2.3145  12.3k to…";
  EXPECT_EQ(DisplayWidth(status), 59);
  EXPECT_EQ(out.str(), "\r\x1b[K" + status);
  out.str("");
  view.OnEvent(Progress(3, 150));  // nothing new: nothing drawn
  EXPECT_EQ(out.str(), "");
  view.OnEvent(Event("CHECKPOINT", 4, "step 150"));
  EXPECT_EQ(out.str(), "\r\x1b[K13:40:04  CHECKPOINT  step 150\n" + status);
  out.str("");
  view.Finish();
  view.Finish();
  EXPECT_EQ(out.str(), "\r\x1b[K");
}

TEST(SummaryTest, PrintsTheFactsOfAJobThatEnded) {
  v1::Job job;
  job.set_name("jobs/demo");
  job.set_state(v1::SUCCEEDED);
  v1::JobProgress* p = job.mutable_progress();
  p->set_step(300);
  p->set_total_steps(300);
  p->set_first_loss(5.54);
  p->set_loss(2.1);
  p->set_validation_loss(2.2);
  p->set_validation_step(300);
  p->set_tokens(614400);
  p->set_tokens_per_second(4321);
  p->set_fp8_flop_share(0.512);
  p->set_all_to_all_bytes(3 << 20);
  p->set_checkpoint_path("/ck/step-300");
  p->set_checkpoint_step(300);
  EXPECT_EQ(SummaryText(job),
            "job:                      demo\n"
            "state:                    SUCCEEDED\n"
            "steps:                    300 of 300\n"
            "loss at start:            5.5400\n"
            "loss at end:              2.1000\n"
            "validation loss:          2.2000 (step 300)\n"
            "tokens:                   614.4k\n"
            "tokens/s:                 4.3k\n"
            "FP8 share of GEMM FLOPs:  51.2 %\n"
            "all-to-all:               3.0 MiB\n"
            "checkpoint:               /ck/step-300 (step 300)\n");
}

}  // namespace
}  // namespace octavo
