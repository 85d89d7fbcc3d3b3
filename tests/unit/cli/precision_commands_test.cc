// octavo precision auto|pin|replay|diff|rollback|history, fp8, events and explain against a
// controller in this process: what is sent, what is printed, and the exit status.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "base/status.h"
#include "base/str.h"
#include "cli/cli.h"
#include "cli/exit_codes.h"
#include "proto/convert/precision.h"
#include "tests/support/temp_dir.h"
#include "tests/unit/cli/fake_controller.h"

namespace octavo {
namespace {

using testing::HasSubstr;
using testing::Not;

struct Result {
  int code;
  std::string out, err;
  nlohmann::json json() const { return nlohmann::json::parse(out); }
};

class PrecisionCommands : public testing::Test {
 protected:
  Result Run(std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), {"--controller", server_.address()});
    std::ostringstream out, err;
    const int code = RunCli(arguments, {}, out, err);
    return {code, out.str(), err.str()};
  }

  // Version 1: all fp8_flow; 2: layer 1 fc1 in bf16. A page each.
  void ServePlans() {
    server_.plans = [](const v1::ListPlansRequest& request, v1::ListPlansResponse* response) {
      EXPECT_EQ(request.name(), "jobs/demo");
      PrecisionPlan plan = BuildPlan(3, DefaultRecipe(RecipeKind::kFp8Flow), 0, {});
      plan.version = 1;
      if (request.page_token().empty()) {
        plan.version = 2;
        plan.At(1, Op::kFc1) = DefaultRecipe(RecipeKind::kBf16);
        plan.author = PlanAuthor::kPolicy;
        plan.reason = "layer 1 fc1 input: flushed 0.12 > 0.05: fp8_flow → bf16";
        response->set_next_page_token("more");
      }
      *response->add_plans() = PlanToWire(plan);
      response->mutable_plans(0)->set_applied_step(plan.version * 10);
      return absl::OkStatus();
    };
  }

  static absl::Status NotFound() {
    return NotFoundError("jobs/demo does not exist; octavo list shows the jobs");
  }

  FakeController server_;
  TempDir dir_;
};

TEST_F(PrecisionCommands, AutoAndPinSendTheirActionLayersAndOps) {
  v1::SetPolicyRequest got;
  server_.set_policy = [&](const v1::SetPolicyRequest& request, v1::JobPrecision* response) {
    got = request;
    response->set_policy_enabled(request.action() != v1::SetPolicyRequest::OFF);
    v1::PolicySite& site = *response->add_sites();
    site.set_layer(3);
    site.set_op("fc2");
    site.set_status(request.action() == v1::SetPolicyRequest::PIN ? "pinned" : "operator");
    return absl::OkStatus();
  };
  Result result = Run({"precision", "pin", "demo", "--layers", "2-3", "--ops", "fc1,fc2",
                       "--reason", "mine", "--etag", "p4", "--request-id", "r1"});
  EXPECT_EQ(result.code, kExitOk) << result.err;
  EXPECT_EQ(got.name(), "jobs/demo");
  EXPECT_EQ(got.action(), v1::SetPolicyRequest::PIN);
  EXPECT_EQ(got.layers(), "2-3");
  EXPECT_EQ(StrJoin(got.ops(), " "), "fc1 fc2");
  EXPECT_EQ(got.reason(), "mine");
  EXPECT_EQ(got.etag(), "p4");
  EXPECT_EQ(got.request_id(), "r1");
  EXPECT_THAT(result.out, HasSubstr("policy on\n"));
  EXPECT_THAT(result.out, testing::ContainsRegex("    3  fc2  pinned *\n"));
  EXPECT_THAT(result.out,
              HasSubstr("octavo precision auto on demo --layers 2-3 --ops fc1,fc2\n"));
  result = Run({"precision", "auto", "off", "demo"});
  EXPECT_EQ(result.code, kExitOk);
  EXPECT_EQ(got.action(), v1::SetPolicyRequest::OFF);
  EXPECT_FALSE(got.request_id().empty()) << "a retry must not count twice";
  EXPECT_THAT(result.out, HasSubstr("policy off\n"));
  result = Run({"precision", "auto", "on", "demo", "--layers", "3", "-o", "json"});
  EXPECT_EQ(got.action(), v1::SetPolicyRequest::ON);
  EXPECT_EQ(result.json()["policy_enabled"], true);
  EXPECT_EQ(result.json()["sites"][0]["op"], "fc2");
  EXPECT_EQ(Run({"precision", "auto", "maybe", "demo"}).code, kExitUsage);
  EXPECT_EQ(Run({"precision", "auto", "on"}).code, kExitUsage);
  EXPECT_EQ(Run({"precision", "pin"}).code, kExitUsage);
}

