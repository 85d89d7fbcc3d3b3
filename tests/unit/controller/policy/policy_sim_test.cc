// 10 000 random histories: bounded flapping, timely fallback, certain return, untouched operators.
#include <gtest/gtest.h>

#include <cstdlib>
#include <random>

#include "tests/unit/controller/policy/policy_fixture.h"

namespace octavo {
namespace {

constexpr RecipeKind kKinds[] = {RecipeKind::kFp8Delayed, RecipeKind::kFp8Current,
                                 RecipeKind::kFp8Blockwise, RecipeKind::kFp8Flow};

// Kinds of trouble that act for every recipe.
void Spoil(int kind, TensorHealth& t) {
  switch (kind) {
    case 0:
      t.noise_energy = t.signal_energy / 3;
      break;
    case 1:
      t.flushed = t.nonzero / 2;
      break;
    default:
      t.nonfinite = 3;
      break;
  }
}

TEST(PolicySimulation, TenThousandRandomHistoriesKeepThePromises) {
  const char* given = std::getenv("OCTAVO_SEED");
  const std::uint64_t seed = given != nullptr ? std::strtoull(given, nullptr, 10) : 20261129;
  const char* fewer = std::getenv("OCTAVO_HISTORIES");  // a sanitizer takes its time
  const int histories = fewer != nullptr ? std::max(100, std::atoi(fewer)) : 10000;
  std::mt19937_64 rng(seed);
  std::printf("seed %llu (OCTAVO_SEED repeats it)\n", static_cast<unsigned long long>(seed));
  std::int64_t falls = 0, returns = 0, pins = 0;
  for (int h = 0; h < histories; ++h) {
    PolicyRun run(3, kKinds[rng() % 4]);
    run.config.hold_steps = 20 + static_cast<std::int64_t>(rng() % 60);
    run.config.grace_steps = static_cast<std::int64_t>(rng() % 40);
    run.config.max_flaps = 1 + static_cast<int>(rng() % 3);
    run.config.healthy_snapshots = 1 + static_cast<int>(rng() % 4);
    run.state = PolicyState{};
    PolicyOnStart(run.config, run.state, 0);
    const OpSite bad{static_cast<std::int32_t>(rng() % 3), rng() % 2 ? Op::kFc1 : Op::kAttnQkv};
    const OpSite pinned{static_cast<std::int32_t>(rng() % 3), Op::kFc2};
    PolicyOnOperator(run.state, {pinned}, false);
    const Recipe operators = run.plan.Resolve(pinned.layer, pinned.op);
    const int trouble = static_cast<int>(rng() % 3);
    const bool shadow_too = rng() % 2 == 0;
    bool active = false;
    run.spoil = [&](TensorHealth& t) {
      if (active && (t.site == bad || t.site == pinned) && (!t.shadow || shadow_too)) {
        Spoil(trouble, t);
      }
    };
    // Random bursts of trouble.
    for (int burst = 0; burst < 4; ++burst) {
      active = false;
      run.Run(static_cast<int>(rng() % 6));
      active = true;
      const auto before = run.decisions.size();
      const bool was_fp8 = run.plan.Resolve(bad.layer, bad.op).is_fp8();
      // Promised: within the grace that remains, plus the longest run a signal needs.
      const std::int64_t until = std::max(run.state.grace_until, run.state.site_grace_until[bad]);
      const std::int64_t grace = std::max<std::int64_t>(0, until - run.step) / run.interval + 1;
      run.Run(static_cast<int>(grace) + kFlushedRunning);
      if (was_fp8) {
        bool fell = false;
        for (auto i = before; i < run.decisions.size(); ++i) {
          fell = fell || (run.decisions[i].site == bad &&
                          run.decisions[i].direction != Direction::kRestore);
        }
        ASSERT_TRUE(fell) << "seed " << seed << " history " << h << ": trouble without a fallback";
      }
    }
    active = false;
    run.Run(static_cast<int>(run.config.hold_steps * 16 / run.interval) + 40);
    int site_falls = 0;
    bool site_pinned = false;
    for (const PolicyDecision& d : run.decisions) {
      ASSERT_NE(d.site, pinned) << "seed " << seed << ": the operator's site was touched";
      if (d.site == bad && d.direction != Direction::kRestore) {
        ++site_falls;
      }
      site_pinned = site_pinned || (d.site == bad && d.direction == Direction::kPin);
      falls += d.direction == Direction::kFallback;
      returns += d.direction == Direction::kRestore;
      pins += d.direction == Direction::kPin;
    }
    ASSERT_LE(site_falls, run.config.max_flaps + 1) << "seed " << seed << " history " << h;
    ASSERT_EQ(run.plan.Resolve(pinned.layer, pinned.op), operators);
    ASSERT_EQ(run.plan.Resolve(bad.layer, bad.op).is_fp8(), !site_pinned)
        << "seed " << seed << " history " << h << ": good shadows must bring the op back";
  }
  std::printf("%lld falls, %lld returns, %lld pins\n", static_cast<long long>(falls),
              static_cast<long long>(returns), static_cast<long long>(pins));
  EXPECT_GT(returns, histories / 10);
  EXPECT_GT(pins, histories / 100);
}

}  // namespace
}  // namespace octavo
