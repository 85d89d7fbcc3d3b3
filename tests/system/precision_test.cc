// Precision as scheduled state, with real processes: operators switch, the policy falls back and
// returns, ranks always agree. Faults go into tensors of octavo-rank-test (tests/support/inject),
// never into metrics, so every decision comes through the real path.
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <csignal>
#include <map>
#include <random>
#include <set>
#include <thread>

#include "proto/precision/op_id.h"
#include "tests/system/temp_cluster.h"

namespace octavo {
namespace {

// A policy that decides within a test's patience. The gradients of so small a model swing by more than
// ten times in its first steps; the signals about amax are set beyond that and far below a fault of
// 2^20. All other thresholds are the defaults.
constexpr char kQuickPolicy[] =
    "  protect: 0\n"
    "  policy: {grace_steps: 10, hold_steps: 10, healthy_snapshots: 2, amax_jump: 1000, "
    "amax_variation: 1000, dequant_scale_ratio: 1000}\n";
constexpr char kNoPolicy[] =
    "  protect: 0\n"
    "  policy: {enabled: false, checkpoint_before_switch: false}\n";

ClusterOptions WithFaults(int workers = 1) {
  return {.workers = workers,
          .slots = 2,
          .worker_flags = {"--rank-binary", std::string(OCTAVO_BIN_DIR) + "/octavo-rank-test"}};
}

// One rank, two layers, with a fault.
std::string FaultySpec(const TempCluster& cluster, const std::string& name, int steps,
                       const std::string& recipe, const std::string& fault,
                       const std::string& precision = kQuickPolicy) {
  return cluster.Spec({.name = name,
                       .steps = steps,
                       .ranks = 1,
                       .expert_parallel = 1,
                       .layers = 2,
                       .recipe = recipe,
                       .checkpoint_interval = 0,
                       .restart_max = 0,
                       .extra = fault.empty() ? "" : "labels: {inject.0: \"" + fault + "\"}\n",
                       .precision_extra = precision});
}

std::vector<v1::PrecisionPlan> Plans(TempCluster& cluster, const std::string& job) {
  v1::ListPlansRequest request;
  request.set_name("jobs/" + job);
  request.set_page_size(1000);
  v1::ListPlansResponse response;
  grpc::ClientContext context;
  context.set_wait_for_ready(true);
  const grpc::Status status = cluster.stub().ListPlans(&context, request, &response);
  EXPECT_TRUE(status.ok()) << status.error_message();
  return {response.plans().rbegin(), response.plans().rend()};  // oldest first
}

v1::JobPrecision Precision(TempCluster& cluster, const std::string& job) {
  v1::GetPrecisionRequest request;
  request.set_name("jobs/" + job);
  v1::JobPrecision response;
  grpc::ClientContext context;
  context.set_wait_for_ready(true);
  const grpc::Status status = cluster.stub().GetPrecision(&context, request, &response);
  EXPECT_TRUE(status.ok()) << status.error_message();
  return response;
}

grpc::Status Set(TempCluster& cluster, const std::string& job, const std::string& layers,
                 const std::vector<std::string>& ops, const std::string& recipe,
                 const std::string& etag, v1::SetPrecisionResponse* response) {
  static std::atomic<int> counter{0};
  v1::SetPrecisionRequest request;
  request.set_name("jobs/" + job);
  request.set_request_id("set-" + std::to_string(++counter));
  request.set_etag(etag);
  v1::PrecisionOverride& change = *request.add_overrides();
  change.set_layers(layers);
  for (const std::string& op : ops) {
    change.add_ops(op);
  }
  change.mutable_recipe()->set_kind(recipe);
  grpc::ClientContext context;
  context.set_wait_for_ready(true);
  return cluster.stub().SetPrecision(&context, request, response);
}

std::function<bool(const v1::Job&)> Runs(std::int64_t version) {
  return [version](const v1::Job& job) {
    return job.progress().plan_version() >= version || IsTerminal(job);
  };
}

// version → first step, as each rank's own log tells it.
std::vector<std::map<int, int>> AppliedByRank(TempCluster& cluster, const std::string& job,
                                              int ranks) {
  std::vector<std::map<int, int>> applied(static_cast<std::size_t>(ranks));
  for (int rank = 0; rank < ranks; ++rank) {
    const CliResult logs = cluster.Cli({"logs", job, "--rank", std::to_string(rank)});
    EXPECT_EQ(logs.exit_code, 0) << logs.err;
    std::size_t at = 0;
    while ((at = logs.out.find("plan_applied", at)) != std::string::npos) {
      const std::size_t version = logs.out.find("version=", at);
      const std::size_t step = logs.out.find("first_step=", at);
      if (version == std::string::npos || step == std::string::npos) {
        break;
      }
      applied[static_cast<std::size_t>(rank)][std::atoi(logs.out.c_str() + version + 8)] =
          std::atoi(logs.out.c_str() + step + 11);
      at += 12;
    }
  }
  return applied;
}

// The recipe kind of (layer, op) in a plan.
std::string KindAt(const v1::PrecisionPlan& plan, int layer, Op op) {
  return plan.entries(layer * kOpCount + static_cast<int>(op)).recipe().kind();
}

// Losses by step, from the events of a watch, until the job ends.
std::map<std::int64_t, double> Losses(TempCluster& cluster, const std::string& job) {
  std::map<std::int64_t, double> losses;
  cluster.WaitFor(
      job,
      [&losses](const v1::Job& j) {
        losses[j.progress().step()] = j.progress().loss();
        return IsTerminal(j);
      },
      "the end");
  return losses;
}

TEST(Precision, AnOperatorSwitchesMidRunBothWaysWithoutRestartAndRanksAgree) {
  TempCluster cluster({.workers = 2});
  const auto spec = [&](const std::string& name) {
    return cluster.Spec({.name = name, .steps = 300, .precision_extra = kNoPolicy});
  };
  cluster.Submit(spec("plain"));
  const std::map<std::int64_t, double> plain = Losses(cluster, "plain");

  cluster.Submit(spec("test"));
  cluster.WaitFor("test", Reaches(2), "step 2");  // ranks run version 1
  std::map<std::int64_t, double> losses;
  std::thread watcher([&] { losses = Losses(cluster, "test"); });
  // A per-tensor recipe is no payload: dispatch keeps its own.
  const std::vector<std::string> products = {"attn_qkv", "attn_out", "fc1", "fc2"};
  const std::vector<std::tuple<std::string, std::vector<std::string>, std::string>> switches = {
      {"0-2", {}, "fp8_flow"},          {"1", {"attn_qkv", "fc1"}, "fp8_delayed"},
      {"0-2", {}, "bf16"},              {"2", {"fc1", "fc2"}, "fp8_blockwise"},
      {"0-1", products, "fp8_current"}, {"0-2", products, "fp8_delayed"},
      {"0-2", {}, "fp8_blockwise"}};
  std::int64_t version = 1;
  for (const auto& [layers, ops, recipe] : switches) {
    if (version == 1) {  // once as people do it
      const CliResult set = cluster.Cli({"precision", "set", "test", "--layers", layers, "--recipe",
                                         recipe, "--reason", "system test"});
      ASSERT_EQ(set.exit_code, 0) << set.out << set.err;
    } else {
      v1::SetPrecisionResponse response;
      const grpc::Status set = Set(cluster, "test", layers, ops, recipe, "", &response);
      ASSERT_TRUE(set.ok()) << set.error_message();
    }
    ++version;
    cluster.WaitFor("test", Runs(version), "plan version " + std::to_string(version));
  }
  watcher.join();
  const v1::Job job = cluster.WaitForEnd("test");
  ASSERT_EQ(job.state(), v1::SUCCEEDED) << job.message();
  EXPECT_EQ(job.attempts_size(), 1);
  EXPECT_EQ(job.progress().step(), 300);
  EXPECT_EQ(job.progress().retried_steps() + job.progress().skipped_steps(), 0);

  const auto plans = Plans(cluster, "test");
  ASSERT_EQ(plans.size(), switches.size() + 1);
  const auto applied = AppliedByRank(cluster, "test", 2);
  EXPECT_EQ(applied[0], applied[1]);
  std::int64_t before = 0;
  for (const v1::PrecisionPlan& plan : plans) {
    EXPECT_GT(plan.applied_step(), before) << "version " << plan.version();
    before = plan.applied_step();
    if (plan.version() > 1) {
      EXPECT_EQ(plan.author(), v1::PLAN_AUTHOR_OPERATOR);
      EXPECT_EQ(applied[0].at(static_cast<int>(plan.version())), plan.applied_step());
    }
  }
  // Losses follow the undisturbed run of the same data; trajectories drift apart by some per cent.
  for (const auto& [step, loss] : losses) {
    if (step > 0 && plain.contains(step)) {
      EXPECT_NEAR(loss, plain.at(step), 0.1 * plain.at(step)) << "step " << step;
    }
  }
  EXPECT_GT(losses.size(), 20u);
  // The recipe in force is what ranks report.
  const v1::JobPrecision precision = Precision(cluster, "test");
  EXPECT_EQ(precision.effective().plan_version(), plans.back().version());
  EXPECT_EQ(precision.effective().mismatches_size(), 0);
}

TEST(Precision, TwoHundredRandomSwitchesInOneRun) {
  TempCluster cluster({.workers = 1, .slots = 2});
  cluster.Submit(cluster.Spec(
      {.steps = 100000, .layers = 2, .checkpoint_interval = 0, .precision_extra = kNoPolicy}));
  cluster.WaitFor("test", Reaches(2), "step 2");
  std::mt19937 random(20261129);
  const std::vector<std::string> recipes = {"bf16", "fp8_current", "fp8_delayed", "fp8_blockwise",
                                            "fp8_flow"};
  const std::vector<std::string> ops = {"attn_qkv", "attn_out", "fc1", "fc2"};
  int made = 0;
  std::int64_t version = 1;
  while (made < 200) {
    std::vector<std::string> some;
    for (const std::string& op : ops) {
      if (random() % 2 == 0) {
        some.push_back(op);
      }
    }
    if (some.empty()) {
      continue;
    }
    v1::SetPrecisionResponse response;
    const grpc::Status status = Set(cluster, "test", std::to_string(random() % 2), some,
                                    recipes[random() % recipes.size()], "", &response);
    if (status.error_message().find("nothing would change") != std::string::npos) {
      continue;
    }
    ASSERT_TRUE(status.ok()) << status.error_message();
    version = response.plan().version();
    // Every fourth is waited for; the others may overtake each other, which is allowed too.
    if (++made % 4 == 0) {
      const v1::Job job = cluster.WaitFor("test", Runs(version), "the switch");
      ASSERT_FALSE(IsTerminal(job)) << job.message();
    }
  }
  EXPECT_EQ(version, 201);
  const v1::Job job = cluster.Get("test");
  EXPECT_EQ(job.attempts_size(), 1);
  EXPECT_TRUE(std::isfinite(job.progress().loss()));
  EXPECT_EQ(job.progress().retried_steps() + job.progress().skipped_steps(), 0);
  cluster.Cli({"cancel", "test"});
  cluster.WaitForEnd("test");
  const auto applied = AppliedByRank(cluster, "test", 2);
  EXPECT_EQ(applied[0], applied[1]) << "ranks applied versions at different steps";
  EXPECT_GE(applied[0].size(), 50u);
  EXPECT_TRUE(applied[0].contains(201));
}

struct FaultCase {
  std::string name, recipe, fault;
  bool falls = false;       // else: an alert at most
  bool alerts = false;      // a warning names layer and op
  std::string extra_model;  // replaces the moe line
};

TEST(Precision, EveryFaultLeadsToTheExpectedDecisionAndBack) {
  TempCluster cluster(WithFaults());
  constexpr int kFrom = 40, kSteps = 130;
  const std::string scale = "scale 1 attn_qkv 40 60 20";
  const std::vector<FaultCase> cases = {
      {.name = "delayed", .recipe = "fp8_delayed", .fault = scale, .falls = true},
      {.name = "frozen", .recipe = "fp8_delayed", .fault = "freeze 1 attn_qkv 40 60 6",
       .falls = true},
      {.name = "current", .recipe = "fp8_current", .fault = scale, .alerts = true},
      {.name = "blockwise", .recipe = "fp8_blockwise", .fault = scale, .alerts = true},
      {.name = "flow", .recipe = "fp8_flow", .fault = scale, .alerts = true},
      {.name = "starved", .recipe = "fp8_flow", .fault = "starve 1 fc1 40 60 2"},
  };
  for (const FaultCase& c : cases) {
    std::string yaml = FaultySpec(cluster, c.name, kSteps, c.recipe, c.fault);
    if (c.fault.rfind("starve", 0) == 0) {
      const std::string moe = "expert_hidden: 128}";
      yaml.replace(yaml.find(moe), moe.size(),
                   "expert_hidden: 128, router: {bias_update_rate: 0.001, aux_loss: none}}");
    }
    cluster.Submit(yaml);
  }
  for (const FaultCase& c : cases) {
    SCOPED_TRACE(c.name);
    const v1::Job job = cluster.WaitForEnd(c.name);
    ASSERT_EQ(job.state(), v1::SUCCEEDED) << job.message();
    EXPECT_EQ(job.attempts_size(), 1);
    const auto plans = Plans(cluster, c.name);
    // Decisions on attn_qkv of layer 1, the one with the fault.
    std::int64_t fell = 0, returned = 0;
    for (std::size_t i = 1; i < plans.size(); ++i) {
      const std::string before = KindAt(plans[i - 1], 1, Op::kAttnQkv);
      const std::string after = KindAt(plans[i], 1, Op::kAttnQkv);
      if (before == c.recipe && after == "bf16" && fell == 0) {
        fell = plans[i].applied_step();
        EXPECT_EQ(plans[i].author(), v1::PLAN_AUTHOR_POLICY);
        EXPECT_NE(plans[i].reason().find("layer 1 attn_qkv"), std::string::npos)
            << plans[i].reason();
      } else if (before == "bf16" && after == c.recipe) {
        returned = plans[i].applied_step();
      }
    }
    bool alerted = false;
    for (const v1::JobEvent& event : cluster.Events(c.name)) {
      alerted = alerted || (event.kind() == "WARNING" &&
                            event.message().find("layer 1 attn_qkv") != std::string::npos);
    }
    if (c.falls) {
      // Snapshots every 2 steps, saturation in two of them running, then one agreement.
      EXPECT_GE(fell, kFrom);
      EXPECT_LE(fell, kFrom + 12);
      EXPECT_GT(returned, fell + 9) << "hold_steps";
      EXPECT_LE(returned, kSteps);
    } else {
      EXPECT_EQ(fell, 0) << plans.back().reason();
      EXPECT_TRUE(alerted || !c.alerts);
    }
    EXPECT_LE(job.progress().loss(), job.progress().first_loss());
  }
  // Replays are deterministic and read-only; a policy that tolerates everything decides nothing.
  const CliResult same = cluster.Cli({"precision", "replay", "delayed", "-o", "json"});
  ASSERT_EQ(same.exit_code, 0) << same.err;
  EXPECT_EQ(cluster.Cli({"precision", "replay", "delayed", "-o", "json"}).out, same.out);
  EXPECT_NE(same.out.find("\"op\": \"attn_qkv\""), std::string::npos) << same.out;
  const CliResult text = cluster.Cli({"explain", "delayed"});
  EXPECT_NE(text.out.find("layer 1 attn_qkv"), std::string::npos) << text.out;
  const CliResult worst = cluster.Cli({"fp8", "delayed", "-o", "json"});
  EXPECT_EQ(worst.exit_code, 0) << worst.err;
}

TEST(Precision, OfTwoOperatorsWithOneEtagExactlyOneWins) {
  TempCluster cluster({.workers = 1});
  cluster.Submit(cluster.Spec({.steps = 100000, .ranks = 1, .expert_parallel = 1}));
  cluster.WaitFor("test", Reaches(2), "step 2");
  for (int round = 0; round < 5; ++round) {
    const std::string etag = Precision(cluster, "test").etag();
    std::vector<grpc::Status> status(2);
    std::vector<std::thread> operators;
    for (int i = 0; i < 2; ++i) {
      operators.emplace_back([&, i] {
        v1::SetPrecisionResponse response;
        status[static_cast<std::size_t>(i)] =
            Set(cluster, "test", "1", {}, (round + i) % 2 == 0 ? "fp8_flow" : "fp8_blockwise", etag,
                &response);
      });
    }
    for (std::thread& t : operators) {
      t.join();
    }
    EXPECT_NE(status[0].ok(), status[1].ok())
        << status[0].error_message() << " / " << status[1].error_message();
    const grpc::Status& loser = status[0].ok() ? status[1] : status[0];
    EXPECT_TRUE(loser.error_code() == grpc::StatusCode::ABORTED ||
                loser.error_message().find("nothing would change") != std::string::npos)
        << loser.error_message();
  }
  // Wrong recipe, layer and op change nothing and say what is valid.
  const std::string etag = Precision(cluster, "test").etag();
  EXPECT_NE(cluster.Cli({"precision", "set", "test", "--layers", "9", "--recipe", "bf16"}).exit_code,
            0);
  const CliResult payload = cluster.Cli({"precision", "set", "test", "--layers", "1", "--ops",
                                         "dispatch", "--recipe", "fp8_delayed"});
  EXPECT_NE(payload.exit_code, 0);
  EXPECT_NE(payload.err.find("dispatch"), std::string::npos) << payload.err;
  EXPECT_EQ(Precision(cluster, "test").etag(), etag);
  const CliResult dry = cluster.Cli(
      {"precision", "set", "test", "--layers", "0-2", "--recipe", "fp8_current", "--ops",
       "attn_qkv,fc1", "--dry-run"});
  EXPECT_EQ(dry.exit_code, 0) << dry.err;
  EXPECT_NE(dry.out.find("replayed"), std::string::npos) << dry.out;
  EXPECT_EQ(Precision(cluster, "test").etag(), etag) << "a dry run changes nothing";
  cluster.Cli({"cancel", "test"});
  cluster.WaitForEnd("test");
}

TEST(Precision, ASwitchSurvivesACheckpointInFlightAndAKilledController) {
  TempCluster cluster({.workers = 1, .slots = 2});
  cluster.Submit(cluster.Spec({.steps = 300, .recipe = "bf16", .checkpoint_interval = 3}));
  cluster.WaitFor("test", Reaches(5), "step 5");
  ASSERT_EQ(cluster.Cli({"precision", "pin", "test", "--layers", "0", "--ops", "fc1"}).exit_code, 0);
  ASSERT_EQ(cluster.Cli({"precision", "auto", "off", "test"}).exit_code, 0);
  const CliResult set =
      cluster.Cli({"precision", "set", "test", "--layers", "1", "--recipe", "fp8_flow"});
  cluster.Kill(cluster.controller(), SIGKILL);
  ASSERT_EQ(set.exit_code, 0) << set.err;
  cluster.StartController();
  cluster.WaitFor("test", Runs(2), "version 2 after the restart");
  // What operators said about the policy survived as well.
  const v1::JobPrecision precision = Precision(cluster, "test");
  EXPECT_FALSE(precision.policy_enabled());
  std::set<std::string> sites;
  for (const v1::PolicySite& site : precision.sites()) {
    sites.insert(std::to_string(site.layer()) + " " + site.op() + " " + site.status());
  }
  EXPECT_TRUE(sites.contains("0 fc1 operator"));
  EXPECT_TRUE(sites.contains("1 fc2 operator")) << "set puts its sites into the operator's hands";
  const v1::Job job = cluster.WaitForEnd("test");
  ASSERT_EQ(job.state(), v1::SUCCEEDED) << job.message();
  EXPECT_EQ(job.attempts_size(), 1);
  const auto applied = AppliedByRank(cluster, "test", 2);
  EXPECT_EQ(applied[0], applied[1]);
  const auto plans = Plans(cluster, "test");
  ASSERT_EQ(plans.size(), 2u);
  EXPECT_EQ(plans[1].applied_step(), applied[0].at(2));
}

TEST(Precision, NonfiniteValuesAreRetriedThenSkippedThenFatalAndStrictFailsAtOnce) {
  TempCluster cluster(WithFaults());
  cluster.Submit(FaultySpec(cluster, "retried", 30, "fp8_current", "inf 1 attn_qkv 12 12 1"));
  cluster.Submit(FaultySpec(cluster, "gradient", 20, "fp8_current", "nangrad 1 attn_qkv 12 12 1"));
  cluster.Submit(
      FaultySpec(cluster, "skipped", 20, "fp8_current", "inf 1 attn_qkv 12 12 2", kNoPolicy));
  cluster.Submit(
      FaultySpec(cluster, "fatal", 40, "fp8_current", "inf 1 attn_qkv 12 99 2",
                 "  protect: 0\n  policy: {enabled: false, max_skips_in_a_row: 3}\n"));
  cluster.Submit(FaultySpec(cluster, "strict", 20, "fp8_current", "inf 1 attn_qkv 12 12 1",
                            "  protect: 0\n  strict: true\n  policy: {enabled: false}\n"));

  const v1::Job retried = cluster.WaitForEnd("retried");
  ASSERT_EQ(retried.state(), v1::SUCCEEDED) << retried.message();
  EXPECT_EQ(retried.progress().retried_steps(), 1);
  EXPECT_EQ(retried.progress().skipped_steps(), 0);
  const auto plans = Plans(cluster, "retried");
  ASSERT_GE(plans.size(), 2u) << "a non-finite value is at once a reason to fall back";
  EXPECT_EQ(plans[1].author(), v1::PLAN_AUTHOR_POLICY);
  EXPECT_EQ(KindAt(plans[1], 1, Op::kAttnQkv), "bf16");
  EXPECT_EQ(KindAt(plans[1], 0, Op::kAttnQkv), "fp8_current");
  EXPECT_NE(plans[1].reason().find("layer 1 attn_qkv input: nonfinite"), std::string::npos)
      << plans[1].reason();
  bool said = false;
  for (const v1::JobEvent& event : cluster.Events("retried")) {
    said = said || (event.message().find("step 12 had non-finite values (layer 1 attn_qkv input)") !=
                    std::string::npos);
  }
  EXPECT_TRUE(said);

  const v1::Job gradient = cluster.WaitForEnd("gradient");
  ASSERT_EQ(gradient.state(), v1::SUCCEEDED) << gradient.message();
  EXPECT_EQ(gradient.progress().retried_steps(), 1) << "no op is known: all layers in bf16";
  EXPECT_EQ(Plans(cluster, "gradient").size(), 1u) << "nothing says which layer it was";

  const v1::Job skipped = cluster.WaitForEnd("skipped");
  ASSERT_EQ(skipped.state(), v1::SUCCEEDED) << skipped.message();
  EXPECT_EQ(skipped.progress().skipped_steps(), 1);
  EXPECT_TRUE(std::isfinite(skipped.progress().loss()));

  const v1::Job fatal = cluster.WaitForEnd("fatal");
  EXPECT_EQ(fatal.state(), v1::FAILED);
  ASSERT_GE(fatal.attempts_size(), 1);
  EXPECT_EQ(fatal.attempts(0).end_class(), v1::NUMERIC_FAILURE) << fatal.attempts(0).end_reason();
  EXPECT_NE(fatal.attempts(0).end_reason().find("layer 1 attn_qkv input"), std::string::npos)
      << fatal.attempts(0).end_reason();
  EXPECT_NE(fatal.attempts(0).end_reason().find("step 14"), std::string::npos)
      << fatal.attempts(0).end_reason();

  const v1::Job strict = cluster.WaitForEnd("strict");
  EXPECT_EQ(strict.state(), v1::FAILED);
  ASSERT_GE(strict.attempts_size(), 1);
  EXPECT_NE(strict.attempts(0).end_reason().find("strict precision: layer 1"), std::string::npos)
      << strict.attempts(0).end_reason();
}

}  // namespace
}  // namespace octavo
