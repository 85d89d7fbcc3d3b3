#include "worker/comm/self.h"

#include <gtest/gtest.h>

#include <vector>

#include "base/status.h"
#include "worker/comm/comm_status.h"

namespace octavo {
namespace {

TEST(SelfCommunicator, CollectivesOfOneRankAreCopies) {
  const auto self = CreateSelfCommunicator();
  EXPECT_EQ(self->rank(), 0);
  EXPECT_EQ(self->size(), 1);
  const std::vector<int> send = {1, 2, 3};
  std::vector<int> receive(3, 0);
  const std::vector<std::int64_t> bytes = {12};
  EXPECT_TRUE(self->AllToAllV({.send = send.data(),
                               .receive = receive.data(),
                               .send_bytes = bytes,
                               .receive_bytes = bytes})
                  .ok());
  EXPECT_EQ(receive, send);
  receive.assign(3, 0);
  EXPECT_TRUE(self->AllGather(send.data(), receive.data(), 12).ok());
  EXPECT_EQ(receive, send);
  double x = 2.5;
  EXPECT_TRUE(self->AllReduce(&x, 1, DType::kF64, ReduceOp::kSum).ok());
  EXPECT_EQ(x, 2.5);
  EXPECT_TRUE(self->Broadcast(&x, 8, 0).ok());
  EXPECT_TRUE(self->Barrier().ok());
  EXPECT_EQ(self->counters().all_to_all_bytes, 0) << "nothing left this rank";
  EXPECT_EQ(self->counters().all_to_all_calls, 1);
}

TEST(SelfCommunicator, FailsAfterAbort) {
  const auto self = CreateSelfCommunicator();
  self->Abort();
  EXPECT_FALSE(self->Barrier().ok());
}

TEST(CommStatus, MapsEveryCode) {
  EXPECT_TRUE(ToStatus(CommResult{}).ok());
  const auto code = [](CommResult::Code c) {
    return ToStatus(CommResult{.code = c, .message = "m"}).code();
  };
  EXPECT_EQ(code(CommResult::Code::kTimeout), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(code(CommResult::Code::kPeerLost), absl::StatusCode::kUnavailable);
  EXPECT_EQ(code(CommResult::Code::kFault), absl::StatusCode::kInternal);
}

}  // namespace
}  // namespace octavo