TEST_F(PrecisionCommands, AStaleEtagAndAnEndedJobAreConflicts) {
  server_.set_policy = [](const v1::SetPolicyRequest&, v1::JobPrecision*) {
    return AbortedError("the plan of jobs/demo has changed: etag p1 was given, it is p2 now");
  };
  Result result = Run({"precision", "pin", "demo", "--etag", "p1"});
  EXPECT_EQ(result.code, kExitConflict);
  EXPECT_THAT(result.err, HasSubstr("it is p2 now"));
  EXPECT_EQ(result.out, "");
  server_.set_policy = [](const v1::SetPolicyRequest&, v1::JobPrecision*) {
    return FailedPreconditionError("jobs/demo is SUCCEEDED; its policy has nothing to decide");
  };
  EXPECT_EQ(Run({"precision", "auto", "off", "demo"}).code, kExitConflict);
}

TEST_F(PrecisionCommands, ReplaySendsThePolicyOfTheFileAndPrintsDecisions) {
  v1::ReplayPolicyRequest got;
  server_.replay = [&](const v1::ReplayPolicyRequest& request, v1::ReplayPolicyResponse* response) {
    got = request;
    response->set_snapshots(40);
    response->set_steps(400);
    response->set_first_step(1);
    response->set_last_step(400);
    v1::PolicyDecision& decision = *response->add_decisions();
    decision.set_step(210);
    decision.set_direction("fallback");
    decision.set_layer(2);
    decision.set_op("fc1");
    decision.set_signal("flushed");
    decision.set_reason("layer 2 fc1 input: flushed 0.12 > 0.05");
    response->add_alerts("layer 0 fc1 input: amax_jump 12 > 10");
    return absl::OkStatus();
  };
  std::ofstream(dir_.File("policy.yaml")) << "grace_steps: 5\nflushed_ratio: 0.01\n";
  Result result = Run({"precision", "replay", "demo", "--policy", dir_.File("policy.yaml")});
  EXPECT_EQ(result.code, kExitOk) << result.err;
  EXPECT_EQ(got.policy().grace_steps(), 5);
  EXPECT_THAT(result.out,
              HasSubstr("replayed 40 snapshots and 400 steps (1 to 400): 1 decision\n"));
  EXPECT_THAT(result.out, HasSubstr(" 210  fallback      2  fc1  flushed  layer 2 fc1 input: "
                                    "flushed 0.12 > 0.05\n"));
  EXPECT_THAT(result.out, HasSubstr("alert: layer 0 fc1 input: amax_jump 12 > 10\n"));
  result = Run({"precision", "replay", "demo", "-o", "json"});
  EXPECT_FALSE(got.has_policy()) << "without a file the job's own policy is meant";
  EXPECT_EQ(result.json()["decisions"][0]["signal"], "flushed");
}

TEST_F(PrecisionCommands, AWrongPolicyFileNeverReachesTheController) {
  server_.replay = [](const v1::ReplayPolicyRequest&, v1::ReplayPolicyResponse*) {
    ADD_FAILURE() << "sent";
    return absl::OkStatus();
  };
  EXPECT_EQ(Run({"precision", "replay", "demo", "--policy", dir_.File("none")}).code,
            kExitNotFound);
  std::ofstream(dir_.File("policy.yaml")) << "grace_stps: 5\n";
  const Result result = Run({"precision", "replay", "demo", "--policy", dir_.File("policy.yaml")});
  EXPECT_EQ(result.code, kExitUsage);
  EXPECT_THAT(result.err, HasSubstr("grace_stps"));
  EXPECT_THAT(result.err, HasSubstr("grace_steps"));
}

