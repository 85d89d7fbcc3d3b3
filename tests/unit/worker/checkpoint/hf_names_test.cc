#include "worker/checkpoint/hf_names.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "base/str.h"
#include "kernels/arena.h"
#include "kernels/cpu/backend.h"
#include "tests/unit/worker/checkpoint/hf_fixture.h"
#include "worker/checkpoint/shard_plan.h"

namespace octavo {
namespace {

std::vector<std::string> Names(const ModelConfig& model) {
  std::vector<std::string> names;
  for (const HfTensor& t : HfTensors(model)) {
    names.push_back(t.name);
  }
  return names;
}

// Name and shape of all that a checkpoint of the model stores, from the parameter table itself.
std::map<std::string, std::vector<std::int64_t>> StoredTensors(const ModelConfig& model) {
  Backend backend = CreateCpuBackend();
  std::map<std::string, std::vector<std::int64_t>> stored;
  {
    Arena arena(backend, "parameters");
    const auto parameters =
        Parameters::Create(model, {.sequence_length = 1}, DType::kF32, backend, arena);
    EXPECT_TRUE(parameters.ok()) << ToString(parameters.status());
    for (const ShardPiece& piece : HeldPieces(parameters->all(), {})) {
      stored[piece.base] = piece.shape;
    }
  }
  DestroyCpuBackend(&backend);
  return stored;
}

TEST(HfNamesTest, EveryStoredTensorIsMadeOfHuggingFaceTensorsRowForRow) {
  for (const ModelConfig& model : {SmallMixtral(), SmallQwen()}) {
    std::map<std::string, std::vector<std::int64_t>> stored;
    std::set<std::string> names;
    for (const HfSources& source : HfSourcesOf(model)) {
      std::int64_t next = 0;
      for (const HfTensor& t : source.parts) {
        EXPECT_EQ(t.first_row, next) << t.name;
        EXPECT_TRUE(names.insert(t.name).second) << t.name << " twice";
        next += t.rows();
      }
      EXPECT_EQ(next, source.shape[0]);
      EXPECT_TRUE(stored.emplace(source.stored, source.shape).second) << source.stored;
    }
    EXPECT_EQ(stored, StoredTensors(model));
  }
}

TEST(HfNamesTest, MixtralsNamesAreThoseOfItsReleasedFiles) {
  ModelConfig model = SmallMixtral();
  model.layers = model.experts = 1;
  EXPECT_EQ(Names(model), (std::vector<std::string>{
                              "model.embed_tokens.weight",
                              "model.layers.0.input_layernorm.weight",
                              "model.layers.0.self_attn.q_proj.weight",
                              "model.layers.0.self_attn.k_proj.weight",
                              "model.layers.0.self_attn.v_proj.weight",
                              "model.layers.0.self_attn.o_proj.weight",
                              "model.layers.0.post_attention_layernorm.weight",
                              "model.layers.0.block_sparse_moe.gate.weight",
                              "model.layers.0.block_sparse_moe.experts.0.w1.weight",
                              "model.layers.0.block_sparse_moe.experts.0.w3.weight",
                              "model.layers.0.block_sparse_moe.experts.0.w2.weight",
                              "model.norm.weight",
                              "lm_head.weight",
                          }));
}

TEST(HfNamesTest, Qwen3NamesAreThoseOfItsReleasedFiles) {
  ModelConfig model = SmallQwen();
  model.layers = 2;
  model.experts = 1;
  EXPECT_EQ(Names(model), (std::vector<std::string>{
                              "model.embed_tokens.weight",
                              "model.layers.0.input_layernorm.weight",
                              "model.layers.0.self_attn.q_proj.weight",
                              "model.layers.0.self_attn.k_proj.weight",
                              "model.layers.0.self_attn.v_proj.weight",
                              "model.layers.0.self_attn.q_norm.weight",
                              "model.layers.0.self_attn.k_norm.weight",
                              "model.layers.0.self_attn.o_proj.weight",
                              "model.layers.0.post_attention_layernorm.weight",
                              "model.layers.0.mlp.gate.weight",
                              "model.layers.0.mlp.experts.0.gate_proj.weight",
                              "model.layers.0.mlp.experts.0.up_proj.weight",
                              "model.layers.0.mlp.experts.0.down_proj.weight",
                              "model.layers.1.input_layernorm.weight",
                              "model.layers.1.self_attn.q_proj.weight",
                              "model.layers.1.self_attn.k_proj.weight",
                              "model.layers.1.self_attn.v_proj.weight",
                              "model.layers.1.self_attn.q_norm.weight",
                              "model.layers.1.self_attn.k_norm.weight",
                              "model.layers.1.self_attn.o_proj.weight",
                              "model.layers.1.post_attention_layernorm.weight",
                              "model.layers.1.mlp.gate_proj.weight",
                              "model.layers.1.mlp.up_proj.weight",
                              "model.layers.1.mlp.down_proj.weight",
                              "model.norm.weight",
                          }));
}

TEST(HfNamesTest, GateRowsComeBeforeUpRowsAndOnlyLinearWeightsAreQuantised) {
  const ModelConfig model = SmallMixtral();
  for (const HfTensor& t : HfTensors(model)) {
    if (EndsWith(t.name, ".w1.weight")) {
      EXPECT_EQ(t.first_row, 0);
    } else if (EndsWith(t.name, ".w3.weight")) {
      EXPECT_EQ(t.first_row, model.expert_hidden);
    }
    const bool linear =
        t.name.find("_proj") != std::string::npos || t.name.find(".experts.") != std::string::npos;
    EXPECT_EQ(t.quantised, linear) << t.name;
  }
  EXPECT_EQ(HfScaleName("a.q_proj.weight"), "a.q_proj.weight_scale_inv");
}

}  // namespace
}  // namespace octavo
