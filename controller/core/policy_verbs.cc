#include "controller/core/policy_verbs.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "base/status.h"
#include "base/str.h"
#include "controller/core/jobs.h"
#include "controller/core/plans.h"
#include "proto/convert/error_detail.h"
#include "proto/convert/precision.h"
#include "proto/spec/job_spec.h"

namespace octavo {
namespace {

constexpr std::int32_t kHealthLimitDefault = 20, kHealthLimitMax = 2000;
constexpr std::size_t kReplayAlertsMax = 200;

absl::Status NoPolicy() {
  return WithDetail(FailedPreconditionError("this controller runs without a precision policy"),
                    "NO_POLICY");
}

absl::StatusOr<std::vector<OpSite>> SitesOf(const v1::SetPolicyRequest& request,
                                            std::int32_t layers) {
  std::pair<std::int32_t, std::int32_t> range{0, layers - 1};
  if (!request.layers().empty()) {
    absl::StatusOr<std::pair<std::int32_t, std::int32_t>> parsed =
        ParseLayerRange(request.layers(), layers);
    if (!parsed.ok()) {
      return WithDetail(Annotate(parsed.status(), StrCat("layers: ", request.layers())),
                        "PLAN_INVALID");
    }
    range = *parsed;
  }
  std::vector<Op> ops;
  for (const std::string& name : request.ops()) {
    const std::optional<Op> op = ParseOp(name);
    if (!op.has_value()) {
      return WithDetail(
          InvalidArgumentError(
              StrCat("ops: found ", Quoted(name), "; valid: ",
                     StrJoin(std::vector<std::string>(kOpNames.begin(), kOpNames.end()), ", "))),
          "PLAN_INVALID");
    }
    ops.push_back(*op);
  }
  std::vector<OpSite> sites;
  for (std::int32_t layer = range.first; layer <= range.second; ++layer) {
    for (int i = 0; i < kOpCount; ++i) {
      const Op op = static_cast<Op>(i);
      if (ops.empty() || std::find(ops.begin(), ops.end(), op) != ops.end()) {
        sites.push_back({layer, op});
      }
    }
  }
  return sites;
}

std::string Where(const v1::SetPolicyRequest& request) {
  return SitesText(request.layers(), request.ops());
}

// The operator's pins among the job's sites, for the status; a release takes them away.
void NotePins(JobRecord& job, const std::vector<OpSite>& sites, bool pinned) {
  ForgetPins(job, sites);
  for (const OpSite& site : sites) {
    if (pinned) {
      v1::LayerOpRecipe& out = *job.stored.add_pinned();
      out.set_layer(site.layer);
      out.set_op(std::string(Name(site.op)));
    }
  }
}

}  // namespace

std::string SitesText(const std::string& layers,
                      const google::protobuf::RepeatedPtrField<std::string>& ops) {
  const bool one = !layers.empty() && layers.find('-') == std::string::npos;
  std::string text =
      layers.empty() ? std::string("all layers") : StrCat(one ? "layer " : "layers ", layers);
  if (!ops.empty()) {
    StrAppend(&text, " ", StrJoin(std::vector<std::string>(ops.begin(), ops.end()), ", "));
  }
  return text;
}

absl::StatusOr<v1::JobPrecision> SetPolicy(CoreState& state, const v1::SetPolicyRequest& request,
                                           const std::string& caller, Now now) {
  v1::SetPolicyRequest content = request;
  content.clear_request_id();
  const std::uint64_t fingerprint = Fingerprint(content.SerializeAsString());
  ASSIGN_OR_RETURN(const std::string known,
                   FindRequest(state, request.request_id(), "SetPolicy", fingerprint));
  ASSIGN_OR_RETURN(JobRecord * job, FindJob(state, request.name()));
  if (!known.empty()) {
    return RenderPrecision(state, *job);
  }
  if (state.policy == nullptr) {
    return NoPolicy();
  }
  if (IsTerminal(job->state())) {
    return WithDetail(FailedPreconditionError(StrCat(job->job().name(), " is ", Name(job->state()),
                                                     "; its policy has nothing to decide")),
                      "ILLEGAL_TRANSITION");
  }
  if (!request.etag().empty() && request.etag() != PlanEtag(*job)) {
    return WithDetail(
        AbortedError(StrCat("the plan of ", job->job().name(), " has changed: etag ",
                            request.etag(), " was given, it is ", PlanEtag(*job), " now")),
        "STALE_ETAG");
  }
  ASSIGN_OR_RETURN(const std::vector<OpSite> sites, SitesOf(request, job->spec().model().layers()));
  const std::string by = StrCat(" by ", caller.empty() ? "an operator" : caller,
                                request.reason().empty() ? "" : ": ", request.reason());
  const bool some = !request.layers().empty() || request.ops_size() > 0;
  switch (request.action()) {
    case v1::SetPolicyRequest::ON:
      state.policy->SetEnabled(job->job(), true);
      if (some) {
        state.policy->SetOperatorSites(job->job(), sites, /*release=*/true);
        NotePins(*job, sites, /*pinned=*/false);
      }
      EmitEvent(
          state, *job, "POLICY",
          StrCat("policy on", some ? StrCat("; back in its hands: ", Where(request)) : "", by),
          now);
      break;
    case v1::SetPolicyRequest::OFF:
      if (some) {
        return WithDetail(InvalidArgumentError("OFF is for the whole job; PIN keeps single layers"),
                          "PLAN_INVALID");
      }
      state.policy->SetEnabled(job->job(), false);
      EmitEvent(state, *job, "POLICY", StrCat("policy off", by), now);
      break;
    case v1::SetPolicyRequest::PIN:
      state.policy->SetOperatorSites(job->job(), sites, /*release=*/false);
      NotePins(*job, sites, /*pinned=*/true);
      EmitEvent(state, *job, "POLICY", StrCat(Where(request), " pinned", by), now);
      break;
    default:
      return WithDetail(InvalidArgumentError("action: found none; valid: ON, OFF, PIN"),
                        "PLAN_INVALID");
  }
  job->stored.set_policy_edits(job->stored.policy_edits() + 1);
  SavePolicy(state, *job, now);
  RememberRequest(state, request.request_id(), "SetPolicy", job->uid(), fingerprint);
  return RenderPrecision(state, *job);
}

absl::StatusOr<std::vector<StoredTelemetry>> TelemetryOf(CoreState& state, const JobRecord& job) {
  ASSIGN_OR_RETURN(std::vector<StoredTelemetry> stored,
                   state.store->ReadTelemetry(job.uid(), /*first=*/0));
  std::map<std::int64_t, StoredTelemetry> rows;
  for (StoredTelemetry& row : stored) {
    rows[row.sequence] = std::move(row);
  }
  for (const StoredTelemetry& row : state.batch.telemetry) {
    if (row.job_uid == job.uid()) {
      rows[row.sequence] = row;
    }
  }
  for (const auto& [uid, first] : state.batch.telemetry_trims) {
    if (uid == job.uid()) {
      rows.erase(rows.begin(), rows.lower_bound(first));
    }
  }
  stored.clear();
  for (auto& [sequence, row] : rows) {
    stored.push_back(std::move(row));
  }
  return stored;
}

v1::ReplayPolicyResponse ReplayToWire(const PolicyReplay& replay) {
  v1::ReplayPolicyResponse response;
  response.set_first_step(replay.first_step);
  response.set_last_step(replay.last_step);
  response.set_snapshots(replay.snapshots);
  response.set_steps(replay.steps);
  for (const PolicyDecision& decision : replay.result.decisions) {
    v1::PolicyDecision& out = *response.add_decisions();
    out.set_direction(std::string(Name(decision.direction)));
    out.set_layer(decision.site.layer);
    out.set_op(std::string(Name(decision.site.op)));
    out.set_signal(std::string(Name(decision.signal)));
    out.set_value(decision.value);
    out.set_threshold(decision.threshold);
    out.set_step(decision.step);
    out.set_before(DebugString(decision.before));
    out.set_after(DebugString(decision.after));
    out.set_reason(decision.reason);
  }
  std::set<std::string> said;  // what differs in numbers only is one alert
  for (const std::string& alert : replay.result.alerts) {
    const std::size_t colon = alert.find(": ");
    const std::string key =
        alert.substr(0, alert.find(' ', colon == std::string::npos ? 0 : colon + 2));
    if (said.size() < kReplayAlertsMax && said.insert(key).second) {
      response.add_alerts(alert);
    }
  }
  *response.mutable_plan() = PlanToWire(replay.result.plan);
  return response;
}

absl::StatusOr<v1::ReplayPolicyResponse> ReplayPolicy(CoreState& state,
                                                      const v1::ReplayPolicyRequest& request) {
  ASSIGN_OR_RETURN(JobRecord * job, FindJob(state, request.name()));
  if (state.policy == nullptr) {
    return NoPolicy();
  }
  if (request.has_policy()) {
    v1::JobSpec spec = job->spec();
    *spec.mutable_precision()->mutable_policy() = request.policy();
    RETURN_IF_ERROR(ToStatus(ValidateJobSpec(spec), "policy"));
  }
  ASSIGN_OR_RETURN(const std::vector<StoredTelemetry> stored, TelemetryOf(state, *job));
  // From the plan that ran when the kept telemetry begins.
  const auto plan_of = [job](std::int64_t version) {
    const auto found =
        std::find_if(job->plans.begin(), job->plans.end(),
                     [&](const v1::PrecisionPlan& plan) { return plan.version() == version; });
    return PlanFromWire(found == job->plans.end() ? job->plans.front() : *found);
  };
  ASSIGN_OR_RETURN(
      const PolicyReplay replay,
      state.policy->Replay(job->job(), request.has_policy() ? &request.policy() : nullptr, stored,
                           plan_of));
  return ReplayToWire(replay);
}

absl::StatusOr<v1::JobHealth> GetHealth(CoreState& state, const v1::GetHealthRequest& request) {
  ASSIGN_OR_RETURN(JobRecord * job, FindJob(state, request.name()));
  if (state.policy == nullptr) {
    return NoPolicy();
  }
  if (request.limit() < 0 || request.limit() > kHealthLimitMax) {
    return WithDetail(
        InvalidArgumentError(StrCat("limit: found ", request.limit(), "; valid: 0 (the default, ",
                                    kHealthLimitDefault, ") to ", kHealthLimitMax)),
        "LIMIT_INVALID");
  }
  ASSIGN_OR_RETURN(const PolicyHealth health, state.policy->Health(job->job(), job->newest_plan));
  v1::JobHealth response;
  response.set_job(job->job().name());
  response.set_first_step(health.first_step);
  response.set_last_step(health.last_step);
  response.set_plan_version(health.plan_version);
  response.set_tensors_total(static_cast<std::int32_t>(health.tensors.size()));
  const auto ratio = [](std::uint64_t count, std::uint64_t total) {
    return total == 0 ? 0.0 : static_cast<double>(count) / static_cast<double>(total);
  };
  const std::int32_t limit = request.limit() == 0 ? kHealthLimitDefault : request.limit();
  for (const RankedTensor& ranked : health.tensors) {
    if (response.tensors_size() == limit) {
      break;
    }
    const TensorHealth& t = ranked.tensor;
    v1::TensorRank& out = *response.add_tensors();
    out.set_layer(t.site.layer);
    out.set_op(std::string(Name(t.site.op)));
    out.set_tensor(std::string(Name(t.tensor)));
    out.set_recipe(std::string(Name(ranked.recipe)));
    out.set_shadow(t.shadow);
    out.set_signal(std::string(Name(ranked.signal)));
    out.set_value(ranked.value);
    out.set_threshold(ranked.threshold);
    out.set_severity(ranked.severity);
    out.set_expert(ranked.expert);
    out.set_reason(ranked.reason);
    out.set_amax(t.amax);
    out.set_saturated_ratio(ratio(t.saturated, t.elements));
    out.set_flushed_ratio(ratio(t.flushed, t.nonzero));
    out.set_transpose_flushed_ratio(ratio(t.transpose_flushed, t.nonzero));
    out.set_sqnr_db(t.sqnr_sampled() ? SqnrDb(t) : 0);
    out.set_dequant_scale_min(t.dequant_scale_min);
    out.set_dequant_scale_max(t.dequant_scale_max);
    out.set_nonfinite(t.nonfinite);
  }
  return response;
}

}  // namespace octavo