TEST_F(PrecisionCommands, ReplayWithoutTelemetryIsAConflictThatSaysWhy) {
  server_.replay = [](const v1::ReplayPolicyRequest&, v1::ReplayPolicyResponse*) {
    return FailedPreconditionError("no telemetry of jobs/demo is kept");
  };
  const Result result = Run({"precision", "replay", "demo"});
  EXPECT_EQ(result.code, kExitConflict);
  EXPECT_THAT(result.err, HasSubstr("no telemetry of jobs/demo is kept"));
}

TEST_F(PrecisionCommands, HistoryAndDiffReadAllPages) {
  ServePlans();
  Result result = Run({"precision", "history", "demo"});
  EXPECT_EQ(result.code, kExitOk) << result.err;
  EXPECT_THAT(result.out, HasSubstr("      2  policy"));
  EXPECT_THAT(result.out, HasSubstr("      1  spec"));
  EXPECT_EQ(Run({"precision", "history", "demo", "-o", "json"}).json()["plans"].size(), 2u);
  result = Run({"precision", "diff", "demo", "1", "2"});
  EXPECT_EQ(result.code, kExitOk) << result.err;
  EXPECT_THAT(result.out, HasSubstr("    1  fc1  fp8_flow  bf16\n"));
  result = Run({"precision", "diff", "demo", "2", "1", "-o", "json"});
  EXPECT_EQ(result.json()["changes"],
            nlohmann::json::parse(
                R"([{"layer": 1, "op": "fc1", "before": "bf16", "after": "fp8_flow"}])"));
  EXPECT_EQ(Run({"precision", "diff", "demo", "2", "2"}).out, "no difference\n");
  result = Run({"precision", "diff", "demo", "1", "9"});
  EXPECT_EQ(result.code, kExitNotFound);
  EXPECT_THAT(result.err, HasSubstr("no plan version 9"));
  EXPECT_EQ(Run({"precision", "diff", "demo", "1"}).code, kExitUsage);
}

TEST_F(PrecisionCommands, RollbackNamesItsVersionAndADryRunChangesNothing) {
  v1::SetPrecisionRequest got;
  server_.set = [&](const v1::SetPrecisionRequest& request, v1::SetPrecisionResponse* response) {
    got = request;
    response->mutable_plan()->set_version(7);
    v1::LayerOpRecipe& change = *response->add_changed();
    change.set_layer(1);
    change.set_op("fc1");
    change.mutable_recipe()->set_kind("fp8_flow");
    response->add_warnings("layer 0 is protected");
    return absl::OkStatus();
  };
  Result result = Run({"precision", "rollback", "demo", "--to", "1", "--dry-run", "--etag", "p6"});
  EXPECT_EQ(result.code, kExitOk) << result.err;
  EXPECT_EQ(got.rollback_to(), 1);
  EXPECT_TRUE(got.validate_only());
  EXPECT_EQ(got.etag(), "p6");
  EXPECT_THAT(result.out, HasSubstr("valid; it would be plan version 7\n"));
  EXPECT_THAT(result.out, HasSubstr("warning: layer 0 is protected\n"));
  EXPECT_THAT(result.out, HasSubstr("no telemetry is stored yet"));
  EXPECT_THAT(result.out, Not(HasSubstr("back to the policy"))) << "nothing was changed";
  result = Run({"precision", "rollback", "demo", "--to", "1"});
  EXPECT_FALSE(got.validate_only());
  EXPECT_THAT(result.out, HasSubstr("plan version 7; ranks apply it at their next step\n"));
  EXPECT_THAT(result.out,
              HasSubstr("back to the policy: octavo precision auto on demo --layers 1\n"));
  EXPECT_EQ(Run({"precision", "rollback", "demo", "--to", "0"}).code, kExitUsage);
  EXPECT_EQ(Run({"precision", "rollback", "demo"}).code, kExitUsage);
  server_.set = [](const v1::SetPrecisionRequest&, v1::SetPrecisionResponse*) {
    return InvalidArgumentError("plan version 9 does not exist; valid is 1 to 6");
  };
  result = Run({"precision", "rollback", "demo", "--to", "9"});
  EXPECT_EQ(result.code, kExitUsage);
  EXPECT_THAT(result.err, HasSubstr("valid is 1 to 6"));
}

