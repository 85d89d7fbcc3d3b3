#include "worker/checkpoint/hf_config.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <vector>

#include "base/status.h"
#include "base/str.h"
#include "worker/checkpoint/hf_names.h"

namespace octavo {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::int64_t kBlock = 128;

const char* FamilyName(ModelFamily family) {
  return family == ModelFamily::kMixtral ? "Mixtral" : "Qwen3-MoE";
}

// The shortest decimal of a float as a JSON number: 1e-5f is written as 1e-05, not 9.99999975e-06.
Json Number(float value) {
  char text[32];
  const auto [end, error] = std::to_chars(text, text + sizeof(text), value);
  return Json::parse(std::string(text, end));
}

// Reads fields and remembers what was wrong with them.
class Fields {
 public:
  explicit Fields(const Json& object) : object_(object) {}

  const Json* Find(const char* name) const {
    const auto it = object_.find(name);
    return it == object_.end() || it->is_null() ? nullptr : &*it;
  }
  // A whole number of at least `min`; without `fallback` the field must exist.
  template <class T>
  void Int(const char* name, T* out, std::int64_t min, const std::int64_t* fallback = nullptr) {
    const Json* value = Find(name);
    if (value == nullptr) {
      if (fallback == nullptr) {
        problems_.push_back(StrCat(name, " is missing"));
        return;
      }
      *out = static_cast<T>(*fallback);
      return;
    }
    if (!value->is_number_integer() || value->get<std::int64_t>() < min ||
        value->get<std::int64_t>() > INT32_MAX) {
      problems_.push_back(
          StrCat(name, " is ", value->dump(), "; valid is a whole number from ", min));
      return;
    }
    *out = static_cast<T>(value->get<std::int64_t>());
  }
  void Float(const char* name, float* out, float fallback) {
    const Json* value = Find(name);
    *out = fallback;
    if (value != nullptr && !value->is_number()) {
      problems_.push_back(StrCat(name, " is ", value->dump(), "; valid is a number"));
    } else if (value != nullptr) {
      *out = value->get<float>();
    }
  }
  bool Bool(const char* name, bool fallback) {
    const Json* value = Find(name);
    if (value != nullptr && !value->is_boolean()) {
      problems_.push_back(StrCat(name, " is ", value->dump(), "; valid is true or false"));
    }
    return value != nullptr && value->is_boolean() ? value->get<bool>() : fallback;
  }
  void Refuse(std::string problem) { problems_.push_back(std::move(problem)); }
  const std::vector<std::string>& problems() const { return problems_; }

