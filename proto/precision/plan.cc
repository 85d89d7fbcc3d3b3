#include "proto/precision/plan.h"

#include <algorithm>

#include "base/check.h"

namespace octavo {
namespace {

constexpr std::string_view kAuthorNames[] = {"spec", "operator", "policy"};

void SetLayer(PrecisionPlan& plan, std::int32_t layer, const Recipe& recipe) {
  for (int i = 0; i < kOpCount; ++i) {
    const Op op = static_cast<Op>(i);
    plan.At(layer, op) = op == Op::kDispatch ? PayloadRecipe(recipe) : recipe;
  }
}

bool SameLayer(const PrecisionPlan& plan, std::int32_t a, std::int32_t b) {
  for (int i = 0; i < kOpCount; ++i) {
    if (SemanticHash(plan.Resolve(a, static_cast<Op>(i))) !=
        SemanticHash(plan.Resolve(b, static_cast<Op>(i)))) {
      return false;
    }
  }
  return true;
}

// "fp8_flow" when every op has it, else "attn_qkv,attn_out: bf16; fc1: fp8_flow; …".
std::string LayerText(const PrecisionPlan& plan, std::int32_t layer) {
  std::string text;
  std::vector<bool> done(kOpCount, false);
  for (int i = 0; i < kOpCount; ++i) {
    if (done[static_cast<std::size_t>(i)]) {
      continue;
    }
    const std::string recipe = DebugString(plan.Resolve(layer, static_cast<Op>(i)));
    std::string ops;
    int same = 0;
    for (int j = i; j < kOpCount; ++j) {
      if (DebugString(plan.Resolve(layer, static_cast<Op>(j))) == recipe) {
        done[static_cast<std::size_t>(j)] = true;
        ops += (ops.empty() ? "" : ",") + std::string(Name(static_cast<Op>(j)));
        ++same;
      }
    }
    if (same == kOpCount) {
      return recipe;
    }
    text += (text.empty() ? "" : "; ") + ops + ": " + recipe;
  }
  return text;
}

}  // namespace

std::string_view Name(PlanAuthor author) { return kAuthorNames[static_cast<std::size_t>(author)]; }

PrecisionPlan BuildPlan(std::int32_t layers, const Recipe& base, std::int32_t protect,
                        const std::vector<PlanOverride>& overrides) {
  OCTAVO_CHECK_GE(layers, 0);
  PrecisionPlan plan;
  plan.version = 1;
  plan.layers = layers;
  plan.entries.resize(static_cast<std::size_t>(layers) * kOpCount);
  plan.reason = "from the job's specification: " + DebugString(base);
  for (std::int32_t layer = 0; layer < layers; ++layer) {
    const bool is_protected = base.is_fp8() && (layer < protect || layer >= layers - protect);
    SetLayer(plan, layer, is_protected ? DefaultRecipe(RecipeKind::kBf16) : base);
  }
  for (const PlanOverride& change : overrides) {
    ApplyOverride(plan, change);
  }
  return plan;
}

void ApplyOverride(PrecisionPlan& plan, const PlanOverride& change) {
  const std::int32_t first = std::max(change.first_layer, 0);
  const std::int32_t last = std::min(change.last_layer, plan.layers - 1);
  for (std::int32_t layer = first; layer <= last; ++layer) {
    if (change.ops.empty()) {
      SetLayer(plan, layer, change.recipe);
    }
    for (Op op : change.ops) {
      plan.At(layer, op) = op == Op::kDispatch ? PayloadRecipe(change.recipe) : change.recipe;
    }
  }
}

std::vector<PlanChange> Diff(const PrecisionPlan& before, const PrecisionPlan& after) {
  OCTAVO_CHECK_EQ(before.layers, after.layers);
  std::vector<PlanChange> changes;
  for (std::int32_t layer = 0; layer < before.layers; ++layer) {
    for (int i = 0; i < kOpCount; ++i) {
      const Op op = static_cast<Op>(i);
      const Recipe& a = before.Resolve(layer, op);
      const Recipe& b = after.Resolve(layer, op);
      if (SemanticHash(a) != SemanticHash(b)) {
        changes.push_back({{layer, op}, a, b});
      }
    }
  }
  return changes;
}

std::uint64_t SemanticHash(const PrecisionPlan& plan) {
  std::uint64_t hash = 0xcbf29ce484222325u;
  for (const Recipe& recipe : plan.entries) {
    const std::uint64_t entry = SemanticHash(recipe);
    for (int byte = 0; byte < 8; ++byte) {
      hash = (hash ^ ((entry >> (8 * byte)) & 0xff)) * 0x100000001b3u;
    }
  }
  return hash;
}

std::string DebugString(const PrecisionPlan& plan) {
  std::string text;
  for (std::int32_t first = 0; first < plan.layers;) {
    std::int32_t last = first;
    while (last + 1 < plan.layers && SameLayer(plan, first, last + 1)) {
      ++last;
    }
    text += first == last ? "layer " + std::to_string(first)
                          : "layers " + std::to_string(first) + "-" + std::to_string(last);
    text += ": " + LayerText(plan, first) + "\n";
    first = last + 1;
  }
  return text;
}

}  // namespace octavo
