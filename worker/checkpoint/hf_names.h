// Hugging Face's names for our tensors, both ways, as one table: pure, the same on every machine.
//
//   for (const HfTensor& t : HfTensors(model)) …   // "model.layers.0.self_attn.q_proj.weight" is
//                                                  // rows [0, heads·D) of
//                                                  "layers.0.attn.qkv.weight"
//
// A Hugging Face tensor is a run of whole rows of one of our stored tensors (shard_plan.h's names:
// "<parameter>" or "<parameter>#<expert>"), so export cuts and import joins, and nothing is ever
// transposed: both sides keep matrices as [out, in], and both rotate the halves of a head (pairs i,
// i + D/2), so queries and keys need no permutation either.
//   ours                          Mixtral                                  Qwen3-MoE
//   attn.qkv                      self_attn.{q,k,v}_proj                   the same
//   attn.q_norm, k_norm           –                                        self_attn.{q,k}_norm
//   router                        block_sparse_moe.gate                    mlp.gate
//   experts.fc1 (gate, up)        block_sparse_moe.experts.N.w1, w3 mlp.experts.N.{gate,up}_proj
//   experts.fc2                   block_sparse_moe.experts.N.w2            mlp.experts.N.down_proj
//   mlp.fc1, fc2 (dense layers)   –                                        mlp.{gate,up,down}_proj
// Source: the files of the released models and transformers' conversion tables.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "worker/model/config.h"

namespace octavo {

struct HfTensor {
  std::string name;                 // with ".weight"
  std::string stored;               // our tensor, without "/master"
  std::int64_t first_row = 0;       // of `stored`; a vector counts as rows of one element
  std::vector<std::int64_t> shape;  // [rows, cols] or [n]
  // A linear layer's weight, quantised in FP8 folders. Embedding, head, router and norms never are.
  bool quantised = false;

  std::int64_t rows() const { return shape[0]; }
  std::int64_t cols() const { return shape.size() > 1 ? shape[1] : 1; }
};

// All tensors of the model in the order of its layers; those of one stored tensor follow each other
// in rising order of rows and cover it. REQUIRES: CheckHfExpressible(model).
std::vector<HfTensor> HfTensors(const ModelConfig& model);

// The matrices of all experts of a layer in one tensor, as transformers 5 keeps them in memory and
// writes them with save_original_format=False:
//   model.layers.L.mlp.experts.gate_up_proj  [E, 2F, H]  every expert's gate rows, then its up rows
//   model.layers.L.mlp.experts.down_proj     [E, H, F]
// and with "_scale_inv" behind, the scales of FP8 blocks, [E, 2·ceil(F/b), ceil(H/b)] and
// [E, ceil(H/b), ceil(F/b)].
struct HfStack {
  std::string stack;                      // name of such a tensor
  std::vector<std::string> slices;        // weights by today's names, in the order of their bytes
  std::vector<std::int64_t> slice_shape;  // of each
};
// Every stack that could stand for tensors of HfTensors(model). REQUIRES:
// CheckHfExpressible(model).
std::vector<HfStack> HfStacks(const ModelConfig& model);

// The same folders call Mixtral's block_sparse_moe "mlp". The name that HfTensors has for `name`.
std::string HfCanonicalName(const ModelConfig& model, const std::string& name);

// The name of the scales of a tensor in an FP8 blockwise folder (DeepSeek-V3's convention):
// "….weight" → "….weight_scale_inv".
std::string HfScaleName(const std::string& weight);

}  // namespace octavo
