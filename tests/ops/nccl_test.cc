// The NCCL communicator on two GPUs of one host, one thread a rank. Skips where there are fewer.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <functional>
#include <thread>

#include "tests/ops/op_run.h"
#include "worker/comm/communicator.h"

namespace octavo::test {
namespace {

constexpr int kRanks = 2;

struct Rank {
  Backend backend;
  std::unique_ptr<Communicator> comm;
  int index = 0;

  const Ops& ops() const { return *backend.ops; }
  template <class T>
  T* Upload(const std::vector<T>& v) {
    const std::int64_t bytes = static_cast<std::int64_t>(v.size() * sizeof(T));
    void* p = ops().allocate(backend.context, bytes, Memory::kDevice);
    ops().copy(backend.context, {p, v.data(), bytes, CopyKind::kToDevice});
    ops().synchronize(backend.context);
    return static_cast<T*>(p);
  }
  template <class T>
  std::vector<T> Download(const T* p, std::size_t count) {
    std::vector<T> v(count);
    ops().copy(backend.context,
               {v.data(), p, static_cast<std::int64_t>(count * sizeof(T)), CopyKind::kToHost});
    ops().synchronize(backend.context);
    return v;
  }
};

class NcclPair : public testing::Test {
 protected:
  // Runs `body` on both ranks. timeout of every operation in seconds.
  void Run(double timeout, const std::function<void(Rank&)>& body) {
    std::string reason;
    const PluginTable* plugin = OpenPlugin(&reason);
    if (plugin == nullptr) {
      GTEST_SKIP() << "no plug-in: " << reason;
    }
    DeviceFacts facts;
    char message[512] = "";
    if (plugin->nccl_create == nullptr ||
        plugin->probe(kRanks - 1, &facts, message, sizeof(message)) != 0) {
      GTEST_SKIP() << "needs " << kRanks << " GPUs and NCCL: " << message;
    }
    std::array<std::uint8_t, 128> id{};
    ASSERT_EQ(plugin->nccl_unique_id(id.data(), message, sizeof(message)), 0) << message;
    std::vector<std::jthread> threads;
    for (int r = 0; r < kRanks; ++r) {
      threads.emplace_back([&, r] {
        Rank rank;
        rank.index = r;
        char text[512] = "";
        ASSERT_EQ(plugin->create(r, &rank.backend, text, sizeof(text)), 0) << text;
        rank.comm.reset(
            plugin->nccl_create(&rank.backend, id.data(), r, kRanks, timeout, text, sizeof(text)));
        ASSERT_NE(rank.comm, nullptr) << text;
        body(rank);
        rank.comm.reset();
        plugin->destroy(&rank.backend);
      });
    }
  }
};

TEST_F(NcclPair, ReducesGathersAndBroadcasts) {
  Run(60, [](Rank& r) {
    double* sum = r.Upload(std::vector<double>{1.0 + r.index, 10.0});
    float* max = r.Upload(std::vector<float>{static_cast<float>(-r.index), 3.0f * r.index});
    ASSERT_TRUE(r.comm->AllReduce(sum, 2, DType::kF64, ReduceOp::kSum).ok());
    ASSERT_TRUE(r.comm->AllReduce(max, 2, DType::kF32, ReduceOp::kMax).ok());
    EXPECT_EQ(r.Download(sum, 2), (std::vector<double>{3.0, 20.0}));
    EXPECT_EQ(r.Download(max, 2), (std::vector<float>{0.0f, 3.0f}));
    std::int32_t* own = r.Upload(std::vector<std::int32_t>{r.index, 7});
    std::int32_t* all = r.Upload(std::vector<std::int32_t>(4, -1));
    ASSERT_TRUE(r.comm->AllGather(own, all, 8).ok());
    EXPECT_EQ(r.Download(all, 4), (std::vector<std::int32_t>{0, 7, 1, 7}));
    ASSERT_TRUE(r.comm->Broadcast(own, 8, 1).ok());
    EXPECT_EQ(r.Download(own, 2), (std::vector<std::int32_t>{1, 7}));
    EXPECT_TRUE(r.comm->Barrier().ok());
  });
}

TEST_F(NcclPair, SendsUnevenRowsAndNothing) {
  Run(60, [](Rank& r) {
    // Rank 0 sends 2 rows to itself and 3 to rank 1; rank 1 sends nothing to 0 and 1 row to itself.
    const std::vector<std::int64_t> rows =
        r.index == 0 ? std::vector<std::int64_t>{2, 3} : std::vector<std::int64_t>{0, 1};
    const std::vector<std::int64_t> back =
        r.index == 0 ? std::vector<std::int64_t>{2, 0} : std::vector<std::int64_t>{3, 1};
    std::vector<std::int64_t> send_bytes, receive_bytes;
    for (std::size_t i = 0; i < 2; ++i) {
      send_bytes.push_back(rows[i] * 4);
      receive_bytes.push_back(back[i] * 4);
    }
    std::vector<std::int32_t> data;
    for (std::int64_t i = 0; i < rows[0] + rows[1]; ++i) {
      data.push_back(static_cast<std::int32_t>(100 * r.index + i));
    }
    std::int32_t* from = r.Upload(data);
    std::int32_t* to = r.Upload(std::vector<std::int32_t>(4, -1));
    ASSERT_TRUE(r.comm->AllToAllV({from, to, send_bytes, receive_bytes}).ok());
    EXPECT_EQ(r.Download(to, 4), r.index == 0 ? (std::vector<std::int32_t>{0, 1, -1, -1})
                                              : (std::vector<std::int32_t>{2, 3, 4, 100}));
    EXPECT_EQ(r.comm->counters().all_to_all_bytes, r.index == 0 ? 12 : 0);
  });
}

TEST_F(NcclPair, NamesTheOperationThatNobodyJoined) {
  std::atomic<bool> done{false};
  Run(3, [&](Rank& r) {
    if (r.index == 0) {
      // Rank 1 never joins: the wait ends within the timeout and says which call it was.
      const CommResult result = r.comm->Barrier();
      EXPECT_FALSE(result.ok());
      EXPECT_EQ(result.code, CommResult::Code::kTimeout) << result.message;
      EXPECT_NE(result.message.find("rank 0 of 2"), std::string::npos) << result.message;
      EXPECT_NE(result.message.find("barrier (call 1)"), std::string::npos) << result.message;
      done.store(true);
      done.notify_all();
    } else {
      done.wait(false);
    }
  });
}

}  // namespace
}  // namespace octavo::test
