// A communicator whose calls appear in profiles as operations of their own; everything passes
// through. Their time is that of the compute stream between the calls around them, which is right
// for both kinds: NCCL enqueues there, and Gloo makes the stream wait.
#pragma once

#include <cstdint>

#include "worker/comm/communicator.h"
#include "worker/rank/profiler.h"

namespace octavo {

class ProfiledCommunicator final : public Communicator {
 public:
  // Not owned.
  explicit ProfiledCommunicator(Communicator* inner) : inner_(inner) {
    counters_ = inner_->counters();
  }

  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  bool device_pointers() const override { return inner_->device_pointers(); }

  CommResult AllToAllV(const AllToAllVArgs& args) override {
    std::int64_t bytes = 0;
    for (const std::int64_t part : args.send_bytes) {
      bytes += part;
    }
    const OpProfiler::Section section("all_to_all_v", static_cast<double>(bytes));
    return Counted(inner_->AllToAllV(args));
  }
  CommResult AllReduce(void* data, std::int64_t count, DType dtype, ReduceOp op) override {
    const OpProfiler::Section section("all_reduce", static_cast<double>(count * DTypeBytes(dtype)));
    return Counted(inner_->AllReduce(data, count, dtype, op));
  }
  CommResult AllGather(const void* send, void* receive, std::int64_t bytes) override {
    const OpProfiler::Section section("all_gather", static_cast<double>(bytes * size()));
    return Counted(inner_->AllGather(send, receive, bytes));
  }
  CommResult Broadcast(void* data, std::int64_t bytes, int root) override {
    const OpProfiler::Section section("broadcast", static_cast<double>(bytes));
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

  Communicator* const inner_;
};

}  // namespace octavo
