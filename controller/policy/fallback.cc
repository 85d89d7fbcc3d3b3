#include "controller/policy/fallback.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "controller/policy/automatic.h"

namespace octavo {
namespace {

constexpr std::string_view kDirectionNames[] = {"fallback", "restore", "choose", "pin"};

std::string Number(double v) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.4g", v);
  return text;
}

std::string SiteText(const OpSite& s) {
  return "layer " + std::to_string(s.layer) + " " + std::string(Name(s.op));
}

// The recipe after `current` on the ladder; bf16 at its end or outside it.
Recipe NextRung(const PolicyConfig& config, const Recipe& current, Op op) {
  for (std::size_t i = 0; i + 1 < config.ladder.size(); ++i) {
    if (config.ladder[i].kind == current.kind) {
      const Recipe& next = config.ladder[i + 1];
      return op == Op::kDispatch ? PayloadRecipe(next) : next;
    }
  }
  return DefaultRecipe(RecipeKind::kBf16);
}

// One evaluation: collects changes to a copy of the plan.
class Evaluation {
 public:
  Evaluation(const PolicyConfig& config, PolicyState& state, const PrecisionPlan& plan,
             std::int64_t step)
      : config_(config), state_(state), before_(plan), step_(step) {
    out_.plan = plan;
  }

  bool InHands(const OpSite& site) const { return state_.operator_sites.count(site) == 0; }

  // Moves a site down. `note` is the sentence of the signal.
  void Fall(const OpSite& site, const Firing& firing, const std::string& note,
            std::int64_t hold_base) {
    const Recipe before = out_.plan.Resolve(site.layer, site.op);
    if (!before.is_fp8() || !InHands(site)) {
      return;
    }
    SiteState& s = state_.sites[site];
    if (s.status == SiteState::Status::kHealthy) {
      s.original = before;
      s.flaps += s.fell_once ? 1 : 0;
      s.fell_once = true;
      s.hold_steps = hold_base << std::min(s.flaps, 30);
    }
    Recipe after = NextRung(config_, before, site.op);
    if (firing.signal == Signal::kTransposeFlushed && before.wgrad == WgradPrecision::kFp8) {
      after = before;
      after.wgrad = WgradPrecision::kBf16;
    }
    s.cause = firing.signal;
    s.since_step = step_;
    s.good_shadows = 0;
    const bool pin = s.flaps >= config_.max_flaps;
    s.status = pin ? SiteState::Status::kPinned : SiteState::Status::kFallback;
    const std::string tail =
        pin ? "; relapse " + std::to_string(s.flaps) + " of " + std::to_string(config_.max_flaps) +
                  ": pinned, an operator decides"
            : "; held for " + std::to_string(s.hold_steps) + " steps at least";
    Change(pin ? Direction::kPin : Direction::kFallback, site, firing, before, after,
           note + ": " + DebugString(before) + " → " + DebugString(after) + tail);
    if (pin) {
      out_.alerts.push_back(SiteText(site) + " is pinned to " + DebugString(after) + " after " +
                            std::to_string(s.flaps) + " relapses");
      out_.plan.shadows.erase(site);
    } else {
      out_.plan.shadows[site] = {s.original};
    }
  }

  void Return(const OpSite& site, SiteState& s, const std::string& note) {
    const Recipe before = out_.plan.Resolve(site.layer, site.op);
    Firing cause;
    cause.signal = s.cause;
    s.status = SiteState::Status::kHealthy;
    s.good_shadows = 0;
    Change(Direction::kRestore, site, cause, before, s.original,
           SiteText(site) + ": " + note + ": " + DebugString(before) + " → " +
               DebugString(s.original));
    if (config_.automatic) {
      out_.plan.shadows[site] = config_.candidates;
    } else {
      out_.plan.shadows.erase(site);
    }
  }

  void Change(Direction direction, const OpSite& site, const Firing& firing, const Recipe& before,
              const Recipe& after, const std::string& reason) {
    out_.plan.At(site.layer, site.op) = after;
    out_.family_changed = out_.family_changed || before.kind != after.kind;
    PolicyDecision d;
    d.direction = direction;
    d.site = site;
    d.signal = firing.signal;
    d.value = firing.value;
    d.threshold = firing.threshold;
    d.step = step_;
    d.before = before;
    d.after = after;
    d.reason = reason;
    d.plan_before = before_.version;
    d.plan_after = before_.version + 1;
    out_.decisions.push_back(std::move(d));
    state_.windows.Reset(site);
    state_.switching.insert(site);
  }

  void Alert(std::string sentence) { out_.alerts.push_back(std::move(sentence)); }

  PrecisionPlan& plan() { return out_.plan; }

  PolicyOutput Finish() {
    out_.changed = !out_.decisions.empty() || out_.plan.shadows != before_.shadows;
    if (out_.changed) {
      out_.plan.version = before_.version + 1;
      out_.plan.author = PlanAuthor::kPolicy;
      out_.plan.reason.clear();
      for (const PolicyDecision& d : out_.decisions) {
        if (out_.plan.reason.size() > 2000) {
          out_.plan.reason += "; and more";
          break;
        }
        out_.plan.reason += (out_.plan.reason.empty() ? "" : "; ") + d.reason;
      }
      if (out_.plan.reason.empty()) {
        out_.plan.reason = "shadow measurements change; no recipe does";
      }
      state_.awaited_version = out_.plan.version;
    }
    return std::move(out_);
  }

