#include "proto/convert/precision.h"

#include "base/status.h"
#include "base/str.h"

namespace octavo {
namespace {

template <class Names>
absl::Status BadWord(std::string_view field, std::string_view found, const Names& valid) {
  std::string text = StrCat(field, " is \"", found, "\"; valid: ", StrJoin(valid, ", "));
  if (const auto near = NearestMatch(found, valid)) {
    StrAppend(&text, "; did you mean \"", *near, "\"?");
  }
  return InvalidArgumentError(text);
}

using Words = std::vector<std::string>;

}  // namespace

v1::Recipe RecipeToWire(const Recipe& recipe) {
  v1::Recipe wire;
  wire.set_kind(std::string(Name(recipe.kind)));
  if (!recipe.is_fp8()) {
    return wire;
  }
  wire.set_format(recipe.format == Fp8Format::kHybrid ? "hybrid" : "e4m3");
  if (recipe.kind == RecipeKind::kFp8Delayed) {
    wire.set_history_len(recipe.history_len);
    wire.set_amax_algo(recipe.amax_algo == AmaxAlgorithm::kMax ? "max" : "most_recent");
  }
  wire.set_margin(recipe.margin);
  wire.set_pow2_scales(recipe.pow2_scales);
  switch (recipe.accumulate) {
    case AccumulateMode::kDefault:
      break;
    case AccumulateMode::kPromoted:
      wire.set_accumulate("promoted");
      break;
    case AccumulateMode::kFast:
      wire.set_accumulate("fast");
      break;
  }
  wire.set_min_dequant_scale(recipe.min_dequant_scale);
  wire.set_wgrad(recipe.wgrad == WgradPrecision::kFp8 ? "fp8" : "bf16");
  return wire;
}

absl::StatusOr<Recipe> RecipeFromWire(const v1::Recipe& wire) {
  const std::optional<RecipeKind> kind = ParseRecipeKind(wire.kind());
  if (!kind.has_value()) {
    return BadWord("kind", wire.kind(), RecipeKindNames());
  }
  Recipe recipe = DefaultRecipe(*kind);
  if (wire.format() == "e4m3") {
    recipe.format = Fp8Format::kE4M3;
  } else if (wire.format() == "hybrid") {
    recipe.format = Fp8Format::kHybrid;
  } else if (!wire.format().empty()) {
    return BadWord("format", wire.format(), Words{"e4m3", "hybrid"});
  }
  if (wire.history_len() != 0) {
    recipe.history_len = wire.history_len();
  }
  if (wire.amax_algo() == "most_recent") {
    recipe.amax_algo = AmaxAlgorithm::kMostRecent;
  } else if (!wire.amax_algo().empty() && wire.amax_algo() != "max") {
    return BadWord("amax_algo", wire.amax_algo(), Words{"max", "most_recent"});
  }
  recipe.margin = wire.margin();
  if (wire.has_pow2_scales()) {
    recipe.pow2_scales = wire.pow2_scales();
  }
  if (wire.accumulate() == "promoted") {
    recipe.accumulate = AccumulateMode::kPromoted;
  } else if (wire.accumulate() == "fast") {
    recipe.accumulate = AccumulateMode::kFast;
  } else if (!wire.accumulate().empty()) {
    return BadWord("accumulate", wire.accumulate(), Words{"promoted", "fast"});
  }
  recipe.min_dequant_scale = wire.min_dequant_scale();
  if (wire.wgrad() == "bf16") {
    recipe.wgrad = WgradPrecision::kBf16;
  } else if (!wire.wgrad().empty() && wire.wgrad() != "fp8") {
    return BadWord("wgrad", wire.wgrad(), Words{"fp8", "bf16"});
  }
  return recipe;
}

v1::LayerOpRecipe SiteToWire(const OpSite& site, const Recipe& recipe) {
  v1::LayerOpRecipe wire;
  wire.set_layer(site.layer);
  wire.set_op(std::string(Name(site.op)));
  *wire.mutable_recipe() = RecipeToWire(recipe);
  return wire;
}

v1::PrecisionPlan PlanToWire(const PrecisionPlan& plan) {
  v1::PrecisionPlan wire;
  wire.set_version(plan.version);
  wire.set_layers(plan.layers);
  wire.mutable_entries()->Reserve(static_cast<int>(plan.entries.size()));
  for (std::int32_t layer = 0; layer < plan.layers; ++layer) {
    for (int i = 0; i < kOpCount; ++i) {
      const Op op = static_cast<Op>(i);
      v1::LayerOpRecipe& entry = *wire.add_entries();
      entry = SiteToWire({layer, op}, plan.Resolve(layer, op));
      const auto shadows = plan.shadows.find({layer, op});
      if (shadows != plan.shadows.end()) {
        for (const Recipe& shadow : shadows->second) {
          *entry.add_shadows() = RecipeToWire(shadow);
        }
      }
    }
  }
  switch (plan.author) {
    case PlanAuthor::kSpec:
      wire.set_author(v1::PLAN_AUTHOR_SPEC);
      break;
    case PlanAuthor::kOperator:
      wire.set_author(v1::PLAN_AUTHOR_OPERATOR);
      break;
    case PlanAuthor::kPolicy:
      wire.set_author(v1::PLAN_AUTHOR_POLICY);
      break;
  }
  wire.set_reason(plan.reason);
  wire.set_semantic_hash(SemanticHash(plan));
  return wire;
}

absl::StatusOr<PrecisionPlan> PlanFromWire(const v1::PrecisionPlan& wire) {
  const std::string where = StrCat("precision plan version ", wire.version());
  PrecisionPlan plan;
  plan.version = wire.version();
  plan.layers = wire.layers();
  plan.reason = wire.reason();
  if (wire.layers() < 0 ||
      static_cast<std::int64_t>(wire.layers()) * kOpCount != wire.entries_size()) {
    return InvalidArgumentError(StrCat(where, " has ", wire.entries_size(), " entries for ",
                                       wire.layers(), " layers; valid is ", kOpCount, " a layer"));
  }
  plan.entries.reserve(static_cast<std::size_t>(wire.entries_size()));
  for (int i = 0; i < wire.entries_size(); ++i) {
    const v1::LayerOpRecipe& entry = wire.entries(i);
    const std::string_view op = kOpNames[static_cast<std::size_t>(i % kOpCount)];
    if (entry.layer() != i / kOpCount || entry.op() != op) {
      return InvalidArgumentError(StrCat(where, " has layer ", entry.layer(), " ", entry.op(),
                                         " at entry ", i, "; valid there is layer ", i / kOpCount,
                                         " ", op));
    }
    absl::StatusOr<Recipe> recipe = RecipeFromWire(entry.recipe());
    if (!recipe.ok()) {
      return Annotate(recipe.status(), StrCat(where, ", layer ", entry.layer(), " ", entry.op()));
    }
    plan.entries.push_back(*recipe);
    for (const v1::Recipe& wire_shadow : entry.shadows()) {
      absl::StatusOr<Recipe> shadow = RecipeFromWire(wire_shadow);
      if (!shadow.ok()) {
        return Annotate(shadow.status(), StrCat(where, ", layer ", entry.layer(), " ", entry.op(),
                                                ", shadow"));
      }
      plan.shadows[{entry.layer(), static_cast<Op>(i % kOpCount)}].push_back(*shadow);
    }
  }
  switch (wire.author()) {
    case v1::PLAN_AUTHOR_OPERATOR:
      plan.author = PlanAuthor::kOperator;
      break;
    case v1::PLAN_AUTHOR_POLICY:
      plan.author = PlanAuthor::kPolicy;
      break;
    default:
      plan.author = PlanAuthor::kSpec;
      break;
  }
  // A hash of 0 comes from a sender that does not compute it.
  if (wire.semantic_hash() != 0 && wire.semantic_hash() != SemanticHash(plan)) {
    return InvalidArgumentError(StrCat(where, " does not match its hash: sender and receiver read ",
                                       "its recipes differently (different versions of Octavo?)"));
  }
  return plan;
}

absl::StatusOr<std::pair<std::int32_t, std::int32_t>> ParseLayerRange(const std::string& text,
                                                                      std::int32_t layers) {
  const std::string valid =
      StrCat("valid: one layer or a range within 0-", layers - 1, ", e.g. 3 or 2-5");
  const std::size_t dash = text.find('-');
  const std::optional<std::int64_t> first = ParseInt64(std::string_view(text).substr(0, dash));
  const std::optional<std::int64_t> last =
      dash == std::string::npos ? first : ParseInt64(std::string_view(text).substr(dash + 1));
  if (!first.has_value() || !last.has_value() || *first < 0 || *last >= layers) {
    return InvalidArgumentError(valid);
  }
  if (*first > *last) {
    return InvalidArgumentError(StrCat("the range ends before it begins; ", valid));
  }
  return std::make_pair(static_cast<std::int32_t>(*first), static_cast<std::int32_t>(*last));
}

absl::StatusOr<PlanOverride> OverrideFromWire(const std::string& layers_text,
                                              const std::vector<std::string>& ops,
                                              const v1::Recipe& recipe, std::int32_t layers) {
  PlanOverride change;
  const auto range = ParseLayerRange(layers_text, layers);
  if (!range.ok()) {
    return Annotate(range.status(), StrCat("layers is \"", layers_text, "\""));
  }
  change.first_layer = range->first;
  change.last_layer = range->second;
  for (const std::string& name : ops) {
    const std::optional<Op> op = ParseOp(name);
    if (!op.has_value()) {
      return BadWord("op", name, kOpNames);
    }
    change.ops.push_back(*op);
  }
  ASSIGN_OR_RETURN(change.recipe, RecipeFromWire(recipe));
  return change;
}

}  // namespace octavo
