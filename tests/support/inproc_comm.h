// Communicators between threads of one process, over shared memory: ranks as threads without
// sockets.
//
// Every collective is: publish pointers, meet, read the others', meet again. Sums run in rank order
// on every rank, so results are deterministic. Waits end after the timeout with a message.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/check.h"
#include "worker/comm/communicator.h"

namespace octavo::testing {

// Shared by the ranks of one group.
class InprocGroup {
 public:
  explicit InprocGroup(int size, double timeout_seconds = 60)
      : size_(size), timeout_seconds_(timeout_seconds), slots_(static_cast<std::size_t>(size)) {}

  struct Slot {
    const void* send = nullptr;
    std::vector<std::int64_t> bytes;
  };

  // True when all ranks arrived in time and nobody aborted.
  bool Meet() {
    std::unique_lock lock(mu_);
    const std::uint64_t generation = generation_;
    if (++waiting_ == size_) {
      waiting_ = 0;
      ++generation_;
      cv_.notify_all();
      return !aborted_;
    }
    const bool met = cv_.wait_for(lock, std::chrono::duration<double>(timeout_seconds_),
                                  [&] { return aborted_ || generation_ != generation; });
    if (!met) {
      aborted_ = true;
      cv_.notify_all();
    }
    return met && !aborted_;
  }
  void Abort() {
    const std::lock_guard lock(mu_);
    aborted_ = true;
    cv_.notify_all();
  }
  Slot& slot(int rank) { return slots_[static_cast<std::size_t>(rank)]; }
  int size() const { return size_; }

 private:
  const int size_;
  const double timeout_seconds_;
  std::mutex mu_;
  std::condition_variable cv_;
  int waiting_ = 0;
  std::uint64_t generation_ = 0;
  bool aborted_ = false;
  std::vector<Slot> slots_;
};

// One rank's end; used by one thread.
class InprocComm : public Communicator {
 public:
  InprocComm(std::shared_ptr<InprocGroup> group, int rank)
      : group_(std::move(group)), rank_(rank) {}

  int rank() const override { return rank_; }
  int size() const override { return group_->size(); }
  bool device_pointers() const override { return false; }

  CommResult AllToAllV(const AllToAllVArgs& args) override {
    ++counters_.all_to_all_calls;
    for (int r = 0; r < size(); ++r) {
      counters_.all_to_all_bytes += r == rank_ ? 0 : args.send_bytes[static_cast<std::size_t>(r)];
    }
    // What every peer gets: its bytes, then where they begin.
    std::vector<std::int64_t> parts(args.send_bytes.begin(), args.send_bytes.end());
    PeerOffsets send_offsets(args.send_bytes, args.send_offsets);
    for (std::size_t r = 0; r < args.send_bytes.size(); ++r) {
      parts.push_back(send_offsets.Next(r));
    }
    return Exchange("all_to_all_v", args.send, std::move(parts), [&] {
      PeerOffsets receive_offsets(args.receive_bytes, args.receive_offsets);
      for (int r = 0; r < size(); ++r) {
        const InprocGroup::Slot& from = group_->slot(r);
        const std::int64_t n = from.bytes[static_cast<std::size_t>(rank_)];
        OCTAVO_CHECK_EQ(n, args.receive_bytes[static_cast<std::size_t>(r)]);
        auto* out = static_cast<std::uint8_t*>(args.receive) +
                    receive_offsets.Next(static_cast<std::size_t>(r));
        if (n > 0) {
          std::memcpy(out,
                      static_cast<const std::uint8_t*>(from.send) +
                          from.bytes[static_cast<std::size_t>(size() + rank_)],
                      static_cast<std::size_t>(n));
        }
      }
    });
  }

  CommResult AllReduce(void* data, std::int64_t count, DType dtype, ReduceOp op) override {
    ++counters_.all_reduce_calls;
    counters_.all_reduce_bytes += size() > 1 ? count * DTypeBytes(dtype) : 0;
    switch (dtype) {
      case DType::kF32:
        return Reduce<float>(data, count, op);
      case DType::kF64:
        return Reduce<double>(data, count, op);
      case DType::kI64:
        return Reduce<std::int64_t>(data, count, op);
      default:
        return {CommResult::Code::kFault, "all_reduce: data type"};
    }
  }

