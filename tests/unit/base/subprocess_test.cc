#include "base/subprocess.h"

#include <signal.h>
#include <unistd.h>

#include <thread>

#include "base/file.h"
#include "base/status.h"
#include "base/str.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/temp_dir.h"

namespace octavo {
namespace {

using ::testing::HasSubstr;

// Generous: the machine may be busy; a passing test never waits for it.
SteadyTime Soon() { return DeadlineAfter(std::chrono::seconds(30)); }

std::unique_ptr<Subprocess> Shell(const std::string& script, const std::string& out = "") {
  auto child = Subprocess::Spawn(
      {.argv = {"/bin/sh", "-c", script}, .stdout_path = out, .stderr_path = out});
  EXPECT_TRUE(child.ok()) << ToString(child.status());
  return *std::move(child);
}

bool ProcessExists(pid_t pid) { return ::kill(pid, 0) == 0; }

// Bounded wait for a process that is not our child: its pidfd-less end shows in /proc only.
bool EndsSoon(pid_t pid) {
  const SteadyTime deadline = Soon();
  while (std::chrono::steady_clock::now() < deadline) {
    const auto stat = PosixFileSystem::Get().ReadFile(StrCat("/proc/", pid, "/stat"));
    if (!stat.ok() || stat->find(") Z ") != std::string::npos) {
      return true;
    }
    std::this_thread::yield();
  }
  return false;
}

TEST(Subprocess, ReportsExitCodeAndIsIdempotent) {
  const auto child = Shell("exit 3");
  EXPECT_EQ(child->Wait(Soon()), (ExitReason{.code = 3}));
  EXPECT_EQ(child->Poll(), (ExitReason{.code = 3}));
  EXPECT_TRUE(child->Signal(SIGTERM).ok()) << "signalling an ended process is fine";
  EXPECT_TRUE(child->SignalGroup(SIGTERM).ok());
  EXPECT_EQ((ExitReason{.code = 3}).DebugString(), "exit code 3");
}

TEST(Subprocess, ReportsTheSignalThatEndedIt) {
  const auto child = Shell("kill -KILL $$");
  const auto exit = child->Wait(Soon());
  ASSERT_TRUE(exit.has_value());
  EXPECT_EQ(exit->signal, SIGKILL);
  EXPECT_EQ(exit->code, -1);
  EXPECT_FALSE(exit->success());
  EXPECT_EQ(exit->DebugString(), "signal 9 (SIGKILL)");
}

TEST(Subprocess, WaitReturnsAtTheDeadlineWhileItRuns) {
  const auto child = Shell("exec sleep 60");
  EXPECT_EQ(child->Wait(DeadlineAfter(std::chrono::milliseconds(10))), std::nullopt);
  ASSERT_TRUE(child->SignalGroup(SIGTERM).ok());
  EXPECT_EQ(child->Wait(Soon())->signal, SIGTERM);
}

TEST(Subprocess, OutputEnvironmentFolderAndStdinAreAsAsked) {
  const TempDir dir;
  auto child = *Subprocess::Spawn({.argv = {"sh", "-c", "echo $OCTAVO_X; pwd; cat; echo e >&2"},
                                   .environment = {{"OCTAVO_X", "seven"}},
                                   .working_directory = dir.path(),
                                   .stdout_path = dir.File("out"),
                                   .stderr_path = dir.File("out")});
  ASSERT_EQ(child->Wait(Soon()), (ExitReason{.code = 0}));
  EXPECT_EQ(*PosixFileSystem::Get().ReadFile(dir.File("out")),
            StrCat("seven\n", dir.path(), "\ne\n"));
}

TEST(Subprocess, FailuresToStartNameTheProgramAndTheCause) {
  const absl::Status missing = Subprocess::Spawn({.argv = {"/no/such/program"}}).status();
  EXPECT_EQ(missing.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(Message(missing), HasSubstr("/no/such/program"));
  EXPECT_EQ(Subprocess::Spawn({.argv = {"/etc/passwd"}}).status().code(),
            absl::StatusCode::kPermissionDenied);
  const absl::Status folder =
      Subprocess::Spawn({.argv = {"/bin/true"}, .working_directory = "/no/folder"}).status();
  EXPECT_THAT(Message(folder), HasSubstr("/no/folder"));
  EXPECT_EQ(Subprocess::Spawn({}).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(Subprocess, BlockedSignalsOfTheParentDoNotReachTheChild) {
  sigset_t block, before;
  sigemptyset(&block);
  sigaddset(&block, SIGTERM);
  pthread_sigmask(SIG_BLOCK, &block, &before);
  const auto child = Shell("exec sleep 60");
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  ASSERT_TRUE(child->Signal(SIGTERM).ok());
  EXPECT_EQ(child->Wait(Soon())->signal, SIGTERM);
}

TEST(Subprocess, GrandchildrenEndWithTheGroup) {
  const TempDir dir;
  const auto child = Shell("sleep 60 & echo $! > " + dir.File("pid") + "; exit 0");
  ASSERT_TRUE(child->Wait(Soon())->success());
  const auto pid = ParseInt64(StripSpace(*PosixFileSystem::Get().ReadFile(dir.File("pid"))));
  ASSERT_TRUE(pid.has_value());
  EXPECT_TRUE(EndsSoon(static_cast<pid_t>(*pid)));
}

TEST(Subprocess, DestructorKillsTheChild) {
  pid_t pid;
  {
    const auto child = Shell("trap '' TERM; while :; do sleep 1; done");
    pid = child->pid();
    EXPECT_TRUE(ProcessExists(pid));
  }
  EXPECT_TRUE(EndsSoon(pid));
}

TEST(Subprocess, ChildDiesWithTheSpawningThread) {
  std::unique_ptr<Subprocess> child;
  std::jthread([&child] { child = Shell("exec sleep 60"); }).join();
  EXPECT_EQ(child->Wait(Soon())->signal, SIGKILL);
}

}  // namespace
}  // namespace octavo
