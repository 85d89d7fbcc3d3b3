#include "worker/agent/metrics.h"

#include "base/file.h"
#include "base/str.h"
#include "base/subprocess.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/precision/op_id.h"
#include "tests/support/temp_dir.h"

namespace octavo {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

constexpr std::int64_t kNow = 1'800'000'000'000'000;

internal::v1::TelemetrySnapshot Snapshot() {
  internal::v1::TelemetrySnapshot snapshot;
  for (int tensor = 0; tensor < kTensorCount; ++tensor) {
    internal::v1::TensorStats* t = snapshot.add_tensors();
    t->set_layer(2);
    t->set_op(static_cast<int>(Op::kFc1));
    t->set_tensor(tensor);
    t->set_elements(100);
    t->set_saturated(1);
    t->set_amax(static_cast<float>(tensor + 1));
    t->set_dequant_scale_min(0.5f);
    t->set_dequant_scale_max(4);
  }
  snapshot.mutable_tensors(2)->set_shadow(true);
  internal::v1::LayerLoad* load = snapshot.add_loads();
  load->set_layer(2);
  load->set_max_ratio(1.5);
  (*snapshot.mutable_flops())["fp8"] = 1e9;
  snapshot.set_dropped_reports(3);
  return snapshot;
}

internal::v1::StepReport Step() {
  internal::v1::StepReport step;
  step.set_step(7);
  step.set_loss(2.5);
  step.set_tokens(4096);
  step.set_step_seconds(0.3);
  step.set_outcome(1);
  return step;
}

TEST(WorkerMetrics, StepsCountAndTimesFillHistograms) {
  WorkerMetrics metrics({.version = "1"});
  metrics.ObserveStep("a", Step(), kNow);
  metrics.ObserveStep("a", Step(), kNow);
  const std::string text = metrics.Text();
  EXPECT_THAT(text, HasSubstr("octavo_train_steps_total{train_job=\"a\"} 2\n"));
  EXPECT_THAT(text, HasSubstr("octavo_train_tokens_total{train_job=\"a\"} 8192\n"));
  EXPECT_THAT(text, HasSubstr("octavo_train_loss{train_job=\"a\"} 2.5\n"));
  EXPECT_THAT(text,
              HasSubstr("octavo_nonfinite_steps_total{train_job=\"a\",outcome=\"retried_ok\"} 2"));
  EXPECT_THAT(text,
              HasSubstr("octavo_nonfinite_steps_total{train_job=\"a\",outcome=\"skipped\"} 0"));
  EXPECT_THAT(text, HasSubstr("phase=\"total\",le=\"0.2\"} 0\n"));
  EXPECT_THAT(text, HasSubstr("phase=\"total\",le=\"0.4\"} 2\n"));
  EXPECT_THAT(text, HasSubstr("phase=\"total\",le=\"+Inf\"} 2\n"));
}

TEST(WorkerMetrics, DetailDecidesTheLabelsAndShadowStatisticsStayOut) {
  WorkerMetrics metrics({.version = "1"});
  metrics.ObserveTelemetry("a", "op", Snapshot());
  metrics.ObserveTelemetry("b", "tensor", Snapshot());
  metrics.ObserveTelemetry("c", "layer", Snapshot());
  const std::string text = metrics.Text();
  EXPECT_THAT(text,
              HasSubstr("octavo_fp8_elements_total{train_job=\"a\",layer=\"2\",op=\"fc1\"} 200\n"));
  EXPECT_THAT(text, HasSubstr("octavo_fp8_amax{train_job=\"a\",layer=\"2\",op=\"fc1\"} 2\n"));
  EXPECT_THAT(text, HasSubstr("{train_job=\"b\",layer=\"2\",op=\"fc1\",tensor=\"weight\"} 100\n"));
  EXPECT_THAT(text, Not(HasSubstr("tensor=\"grad\"")));
  EXPECT_THAT(text, HasSubstr("octavo_fp8_elements_total{train_job=\"c\",layer=\"2\"} 200\n"));
  EXPECT_THAT(text,
              HasSubstr("octavo_expert_load_ratio{train_job=\"a\",layer=\"2\",stat=\"max\"} 1.5"));
  EXPECT_THAT(text, HasSubstr("octavo_telemetry_dropped_total{reason=\"rank_queue\"} 9\n"));
}

TEST(WorkerMetrics, SeriesAreCappedCountedAndGoWithTheirJob) {
  WorkerMetrics metrics({.version = "1", .series_max = 20});
  for (int job = 0; job < 50; ++job) {
    metrics.ObserveStep(StrCat("job-", job), Step(), kNow);
  }
  std::string text = metrics.Text();
  EXPECT_THAT(text, Not(HasSubstr("train_job=\"job-49\"")));
  EXPECT_THAT(text, Not(HasSubstr("reason=\"series_cap\"} 0\n")));
  for (int job = 0; job < 50; ++job) {
    metrics.ForgetJob(StrCat("job-", job), 0);
  }
  metrics.ObserveStep("job-0", Step(), kNow);  // a new attempt within the grace keeps its counters
  metrics.Sweep(WorkerMetrics::kLingerMicros - 1);
  EXPECT_THAT(metrics.Text(), HasSubstr("train_job=\"job-1\""));
  metrics.Sweep(WorkerMetrics::kLingerMicros);
  text = metrics.Text();
  EXPECT_THAT(text, HasSubstr("octavo_train_steps_total{train_job=\"job-0\"} 2\n"));
  EXPECT_THAT(text, Not(HasSubstr("train_job=\"job-1\"")));
  metrics.ObserveStep("fresh", Step(), kNow);
  EXPECT_THAT(metrics.Text(), HasSubstr("train_job=\"fresh\"")) << "there is room again";
}

TEST(WorkerMetrics, PromtoolAcceptsTheText) {
  WorkerMetrics metrics({.version = "1"});
  metrics.ObserveStep("a", Step(), kNow);
  metrics.ObserveTelemetry("a", "op", Snapshot());
  internal::v1::CheckpointDone done;
  done.set_ok(true);
  done.set_seconds(1.25);
  done.set_bytes(1 << 20);
  metrics.ObserveCheckpoint("a", done, kNow);
  const TempDir dir;
  ASSERT_TRUE(PosixFileSystem::Get().WriteFileAtomic(dir.File("text"), metrics.Text()).ok());
  const auto check =
      Subprocess::Spawn({.argv = {"sh", "-c", "promtool check metrics < " + dir.File("text")},
                         .stdout_path = dir.File("out"),
                         .stderr_path = dir.File("out")});
  ASSERT_TRUE(check.ok());
  const auto exit = (*check)->Wait(DeadlineAfter(std::chrono::seconds(60)));
  ASSERT_TRUE(exit.has_value());
  const std::string out = *PosixFileSystem::Get().ReadFile(dir.File("out"));
  if (exit->code == 127) {
    GTEST_SKIP() << "promtool is not installed: " << out;
  }
  EXPECT_TRUE(exit->success()) << out;
  EXPECT_EQ(out, "") << "lint";
}

}  // namespace
}  // namespace octavo
