#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sstream>

#include "base/file.h"
#include "base/status.h"
#include "cli/cli.h"
#include "cli/exit_codes.h"
#include "tests/support/temp_dir.h"
#include "tests/unit/cli/fake_controller.h"

namespace octavo {
namespace {

using testing::HasSubstr;
using testing::Not;

class ProfileCommandTest : public testing::Test {
 protected:
  ProfileCommandTest() {
    server_.profile = [this](const v1::ProfileJobRequest& request, v1::JobProfile* profile) {
      asked_ = request;
      *profile = answer_;
      profile->clear_ranks();
      profile->set_complete(false);
      return absl::OkStatus();
    };
    server_.get_profile = [this](const v1::GetProfileRequest& request, v1::JobProfile* profile) {
      EXPECT_EQ(request.id(), 5);
      *profile = answer_;
      // Not there at the first look.
      profile->set_complete(++looks_ > 1 && answer_.complete());
      return absl::OkStatus();
    };
    server_.get = [](const v1::GetJobRequest&, v1::Job* job) {
      job->mutable_spec()->mutable_parallel()->set_ranks(2);
      return absl::OkStatus();
    };
    answer_.set_job("jobs/demo");
    answer_.set_attempt(2);
    answer_.set_id(5);
    answer_.set_ranks_expected(2);
    answer_.set_complete(true);
    for (int r = 0; r < 2; ++r) {
      v1::RankProfile& rank = *answer_.add_ranks();
      rank.set_rank(r);
      rank.set_first_step(11);
      rank.set_steps(2);
      rank.set_seconds(0.2);
      rank.set_backend("cuda");
      Add(rank, "forward", "layer 0", "fc1", "grouped_gemm", 4, r == 1 ? 0.10 : 0.05, 1e9, 2e12);
      Add(rank, "backward", "layer 0", "fc1", "grouped_gemm", 4, 0.02, 1e9, 2e12);
      Add(rank, "optimizer", "", "", "adamw", 2, 0.01, 0, 0);
      Add(rank, "forward", "layer 0", "", "all_to_all_v", 2, r == 1 ? 0.0 : 0.06, 0, 0);
      v1::ProfilePrecision& precision = *rank.add_precision();
      precision.set_layer(0);
      precision.set_op("fc1");
      precision.set_planned("fp8_flow");
      precision.set_executed("fp8_flow");
      precision.set_calls(12);
      precision.set_flops(75);
    }
  }

  static void Add(v1::RankProfile& rank, const std::string& phase, const std::string& layer,
                  const std::string& site, const std::string& op, int calls, double seconds,
                  double bytes, double flops) {
    v1::ProfileEntry& entry = *rank.add_entries();
    entry.set_phase(phase);
    entry.set_layer(layer);
    entry.set_site(site);
    entry.set_op(op);
    entry.set_calls(calls);
    entry.set_seconds(seconds);
    entry.set_bytes(bytes);
    entry.set_flops(flops);
  }

  int Run(std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), {"--controller", server_.address(), "profile", "demo"});
    out_.str("");
    err_.str("");
    return RunCli(arguments, {}, out_, err_);
  }

  FakeController server_;
  v1::ProfileJobRequest asked_;
  v1::JobProfile answer_;
  int looks_ = 0;
  std::ostringstream out_, err_;
};

TEST_F(ProfileCommandTest, ShowsTheBusiestRankByOperation) {
  ASSERT_EQ(Run({"--steps", "2"}), kExitOk) << err_.str();
  EXPECT_EQ(asked_.name(), "jobs/demo");
  EXPECT_EQ(asked_.steps(), 2);
  EXPECT_FALSE(asked_.request_id().empty());
  EXPECT_THAT(out_.str(), HasSubstr("attempt 2, rank 1 (busiest) on cuda, steps 11 to 12, "
                                    "100.0 ms a step"));
  // 0.12 of 0.2 s, 4e12 FLOPs.
  EXPECT_THAT(out_.str(),
              testing::ContainsRegex("grouped_gemm +4 +60\\.000 +60\\.0 % +16\\.7 +33\\.3"));
  EXPECT_THAT(out_.str(), testing::ContainsRegex("adamw +1 +5\\.000 +5\\.0 % +- +-"));
  EXPECT_THAT(out_.str(), testing::ContainsRegex("between operations\\) +0 +35\\.000 +35\\.0 %"));
  EXPECT_THAT(out_.str(), HasSubstr("every product ran in the precision that the plan asks for"));
}

