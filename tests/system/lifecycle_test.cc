// The life of a job with real processes, when nothing goes wrong.
#include <gtest/gtest.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "tests/system/temp_cluster.h"

namespace octavo {
namespace {

TEST(Lifecycle, TwoWorkersTrainAnExpertParallelFp8JobToTheEnd) {
  TempCluster cluster;
  cluster.Submit(cluster.Spec({.steps = 40, .layers = 4, .recipe = "fp8_flow"}));
  const v1::Job job = cluster.WaitForEnd("test");
  ASSERT_EQ(job.state(), v1::SUCCEEDED) << job.message();
  EXPECT_EQ(job.progress().step(), 40);
  EXPECT_LT(job.progress().loss(), job.progress().first_loss() - 0.5);
  EXPECT_GT(job.progress().fp8_flop_share(), 0.2);
  EXPECT_GT(job.progress().all_to_all_bytes(), 0);
  EXPECT_EQ(job.progress().checkpoint_step(), 40);
  EXPECT_TRUE(std::filesystem::exists(job.progress().checkpoint_path()));
  EXPECT_EQ(job.attempts_size(), 1);
  EXPECT_EQ(job.restarts(), 0);
}

TEST(Lifecycle, SubmitFollowExitsWithTheJobsEndAndPrintsASummary) {
  TempCluster cluster({.workers = 1});
  const std::string path = cluster.dir() + "/job.yaml";
  {
    std::FILE* f = std::fopen(path.c_str(), "w");
    const std::string text = cluster.Spec({.steps = 12, .ranks = 1, .expert_parallel = 1});
    std::fwrite(text.data(), 1, text.size(), f);
    std::fclose(f);
  }
  const CliResult result = cluster.Cli({"submit", "--follow", path});
  EXPECT_EQ(result.exit_code, 0) << result.out << result.err;
  EXPECT_NE(result.out.find("SUCCEEDED"), std::string::npos) << result.out;
  EXPECT_NE(result.out.find("loss"), std::string::npos) << result.out;
  const CliResult list = cluster.Cli({"list", "-o", "json"});
  EXPECT_NE(list.out.find("\"SUCCEEDED\""), std::string::npos) << list.out;
  const CliResult logs = cluster.Cli({"logs", "test", "--rank", "0"});
  EXPECT_EQ(logs.exit_code, 0) << logs.err;
  EXPECT_FALSE(logs.out.empty());
}

TEST(Lifecycle, TheSameRequestIdTwiceGivesTheSameJob) {
  TempCluster cluster;
  const std::string yaml = cluster.Spec({.steps = 2000});
  const v1::Job first = cluster.Submit(yaml, "request-1");
  const v1::Job second = cluster.Submit(yaml, "request-1");
  EXPECT_EQ(first.uid(), second.uid());
  // Also after the controller was killed.
  cluster.Kill(cluster.controller(), SIGKILL);
  cluster.StartController();
  const v1::Job third = cluster.Submit(yaml, "request-1");
  EXPECT_EQ(first.uid(), third.uid());
  v1::Job other;
  const grpc::Status taken = cluster.TrySubmit(yaml, "request-2", &other);
  EXPECT_EQ(taken.error_code(), grpc::StatusCode::ALREADY_EXISTS) << taken.error_message();
  cluster.Cli({"cancel", "test"});
  EXPECT_EQ(cluster.WaitForEnd("test").state(), v1::CANCELLED);
}

TEST(Lifecycle, AJobThatCannotFitWaitsWithTheNumbersAndRunsWhenAWorkerJoins) {
  TempCluster cluster({.workers = 1});
  cluster.Submit(cluster.Spec({.steps = 6, .ranks = 2, .expert_parallel = 2}));
  const v1::Job waiting = cluster.WaitFor(
      "test", [](const v1::Job& j) { return j.pending().slots_needed() == 2; }, "pending reason");
  EXPECT_EQ(waiting.state(), v1::PENDING);
  EXPECT_EQ(waiting.pending().reason(), v1::EXCEEDS_CLUSTER);
  EXPECT_EQ(waiting.pending().slots_largest_possible(), 1);
  EXPECT_FALSE(waiting.pending().sentence().empty());
}

TEST(Lifecycle, HigherPriorityRunsFirst) {
  TempCluster cluster({.workers = 1});
  cluster.Submit(cluster.Spec({.name = "running", .steps = 60, .ranks = 1, .expert_parallel = 1}));
  cluster.WaitFor("running", Reaches(1), "step 1");
  cluster.Submit(cluster.Spec(
      {.name = "low", .steps = 8, .ranks = 1, .expert_parallel = 1, .priority = 1}));
  cluster.Submit(cluster.Spec(
      {.name = "high", .steps = 8, .ranks = 1, .expert_parallel = 1, .priority = 9}));
  const v1::Job low = cluster.WaitForEnd("low");
  const v1::Job high = cluster.WaitForEnd("high");
  ASSERT_EQ(high.attempts_size(), 1);
  ASSERT_EQ(low.attempts_size(), 1);
  EXPECT_LE(high.attempts(0).start_time().seconds(), low.attempts(0).start_time().seconds());
  EXPECT_EQ(low.state(), v1::SUCCEEDED);
}

TEST(Lifecycle, CancelWorksInEveryState) {
  TempCluster cluster({.workers = 2});
  const std::string big = cluster.Spec({.name = "pending", .steps = 9, .ranks = 4});
  cluster.Submit(big);
  EXPECT_EQ(cluster.Cli({"cancel", "pending"}).exit_code, 0);
  EXPECT_EQ(cluster.WaitForEnd("pending").state(), v1::CANCELLED);
  // Terminal: a clear refusal, not a second effect.
  const CliResult again = cluster.Cli({"cancel", "pending"});
  EXPECT_EQ(again.exit_code, 4) << again.err;
  EXPECT_NE(again.err.find("CANCELLED"), std::string::npos) << again.err;
  // STARTING (or just RUNNING): cancelled as soon as it was submitted.
  cluster.Submit(cluster.Spec({.name = "starting", .steps = 5000}));
  EXPECT_EQ(cluster.Cli({"cancel", "starting"}).exit_code, 0);
  EXPECT_EQ(cluster.WaitForEnd("starting").state(), v1::CANCELLED);
  // RUNNING.
  cluster.Submit(cluster.Spec({.name = "running", .steps = 5000}));
  cluster.WaitFor("running", Reaches(2), "step 2");
  EXPECT_EQ(cluster.Cli({"cancel", "running"}).exit_code, 0);
  EXPECT_EQ(cluster.WaitForEnd("running").state(), v1::CANCELLED);
  // SUSPENDED.
  cluster.Submit(cluster.Spec({.name = "suspended", .steps = 5000}));
  cluster.WaitFor("suspended", Reaches(2), "step 2");
  EXPECT_EQ(cluster.Cli({"suspend", "suspended"}).exit_code, 0);
  cluster.WaitFor("suspended", InState(v1::SUSPENDED), "SUSPENDED");
  EXPECT_EQ(cluster.Cli({"cancel", "suspended"}).exit_code, 0);
  EXPECT_EQ(cluster.WaitForEnd("suspended").state(), v1::CANCELLED);
  // RESTARTING: killed, waiting for its back-off.
  cluster.Submit(cluster.Spec({.name = "restarting", .steps = 5000, .backoff_seconds = 600}));
  cluster.WaitFor("restarting", Reaches(2), "step 2");
  const auto pids = cluster.RankPids();
  ASSERT_FALSE(pids.empty());
  kill(pids[0], SIGKILL);
  cluster.WaitFor("restarting", InState(v1::RESTARTING), "RESTARTING");
  EXPECT_EQ(cluster.Cli({"cancel", "restarting"}).exit_code, 0);
  EXPECT_EQ(cluster.WaitForEnd("restarting").state(), v1::CANCELLED);
  EXPECT_TRUE(cluster.RankPids().empty());
}

TEST(Lifecycle, SuspendAndResumeEndWithTheUndisturbedLoss) {
  TempCluster cluster;
  cluster.Submit(cluster.Spec({.name = "plain", .steps = 30}));
  const v1::Job plain = cluster.WaitForEnd("plain");
  ASSERT_EQ(plain.state(), v1::SUCCEEDED) << plain.message();
  cluster.Submit(cluster.Spec({.name = "paused", .steps = 30}));
  cluster.WaitFor("paused", Reaches(5), "step 5");
  EXPECT_EQ(cluster.Cli({"suspend", "paused"}).exit_code, 0);
  const v1::Job suspended = cluster.WaitFor("paused", InState(v1::SUSPENDED), "SUSPENDED");
  EXPECT_GE(suspended.progress().checkpoint_step(), 5);
  EXPECT_EQ(cluster.Cli({"resume", "paused"}).exit_code, 0);
  const v1::Job paused = cluster.WaitForEnd("paused");
  ASSERT_EQ(paused.state(), v1::SUCCEEDED) << paused.message();
  EXPECT_EQ(paused.progress().loss(), plain.progress().loss()) << "resume must be bitwise";
  EXPECT_EQ(paused.restarts(), 0);
}

TEST(Lifecycle, CheckpointOnRequestAppears) {
  TempCluster cluster({.workers = 1});
  cluster.Submit(cluster.Spec(
      {.steps = 5000, .ranks = 1, .expert_parallel = 1, .checkpoint_interval = 0}));
  cluster.WaitFor("test", Reaches(3), "step 3");
  EXPECT_EQ(cluster.Cli({"checkpoint", "test"}).exit_code, 0);
  const v1::Job job = cluster.WaitFor(
      "test", [](const v1::Job& j) { return j.progress().checkpoint_step() > 0; }, "checkpoint");
  EXPECT_EQ(cluster.Cli({"checkpoints", "verify", job.progress().checkpoint_path()}).exit_code, 0);
  cluster.Cli({"cancel", "test"});
  cluster.WaitForEnd("test");
}

TEST(Lifecycle, ProfileOfARunningJobNamesItsOperations) {
  TempCluster cluster({.workers = 2});
  cluster.Submit(cluster.Spec({.steps = 5000, .recipe = "fp8_flow"}));
  cluster.WaitFor("test", Reaches(3), "step 3");
  const std::string json = cluster.dir() + "/profile.json";
  const auto shown = cluster.Cli({"profile", "test", "--steps", "2", "--output", json});
  EXPECT_EQ(shown.exit_code, 0) << shown.err;
  for (const char* text : {"grouped_gemm", "all_to_all_v", "attention_forward", "ms a step",
                           "every product ran in the precision that the plan asks for"}) {
    EXPECT_NE(shown.out.find(text), std::string::npos) << text << "\n" << shown.out;
  }
  std::ifstream file(json);
  const std::string all((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  EXPECT_NE(all.find("\"complete\": true"), std::string::npos);
  EXPECT_NE(all.find("\"layer 1\""), std::string::npos);
  cluster.Cli({"cancel", "test"});
  cluster.WaitForEnd("test");
  const auto late = cluster.Cli({"profile", "test"});
  EXPECT_NE(late.exit_code, 0);
  EXPECT_NE(late.err.find("must be RUNNING"), std::string::npos) << late.err;
}

TEST(Lifecycle, BadSpecsChangeNothingAndNameTheField) {
  TempCluster cluster({.workers = 1});
  std::string yaml = cluster.Spec({.steps = 5});
  const auto at = yaml.find("family: mixtral");
  yaml.replace(at, 15, "family: mixtrall");
  v1::Job job;
  const grpc::Status status = cluster.TrySubmit(yaml, "", &job);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_NE(status.error_message().find("model.family"), std::string::npos);
  EXPECT_NE(status.error_message().find("did you mean \"mixtral\""), std::string::npos)
      << status.error_message();
  const CliResult list = cluster.Cli({"list", "-o", "json"});
  EXPECT_EQ(list.out.find("\"test\""), std::string::npos) << list.out;
}

}  // namespace
}  // namespace octavo
