#include "controller/policy/automatic.h"

#include <algorithm>
#include <cstdio>
#include <set>

#include "controller/policy/fallback.h"

namespace octavo {
namespace {

std::string Db(double v) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.1f dB", v);
  return text;
}

}  // namespace

void GatherEvidence(PolicyState& state, const HealthSnapshot& snapshot) {
  for (const TensorHealth& t : snapshot.tensors) {
    if (!t.shadow) {
      continue;
    }
    auto [it, fresh] = state.evidence.emplace(std::tuple(t.site, t.tensor, t.shadow_recipe), t);
    if (fresh) {
      continue;
    }
    TensorHealth& sum = it->second;
    sum.amax = std::max(sum.amax, t.amax);
    sum.elements += t.elements;
    sum.nonfinite += t.nonfinite;
    sum.saturated += t.saturated;
    sum.nonzero += t.nonzero;
    sum.flushed += t.flushed;
    sum.transpose_flushed += t.transpose_flushed;
    sum.signal_energy += t.signal_energy;
    sum.noise_energy += t.noise_energy;
  }
}

std::vector<Choice> ChooseRecipes(const PolicyConfig& config, const PolicyState& state,
                                  const PrecisionPlan& plan) {
  std::set<OpSite> measured;
  for (const auto& [key, sum] : state.evidence) {
    measured.insert(std::get<0>(key));
  }
  std::vector<Choice> choices;
  for (const OpSite& site : measured) {
    const auto s = state.sites.find(site);
    const bool held = s != state.sites.end() && s->second.status != SiteState::Status::kHealthy;
    if (held || state.operator_sites.count(site) > 0 || site.layer < config.protect ||
        site.layer >= plan.layers - config.protect) {
      continue;
    }
    Choice choice{site, DefaultRecipe(RecipeKind::kBf16), 0, 0, ""};
    std::string failed;
    for (const Recipe& candidate : config.candidates) {
      const Recipe recipe = site.op == Op::kDispatch ? PayloadRecipe(candidate) : candidate;
      std::string why = RefusalReason(recipe, config.device, config.allow_emulation);
      bool any = false;
      double worst_db = 200, limit = config.sqnr_e4m3_db;
      for (int i = 0; i < kTensorCount && why.empty(); ++i) {
        const auto it = state.evidence.find({site, static_cast<Tensor>(i), recipe.kind});
        if (it == state.evidence.end()) {
          continue;
        }
        any = true;
        if (ShadowIsHealthy(config, it->second, &why) && it->second.sqnr_sampled() &&
            SqnrDb(it->second) < worst_db) {
          worst_db = SqnrDb(it->second);
          limit = it->second.e5m2 ? config.sqnr_e5m2_db : config.sqnr_e4m3_db;
        }
      }
      if (why.empty() && any) {
        choice.recipe = recipe;
        choice.sqnr_db = worst_db;
        choice.sqnr_limit_db = limit;
        break;
      }
      failed += (failed.empty() ? "" : "; ") + std::string(Name(recipe.kind)) + " not: " +
                (why.empty() ? "no shadow measurement" : why);
    }
    if (SemanticHash(choice.recipe) == SemanticHash(plan.Resolve(site.layer, site.op))) {
      continue;
    }
    choice.reason = "auto: layer " + std::to_string(site.layer) + " " +
                    std::string(Name(site.op)) + " → " + DebugString(choice.recipe) +
                    (choice.recipe.is_fp8() ? " (worst shadow SQNR " + Db(choice.sqnr_db) + " ≥ " +
                                                  Db(choice.sqnr_limit_db) + ")"
                                            : " (no candidate passes)") +
                    (failed.empty() ? "" : "; " + failed);
    choices.push_back(std::move(choice));
  }
  return choices;
}

}  // namespace octavo