TEST_F(ProfileCommandTest, ShowsLayersAndSitesOfTheRankThatIsNamed) {
  ASSERT_EQ(Run({"--by", "layer", "--rank", "0"}), kExitOk) << err_.str();
  EXPECT_THAT(out_.str(), HasSubstr("rank 0 on cuda"));
  EXPECT_THAT(out_.str(), testing::ContainsRegex("layer 0 +forward +3 +55\\.000"));
  looks_ = 0;
  ASSERT_EQ(Run({"--by", "site", "--limit", "1"}), kExitOk) << err_.str();
  EXPECT_THAT(out_.str(), testing::ContainsRegex("fc1 +forward +grouped_gemm"));
  EXPECT_THAT(out_.str(), HasSubstr("(3 more)"));
}

TEST_F(ProfileCommandTest, ARankThatTheJobLacksIsRefusedBeforeAnythingIsAsked) {
  EXPECT_EQ(Run({"--rank", "7"}), kExitUsage);
  EXPECT_THAT(err_.str(), HasSubstr("--rank 7 does not exist; valid: 0 to 1"));
  EXPECT_EQ(asked_.name(), "") << "no profile of somebody else is replaced";
  EXPECT_EQ(Run({"--rank", "-1"}), kExitUsage);
}

TEST_F(ProfileCommandTest, NamesProductsThatFellBack) {
  v1::ProfilePrecision& fallen = *answer_.mutable_ranks(0)->add_precision();
  fallen.set_layer(3);
  fallen.set_op("fc2");
  fallen.set_planned("fp8_flow");
  fallen.set_executed("bf16");
  fallen.set_reason("retry after a non-finite value");
  fallen.set_calls(3);
  fallen.set_flops(50);
  ASSERT_EQ(Run({}), kExitOk) << err_.str();
  EXPECT_THAT(out_.str(),
              testing::ContainsRegex(
                  "3 +fc2 +fp8_flow +bf16 +retry after a non-finite value +3 +25\\.0 %"));
  EXPECT_THAT(out_.str(), Not(HasSubstr("every product ran")));
}

TEST_F(ProfileCommandTest, WritesAllRanksAsJson) {
  const TempDir dir;
  ASSERT_EQ(Run({"--output", dir.File("p.json")}), kExitOk) << err_.str();
  const auto text = PosixFileSystem::Get().ReadFile(dir.File("p.json"));
  ASSERT_TRUE(text.ok()) << ToString(text.status());
  EXPECT_THAT(*text, HasSubstr("\"all_to_all_v\""));
  EXPECT_THAT(*text, HasSubstr("\"rank\": 1"));
}

TEST_F(ProfileCommandTest, SaysWhatIsMissingWhenTheAttemptEndsOrTimePasses) {
  answer_.set_complete(false);
  answer_.mutable_ranks()->RemoveLast();
  EXPECT_EQ(Run({"--timeout", "1"}), kExitUnavailable);
  EXPECT_THAT(err_.str(), HasSubstr("1 of 2 ranks answered within 1 s"));
  answer_.set_over(true);
  EXPECT_EQ(Run({}), kExitConflict);
  EXPECT_THAT(err_.str(), HasSubstr("attempt 2 ended after 1 of 2 ranks had answered"));
}

TEST_F(ProfileCommandTest, ARankThatMeasuredNothingIsAnErrorWithItsReason) {
  answer_.mutable_ranks(1)->set_error("no room for the marks of a step on the device");
  EXPECT_EQ(Run({"--rank", "1"}), kExitInternal);
  EXPECT_THAT(err_.str(), HasSubstr("no room for the marks"));
}

}  // namespace
}  // namespace octavo
