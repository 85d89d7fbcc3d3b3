// The pure parts of the rank: control vector, step guard, plan switch, groups, statistics.
#include <gtest/gtest.h>

#include <limits>
#include <random>

#include "base/status.h"
#include "kernels/cpu/backend.h"
#include "tests/support/inproc_comm.h"
#include "tests/support/lazy_lanes.h"
#include "worker/rank/control_vector.h"
#include "worker/rank/failure.h"
#include "worker/rank/groups.h"
#include "worker/rank/plan_switch.h"
#include "worker/rank/reporter.h"
#include "worker/rank/step_guard.h"

namespace octavo {
namespace {

TEST(ControlVectorTest, PacksAndUnpacksEveryField) {
  ControlVector c;
  c.grad_norm_squared = 1.5;
  c.loss_sum = -2.25;
  c.tokens = 1'000'000'000'007;
  c.aux_loss = 0.125;
  c.z_loss = 3;
  c.nonfinite_elements = 42;
  c.suspend = true;
  c.checkpoint_wish = 7;
  c.save_busy = true;
  c.plan_held_min = 3;
  c.plan_held_max = 5;
  c.first_nonfinite = 0;
  const ControlVector back = Unpack(Pack(c));
  EXPECT_EQ(back.grad_norm_squared, 1.5);
  EXPECT_EQ(back.loss_sum, -2.25);
  EXPECT_EQ(back.tokens, 1'000'000'000'007);
  EXPECT_EQ(back.aux_loss, 0.125);
  EXPECT_EQ(back.z_loss, 3);
  EXPECT_EQ(back.nonfinite_elements, 42);
  EXPECT_FALSE(back.stop);
  EXPECT_TRUE(back.suspend);
  EXPECT_FALSE(back.stop_without_checkpoint);
  EXPECT_EQ(back.checkpoint_wish, 7);
  EXPECT_TRUE(back.save_busy);
  EXPECT_EQ(back.plan_held_min, 3);
  EXPECT_EQ(back.plan_held_max, 5);
  EXPECT_EQ(back.first_nonfinite, 0);
  c.first_nonfinite = kNoNonfinite;
  EXPECT_EQ(Unpack(Pack(c)).first_nonfinite, kNoNonfinite);
  EXPECT_LE(kControlSums + kControlMaxima, 32u);  // ARCHITECTURE 9
}

// device_pointers: values pass through device memory, as with NCCL.
void RanksAgree(bool device_pointers) {
  testing::InprocRanks comms = testing::InprocRanks::Make(3, 1);
  std::vector<ControlVector> all(3);
  testing::InprocRanks::Run(3, [&](int r) {
    Backend backend = CreateCpuBackend();
    {
      testing::LazyLanes lanes(backend);
      Communicator* comm = comms.ranks[static_cast<std::size_t>(r)].world.get();
      testing::LazyComm on_device(comm, &lanes);
      const Backend seen = device_pointers ? lanes.backend() : backend;
      Arena device(seen, "t");
      HostCollectives world(seen, device_pointers ? &on_device : comm, device);
      ControlVector mine;
      mine.loss_sum = r + 1;
      mine.tokens = 10;
      mine.stop = r == 2;
      mine.checkpoint_wish = r;
      mine.SetPlanHeld(4 + r);
      mine.first_nonfinite = r == 1 ? 17 : r == 2 ? 900 : kNoNonfinite;
      OpsCounters before{}, after{};
      backend.ops->counters(backend.context, &before);
      all[static_cast<std::size_t>(r)] = *ReduceControl(mine, world);
      backend.ops->counters(backend.context, &after);
      EXPECT_EQ(after.synchronizations - before.synchronizations, device_pointers ? 1 : 0);
    }
    DestroyCpuBackend(&backend);
  });
  for (const ControlVector& c : all) {
    EXPECT_EQ(c.loss_sum, 6);
    EXPECT_EQ(c.tokens, 30);
    EXPECT_TRUE(c.stop);
    EXPECT_TRUE(c.leaving());
    EXPECT_EQ(c.checkpoint_wish, 2);
    EXPECT_EQ(c.plan_held_min, 4);
    EXPECT_EQ(c.plan_held_max, 6);
    EXPECT_EQ(c.first_nonfinite, 17);
    EXPECT_TRUE(c.nonfinite());
  }
}

TEST(ControlVectorTest, RanksAgreeOnSumsWishesAndExtremes) { RanksAgree(false); }

TEST(ControlVectorTest, ThroughTheDeviceItTakesOneWait) { RanksAgree(true); }

TEST(ControlVectorTest, ANonfiniteSumAnywhereIsSeen) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const double infinity = std::numeric_limits<double>::infinity();
  for (double ControlVector::*field : {&ControlVector::grad_norm_squared, &ControlVector::loss_sum,
                                       &ControlVector::aux_loss, &ControlVector::z_loss}) {
    for (const double bad : {nan, infinity, -infinity}) {
      ControlVector c;
      EXPECT_FALSE(c.nonfinite());
      c.*field = bad;
      EXPECT_TRUE(Unpack(Pack(c)).nonfinite());
    }
  }
}

TEST(HostCollectivesTest, AgreeCarriesTheFirstRanksErrorWithItsClass) {
  testing::InprocRanks comms = testing::InprocRanks::Make(3, 1);
  std::vector<absl::Status> all(3);
  testing::InprocRanks::Run(3, [&](int r) {
    Backend backend = CreateCpuBackend();
    {
      Arena device(backend, "t");
      HostCollectives world(backend, comms.ranks[static_cast<std::size_t>(r)].world.get(), device);
      EXPECT_TRUE(world.Agree(absl::OkStatus()).ok());
      const absl::Status mine =
          r == 0 ? absl::OkStatus()
                 : WithFailure(ResourceExhaustedError(std::string(100'000, 'x') + char('0' + r)),
                               FailureClass::kCheckpointUnusable);
      all[static_cast<std::size_t>(r)] = world.Agree(mine);
      const auto gathered = world.AllGather(std::string(3, static_cast<char>('a' + r)));
      EXPECT_EQ(*gathered, "aaabbbccc");
      EXPECT_TRUE(*world.Any(r == 1));
      EXPECT_FALSE(*world.Any(false));
    }
    DestroyCpuBackend(&backend);
  });
  for (const absl::Status& status : all) {
    EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
    EXPECT_EQ(MarkOf(status), FailureClass::kCheckpointUnusable);
    EXPECT_EQ(Message(status).substr(0, 9), "rank 1: x");
    EXPECT_EQ(Message(status).back(), '1');
  }
}

TEST(FailureTest, TheFirstCauseWinsAndCodesHaveAClass) {
  const absl::Status oom = ResourceExhaustedError("memory");
  EXPECT_EQ(MarkOf(oom), FailureClass::kNone);
  EXPECT_EQ(FailureOf(oom), FailureClass::kRankOom);
  const absl::Status marked = WithFailure(oom, FailureClass::kCheckpointUnusable);
  EXPECT_EQ(FailureOf(WithFailure(marked, FailureClass::kGangTimeout)),
            FailureClass::kCheckpointUnusable);
  EXPECT_EQ(FailureOf(Annotate(marked, "more")), FailureClass::kCheckpointUnusable);
  EXPECT_EQ(FailureOf(absl::OkStatus()), FailureClass::kNone);
  EXPECT_EQ(FailureOf(DeadlineExceededError("x")), FailureClass::kCollectiveTimeout);
}

TEST(StepGuardTest, RetriesThenSkipsThenFails) {
  StepGuard guard(2);
  const PassVerdict clean{},
      bad{.nonfinite = true, .site_known = true, .layer = 3, .plan_has_fp8 = true};
  EXPECT_EQ(guard.Decide(clean, false).action, StepAction::kApply);
  const GuardDecision retry = guard.Decide(bad, false);
  EXPECT_EQ(retry.action, StepAction::kRetry);
  EXPECT_EQ(retry.bf16_layers, std::vector<std::int32_t>{3});
  EXPECT_EQ(guard.Decide(clean, true).action, StepAction::kApply);
  EXPECT_EQ(guard.retried_steps(), 1);
  EXPECT_EQ(guard.Decide(bad, false).action, StepAction::kRetry);
  EXPECT_EQ(guard.Decide(bad, true).action, StepAction::kSkip);
  EXPECT_EQ(guard.skips_in_a_row(), 1);
  EXPECT_EQ(guard.Decide(clean, false).action, StepAction::kApply);
  EXPECT_EQ(guard.skips_in_a_row(), 0);  // only steps in a row count
  EXPECT_EQ(guard.Decide(bad, true).action, StepAction::kSkip);
  EXPECT_EQ(guard.Decide(bad, true).action, StepAction::kFail);
  EXPECT_EQ(guard.skipped_steps(), 3);
}

TEST(StepGuardTest, AnUnknownSiteRetriesAllLayersAndWithoutFp8NothingIsRetried) {
  StepGuard guard(3);
  const GuardDecision all = guard.Decide({.nonfinite = true, .plan_has_fp8 = true}, false);
  EXPECT_EQ(all.action, StepAction::kRetry);
  EXPECT_TRUE(all.bf16_layers.empty());
  EXPECT_EQ(guard.Decide({.nonfinite = true}, false).action, StepAction::kSkip);
}

PrecisionPlan Version(std::int64_t version) {
  PrecisionPlan plan = BuildPlan(1, DefaultRecipe(RecipeKind::kBf16), 0, {});
  plan.version = version;
  return plan;
}

TEST(PlanSwitchTest, SwitchesOnlyWhenAllHoldTheSameNewerVersion) {
  PlanSwitch plans(1);
  EXPECT_FALSE(plans.Agree(1, 1).has_value());
  plans.Offer(Version(1));  // not newer
  EXPECT_EQ(plans.newest_held(), 1);
  plans.Offer(Version(2));
  EXPECT_EQ(plans.newest_held(), 2);
  EXPECT_FALSE(plans.Agree(1, 2).has_value());  // somebody is late
  EXPECT_EQ(plans.in_force(), 1);
  // One that arrives between announcement and agreement waits its turn.
  plans.Offer(Version(3));
  const auto next = plans.Agree(2, 2);
  ASSERT_TRUE(next.has_value());
  EXPECT_EQ(next->version, 2);
  EXPECT_EQ(plans.in_force(), 2);
  EXPECT_EQ(plans.newest_held(), 3);
  EXPECT_FALSE(plans.Agree(2, 2).has_value());  // once per version
  EXPECT_EQ(plans.Agree(3, 3)->version, 3);
}

// Ranks that get random subsets of versions late: all switch at the same steps, to the same
// versions.
TEST(PlanSwitchTest, RandomDelaysNeverSplitTheRanks) {
  const unsigned seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937 rng(seed);
  for (int trial = 0; trial < 200; ++trial) {
    std::vector<PlanSwitch> ranks(4, PlanSwitch(1));
    const std::int64_t newest = 1 + static_cast<std::int64_t>(rng() % 5);
    std::int64_t in_force = 1;
    for (int step = 0; step < 100; ++step) {
      std::int64_t low = INT64_MAX, high = 0;
      for (PlanSwitch& rank : ranks) {
        if (rng() % 4 == 0) {
          rank.Offer(Version(1 + static_cast<std::int64_t>(rng() % static_cast<unsigned>(newest))));
        }
        if (step > 60) {
          rank.Offer(Version(newest));  // in the end everybody gets the newest
        }
        low = std::min(low, rank.newest_held());
        high = std::max(high, rank.newest_held());
      }
      std::vector<std::optional<PrecisionPlan>> agreed;
      for (PlanSwitch& rank : ranks) {
        agreed.push_back(rank.Agree(low, high));
      }
      for (const auto& plan : agreed) {
        ASSERT_EQ(plan.has_value(), agreed[0].has_value());
        if (plan.has_value()) {
          ASSERT_EQ(plan->version, agreed[0]->version);
          ASSERT_GE(plan->version, in_force);
        }
      }
      in_force = ranks[0].in_force();
    }
    EXPECT_EQ(in_force, newest);
  }
}

TEST(GroupsTest, PlansPartitionTheRanks) {
  const GroupPlans plans = PlanGroups(3, 8, 4, 6);
  EXPECT_EQ(plans.world.members.size(), 8u);
  EXPECT_EQ(plans.world.rank, 6);
  EXPECT_EQ(plans.expert_parallel.members, (std::vector<int>{4, 5, 6, 7}));
  EXPECT_EQ(plans.expert_parallel.rank, 2);
  EXPECT_EQ(plans.expert_data.members, (std::vector<int>{2, 6}));
  EXPECT_EQ(plans.expert_data.rank, 1);
  EXPECT_EQ(plans.expert_data.name, "attempt-3/expert-data-2");
}

TEST(TensorStatsTest, AddsUpExpertsAndNamesTheWorst) {
  std::vector<StatSlot> slots(5);
  std::vector<std::int32_t> experts = {8, 9, 10, 11, 12};
  for (std::size_t i = 0; i < slots.size(); ++i) {
    slots[i] = {.amax = static_cast<float>(i),
                .elements = 100,
                .saturated = 10 * i,
                .nonzero = 50,
                .flushed = i == 2 ? 5u : 0u};
  }
  slots[1].dequant_scale_min = 0.5f;
  slots[1].dequant_scale_max = 2;
  slots[3].dequant_scale_min = 0.25f;
  slots[3].dequant_scale_max = 1;
  const iv1::TensorStats stats = MakeTensorStats(
      {.site = {.layer = 1, .op = Op::kFc1}, .tensor = Tensor::kGrad}, experts, slots);
  EXPECT_EQ(stats.amax(), 4);
  EXPECT_EQ(stats.elements(), 500u);
  EXPECT_EQ(stats.saturated(), 100u);
  EXPECT_EQ(stats.dequant_scale_min(), 0.25f);  // groups that saw nothing do not count
  EXPECT_EQ(stats.dequant_scale_max(), 2);
  ASSERT_EQ(stats.worst_size(), 4);  // three saturated, one flushed
  EXPECT_EQ(stats.worst(0).expert(), 12);
  EXPECT_EQ(stats.worst(0).count(), 40u);
  EXPECT_EQ(stats.worst(2).expert(), 10);
  EXPECT_EQ(stats.worst(3).ratio(), 1);
  EXPECT_EQ(stats.worst(3).total(), 50u);
}

}  // namespace
}  // namespace octavo
