// Recipes against ops, dimensions and device; and the derived defaults of the whole spec.
#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "base/status.h"
#include "base/str.h"
#include "proto/convert/precision.h"
#include "proto/precision/plan.h"
#include "proto/spec/job_spec.h"
#include "proto/spec/semantic_rules.h"

namespace octavo {
namespace {

constexpr const char* kAuto = "auto";

// A width that recipes constrain: the field to blame, its value and the ops that contract over it.
struct Dimension {
  const char* field;
  std::int64_t field_value;
  std::string text;  // how the width comes from it; empty: it is the width
  std::int64_t value;
};

// The dimensions of one op in one layer; empty where the layer has no such op.
std::vector<Dimension> DimensionsOf(const v1::ModelSpec& model, std::int32_t layer, Op op) {
  const bool dense = std::find(model.dense_layers().begin(), model.dense_layers().end(), layer) !=
                     model.dense_layers().end();
  const v1::MoeSpec& moe = model.moe();
  const Dimension hidden{"model.hidden", model.hidden(), "", model.hidden()};
  const std::int64_t head_dim = model.head_dim();
  switch (op) {
    case Op::kAttnQkv:
      return {hidden,
              {"model.head_dim", head_dim, "(heads + 2 · kv_heads) · head_dim",
               (model.heads() + 2 * std::int64_t{model.kv_heads()}) * head_dim}};
    case Op::kAttnOut:
      return {{"model.head_dim", head_dim, "heads · head_dim", model.heads() * head_dim}, hidden};
    case Op::kMlpFc1:
    case Op::kMlpFc2:
      if (dense) {
        return {hidden, {"model.dense_hidden", model.dense_hidden(), "", model.dense_hidden()}};
      }
      if (moe.shared_experts() > 0) {
        return {hidden,
                {"model.moe.shared_expert_hidden", moe.shared_expert_hidden(),
                 "shared_experts · shared_expert_hidden",
                 std::int64_t{moe.shared_experts()} * moe.shared_expert_hidden()}};
      }
      return {};
    case Op::kFc1:
    case Op::kFc2:
      if (dense) {
        return {};
      }
      return {hidden, {"model.moe.expert_hidden", moe.expert_hidden(), "", moe.expert_hidden()}};
    case Op::kDispatch:
      if (dense) {
        return {};
      }
      return {hidden};
  }
  return {};
}

std::string DimensionMessage(const Dimension& dimension, RecipeKind kind, const std::string& who) {
  const std::int64_t multiple = DimensionMultiple(kind);
  const std::int64_t above = (dimension.value / multiple + 1) * multiple;
  const std::int64_t below = above - multiple;
  return StrCat(dimension.text.empty() ? std::string()
                                       : StrCat(dimension.text, " is ", dimension.value, "; "),
                "recipe ", Name(kind), " (", who, ") needs a multiple of ", multiple,
                "; next valid: ", below > 0 ? StrCat(below, " or ") : std::string(), above);
}

bool ModelIsSound(const v1::JobSpec& spec, const SpecFindings& findings) {
  return spec.has_model() && spec.model().has_moe() && findings.IsSound("model");
}

// One message for each (dimension, recipe): the first place that needs it.
class DimensionCheck {
 public:
  DimensionCheck(const v1::JobSpec& spec, SpecFindings& findings)
      : spec_(spec), findings_(findings) {}

  void Check(std::int32_t layer, Op op, RecipeKind kind, const std::string& who) {
    for (const Dimension& dimension : DimensionsOf(spec_.model(), layer, op)) {
      if (dimension.value % DimensionMultiple(kind) == 0 ||
          !reported_.insert({dimension.field + dimension.text, DimensionMultiple(kind)}).second) {
        continue;
      }
      findings_.Add(dimension.field, std::to_string(dimension.field_value),
                    DimensionMessage(dimension, kind, who));
    }
  }

  // As if the recipe were in force everywhere.
  void CheckEverywhere(RecipeKind kind, const std::string& who) {
    for (std::int32_t layer = 0; layer < spec_.model().layers(); ++layer) {
      for (int i = 0; i < kOpCount; ++i) {
        Check(layer, static_cast<Op>(i), kind, who);
      }
    }
  }

