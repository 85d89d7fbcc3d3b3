#include "base/signals.h"

#include <signal.h>
#include <unistd.h>

#include "gtest/gtest.h"

namespace octavo {
namespace {

TEST(StopSignals, ReportsTermAndIntOnceAndRespectsTheDeadline) {
  const StopSignals signals;
  EXPECT_EQ(signals.Wait(DeadlineAfter(std::chrono::milliseconds(5))), std::nullopt);
  // To this thread: gtest's process has others that do not block the signals.
  ASSERT_EQ(::pthread_kill(::pthread_self(), SIGTERM), 0);
  EXPECT_EQ(signals.Wait(DeadlineAfter(std::chrono::seconds(20))), SIGTERM);
  ASSERT_EQ(::pthread_kill(::pthread_self(), SIGINT), 0);
  EXPECT_EQ(signals.Wait(DeadlineAfter(std::chrono::seconds(20))), SIGINT);
  EXPECT_EQ(signals.Wait(SteadyTime::min()), std::nullopt);
}

TEST(StopSignalsDeathTest, SecondSignalEndsTheProcessAfterExitOnNext) {
  EXPECT_EXIT(
      {
        const StopSignals signals;
        ::raise(SIGTERM);
        signals.Wait(DeadlineAfter(std::chrono::seconds(20)));
        signals.ExitOnNext();
        ::raise(SIGTERM);
      },
      ::testing::KilledBySignal(SIGTERM), "");
}

}  // namespace
}  // namespace octavo
