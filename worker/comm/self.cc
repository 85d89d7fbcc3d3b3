#include "worker/comm/self.h"

#include <atomic>
#include <cstring>

#include "base/check.h"

namespace octavo {
namespace {

class SelfCommunicator final : public Communicator {
 public:
  int rank() const override { return 0; }
  int size() const override { return 1; }
  bool device_pointers() const override { return false; }

  CommResult AllToAllV(const AllToAllVArgs& args) override {
    OCTAVO_CHECK_EQ(args.send_bytes.size(), std::size_t{1});
    OCTAVO_CHECK_EQ(args.receive_bytes.size(), std::size_t{1});
    OCTAVO_CHECK_EQ(args.send_bytes[0], args.receive_bytes[0]);
    ++counters_.all_to_all_calls;
    const auto* from = static_cast<const std::uint8_t*>(args.send);
    auto* to = static_cast<std::uint8_t*>(args.receive);
    return Copy(from + (args.send_offsets.empty() ? 0 : args.send_offsets[0]),
                to + (args.receive_offsets.empty() ? 0 : args.receive_offsets[0]),
                args.send_bytes[0]);
  }

  CommResult AllReduce(void*, std::int64_t, DType, ReduceOp) override {
    ++counters_.all_reduce_calls;
    return Result();
  }

  CommResult AllGather(const void* send, void* receive, std::int64_t bytes) override {
    return Copy(send, receive, bytes);
  }

  CommResult Broadcast(void*, std::int64_t, int root) override {
    OCTAVO_CHECK_EQ(root, 0);
    return Result();
  }

  CommResult Barrier() override { return Result(); }

  void Abort() override { aborted_ = true; }

 private:
  CommResult Copy(const void* from, void* to, std::int64_t bytes) {
    if (bytes > 0 && !aborted_) {
      std::memmove(to, from, static_cast<std::size_t>(bytes));
    }
    return Result();
  }

  CommResult Result() const {
    if (aborted_) {
      return {.code = CommResult::Code::kFault, .message = "rank 0: the communicator was aborted"};
    }
    return {};
  }

  std::atomic<bool> aborted_ = false;
};

}  // namespace

std::unique_ptr<Communicator> CreateSelfCommunicator() {
  return std::make_unique<SelfCommunicator>();
}

}  // namespace octavo
