// A controller that stood still for longer than a lease (SIGSTOP, swap, a slow disk) took its own
// pause for the silence of all its workers and ended every healthy attempt.
#include "gmock/gmock.h"
#include "tests/unit/controller/core/core_harness.h"

namespace octavo {
namespace {

class ControllerPause : public CoreHarness {};

TEST_F(ControllerPause, EndsNoHealthyAttempt) {
  RunOn2Workers();
  Pass(2, {"a", "b"});
  Advance(30);  // three leases in which nothing was read; the heartbeats still wait in the sockets
  Settle();
  EXPECT_EQ(Get("job").state(), v1::RUNNING);
  Pass(3, {"a", "b"});
  EXPECT_EQ(Get("job").state(), v1::RUNNING);
  EXPECT_EQ(Get("job").restarts(), 0);
  EXPECT_THAT(closed_, testing::IsEmpty()) << "no session was closed";
}

TEST_F(ControllerPause, AWorkerThatDiedMeanwhileIsLostALeaseLater) {
  RunOn2Workers();
  Pass(2, {"a", "b"});
  Advance(30);
  Settle();
  Pass(8, {"a"});
  EXPECT_THAT(TakeStops("a"), testing::IsEmpty()) << "8 s of silence that somebody listened to";
  Pass(4, {"a"});
  EXPECT_EQ(TakeStops("a").size(), 1u) << "the gang of the lost rank ends";
}

TEST_F(ControllerPause, IsNoStallOfAGang) {
  v1::JobSpec spec = Spec("meeting");
  spec.mutable_restart()->set_gang_timeout_seconds(20);
  Register("a", 1);
  Register("b", 1);
  ASSERT_TRUE(Submit(spec).ok());
  StartAll("a", internal::v1::RANK_MEETING);
  StartAll("b", internal::v1::RANK_STARTING);
  Pass(2, {"a", "b"});
  Advance(60);
  Settle();
  EXPECT_EQ(Get("meeting").state(), v1::STARTING);
  EXPECT_THAT(TakeStops("a"), testing::IsEmpty());
  Pass(25, {"a", "b"});
  EXPECT_EQ(TakeStops("a").size(), 1u) << "a limit is still a limit";
}

}  // namespace
}  // namespace octavo
