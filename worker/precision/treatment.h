// What a recipe means for one operand: formats, tilings, rules, accumulation (NUMERICS 2 to 4).
// Pure; the one place that turns a recipe into kernel arguments.
#pragma once

#include "kernels/ops.h"
#include "proto/precision/op_id.h"
#include "proto/precision/recipe.h"
#include "worker/precision/executed.h"

namespace octavo {

enum class GemmPass : std::uint8_t { kFprop, kDgrad, kWgrad };

inline DType FormatOf(const Recipe& recipe, Tensor tensor) {
  return tensor == Tensor::kGrad && recipe.gradient_is_e5m2() ? DType::kE5M2 : DType::kE4M3;
}

// Activations and gradients: 1×128 (1×32 for MX) along the contraction, or one per group.
inline QuantizeRule ActivationRule(const Recipe& recipe, Tensor tensor) {
  QuantizeRule rule;
  rule.format = FormatOf(recipe, tensor);
  rule.pow2 = recipe.pow2_scales;
  rule.margin = recipe.margin;
  rule.min_dequant_scale = recipe.min_dequant_scale;
  rule.tiling = recipe.is_per_tensor()              ? Tiling::kTensor
                : recipe.kind == RecipeKind::kMxfp8 ? Tiling::kRow32
                                                    : Tiling::kRow128;
  return rule;
}

inline QuantizeRule WeightRule(const Recipe& recipe) {
  QuantizeRule rule = ActivationRule(recipe, Tensor::kWeight);
  if (rule.tiling == Tiling::kRow128) {
    rule.tiling = Tiling::kBlock128;
  }
  return rule;
}

// Default: fast for fprop of per-tensor kinds, promoted elsewhere.
inline Accumulate AccumulateOf(const Recipe& recipe, GemmPass pass) {
  switch (recipe.accumulate) {
    case AccumulateMode::kFast:
      return Accumulate::kFast;
    case AccumulateMode::kPromoted:
      return Accumulate::kPromoted;
    case AccumulateMode::kDefault:
      break;
  }
  return recipe.is_per_tensor() && pass == GemmPass::kFprop ? Accumulate::kFast
                                                            : Accumulate::kPromoted;
}

inline FlopPrecision FlopsOf(const Recipe& recipe, GemmPass pass) {
  if (recipe.kind == RecipeKind::kFp32) {
    return FlopPrecision::kFp32;
  }
  const bool fp8 =
      recipe.is_fp8() && !(pass == GemmPass::kWgrad && recipe.wgrad == WgradPrecision::kBf16);
  return fp8 ? FlopPrecision::kFp8 : FlopPrecision::kBf16;
}

// Both carry 1×n tiles with equal rules, so one's row-wise copy is the other's.
inline bool SameRowForm(const Recipe& a, const Recipe& b, Tensor tensor) {
  if (!a.is_fp8() || !b.is_fp8() || a.is_per_tensor() || b.is_per_tensor()) {
    return false;
  }
  const QuantizeRule x = ActivationRule(a, tensor), y = ActivationRule(b, tensor);
  return x.format == y.format && x.tiling == y.tiling && x.pow2 == y.pow2 &&
         x.min_dequant_scale == y.min_dequant_scale;
}

// Column-wise copies come from row-wise ones by the scaling-aware transpose.
inline bool IsCastingFree(const Recipe& recipe) { return recipe.kind == RecipeKind::kFp8Flow; }

}  // namespace octavo
