// The NCCL communicator on all GPUs of one host (at most 8), one thread a rank. Skips where there
// are fewer than two. A rank that hangs ends the program: it says where every rank stands.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <mutex>
#include <numeric>
#include <thread>

#include "tests/ops/op_run.h"
#include "worker/comm/communicator.h"

namespace octavo::test {
namespace {

constexpr int kMostRanks = 8;

struct Rank {
  Backend backend;
  std::unique_ptr<Communicator> comm;
  int index = 0, size = 0;
  std::atomic<const char*>* step = nullptr;

  // What this rank does next, for the report of a hang.
  void At(const char* what) { *step = what; }

  const Ops& ops() const { return *backend.ops; }
  template <class T>
  T* Upload(const std::vector<T>& v) {
    const std::int64_t bytes = static_cast<std::int64_t>(v.size() * sizeof(T));
    void* p = ops().allocate(backend.context, std::max<std::int64_t>(bytes, 1), Memory::kDevice);
    ops().copy(backend.context, {p, v.data(), bytes, CopyKind::kToDevice});
    ops().synchronize(backend.context);
    return static_cast<T*>(p);
  }
  template <class T>
  std::vector<T> Download(const T* p, std::size_t count) {
    At("download");
    std::vector<T> v(count);
    ops().copy(backend.context,
               {v.data(), p, static_cast<std::int64_t>(count * sizeof(T)), CopyKind::kToHost});
    ops().synchronize(backend.context);
    return v;
  }
};

class NcclGroup : public testing::Test {
 protected:
  // Runs `body` on every rank. timeout of every operation in seconds.
  void Run(double timeout, const std::function<void(Rank&)>& body) {
    std::string reason;
    const PluginTable* plugin = OpenPlugin(&reason);
    if (plugin == nullptr) {
      GTEST_SKIP() << "no plug-in: " << reason;
    }
    DeviceFacts facts;
    char message[512] = "";
    int ranks = 0;
    while (ranks < kMostRanks && plugin->probe(ranks, &facts, message, sizeof(message)) == 0) {
      ++ranks;
    }
    if (plugin->nccl_create == nullptr || ranks < 2) {
      GTEST_SKIP() << "needs 2 GPUs and NCCL; found " << ranks << " GPUs: " << message;
    }
    std::array<std::uint8_t, 128> id{};
    ASSERT_EQ(plugin->nccl_unique_id(id.data(), message, sizeof(message)), 0) << message;
    std::array<std::atomic<const char*>, kMostRanks> steps{};
    std::mutex mutex;
    std::condition_variable changed;
    int left = ranks;
    std::vector<std::jthread> threads;
    for (int r = 0; r < ranks; ++r) {
      threads.emplace_back([&, r] {
        steps[static_cast<std::size_t>(r)] = "creation";
        RunRank(*plugin, {.index = r, .size = ranks, .step = &steps[static_cast<std::size_t>(r)]},
                id, timeout, body);
        std::lock_guard lock(mutex);
        --left;
        changed.notify_all();
      });
    }
    // NCCL and CUDA have waits that no thread can be called back from.
    const auto limit = std::chrono::seconds(30 + static_cast<int>(timeout));
    std::unique_lock lock(mutex);
    if (!changed.wait_for(lock, limit, [&] { return left == 0; })) {
      std::printf("[  FAILED  ] hung: after %lld s %d of %d ranks have not come back\n",
                  static_cast<long long>(limit.count()), left, ranks);
      for (int r = 0; r < ranks; ++r) {
        std::printf("rank %d: %s\n", r, steps[static_cast<std::size_t>(r)].load());
      }
      std::fflush(stdout);
      std::_Exit(1);
    }
  }

