#include "worker/agent/telemetry_merge.h"

#include <algorithm>
#include <random>

#include "gtest/gtest.h"

namespace octavo {
namespace {

iv1::TelemetrySnapshot Snapshot(std::int64_t first, std::int64_t last) {
  iv1::TelemetrySnapshot snapshot;
  snapshot.set_first_step(first);
  snapshot.set_last_step(last);
  return snapshot;
}

TEST(MergeSnapshot, SumsCountsTakesExtremesAndIgnoresScalesNobodySaw) {
  iv1::TelemetrySnapshot a = Snapshot(1, 10), b = Snapshot(1, 10);
  iv1::TensorStats* x = a.add_tensors();
  x->set_amax(3);
  x->set_dequant_scale_min(0.5f);
  x->set_dequant_scale_max(2);
  x->set_saturated(7);
  x->set_noise_energy(1.5);
  iv1::TensorStats* y = b.add_tensors();
  y->set_amax(1);  // no group had a value: both scales 0
  y->set_saturated(1);
  y->set_noise_energy(0.25);
  b.add_tensors()->set_layer(9);
  (*a.mutable_flops())["fp8"] = 10;
  (*b.mutable_flops())["fp8"] = 5;
  (*b.mutable_flops())["bf16"] = 1;
  a.add_loads()->set_max_ratio(2);
  b.add_loads()->set_max_ratio(3);
  b.add_recipes_in_force("fp8_flow");
  iv1::ExecutedPrecision* e = a.add_executed();
  e->set_planned("fp8_flow");
  e->set_count(2);
  *b.add_executed() = *e;
  MergeSnapshot(b, &a);
  ASSERT_EQ(a.tensors_size(), 2);
  EXPECT_EQ(a.tensors(0).amax(), 3);
  EXPECT_EQ(a.tensors(0).dequant_scale_min(), 0.5f);
  EXPECT_EQ(a.tensors(0).dequant_scale_max(), 2);
  EXPECT_EQ(a.tensors(0).saturated(), 8u);
  EXPECT_EQ(a.tensors(0).noise_energy(), 1.75);
  EXPECT_EQ(a.flops().at("fp8"), 15);
  EXPECT_EQ(a.flops().at("bf16"), 1);
  EXPECT_EQ(a.loads(0).max_ratio(), 3);
  ASSERT_EQ(a.executed_size(), 1);
  EXPECT_EQ(a.executed(0).count(), 4);
  EXPECT_EQ(a.recipes_in_force_size(), 1);
  EXPECT_EQ(a.ranks(), 2);
}

// Every number is what a plain sum over all ranks gives, in whatever order they report.
TEST(MergeSnapshot, OrderOfRanksDoesNotMatter) {
  const auto seed = std::random_device()();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 rng(seed);
  std::vector<iv1::TelemetrySnapshot> ranks;
  for (int rank = 0; rank < 5; ++rank) {
    iv1::TelemetrySnapshot snapshot = Snapshot(1, 10);
    for (int layer = 0; layer < 3; ++layer) {
      iv1::TensorStats* t = snapshot.add_tensors();
      t->set_layer(layer);
      t->set_elements(rng() % 1000);
      t->set_amax(static_cast<float>(rng() % 1000));
      for (int expert = 0; expert < 4; ++expert) {
        auto* worst = t->add_worst();
        worst->set_expert(static_cast<int>(rng() % 12));
        worst->set_ratio(expert % 3);
        worst->set_count(rng() % 10);
        worst->set_total(10);
      }
    }
    ranks.push_back(snapshot);
  }
  const auto merge = [](const std::vector<iv1::TelemetrySnapshot>& all) {
    iv1::TelemetrySnapshot merged = all[0];
    merged.set_ranks(1);
    for (std::size_t i = 1; i < all.size(); ++i) {
      MergeSnapshot(all[i], &merged);
    }
    return merged;
  };
  const iv1::TelemetrySnapshot one = merge(ranks);
  std::shuffle(ranks.begin(), ranks.end(), rng);
  const iv1::TelemetrySnapshot two = merge(ranks);
  for (int layer = 0; layer < 3; ++layer) {
    EXPECT_EQ(one.tensors(layer).elements(), two.tensors(layer).elements());
    EXPECT_EQ(one.tensors(layer).amax(), two.tensors(layer).amax());
    EXPECT_LE(one.tensors(layer).worst_size(), kWorstKept);
  }
  EXPECT_EQ(one.ranks(), 5);
}

TEST(TelemetryMerger, GivesOutCompleteWindowsAndTheOlderOnesBefore) {
  TelemetryMerger merger;
  EXPECT_TRUE(merger.Add(Snapshot(1, 10), 2, 0).empty());
  EXPECT_TRUE(merger.Add(Snapshot(11, 20), 2, 1).empty()) << "the slower rank may still fill 1-10";
  auto ready = merger.Add(Snapshot(1, 10), 2, 2);
  ASSERT_EQ(ready.size(), 1u);
  EXPECT_EQ(ready[0].ranks(), 2);
  EXPECT_TRUE(merger.Add(Snapshot(21, 30), 2, 3).empty());
  ready = merger.Add(Snapshot(31, 40), 2, 4);
  ASSERT_EQ(ready.size(), 1u) << "two windows back nobody reports any more";
  EXPECT_EQ(ready[0].last_step(), 20);
  ready = merger.Flush(4 + TelemetryMerger::kMergeWaitMicros);
  ASSERT_EQ(ready.size(), 2u);
  EXPECT_EQ(ready[0].last_step(), 30);
  EXPECT_TRUE(merger.Flush(1'000'000'000).empty());
}

TEST(TelemetryMerger, OneRankIsPassedOnAtOnce) {
  TelemetryMerger merger;
  EXPECT_EQ(merger.Add(Snapshot(1, 10), 1, 0).size(), 1u);
}

}  // namespace
}  // namespace octavo
