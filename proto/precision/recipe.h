// Recipe: how one product (or payload) is computed. A value; two recipes are the same only if every
// parameter is (SemanticHash), whatever their names. Catalogue and parameters: NUMERICS 3.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "proto/precision/op_id.h"

namespace octavo {

enum class RecipeKind : std::uint8_t {
  kFp32,
  kBf16,
  kFp8Delayed,
  kFp8Current,
  kFp8Blockwise,
  kFp8Flow,
  kMxfp8,
};
inline constexpr int kRecipeKindCount = 7;

enum class Fp8Format : std::uint8_t { kE4M3, kHybrid };  // hybrid: gradients in E5M2
enum class AmaxAlgorithm : std::uint8_t { kMax, kMostRecent };
enum class AccumulateMode : std::uint8_t { kDefault, kPromoted, kFast };
enum class WgradPrecision : std::uint8_t { kFp8, kBf16 };

struct Recipe {
  RecipeKind kind = RecipeKind::kBf16;
  Fp8Format format = Fp8Format::kE4M3;  // meaningful for FP8 kinds
  std::int32_t history_len = 256;       // delayed; 1..4096
  AmaxAlgorithm amax_algo = AmaxAlgorithm::kMax;
  std::int32_t margin = 0;   // per-tensor kinds; 0..8
  bool pow2_scales = false;  // blockwise option; always true for flow and mxfp8
  AccumulateMode accumulate = AccumulateMode::kDefault;
  float min_dequant_scale = 0;  // 0: off
  WgradPrecision wgrad = WgradPrecision::kFp8;

  friend bool operator==(const Recipe&, const Recipe&) = default;

  bool is_fp8() const { return kind >= RecipeKind::kFp8Delayed; }
  bool is_per_tensor() const {
    return kind == RecipeKind::kFp8Delayed || kind == RecipeKind::kFp8Current;
  }
  bool gradient_is_e5m2() const { return is_fp8() && format == Fp8Format::kHybrid; }
};

// The recipe of that kind with NUMERICS 3's defaults (hybrid for per-tensor kinds, E4M3 for the
// rest, power-of-two scales where the kind demands them).
Recipe DefaultRecipe(RecipeKind kind);

// "fp8_flow" etc. for the kind.
std::string_view Name(RecipeKind kind);
std::optional<RecipeKind> ParseRecipeKind(std::string_view text);
std::vector<std::string> RecipeKindNames();
// Names of the parameters that mean something for the kind (NUMERICS 3), in the order of the wire.
std::vector<std::string> RecipeParameters(RecipeKind kind);

// Canonical text, e.g. "fp8_delayed(format=hybrid,history_len=256,…)"; only parameters that mean
// something for the kind appear. DebugString of equal recipes is equal. "bf16" prints "bf16".
std::string DebugString(const Recipe& recipe);
// The inverse of DebugString: parameters that the text leaves out have the kind's defaults. Empty
// for an unknown kind, parameter or spelling; ranges are ValidateRecipe's.
std::optional<Recipe> ParseRecipe(std::string_view text);
// 64-bit hash over every meaningful parameter (FNV-1a of DebugString), stable across versions.
std::uint64_t SemanticHash(const Recipe& recipe);

// Empty when the recipe is allowed for the op; else a sentence with what is valid.
// (dispatch takes bf16, fp32, fp8_blockwise, fp8_flow, mxfp8; ranges of parameters.)
std::string ValidateRecipe(const Recipe& recipe, Op op);

// Required divisor of hidden / expert hidden / projection widths (NUMERICS 3).
std::int64_t DimensionMultiple(RecipeKind kind);

// What the dispatch payload of a layer is when `dispatch` follows `layer_recipe` (NUMERICS 4):
// flow, blockwise and mxfp8 stay; per-tensor kinds travel as pow2 blockwise; others stay.
Recipe PayloadRecipe(const Recipe& layer_recipe);

struct DeviceAbility {
  bool is_cuda = false;
  std::int32_t sm = 0;  // 90 for Hopper; 0 on the CPU
};
// Empty when the device may run it; else the reason (NUMERICS 3, hardware).
std::string RefusalReason(const Recipe& recipe, const DeviceAbility& device, bool allow_emulation);

}  // namespace octavo
