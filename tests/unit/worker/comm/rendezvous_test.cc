#include "worker/comm/rendezvous.h"

#include <gtest/gtest.h>

#include <string>
#include <thread>

#include "base/status.h"
#include "tests/support/thread_ranks.h"

namespace octavo {
namespace {

TEST(InProcessStore, GetWaitsForSet) {
  InProcessStore store;
  absl::StatusOr<std::string> got = InternalError("not run");
  {
    std::jthread reader([&] { got = store.Get("k", 30); });
    EXPECT_TRUE(store.Set("k", std::string("a\0b", 3)).ok());
  }
  ASSERT_TRUE(got.ok()) << ToString(got.status());
  EXPECT_EQ(*got, std::string("a\0b", 3));
}

TEST(InProcessStore, GetNamesTheKeyItWaitedFor) {
  InProcessStore store;
  const auto got = store.Get("attempt-1/world/3", 0.05);
  EXPECT_EQ(got.status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(Message(got.status()), "nobody set rendezvous key 'attempt-1/world/3' within 50 ms");
}

TEST(InProcessStore, RefusesToChangeAKey) {
  InProcessStore store;
  EXPECT_TRUE(store.Set("k", "a").ok());
  EXPECT_TRUE(store.Set("k", "a").ok()) << "repeating is harmless";
  EXPECT_EQ(store.Set("k", "b").code(), absl::StatusCode::kAlreadyExists);
}

TEST(ThreadRanks, CollectsEveryFailure) {
  const absl::Status status = RunThreadRanks({.size = 3}, [](ThreadRank& r) -> absl::Status {
    return r.rank() == 0 ? absl::OkStatus() : InvalidArgumentError("broken");
  });
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Message(status),
            "[rank 1] INVALID_ARGUMENT: broken\n[rank 2] INVALID_ARGUMENT: broken");
}

TEST(ThreadRanks, DeadlineAbortsAndNamesTheStuckRanks) {
  const auto statuses = RunThreadRanksEach(
      {.size = 2, .deadline_seconds = 0.3, .timeout_seconds = 60},
      [](ThreadRank& r) -> absl::Status {
        const CommResult result =
            r.rank() == 0 ? r.world().Barrier() : CommResult{};  // rank 1 waits elsewhere
        if (r.rank() == 1) {
          double x = 0;
          const CommResult other = r.world().AllReduce(&x, 1, DType::kF64, ReduceOp::kMax);
          EXPECT_FALSE(other.ok());
        }
        return result.ok() ? absl::OkStatus() : InternalError(result.message);
      });
  EXPECT_EQ(statuses[0].code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_NE(Message(statuses[0]).find("rank 0 did not finish within 300 ms"), std::string::npos);
  EXPECT_EQ(statuses[1].code(), absl::StatusCode::kDeadlineExceeded);
}

}  // namespace
}  // namespace octavo
