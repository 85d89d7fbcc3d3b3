// Precision as scheduled state, with real processes: operators switch while a job trains, saves,
// restarts or has lost its controller, and ranks always agree. The policy:
// precision_faults_test.cc.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <map>
#include <random>
#include <set>
#include <thread>

#include "tests/system/precision_support.h"

namespace octavo {
namespace {

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
      {"0-2", {}, "fp8_flow"},
      {"1", {"attn_qkv", "fc1"}, "fp8_delayed"},
      {"0-2", {}, "bf16"},
      {"2", {"fc1", "fc2"}, "fp8_blockwise"},
      {"0-1", products, "fp8_current"},
      {"0-2", products, "fp8_delayed"},
      {"0-2", {}, "fp8_blockwise"}};
  std::int64_t version = 1;
  for (const auto& [layers, ops, recipe] : switches) {
    if (version == 1) {  // once as people do it
      const CliResult set = cluster.Cli({"precision", "set", "test", "--layers", layers, "--recipe",
                                         recipe, "--reason", "system test"});
      ASSERT_EQ(set.exit_code, 0) << set.out << set.err;
    } else {
      MustSet(cluster, "test", {.layers = layers, .ops = ops, .recipe = recipe});
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
  // Losses follow the undisturbed run of the same data; trajectories drift apart, so single steps
  // differ by more than their mean. (What a switch itself does: TheStepAfterASwitch…)
  double difference = 0, steps = 0;
  for (const auto& [step, loss] : losses) {
    if (step > 0 && plain.contains(step)) {
      difference += std::abs(loss / plain.at(step) - 1);
      ++steps;
    }
  }
  ASSERT_GT(steps, 10);
  std::printf("%.0f steps differ by %.2f %% in the mean\n", steps, 100 * difference / steps);
  EXPECT_LE(difference / steps, 0.05);
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
    const std::string layer = std::to_string(random() % 2);
    const grpc::Status status = Set(
        cluster, "test",
        {.layers = layer, .ops = some, .recipe = recipes[random() % recipes.size()]}, &response);
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
            Set(cluster, "test",
                {.layers = "1",
                 .recipe = (round + i) % 2 == 0 ? "fp8_flow" : "fp8_blockwise",
                 .etag = etag},
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
  EXPECT_NE(
      cluster.Cli({"precision", "set", "test", "--layers", "9", "--recipe", "bf16"}).exit_code, 0);
  const CliResult payload = cluster.Cli({"precision", "set", "test", "--layers", "1", "--ops",
                                         "dispatch", "--recipe", "fp8_delayed"});
  EXPECT_NE(payload.exit_code, 0);
  EXPECT_NE(payload.err.find("dispatch"), std::string::npos) << payload.err;
  EXPECT_EQ(Precision(cluster, "test").etag(), etag);
  const CliResult dry = cluster.Cli({"precision", "set", "test", "--layers", "0-2", "--recipe",
                                     "fp8_current", "--ops", "attn_qkv,fc1", "--dry-run"});
  EXPECT_EQ(dry.exit_code, 0) << dry.err;
  EXPECT_NE(dry.out.find("replayed"), std::string::npos) << dry.out;
  EXPECT_EQ(Precision(cluster, "test").etag(), etag) << "a dry run changes nothing";
  cluster.Cli({"cancel", "test"});
  cluster.WaitForEnd("test");
}

// Version n is accepted and stored; the controller dies before any rank can have it (the worker, or
// the ranks, stand still). Its successor knows n, hands it down, and hears of the step.
TEST(Precision, AControllerKilledInTheMiddleOfASwitchFinishesItAfterwards) {
  TempCluster cluster({.workers = 1, .slots = 2});
  cluster.Submit(cluster.Spec({.steps = 100000, .recipe = "bf16", .checkpoint_interval = 0}));
  cluster.WaitFor("test", Reaches(5), "step 5");
  ASSERT_EQ(cluster.Cli({"precision", "pin", "test", "--layers", "0", "--ops", "fc1"}).exit_code,
            0);
  ASSERT_EQ(cluster.Cli({"precision", "auto", "off", "test"}).exit_code, 0);
  const std::vector<int> ranks = cluster.RankPids();
  ASSERT_EQ(ranks.size(), 2u);
  const std::vector<std::vector<int>> stopped = {{cluster.worker(0)->pid()}, {ranks[1]}, ranks};
  const std::vector<std::string> recipes = {"fp8_flow", "fp8_blockwise", "fp8_current"};
  for (std::size_t round = 0; round < stopped.size(); ++round) {
    for (const int pid : stopped[round]) {
      ASSERT_EQ(kill(pid, SIGSTOP), 0);
    }
    const std::int64_t version = MustSet(
        cluster, "test",
        {.layers = "1", .ops = {"attn_qkv", "attn_out", "fc1", "fc2"}, .recipe = recipes[round]});
    EXPECT_EQ(version, static_cast<std::int64_t>(round) + 2);
    EXPECT_EQ(Plans(cluster, "test").back().applied_step(), 0) << "nobody can have it yet";
    cluster.Kill(cluster.controller(), SIGKILL);
    for (const int pid : stopped[round]) {
      ASSERT_EQ(kill(pid, SIGCONT), 0);
    }
    cluster.StartController();
    const v1::Job job = cluster.WaitFor("test", Runs(version), "the switch after the restart");
    ASSERT_FALSE(IsTerminal(job)) << job.message();
  }
  // What operators said about the policy survived as well.
  const v1::JobPrecision precision = Precision(cluster, "test");
  EXPECT_FALSE(precision.policy_enabled());
  std::set<std::string> sites;
  for (const v1::PolicySite& site : precision.sites()) {
    sites.insert(std::to_string(site.layer()) + " " + site.op() + " " + site.status());
  }
  EXPECT_TRUE(sites.contains("0 fc1 pinned"));
  EXPECT_TRUE(sites.contains("1 fc2 operator")) << "set puts its sites into the operator's hands";
  const std::int64_t step = cluster.Get("test").progress().step();
  cluster.WaitFor("test", Reaches(step + 10), "snapshots under the last plan");
  ExpectEffectiveIsPlanned(cluster, "test");
  EXPECT_EQ(cluster.RankPids(), ranks) << "training went on in the same processes";
  cluster.Cli({"cancel", "test"});
  const v1::Job job = cluster.WaitForEnd("test");
  EXPECT_EQ(job.attempts_size(), 1);
  EXPECT_EQ(job.progress().retried_steps() + job.progress().skipped_steps(), 0);
  const auto applied = AppliedByRank(cluster, "test", 2);
  EXPECT_EQ(applied[0], applied[1]);
  for (const v1::PrecisionPlan& plan : Plans(cluster, "test")) {
    if (plan.version() > 1) {
      EXPECT_EQ(plan.applied_step(), applied[0].at(static_cast<int>(plan.version())));
    }
  }
}

// Checkpoints are written all the time, so every switch meets one; then a rank dies, and the plan
// changes while there is no attempt: the next one begins with it, from the newest checkpoint.
TEST(Precision, SwitchesDuringCheckpointsAndDuringARestart) {
  TempCluster cluster({.workers = 1, .slots = 2});
  cluster.Submit(cluster.Spec({.steps = 100000,
                               .recipe = "bf16",
                               .checkpoint_interval = 1,
                               .backoff_seconds = 4,
                               .precision_extra = "  protect: 0\n  policy: {enabled: false}\n"}));
  cluster.WaitFor("test", Reaches(3), "step 3");
  std::int64_t version = 1;
  for (const char* recipe : {"fp8_flow", "fp8_blockwise", "bf16"}) {  // families: each saves first
    version = MustSet(cluster, "test", {.layers = "0-2", .ops = {"fc1", "fc2"}, .recipe = recipe});
    const v1::Job job = cluster.WaitFor("test", Runs(version), "a switch during checkpoints");
    ASSERT_FALSE(IsTerminal(job)) << job.message();
    EXPECT_GT(job.progress().checkpoint_step(), 0);
  }
  auto applied = AppliedByRank(cluster, "test", 2);
  EXPECT_EQ(applied[0], applied[1]);
  EXPECT_EQ(applied[0].size(), 3u);

  const std::vector<int> ranks = cluster.RankPids();
  ASSERT_EQ(ranks.size(), 2u);
  kill(ranks[1], SIGKILL);
  cluster.WaitFor("test", InState(v1::RESTARTING), "the restart");
  MustSet(cluster, "test", {.layers = "1", .ops = {"fc1", "fc2"}, .recipe = "fp8_flow"});
  version = MustSet(cluster, "test", {.layers = "2", .ops = {"attn_qkv"}, .recipe = "fp8_delayed"});
  EXPECT_EQ(cluster.Get("test").attempts_size(), 1) << "the plan was to change between attempts";
  const v1::Job job = cluster.WaitFor("test", Runs(version), "the second attempt");
  ASSERT_FALSE(IsTerminal(job)) << job.message();
  EXPECT_EQ(job.attempts_size(), 2);
  const std::int64_t loaded = cluster.Get("test").attempts(1).loaded_checkpoint_step();
  EXPECT_GT(loaded, 0);
  const std::int64_t step = job.progress().step();
  cluster.WaitFor("test", Reaches(step + 10), "snapshots of the second attempt");
  ExpectEffectiveIsPlanned(cluster, "test");
  const auto plans = Plans(cluster, "test");
  ASSERT_EQ(plans.size(), 6u);
  EXPECT_EQ(plans[4].applied_step(), 0) << "overtaken before anyone ran it";
  EXPECT_EQ(plans[5].applied_step(), loaded + 1);
  for (int rank = 0; rank < 2; ++rank) {
    const CliResult logs = cluster.Cli({"logs", "test", "--rank", std::to_string(rank)});
    const std::size_t begin = logs.out.rfind("training_begins");
    ASSERT_NE(begin, std::string::npos) << logs.out;
    const std::string line = logs.out.substr(begin, logs.out.find('\n', begin) - begin);
    EXPECT_NE(line.find("plan_version=6"), std::string::npos) << "rank " << rank << ": " << line;
  }
  cluster.Cli({"cancel", "test"});
  cluster.WaitForEnd("test");
}

// Up to the switch a run is bit for bit the run without it; in its first step under the new recipe
// only that recipe's rounding differs, less than the recipe makes runs differ as they go on.
TEST(Precision, TheStepAfterASwitchDiffersLessThanTheRecipeUsuallyDoes) {
  TempCluster cluster({.workers = 1, .slots = 2});
  constexpr int kSteps = 120;  // a manifest remembers the losses of 128
  const std::vector<std::string> recipes = {"fp8_delayed", "fp8_current", "fp8_blockwise",
                                            "fp8_flow"};
  cluster.Submit(SmallSpec(cluster, {.name = "bf16", .steps = kSteps}));
  for (const std::string& recipe : recipes) {
    std::string name = recipe;
    std::replace(name.begin(), name.end(), '_', '-');
    cluster.Submit(SmallSpec(cluster, {.name = name, .steps = kSteps, .recipe = recipe}));
  }
  ASSERT_EQ(cluster.WaitForEnd("bf16").state(), v1::SUCCEEDED);
  const auto plain = StepLosses(cluster, "bf16");
  for (const std::string& recipe : recipes) {
    std::string name = recipe;
    std::replace(name.begin(), name.end(), '_', '-');
    ASSERT_EQ(cluster.WaitForEnd(name).state(), v1::SUCCEEDED);
    const auto always = StepLosses(cluster, name);

    const std::string switched = "to-" + name;
    cluster.Submit(SmallSpec(cluster, {.name = switched, .steps = kSteps}));
    cluster.WaitFor(switched, Reaches(2), "step 2");
    const std::vector<int> pids = cluster.RankPids(cluster.Get(switched).uid());
    ASSERT_EQ(pids.size(), 1u);
    ASSERT_EQ(kill(pids[0], SIGSTOP), 0);  // it is short: it shall not end before it hears
    MustSet(cluster, switched,
            {.layers = "0-1", .ops = {"attn_qkv", "attn_out", "fc1", "fc2"}, .recipe = recipe});
    ASSERT_EQ(kill(pids[0], SIGCONT), 0);
    const v1::Job job = cluster.WaitForEnd(switched);
    ASSERT_EQ(job.state(), v1::SUCCEEDED) << job.message();
    const std::int64_t first = Plans(cluster, switched).back().applied_step();
    ASSERT_GT(first, 1) << "the job ended before the switch";
    ASSERT_LE(first, kSteps);
    const auto losses = StepLosses(cluster, switched);
    for (std::int64_t step = 1; step < first; ++step) {
      ASSERT_EQ(losses.at(step), plain.at(step)) << recipe << " step " << step;
    }
    EXPECT_NE(losses.at(first), plain.at(first)) << recipe << " changed nothing";
    const double usual = MeanDifference(always, plain, kSteps / 2, kSteps);
    EXPECT_LE(std::abs(losses.at(first) - plain.at(first)), usual)
        << recipe << " from step " << first;
  }
}

}  // namespace
}  // namespace octavo