TEST_F(PrecisionCommands, TheListShowsTheRecipesThatRanksReport) {
  server_.list = [](const v1::ListJobsRequest&, v1::ListJobsResponse* response) {
    for (const char* summary : {"", "fp8_flow 4/6 layers, bf16 2/6"}) {
      v1::Job& job = *response->add_jobs();
      job.set_name("jobs/demo");
      job.mutable_spec()->mutable_precision()->set_recipe("auto");
      job.mutable_progress()->set_recipe_summary(summary);
    }
    return absl::OkStatus();
  };
  const Result result = Run({"list"});
  EXPECT_EQ(result.code, kExitOk) << result.err;
  EXPECT_THAT(result.out, HasSubstr("  fp8_flow 4/6, bf16 2/6  "));
  EXPECT_THAT(result.out, HasSubstr("  auto  ")) << "before ranks have reported";
}

TEST_F(PrecisionCommands, AWrongOutputFormatNamesTheValidOnes) {
  const Result result = Run({"list", "-o", "xml"});
  EXPECT_EQ(result.code, kExitUsage);
  EXPECT_THAT(result.err, HasSubstr("found \"xml\"; valid: json, table"));
  EXPECT_THAT(result.err, Not(HasSubstr("->")));
  const Result exported = Run({"export", "a", "b", "--format", "fp4"});
  EXPECT_EQ(exported.code, kExitUsage);
  EXPECT_THAT(exported.err, HasSubstr("found \"fp4\"; valid: bf16, fp8"));
}

TEST_F(PrecisionCommands, Fp8PrintsTheWorstTensorsWithTheReason) {
  v1::GetHealthRequest got;
  server_.health = [&](const v1::GetHealthRequest& request, v1::JobHealth* response) {
    got = request;
    response->set_job("jobs/demo");
    response->set_first_step(11);
    response->set_last_step(20);
    response->set_plan_version(3);
    response->set_tensors_total(42);
    v1::TensorRank& t = *response->add_tensors();
    t.set_severity(1.5);
    t.set_layer(2);
    t.set_op("fc2");
    t.set_tensor("input");
    t.set_recipe("fp8_delayed");
    t.set_shadow(true);
    t.set_sqnr_db(24.25);
    t.set_amax(12.5);
    t.set_reason("SQNR 24.3 dB (limit 25 dB)");
    return absl::OkStatus();
  };
  Result result = Run({"fp8", "demo", "--limit", "3"});
  EXPECT_EQ(result.code, kExitOk) << result.err;
  EXPECT_EQ(got.limit(), 3);
  EXPECT_THAT(result.out,
              HasSubstr("demo, steps 11 to 20, plan version 3, 42 quantised tensors\n"));
  EXPECT_THAT(result.out,
              HasSubstr("1.50      2  fc2  input   fp8_delayed (shadow)     24.2  12.5  "
                        "SQNR 24.3 dB (limit 25 dB)\n"));
  EXPECT_EQ(Run({"fp8", "demo", "-o", "json"}).json()["tensors"][0]["op"], "fc2");
  EXPECT_EQ(Run({"fp8", "demo", "--limit", "0"}).code, kExitUsage);
  server_.health = [](const v1::GetHealthRequest&, v1::JobHealth* response) {
    response->set_job("jobs/demo");
    return absl::OkStatus();
  };
  EXPECT_THAT(Run({"fp8", "demo"}).out, HasSubstr("no tensor runs in FP8 and none is measured\n"));
  server_.health = [](const v1::GetHealthRequest&, v1::JobHealth*) { return NotFound(); };
  result = Run({"fp8", "demo"});
  EXPECT_EQ(result.code, kExitNotFound);
  EXPECT_THAT(result.err, HasSubstr("does not exist"));
}

