// A communicator whose calls appear in profiles as operations of their own; everything passes
// through. The time of a call is that of the compute lane between the calls around it, which is
// right for both kinds: NCCL's operations make that lane wait, and so does Gloo. What NCCL was
// asked only to start is timed on the communication lane, and the wait for it as
// "wait_for_messages".
#pragma once

#include <cstdint>
#include <numeric>

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
    const OpProfiler::Section section("all_to_all_v", SentBytes(args));
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
  CommResult StartAllToAllV(const AllToAllVArgs& args) override {
    const OpProfiler::Section section("all_to_all_v", SentBytes(args), StartLane());
    return Counted(inner_->StartAllToAllV(args));
  }
  CommResult StartAllReduce(void* data, std::int64_t count, DType dtype, ReduceOp op) override {
    const OpProfiler::Section section("all_reduce", static_cast<double>(count * DTypeBytes(dtype)),
                                      StartLane());
    return Counted(inner_->StartAllReduce(data, count, dtype, op));
  }
  CommResult StartAllGather(const void* send, void* receive, std::int64_t bytes) override {
    const OpProfiler::Section section("all_gather", static_cast<double>(bytes * size()),
                                      StartLane());
    return Counted(inner_->StartAllGather(send, receive, bytes));
  }
  void Join() override {
    if (device_pointers()) {
      const OpProfiler::Section section("wait_for_messages", 0);
      inner_->Join();
    }
  }
  CommResult Broadcast(void* data, std::int64_t bytes, int root) override {
    const OpProfiler::Section section("broadcast", static_cast<double>(bytes));
    return Counted(inner_->Broadcast(data, bytes, root));
  }
  CommResult Barrier() override { return Counted(inner_->Barrier()); }
  void Abort() override { inner_->Abort(); }
  CommResult Check() override { return inner_->Check(); }

 private:
  static double SentBytes(const AllToAllVArgs& args) {
    return static_cast<double>(
        std::accumulate(args.send_bytes.begin(), args.send_bytes.end(), std::int64_t{0}));
  }
  Lane StartLane() const { return device_pointers() ? Lane::kComm : Lane::kCompute; }
  CommResult Counted(CommResult result) {
    counters_ = inner_->counters();
    return result;
  }

  Communicator* const inner_;
};

}  // namespace octavo
