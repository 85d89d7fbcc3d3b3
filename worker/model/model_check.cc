#include "worker/model/model_check.h"

#include <utility>
#include <vector>

#include "base/status.h"
#include "base/str.h"
#include "worker/precision/treatment.h"

namespace octavo {
namespace {

struct Positive {
  std::string_view name;
  std::int64_t value;
};

absl::Status CheckMultiple(std::string_view name, std::int64_t value, std::int64_t multiple,
                           std::string_view why) {
  if (value % multiple == 0) {
    return absl::OkStatus();
  }
  const std::int64_t below = value / multiple * multiple;
  return InvalidArgumentError(StrCat(name, " is ", value, "; ", why, " needs a multiple of ",
                                     multiple, ", for example ",
                                     below > 0 ? StrCat(below, " or ") : "", below + multiple));
}

// Dimensions of the products of an op: what its recipe must divide.
std::vector<std::pair<std::string_view, std::int64_t>> DimensionsOf(const ModelConfig& m, Op op,
                                                                    std::int32_t layer) {
  const std::int64_t attended = static_cast<std::int64_t>(m.heads) * m.head_dim;
  const std::int64_t dense =
      m.is_dense(layer) ? m.dense_hidden : m.shared_experts * m.shared_expert_hidden;
  const bool moe = !m.is_dense(layer);
  switch (op) {
    case Op::kAttnQkv:
      return {{"hidden", m.hidden}, {"width of the qkv projection", m.qkv_width()}};
    case Op::kAttnOut:
      return {{"hidden", m.hidden}, {"heads · head_dim", attended}};
    case Op::kMlpFc1:
    case Op::kMlpFc2:
      if (dense == 0) {
        return {};
      }
      return {{"hidden", m.hidden},
              {m.is_dense(layer) ? "dense_hidden" : "width of the shared experts", dense}};
    case Op::kFc1:
    case Op::kFc2:
      if (!moe) {
        return {};
      }
      return {{"hidden", m.hidden}, {"expert_hidden", m.expert_hidden}};
    case Op::kDispatch:
      if (!moe) {
        return {};
      }
      return {{"hidden", m.hidden}};
  }
  return {};
}

}  // namespace

absl::Status CheckModel(const ModelConfig& m, const RunConfig& run) {
  for (const Positive& p :
       {Positive{"layers", m.layers}, Positive{"hidden", m.hidden}, Positive{"heads", m.heads},
        Positive{"kv_heads", m.kv_heads}, Positive{"head_dim", m.head_dim},
        Positive{"vocab", m.vocab}, Positive{"experts", m.experts},
        Positive{"experts_per_token", m.experts_per_token},
        Positive{"expert_hidden", m.expert_hidden},
        Positive{"sequence_length", run.sequence_length},
        Positive{"microbatch_sequences", run.microbatch_sequences},
        Positive{"microbatches", run.microbatches}, Positive{"world_size", run.world_size},
        Positive{"expert_parallel", run.expert_parallel}}) {
    if (p.value <= 0) {
      return InvalidArgumentError(StrCat(p.name, " is ", p.value, "; valid is 1 or more"));
    }
  }
  if (m.heads % m.kv_heads != 0) {
    return InvalidArgumentError(
        StrCat("kv_heads is ", m.kv_heads, "; it must divide heads (", m.heads, ")"));
  }
  RETURN_IF_ERROR(CheckMultiple("head_dim", m.head_dim, 2, "rotary embedding"));
  // Rows of a payload are copied 16 bytes at a time.
  RETURN_IF_ERROR(CheckMultiple("hidden", m.hidden, run.fp32 ? 4 : 8, "dispatch"));
  RETURN_IF_ERROR(CheckMultiple("expert_hidden", m.expert_hidden, 2, "the experts"));
  if (m.experts_per_token > m.experts) {
    return InvalidArgumentError(StrCat("experts_per_token is ", m.experts_per_token,
                                       "; valid is 1 to ", m.experts, " (experts)"));
  }
  const RouterOptions& r = m.router;
  if (r.n_group < 1 || m.experts % r.n_group != 0 || r.topk_group < 1 || r.topk_group > r.n_group ||
      m.experts / r.n_group * r.topk_group < m.experts_per_token) {
    return InvalidArgumentError(
        StrCat("router groups: n_group ", r.n_group, ", topk_group ", r.topk_group, " of ",
               m.experts, " experts; n_group must divide experts, and the chosen groups must hold ",
               "at least experts_per_token (", m.experts_per_token, ") experts"));
  }
  if (m.shared_experts > 0 && m.shared_expert_hidden <= 0) {
    return InvalidArgumentError("shared_expert_hidden must be positive with shared_experts");
  }
  for (std::int32_t l : m.dense_layers) {
    if (l < 0 || l >= m.layers || m.dense_hidden <= 0) {
      return InvalidArgumentError(StrCat("dense layer ", l, " with dense_hidden ", m.dense_hidden,
                                         "; layers are 0 to ", m.layers - 1,
                                         ", and dense_hidden must be positive"));
    }
  }
  if (run.world_size % run.expert_parallel != 0) {
    return InvalidArgumentError(StrCat("expert_parallel is ", run.expert_parallel,
                                       "; it must divide the ranks (", run.world_size, ")"));
  }
  if (m.experts % run.expert_parallel != 0) {
    return InvalidArgumentError(StrCat("expert_parallel is ", run.expert_parallel,
                                       "; it must divide experts (", m.experts, ")"));
  }
  if (!(run.recv_capacity > 0)) {
    return InvalidArgumentError(
        StrCat("recv_capacity is ", run.recv_capacity, "; valid is above 0"));
  }
  return absl::OkStatus();
}

absl::Status CheckSite(const Recipe& recipe, const OpSite& site, const ModelConfig& model,
                       const RunConfig& run, const Backend& backend) {
  const auto dimensions = DimensionsOf(model, site.op, site.layer);
  if (dimensions.empty()) {
    return absl::OkStatus();  // the layer has no such product
  }
  const std::string where = StrCat("layer ", site.layer, ", ", Name(site.op));
  const std::string wrong = ValidateRecipe(recipe, site.op);
  if (!wrong.empty()) {
    return InvalidArgumentError(StrCat(where, ": ", wrong));
  }
  if ((recipe.kind == RecipeKind::kFp32) != run.fp32) {
    return InvalidArgumentError(
        StrCat(where, ": recipe ", Name(recipe.kind),
               run.fp32 ? " in a job whose residual stream is FP32; valid is fp32 everywhere"
                        : "; fp32 is a choice for the whole job, not for one op"));
  }
  for (const auto& [name, value] : dimensions) {
    RETURN_IF_ERROR(Annotate(CheckMultiple(name, value, DimensionMultiple(recipe.kind),
                                           StrCat("recipe ", Name(recipe.kind))),
                             where));
  }
  for (Tensor tensor : {Tensor::kInput, Tensor::kGrad}) {
    if (!recipe.is_fp8()) {
      break;
    }
    const QuantizeRule rule = ActivationRule(recipe, tensor);
    char reason[256] = "";
    if (backend.ops->supports(
            backend.context,
            {.tiling = rule.tiling, .format = rule.format, .emulate = run.allow_emulation}, reason,
            sizeof(reason)) != 1) {
      return InvalidArgumentError(
          StrCat(where, ": recipe ", Name(recipe.kind), " cannot run here: ", reason));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckPlan(const PrecisionPlan& plan, const ModelConfig& model, const RunConfig& run,
                       const Backend& backend) {
  if (plan.layers != model.layers ||
      plan.entries.size() != static_cast<std::size_t>(model.layers) * kOpCount) {
    return InvalidArgumentError(StrCat("the plan has ", plan.layers, " layers and ",
                                       plan.entries.size(), " entries; the model has ",
                                       model.layers, " layers of ", kOpCount, " ops"));
  }
  for (std::int32_t layer = 0; layer < plan.layers; ++layer) {
    for (int i = 0; i < kOpCount; ++i) {
      const OpSite site{layer, static_cast<Op>(i)};
      RETURN_IF_ERROR(CheckSite(plan.Resolve(layer, site.op), site, model, run, backend));
    }
  }
  return absl::OkStatus();
}

PrecisionPlan WithValidShadows(PrecisionPlan plan, const ModelConfig& model, const RunConfig& run,
                               const Backend& backend) {
  for (auto& [site, recipes] : plan.shadows) {
    std::erase_if(recipes, [&, at = site](const Recipe& recipe) {
      return run.fp32 || !CheckSite(recipe, at, model, run, backend).ok();
    });
  }
  return plan;
}

}  // namespace octavo