TEST_F(PrecisionCommands, EventsArePagedAndHostileTextIsHarmless) {
  server_.events = [](const v1::ListEventsRequest& request, v1::ListEventsResponse* response) {
    EXPECT_EQ(request.name(), "jobs/demo");
    v1::JobEvent& event = *response->add_events();
    if (request.page_token().empty()) {
      event.set_revision(4);
      event.set_kind("STATE");
      event.set_state(v1::RUNNING);
      response->set_next_page_token("more");
    } else {
      event.set_revision(9);
      event.set_kind("WARNING");
      event.set_step(120);
      event.set_message("\x1b[31mred");
    }
    return absl::OkStatus();
  };
  Result result = Run({"events", "demo"});
  EXPECT_EQ(result.code, kExitOk) << result.err;
  EXPECT_THAT(result.out, HasSubstr("4  STATE          RUNNING\n"));
  EXPECT_THAT(result.out, HasSubstr("9  WARNING   120  ?[31mred\n"));
  EXPECT_THAT(result.out, Not(HasSubstr("\x1b")));
  result = Run({"events", "demo", "-o", "json"});
  EXPECT_EQ(result.json()["events"].size(), 2u);
  EXPECT_EQ(result.json()["events"][1]["step"], 120);
  server_.events = [](const v1::ListEventsRequest&, v1::ListEventsResponse*) { return NotFound(); };
  EXPECT_EQ(Run({"events", "demo"}).code, kExitNotFound);
  EXPECT_EQ(Run({"events"}).code, kExitUsage);
}

TEST_F(PrecisionCommands, ExplainTellsTheStoryFromFourCalls) {
  ServePlans();
  server_.get = [](const v1::GetJobRequest&, v1::Job* job) {
    job->set_name("jobs/demo");
    job->set_state(v1::RUNNING);
    return absl::OkStatus();
  };
  server_.events = [](const v1::ListEventsRequest&, v1::ListEventsResponse* response) {
    v1::JobEvent& event = *response->add_events();
    event.set_kind("WARNING");
    event.set_step(15);
    event.set_message("\x1b[2Jrank 1 is slow");
    return absl::OkStatus();
  };
  server_.precision = [](const v1::GetPrecisionRequest&, v1::JobPrecision* response) {
    response->set_policy_enabled(true);
    return absl::OkStatus();
  };
  Result result = Run({"explain", "demo"});
  EXPECT_EQ(result.code, kExitOk) << result.err;
  EXPECT_EQ(
      result.out,
      "demo is RUNNING.\n"
      "Plan version 1 comes from the job's specification, all ranks run it from step 10: from the "
      "job's specification: fp8_flow.\n"
      "Layer 1 fc1 fell from fp8_flow to bf16 at step 20, because of flushed in its input, "
      "0.12 (limit 0.05).\n"
      "At step 15: ?[2Jrank 1 is slow.\n");
  const Result all = Run({"explain", "demo", "--all"});
  EXPECT_THAT(all.out, HasSubstr("Plan version 2 comes from the policy, all ranks run it from step "
                                 "20: layer 1 fc1 input: flushed 0.12 > 0.05"));
  EXPECT_EQ(Run({"explain", "demo", "-o", "json"}).json()["sentences"].size(), 4u);
  server_.precision = [](const v1::GetPrecisionRequest&, v1::JobPrecision*) {
    return InternalError("broken");
  };
  result = Run({"explain", "demo"});
  EXPECT_EQ(result.code, kExitInternal);
  EXPECT_EQ(result.out, "") << "no half story";
  server_.get = [](const v1::GetJobRequest&, v1::Job*) { return NotFound(); };
  EXPECT_EQ(Run({"explain", "demo"}).code, kExitNotFound);
}

}  // namespace
}  // namespace octavo
