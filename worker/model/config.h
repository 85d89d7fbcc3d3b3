// What the model is and how a rank runs it: plain values, printable, checked once.
//
// ModelConfig is the architecture (checkpointed, compared at resume). RunConfig is how this attempt
// runs it (may differ between attempts: ranks, expert-parallel size, microbatch).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/ops.h"

namespace octavo {

enum class ModelFamily : std::uint8_t { kMixtral, kQwen3Moe };
enum class AuxLossScope : std::uint8_t { kNone, kMicrobatch, kSequence, kGlobal };

struct RouterOptions {
  RouterScore score = RouterScore::kSoftmax;
  bool normalize_topk = true;
  float routed_scaling_factor = 1.0f;
  std::int32_t n_group = 1, topk_group = 1;
  AuxLossScope aux_scope = AuxLossScope::kMicrobatch;
  float aux_coefficient = 0.0f;   // coeff · E · Σ f_i P_i (NUMERICS 8)
  float bias_update_rate = 0.0f;  // loss-free balance; 0: no bias
  float z_coefficient = 0.0f;
};

struct ModelConfig {
  ModelFamily family = ModelFamily::kMixtral;
  std::int32_t layers = 0;
  std::int64_t hidden = 0;
  std::int32_t heads = 0, kv_heads = 0, head_dim = 0;
  bool qk_norm = false;  // RMSNorm per head on q and k before RoPE
  std::int64_t vocab = 0;
  float rope_theta = 10000.0f;
  float norm_eps = 1e-5f;
  bool tied_embeddings = false;
  float init_std = 0.02f;  // normal; attn_out and fc2 divided by sqrt(2·layers)
  std::int32_t experts = 0, experts_per_token = 0;
  std::int64_t expert_hidden = 0;
  std::int32_t shared_experts = 0;  // fused into one dense SwiGLU of shared_experts·shared_hidden
  std::int64_t shared_expert_hidden = 0;   // each
  std::vector<std::int32_t> dense_layers;  // decoder layers with a dense MLP instead of MoE
  std::int64_t dense_hidden = 0;
  RouterOptions router;

  bool is_dense(std::int32_t layer) const {
    for (std::int32_t l : dense_layers) {
      if (l == layer) {
        return true;
      }
    }
    return false;
  }
  std::int64_t qkv_width() const {
    return static_cast<std::int64_t>(heads + 2 * kv_heads) * head_dim;
  }
};

struct RunConfig {
  std::int64_t sequence_length = 0;
  std::int32_t microbatch_sequences = 1;  // sequences per rank and microbatch
  std::int32_t microbatches = 1;          // gradient accumulation per optimizer step
  std::int32_t world_size = 1, rank = 0;
  std::int32_t expert_parallel = 1;  // group = ranks [g·ep, (g+1)·ep)
  bool fp32 = false;                 // recipe fp32: residual stream in FP32
  std::vector<bool> recompute;       // per layer: recompute the MoE/MLP and attention in backward
  float recv_capacity = 2.0f;        // NUMERICS 8
  std::uint64_t seed = 0;
  bool allow_emulation = false;
  bool strict_precision = false;
  std::int32_t stale_after = 64;  // delayed scaling: steps without a push before a window empties
  // Messages and gradient reductions run beside computing where the communicator can. The numbers
  // are the same without; on a GPU up to rounding, since products beside a message may get another
  // kernel.
  bool overlap = true;
  // Gradients are reduced as soon as a layer's are final, not all in FinishPass (whoever changes
  // gradients in between says no).
  bool reduce_early = true;
  // Parts in which a forward dispatch travels; 0: two where collectives run beside products,
  // else 1.
  std::int32_t dispatch_parts = 0;

  std::int64_t tokens() const { return sequence_length * microbatch_sequences; }
  DType act_dtype() const { return fp32 ? DType::kF32 : DType::kBF16; }
};

// FLOPs of one token's forward+backward with these choices: 6·active parameters +
// 6·layers·seq·heads·head_dim (ANCHORS); for MFU.
double TrainFlopsPerToken(const ModelConfig& model, std::int64_t sequence_length);

}  // namespace octavo
