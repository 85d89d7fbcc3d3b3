#include "proto/precision/recipe.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace octavo {
namespace {

TEST(Recipe, NamesRoundTripAndUnknownNamesAreRefused) {
  ASSERT_EQ(RecipeKindNames().size(), static_cast<std::size_t>(kRecipeKindCount));
  for (const std::string& name : RecipeKindNames()) {
    const auto kind = ParseRecipeKind(name);
    ASSERT_TRUE(kind.has_value()) << name;
    EXPECT_EQ(Name(*kind), name);
  }
  EXPECT_FALSE(ParseRecipeKind("fp8").has_value());
  EXPECT_FALSE(ParseRecipeKind("BF16").has_value());
}

TEST(Recipe, CanonicalTextParsesBackToEveryParameter) {
  for (int i = 0; i < kRecipeKindCount; ++i) {
    const Recipe plain = DefaultRecipe(static_cast<RecipeKind>(i));
    EXPECT_EQ(ParseRecipe(DebugString(plain)), plain) << DebugString(plain);
    Recipe changed = plain;
    changed.accumulate = AccumulateMode::kFast;
    changed.wgrad = WgradPrecision::kBf16;
    changed.min_dequant_scale = 1e-6f;
    changed.history_len = 17;
    changed.amax_algo = AmaxAlgorithm::kMostRecent;
    changed.margin = 3;
    changed.pow2_scales = !plain.is_per_tensor();
    changed.format = plain.is_per_tensor() ? Fp8Format::kE4M3 : Fp8Format::kHybrid;
    const std::optional<Recipe> parsed = ParseRecipe(DebugString(changed));
    ASSERT_TRUE(parsed.has_value()) << DebugString(changed);
    EXPECT_EQ(DebugString(*parsed), DebugString(changed));
  }
  Recipe delayed = DefaultRecipe(RecipeKind::kFp8Delayed);
  delayed.history_len = 17;
  delayed.margin = 3;
  delayed.min_dequant_scale = 0.1f;
  delayed.accumulate = AccumulateMode::kPromoted;
  EXPECT_EQ(ParseRecipe(DebugString(delayed)), delayed);
  for (const char* text : {"", "fp8", "fp8_flow(", "fp8_flow()", "bf16(wgrad=bf16)",
                           "fp8_delayed(history_len=4x)", "fp8_delayed(history=4)",
                           "fp8_delayed(margin)", "fp8_flow(wgrad=bf16", "fp8_flow(wgrad=fp4)"}) {
    EXPECT_FALSE(ParseRecipe(text).has_value()) << text;
  }
}

TEST(Recipe, DefaultsFollowTheCatalogue) {
  EXPECT_EQ(DefaultRecipe(RecipeKind::kFp8Delayed).format, Fp8Format::kHybrid);
  EXPECT_EQ(DefaultRecipe(RecipeKind::kFp8Current).format, Fp8Format::kHybrid);
  EXPECT_EQ(DefaultRecipe(RecipeKind::kFp8Blockwise).format, Fp8Format::kE4M3);
  EXPECT_FALSE(DefaultRecipe(RecipeKind::kFp8Blockwise).pow2_scales);
  EXPECT_TRUE(DefaultRecipe(RecipeKind::kFp8Flow).pow2_scales);
  EXPECT_TRUE(DefaultRecipe(RecipeKind::kMxfp8).pow2_scales);
  EXPECT_EQ(DefaultRecipe(RecipeKind::kFp8Delayed).history_len, 256);
  for (int i = 0; i < kRecipeKindCount; ++i) {
    const Recipe recipe = DefaultRecipe(static_cast<RecipeKind>(i));
    EXPECT_EQ(ValidateRecipe(recipe, Op::kFc1), "") << DebugString(recipe);
  }
}

TEST(Recipe, IdentityCountsEveryMeaningfulParameterAndNoOther) {
  const Recipe delayed = DefaultRecipe(RecipeKind::kFp8Delayed);
  std::set<std::uint64_t> hashes = {SemanticHash(delayed)};
  const auto distinct = [&hashes, &delayed](auto change) {
    Recipe changed = delayed;
    change(changed);
    EXPECT_TRUE(hashes.insert(SemanticHash(changed)).second) << DebugString(changed);
  };
  distinct([](Recipe& r) { r.format = Fp8Format::kE4M3; });
  distinct([](Recipe& r) { r.history_len = 255; });
  distinct([](Recipe& r) { r.amax_algo = AmaxAlgorithm::kMostRecent; });
  distinct([](Recipe& r) { r.margin = 1; });
  distinct([](Recipe& r) { r.accumulate = AccumulateMode::kFast; });
  distinct([](Recipe& r) { r.accumulate = AccumulateMode::kPromoted; });
  distinct([](Recipe& r) { r.min_dequant_scale = 1e-6f; });
  distinct([](Recipe& r) { r.wgrad = WgradPrecision::kBf16; });
  distinct([](Recipe& r) { r.kind = RecipeKind::kFp8Current; });

  Recipe bf16 = DefaultRecipe(RecipeKind::kBf16);
  bf16.history_len = 7;  // means nothing for bf16
  EXPECT_EQ(SemanticHash(bf16), SemanticHash(DefaultRecipe(RecipeKind::kBf16)));
  EXPECT_EQ(DebugString(bf16), "bf16");
  // Stable over versions of the program: stored plans and checkpoints compare it.
  EXPECT_EQ(DebugString(delayed),
            "fp8_delayed(format=hybrid,history_len=256,amax_algo=max,margin=0)");
  EXPECT_EQ(DebugString(DefaultRecipe(RecipeKind::kFp8Flow)), "fp8_flow");
}

TEST(Recipe, ParametersAreThoseThatTheCanonicalTextKeeps) {
  const std::vector<std::pair<std::string, std::string>> unusual = {
      {"format", "hybrid"}, {"history_len", "17"},         {"amax_algo", "most_recent"},
      {"margin", "3"},      {"pow2_scales", "true"},       {"accumulate", "fast"},
      {"wgrad", "bf16"},    {"min_dequant_scale", "0.125"}};
  for (const std::string& name : RecipeKindNames()) {
    const RecipeKind kind = *ParseRecipeKind(name);
    std::vector<std::string> kept;
    for (const auto& [key, value] : unusual) {
      // Per-tensor recipes are hybrid by themselves.
      const bool other = key == "format" && DefaultRecipe(kind).format == Fp8Format::kHybrid;
      const auto recipe = ParseRecipe(name + "(" + key + "=" + (other ? "e4m3" : value) + ")");
      if (recipe.has_value() && DebugString(*recipe) != DebugString(DefaultRecipe(kind))) {
        kept.push_back(key);
      }
    }
    std::vector<std::string> listed = RecipeParameters(kind);
    std::sort(listed.begin(), listed.end());
    std::sort(kept.begin(), kept.end());
    EXPECT_EQ(listed, kept) << name;
  }
}

TEST(Recipe, ValidationNamesWhatIsValid) {
  EXPECT_NE(ValidateRecipe(DefaultRecipe(RecipeKind::kFp8Delayed), Op::kDispatch)
                .find("valid for dispatch"),
            std::string::npos);
  EXPECT_EQ(ValidateRecipe(DefaultRecipe(RecipeKind::kMxfp8), Op::kDispatch), "");
  Recipe recipe = DefaultRecipe(RecipeKind::kFp8Delayed);
  recipe.history_len = 4097;
  EXPECT_NE(ValidateRecipe(recipe, Op::kFc1).find("1 to 4096"), std::string::npos);
  recipe = DefaultRecipe(RecipeKind::kFp8Current);
  recipe.margin = 9;
  EXPECT_NE(ValidateRecipe(recipe, Op::kFc1).find("0 to 8"), std::string::npos);
  recipe = DefaultRecipe(RecipeKind::kFp8Flow);
  recipe.format = Fp8Format::kHybrid;
  EXPECT_NE(ValidateRecipe(recipe, Op::kFc1), "");
  recipe = DefaultRecipe(RecipeKind::kFp8Blockwise);
  recipe.min_dequant_scale = -1;
  EXPECT_NE(ValidateRecipe(recipe, Op::kFc1), "");
}

TEST(Recipe, PerTensorPayloadTravelsAsPow2Blockwise) {
  for (RecipeKind kind : {RecipeKind::kFp8Delayed, RecipeKind::kFp8Current}) {
    const Recipe payload = PayloadRecipe(DefaultRecipe(kind));
    EXPECT_EQ(payload.kind, RecipeKind::kFp8Blockwise);
    EXPECT_TRUE(payload.pow2_scales);
    EXPECT_EQ(ValidateRecipe(payload, Op::kDispatch), "");
  }
  EXPECT_EQ(PayloadRecipe(DefaultRecipe(RecipeKind::kFp8Flow)).kind, RecipeKind::kFp8Flow);
}

TEST(Recipe, HardwareIsRefusedWithTheReason) {
  const DeviceAbility cpu{}, ampere{true, 80}, hopper{true, 90}, blackwell{true, 100};
  EXPECT_NE(RefusalReason(DefaultRecipe(RecipeKind::kFp32), hopper, false), "");
  EXPECT_EQ(RefusalReason(DefaultRecipe(RecipeKind::kFp32), cpu, false), "");
  EXPECT_NE(RefusalReason(DefaultRecipe(RecipeKind::kFp8Flow), ampere, true).find("SM 89"),
            std::string::npos);
  EXPECT_EQ(RefusalReason(DefaultRecipe(RecipeKind::kFp8Flow), hopper, false), "");
  const Recipe mx = DefaultRecipe(RecipeKind::kMxfp8);
  EXPECT_NE(RefusalReason(mx, cpu, false).find("allow_emulation"), std::string::npos);
  EXPECT_NE(RefusalReason(mx, hopper, false), "");
  EXPECT_EQ(RefusalReason(mx, hopper, true), "");
  EXPECT_EQ(RefusalReason(mx, blackwell, false), "");
}

}  // namespace
}  // namespace octavo