 private:
  const v1::JobSpec& spec_;
  SpecFindings& findings_;
  std::set<std::pair<std::string, std::int64_t>> reported_;
};

bool FitsModel(const v1::ModelSpec& model, RecipeKind kind) {
  // Runs before the bounds are checked: a hostile layer count must not cost time.
  constexpr std::int32_t kLayersMax = 1024;
  if (model.layers() > kLayersMax || model.dense_layers_size() > kLayersMax) {
    return false;
  }
  for (std::int32_t layer = 0; layer < model.layers(); ++layer) {
    for (int i = 0; i < kOpCount; ++i) {
      for (const Dimension& dimension : DimensionsOf(model, layer, static_cast<Op>(i))) {
        if (dimension.value % DimensionMultiple(kind) != 0) {
          return false;
        }
      }
    }
  }
  return true;
}

// Device and emulation, on what the spec alone can know: a GPU's generation is checked at
// placement.
std::string DeviceRefusal(const v1::JobSpec& spec, RecipeKind kind) {
  constexpr std::int32_t kNewestSm = 100;
  const bool cuda = spec.device() == "cuda";
  return RefusalReason(DefaultRecipe(kind), {.is_cuda = cuda, .sm = cuda ? kNewestSm : 0},
                       spec.precision().allow_emulation());
}

std::string ParametersText(RecipeKind kind) {
  const std::vector<std::string> names = RecipeParameters(kind);
  return names.empty() ? "no parameters" : StrJoin(names, ", ");
}

// Parameters that the kind does not have would be dropped silently: say so instead.
// A sparse recipe on the wire gives what differs from the field's zero.
bool HasStrayParameter(const v1::Recipe& wire, const Recipe& recipe, const std::string& field,
                       SpecFindings& findings) {
  std::vector<std::string> stray;
  if (!recipe.is_fp8()) {
    stray = {"format",      "history_len", "amax_algo",         "margin",
             "pow2_scales", "accumulate",  "min_dequant_scale", "wgrad"};
  } else if (recipe.kind != RecipeKind::kFp8Delayed) {
    stray = {"history_len", "amax_algo"};
  }
  for (const std::string& name : stray) {
    if (findings.WasGiven(StrCat(field, ".", name)) ||
        wire.GetReflection()->HasField(wire, v1::Recipe::descriptor()->FindFieldByName(name))) {
      findings.Add(StrCat(field, ".", name), "",
                   StrCat("has no meaning for recipe ", Name(recipe.kind), "; valid: leave it out",
                          recipe.is_fp8() ? ", or recipe fp8_delayed" : "", " (", Name(recipe.kind),
                          " takes ", ParametersText(recipe.kind), ")"));
      return true;
    }
  }
  return false;
}

void CheckRecipe(const v1::JobSpec& spec, const v1::Recipe& wire, const std::string& field,
                 const std::vector<Op>& ops, SpecFindings& findings) {
  if (!findings.IsSound(field)) {
    return;
  }
  const absl::StatusOr<Recipe> recipe = RecipeFromWire(wire);
  if (!recipe.ok()) {
    findings.Add(field, "", Message(recipe.status()));
    return;
  }
  if (HasStrayParameter(wire, *recipe, field, findings)) {
    return;
  }
  for (Op op : ops) {
    const std::string text = ValidateRecipe(*recipe, op);
    if (!text.empty()) {
      findings.Add(field, "", text);
      return;
    }
  }
  const std::string refusal = DeviceRefusal(spec, recipe->kind);
  if (!refusal.empty()) {
    findings.Add(field, "", refusal);
  }
}

void CheckBase(const v1::JobSpec& spec, SpecFindings& findings) {
  const v1::PrecisionSpec& precision = spec.precision();
  if (!findings.IsSound("precision.recipe")) {
    return;
  }
  const std::optional<RecipeKind> kind = ParseRecipeKind(precision.recipe());
  if (precision.has_parameters() && findings.IsSound("precision.parameters")) {
    const v1::Recipe& parameters = precision.parameters();
    if (!kind.has_value()) {
      findings.Add("precision.parameters", "",
                   "has no meaning with recipe: auto; valid: leave it out, or name a recipe");
    } else if (parameters.kind() != precision.recipe()) {
      findings.Add(
          "precision.parameters.kind", Quoted(parameters.kind()),
          "differs from precision.recipe (" + precision.recipe() + "); valid: leave it out");
    } else {
      CheckRecipe(spec, parameters, "precision.parameters", {Op::kFc1}, findings);
    }
  } else if (kind.has_value()) {
    const std::string refusal = DeviceRefusal(spec, *kind);
    if (!refusal.empty()) {
      findings.Add("precision.recipe", Quoted(precision.recipe()), refusal);
    }
  }
  const bool fp8 = kind.has_value() && DefaultRecipe(*kind).is_fp8();
  if (fp8 && spec.has_model() && findings.IsSound("model.layers") &&
      findings.IsSound("precision.protect") &&
      2 * std::int64_t{precision.protect()} >= spec.model().layers()) {
    findings.Add("precision.protect", std::to_string(precision.protect()),
                 StrCat("keeps all ", spec.model().layers(),
                        " layers in bf16 (the first and the "
                        "last ",
                        precision.protect(), "), so recipe ", precision.recipe(),
                        " would never run; valid: 0 to ", (spec.model().layers() - 1) / 2));
  }
}

void CheckOverride(const v1::JobSpec& spec, int index, SpecFindings& findings) {
  const v1::PrecisionOverride& change = spec.precision().overrides(index);
  const std::string field = StrCat("precision.overrides[", index, "]");
  if (spec.has_model() && findings.IsSound("model.layers") && findings.IsSound(field + ".layers")) {
    const auto range = ParseLayerRange(change.layers(), spec.model().layers());
    if (!range.ok()) {
      findings.Add(field + ".layers", Quoted(change.layers()), Message(range.status()));
    }
  }
  std::vector<Op> ops;
  std::set<std::string> seen;
  for (int i = 0; i < change.ops_size(); ++i) {
    if (const std::optional<Op> op = ParseOp(change.ops(i))) {
      ops.push_back(*op);
    }
    if (!seen.insert(change.ops(i)).second) {
      findings.Add(StrCat(field, ".ops[", i, "]"), Quoted(change.ops(i)),
                   "the op stands twice; valid: each once");
    }
  }
  if (ops.empty()) {
    ops.push_back(Op::kFc1);  // dispatch follows by PayloadRecipe
  }
  if (!change.has_recipe() || !findings.IsSound(field + ".recipe")) {
    return;
  }
  const bool base_fp32 = spec.precision().recipe() == "fp32";
  if ((change.recipe().kind() == "fp32") != base_fp32) {
    findings.Add(field + ".recipe", Quoted(change.recipe().kind()),
                 "fp32 is for whole jobs (the residual stream is FP32 too) and does not mix; "
                 "valid: precision.recipe: fp32 without other recipes, or bf16 here");
    return;
  }
  CheckRecipe(spec, change.recipe(), field + ".recipe", ops, findings);
}

template <class List>
void CheckKinds(const v1::JobSpec& spec, const std::string& field, const List& list,
                SpecFindings& findings) {
  std::vector<std::string> valid = RecipeKindNames();
  valid.erase(std::remove(valid.begin(), valid.end(), "fp32"), valid.end());
  std::set<std::string> seen;
  for (int i = 0; i < list.size(); ++i) {
    const std::string item = StrCat(field, "[", i, "]");
    const std::string& word = list.Get(i);
    if (std::find(valid.begin(), valid.end(), word) == valid.end()) {
      findings.Add(item, Quoted(word),
                   StrCat("valid: ", StrJoin(valid, ", "), Suggestion(word, valid)));
      continue;
    }
    if (!seen.insert(word).second) {
      findings.Add(item, Quoted(word), "the recipe stands twice; valid: each once");
      continue;
    }
    const std::string refusal = DeviceRefusal(spec, *ParseRecipeKind(word));
    // The base recipe has had that message already.
    if (!refusal.empty() && word != spec.precision().recipe()) {
      findings.Add(item, Quoted(word), refusal);
    }
  }
}

void CheckSelection(const v1::JobSpec& spec, SpecFindings& findings) {
  const v1::PrecisionSpec& precision = spec.precision();
  if (findings.IsSound("precision.recipe") && precision.recipe() != kAuto &&
      precision.candidates_size() > 0) {
    findings.Add("precision.candidates", "",
                 "has no meaning with recipe: " + precision.recipe() +
                     "; valid: leave it out, or recipe: auto");
  } else {
    CheckKinds(spec, "precision.candidates", precision.candidates(), findings);
  }
  const auto& ladder = precision.policy().ladder();
  CheckKinds(spec, "precision.policy.ladder", ladder, findings);
  if (findings.IsSound("precision.policy.ladder") && !ladder.empty() &&
      *ladder.rbegin() != "bf16") {
    findings.Add("precision.policy.ladder", Quoted(*ladder.rbegin()) + " as the last rung",
                 "valid: bf16 as the last rung (what never overflows)");
  }
}

void CheckDimensions(const v1::JobSpec& spec, SpecFindings& findings) {
  if (!ModelIsSound(spec, findings) || !findings.IsSound("precision")) {
    return;
  }
  DimensionCheck check(spec, findings);
  const PrecisionPlan plan = BuildPlanFromSpec(spec);
  for (std::int32_t layer = 0; layer < plan.layers; ++layer) {
    for (int i = 0; i < kOpCount; ++i) {
      const Op op = static_cast<Op>(i);
      check.Check(layer, op, plan.Resolve(layer, op).kind, StrCat("layer ", layer, " ", Name(op)));
    }
  }
  for (const std::string& word : spec.precision().candidates()) {
    check.CheckEverywhere(*ParseRecipeKind(word), "a candidate of auto");
  }
  for (const std::string& word : spec.precision().policy().ladder()) {
    check.CheckEverywhere(*ParseRecipeKind(word), "a rung of policy.ladder");
  }
}

// Completes a sparse recipe (kind's defaults); left alone when it cannot be read.
void Complete(const std::string& field, const SpecFindings& findings, v1::Recipe* wire) {
  const bool explicit_zero = wire->history_len() == 0 && findings.WasGiven(field + ".history_len");
  const absl::StatusOr<Recipe> recipe = RecipeFromWire(*wire);
  if (recipe.ok() && recipe->is_fp8() && !explicit_zero) {
    v1::Recipe full = RecipeToWire(*recipe);
    full.MergeFrom(*wire);  // keeps what the author wrote, stray parameters too, for the check
    *wire = full;
  }
}

void FillPrecision(v1::JobSpec* spec, const SpecFindings& findings) {
  v1::PrecisionSpec* precision = spec->mutable_precision();
  if (precision->has_parameters()) {
    if (precision->parameters().kind().empty() && precision->recipe() != kAuto) {
      precision->mutable_parameters()->set_kind(precision->recipe());
    }
    Complete("precision.parameters", findings, precision->mutable_parameters());
  }
  for (int i = 0; i < precision->overrides_size(); ++i) {
    if (precision->overrides(i).has_recipe()) {
      Complete(StrCat("precision.overrides[", i, "].recipe"), findings,
               precision->mutable_overrides(i)->mutable_recipe());
    }
  }
  v1::PolicySpec* policy = precision->mutable_policy();
  if (!policy->has_enabled()) {
    policy->set_enabled(true);
  }
  if (!policy->has_checkpoint_before_switch()) {
    policy->set_checkpoint_before_switch(true);
  }
  const std::optional<RecipeKind> kind = ParseRecipeKind(precision->recipe());
  if (policy->ladder().empty() && kind.has_value() && DefaultRecipe(*kind).is_fp8()) {
    policy->add_ladder(precision->recipe());
    policy->add_ladder("bf16");
  }
  if (precision->recipe() == kAuto && precision->candidates().empty()) {
    // Those that the model's dimensions and the device allow.
    for (RecipeKind candidate : {RecipeKind::kFp8Flow, RecipeKind::kFp8Blockwise,
                                 RecipeKind::kFp8Current, RecipeKind::kBf16}) {
      if (FitsModel(spec->model(), candidate) && DeviceRefusal(*spec, candidate).empty()) {
        precision->add_candidates(std::string(Name(candidate)));
      }
    }
  }
}

}  // namespace

void FillDerivedDefaults(v1::JobSpec* spec, const SpecFindings& findings) {
  if (spec->has_model()) {
    v1::ModelSpec* model = spec->mutable_model();
    if (model->kv_heads() == 0) {
      model->set_kv_heads(model->heads());
    }
    if (model->head_dim() == 0 && model->heads() > 0 && model->hidden() % model->heads() == 0) {
      model->set_head_dim(model->hidden() / model->heads());
    }
    if (!model->has_qk_norm()) {
      model->set_qk_norm(model->family() == "qwen3_moe");
    }
    if (model->has_moe()) {
      v1::MoeSpec* moe = model->mutable_moe();
      if (moe->shared_expert_hidden() == 0 && moe->shared_experts() > 0) {
        moe->set_shared_expert_hidden(moe->expert_hidden());
      }
      if (!moe->router().has_normalize_topk()) {
        moe->mutable_router()->set_normalize_topk(true);
      }
    }
  }
  v1::ParallelSpec* parallel = spec->mutable_parallel();
  if (parallel->expert_parallel() == 0) {
    parallel->set_expert_parallel(parallel->ranks());
  }
  if (spec->has_train()) {
    v1::TrainSpec* train = spec->mutable_train();
    if (train->microbatch() == 0 && parallel->ranks() > 0 &&
        train->global_batch() % parallel->ranks() == 0) {
      train->set_microbatch(train->global_batch() / parallel->ranks());
    }
    v1::ScheduleSpec* schedule = train->mutable_schedule();
    if (schedule->kind() == "wsd" && schedule->decay_steps() == 0) {
      schedule->set_decay_steps(std::max<std::int64_t>(train->steps() / 10, 1));
    }
    // The default of min_lr is for the default lr; under a smaller one it keeps the ratio.
    if (!findings.WasGiven("train.schedule.min_lr") && schedule->lr() >= 0 &&
        schedule->min_lr() > schedule->lr()) {
      schedule->set_min_lr(schedule->lr() / 10);
    }
  }
  FillPrecision(spec, findings);
}

void CheckPrecision(const v1::JobSpec& spec, SpecFindings& findings) {
  CheckBase(spec, findings);
  for (int i = 0; i < spec.precision().overrides_size(); ++i) {
    CheckOverride(spec, i, findings);
  }
  CheckSelection(spec, findings);
  CheckDimensions(spec, findings);
}

bool LayerHasOp(const v1::ModelSpec& model, std::int32_t layer, Op op) {
  return !DimensionsOf(model, layer, op).empty();
}

PrecisionPlan BuildPlanFromSpec(const v1::JobSpec& spec) {
  const v1::PrecisionSpec& precision = spec.precision();
  Recipe base = DefaultRecipe(ParseRecipeKind(precision.recipe()).value_or(RecipeKind::kBf16));
  if (precision.has_parameters()) {
    base = RecipeFromWire(precision.parameters()).value_or(base);
  }
  std::vector<PlanOverride> overrides;
  for (const v1::PrecisionOverride& change : precision.overrides()) {
    const auto value = OverrideFromWire(change.layers(), {change.ops().begin(), change.ops().end()},
                                        change.recipe(), spec.model().layers());
    if (value.ok()) {
      overrides.push_back(*value);
    }
  }
  PrecisionPlan plan = BuildPlan(spec.model().layers(), base, precision.protect(), overrides);
  if (precision.recipe() == kAuto) {
    plan.reason = StrCat("from the job's specification: auto begins with ",
                         precision.warmup_steps(), " steps in bf16");
    // Every candidate is measured beside BF16 wherever auto may choose it (NUMERICS 11).
    for (std::int32_t layer = precision.protect(); layer < plan.layers - precision.protect();
         ++layer) {
      for (int i = 0; i < kOpCount; ++i) {
        const OpSite site{layer, static_cast<Op>(i)};
        for (const std::string& name : precision.candidates()) {
          const Recipe candidate = DefaultRecipe(ParseRecipeKind(name).value_or(RecipeKind::kBf16));
          plan.shadows[site].push_back(site.op == Op::kDispatch ? PayloadRecipe(candidate)
                                                                : candidate);
        }
      }
    }
  }
  return plan;
}

}  // namespace octavo