 private:
  const PolicyConfig& config_;
  PolicyState& state_;
  const PrecisionPlan& before_;
  std::int64_t step_;
  PolicyOutput out_;
};

// Falls for every acting firing; a layer as a whole once half of its FP8 ops show something.
void AnswerFirings(const PolicyConfig& config, PolicyState& state, const PrecisionPlan& plan,
                   const std::vector<Firing>& firings, Evaluation& evaluation) {
  std::map<OpSite, const Firing*> first;
  for (const Firing& f : firings) {
    if (f.acts) {
      first.emplace(f.site, &f);
    } else {
      evaluation.Alert(DebugString(f));
    }
  }
  std::map<std::int32_t, std::set<OpSite>> showing;
  for (const auto& [site, f] : first) {
    showing[site.layer].insert(site);
  }
  for (auto& [layer, sites] : showing) {
    const std::vector<OpSite> seen = state.windows.SeenFp8Sites(layer);
    std::set<OpSite> fp8(seen.begin(), seen.end());
    for (const auto& [site, s] : state.sites) {
      if (site.layer == layer && s.status != SiteState::Status::kHealthy) {
        fp8.insert(site);
        sites.insert(site);  // already fallen: it shows, too
      }
    }
    const Firing* cause = nullptr;
    for (const auto& [site, f] : first) {
      if (site.layer == layer) {
        cause = cause == nullptr ? f : cause;
        evaluation.Fall(site, *f, DebugString(*f), config.hold_steps);
      }
    }
    if (fp8.size() >= 2 && 2 * sites.size() >= fp8.size() && sites.size() < fp8.size()) {
      const std::string note = "half of layer " + std::to_string(layer) + "'s FP8 ops (" +
                               std::to_string(sites.size()) + " of " +
                               std::to_string(fp8.size()) + ") show a signal, first " +
                               DebugString(*cause);
      for (int i = 0; i < kOpCount; ++i) {
        const OpSite site{layer, static_cast<Op>(i)};
        // Only ops that the layer has: the plan names a recipe for the others too, and what such an
        // op falls to would never be measured. The payload belongs to the experts.
        const bool exists =
            fp8.count(site) != 0 || (site.op == Op::kDispatch && (fp8.count({layer, Op::kFc1}) != 0 ||
                                                                  fp8.count({layer, Op::kFc2}) != 0));
        if (exists && plan.Resolve(layer, site.op).is_fp8() &&
            sites.count(site) == 0) {
          Firing whole = *cause;
          whole.signal = whole.signal == Signal::kTransposeFlushed ? Signal::kFlushed : whole.signal;
          evaluation.Fall(site, whole, note, config.hold_steps);
        }
      }
    }
  }
}

void ConsiderReturns(const PolicyConfig& config, PolicyState& state, const HealthSnapshot& snapshot,
                     Evaluation& evaluation) {
  // A site's shadow snapshot is good only if every tensor measured in it is.
  std::map<OpSite, std::string> verdict;  // empty: healthy
  for (const TensorHealth& t : snapshot.tensors) {
    const auto s = state.sites.find(t.site);
    if (!t.shadow || s == state.sites.end() || t.shadow_recipe != s->second.original.kind) {
      continue;
    }
    std::string why;
    const bool good = ShadowIsHealthy(config, t, &why);
    auto [it, fresh] = verdict.emplace(t.site, "");
    if (!good && it->second.empty()) {
      it->second = why;
    }
  }
  for (const auto& [site, why] : verdict) {
    SiteState& s = state.sites[site];
    if (s.status != SiteState::Status::kFallback || !evaluation.InHands(site)) {
      continue;
    }
    s.good_shadows = why.empty() ? s.good_shadows + 1 : 0;
    if (s.good_shadows >= config.healthy_snapshots &&
        snapshot.last_step >= s.since_step + s.hold_steps) {
      evaluation.Return(site, s,
                        std::to_string(s.good_shadows) + " good shadow snapshots running after " +
                            std::to_string(snapshot.last_step - s.since_step) +
                            " steps in fallback (hold " + std::to_string(s.hold_steps) + ")");
    }
  }
}

}  // namespace

std::string_view Name(Direction direction) {
  return kDirectionNames[static_cast<std::size_t>(direction)];
}

void PolicyOnStart(const PolicyConfig& config, PolicyState& state, std::int64_t step) {
  state.windows.Clear();
  state.losses.clear();
  state.grace_until = step + config.grace_steps;
  for (auto& [site, s] : state.sites) {
    s.good_shadows = 0;
  }
  if (config.automatic && state.next_choice_step == 0) {
    state.next_choice_step = config.warmup_steps;
  }
}