 private:
  const Json& object_;
  std::vector<std::string> problems_;
};

// rope_parameters (transformers 5), rope_scaling and rope_theta (4): the base, and nothing else.
void ReadRope(Fields& in, float fallback, float* theta) {
  in.Float("rope_theta", theta, fallback);
  for (const char* name : {"rope_parameters", "rope_scaling"}) {
    const Json* rope = in.Find(name);
    if (rope == nullptr) {
      continue;
    }
    if (!rope->is_object()) {
      in.Refuse(StrCat(name, " is not an object"));
      continue;
    }
    for (const char* key : {"rope_type", "type"}) {
      const auto type = rope->find(key);
      if (type != rope->end() && !type->is_null() && *type != "default") {
        in.Refuse(StrCat(name, ".", key, " is ", type->dump(),
                         "; Octavo computes plain rotary positions (default)"));
      }
    }
    const auto partial = rope->find("partial_rotary_factor");
    if (partial != rope->end() && partial->is_number() && partial->get<double>() != 1.0) {
      in.Refuse(StrCat(name, ".partial_rotary_factor is ", partial->dump(), "; valid is 1"));
    }
    const auto base = rope->find("rope_theta");
    if (base != rope->end() && base->is_number()) {
      *theta = base->get<float>();
    }
  }
}

void ReadLayers(Fields& in, ModelConfig* m) {
  std::vector<std::int32_t> dense;
  if (const Json* list = in.Find("mlp_only_layers")) {
    for (const Json& layer : list->is_array() ? *list : Json::array({*list})) {
      if (!layer.is_number_integer()) {
        in.Refuse(StrCat("mlp_only_layers holds ", layer.dump(), "; valid are layer numbers"));
        return;
      }
      dense.push_back(layer.get<std::int32_t>());
    }
  }
  std::int32_t sparse_step = 1;
  const std::int64_t every = 1;
  in.Int("decoder_sparse_step", &sparse_step, 1, &every);
  for (std::int32_t l = 0; l < m->layers && sparse_step >= 1; ++l) {
    const bool listed = std::find(dense.begin(), dense.end(), l) != dense.end();
    if (listed || (l + 1) % sparse_step != 0) {
      m->dense_layers.push_back(l);
    }
  }
  if (!m->dense_layers.empty()) {
    in.Int("intermediate_size", &m->dense_hidden, 1);
  }
}

void ReadQuantization(const Fields& all, HfConfig* out, Fields& report) {
  const Json* config = all.Find("quantization_config");
  if (config == nullptr) {
    return;
  }
  const auto method = config->find("quant_method");
  const auto block = config->find("weight_block_size");
  if (!config->is_object() || method == config->end() || *method != "fp8" ||
      block == config->end() || !block->is_array() || block->size() != 2 ||
      !(*block)[0].is_number_unsigned() || !(*block)[1].is_number_unsigned() ||
      (*block)[0].get<std::int64_t>() < 1 || (*block)[1].get<std::int64_t>() < 1) {
    report.Refuse(
        "quantization_config is not FP8 blockwise; valid is quant_method fp8 with a "
        "weight_block_size of two numbers");
    return;
  }
  out->fp8 = true;
  out->block_rows = (*block)[0].get<std::int64_t>();
  out->block_cols = (*block)[1].get<std::int64_t>();
}

}  // namespace

absl::Status CheckHfExpressible(const ModelConfig& m) {
  std::vector<std::string> problems;
  const auto refuse = [&problems](bool bad, std::string what) {
    if (bad) {
      problems.push_back(std::move(what));
    }
  };
  const bool mixtral = m.family == ModelFamily::kMixtral;
  const RouterOptions& r = m.router;
  refuse(r.score == RouterScore::kSigmoid, "sigmoid scores (model.moe.router.score)");
  refuse(mixtral && r.score == RouterScore::kSoftmax && !r.normalize_topk,
         "weights that are not normalised over the chosen experts "
         "(model.moe.router.normalize_topk: false)");
  refuse(r.bias_update_rate != 0,
         "a selection bias of loss-free balancing (model.moe.router.bias_update_rate)");
  refuse(r.routed_scaling_factor != 1.0f,
         StrCat("a factor of ", r.routed_scaling_factor,
                " on routing weights (model.moe.router.routed_scaling_factor)"));
  refuse(r.n_group != 1 || r.topk_group != 1,
         "group-limited selection (model.moe.router.n_group, topk_group)");
  refuse(m.shared_experts > 0, "shared experts (model.moe.shared_experts)");
  refuse(mixtral && !m.dense_layers.empty(), "dense layers (model.dense_layers)");
  refuse(mixtral && m.qk_norm, "norms of queries and keys (model.qk_norm: true)");
  refuse(!mixtral && !m.qk_norm, "queries and keys without norms (model.qk_norm: false)");
  if (problems.empty()) {
    return absl::OkStatus();
  }
  return InvalidArgumentError(StrCat("Hugging Face's ", FamilyName(m.family),
                                     " cannot express: ", StrJoin(problems, "; ")));
}

