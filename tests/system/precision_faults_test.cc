// The policy falls back and returns on evidence, and non-finite values never reach the optimizer,
// with real processes. Faults go into tensors of octavo-rank-test (tests/support/inject), never
// into metrics: every decision comes through the real path.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <tuple>

#include "base/str.h"
#include "tests/system/precision_support.h"

namespace octavo {
namespace {

// A manifest remembers the losses of 128 steps. In the first ones activations grow faster than
// delayed scaling follows, which is a reason to fall by itself.
constexpr int kGrace = 50, kFrom = 60, kTo = 70, kSteps = 128;

// A policy that decides within a test's patience; thresholds as given.
std::string Quick(const std::string& thresholds = "") {
  return StrCat("  protect: 0\n  policy: {checkpoint_before_switch: false, grace_steps: ", kGrace,
                ", hold_steps: 10, healthy_snapshots: 2", thresholds, "}\n");
}
// Gradients of so small a model swing by more than ten times in its first steps; under delayed
// scaling that is a reason to fall. Beyond those swings, and far below a fault of 2^20:
constexpr char kBeyondSwings[] =
    ", amax_jump: 1000, amax_variation: 1000, dequant_scale_ratio: 1000";

// An input 2^20 times larger, its weight so much smaller, at one op of each layer.
std::vector<std::string> ScaleFaults() {
  std::vector<std::string> faults;
  int layer = 0;
  for (const char* op : {"attn_qkv", "attn_out", "fc1", "fc2"}) {
    faults.push_back(StrCat("scale ", layer++, " ", op, " ", kFrom, " ", kTo, " 20"));
  }
  return faults;
}

struct Site {
  int layer;
  Op op;
  std::string Text() const { return StrCat("layer ", layer, " ", Name(op)); }
  friend bool operator<(const Site& a, const Site& b) {
    return std::tuple(a.layer, a.op) < std::tuple(b.layer, b.op);
  }
};

// The plan version that first took a site from its recipe to bf16, and the steps at which ranks
// went there (0: overtaken by a newer plan) and back for the last time.
struct Moves {
  std::int64_t version = 0;
  std::int64_t fell = 0, returned = 0;
  v1::PlanAuthor author = v1::PLAN_AUTHOR_UNSPECIFIED;
  std::string reason;
};
Moves MovesOf(const std::vector<v1::PrecisionPlan>& plans, const Site& site) {
  Moves moves;
  for (std::size_t i = 1; i < plans.size(); ++i) {
    const std::string before = KindAt(plans[i - 1], site.layer, site.op);
    const std::string after = KindAt(plans[i], site.layer, site.op);
    if (before == after) {
      continue;
    }
    if (after == "bf16" && moves.version == 0) {
      moves.version = plans[i].version();
      moves.fell = plans[i].applied_step();
      moves.author = plans[i].author();
      moves.reason = plans[i].reason();
    } else if (before == "bf16") {
      moves.returned = plans[i].applied_step();
    }
  }
  return moves;
}

bool Alerted(TempCluster& cluster, const std::string& job, const Site& site) {
  for (const v1::JobEvent& event : cluster.Events(job)) {
    if (event.kind() == "WARNING" && event.message().find(site.Text()) != std::string::npos) {
      return true;
    }
  }
  return false;
}

// What the policy decided, with the step whose numbers it decided on. Replayed from the stored
// telemetry, which gives what was decided while the job ran.
v1::ReplayPolicyResponse Replayed(TempCluster& cluster, const std::string& job) {
  v1::ReplayPolicyRequest request;
  request.set_name("jobs/" + job);
  v1::ReplayPolicyResponse response;
  grpc::ClientContext context;
  const grpc::Status status = cluster.stub().ReplayPolicy(&context, request, &response);
  EXPECT_TRUE(status.ok()) << status.error_message();
  return response;
}

void ExpectFallAndReturn(const v1::ReplayPolicyResponse& decided,
                         const std::vector<v1::PrecisionPlan>& plans, const Site& site) {
  SCOPED_TRACE(site.Text());
  std::int64_t step = 0;
  for (const v1::PolicyDecision& decision : decided.decisions()) {
    if (step == 0 && decision.direction() == "fallback" && decision.layer() == site.layer &&
        decision.op() == Name(site.op)) {
      step = decision.step();
    }
  }
  // Snapshots every 2 steps; a signal has to hold for at most three of them.
  EXPECT_GE(step, kFrom);
  EXPECT_LE(step, kFrom + 6);
  const Moves moves = MovesOf(plans, site);
  EXPECT_GT(moves.version, 1);
  EXPECT_TRUE(moves.fell == 0 || moves.fell > step) << moves.fell;
  EXPECT_EQ(moves.author, v1::PLAN_AUTHOR_POLICY);
  EXPECT_NE(moves.reason.find(site.Text()), std::string::npos) << moves.reason;
  EXPECT_GT(moves.returned, step + 10) << "hold_steps";
}

struct Row {
  std::string name, recipe;
  std::vector<std::string> faults;
  std::vector<Site> falls, alerts, untouched;
  std::string policy;
  bool router_bias = false;
};

TEST(Precision, EveryFaultLeadsToTheExpectedDecisionAndBack) {
  TempCluster cluster(WithFaults());
  const Site qkv{0, Op::kAttnQkv}, out{1, Op::kAttnOut}, fc1{2, Op::kFc1}, fc2{3, Op::kFc2};
  const Site payload{2, Op::kDispatch};
  const std::vector<Site> all = {qkv, out, fc1, fc2};
  const std::vector<Row> table = {
      // Scales of before meet values of now; the payload scales by itself.
      {.name = "delayed",
       .recipe = "fp8_delayed",
       .faults = ScaleFaults(),
       .falls = all,
       .alerts = {payload},
       .untouched = {payload},
       .policy = Quick(kBeyondSwings)},
      {.name = "frozen",
       .recipe = "fp8_delayed",
       .faults = {StrCat("freeze 0 attn_qkv ", kFrom, " ", kTo, " 6"),
                  StrCat("freeze 2 fc1 ", kFrom, " ", kTo, " 6")},
       .falls = {qkv, fc1},
       .policy = Quick(kBeyondSwings)},
      // These scale by what they see: the same function, an alert only, under default thresholds.
      {.name = "current",
       .recipe = "fp8_current",
       .faults = ScaleFaults(),
       .alerts = {qkv, out, fc1, fc2, payload},
       .untouched = all,
       .policy = Quick()},
      // Their experts compute on the payload as it came: the dispatch is where it was cast.
      {.name = "blockwise",
       .recipe = "fp8_blockwise",
       .faults = ScaleFaults(),
       .alerts = {qkv, out, payload, fc2},
       .untouched = all,
       .policy = Quick()},
      {.name = "flow",
       .recipe = "fp8_flow",
       .faults = ScaleFaults(),
       .alerts = {qkv, out, payload, fc2},
       .untouched = all,
       .policy = Quick()},
      // An expert without tokens is no illness.
      {.name = "starved",
       .recipe = "fp8_flow",
       .faults = {StrCat("starve 2 fc1 ", kFrom, " ", kTo, " 2")},
       .untouched = {fc1, fc2, payload},
       .policy = Quick(),
       .router_bias = true},
      {.name = "starved-delayed",
       .recipe = "fp8_delayed",
       .faults = {StrCat("starve 2 fc1 ", kFrom, " ", kTo, " 2")},
       .untouched = {fc1, payload},
       .policy = Quick(kBeyondSwings),
       .router_bias = true},
  };
  for (const Row& row : table) {
    cluster.Submit(SmallSpec(cluster, {.name = row.name,
                                       .steps = kSteps,
                                       .recipe = row.recipe,
                                       .faults = row.faults,
                                       .precision = row.policy,
                                       .layers = 4,
                                       .router_bias = row.router_bias}));
  }
  // Without fault and without policy: what the losses of "delayed" are compared with.
  cluster.Submit(
      SmallSpec(cluster, {.name = "plain", .steps = kSteps, .recipe = "fp8_delayed", .layers = 4}));
  cluster.Submit(SmallSpec(cluster, {.name = "bf16", .steps = kSteps, .layers = 4}));
  for (const Row& row : table) {
    SCOPED_TRACE(row.name);
    const v1::Job job = cluster.WaitForEnd(row.name);
    ASSERT_EQ(job.state(), v1::SUCCEEDED) << job.message();
    EXPECT_EQ(job.attempts_size(), 1);
    EXPECT_EQ(job.progress().retried_steps() + job.progress().skipped_steps(), 0);
    const auto plans = Plans(cluster, row.name);
    const v1::ReplayPolicyResponse decided = Replayed(cluster, row.name);
    for (const Site& site : row.falls) {
      ExpectFallAndReturn(decided, plans, site);
    }
    for (const Site& site : row.untouched) {
      const Moves moves = MovesOf(plans, site);
      EXPECT_EQ(moves.version, 0) << site.Text() << ": " << moves.reason;
    }
    for (const Site& site : row.alerts) {
      EXPECT_TRUE(Alerted(cluster, row.name, site)) << site.Text();
    }
    if (row.recipe != "fp8_delayed") {
      EXPECT_EQ(plans.size(), 1u) << plans[1].reason() << " from step " << plans[1].applied_step();
    }
    EXPECT_LE(job.progress().loss(), job.progress().first_loss());
  }

  // The 20 steps after the last return lie as near to the run without the fault as rounding alone
  // keeps runs of this data: measured between that run and those of four other recipes. They are
  // few samples of something chaotic, hence the factor.
  ASSERT_EQ(cluster.WaitForEnd("plain").state(), v1::SUCCEEDED);
  ASSERT_EQ(cluster.WaitForEnd("bf16").state(), v1::SUCCEEDED);
  const auto plans = Plans(cluster, "delayed");
  std::int64_t recovered = 0;
  for (const Site& site : all) {
    recovered = std::max(recovered, MovesOf(plans, site).returned);
  }
  ASSERT_LE(recovered + 19, kSteps) << "no 20 steps are left";
  const auto plain = StepLosses(cluster, "plain");
  double usual = 0;
  for (const char* other : {"bf16", "current", "blockwise", "flow"}) {
    const auto losses = StepLosses(cluster, other);
    usual = std::max(usual, MeanDifference(losses, plain, recovered, recovered + 19));
  }
  const double difference =
      MeanDifference(StepLosses(cluster, "delayed"), plain, recovered, recovered + 19);
  std::printf("steps %lld to %lld: %.5f from the run without the fault; rounding alone: %.5f\n",
              static_cast<long long>(recovered), static_cast<long long>(recovered + 19), difference,
              usual);
  EXPECT_GT(difference, 0) << "the fault was to leave a trace";
  EXPECT_LE(difference, 1.5 * usual);

  // Replays are deterministic and read-only.
  const CliResult same = cluster.Cli({"precision", "replay", "delayed", "-o", "json"});
  ASSERT_EQ(same.exit_code, 0) << same.err;
  EXPECT_EQ(cluster.Cli({"precision", "replay", "delayed", "-o", "json"}).out, same.out);
  EXPECT_NE(same.out.find("\"op\": \"attn_qkv\""), std::string::npos) << same.out;
  EXPECT_EQ(Plans(cluster, "delayed").size(), plans.size());
  const CliResult text = cluster.Cli({"explain", "delayed"});
  EXPECT_NE(text.out.find(" fell from fp8_delayed to bf16"), std::string::npos) << text.out;
  EXPECT_LE(std::count(text.out.begin(), text.out.end(), '\n'), 25);
  const CliResult everything = cluster.Cli({"explain", "delayed", "--all"});
  EXPECT_NE(everything.out.find("layer 0 attn_qkv input: "), std::string::npos) << everything.out;
  const CliResult worst = cluster.Cli({"fp8", "delayed", "-o", "json"});
  EXPECT_EQ(worst.exit_code, 0) << worst.err;
}

bool Said(TempCluster& cluster, const std::string& job, const std::string& text) {
  for (const v1::JobEvent& event : cluster.Events(job)) {
    if (event.message().find(text) != std::string::npos) {
      return true;
    }
  }
  return false;
}

TEST(Precision, NonfiniteValuesAreRetriedInBf16FromTheSameData) {
  TempCluster cluster(WithFaults());
  const auto submit = [&](const std::string& name, const std::string& recipe,
                          const std::vector<std::string>& faults) {
    cluster.Submit(SmallSpec(cluster, {.name = name,
                                       .steps = 40,
                                       .recipe = recipe,
                                       .faults = faults,
                                       .precision = Quick(kBeyondSwings)}));
  };
  // One fault of each kind, in one pass each: the retry finds the tensor healthy.
  const std::vector<std::pair<std::string, Site>> known = {
      {"inf 1 attn_qkv 12 12 1", {1, Op::kAttnQkv}},
      {"nan 0 attn_out 16 16 1", {0, Op::kAttnOut}},
      {"nan 1 fc2 20 20 1", {1, Op::kFc2}},
      {"inf_grad 0 attn_qkv 24 24 1", {0, Op::kAttnQkv}},
      {"nan_grad 0 fc1 28 28 1", {0, Op::kFc1}}};
  std::vector<std::string> faults;
  for (const auto& [fault, site] : known) {
    faults.push_back(fault);
  }
  submit("known", "fp8_current", faults);
  submit("unknown", "fp8_current", {"nan_wgrad 1 attn_qkv 12 12 1", "inf_wgrad 0 fc1 16 16 1"});
  submit("plain", "fp8_current", {});
  submit("bf16", "bf16", {});

  const v1::Job job = cluster.WaitForEnd("known");
  ASSERT_EQ(job.state(), v1::SUCCEEDED) << job.message();
  EXPECT_EQ(job.progress().retried_steps(), static_cast<std::int64_t>(known.size()));
  EXPECT_EQ(job.progress().skipped_steps(), 0);
  const auto plans = Plans(cluster, "known");
  for (const auto& [fault, site] : known) {
    SCOPED_TRACE(fault);
    const std::vector<std::string> words = StrSplit(fault, ' ');
    const std::string where = StrCat(site.Text(), EndsWith(words[0], "_grad") ? " grad" : " input");
    EXPECT_TRUE(
        Said(cluster, "known", StrCat("step ", words[3], " had non-finite values (", where, ")")));
    const Moves moves = MovesOf(plans, site);
    EXPECT_GT(moves.version, 1) << "at once a reason to fall back";
    EXPECT_NE(moves.reason.find(StrCat(where, ": nonfinite")), std::string::npos) << moves.reason;
  }
  EXPECT_EQ(KindAt(plans[1], 0, Op::kAttnQkv), "fp8_current") << "the first fault was of layer 1";

  const v1::Job unknown = cluster.WaitForEnd("unknown");
  ASSERT_EQ(unknown.state(), v1::SUCCEEDED) << unknown.message();
  EXPECT_EQ(unknown.progress().retried_steps(), 2) << "no op is known: all layers in bf16";
  EXPECT_EQ(unknown.progress().skipped_steps(), 0);
  EXPECT_EQ(Plans(cluster, "unknown").size(), 1u) << "nothing says which layer it was";

  // The repeated step saw its own data: its loss is the undisturbed run's but for the rounding of
  // one layer, or all, in bf16. Other data differ by far more from step to step.
  ASSERT_EQ(cluster.WaitForEnd("plain").state(), v1::SUCCEEDED);
  ASSERT_EQ(cluster.WaitForEnd("bf16").state(), v1::SUCCEEDED);
  const auto plain = StepLosses(cluster, "plain"), bf16 = StepLosses(cluster, "bf16");
  const double usual = MeanDifference(plain, bf16, 2, 40);
  for (const char* name : {"known", "unknown"}) {
    const auto losses = StepLosses(cluster, name);
    for (std::int64_t step = 1; step < 12; ++step) {
      ASSERT_EQ(losses.at(step), plain.at(step)) << name << " step " << step;
    }
    EXPECT_NE(losses.at(12), plain.at(12)) << name << ": the retry was to run in bf16";
    EXPECT_LE(std::abs(losses.at(12) - plain.at(12)), usual) << name;
  }
}

TEST(Precision, ValuesThatStayNonfiniteAreSkippedThenFatalAndStrictFailsAtOnce) {
  TempCluster cluster(WithFaults());
  const auto submit = [&](const std::string& name, const std::string& fault,
                          const std::string& precision) {
    cluster.Submit(SmallSpec(cluster, {.name = name,
                                       .steps = 20,
                                       .recipe = "fp8_current",
                                       .faults = {fault},
                                       .precision = precision}));
  };
  submit("skipped", "inf 1 attn_qkv 12 12 2", kNoPolicy);
  submit("skipped-grad", "nan_grad 1 attn_qkv 12 13 2", kNoPolicy);
  const std::string three = "  protect: 0\n  policy: {enabled: false, max_skips_in_a_row: 3}\n";
  submit("fatal", "inf 1 attn_qkv 12 99 2", three);
  submit("fatal-grad", "nan_grad 1 fc1 12 99 2", three);
  submit("strict", "inf 1 attn_qkv 12 12 1",
         "  protect: 0\n  strict: true\n  policy: {enabled: false}\n");

  for (const auto& [name, skips] : {std::pair("skipped", 1), std::pair("skipped-grad", 2)}) {
    const v1::Job skipped = cluster.WaitForEnd(name);
    ASSERT_EQ(skipped.state(), v1::SUCCEEDED) << skipped.message();
    EXPECT_EQ(skipped.progress().skipped_steps(), skips) << name;
    EXPECT_EQ(skipped.progress().step(), 20) << "data order and schedule go on";
    EXPECT_TRUE(std::isfinite(skipped.progress().loss()));
  }
  for (const auto& [name, tensor] : {std::pair("fatal", "layer 1 attn_qkv input"),
                                     std::pair("fatal-grad", "layer 1 fc1 grad")}) {
    SCOPED_TRACE(name);
    const v1::Job fatal = cluster.WaitForEnd(name);
    EXPECT_EQ(fatal.state(), v1::FAILED);
    ASSERT_GE(fatal.attempts_size(), 1);
    const v1::Attempt& attempt = fatal.attempts(0);
    EXPECT_EQ(attempt.end_class(), v1::NUMERIC_FAILURE) << attempt.end_reason();
    EXPECT_NE(attempt.end_reason().find(tensor), std::string::npos) << attempt.end_reason();
    EXPECT_NE(attempt.end_reason().find("step 14"), std::string::npos) << attempt.end_reason();
  }
  const v1::Job strict = cluster.WaitForEnd("strict");
  EXPECT_EQ(strict.state(), v1::FAILED);
  ASSERT_GE(strict.attempts_size(), 1);
  EXPECT_NE(strict.attempts(0).end_reason().find("strict precision: layer 1"), std::string::npos)
      << strict.attempts(0).end_reason();
}

}  // namespace
}  // namespace octavo
