#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "base/status.h"
#include "base/str.h"
#include "proto/convert/error_detail.h"
#include "proto/convert/job.h"
#include "proto/convert/precision.h"

namespace octavo {
namespace {

using testing::HasSubstr;

Recipe RandomRecipe(std::mt19937& rng) {
  Recipe recipe = DefaultRecipe(static_cast<RecipeKind>(rng() % kRecipeKindCount));
  if (!recipe.is_fp8()) {
    return recipe;
  }
  if (recipe.kind == RecipeKind::kFp8Delayed) {
    recipe.history_len = 1 + static_cast<std::int32_t>(rng() % 4096);
    recipe.amax_algo = rng() % 2 != 0 ? AmaxAlgorithm::kMax : AmaxAlgorithm::kMostRecent;
  }
  recipe.format = rng() % 2 != 0 ? Fp8Format::kE4M3 : Fp8Format::kHybrid;
  recipe.margin = static_cast<std::int32_t>(rng() % 9);
  recipe.pow2_scales = rng() % 2 != 0;
  recipe.accumulate = static_cast<AccumulateMode>(rng() % 3);
  recipe.min_dequant_scale = static_cast<float>(rng() % 100) / 1024;
  recipe.wgrad = rng() % 2 != 0 ? WgradPrecision::kFp8 : WgradPrecision::kBf16;
  return recipe;
}

TEST(ConvertTest, RecipesRoundTripExactly) {
  const unsigned seed = std::random_device{}();
  SCOPED_TRACE(StrCat("seed ", seed));
  std::mt19937 rng(seed);
  for (int i = 0; i < 2000; ++i) {
    const Recipe recipe = RandomRecipe(rng);
    const absl::StatusOr<Recipe> back = RecipeFromWire(RecipeToWire(recipe));
    ASSERT_TRUE(back.ok()) << back.status();
    EXPECT_EQ(*back, recipe) << DebugString(recipe);
  }
}

TEST(ConvertTest, ASparseRecipeMeansTheKindsDefaults) {
  v1::Recipe wire;
  wire.set_kind("fp8_delayed");
  EXPECT_EQ(*RecipeFromWire(wire), DefaultRecipe(RecipeKind::kFp8Delayed));
  wire.set_kind("fp8_flow");
  EXPECT_EQ(*RecipeFromWire(wire), DefaultRecipe(RecipeKind::kFp8Flow));
}

TEST(ConvertTest, AnUnknownSpellingNamesWhatIsValid) {
  v1::Recipe wire;
  wire.set_kind("fp8_flw");
  EXPECT_THAT(Message(RecipeFromWire(wire).status()),
              HasSubstr("kind is \"fp8_flw\"; valid: fp32, bf16"));
  wire.set_kind("fp8_current");
  wire.set_accumulate("slow");
  EXPECT_EQ(Message(RecipeFromWire(wire).status()),
            "accumulate is \"slow\"; valid: promoted, fast");
}

PrecisionPlan RandomPlan(std::mt19937& rng) {
  PrecisionPlan plan;
  plan.version = 1 + static_cast<std::int64_t>(rng() % 100);
  plan.layers = 1 + static_cast<std::int32_t>(rng() % 8);
  plan.author = static_cast<PlanAuthor>(rng() % 3);
  plan.reason = StrCat("because of ", rng() % 1000);
  for (int i = 0; i < plan.layers * kOpCount; ++i) {
    plan.entries.push_back(RandomRecipe(rng));
  }
  return plan;
}

TEST(ConvertTest, PlansRoundTripExactly) {
  const unsigned seed = std::random_device{}();
  SCOPED_TRACE(StrCat("seed ", seed));
  std::mt19937 rng(seed);
  for (int i = 0; i < 200; ++i) {
    const PrecisionPlan plan = RandomPlan(rng);
    const absl::StatusOr<PrecisionPlan> back = PlanFromWire(PlanToWire(plan));
    ASSERT_TRUE(back.ok()) << back.status();
    EXPECT_EQ(back->version, plan.version);
    EXPECT_EQ(back->layers, plan.layers);
    EXPECT_EQ(back->author, plan.author);
    EXPECT_EQ(back->reason, plan.reason);
    EXPECT_EQ(back->entries, plan.entries);
  }
}

TEST(ConvertTest, ADamagedPlanIsRefused) {
  const PrecisionPlan plan = BuildPlan(3, DefaultRecipe(RecipeKind::kFp8Flow), 1, {});
  v1::PrecisionPlan wire = PlanToWire(plan);
  wire.mutable_entries()->RemoveLast();
  EXPECT_EQ(Message(PlanFromWire(wire).status()),
            "precision plan version 1 has 20 entries for 3 layers; valid is 7 a layer");
  wire = PlanToWire(plan);
  wire.mutable_entries()->SwapElements(0, 1);
  EXPECT_THAT(Message(PlanFromWire(wire).status()),
              HasSubstr("has layer 0 attn_out at entry 0; valid there is layer 0 attn_qkv"));
  wire = PlanToWire(plan);
  wire.mutable_entries(8)->mutable_recipe()->set_kind("bf16");
  EXPECT_THAT(Message(PlanFromWire(wire).status()), HasSubstr("does not match its hash"));
  wire = PlanToWire(plan);
  wire.mutable_entries(8)->mutable_recipe()->set_kind("fp7");
  EXPECT_THAT(Message(PlanFromWire(wire).status()),
              HasSubstr("precision plan version 1, layer 1 attn_out: kind is \"fp7\""));
}

TEST(ConvertTest, LayerRanges) {
  EXPECT_EQ(*ParseLayerRange("3", 6), std::pair(3, 3));
  EXPECT_EQ(*ParseLayerRange("0-5", 6), std::pair(0, 5));
  for (const char* bad : {"", "-", "-1", "1-", "6", "0-6", "3-2", "a", "1 - 2", "1-2-3", "0x1"}) {
    EXPECT_FALSE(ParseLayerRange(bad, 6).ok()) << bad;
  }
}

TEST(ConvertTest, EnumerationsMatchByNumberAndName) {
  for (JobState state : kJobStates) {
    EXPECT_EQ(FromWire(ToWire(state)), state);
    EXPECT_EQ(v1::JobState_Name(ToWire(state)), Name(state));
  }
  EXPECT_EQ(FromWire(v1::JOB_STATE_UNSPECIFIED), std::nullopt);
  EXPECT_EQ(FromWire(static_cast<v1::JobState>(77)), std::nullopt);
  for (int i = 1; i < static_cast<int>(kFailureClassCount); ++i) {
    const auto failure = static_cast<FailureClass>(i);
    EXPECT_EQ(FromWire(ToWire(failure)), failure);
    EXPECT_EQ(v1::FailureClass_Name(ToWire(failure)), Name(failure));
  }
  EXPECT_EQ(FailureClassFromNumber(99), std::nullopt);
  for (int i = 1; i <= v1::PendingReason_MAX; ++i) {
    const auto reason = static_cast<PendingReason>(i);
    EXPECT_EQ(FromWire(ToWire(reason)), reason);
    EXPECT_EQ(v1::PendingReason_Name(ToWire(reason)), Name(reason));
  }
}

v1::FieldViolation Violation(const std::string& field, const std::string& message) {
  v1::FieldViolation violation;
  violation.set_field(field);
  violation.set_message(message);
  violation.set_line(3);
  return violation;
}

TEST(ErrorDetailTest, TravelsInTheTrailer) {
  const absl::Status sent = WithDetail(FailedPreconditionError("job name taken"), "JOB_NAME_TAKEN",
                                       {Violation("name", "valid: another name")});
  const absl::Status got = StatusFromWire(static_cast<int>(sent.code()), ErrorWireMessage(sent),
                                          ErrorTrailerBytes(sent));
  EXPECT_EQ(got.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(Message(got), "job name taken");
  EXPECT_EQ(ErrorReason(got), "JOB_NAME_TAKEN");
  EXPECT_EQ(GetErrorDetail(got)->violations(0).line(), 3);
  // Annotating keeps it.
  EXPECT_EQ(ErrorReason(Annotate(got, "submitting")), "JOB_NAME_TAKEN");
}

TEST(ErrorDetailTest, StatusesWithoutDetailHaveNoTrailer) {
  EXPECT_EQ(ErrorTrailerBytes(UnavailableError("gone")), "");
  EXPECT_EQ(ErrorReason(UnavailableError("gone")), "");
  EXPECT_TRUE(WithDetail(absl::OkStatus(), "X").ok());
  EXPECT_TRUE(StatusFromWire(0, "", "").ok());
  EXPECT_EQ(StatusFromWire(42, "odd", "").code(), absl::StatusCode::kUnknown);
  EXPECT_EQ(ErrorReason(StatusFromWire(3, "bad", "\xff\xff")), "");
}

TEST(ErrorDetailTest, ManyViolationsAreCutToWhatMetadataCarries) {
  std::vector<v1::FieldViolation> violations;
  for (int i = 0; i < 500; ++i) {
    violations.push_back(Violation(StrCat("field", i), std::string(100, 'x')));
  }
  const absl::Status status =
      WithDetail(InvalidArgumentError(std::string(5000, 'm')), "SPEC_INVALID", violations);
  const std::string bytes = ErrorTrailerBytes(status);
  EXPECT_LE(bytes.size(), kErrorTrailerBytesMax);
  EXPECT_GT(bytes.size(), kErrorTrailerBytesMax - 400);
  v1::ErrorDetail detail;
  ASSERT_TRUE(detail.ParseFromString(bytes));
  const int kept = detail.violations_size() - 1;
  EXPECT_EQ(detail.violations(0).field(), "field0");
  EXPECT_EQ(detail.violations(kept).message(),
            StrCat("and ", 500 - kept, " more; correct these first"));
  EXPECT_LE(ErrorWireMessage(status).size(), kErrorMessageBytesMax + 4);
}

}  // namespace
}  // namespace octavo
