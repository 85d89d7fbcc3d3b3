#include "worker/layers/attention.h"

#include <cmath>

namespace octavo {
namespace {

std::uint8_t* At(void* base, std::int64_t bytes) {
  return static_cast<std::uint8_t*>(base) + bytes;
}

}  // namespace

Attention::Attention(const AttentionShape& shape, WeightCache& cache)
    : shape_(shape),
      qkv_({.site = {shape.layer, Op::kAttnQkv},
            .n = shape.width(),
            .k = shape.hidden,
            .weight = shape.qkv},
           cache),
      out_({.site = {shape.layer, Op::kAttnOut},
            .n = shape.hidden,
            .k = static_cast<std::int64_t>(shape.heads) * shape.head_dim,
            .weight = shape.out},
           cache) {}

AttentionSaved Attention::TakeSaved(const AttentionShape& shape, DType act, bool mx, Arena& arena) {
  const std::int64_t tokens = shape.tokens(), bytes = DTypeBytes(act);
  const std::int64_t attended = static_cast<std::int64_t>(shape.heads) * shape.head_dim;
  AttentionSaved saved;
  saved.qkv_input.col = QBuffer::Take(arena, tokens, shape.hidden, 1, mx);
  saved.out_input.col = QBuffer::Take(arena, tokens, attended, 1, mx);
  saved.qkv = arena.TakeBytes(tokens * shape.width() * bytes);
  saved.projected = saved.qkv;
  if (shape.qk_norm) {
    saved.projected = arena.TakeBytes(tokens * shape.width() * bytes);
    saved.head_rstd = arena.Take<float>((shape.heads + shape.kv_heads) * tokens);
  }
  saved.attended = arena.TakeBytes(tokens * attended * bytes);
  saved.lse = arena.Take<float>(static_cast<std::int64_t>(shape.heads) * tokens);
  return saved;
}

void Attention::Rotate(const LayerContext& ctx, void* qkv, int direction) const {
  // Queries and keys are adjacent in a row, so they rotate together.
  ctx.ops().rope(ctx.device(), {.x = qkv,
                                .dtype = ctx.act,
                                .rows = shape_.tokens(),
                                .sequence = shape_.sequence,
                                .row_stride = shape_.width(),
                                .first_head = 0,
                                .heads = shape_.heads + shape_.kv_heads,
                                .head_dim = shape_.head_dim,
                                .theta = shape_.rope_theta,
                                .direction = direction});
}

void Attention::Forward(const LayerContext& ctx, const AttentionScratch& scratch, const void* x,
                        AttentionSaved& saved, void* y) const {
  const std::int64_t tokens = shape_.tokens();
  qkv_.Forward(ctx, scratch.linear, x, tokens, &saved.qkv_input, saved.projected);
  if (shape_.qk_norm) {
    // Values pass unchanged; copying whole rows first keeps them in place.
    ctx.ops().copy(ctx.device(), {.dst = saved.qkv,
                                  .src = saved.projected,
                                  .bytes = tokens * shape_.width() * ctx.act_bytes(),
                                  .kind = CopyKind::kOnDevice});
    for (std::int32_t h = 0; h < shape_.heads + shape_.kv_heads; ++h) {
      ctx.ops().rms_norm_forward(ctx.device(),
                                 {.rows = tokens,
                                  .cols = shape_.head_dim,
                                  .x = At(saved.projected, HeadOffsetBytes(ctx, h)),
                                  .ld_x = shape_.width(),
                                  .residual = nullptr,
                                  .residual_out = nullptr,
                                  .w = h < shape_.heads ? shape_.q_norm : shape_.k_norm,
                                  .eps = shape_.norm_eps,
                                  .dtype = ctx.act,
                                  .y = At(saved.qkv, HeadOffsetBytes(ctx, h)),
                                  .ld_y = shape_.width(),
                                  .rstd = saved.head_rstd + h * tokens});
    }
  }
  Rotate(ctx, saved.qkv, +1);
  ctx.ops().attention_forward(
      ctx.device(), {.batch = shape_.batch,
                     .sequence = shape_.sequence,
                     .heads = shape_.heads,
                     .kv_heads = shape_.kv_heads,
                     .head_dim = shape_.head_dim,
                     .qkv = saved.qkv,
                     .dtype = ctx.act,
                     .softmax_factor = 1.0f / std::sqrt(static_cast<float>(shape_.head_dim)),
                     .out = saved.attended,
                     .lse = saved.lse,
                     .workspace = scratch.workspace,
                     .workspace_bytes = scratch.workspace_bytes});
  out_.Forward(ctx, scratch.linear, saved.attended, tokens, &saved.out_input, y);
}

void Attention::Backward(const LayerContext& ctx, const AttentionScratch& scratch,
                         const AttentionSaved& saved, const void* dy, void* dx) const {
  const std::int64_t tokens = shape_.tokens();
  out_.Backward(ctx, scratch.linear, dy, tokens, saved.out_input, scratch.d_attended);
  ctx.ops().attention_backward(
      ctx.device(), {.batch = shape_.batch,
                     .sequence = shape_.sequence,
                     .heads = shape_.heads,
                     .kv_heads = shape_.kv_heads,
                     .head_dim = shape_.head_dim,
                     .qkv = saved.qkv,
                     .out = saved.attended,
                     .d_out = scratch.d_attended,
                     .lse = saved.lse,
                     .dtype = ctx.act,
                     .softmax_factor = 1.0f / std::sqrt(static_cast<float>(shape_.head_dim)),
                     .d_qkv = scratch.d_qkv,
                     .workspace = scratch.workspace,
                     .workspace_bytes = scratch.workspace_bytes});
  Rotate(ctx, scratch.d_qkv, -1);
  for (std::int32_t h = 0; shape_.qk_norm && h < shape_.heads + shape_.kv_heads; ++h) {
    const bool query = h < shape_.heads;
    void* d_head = At(scratch.d_qkv, HeadOffsetBytes(ctx, h));
    ctx.ops().rms_norm_backward(ctx.device(),
                                {.rows = tokens,
                                 .cols = shape_.head_dim,
                                 .h = At(saved.projected, HeadOffsetBytes(ctx, h)),
                                 .ld_h = shape_.width(),
                                 .w = query ? shape_.q_norm : shape_.k_norm,
                                 .rstd = saved.head_rstd + h * tokens,
                                 .dy = d_head,
                                 .ld_dy = shape_.width(),
                                 .d_residual = nullptr,
                                 .dtype = ctx.act,
                                 .dx = d_head,
                                 .ld_dx = shape_.width(),
                                 .dw = query ? shape_.q_norm_grad : shape_.k_norm_grad,
                                 .workspace = scratch.norm_workspace});
  }
  qkv_.Backward(ctx, scratch.linear, scratch.d_qkv, tokens, saved.qkv_input, dx);
}

}  // namespace octavo