std::string WriteHfConfig(const ModelConfig& m, const HfConfigOptions& options) {
  const bool mixtral = m.family == ModelFamily::kMixtral;
  Json out;
  out["architectures"] = {mixtral ? "MixtralForCausalLM" : "Qwen3MoeForCausalLM"};
  out["model_type"] = mixtral ? "mixtral" : "qwen3_moe";
  out["torch_dtype"] = "bfloat16";
  out["vocab_size"] = m.vocab;
  out["hidden_size"] = m.hidden;
  out["num_hidden_layers"] = m.layers;
  out["num_attention_heads"] = m.heads;
  out["num_key_value_heads"] = m.kv_heads;
  out["head_dim"] = m.head_dim;
  out["hidden_act"] = "silu";
  out["rms_norm_eps"] = Number(m.norm_eps);
  out["rope_theta"] = Number(m.rope_theta);
  out["rope_parameters"] = {{"rope_theta", Number(m.rope_theta)}, {"rope_type", "default"}};
  out["max_position_embeddings"] = options.max_positions;
  out["tie_word_embeddings"] = m.tied_embeddings;
  out["initializer_range"] = Number(m.init_std);
  out["attention_dropout"] = 0.0;
  out["sliding_window"] = nullptr;
  out["use_cache"] = true;
  out["num_experts_per_tok"] = m.experts_per_token;
  out["output_router_logits"] = false;
  // Theirs is summed over the k choices (NUMERICS 8), ours divided by k.
  out["router_aux_loss_coef"] = Number(m.router.aux_coefficient / m.experts_per_token);
  if (mixtral) {
    out["num_local_experts"] = m.experts;
    out["intermediate_size"] = m.expert_hidden;
    out["router_jitter_noise"] = 0.0;
  } else {
    out["num_experts"] = m.experts;
    out["moe_intermediate_size"] = m.expert_hidden;
    // Read only for dense layers, but a number must be there.
    out["intermediate_size"] = m.dense_layers.empty() ? m.expert_hidden : m.dense_hidden;
    out["mlp_only_layers"] = m.dense_layers;
    out["decoder_sparse_step"] = 1;
    // Top-k then softmax is softmax normalised over the chosen.
    out["norm_topk_prob"] = m.router.normalize_topk || m.router.score == RouterScore::kTopKSoftmax;
    out["attention_bias"] = false;
    out["use_sliding_window"] = false;
  }
  out["bos_token_id"] = nullptr;
  out["eos_token_id"] = nullptr;
  out["pad_token_id"] = nullptr;
  if (options.format == HfFormat::kFp8) {
    std::vector<std::string> kept;
    if (!m.tied_embeddings) {
      kept.push_back("lm_head");
    }
    for (const HfTensor& t : HfTensors(m)) {
      if (EndsWith(t.name, ".gate.weight")) {
        kept.push_back(t.name.substr(0, t.name.size() - std::string_view(".weight").size()));
      }
    }
    out["quantization_config"] = {{"quant_method", "fp8"},
                                  {"fmt", "e4m3"},
                                  {"activation_scheme", "dynamic"},
                                  {"weight_block_size", {kBlock, kBlock}},
                                  {"modules_to_not_convert", kept}};
  }
  return out.dump(2) + "\n";
}

