#include "worker/checkpoint/hf_names.h"

#include "base/str.h"

namespace octavo {
namespace {

// Collects rows of one stored tensor after the other.
class Table {
 public:
  // The next `rows` rows of `stored`.
  void Add(std::string name, const std::string& stored, std::vector<std::int64_t> shape,
           bool quantised) {
    const std::int64_t rows = shape[0];
    if (stored != stored_) {
      stored_ = stored;
      next_row_ = 0;
    }
    tensors_.push_back({.name = std::move(name) + ".weight",
                        .stored = stored,
                        .first_row = next_row_,
                        .shape = std::move(shape),
                        .quantised = quantised});
    next_row_ += rows;
  }
  std::vector<HfTensor> Take() { return std::move(tensors_); }

 private:
  std::vector<HfTensor> tensors_;
  std::string stored_;
  std::int64_t next_row_ = 0;
};

// What a family calls the three matrices of a SwiGLU block.
struct SwigluNames {
  const char *gate, *up, *down;
};
constexpr SwigluNames kMixtralExpert = {"w1", "w3", "w2"};
constexpr SwigluNames kProjections = {"gate_proj", "up_proj", "down_proj"};

}  // namespace

std::vector<HfTensor> HfTensors(const ModelConfig& m) {
  Table table;
  const bool mixtral = m.family == ModelFamily::kMixtral;
  const std::int64_t attended = std::int64_t{m.heads} * m.head_dim;
  const std::int64_t shared = std::int64_t{m.kv_heads} * m.head_dim;

  const auto swiglu = [&](const std::string& theirs, const SwigluNames& names,
                          const std::string& fc1, const std::string& fc2, std::int64_t ffn) {
    table.Add(theirs + names.gate, fc1, {ffn, m.hidden}, true);
    table.Add(theirs + names.up, fc1, {ffn, m.hidden}, true);
    table.Add(theirs + names.down, fc2, {m.hidden, ffn}, true);
  };

  table.Add("model.embed_tokens", "embedding.weight", {m.vocab, m.hidden}, false);
  for (std::int32_t l = 0; l < m.layers; ++l) {
    const std::string ours = StrCat("layers.", l, "."), theirs = StrCat("model.layers.", l, ".");
    table.Add(theirs + "input_layernorm", ours + "attn_norm.weight", {m.hidden}, false);
    const std::string qkv = ours + "attn.qkv.weight", attention = theirs + "self_attn.";
    table.Add(attention + "q_proj", qkv, {attended, m.hidden}, true);
    table.Add(attention + "k_proj", qkv, {shared, m.hidden}, true);
    table.Add(attention + "v_proj", qkv, {shared, m.hidden}, true);
    if (m.qk_norm) {
      table.Add(attention + "q_norm", ours + "attn.q_norm.weight", {m.head_dim}, false);
      table.Add(attention + "k_norm", ours + "attn.k_norm.weight", {m.head_dim}, false);
    }
    table.Add(attention + "o_proj", ours + "attn.out.weight", {m.hidden, attended}, true);
    table.Add(theirs + "post_attention_layernorm", ours + "mlp_norm.weight", {m.hidden}, false);
    if (m.is_dense(l)) {
      swiglu(theirs + "mlp.", kProjections, ours + "mlp.fc1.weight", ours + "mlp.fc2.weight",
             m.dense_hidden);
      continue;
    }
    const std::string moe = theirs + (mixtral ? "block_sparse_moe." : "mlp.");
    table.Add(moe + "gate", ours + "router.weight", {m.experts, m.hidden}, false);
    for (std::int32_t e = 0; e < m.experts; ++e) {
      swiglu(StrCat(moe, "experts.", e, "."), mixtral ? kMixtralExpert : kProjections,
             StrCat(ours, "experts.fc1.weight#", e), StrCat(ours, "experts.fc2.weight#", e),
             m.expert_hidden);
    }
  }
  table.Add("model.norm", "final_norm.weight", {m.hidden}, false);
  if (!m.tied_embeddings) {
    table.Add("lm_head", "lm_head.weight", {m.vocab, m.hidden}, false);
  }
  return table.Take();
}

std::vector<HfStack> HfStacks(const ModelConfig& m) {
  const bool mixtral = m.family == ModelFamily::kMixtral;
  const SwigluNames& names = mixtral ? kMixtralExpert : kProjections;
  std::vector<HfStack> stacks;
  for (std::int32_t l = 0; l < m.layers; ++l) {
    if (m.is_dense(l)) {
      continue;
    }
    const std::string layer = StrCat("model.layers.", l, ".");
    const std::string experts = layer + (mixtral ? "block_sparse_moe." : "mlp.") + "experts.";
    HfStack wide{.stack = layer + "mlp.experts.gate_up_proj",
                 .slices = {},
                 .slice_shape = {m.expert_hidden, m.hidden}};
    HfStack down{.stack = layer + "mlp.experts.down_proj",
                 .slices = {},
                 .slice_shape = {m.hidden, m.expert_hidden}};
    for (std::int32_t e = 0; e < m.experts; ++e) {
      wide.slices.push_back(StrCat(experts, e, ".", names.gate, ".weight"));
      wide.slices.push_back(StrCat(experts, e, ".", names.up, ".weight"));
      down.slices.push_back(StrCat(experts, e, ".", names.down, ".weight"));
    }
    stacks.push_back(std::move(wide));
    stacks.push_back(std::move(down));
  }
  return stacks;
}

std::string HfCanonicalName(const ModelConfig& model, const std::string& name) {
  constexpr std::string_view kLayers = "model.layers.", kMlp = ".mlp.";
  const std::size_t at = name.find(kMlp);
  if (model.family != ModelFamily::kMixtral || !StartsWith(name, kLayers) ||
      at == std::string::npos) {
    return name;
  }
  return StrCat(name.substr(0, at), ".block_sparse_moe.", name.substr(at + kMlp.size()));
}

std::string HfScaleName(const std::string& weight) { return weight + "_scale_inv"; }

}  // namespace octavo
