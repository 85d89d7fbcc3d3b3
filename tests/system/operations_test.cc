// What an operator does: drain, stop the services, look at workers, shell completion, bad usage.
#include <gtest/gtest.h>

#include <csignal>

#include "tests/system/temp_cluster.h"

namespace octavo {
namespace {

TEST(Operations, DrainMovesTheJobWithoutCountingAFailure) {
  TempCluster cluster({.workers = 2});
  cluster.Submit(cluster.Spec({.steps = 200, .ranks = 1, .expert_parallel = 1}));
  const v1::Job running = cluster.WaitFor("test", Reaches(3), "step 3");
  const std::string worker = running.attempts(0).placements(0).worker();
  EXPECT_EQ(cluster.Cli({"drain", worker, "--reason", "maintenance"}).exit_code, 0);
  const v1::Job job = cluster.WaitForEnd("test");
  ASSERT_EQ(job.state(), v1::SUCCEEDED) << job.message();
  EXPECT_EQ(job.restarts(), 0);
  ASSERT_EQ(job.attempts_size(), 2);
  EXPECT_EQ(job.attempts(0).end_class(), v1::DRAINED);
  EXPECT_NE(job.attempts(1).placements(0).worker(), worker);
  EXPECT_GE(job.attempts(1).loaded_checkpoint_step(), 3) << "a drain takes a checkpoint first";
}

TEST(Operations, SigtermOfAWorkerCheckpointsAndEndsWithinItsBound) {
  TempCluster cluster({.workers = 2});
  cluster.Submit(cluster.Spec({.steps = 120, .ranks = 1, .expert_parallel = 1}));
  const v1::Job running = cluster.WaitFor("test", Reaches(3), "step 3");
  const std::string worker = running.attempts(0).placements(0).worker();
  cluster.Kill(cluster.worker(worker.back() - '0'), SIGTERM, 60);
  const v1::Job job = cluster.WaitForEnd("test");
  EXPECT_EQ(job.state(), v1::SUCCEEDED) << job.message();
}

TEST(Operations, SigtermOfTheControllerReturnsInTimeWithAWatcherThatNeverReads) {
  TempCluster cluster({.workers = 1});
  cluster.Submit(cluster.Spec({.steps = 5000, .ranks = 1, .expert_parallel = 1}));
  cluster.WaitFor("test", Reaches(2), "step 2");
  grpc::ClientContext context;
  v1::WatchJobRequest request;
  request.set_name("jobs/test");
  auto reader = cluster.stub().WatchJob(&context, request);
  cluster.Kill(cluster.controller(), SIGTERM, 15);
  context.TryCancel();
  reader->Finish();
  cluster.StartController();
  cluster.Cli({"cancel", "test"});
  EXPECT_EQ(cluster.WaitForEnd("test").state(), v1::CANCELLED);
}

TEST(Operations, ExitCodesAreTheDocumentedOnes) {
  TempCluster cluster({.workers = 1});
  EXPECT_EQ(cluster.Cli({"describe", "nobody"}).exit_code, 3);
  EXPECT_EQ(cluster.Cli({"frobnicate"}).exit_code, 2);
  EXPECT_EQ(cluster.Cli({"submit", "/nonexistent.yaml"}).exit_code, 3);
  EXPECT_EQ(cluster.Cli({"version"}).exit_code, 0);
  EXPECT_EQ(cluster.Cli({"workers", "-o", "json"}).exit_code, 0);
  EXPECT_EQ(cluster.Cli({"completion", "bash"}).exit_code, 0);
  cluster.Kill(cluster.controller(), SIGTERM);
  EXPECT_EQ(cluster.Cli({"list"}).exit_code, 5);
}

}  // namespace
}  // namespace octavo
