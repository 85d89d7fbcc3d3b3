// Causal grouped-query attention block: qkv projection, optional RMSNorm per head on q and k, RoPE,
// softmax(QKᵀ)·V in at least BF16 with FP32 softmax, output projection. No residual, no pre-norm.
#pragma once

#include <cstdint>

#include "worker/layers/linear.h"

namespace octavo {

struct AttentionShape {
  std::int32_t layer = 0;
  std::int64_t hidden = 0, batch = 0, sequence = 0;
  std::int32_t heads = 0, kv_heads = 0, head_dim = 0;
  bool qk_norm = false;
  float norm_eps = 1e-5f, rope_theta = 10000.0f;
  WeightRef qkv, out;
  const float* q_norm = nullptr;  // [head_dim], with qk_norm
  const float* k_norm = nullptr;
  float* q_norm_grad = nullptr;
  float* k_norm_grad = nullptr;

  std::int64_t width() const { return static_cast<std::int64_t>(heads + 2 * kv_heads) * head_dim; }
  std::int64_t tokens() const { return batch * sequence; }
};

// Activations of one layer, taken at creation.
struct AttentionSaved {
  LinearSaved qkv_input, out_input;
  void* projected = nullptr;   // [T, width] before the head norms; same as qkv without qk_norm
  void* qkv = nullptr;         // [T, width] after norms and RoPE
  float* head_rstd = nullptr;  // [heads + kv_heads, T], with qk_norm
  void* attended = nullptr;    // [T, heads·head_dim]
  float* lse = nullptr;        // [B, heads, S]
};

struct AttentionScratch {
  LinearScratch linear;
  void* d_qkv = nullptr;       // [T, width]
  void* d_attended = nullptr;  // [T, heads·head_dim]
  void* workspace = nullptr;
  std::int64_t workspace_bytes = 0;
  void* norm_workspace = nullptr;
};

class Attention {
 public:
  Attention(const AttentionShape& shape, WeightCache& cache);

  static AttentionSaved TakeSaved(const AttentionShape& shape, DType act, bool mx, Arena& arena);

  // y [T, H] from x [T, H]; x must stay until backward.
  void Forward(const LayerContext& ctx, const AttentionScratch& scratch, const void* x,
               AttentionSaved& saved, void* y) const;
  // dx [T, H] from dy [T, H]; may not alias.
  void Backward(const LayerContext& ctx, const AttentionScratch& scratch,
                const AttentionSaved& saved, const void* dy, void* dx) const;

 private:
  void Rotate(const LayerContext& ctx, void* qkv, int direction) const;
  // Element pointer to a head's columns of a packed row.
  std::int64_t HeadOffsetBytes(const LayerContext& ctx, std::int32_t head) const {
    return static_cast<std::int64_t>(head) * shape_.head_dim * ctx.act_bytes();
  }

  const AttentionShape shape_;
  Linear qkv_, out_;
};

}  // namespace octavo
