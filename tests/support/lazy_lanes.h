// Lanes that run as late as they may: the CPU backend with a copy and a communication lane whose
// work is put off until somebody is entitled to its result. Together with the plain CPU backend,
// where everything runs at once, it brackets what a GPU may do: a buffer that is read before its
// message was joined holds poison, one that is overwritten while a message still needs it sends the
// wrong bytes.
//
//   LazyLanes lanes(cpu_backend);                 // one a rank, on the rank's thread
//   Backend backend = lanes.backend();
//   LazyComm comm(inner, &lanes);                 // inner works on host memory
#pragma once

#include <cstring>
#include <deque>
#include <functional>
#include <utility>
#include <vector>

#include "base/check.h"
#include "kernels/ops.h"
#include "worker/comm/communicator.h"

namespace octavo::testing {

// Used by the thread that made it, which has one at a time.
class LazyLanes {
 public:
  explicit LazyLanes(const Backend& cpu) : inner_(cpu.ops), context_(cpu.context) {
    OCTAVO_CHECK(Current() == nullptr);
    Current() = this;
    table_ = *cpu.ops;
    table_.name = "lazy";
    table_.copy = [](OpsContext* c, const CopyArgs& args) {
      LazyLanes& lanes = *Current();
      if (args.lane == Lane::kCompute) {
        lanes.inner_->copy(c, args);
      } else {
        OCTAVO_CHECK(args.lane == Lane::kCopy, "only collectives run on the communication lane");
        ++lanes.put_off_;
        lanes.copies_.push_back([c, args, inner = lanes.inner_] { inner->copy(c, args); });
      }
    };
    table_.order = [](OpsContext*, Lane earlier, Lane later) {
      LazyLanes& lanes = *Current();
      if (later == Lane::kCompute) {
        lanes.Run(earlier);
      } else if (earlier == Lane::kComm && later == Lane::kCopy) {
        lanes.copies_.push_back([&lanes] { lanes.Run(Lane::kComm); });
      }
    };
    table_.synchronize_lane = [](OpsContext* c, Lane lane) {
      Current()->Run(lane);
      Current()->inner_->synchronize_lane(c, lane);
    };
  }
  ~LazyLanes() { Current() = nullptr; }
  LazyLanes(const LazyLanes&) = delete;
  LazyLanes& operator=(const LazyLanes&) = delete;

  Backend backend() const { return {.ops = &table_, .context = context_}; }
  void PutOff(std::function<void()> collective) {
    ++put_off_;
    collectives_.push_back(std::move(collective));
  }
  void Run(Lane lane) {
    std::deque<std::function<void()>>& queue = lane == Lane::kCopy ? copies_ : collectives_;
    while (lane != Lane::kCompute && !queue.empty()) {
      const std::function<void()> next = std::move(queue.front());
      queue.pop_front();
      next();
    }
  }
  // Copies and collectives that waited.
  std::int64_t put_off() const { return put_off_; }

 private:
  static LazyLanes*& Current() {
    static thread_local LazyLanes* current = nullptr;
    return current;
  }

  const Ops* const inner_;
  OpsContext* const context_;
  Ops table_;
  std::deque<std::function<void()>> copies_, collectives_;
  std::int64_t put_off_ = 0;
};

// What is only started runs at the next Join, behind all that was started before.
class LazyComm final : public Communicator {
 public:
  LazyComm(Communicator* inner, LazyLanes* lanes) : inner_(inner), lanes_(lanes) {}

  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  bool device_pointers() const override { return true; }

  CommResult AllToAllV(const AllToAllVArgs& args) override {
    lanes_->Run(Lane::kComm);
    return inner_->AllToAllV(args);
  }
  CommResult AllReduce(void* data, std::int64_t count, DType dtype, ReduceOp op) override {
    lanes_->Run(Lane::kComm);
    return inner_->AllReduce(data, count, dtype, op);
  }
  CommResult AllGather(const void* send, void* receive, std::int64_t bytes) override {
    lanes_->Run(Lane::kComm);
    return inner_->AllGather(send, receive, bytes);
  }
  CommResult Broadcast(void* data, std::int64_t bytes, int root) override {
    lanes_->Run(Lane::kComm);
    return inner_->Broadcast(data, bytes, root);
  }
  CommResult Barrier() override {
    lanes_->Run(Lane::kComm);
    return inner_->Barrier();
  }
  void Abort() override { inner_->Abort(); }
  CommResult Check() override { return result_; }

  CommResult StartAllToAllV(const AllToAllVArgs& args) override {
    struct Kept {
      std::vector<std::int64_t> send, receive, send_offsets, receive_offsets;
    };
    const auto keep = [](std::span<const std::int64_t> s) {
      return std::vector<std::int64_t>(s.begin(), s.end());
    };
    Kept kept{keep(args.send_bytes), keep(args.receive_bytes), keep(args.send_offsets),
              keep(args.receive_offsets)};
    PeerOffsets offsets(args.receive_bytes, args.receive_offsets);
    for (std::size_t peer = 0; peer < kept.receive.size(); ++peer) {
      std::memset(static_cast<char*>(args.receive) + offsets.Next(peer), kPoison,
                  static_cast<std::size_t>(kept.receive[peer]));
    }
    lanes_->PutOff([this, kept, send = args.send, receive = args.receive] {
      Keep(inner_->AllToAllV({.send = send,
                              .receive = receive,
                              .send_bytes = kept.send,
                              .receive_bytes = kept.receive,
                              .send_offsets = kept.send_offsets,
                              .receive_offsets = kept.receive_offsets}));
    });
    return result_;
  }
  CommResult StartAllReduce(void* data, std::int64_t count, DType dtype, ReduceOp op) override {
    lanes_->PutOff([=, this] { Keep(inner_->AllReduce(data, count, dtype, op)); });
    return result_;
  }
  CommResult StartAllGather(const void* send, void* receive, std::int64_t bytes) override {
    lanes_->PutOff([=, this] { Keep(inner_->AllGather(send, receive, bytes)); });
    return result_;
  }
  void Join() override { lanes_->Run(Lane::kComm); }

 private:
  static constexpr int kPoison = 0xff;  // a NaN in every format

  void Keep(CommResult result) {
    if (result_.ok()) {
      result_ = std::move(result);
    }
  }

  Communicator* const inner_;
  LazyLanes* const lanes_;
  CommResult result_;
};

}  // namespace octavo::testing
