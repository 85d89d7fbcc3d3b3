#include "controller/core/plans.h"

#include <algorithm>
#include <set>

#include "base/check.h"
#include "base/status.h"
#include "base/str.h"
#include "controller/core/attempts.h"
#include "controller/core/jobs.h"
#include "controller/core/policy_memory.h"
#include "controller/core/policy_verbs.h"
#include "controller/core/workers.h"
#include "proto/convert/error_detail.h"
#include "proto/convert/precision.h"
#include "proto/spec/job_spec.h"

namespace octavo {
namespace {

absl::StatusOr<PlanOverride> ToOverride(const v1::PrecisionOverride& wire, std::int32_t layers) {
  return OverrideFromWire(wire.layers(), {wire.ops().begin(), wire.ops().end()}, wire.recipe(),
                          layers);
}

absl::Status CheckPlan(const CoreState& state, const JobRecord& job, const PrecisionPlan& plan) {
  for (std::int32_t layer = 0; layer < plan.layers; ++layer) {
    for (int op = 0; op < kOpCount; ++op) {
      const std::string problem =
          ValidateRecipe(plan.Resolve(layer, static_cast<Op>(op)), static_cast<Op>(op));
      if (!problem.empty()) {
        return WithDetail(
            InvalidArgumentError(StrCat("layer ", layer, " ", kOpNames[op], ": ", problem)),
            "PLAN_INVALID");
      }
    }
  }
  if (!job.current.has_value()) {
    return absl::OkStatus();
  }
  GangRequest request{.cuda = job.spec().device() == "cuda",
                      .recipes = plan.entries,
                      .allow_emulation = job.spec().precision().allow_emulation()};
  for (const v1::Placement& placement : job.current->stored.attempt().placements()) {
    const auto worker = state.workers.find(StripPrefix(placement.worker(), "workers/"));
    if (worker == state.workers.end()) {
      continue;
    }
    const std::string refusal = WhyNotOn(ViewOf(worker->second), request);
    if (!refusal.empty()) {
      return WithDetail(InvalidArgumentError(StrCat(placement.worker(), ": ", refusal)),
                        "RECIPE_UNSUPPORTED");
    }
  }
  return absl::OkStatus();
}

// Which version a request made is remembered beside it, as the fingerprint under this id.
std::string VersionKey(const std::string& request_id) { return request_id + "#version"; }

// A sentence when protected layers leave bf16 for FP8; an operator may do so. Else empty.
std::string ProtectionWarning(const v1::JobSpec& spec, const std::vector<PlanChange>& changes) {
  const std::int32_t layers = spec.model().layers();
  const std::int32_t protect = spec.precision().protect();
  std::set<std::int32_t> named;
  for (const PlanChange& change : changes) {
    const std::int32_t layer = change.site.layer;
    if ((layer < protect || layer >= layers - protect) && change.after.is_fp8() &&
        !change.before.is_fp8() && LayerHasOp(spec.model(), layer, change.site.op)) {
      named.insert(layer);
    }
  }
  if (named.empty()) {
    return {};
  }
  std::string list;
  for (const std::int32_t layer : named) {
    StrAppend(&list, list.empty() ? "" : ", ", layer);
  }
  return StrCat(named.size() == 1 ? "layer " : "layers ", list,
                " of the first and last that precision.protect: ", protect,
                " keeps in bf16 because FP8 harms them most: FP8 there is by this plan only");
}

// Stores version n+1 and sends it down.
const v1::PrecisionPlan& AppendPlan(CoreState& state, JobRecord& job, PrecisionPlan plan,
                                    const std::string& author_name, Now now) {
  plan.version = job.plans.back().version() + 1;
  v1::PrecisionPlan wire = PlanToWire(plan);
  wire.set_author_name(author_name);
  SetTimestamp(wire.mutable_create_time(), now.unix_micros);
  const absl::Status taken = TakePlan(job, wire);
  OCTAVO_CHECK(taken.ok());  // it was made from a plan just now
  state.batch.plans.push_back({.job_uid = job.uid(), .plan = wire});
  EmitEvent(state, job, "PLAN",
            StrCat("plan version ", plan.version, " by ", author_name, ": ", plan.reason), now);
  state.effects.push_back(
      PlanVersionMetric{.train_job = job.spec().name(), .version = plan.version});
  SendPlanToRanks(state, job);
  return job.plans.back();
}

}  // namespace

std::string PlanEtag(const JobRecord& job) {
  const std::int64_t edits = job.stored.policy_edits();
  return StrCat("p", job.plans.back().version(), edits == 0 ? "" : StrCat(".", edits));
}

void ForgetPins(JobRecord& job, const std::vector<OpSite>& sites) {
  auto& pinned = *job.stored.mutable_pinned();
  pinned.erase(std::remove_if(pinned.begin(), pinned.end(),
                              [&sites](const v1::LayerOpRecipe& pin) {
                                return std::any_of(
                                    sites.begin(), sites.end(), [&pin](const OpSite& site) {
                                      return site.layer == pin.layer() && Name(site.op) == pin.op();
                                    });
                              }),
               pinned.end());
}

void SavePolicy(CoreState& state, JobRecord& job, Now now) {
  if (state.policy != nullptr && !IsTerminal(job.state())) {
    *job.stored.mutable_policy() = state.policy->Save(job.job());
    SaveJob(state, job, now);
  }
}

v1::PrecisionPlan PlanOfSpec(const v1::JobSpec& spec) {
  PrecisionPlan plan = BuildPlanFromSpec(spec);
  plan.version = 1;
  plan.author = PlanAuthor::kSpec;
  return PlanToWire(plan);
}

absl::StatusOr<v1::SetPrecisionResponse> SetPrecision(CoreState& state, const PlanEdit& edit,
                                                      Now now) {
  std::string content = StrCat(StripPrefix(edit.name, "jobs/"), "|", edit.rollback_to);
  for (const v1::PrecisionOverride& change : edit.overrides) {
    StrAppend(&content, "|", change.SerializeAsString());
  }
  const std::uint64_t fingerprint = Fingerprint(content);
  ASSIGN_OR_RETURN(const std::string known,
                   FindRequest(state, edit.request_id, "SetPrecision", fingerprint));
  ASSIGN_OR_RETURN(JobRecord * job, FindJob(state, edit.name));
  v1::SetPrecisionResponse response;
  if (!known.empty()) {
    *response.mutable_plan() = job->plans.back();
    const auto made = state.requests.find(VersionKey(edit.request_id));
    for (const v1::PrecisionPlan& plan : job->plans) {
      if (made != state.requests.end() &&
          plan.version() == static_cast<std::int64_t>(made->second.fingerprint)) {
        *response.mutable_plan() = plan;
      }
    }
    return response;
  }
  if (IsTerminal(job->state())) {
    return WithDetail(FailedPreconditionError(StrCat(job->job().name(), " is ", Name(job->state()),
                                                     "; its plan cannot change any more")),
                      "ILLEGAL_TRANSITION");
  }
  if (!edit.etag.empty() && edit.etag != PlanEtag(*job)) {
    return WithDetail(AbortedError(StrCat("the plan of ", job->job().name(), " has changed: etag ",
                                          edit.etag, " was given, it is ", PlanEtag(*job),
                                          " now; read it again and decide anew")),
                      "STALE_ETAG");
  }
  if ((edit.rollback_to != 0) == !edit.overrides.empty()) {
    return WithDetail(InvalidArgumentError("give either overrides or rollback_to, and not both"),
                      "PLAN_INVALID");
  }
  const PrecisionPlan newest = job->newest_plan;
  PrecisionPlan plan = newest;
  std::string what;
  if (edit.rollback_to != 0) {
    const auto found = std::find_if(
        job->plans.begin(), job->plans.end(),
        [&edit](const v1::PrecisionPlan& p) { return p.version() == edit.rollback_to; });
    if (found == job->plans.end()) {
      return WithDetail(
          InvalidArgumentError(StrCat("plan version ", edit.rollback_to,
                                      " does not exist; valid is 1 to ", newest.version)),
          "PLAN_INVALID");
    }
    ASSIGN_OR_RETURN(const PrecisionPlan target, PlanFromWire(*found));
    plan.entries = target.entries;
    what = StrCat("back to version ", edit.rollback_to);
  } else {
    const std::vector<SpecViolation> violations =
        ValidateOverrides(job->spec(), {edit.overrides.begin(), edit.overrides.end()});
    RETURN_IF_ERROR(ToStatus(violations, "overrides"));
    for (std::size_t i = 0; i < edit.overrides.size(); ++i) {
      absl::StatusOr<PlanOverride> change = ToOverride(edit.overrides[i], plan.layers);
      if (!change.ok()) {
        return WithDetail(Annotate(change.status(), StrCat("overrides[", i, "]")), "PLAN_INVALID");
      }
      ApplyOverride(plan, *change);
      StrAppend(&what, what.empty() ? "" : "; ",
                SitesText(edit.overrides[i].layers(), edit.overrides[i].ops()), " to ",
                DebugString(change->recipe));
    }
  }
  RETURN_IF_ERROR(CheckPlan(state, *job, plan));
  const std::vector<PlanChange> changes = Diff(newest, plan);
  for (const PlanChange& change : changes) {
    if (LayerHasOp(job->spec().model(), change.site.layer, change.site.op)) {
      *response.add_changed() = SiteToWire(change.site, change.after);
    }
  }
  if (!changes.empty() && response.changed().empty()) {
    return WithDetail(InvalidArgumentError(
                          "nothing would change: the model has no such op in these layers (dense "
                          "layers have mlp_fc1 and mlp_fc2, MoE layers fc1, fc2 and dispatch)"),
                      "PLAN_UNCHANGED");
  }
  if (changes.empty()) {
    return WithDetail(InvalidArgumentError(StrCat("nothing would change: version ", newest.version,
                                                  " already says so")),
                      "PLAN_UNCHANGED");
  }
  for (const PlanChange& change : changes) {
    plan.shadows.erase(change.site);  // measured for the policy, whose hands the site leaves
  }
  plan.author = PlanAuthor::kOperator;
  plan.reason = edit.reason.empty() ? what : StrCat(what, ": ", edit.reason);
  if (const std::string warning = ProtectionWarning(job->spec(), changes); !warning.empty()) {
    response.add_warnings(warning);
  }
  if (edit.validate_only) {
    plan.version = newest.version + 1;
    *response.mutable_plan() = PlanToWire(plan);
    if (state.policy != nullptr) {
      ASSIGN_OR_RETURN(const std::vector<StoredTelemetry> stored, TelemetryOf(state, *job));
      const absl::StatusOr<PolicyReplay> replay =
          state.policy->Replay(job->job(), nullptr, stored, [&plan](std::int64_t) { return plan; });
      if (replay.ok()) {  // else nothing is stored yet
        *response.mutable_replay() = ReplayToWire(*replay);
      }
    }
    return response;
  }
  *response.mutable_plan() =
      AppendPlan(state, *job, plan, edit.caller.empty() ? "operator" : edit.caller, now);
  RememberRequest(state, edit.request_id, "SetPrecision", job->uid(), fingerprint);
  if (!edit.request_id.empty()) {
    RememberRequest(state, VersionKey(edit.request_id), "SetPrecision version", job->uid(),
                    static_cast<std::uint64_t>(job->plans.back().version()));
  }
  ForgetPins(*job, ChangedSites(newest, plan));
  if (state.policy != nullptr) {
    state.policy->OnOperatorPlan(job->job(), newest, plan);
    SavePolicy(state, *job, now);
  }
  state.effects.push_back(PrecisionChangeMetric{
      .train_job = job->spec().name(), .direction = "operator", .reason = "operator"});
  return response;
}

absl::Status AdoptPolicyPlan(CoreState& state, JobRecord& job, PrecisionPlan plan,
                             const std::vector<std::pair<std::string, std::string>>& changes,
                             Now now) {
  RETURN_IF_ERROR(CheckPlan(state, job, plan));
  plan.author = PlanAuthor::kPolicy;
  AppendPlan(state, job, std::move(plan), "policy", now);
  SavePolicy(state, job, now);
  for (const auto& [direction, signal] : changes) {
    state.effects.push_back(PrecisionChangeMetric{
        .train_job = job.spec().name(), .direction = direction, .reason = signal});
  }
  return absl::OkStatus();
}

v1::JobPrecision RenderPrecision(const CoreState& state, const JobRecord& job) {
  v1::JobPrecision precision;
  precision.set_job(job.job().name());
  precision.set_etag(PlanEtag(job));
  *precision.mutable_plan() = job.plans.back();
  *precision.mutable_effective() = job.stored.effective();
  const v1::PolicySpec& policy = job.spec().precision().policy();
  precision.set_policy_enabled(!policy.has_enabled() || policy.enabled());
  if (state.policy == nullptr) {
    return precision;
  }
  internal::v1::StoredPolicy memory = job.stored.policy();
  if (!IsTerminal(job.state())) {
    precision.set_policy_enabled(state.policy->Enabled(job.job()));
    memory = state.policy->Save(job.job());
  }
  const auto exists = [&job](std::int32_t layer, const std::optional<Op>& op) {
    return op.has_value() && LayerHasOp(job.spec().model(), layer, *op);
  };
  std::set<std::pair<std::int32_t, std::string>> pinned;
  for (const v1::LayerOpRecipe& pin : job.stored.pinned()) {
    pinned.insert({pin.layer(), pin.op()});
  }
  for (const v1::LayerOpRecipe& site : memory.operator_sites()) {
    if (!exists(site.layer(), ParseOp(site.op()))) {
      continue;
    }
    v1::PolicySite& out = *precision.add_sites();
    out.set_layer(site.layer());
    out.set_op(site.op());
    out.set_status(pinned.contains({site.layer(), site.op()}) ? "pinned" : "operator");
  }
  for (const internal::v1::StoredPolicy::Site& site : memory.sites()) {
    if (site.status() == static_cast<std::int32_t>(SiteState::Status::kHealthy) || site.op() < 0 ||
        site.op() >= kOpCount || !exists(site.layer(), static_cast<Op>(site.op()))) {
      continue;
    }
    v1::PolicySite& out = *precision.add_sites();
    out.set_layer(site.layer());
    out.set_op(std::string(kOpNames[static_cast<std::size_t>(site.op())]));
    out.set_status(site.status() == static_cast<std::int32_t>(SiteState::Status::kPinned)
                       ? "pinned"
                       : "fallback");
    const absl::StatusOr<Recipe> original = RecipeFromWire(site.original());
    out.set_original(original.ok() ? DebugString(*original) : site.original().kind());
    out.set_cause(
        std::string(Name(static_cast<Signal>(std::clamp(site.cause(), 0, kSignalCount - 1)))));
    out.set_since_step(site.since_step());
    out.set_hold_steps(site.hold_steps());
    out.set_relapses(site.flaps());
  }
  return precision;
}

void OnPlanApplied(CoreState& state, JobRecord& job, std::int32_t rank,
                   const internal::v1::PlanApplied& applied, Now now) {
  for (v1::PrecisionPlan& plan : job.plans) {
    if (plan.version() != applied.version()) {
      continue;
    }
    if (state.policy != nullptr && rank == 0) {  // also when a new attempt takes it up again
      state.policy->OnPlanApplied(job.job(), applied.version(), applied.step());
      SavePolicy(state, job, now);
    }
    if (plan.applied_step() == 0 && applied.step() > 0) {
      plan.set_applied_step(applied.step());
      state.batch.plans.push_back({.job_uid = job.uid(), .plan = plan});
      EmitEvent(state, job, "PLAN",
                StrCat("ranks run plan version ", plan.version(), " from step ", applied.step()),
                now);
    }
    return;
  }
  EmitEvent(state, job, "WARNING",
            StrCat("rank ", rank, " says it applied plan version ", applied.version(),
                   ", which does not exist; the newest is ", job.plans.back().version()),
            now);
}

absl::Status TakePlan(JobRecord& job, const v1::PrecisionPlan& plan) {
  ASSIGN_OR_RETURN(job.newest_plan, PlanFromWire(plan));
  job.plans.push_back(plan);
  job.recipes.clear();
  for (const Recipe& recipe : job.newest_plan.entries) {
    if (std::find(job.recipes.begin(), job.recipes.end(), recipe) == job.recipes.end()) {
      job.recipes.push_back(recipe);
    }
  }
  return absl::OkStatus();
}

}  // namespace octavo
