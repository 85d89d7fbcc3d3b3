#include "proto/convert/health.h"

#include "base/status.h"
#include "base/str.h"

namespace octavo {
namespace {

absl::StatusOr<std::vector<Recipe>> RecipesByName(
    const google::protobuf::RepeatedPtrField<std::string>& names, const char* field) {
  std::vector<Recipe> recipes;
  for (const std::string& name : names) {
    const std::optional<RecipeKind> kind = ParseRecipeKind(name);
    if (!kind.has_value()) {
      return InvalidArgumentError(StrCat(field, ": found \"", name, "\"; valid: ",
                                         StrJoin(RecipeKindNames(), ", ")));
    }
    recipes.push_back(DefaultRecipe(*kind));
  }
  return recipes;
}

}  // namespace

std::string FormatSite(const SiteAndTensor& s) {
  return StrCat("layer ", s.site.layer, " ", Name(s.site.op), " ", Name(s.tensor));
}

std::optional<SiteAndTensor> ParseSite(const std::string& text) {
  const std::vector<std::string> words = StrSplit(text, ' ');
  if (words.size() != 4 || words[0] != "layer") {
    return std::nullopt;
  }
  const std::optional<std::int64_t> layer = ParseInt64(words[1]);
  const std::optional<Op> op = ParseOp(words[2]);
  const std::optional<Tensor> tensor = ParseTensor(words[3]);
  if (!layer.has_value() || !op.has_value() || !tensor.has_value()) {
    return std::nullopt;
  }
  return SiteAndTensor{{static_cast<std::int32_t>(*layer), *op}, *tensor};
}

HealthSnapshot HealthFromWire(const internal::v1::TelemetrySnapshot& wire) {
  HealthSnapshot out;
  out.first_step = wire.first_step();
  out.last_step = wire.last_step();
  out.plan_version = wire.plan_version();
  for (const internal::v1::TensorStats& t : wire.tensors()) {
    if (t.op() < 0 || t.op() >= kOpCount || t.tensor() < 0 || t.tensor() >= kTensorCount) {
      continue;
    }
    TensorHealth h;
    h.site = {t.layer(), static_cast<Op>(t.op())};
    h.tensor = static_cast<Tensor>(t.tensor());
    h.shadow = t.shadow();
    h.shadow_recipe = ParseRecipeKind(t.shadow_recipe()).value_or(RecipeKind::kBf16);
    h.e5m2 = t.e5m2();
    h.amax = t.amax();
    h.dequant_scale_min = t.dequant_scale_min();
    h.dequant_scale_max = t.dequant_scale_max();
    h.elements = t.elements();
    h.nonfinite = t.nonfinite();
    h.saturated = t.saturated();
    h.nonzero = t.nonzero();
    h.flushed = t.flushed();
    h.transpose_flushed = t.transpose_flushed();
    h.signal_energy = t.signal_energy();
    h.noise_energy = t.noise_energy();
    for (const internal::v1::TensorStats::WorstExpert& w : t.worst()) {
      if (w.ratio() >= 0 && w.ratio() <= 2) {
        h.worst.push_back({w.expert(), static_cast<ExpertRatio>(w.ratio()), w.count(), w.total()});
      }
    }
    out.tensors.push_back(std::move(h));
  }
  return out;
}

StepHealth StepHealthFromWire(const internal::v1::StepReport& wire) {
  StepHealth out;
  out.step = wire.step();
  out.loss = wire.loss();
  out.nonfinite = wire.outcome() != 0;
  out.nonfinite_elements = wire.nonfinite_elements();
  if (const std::optional<SiteAndTensor> site = ParseSite(wire.nonfinite_op())) {
    out.site_known = true;
    out.site = site->site;
    out.tensor = site->tensor;
  }
  return out;
}

absl::StatusOr<PolicyConfig> PolicyConfigFromSpec(const v1::JobSpec& spec,
                                                  const DeviceAbility& device) {
  const v1::PrecisionSpec& precision = spec.precision();
  const v1::PolicySpec& p = precision.policy();
  PolicyConfig c;
  c.enabled = !p.has_enabled() || p.enabled();
  c.saturated_ratio = p.saturated_ratio();
  c.flushed_ratio = p.flushed_ratio();
  c.flushed_ratio_grad = p.flushed_ratio_grad();
  c.transpose_flushed_ratio = p.transpose_flushed_ratio();
  c.sqnr_e4m3_db = p.sqnr_e4m3_db();
  c.sqnr_e5m2_db = p.sqnr_e5m2_db();
  c.amax_jump = p.amax_jump();
  c.amax_variation = p.amax_variation();
  c.dequant_scale_ratio = p.dequant_scale_ratio();
  c.loss_sigma = p.loss_sigma();
  c.loss_spike_hold = p.loss_spike_hold();
  c.grace_steps = p.grace_steps();
  c.hold_steps = p.hold_steps();
  c.healthy_snapshots = p.healthy_snapshots();
  c.max_flaps = p.max_flaps();
  c.stale_after = p.stale_after();
  ASSIGN_OR_RETURN(c.ladder, RecipesByName(p.ladder(), "precision.policy.ladder"));
  c.automatic = precision.recipe() == "auto";
  ASSIGN_OR_RETURN(c.candidates, RecipesByName(precision.candidates(), "precision.candidates"));
  c.warmup_steps = precision.warmup_steps();
  c.rerank_steps = precision.rerank_steps();
  c.protect = precision.protect();
  c.device = device;
  c.allow_emulation = precision.allow_emulation();
  return c;
}

}  // namespace octavo
