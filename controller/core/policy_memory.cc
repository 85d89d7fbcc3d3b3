#include "controller/core/policy_memory.h"

#include <algorithm>
#include <set>

#include "proto/convert/precision.h"

namespace octavo {
namespace {

bool IsSite(std::int32_t layer, std::int32_t op) { return layer >= 0 && op >= 0 && op < kOpCount; }

}  // namespace

std::vector<OpSite> ChangedSites(const PrecisionPlan& before, const PrecisionPlan& after) {
  std::vector<OpSite> sites;
  for (const PlanChange& change : Diff(before, after)) {
    sites.push_back(change.site);
  }
  return sites;
}

internal::v1::StoredPolicy PolicyToStore(const PolicyState& state) {
  internal::v1::StoredPolicy stored;
  for (const OpSite& site : state.operator_sites) {
    v1::LayerOpRecipe& out = *stored.add_operator_sites();
    out.set_layer(site.layer);
    out.set_op(std::string(Name(site.op)));
  }
  std::set<OpSite> known = state.switching;
  for (const auto& [site, s] : state.sites) {
    known.insert(site);
  }
  for (const auto& [site, until] : state.site_grace_until) {
    known.insert(site);
  }
  for (const OpSite& site : known) {
    internal::v1::StoredPolicy::Site& out = *stored.add_sites();
    out.set_layer(site.layer);
    out.set_op(static_cast<std::int32_t>(site.op));
    out.set_switching(state.switching.contains(site));
    if (const auto grace = state.site_grace_until.find(site);
        grace != state.site_grace_until.end()) {
      out.set_grace_until(grace->second);
    }
    const auto found = state.sites.find(site);
    if (found == state.sites.end()) {
      continue;
    }
    const SiteState& s = found->second;
    out.set_status(static_cast<std::int32_t>(s.status));
    *out.mutable_original() = RecipeToWire(s.original);
    out.set_cause(static_cast<std::int32_t>(s.cause));
    out.set_since_step(s.since_step);
    out.set_hold_steps(s.hold_steps);
    out.set_flaps(s.flaps);
    out.set_fell_once(s.fell_once);
  }
  stored.set_next_choice_step(state.next_choice_step);
  stored.set_awaited_version(state.awaited_version);
  stored.set_grace_until(state.grace_until);
  return stored;
}

void PolicyFromStore(const internal::v1::StoredPolicy& stored, PolicyState* state) {
  for (const v1::LayerOpRecipe& site : stored.operator_sites()) {
    if (const std::optional<Op> op = ParseOp(site.op()); op.has_value()) {
      state->operator_sites.insert({site.layer(), *op});
    }
  }
  for (const internal::v1::StoredPolicy::Site& site : stored.sites()) {
    if (!IsSite(site.layer(), site.op()) || site.status() < 0 || site.status() > 2) {
      continue;
    }
    const OpSite id{site.layer(), static_cast<Op>(site.op())};
    if (site.switching()) {
      state->switching.insert(id);
    }
    if (site.grace_until() > 0) {
      state->site_grace_until[id] = site.grace_until();
    }
    const absl::StatusOr<Recipe> original = RecipeFromWire(site.original());
    if (!site.has_original() || !original.ok()) {
      continue;
    }
    state->sites[id] = {.status = static_cast<SiteState::Status>(site.status()),
                        .original = *original,
                        .cause = static_cast<Signal>(std::clamp(site.cause(), 0, kSignalCount - 1)),
                        .since_step = site.since_step(),
                        .hold_steps = site.hold_steps(),
                        .flaps = site.flaps(),
                        .fell_once = site.fell_once()};
  }
  state->next_choice_step = stored.next_choice_step();
  state->awaited_version = stored.awaited_version();
  state->grace_until = stored.grace_until();
}

void PolicyFromHistory(const std::vector<PrecisionPlan>& history, const PolicyConfig& config,
                       std::int64_t step, PolicyState* state) {
  for (std::size_t i = 1; i < history.size(); ++i) {
    const PrecisionPlan& before = history[i - 1];
    const PrecisionPlan& after = history[i];
    if (after.author == PlanAuthor::kOperator) {
      PolicyOnOperator(*state, ChangedSites(before, after), /*release=*/false);
      continue;
    }
    for (const PlanChange& change : Diff(before, after)) {
      SiteState& site = state->sites[change.site];
      if (site.status == SiteState::Status::kFallback && change.after == site.original) {
        site.status = SiteState::Status::kHealthy;
        continue;
      }
      if (!change.before.is_fp8()) {
        continue;  // auto chose a recipe: no fall
      }
      if (site.status == SiteState::Status::kHealthy) {
        site.original = change.before;
        site.flaps += site.fell_once ? 1 : 0;
        site.fell_once = true;
        site.hold_steps = config.hold_steps << std::min(site.flaps, 30);
      }
      site.status = site.flaps >= config.max_flaps ? SiteState::Status::kPinned
                                                   : SiteState::Status::kFallback;
      site.good_shadows = 0;
      site.since_step = step;
    }
  }
}

}  // namespace octavo