  CommResult AllGather(const void* send, void* receive, std::int64_t bytes) override {
    counters_.all_gather_bytes += bytes * (size() - 1);
    return Exchange("all_gather", send, {}, [&] {
      for (int r = 0; r < size(); ++r) {
        std::memcpy(static_cast<std::uint8_t*>(receive) + r * bytes, group_->slot(r).send,
                    static_cast<std::size_t>(bytes));
      }
    });
  }

  CommResult Broadcast(void* data, std::int64_t bytes, int root) override {
    counters_.broadcast_bytes += rank_ == root ? bytes * (size() - 1) : 0;
    return Exchange("broadcast", data, {}, [&] {
      if (rank_ != root) {
        std::memcpy(data, group_->slot(root).send, static_cast<std::size_t>(bytes));
      }
    });
  }

  CommResult Barrier() override {
    return Exchange("barrier", nullptr, {}, [] {});
  }
  void Abort() override { group_->Abort(); }

 private:
  CommResult Exchange(const char* what, const void* send, std::vector<std::int64_t> bytes,
                      const std::function<void()>& read) {
    group_->slot(rank_) = {send, std::move(bytes)};
    if (!group_->Meet()) {
      return {CommResult::Code::kTimeout, Text(what)};
    }
    read();
    if (!group_->Meet()) {
      return {CommResult::Code::kTimeout, Text(what)};
    }
    return {};
  }

  template <class T>
  CommResult Reduce(void* data, std::int64_t count, ReduceOp op) {
    const std::vector<T> mine(static_cast<T*>(data), static_cast<T*>(data) + count);
    return Exchange("all_reduce", mine.data(), {}, [&] {
      auto* out = static_cast<T*>(data);
      for (int r = 0; r < size(); ++r) {
        const auto* from = static_cast<const T*>(group_->slot(r).send);
        for (std::int64_t i = 0; i < count; ++i) {
          out[i] = r == 0                 ? from[i]
                   : op == ReduceOp::kSum ? out[i] + from[i]
                                          : std::max(out[i], from[i]);
        }
      }
    });
  }
  std::string Text(const char* what) const {
    return "rank " + std::to_string(rank_) + ": " + what + ": a peer did not arrive";
  }

  const std::shared_ptr<InprocGroup> group_;
  const int rank_;
};

// The three groups of every rank, as the model wants them.
struct InprocRanks {
  struct Comms {
    std::unique_ptr<InprocComm> world, expert_parallel, expert_data;
  };
  std::vector<Comms> ranks;

  static InprocRanks Make(int world, int expert_parallel) {
    InprocRanks result;
    const auto all = std::make_shared<InprocGroup>(world);
    std::vector<std::shared_ptr<InprocGroup>> ep, data;
    for (int g = 0; g < world / expert_parallel; ++g) {
      ep.push_back(std::make_shared<InprocGroup>(expert_parallel));
    }
    for (int p = 0; p < expert_parallel; ++p) {
      data.push_back(std::make_shared<InprocGroup>(world / expert_parallel));
    }
    for (int r = 0; r < world; ++r) {
      const int g = r / expert_parallel, p = r % expert_parallel;
      result.ranks.push_back({std::make_unique<InprocComm>(all, r),
                              std::make_unique<InprocComm>(ep[static_cast<std::size_t>(g)], p),
                              std::make_unique<InprocComm>(data[static_cast<std::size_t>(p)], g)});
    }
    return result;
  }

  // Runs body(rank) on one thread per rank and joins them.
  static void Run(int world, const std::function<void(int)>& body) {
    std::vector<std::jthread> threads;
    for (int r = 0; r < world; ++r) {
      threads.emplace_back([&body, r] { body(r); });
    }
  }
};

}  // namespace octavo::testing
