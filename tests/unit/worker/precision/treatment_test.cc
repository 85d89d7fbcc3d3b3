// Formats and granularities of every recipe, pinned.
#include "worker/precision/treatment.h"

#include <gtest/gtest.h>

namespace octavo {
namespace {

TEST(Treatment, FormatsAndTilingsOfEveryRecipe) {
  struct Expected {
    RecipeKind kind;
    DType forward, gradient;
    Tiling activation, weight;
    bool pow2;
    Accumulate fprop;
  };
  const Expected kTable[] = {
      {RecipeKind::kFp8Delayed, DType::kE4M3, DType::kE5M2, Tiling::kTensor, Tiling::kTensor, false,
       Accumulate::kFast},
      {RecipeKind::kFp8Current, DType::kE4M3, DType::kE5M2, Tiling::kTensor, Tiling::kTensor, false,
       Accumulate::kFast},
      {RecipeKind::kFp8Blockwise, DType::kE4M3, DType::kE4M3, Tiling::kRow128, Tiling::kBlock128,
       false, Accumulate::kPromoted},
      {RecipeKind::kFp8Flow, DType::kE4M3, DType::kE4M3, Tiling::kRow128, Tiling::kBlock128, true,
       Accumulate::kPromoted},
      {RecipeKind::kMxfp8, DType::kE4M3, DType::kE4M3, Tiling::kRow32, Tiling::kRow32, true,
       Accumulate::kPromoted},
  };
  for (const Expected& e : kTable) {
    const Recipe recipe = DefaultRecipe(e.kind);
    EXPECT_EQ(ActivationRule(recipe, Tensor::kInput).format, e.forward) << Name(e.kind);
    EXPECT_EQ(ActivationRule(recipe, Tensor::kGrad).format, e.gradient) << Name(e.kind);
    EXPECT_EQ(WeightRule(recipe).format, DType::kE4M3) << Name(e.kind);
    EXPECT_EQ(ActivationRule(recipe, Tensor::kInput).tiling, e.activation) << Name(e.kind);
    EXPECT_EQ(ActivationRule(recipe, Tensor::kGrad).tiling, e.activation) << Name(e.kind);
    EXPECT_EQ(WeightRule(recipe).tiling, e.weight) << Name(e.kind);
    EXPECT_EQ(WeightRule(recipe).pow2, e.pow2) << Name(e.kind);
    EXPECT_EQ(AccumulateOf(recipe, GemmPass::kFprop), e.fprop) << Name(e.kind);
    EXPECT_EQ(AccumulateOf(recipe, GemmPass::kDgrad), Accumulate::kPromoted) << Name(e.kind);
    EXPECT_EQ(AccumulateOf(recipe, GemmPass::kWgrad), Accumulate::kPromoted) << Name(e.kind);
  }
}

TEST(Treatment, OptionsChangeWhatTheySay) {
  Recipe blockwise = DefaultRecipe(RecipeKind::kFp8Blockwise);
  blockwise.format = Fp8Format::kHybrid;
  EXPECT_EQ(ActivationRule(blockwise, Tensor::kGrad).format, DType::kE5M2);
  EXPECT_EQ(ActivationRule(blockwise, Tensor::kInput).format, DType::kE4M3);
  Recipe delayed = DefaultRecipe(RecipeKind::kFp8Delayed);
  delayed.format = Fp8Format::kE4M3;
  delayed.margin = 3;
  delayed.accumulate = AccumulateMode::kPromoted;
  EXPECT_EQ(ActivationRule(delayed, Tensor::kGrad).format, DType::kE4M3);
  EXPECT_EQ(ActivationRule(delayed, Tensor::kGrad).margin, 3);
  EXPECT_EQ(AccumulateOf(delayed, GemmPass::kFprop), Accumulate::kPromoted);
  blockwise.accumulate = AccumulateMode::kFast;
  EXPECT_EQ(AccumulateOf(blockwise, GemmPass::kWgrad), Accumulate::kFast);
  blockwise.wgrad = WgradPrecision::kBf16;
  EXPECT_EQ(FlopsOf(blockwise, GemmPass::kWgrad), FlopPrecision::kBf16);
  EXPECT_EQ(FlopsOf(blockwise, GemmPass::kDgrad), FlopPrecision::kFp8);
  EXPECT_EQ(FlopsOf(DefaultRecipe(RecipeKind::kFp32), GemmPass::kFprop), FlopPrecision::kFp32);
}

TEST(Treatment, PayloadIsAnOperandOnlyWhenItsRuleIsTheSame) {
  const Recipe flow = DefaultRecipe(RecipeKind::kFp8Flow);
  Recipe blockwise = DefaultRecipe(RecipeKind::kFp8Blockwise);
  EXPECT_TRUE(SameRowForm(flow, flow, Tensor::kInput));
  EXPECT_FALSE(SameRowForm(flow, blockwise, Tensor::kInput));
  blockwise.pow2_scales = true;
  EXPECT_TRUE(SameRowForm(flow, blockwise, Tensor::kInput));
  EXPECT_FALSE(SameRowForm(flow, DefaultRecipe(RecipeKind::kMxfp8), Tensor::kInput));
  EXPECT_FALSE(SameRowForm(DefaultRecipe(RecipeKind::kBf16), flow, Tensor::kInput));
  const Recipe delayed = DefaultRecipe(RecipeKind::kFp8Delayed);
  EXPECT_FALSE(SameRowForm(PayloadRecipe(delayed), delayed, Tensor::kInput));
}

}  // namespace
}  // namespace octavo
