// Workers of another version and with names that break labels and paths were taken in.
#include "gmock/gmock.h"
#include "tests/unit/controller/core/core_harness.h"

namespace octavo {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

class WorkerRegistration : public CoreHarness {
 protected:
  WorkerRegistration() {
    options_.version = "1.4.2";
    Restart();
  }
};

TEST_F(WorkerRegistration, AnotherMinorVersionIsRefusedWithBothNamed) {
  options_.version = "1.5.0";  // what the harness's workers say
  Register("a", 1, "i1", /*heartbeat=*/false);
  EXPECT_THAT(closed_, ElementsAre(testing::AllOf(HasSubstr("1.5.0"), HasSubstr("1.4.2"))));
  EXPECT_TRUE(core_->state().workers.empty());
  options_.version = "1.4.9";  // a patch apart
  Register("a", 1);
  EXPECT_EQ(core_->state().workers.size(), 1u);
}

TEST_F(WorkerRegistration, NamesThatBreakLabelsAndPathsAreRefused) {
  for (const char* name : {"a b", "a/b", "a\nb", "ü", "..", "", "a\"b"}) {
    Register(name, 1, "i1", /*heartbeat=*/false);
    ASSERT_FALSE(closed_.empty()) << name;
    EXPECT_THAT(closed_.back(), HasSubstr("letters, digits")) << name;
    closed_.clear();
  }
  Register("host-1.example_a", 1);
  EXPECT_TRUE(closed_.empty());
}

}  // namespace
}  // namespace octavo
