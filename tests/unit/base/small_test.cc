// Tests of the header-only helpers: bounded_queue, crc32c, backoff, clock.
#include <algorithm>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "base/backoff.h"
#include "base/bounded_queue.h"
#include "base/clock.h"
#include "base/crc32c.h"
#include "gtest/gtest.h"
#include "tests/support/fake_clock.h"

namespace octavo {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

TEST(BoundedQueue, DropsNewItemsWhenFullAndCountsThem) {
  BoundedQueue<int> queue(2);
  EXPECT_TRUE(queue.TryPush(1));
  EXPECT_TRUE(queue.TryPush(2));
  EXPECT_FALSE(queue.TryPush(3));
  EXPECT_EQ(queue.dropped(), 1);
  EXPECT_EQ(queue.TryPop(), 1);
  EXPECT_EQ(queue.TryPop(), 2);
  EXPECT_EQ(queue.TryPop(), std::nullopt);
}

TEST(BoundedQueue, PushAndPopRespectTheirDeadlines) {
  BoundedQueue<int> queue(1);
  EXPECT_EQ(queue.Pop(DeadlineAfter(milliseconds(5))), std::nullopt);
  EXPECT_EQ(queue.Push(1, DeadlineAfter(milliseconds(5))), PushResult::kOk);
  EXPECT_EQ(queue.Push(2, DeadlineAfter(milliseconds(5))), PushResult::kTimeout);
  EXPECT_EQ(queue.dropped(), 0) << "a refused Push loses nothing: the caller still has the item";
}

TEST(BoundedQueue, CloseWakesWaitersAndDrains) {
  BoundedQueue<int> queue(1);
  ASSERT_TRUE(queue.TryPush(7));
  std::jthread producer(
      [&] { EXPECT_EQ(queue.Push(8, DeadlineAfter(seconds(20))), PushResult::kClosed); });
  queue.Close();
  producer.join();
  EXPECT_EQ(queue.Pop(DeadlineAfter(seconds(1))), 7);
  EXPECT_EQ(queue.Pop(DeadlineAfter(seconds(20))), std::nullopt);  // returns at once: closed
  EXPECT_FALSE(queue.TryPush(9));
}

TEST(BoundedQueue, ManyProducersLoseNothingAndKeepTheirOwnOrder) {
  constexpr int kProducers = 4, kItems = 2000;
  BoundedQueue<std::pair<int, int>> queue(16);
  std::vector<std::jthread> producers;
  for (int p = 0; p < kProducers; ++p) {
    producers.emplace_back([&queue, p] {
      for (int i = 0; i < kItems; ++i) {
        ASSERT_EQ(queue.Push({p, i}, DeadlineAfter(seconds(20))), PushResult::kOk);
      }
    });
  }
  std::vector<int> next(kProducers, 0);
  for (int n = 0; n < kProducers * kItems; ++n) {
    const auto item = queue.Pop(DeadlineAfter(seconds(20)));
    ASSERT_TRUE(item.has_value());
    EXPECT_EQ(item->second, next[item->first]++);
  }
  EXPECT_EQ(queue.size(), 0u);
}

TEST(Crc32c, MatchesPublishedVectors) {
  // RFC 3720, B.4.
  std::vector<unsigned char> ascending(32);
  for (int i = 0; i < 32; ++i) {
    ascending[i] = static_cast<unsigned char>(i);
  }
  const std::string zeros(32, '\0'), ones(32, '\xff');
  EXPECT_EQ(Crc32c(zeros.data(), 32), 0x8A9136AAu);
  EXPECT_EQ(Crc32c(ones.data(), 32), 0x62A8AB43u);
  EXPECT_EQ(Crc32c(ascending.data(), 32), 0x46DD794Eu);
  EXPECT_EQ(Crc32c("123456789", 9), 0xE3069283u);
  EXPECT_EQ(Crc32c(nullptr, 0), 0u);
}

TEST(Crc32c, HardwareSoftwareAndSplitsAgree) {
  const auto seed = std::random_device()();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 rng(seed);
  std::string bytes(1027, '\0');
  for (char& byte : bytes) {
    byte = static_cast<char>(rng());
  }
  for (std::size_t offset = 0; offset < 9; ++offset) {  // all alignments
    const char* data = bytes.data() + offset;
    const std::size_t size = bytes.size() - offset;
    const std::uint32_t software = ~crc32c_internal::ExtendSoftware(~0u, data, size);
    if (crc32c_internal::HasHardware()) {
      EXPECT_EQ(~crc32c_internal::ExtendHardware(~0u, data, size), software);
    }
    EXPECT_EQ(Crc32c(data, size), software);
    const std::size_t cut = rng() % size;
    EXPECT_EQ(Crc32cExtend(Crc32c(data, cut), data + cut, size - cut), software);
  }
}

TEST(Backoff, GrowsToTheCapAndStaysWithinJitter) {
  std::mt19937 rng(1);
  Backoff backoff({.initial_seconds = 1, .factor = 2, .max_seconds = 10, .jitter = 0.25});
  for (const double base : {1.0, 2.0, 4.0, 8.0, 10.0, 10.0}) {
    const double delay = backoff.NextSeconds(rng);
    EXPECT_LE(delay, base);
    EXPECT_GE(delay, 0.75 * base);
  }
  EXPECT_EQ(backoff.attempts(), 6);
  backoff.Reset();
  EXPECT_LE(backoff.NextSeconds(rng), 1.0);
}

TEST(Clock, RealMonotonicNeverDecreasesAndFakeMovesOnCommand) {
  const RealClock& real = RealClock::Get();
  const std::int64_t before = real.MonotonicMicros();
  EXPECT_GE(real.MonotonicMicros(), before);
  EXPECT_GT(real.UnixMicros(), 1'600'000'000 * kMicrosPerSecond);
  FakeClock fake;
  const std::int64_t unix_before = fake.UnixMicros();
  const std::int64_t monotonic_before = fake.MonotonicMicros();
  fake.AdvanceSeconds(1.5);
  fake.JumpUnixMicros(-10);
  EXPECT_EQ(fake.UnixMicros() - unix_before, 1'500'000 - 10);
  EXPECT_EQ(fake.MonotonicMicros() - monotonic_before, 1'500'000);
}

}  // namespace
}  // namespace octavo