 private:
  static void RunRank(const PluginTable& plugin, Rank rank, const std::array<std::uint8_t, 128>& id,
                      double timeout, const std::function<void(Rank&)>& body) {
    char text[512] = "";
    ASSERT_EQ(plugin.create(rank.index, &rank.backend, text, sizeof(text)), 0) << text;
    rank.comm.reset(plugin.nccl_create(&rank.backend, id.data(), rank.index, rank.size, timeout,
                                       text, sizeof(text)));
    EXPECT_NE(rank.comm, nullptr) << text;
    if (rank.comm != nullptr) {
      rank.At("body");
      body(rank);
      rank.At("destruction of the communicator");
      rank.comm.reset();
    }
    rank.At("destruction of the backend");
    plugin.destroy(&rank.backend);
    rank.At("end");
  }
};

TEST_F(NcclGroup, ReducesGathersAndBroadcasts) {
  Run(30, [](Rank& r) {
    const int n = r.size;
    double* sum = r.Upload(std::vector<double>{1.0 + r.index, 10.0});
    float* max = r.Upload(std::vector<float>{static_cast<float>(-r.index), 3.0f * r.index});
    ASSERT_TRUE(r.comm->AllReduce(sum, 2, DType::kF64, ReduceOp::kSum).ok());
    ASSERT_TRUE(r.comm->AllReduce(max, 2, DType::kF32, ReduceOp::kMax).ok());
    EXPECT_EQ(r.Download(sum, 2), (std::vector<double>{n * (n + 1) / 2.0, 10.0 * n}));
    EXPECT_EQ(r.Download(max, 2), (std::vector<float>{0.0f, 3.0f * (n - 1)}));
    std::int32_t* own = r.Upload(std::vector<std::int32_t>{r.index, 7});
    std::int32_t* all = r.Upload(std::vector<std::int32_t>(2 * static_cast<std::size_t>(n), -1));
    ASSERT_TRUE(r.comm->AllGather(own, all, 8).ok());
    std::vector<std::int32_t> expected;
    for (int i = 0; i < n; ++i) {
      expected.insert(expected.end(), {i, 7});
    }
    EXPECT_EQ(r.Download(all, expected.size()), expected);
    ASSERT_TRUE(r.comm->Broadcast(own, 8, n - 1).ok());
    EXPECT_EQ(r.Download(own, 2), (std::vector<std::int32_t>{n - 1, 7}));
    EXPECT_TRUE(r.comm->Barrier().ok());
    EXPECT_TRUE(r.comm->Check().ok());
  });
}

// Rows from rank s to rank d, zero among them; several calls in a row use the same buffers.
int RowsBetween(int s, int d, int call) { return (s * 5 + d * 3 + call) % 4 * 1000; }

TEST_F(NcclGroup, SendsUnevenRowsAndNothing) {
  Run(30, [](Rank& r) {
    constexpr std::size_t kMost = 8 * 3000;
    std::int32_t* to = r.Upload(std::vector<std::int32_t>(kMost, -1));
    std::int64_t left = 0;
    for (int call = 0; call < 3; ++call) {
      std::vector<std::int64_t> send_bytes, receive_bytes;
      std::vector<std::int32_t> data, expected;
      for (int peer = 0; peer < r.size; ++peer) {
        const int out = RowsBetween(r.index, peer, call), in = RowsBetween(peer, r.index, call);
        send_bytes.push_back(4 * out);
        receive_bytes.push_back(4 * in);
        left += peer == r.index ? 0 : 4 * out;
        for (int i = 0; i < out; ++i) {
          data.push_back(1000000 * r.index + 100000 * peer + 10000 * call + i);
        }
        for (int i = 0; i < in; ++i) {
          expected.push_back(1000000 * peer + 100000 * r.index + 10000 * call + i);
        }
      }
      std::int32_t* from = r.Upload(data);
      ASSERT_TRUE(r.comm->AllToAllV({from, to, send_bytes, receive_bytes}).ok());
      EXPECT_EQ(r.Download(to, expected.size()), expected) << "call " << call;
    }
    EXPECT_EQ(r.comm->counters().all_to_all_bytes, left);
  });
}

// Long messages, with an own part that is and that is not a multiple of 16 bytes.
TEST_F(NcclGroup, KeepsItsOwnRowsInLongMessages) {
  Run(30, [](Rank& r) {
    constexpr std::size_t kWords = 2 << 20;
    const auto n = static_cast<std::size_t>(r.size);
    for (const std::size_t odd : {0, 1, 4}) {
      // Words from s to d: so many, and `odd` more to oneself.
      const auto words = [&](std::size_t s, std::size_t d) { return kWords + (s == d ? odd : 0); };
      std::vector<std::int64_t> bytes;
      std::vector<std::int32_t> data, expected;
      for (std::size_t peer = 0; peer < n; ++peer) {
        const auto self = static_cast<std::size_t>(r.index);
        bytes.push_back(static_cast<std::int64_t>(4 * words(self, peer)));
        for (std::size_t i = 0; i < words(self, peer); ++i) {
          data.push_back(static_cast<std::int32_t>(i * 64 + self * 8 + peer));
          expected.push_back(static_cast<std::int32_t>(i * 64 + peer * 8 + self));
        }
      }
      std::int32_t* from = r.Upload(data);
      std::int32_t* to = r.Upload(std::vector<std::int32_t>(expected.size(), -1));
      ASSERT_TRUE(r.comm->AllToAllV({from, to, bytes, bytes}).ok());
      EXPECT_TRUE(r.Download(to, expected.size()) == expected) << "odd " << odd;
    }
  });
}

// Held by the rank that stays away until the others are through with what they try.
class Others {
 public:
  void Done() {
    std::lock_guard lock(mutex_);
    ++done_;
    changed_.notify_all();
  }
  void Wait(int count) {
    std::unique_lock lock(mutex_);
    EXPECT_TRUE(changed_.wait_for(lock, std::chrono::seconds(20), [&] { return done_ == count; }))
        << done_ << " of " << count << " other ranks are through";
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int done_ = 0;
};

// The last rank never joins: the others' wait ends within the timeout and says which call it was.
TEST_F(NcclGroup, NamesTheOperationThatNobodyJoined) {
  Others others;
  Run(3, [&](Rank& r) {
    if (r.index != r.size - 1) {
      r.At("barrier without the last rank");
      const CommResult result = r.comm->Barrier();
      EXPECT_FALSE(result.ok());
      EXPECT_EQ(result.code, CommResult::Code::kTimeout) << result.message;
      EXPECT_NE(result.message.find("rank " + std::to_string(r.index) + " of"), std::string::npos)
          << result.message;
      EXPECT_NE(result.message.find("barrier (call 1)"), std::string::npos) << result.message;
      others.Done();
    } else {
      r.At("wait for the others");
      others.Wait(r.size - 1);
    }
  });
}

// What an aborted operation leaves in memory is not believed: Check says so after the wait, and an
// abort from another thread ends a wait long before the timeout would. All meet once before: NCCL
// connects in the first operation, and that one would wait for the absent rank in the call itself.
TEST_F(NcclGroup, AnAbortEndsTheWaitAndItsResultIsNotBelieved) {
  Others others;
  Run(20, [&](Rank& r) {
    double* value = r.Upload(std::vector<double>{1.0});
    r.At("first all-reduce");
    EXPECT_TRUE(r.comm->AllReduce(value, 1, DType::kF64, ReduceOp::kSum).ok());
    EXPECT_EQ(r.Download(value, 1), std::vector<double>{static_cast<double>(r.size)});
    if (r.index != r.size - 1) {
      r.At("all-reduce without the last rank");
      const CommResult begun = r.comm->AllReduce(value, 1, DType::kF64, ReduceOp::kSum);
      EXPECT_TRUE(begun.ok()) << begun.message;
      EXPECT_TRUE(r.comm->Check().ok());
      r.At("wait that the abort ends");
      {
        std::jthread aborts([&r] { r.comm->Abort(); });
        r.ops().synchronize(r.backend.context);
      }
      r.At("calls after the abort");
      const CommResult result = r.comm->Check();
      EXPECT_EQ(result.code, CommResult::Code::kPeerLost) << result.message;
      EXPECT_NE(result.message.find("all_reduce (call 2)"), std::string::npos) << result.message;
      EXPECT_FALSE(r.comm->Barrier().ok());
      others.Done();
    } else {
      r.At("wait for the others");
      others.Wait(r.size - 1);
    }
  });
}

}  // namespace
}  // namespace octavo::test
