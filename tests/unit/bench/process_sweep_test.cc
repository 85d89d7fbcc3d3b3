#include "bench/process_sweep.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "base/status.h"

namespace octavo {
namespace {

class ProcessSweepTest : public testing::Test {
 protected:
  ProcessSweepTest() : folder_(testing::TempDir() + "/sweep-" + std::to_string(getpid())) {
    std::filesystem::create_directories(folder_);
  }
  ~ProcessSweepTest() override { std::filesystem::remove_all(folder_); }

  absl::Status Leave(std::size_t i) const {
    std::ofstream(folder_ + "/" + std::to_string(i)) << getpid();
    return absl::OkStatus();
  }
  std::size_t Left() const {
    std::size_t count = 0;
    for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(folder_)) {
      ++count;
    }
    return count;
  }

  const std::string folder_;
};

TEST_F(ProcessSweepTest, EveryTaskRunsOnceInAProcessOfItsOwn) {
  const absl::StatusOr<std::size_t> done =
      SweepProcesses(20, {.jobs = 3, .progress = false}, [&](std::size_t i) { return Leave(i); });
  ASSERT_TRUE(done.ok());
  EXPECT_EQ(*done, 20u);
  EXPECT_EQ(Left(), 20u);
  std::ifstream in(folder_ + "/7");
  pid_t pid = 0;
  in >> pid;
  EXPECT_NE(pid, getpid());
  EXPECT_GT(pid, 0);
}

// pause() never returns in a child without handlers: only the deadline ends this.
TEST_F(ProcessSweepTest, DeadlineEndsWhatRunsAndStartsNothingMore) {
  const absl::StatusOr<std::size_t> done =
      SweepProcesses(6, {.jobs = 2, .deadline = 2, .progress = false}, [&](std::size_t i) {
        if (i > 0) {
          pause();
        }
        return Leave(i);
      });
  ASSERT_TRUE(done.ok());
  EXPECT_LE(*done, 1u);
  EXPECT_LE(Left(), 1u);
}

TEST_F(ProcessSweepTest, AFailureEndsTheOthers) {
  const absl::StatusOr<std::size_t> done =
      SweepProcesses(4, {.jobs = 2, .progress = false}, [&](std::size_t i) -> absl::Status {
        if (i == 0) {
          pause();
        }
        return AbortedError("this one is meant to fail");
      });
  EXPECT_FALSE(done.ok());
  EXPECT_EQ(Left(), 0u);
}

}  // namespace
}  // namespace octavo
