// A communicator that measures how long its all-to-alls take; everything else passes through. For
// host communicators, whose calls return when the data is there (NCCL's only enqueue).
#pragma once

#include <chrono>
#include <memory>
#include <utility>

#include "worker/comm/communicator.h"

namespace octavo {

// Adds to *seconds, which outlives it.
class TimedCommunicator final : public Communicator {
 public:
  TimedCommunicator(std::unique_ptr<Communicator> inner, double* seconds)
      : inner_(std::move(inner)), seconds_(seconds) {}

  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  bool device_pointers() const override { return inner_->device_pointers(); }

  CommResult AllToAllV(const AllToAllVArgs& args) override {
    const auto begin = std::chrono::steady_clock::now();
    CommResult result = Counted(inner_->AllToAllV(args));
    *seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    return result;
  }
  CommResult AllReduce(void* data, std::int64_t count, DType dtype, ReduceOp op) override {
    return Counted(inner_->AllReduce(data, count, dtype, op));
  }
  CommResult AllGather(const void* send, void* receive, std::int64_t bytes) override {
    return Counted(inner_->AllGather(send, receive, bytes));
  }
  CommResult Broadcast(void* data, std::int64_t bytes, int root) override {
    return Counted(inner_->Broadcast(data, bytes, root));
  }
  CommResult Barrier() override { return Counted(inner_->Barrier()); }
  void Abort() override { inner_->Abort(); }
  CommResult Check() override { return inner_->Check(); }

 private:
  CommResult Counted(CommResult result) {
    counters_ = inner_->counters();
    return result;
  }

  const std::unique_ptr<Communicator> inner_;
  double* const seconds_;
};

}  // namespace octavo