absl::StatusOr<HfConfig> ParseHfConfig(std::string_view text, const std::string& path) {
  const Json object = Json::parse(text.begin(), text.end(), nullptr, /*allow_exceptions=*/false);
  if (!object.is_object()) {
    return InvalidArgumentError(StrCat(path, ": not a JSON object"));
  }
  Fields in(object);
  HfConfig out;
  ModelConfig& m = out.model;
  const Json* type = in.Find("model_type");
  const bool mixtral = type != nullptr && *type == "mixtral";
  if (!mixtral && (type == nullptr || *type != "qwen3_moe")) {
    return InvalidArgumentError(StrCat(path, ": model_type is ",
                                       type == nullptr ? "missing" : type->dump(),
                                       "; valid are \"mixtral\" and \"qwen3_moe\""));
  }
  m.family = mixtral ? ModelFamily::kMixtral : ModelFamily::kQwen3Moe;
  m.qk_norm = !mixtral;
  in.Int("vocab_size", &m.vocab, 1);
  in.Int("hidden_size", &m.hidden, 1);
  in.Int("num_hidden_layers", &m.layers, 1);
  in.Int("num_attention_heads", &m.heads, 1);
  const std::int64_t heads = m.heads;
  in.Int("num_key_value_heads", &m.kv_heads, 1, &heads);
  const std::int64_t head_dim = m.heads > 0 ? m.hidden / m.heads : 0;
  in.Int("head_dim", &m.head_dim, 1, &head_dim);
  // The defaults are those of the families' own configuration classes.
  in.Float("rms_norm_eps", &m.norm_eps, mixtral ? 1e-5f : 1e-6f);
  ReadRope(in, mixtral ? 1e6f : 1e4f, &m.rope_theta);
  m.tied_embeddings = in.Bool("tie_word_embeddings", false);
  in.Float("initializer_range", &m.init_std, 0.02f);
  in.Int(in.Find("num_local_experts") != nullptr ? "num_local_experts" : "num_experts", &m.experts,
         1);
  in.Int("num_experts_per_tok", &m.experts_per_token, 1);
  if (m.experts > 0 && m.experts_per_token > m.experts) {
    in.Refuse(StrCat("num_experts_per_tok is ", m.experts_per_token, "; valid is 1 to ", m.experts,
                     ", the number of experts"));
  }
  const std::int64_t unknown = 0;
  in.Int("max_position_embeddings", &out.max_positions, 0, &unknown);
  in.Int(mixtral ? "intermediate_size" : "moe_intermediate_size", &m.expert_hidden, 1);
  m.router.normalize_topk = mixtral || in.Bool("norm_topk_prob", false);
  float aux = 0;
  in.Float("router_aux_loss_coef", &aux, 0.001f);
  m.router.aux_coefficient = aux * static_cast<float>(m.experts_per_token);
  if (!mixtral) {
    ReadLayers(in, &m);
  }
  const Json* act = in.Find("hidden_act");
  if (act != nullptr && *act != "silu") {
    in.Refuse(StrCat("hidden_act is ", act->dump(), "; Octavo computes SwiGLU (silu)"));
  }
  if (in.Bool("attention_bias", false) || in.Bool("qkv_bias", false)) {
    in.Refuse("attention_bias is true; Octavo's projections have no bias");
  }
  if (in.Find("sliding_window") != nullptr && in.Bool("use_sliding_window", mixtral)) {
    in.Refuse(StrCat("sliding_window is ", in.Find("sliding_window")->dump(),
                     "; Octavo attends to the whole sequence"));
  }
  ReadQuantization(in, &out, in);
  if (!in.problems().empty()) {
    return InvalidArgumentError(StrCat(path, ": ", StrJoin(in.problems(), "; ")));
  }
  return out;
}

std::string ModelAsJobYaml(const ModelConfig& m) {
  const auto truth = [](bool value) { return value ? "true" : "false"; };
  const RouterOptions& r = m.router;
  std::string out = StrCat(
      "model:\n  family: ", m.family == ModelFamily::kMixtral ? "mixtral" : "qwen3_moe",
      "\n  layers: ", m.layers, "\n  hidden: ", m.hidden, "\n  heads: ", m.heads,
      "\n  kv_heads: ", m.kv_heads, "\n  head_dim: ", m.head_dim, "\n  qk_norm: ", truth(m.qk_norm),
      "\n  vocab_size: ", m.vocab, "\n  rope_theta: ", Number(m.rope_theta).dump(),
      "\n  norm_eps: ", Number(m.norm_eps).dump(),
      "\n  tied_embeddings: ", truth(m.tied_embeddings),
      "\n  init_std: ", Number(m.init_std).dump(), "\n");
  if (!m.dense_layers.empty()) {
    StrAppend(&out, "  dense_layers: [", StrJoin(m.dense_layers, ", "),
              "]\n  dense_hidden: ", m.dense_hidden, "\n");
  }
  StrAppend(&out, "  moe:\n    num_experts: ", m.experts,
            "\n    experts_per_token: ", m.experts_per_token,
            "\n    expert_hidden: ", m.expert_hidden,
            "\n    router:\n      normalize_topk: ", truth(r.normalize_topk),
            "\n      aux_loss_coefficient: ", Number(r.aux_coefficient).dump(), "\n");
  return out;
}

}  // namespace octavo