void PolicyOnApplied(const PolicyConfig& config, PolicyState& state, std::int64_t version,
                     std::int64_t step) {
  if (version >= state.awaited_version) {
    for (const OpSite& site : state.switching) {
      state.site_grace_until[site] = step + config.grace_steps;
    }
    state.switching.clear();
  }
}

void PolicyOnOperator(PolicyState& state, const std::vector<OpSite>& sites, bool release) {
  for (const OpSite& site : sites) {
    if (release) {
      state.operator_sites.erase(site);
    } else {
      state.operator_sites.insert(site);
    }
    state.sites.erase(site);
    state.windows.Reset(site);
    state.switching.insert(site);
  }
}

PolicyOutput PolicyOnStep(const PolicyConfig& config, PolicyState& state, const PrecisionPlan& plan,
                          const StepHealth& step) {
  Evaluation evaluation(config, state, plan, step.step);
  if (!config.enabled) {
    return evaluation.Finish();
  }
  if (step.nonfinite && step.site_known && step.site.layer >= 0 &&
      step.site.layer < plan.layers) {
    Firing f{step.site, step.tensor, Signal::kNonfinite,
             static_cast<double>(std::max<std::uint64_t>(step.nonfinite_elements, 1)), 0, -1, true};
    if (plan.Resolve(step.site.layer, step.site.op).is_fp8()) {
      AnswerFirings(config, state, plan, {f}, evaluation);
    } else {
      evaluation.Alert(DebugString(f) + " in " +
                       DebugString(plan.Resolve(step.site.layer, step.site.op)) +
                       ": not a matter of FP8");
    }
  }
  if (!std::isfinite(step.loss)) {
    return evaluation.Finish();
  }
  const bool judged = state.losses.size() >= static_cast<std::size_t>(kLossWindow) &&
                      step.step >= state.grace_until;
  if (judged) {
    double mean = 0, squares = 0;
    for (double l : state.losses) {
      mean += l;
    }
    mean /= static_cast<double>(state.losses.size());
    for (double l : state.losses) {
      squares += (l - mean) * (l - mean);
    }
    const double sigma = std::sqrt(squares / static_cast<double>(state.losses.size()));
    const double limit = mean + config.loss_sigma * sigma;
    if (step.loss > limit) {
      Firing f{{0, Op::kAttnQkv}, Tensor::kInput, Signal::kLossSpike, step.loss, limit, -1, true};
      const std::string note = "loss spike: " + Number(step.loss) + " > " + Number(limit) +
                               " (mean " + Number(mean) + ", sigma " + Number(sigma) + ")";
      for (std::int32_t layer = 0; layer < plan.layers; ++layer) {
        for (int i = 0; i < kOpCount; ++i) {
          f.site = {layer, static_cast<Op>(i)};
          if (evaluation.plan().Resolve(layer, f.site.op).is_fp8()) {
            evaluation.Fall(f.site, f, note, config.loss_spike_hold);
          }
        }
      }
      state.losses.clear();
    }
  }
  state.losses.push_back(step.loss);
  if (state.losses.size() > static_cast<std::size_t>(kLossWindow)) {
    state.losses.pop_front();
  }
  return evaluation.Finish();
}

PolicyOutput PolicyOnSnapshot(const PolicyConfig& config, PolicyState& state,
                              const PrecisionPlan& plan, const HealthSnapshot& snapshot) {
  Evaluation evaluation(config, state, plan, snapshot.last_step);
  if (!config.enabled || snapshot.plan_version < state.awaited_version) {
    return evaluation.Finish();
  }
  const auto settling = [&](const OpSite& site) {
    const auto own = state.site_grace_until.find(site);
    const std::int64_t until = own == state.site_grace_until.end()
                                   ? state.grace_until
                                   : std::max(own->second, state.grace_until);
    return snapshot.last_step < until;
  };
  std::vector<Firing> firings = state.windows.Observe(config, plan, snapshot, settling);
  if (config.automatic) {
    GatherEvidence(state, snapshot);
  }
  // Inside a grace only non-finite values count.
  std::erase_if(firings, [&](const Firing& f) {
    return f.signal != Signal::kNonfinite && settling(f.site);
  });
  if (snapshot.last_step < state.grace_until) {
    AnswerFirings(config, state, plan, firings, evaluation);
    return evaluation.Finish();
  }
  AnswerFirings(config, state, plan, firings, evaluation);
  ConsiderReturns(config, state, snapshot, evaluation);
  if (config.automatic && snapshot.last_step >= state.next_choice_step) {
    for (Choice& choice : ChooseRecipes(config, state, evaluation.plan())) {
      const Recipe before = evaluation.plan().Resolve(choice.site.layer, choice.site.op);
      Firing f;
      f.site = choice.site;
      f.signal = Signal::kSqnr;
      f.value = choice.sqnr_db;
      f.threshold = choice.sqnr_limit_db;
      evaluation.Change(Direction::kChoose, choice.site, f, before, choice.recipe, choice.reason);
    }
    state.evidence.clear();
    state.next_choice_step = snapshot.last_step + config.rerank_steps;
  }
  return evaluation.Finish();
}

}  // namespace octavo
