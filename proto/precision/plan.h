// PrecisionPlan: the versioned answer to "which recipe does (layer, op) use?". A value, pure.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "proto/precision/recipe.h"

namespace octavo {

enum class PlanAuthor : std::uint8_t { kSpec, kOperator, kPolicy };
std::string_view Name(PlanAuthor author);

// One entry per (layer, op), dense: entries[layer * kOpCount + op].
struct PrecisionPlan {
  std::int64_t version = 0;  // 1 is the spec's
  std::int32_t layers = 0;
  std::vector<Recipe> entries;
  PlanAuthor author = PlanAuthor::kSpec;
  std::string reason;        // a sentence with the numbers
  // Recipes measured beside the executed one at every sqnr_interval (NUMERICS 9, 11): evidence for a
  // return, or for the choice of `auto`. They change no result, so they are not part of the hash.
  std::map<OpSite, std::vector<Recipe>> shadows;

  // The one place where anybody asks. REQUIRES: 0 <= layer < layers.
  const Recipe& Resolve(std::int32_t layer, Op op) const {
    return entries[static_cast<std::size_t>(layer) * kOpCount + static_cast<std::size_t>(op)];
  }
  Recipe& At(std::int32_t layer, Op op) {
    return entries[static_cast<std::size_t>(layer) * kOpCount + static_cast<std::size_t>(op)];
  }
};

// An override of the job spec or of an operator: recipe for layers [first, last] and these ops
// (empty: all ops).
struct PlanOverride {
  std::int32_t first_layer = 0, last_layer = 0;
  std::vector<Op> ops;
  Recipe recipe;
};

// Builds version 1: base recipe everywhere, the first and last `protect` layers in bf16 (when base is
// FP8), then overrides in order. dispatch follows the layer's recipe through PayloadRecipe unless an
// override names it.
PrecisionPlan BuildPlan(std::int32_t layers, const Recipe& base, std::int32_t protect,
                        const std::vector<PlanOverride>& overrides);

// Applies an override to a plan (no version change).
void ApplyOverride(PrecisionPlan& plan, const PlanOverride& change);

struct PlanChange {
  OpSite site;
  Recipe before, after;
};
std::vector<PlanChange> Diff(const PrecisionPlan& before, const PrecisionPlan& after);

// Hash over all entries' SemanticHash (version, author and reason do not count).
std::uint64_t SemanticHash(const PrecisionPlan& plan);
// One line per run of layers with equal recipes.
std::string DebugString(const PrecisionPlan& plan);

}  // namespace octavo
