#include "worker/comm/gloo.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

#include "absl/synchronization/notification.h"
#include "base/status.h"
#include "base/str.h"
#include "tests/support/thread_ranks.h"
#include "worker/comm/comm_status.h"

namespace octavo {
namespace {

using testing::AllOf;
using testing::HasSubstr;

#define EXPECT_STATUS_OK(expression)                \
  do {                                              \
    const absl::Status status_ = (expression);      \
    EXPECT_TRUE(status_.ok()) << ToString(status_); \
  } while (false)

// ---------------------------------------------------------------- all-to-all

// Bytes from rank `from` to rank `to` in a round: ragged, many zeros, some larger than a socket
// buffer. Every rank computes the whole matrix, so each knows what to expect.
std::int64_t Bytes(int round, int from, int to) {
  std::mt19937 random(static_cast<std::uint32_t>(round * 10007 + from * 101 + to));
  switch (random() % 4) {
    case 0:
      return 0;
    case 1:
      return 1 + static_cast<std::int64_t>(random() % 17);
    case 2:
      return static_cast<std::int64_t>(random() % 5000);
    default:
      return round % 3 == 0 ? static_cast<std::int64_t>(random() % 700000) : 16;
  }
}

char Content(int round, int from, int to, std::int64_t at) {
  return static_cast<char>(round * 31 + from * 7 + to * 3 + at * 13 + (at >> 8));
}

TEST(GlooAllToAllV, RaggedAndZeroCountsMatchTheOracle) {
  EXPECT_STATUS_OK(RunThreadRanks({.size = 4}, [](ThreadRank& r) -> absl::Status {
    std::int64_t left = 0;
    for (int round = 0; round < 24; ++round) {
      std::vector<std::int64_t> send_bytes, receive_bytes;
      std::vector<char> send, want;
      for (int peer = 0; peer < r.size(); ++peer) {
        send_bytes.push_back(Bytes(round, r.rank(), peer));
        receive_bytes.push_back(Bytes(round, peer, r.rank()));
        for (std::int64_t i = 0; i < send_bytes.back(); ++i) {
          send.push_back(Content(round, r.rank(), peer, i));
        }
        for (std::int64_t i = 0; i < receive_bytes.back(); ++i) {
          want.push_back(Content(round, peer, r.rank(), i));
        }
        left += peer == r.rank() ? 0 : send_bytes.back();
      }
      std::vector<char> got(want.size(), 0x55);
      RETURN_IF_ERROR(ToStatus(r.world().AllToAllV({.send = send.data(),
                                                    .receive = got.data(),
                                                    .send_bytes = send_bytes,
                                                    .receive_bytes = receive_bytes})));
      EXPECT_TRUE(got == want) << "rank " << r.rank() << " round " << round;
    }
    EXPECT_EQ(r.world().counters().all_to_all_bytes, left);
    EXPECT_EQ(r.world().counters().all_to_all_calls, 24);
    return absl::OkStatus();
  }));
}

// Every rank's bytes begin where the caller says, here in reverse order with gaps.
TEST(GlooAllToAllV, OffsetsSayWhereBytesBegin) {
  EXPECT_STATUS_OK(RunThreadRanks({.size = 3}, [](ThreadRank& r) -> absl::Status {
    constexpr std::int64_t kRoom = 40;
    std::vector<std::int64_t> send_bytes, receive_bytes, offsets;
    std::vector<char> send(3 * kRoom, '-'), got(3 * kRoom, '.'), want(3 * kRoom, '.');
    for (int peer = 0; peer < r.size(); ++peer) {
      offsets.push_back((2 - peer) * kRoom);
      send_bytes.push_back(1 + r.rank() * 10 + peer);
      receive_bytes.push_back(1 + peer * 10 + r.rank());
      for (std::int64_t i = 0; i < send_bytes.back(); ++i) {
        send[static_cast<std::size_t>(offsets.back() + i)] = Content(0, r.rank(), peer, i);
      }
      for (std::int64_t i = 0; i < receive_bytes.back(); ++i) {
        want[static_cast<std::size_t>(offsets.back() + i)] = Content(0, peer, r.rank(), i);
      }
    }
    RETURN_IF_ERROR(ToStatus(r.world().AllToAllV({.send = send.data(),
                                                  .receive = got.data(),
                                                  .send_bytes = send_bytes,
                                                  .receive_bytes = receive_bytes,
                                                  .send_offsets = offsets,
                                                  .receive_offsets = offsets})));
    EXPECT_EQ(got, want);
    return absl::OkStatus();
  }));
}

TEST(GlooAllToAllV, NobodySendsAnything) {
  EXPECT_STATUS_OK(RunThreadRanks({.size = 3}, [](ThreadRank& r) -> absl::Status {
    const std::vector<std::int64_t> none(3, 0);
    for (int i = 0; i < 5; ++i) {
      RETURN_IF_ERROR(ToStatus(r.world().AllToAllV(
          {.send = nullptr, .receive = nullptr, .send_bytes = none, .receive_bytes = none})));
    }
    return ToStatus(r.world().Barrier());
  }));
}

// ---------------------------------------------------------------- reductions

template <class T>
T Value(int rank, std::int64_t i) {
  std::mt19937 random(static_cast<std::uint32_t>(rank * 7919 + i * 31));
  const double x = std::normal_distribution<double>(0, 1e6)(random);
  return static_cast<T>(std::is_integral_v<T> ? x * 1e9 : x);
}

template <class T>
constexpr DType TypeOf() {
  return std::is_same_v<T, float> ? DType::kF32
                                  : (std::is_same_v<T, double> ? DType::kF64 : DType::kI64);
}

template <class T>
absl::Status CheckReduce(ThreadRank& r, std::int64_t count) {
  for (ReduceOp op : {ReduceOp::kSum, ReduceOp::kMax}) {
    std::vector<T> want;
    for (std::int64_t i = 0; i < count; ++i) {
      T total = Value<T>(0, i);
      for (int rank = 1; rank < r.size(); ++rank) {
        const T x = Value<T>(rank, i);
        total = op == ReduceOp::kSum ? static_cast<T>(total + x) : std::max(total, x);
      }
      want.push_back(total);
    }
    for (int repeat = 0; repeat < 2; ++repeat) {
      std::vector<T> data;
      for (std::int64_t i = 0; i < count; ++i) {
        data.push_back(Value<T>(r.rank(), i));
      }
      RETURN_IF_ERROR(ToStatus(r.world().AllReduce(data.data(), count, TypeOf<T>(), op)));
      // Bitwise: additions in rank order, the same on every rank and every time.
      EXPECT_TRUE(data == want) << "rank " << r.rank() << " of " << r.size() << ", " << count
                                << " elements";
    }
  }
  return absl::OkStatus();
}

TEST(GlooAllReduce, HasTheBitsOfALoopOverTheRanks) {
  for (int size : {2, 3, 5}) {
    EXPECT_STATUS_OK(RunThreadRanks({.size = size}, [](ThreadRank& r) -> absl::Status {
      for (std::int64_t count : {0, 1, 2, 4, 7, 1000}) {
        RETURN_IF_ERROR(CheckReduce<float>(r, count));
        RETURN_IF_ERROR(CheckReduce<double>(r, count));
        RETURN_IF_ERROR(CheckReduce<std::int64_t>(r, count));
      }
      return absl::OkStatus();
    }));
  }
}

TEST(GlooAllReduce, WorksInSlicesWhenTheDataIsLarge) {
  const std::int64_t count = (std::int64_t{5} << 20) + 3;  // three slices of FP32
  EXPECT_STATUS_OK(RunThreadRanks({.size = 2}, [&](ThreadRank& r) -> absl::Status {
    std::vector<float> data(static_cast<std::size_t>(count));
    for (std::int64_t i = 0; i < count; ++i) {
      data[static_cast<std::size_t>(i)] = static_cast<float>(i % 1000 + 1000 * r.rank());
    }
    RETURN_IF_ERROR(ToStatus(r.world().AllReduce(data.data(), count, DType::kF32, ReduceOp::kSum)));
    for (std::int64_t i = 0; i < count; ++i) {
      if (data[static_cast<std::size_t>(i)] != static_cast<float>(2 * (i % 1000) + 1000)) {
        return InternalError(StrCat("element ", i));
      }
    }
    return absl::OkStatus();
  }));
}

TEST(GlooAllReduce, NaNWinsAMaximumOnEveryRank) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (int who = 0; who < 3; ++who) {
    EXPECT_STATUS_OK(RunThreadRanks({.size = 3}, [&](ThreadRank& r) -> absl::Status {
      double x[2] = {r.rank() == who ? nan : 1.0 + r.rank(), -1.0 - r.rank()};
      RETURN_IF_ERROR(ToStatus(r.world().AllReduce(x, 2, DType::kF64, ReduceOp::kMax)));
      EXPECT_TRUE(std::isnan(x[0])) << "NaN from rank " << who << " at rank " << r.rank();
      EXPECT_EQ(x[1], -1.0);
      return absl::OkStatus();
    }));
  }
}

// ---------------------------------------------------------------- gather, broadcast

TEST(GlooAllGather, ConcatenatesInRankOrder) {
  for (std::int64_t bytes : {0, 1, 24, 300000}) {
    EXPECT_STATUS_OK(RunThreadRanks({.size = 4}, [&](ThreadRank& r) -> absl::Status {
      const std::vector<char> mine(static_cast<std::size_t>(bytes),
                                   static_cast<char>('a' + r.rank()));
      std::string got(static_cast<std::size_t>(4 * bytes), '?');
      RETURN_IF_ERROR(ToStatus(r.world().AllGather(mine.data(), got.data(), bytes)));
      const auto n = static_cast<std::size_t>(bytes);
      EXPECT_EQ(got, std::string(n, 'a') + std::string(n, 'b') + std::string(n, 'c') +
                         std::string(n, 'd'));
      return absl::OkStatus();
    }));
  }
}

TEST(GlooBroadcast, GivesEveryRankTheRootsBytes) {
  EXPECT_STATUS_OK(RunThreadRanks({.size = 3}, [](ThreadRank& r) -> absl::Status {
    for (int root = 0; root < 3; ++root) {
      std::vector<int> data(1000, 100 + r.rank());
      RETURN_IF_ERROR(ToStatus(
          r.world().Broadcast(data.data(), static_cast<std::int64_t>(data.size() * 4), root)));
      EXPECT_EQ(data, std::vector<int>(1000, 100 + root));
    }
    return absl::OkStatus();
  }));
}

// The sender closes its side at once; what it sent must still arrive in full.
TEST(GlooBroadcast, NothingIsLostWhenTheRootLeavesRightAfterwards) {
  EXPECT_STATUS_OK(RunThreadRanks({.size = 3}, [](ThreadRank& r) -> absl::Status {
    std::vector<char> data(std::size_t{24} << 20, r.rank() == 0 ? 'x' : '?');
    RETURN_IF_ERROR(
        ToStatus(r.world().Broadcast(data.data(), static_cast<std::int64_t>(data.size()), 0)));
    const bool complete = data == std::vector<char>(data.size(), 'x');
    return complete ? absl::OkStatus() : InternalError("bytes are missing");
  }));
}

// ---------------------------------------------------------------- sub-groups

TEST(GlooGroups, SubGroupsAndWorldWorkSideBySide) {
  EXPECT_STATUS_OK(RunThreadRanks({.size = 4}, [](ThreadRank& r) -> absl::Status {
    const bool odd = r.rank() % 2 == 1;
    ASSIGN_OR_RETURN(
        Communicator * parity,
        r.Group(odd ? "odd" : "even", odd ? std::vector<int>{1, 3} : std::vector<int>{0, 2}));
    ASSIGN_OR_RETURN(Communicator * alone, r.Group(StrCat("alone-", r.rank()), {r.rank()}));
    EXPECT_EQ(parity->rank(), r.rank() / 2);
    EXPECT_EQ(parity->size(), 2);
    EXPECT_EQ(alone->size(), 1);
    for (int i = 0; i < 20; ++i) {
      std::int64_t group_sum = r.rank(), world_sum = r.rank(), own = r.rank();
      RETURN_IF_ERROR(ToStatus(parity->AllReduce(&group_sum, 1, DType::kI64, ReduceOp::kSum)));
      RETURN_IF_ERROR(ToStatus(r.world().AllReduce(&world_sum, 1, DType::kI64, ReduceOp::kSum)));
      RETURN_IF_ERROR(ToStatus(alone->AllReduce(&own, 1, DType::kI64, ReduceOp::kSum)));
      EXPECT_EQ(group_sum, odd ? 4 : 2);
      EXPECT_EQ(world_sum, 6);
      EXPECT_EQ(own, r.rank());
    }
    return absl::OkStatus();
  }));
}

TEST(GlooGroups, MessagesNameWorldRanks) {
  const std::vector<absl::Status> status =
      RunThreadRanksEach({.size = 4}, [](ThreadRank& r) -> absl::Status {
        if (r.rank() < 2) {
          return absl::OkStatus();
        }
        ASSIGN_OR_RETURN(Communicator * late, r.Group("late", {2, 3}));
        return r.rank() == 3 ? absl::OkStatus() : ToStatus(late->Barrier());
      });
  EXPECT_THAT(ToString(status[2]),
              AllOf(HasSubstr("rank 2: barrier (call 1 of group late)"), HasSubstr("rank 3")));
}

// ---------------------------------------------------------------- failures

TEST(GlooFailure, DeadPeerFailsTheOthersAtOnceNamingOperationAndRank) {
  const std::vector<absl::Status> status =
      RunThreadRanksEach({.size = 3, .timeout_seconds = 30}, [](ThreadRank& r) -> absl::Status {
        RETURN_IF_ERROR(ToStatus(r.world().Barrier()));
        if (r.rank() == 1) {
          return absl::OkStatus();  // leaves; its connections close
        }
        double x = 1;
        const CommResult first = r.world().AllReduce(&x, 1, DType::kF64, ReduceOp::kSum);
        EXPECT_EQ(first.code, CommResult::Code::kPeerLost) << first.message;
        // Unusable from now on, with the first message.
        const CommResult second = r.world().Barrier();
        EXPECT_EQ(second.message, first.message);
        return ToStatus(first);
      });
  EXPECT_STATUS_OK(status[1]);
  for (int r : {0, 2}) {
    const absl::Status& failed = status[static_cast<std::size_t>(r)];
    EXPECT_EQ(failed.code(), absl::StatusCode::kUnavailable);
    EXPECT_THAT(ToString(failed),
                AllOf(HasSubstr(StrCat("rank ", r, ": all_reduce (call 2 of group world)")),
                      testing::ContainsRegex("lost the connection to rank ([0-9], )*1")));
  }
}

TEST(GlooFailure, SilentPeerTimesOutNamingOnlyTheAbsentRanks) {
  absl::Notification finished;
  std::atomic<int> waiting = 2;
  const std::vector<absl::Status> status =
      RunThreadRanksEach({.size = 4, .timeout_seconds = 0.4}, [&](ThreadRank& r) -> absl::Status {
        if (r.rank() == 1 || r.rank() == 2) {  // alive, connected, and never there
          finished.WaitForNotificationWithTimeout(absl::Seconds(30));
          return absl::OkStatus();
        }
        std::vector<std::int64_t> sizes(4, 8);
        std::vector<double> send(4), receive(4);
        const absl::Status result = ToStatus(r.world().AllToAllV({.send = send.data(),
                                                                  .receive = receive.data(),
                                                                  .send_bytes = sizes,
                                                                  .receive_bytes = sizes}));
        if (--waiting == 0) {
          finished.Notify();
        }
        return result;
      });
  for (int r : {0, 3}) {
    const absl::Status& failed = status[static_cast<std::size_t>(r)];
    EXPECT_EQ(failed.code(), absl::StatusCode::kDeadlineExceeded) << ToString(failed);
    EXPECT_THAT(ToString(failed),
                HasSubstr(StrCat("rank ", r,
                                 ": all_to_all_v (call 1 of group world): no data from "
                                 "rank 1, 2 within 400 ms")));
  }
}

TEST(GlooFailure, DifferentOperationsTimeOutInsteadOfMixingData) {
  const std::vector<absl::Status> status =
      RunThreadRanksEach({.size = 2, .timeout_seconds = 0.3}, [](ThreadRank& r) -> absl::Status {
        double x[2] = {1, 2};
        double y[4] = {};
        return ToStatus(r.rank() == 0 ? r.world().AllReduce(x, 2, DType::kF64, ReduceOp::kSum)
                                      : r.world().AllGather(x, y, 8));
      });
  EXPECT_FALSE(status[0].ok());
  EXPECT_FALSE(status[1].ok());
}

TEST(GlooFailure, AbortReturnsABlockedCallOfThisRank) {
  absl::Notification ready, aborted;
  Communicator* blocked = nullptr;
  std::jthread aborter([&] {
    if (ready.WaitForNotificationWithTimeout(absl::Seconds(30))) {
      blocked->Abort();
    }
  });
  const std::vector<absl::Status> status =
      RunThreadRanksEach({.size = 2, .timeout_seconds = 30}, [&](ThreadRank& r) -> absl::Status {
        if (r.rank() == 1) {
          EXPECT_TRUE(aborted.WaitForNotificationWithTimeout(absl::Seconds(30)));
          return absl::OkStatus();
        }
        blocked = &r.world();
        ready.Notify();
        const absl::Status result = ToStatus(r.world().Barrier());
        aborted.Notify();
        return result;
      });
  EXPECT_EQ(status[0].code(), absl::StatusCode::kInternal) << ToString(status[0]);
  EXPECT_THAT(ToString(status[0]), HasSubstr("aborted"));
}

// ---------------------------------------------------------------- connecting

TEST(GlooConnect, MissingMemberIsNamed) {
  InProcessStore store;
  const auto made = CreateGlooCommunicator({.rank = 0,
                                            .size = 2,
                                            .group = "attempt-4/ep1",
                                            .world_ranks = {2, 5},
                                            .bind_address = "127.0.0.1",
                                            .store = &store,
                                            .connect_timeout_seconds = 0.2,
                                            .timeout_seconds = 1});
  ASSERT_FALSE(made.ok());
  EXPECT_EQ(made.status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(ToString(made.status()), AllOf(HasSubstr("rank 2: connecting group attempt-4/ep1"),
                                             HasSubstr("rank 5 did not come")));
}

TEST(GlooConnect, AddressThatIsNotOursIsAnErrorAndNotACrash) {
  InProcessStore store;
  const auto made = CreateGlooCommunicator({.rank = 0,
                                            .size = 2,
                                            .group = "g",
                                            .bind_address = "203.0.113.7",
                                            .store = &store,
                                            .connect_timeout_seconds = 0.2,
                                            .timeout_seconds = 1});
  ASSERT_FALSE(made.ok());
  EXPECT_THAT(ToString(made.status()), HasSubstr("203.0.113.7"));
}

TEST(GlooConnect, OneRankNeedsNoStore) {
  const auto made = CreateGlooCommunicator({.rank = 0, .size = 1});
  ASSERT_TRUE(made.ok());
  EXPECT_EQ((*made)->size(), 1);
}

}  // namespace
}  // namespace octavo
