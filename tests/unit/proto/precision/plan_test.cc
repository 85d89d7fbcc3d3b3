#include "proto/precision/plan.h"

#include <gtest/gtest.h>

namespace octavo {
namespace {

TEST(Plan, ProtectsFirstAndLastLayersOnlyUnderFp8) {
  const PrecisionPlan plan = BuildPlan(6, DefaultRecipe(RecipeKind::kFp8Flow), 1, {});
  EXPECT_EQ(plan.Resolve(0, Op::kFc1).kind, RecipeKind::kBf16);
  EXPECT_EQ(plan.Resolve(0, Op::kDispatch).kind, RecipeKind::kBf16);
  EXPECT_EQ(plan.Resolve(5, Op::kAttnQkv).kind, RecipeKind::kBf16);
  EXPECT_EQ(plan.Resolve(1, Op::kFc2).kind, RecipeKind::kFp8Flow);
  EXPECT_EQ(plan.version, 1);
  const PrecisionPlan fp32 = BuildPlan(6, DefaultRecipe(RecipeKind::kFp32), 1, {});
  EXPECT_EQ(fp32.Resolve(0, Op::kFc1).kind, RecipeKind::kFp32);
}

TEST(Plan, DispatchFollowsTheLayerUnlessNamed) {
  const PrecisionPlan delayed = BuildPlan(2, DefaultRecipe(RecipeKind::kFp8Delayed), 0, {});
  EXPECT_EQ(delayed.Resolve(1, Op::kDispatch).kind, RecipeKind::kFp8Blockwise);
  EXPECT_TRUE(delayed.Resolve(1, Op::kDispatch).pow2_scales);
  const PrecisionPlan named =
      BuildPlan(2, DefaultRecipe(RecipeKind::kFp8Flow), 0,
                {{1, 1, {Op::kDispatch}, DefaultRecipe(RecipeKind::kBf16)}});
  EXPECT_EQ(named.Resolve(1, Op::kDispatch).kind, RecipeKind::kBf16);
  EXPECT_EQ(named.Resolve(1, Op::kFc1).kind, RecipeKind::kFp8Flow);
  EXPECT_EQ(named.Resolve(0, Op::kDispatch).kind, RecipeKind::kFp8Flow);
}

TEST(Plan, LaterOverridesWinAndDiffListsThem) {
  const PrecisionPlan before = BuildPlan(4, DefaultRecipe(RecipeKind::kFp8Flow), 1, {});
  PrecisionPlan after = before;
  ApplyOverride(after, {1, 2, {}, DefaultRecipe(RecipeKind::kBf16)});
  ApplyOverride(after, {2, 9, {Op::kFc1}, DefaultRecipe(RecipeKind::kFp8Current)});
  EXPECT_EQ(after.Resolve(2, Op::kFc1).kind, RecipeKind::kFp8Current);
  EXPECT_EQ(after.Resolve(2, Op::kFc2).kind, RecipeKind::kBf16);
  EXPECT_EQ(after.Resolve(3, Op::kFc1).kind, RecipeKind::kFp8Current);
  const auto changes = Diff(before, after);
  EXPECT_EQ(changes.size(), 2u * kOpCount + 1u);
  EXPECT_EQ(changes.back().site.layer, 3);
  EXPECT_EQ(changes.back().before.kind, RecipeKind::kBf16);
  EXPECT_NE(SemanticHash(before), SemanticHash(after));
  EXPECT_TRUE(Diff(before, before).empty());
}

TEST(Plan, HashIgnoresVersionAuthorAndReason) {
  PrecisionPlan a = BuildPlan(3, DefaultRecipe(RecipeKind::kFp8Flow), 1, {});
  PrecisionPlan b = a;
  b.version = 7;
  b.author = PlanAuthor::kPolicy;
  b.reason = "flushed 0.3 > 0.25";
  EXPECT_EQ(SemanticHash(a), SemanticHash(b));
  EXPECT_EQ(DebugString(a), DebugString(b));
}

TEST(Plan, DebugStringGroupsLayers) {
  const PrecisionPlan plan = BuildPlan(4, DefaultRecipe(RecipeKind::kFp8Flow), 1, {});
  EXPECT_EQ(DebugString(plan), "layer 0: bf16\nlayers 1-2: fp8_flow\nlayer 3: bf16\n");
}

}  // namespace
}  // namespace octavo
