// kill -9 of anything, at any time: the job ends with the undisturbed loss, and nothing stays behind.
#include <gtest/gtest.h>
#include <sys/mount.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>

#include "tests/system/temp_cluster.h"

namespace octavo {
namespace {

constexpr int kSteps = 60;

double UndisturbedLoss(TempCluster& cluster) {
  cluster.Submit(cluster.Spec({.name = "plain", .steps = kSteps}));
  const v1::Job plain = cluster.WaitForEnd("plain");
  EXPECT_EQ(plain.state(), v1::SUCCEEDED) << plain.message();
  return plain.progress().loss();
}

TEST(Faults, KilledRankCostsAtMostOneIntervalAndTheLossIsTheUndisturbedOne) {
  TempCluster cluster;
  const double loss = UndisturbedLoss(cluster);
  cluster.Submit(cluster.Spec({.steps = kSteps}));
  // Checkpoints are written in the background: the one of step 10 must be complete.
  cluster.WaitFor(
      "test", [](const v1::Job& j) { return j.progress().checkpoint_step() >= 10; },
      "the checkpoint of step 10");
  const auto pids = cluster.RankPids();
  ASSERT_EQ(pids.size(), 2u);
  kill(pids[1], SIGKILL);
  const v1::Job job = cluster.WaitForEnd("test");
  ASSERT_EQ(job.state(), v1::SUCCEEDED) << job.message();
  EXPECT_EQ(job.progress().loss(), loss);
  ASSERT_EQ(job.attempts_size(), 2);
  EXPECT_EQ(job.restarts(), 1);
  EXPECT_EQ(job.attempts(0).end_class(), v1::RANK_EXIT) << job.attempts(0).end_reason();
  EXPECT_NE(job.attempts(0).end_reason().find("signal 9"), std::string::npos)
      << job.attempts(0).end_reason();
  EXPECT_GE(job.attempts(1).loaded_checkpoint_step(), 10);
}

TEST(Faults, KilledWorkerTakesItsRanksAlongAndTheJobEndsElsewhere) {
  TempCluster cluster({.workers = 3});
  const double loss = UndisturbedLoss(cluster);
  cluster.Submit(cluster.Spec({.steps = kSteps}));
  const v1::Job running = cluster.WaitFor("test", Reaches(15), "step 15");
  ASSERT_EQ(running.attempts_size(), 1);
  const std::string victim = running.attempts(0).placements(1).worker();
  const int index = std::stoi(victim.substr(victim.size() - 1));
  cluster.Kill(cluster.worker(index), SIGKILL);
  const v1::Job job = cluster.WaitForEnd("test");
  ASSERT_EQ(job.state(), v1::SUCCEEDED) << job.message();
  EXPECT_EQ(job.progress().loss(), loss);
  EXPECT_GE(job.attempts_size(), 2);
  for (const v1::Placement& p : job.attempts(job.attempts_size() - 1).placements()) {
    EXPECT_NE(p.worker(), victim);
  }
}

TEST(Faults, KilledControllerFindsTheRunningJobAgainWhileTrainingGoesOn) {
  TempCluster cluster;
  cluster.Submit(cluster.Spec({.steps = 400}));
  const v1::Job before = cluster.WaitFor("test", Reaches(5), "step 5");
  const auto pids = cluster.RankPids();
  ASSERT_EQ(pids.size(), 2u);
  cluster.Kill(cluster.controller(), SIGKILL);
  cluster.StartController();
  // The first progress after the restart comes from the same processes, further on.
  const v1::Job after = cluster.WaitFor(
      "test",
      [&](const v1::Job& j) { return j.progress().step() > before.progress().step() + 5; },
      "progress after the restart");
  EXPECT_EQ(after.state(), v1::RUNNING);
  EXPECT_EQ(cluster.RankPids(), pids) << "training must not have been restarted";
  const v1::Job job = cluster.WaitForEnd("test");
  ASSERT_EQ(job.state(), v1::SUCCEEDED) << job.message();
  EXPECT_EQ(job.attempts_size(), 1);
  EXPECT_EQ(job.progress().step(), 400);
}

TEST(Faults, JobThatEndsWhileTheControllerIsAwayIsReportedAfterwards) {
  TempCluster cluster;
  cluster.Submit(cluster.Spec({.steps = 30}));
  cluster.WaitFor("test", Reaches(2), "step 2");
  cluster.Kill(cluster.controller(), SIGKILL);
  // Both ranks end by themselves; their exit is the event.
  for (int pid : cluster.RankPids()) {
    const int fd = static_cast<int>(syscall(434 /* pidfd_open */, pid, 0));
    if (fd >= 0) {
      struct {
        int fd;
        short events, revents;
      } p{fd, 1, 0};
      syscall(7 /* poll */, &p, 1, 120000);
      close(fd);
    }
  }
  cluster.StartController();
  const v1::Job job = cluster.WaitForEnd("test");
  EXPECT_EQ(job.state(), v1::SUCCEEDED) << job.message();
  EXPECT_EQ(job.attempts_size(), 1);
}

TEST(Faults, RanksNeverOutliveAKilledWorker) {
  TempCluster cluster({.workers = 1});
  cluster.Submit(cluster.Spec({.steps = 5000, .ranks = 1, .expert_parallel = 1}));
  cluster.WaitFor("test", Reaches(2), "step 2");
  const auto pids = cluster.RankPids();
  ASSERT_EQ(pids.size(), 1u);
  const int fd = static_cast<int>(syscall(434, pids[0], 0));
  ASSERT_GE(fd, 0);
  cluster.Kill(cluster.worker(0), SIGKILL);
  struct {
    int fd;
    short events, revents;
  } p{fd, 1, 0};
  EXPECT_EQ(syscall(7, &p, 1, 10000), 1) << "the rank still runs 10 s after its worker was killed";
  close(fd);
  cluster.Cli({"cancel", "test"});
}

TEST(Faults, AGangThatCannotFormFailsWithTheReason) {
  // A rank program that answers the probe and then ends at once: no rank ever meets another.
  const std::string program =
      std::filesystem::temp_directory_path() / ("octavo-rank-gone-" + std::to_string(getpid()));
  {
    std::FILE* f = std::fopen(program.c_str(), "w");
    std::fprintf(f, "#!/bin/sh\ncase \"$*\" in *--probe*) exec '%s/octavo-rank' \"$@\";; esac\nexit 3\n",
                 OCTAVO_BIN_DIR);
    std::fclose(f);
    std::filesystem::permissions(program, std::filesystem::perms::owner_all);
  }
  TempCluster cluster({.workers = 2, .worker_flags = {"--rank-binary", program}});
  cluster.Submit(cluster.Spec({.steps = 5, .restart_max = 1, .gang_timeout_seconds = 5}));
  const v1::Job job = cluster.WaitForEnd("test");
  EXPECT_EQ(job.state(), v1::FAILED);
  EXPECT_FALSE(job.message().empty());
  ASSERT_GE(job.attempts_size(), 1);
  EXPECT_TRUE(job.attempts(0).end_class() == v1::RANK_EXIT ||
              job.attempts(0).end_class() == v1::GANG_TIMEOUT)
      << v1::FailureClass_Name(job.attempts(0).end_class());
  EXPECT_NE(job.attempts(0).end_reason().find("rank"), std::string::npos);
  std::filesystem::remove(program);
}

TEST(Faults, AJobWithoutProgressStopsRestarting) {
  TempCluster cluster({.workers = 1});
  std::string yaml = cluster.Spec({.steps = 5, .ranks = 1, .expert_parallel = 1});
  const std::string data = SharedDataset();
  yaml.replace(yaml.find(data), data.size(), "/nonexistent/data.octd");
  cluster.Submit(yaml);
  const v1::Job job = cluster.WaitForEnd("test");
  EXPECT_EQ(job.state(), v1::FAILED);
  EXPECT_EQ(job.attempts_size(), 1) << "the path is as wrong the next time";
  EXPECT_NE(job.message().find("/nonexistent/data.octd"), std::string::npos) << job.message();
}

TEST(Faults, FullDiskLosesNothingOlder) {
  const std::string mount_point =
      std::filesystem::temp_directory_path() / ("octavo-small-" + std::to_string(getpid()));
  std::filesystem::create_directories(mount_point);
  if (mount("tmpfs", mount_point.c_str(), "tmpfs", 0, "size=24m") != 0) {
    GTEST_SKIP() << "cannot mount a small tmpfs here (needs root)";
  }
  {
    TempCluster cluster({.workers = 1});
    cluster.Submit(cluster.Spec({.steps = 12,
                                 .ranks = 1,
                                 .expert_parallel = 1,
                                 .checkpoint_interval = 10,
                                 .checkpoint_path = mount_point + "/c"}));
    const v1::Job first = cluster.WaitForEnd("test");
    ASSERT_EQ(first.state(), v1::SUCCEEDED) << first.message();
    const std::string good = first.progress().checkpoint_path();
    // Fill what is left, then let the same job train on.
    std::FILE* filler = std::fopen((mount_point + "/filler").c_str(), "w");
    const std::string block(1 << 16, 'x');
    while (std::fwrite(block.data(), 1, block.size(), filler) == block.size() &&
           std::fflush(filler) == 0) {
    }
    std::fclose(filler);
    cluster.Submit(cluster.Spec({.name = "second",
                                 .steps = 30,
                                 .ranks = 1,
                                 .expert_parallel = 1,
                                 .checkpoint_interval = 10,
                                 .restart_max = 1,
                                 .checkpoint_path = mount_point + "/c"}));
    const v1::Job second = cluster.WaitForEnd("second");
    EXPECT_NE(second.state(), v1::SUCCEEDED) << "its last checkpoint cannot have been written";
    EXPECT_NE(second.message().find("No space left"), std::string::npos) << second.message();
    EXPECT_EQ(cluster.Cli({"checkpoints", "verify", good}).exit_code, 0);
  }
  umount(mount_point.c_str());
  std::filesystem::remove_all(mount_point);
}

}  // namespace
}  // namespace octavo
