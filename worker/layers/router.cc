#include "worker/layers/router.h"

#include <algorithm>

#include "base/status.h"

namespace octavo {

RouterSaved Router::TakeSaved(const RouterShape& s, Arena& arena) {
  const std::int64_t choices = s.tokens * s.config.experts_per_token;
  return {.logits = arena.Take<float>(s.tokens * s.config.experts),
          .topk_index = arena.Take<std::int32_t>(choices),
          .topk_weight = arena.Take<float>(choices),
          .logsumexp = arena.Take<float>(s.tokens),
          .aux_coeff = arena.Take<float>(s.segments() * s.config.experts),
          .dest_row = arena.Take<std::int32_t>(choices)};
}

RouterScratch Router::TakeScratch(const RouterShape& s, std::int32_t layers, DType act,
                                  std::int64_t route_workspace, Arena& arena, Arena& pinned) {
  const std::int64_t n = s.config.experts, segments = s.segments();
  return {.x32 = act == DType::kF32 ? nullptr : arena.Take<float>(s.tokens * s.hidden),
          .segment_counts = arena.Take<std::int64_t>(segments * n),
          .score_sum = arena.Take<float>(segments * n),
          .z_sum = arena.Take<double>(1),
          .counts = arena.Take<std::int64_t>(n),
          .begin = arena.Take<std::int64_t>(n),
          .d_logits = arena.Take<float>(s.tokens * n),
          .route_workspace = arena.TakeBytes(route_workspace),
          .host_segment_counts = pinned.Take<std::int64_t>(segments * n),
          .host_score_sum = pinned.Take<float>(segments * n),
          .host_z_sum = pinned.Take<double>(1),
          .host_aux_coeff = pinned.Take<float>(layers * segments * n)};
}

const float* Router::Widen(const LayerContext& ctx, const RouterScratch& scratch,
                           const void* x) const {
  if (ctx.act == DType::kF32) {
    return static_cast<const float*>(x);
  }
  ctx.ops().cast(ctx.device(), {.src = {.data = const_cast<void*>(x),
                                        .dtype = ctx.act,
                                        .rows = shape_.tokens,
                                        .cols = shape_.hidden},
                                .dst = {.data = scratch.x32,
                                        .dtype = DType::kF32,
                                        .rows = shape_.tokens,
                                        .cols = shape_.hidden}});
  return scratch.x32;
}

void Router::Forward(const LayerContext& ctx, const RouterScratch& scratch, const void* x,
                     RouterSaved& saved) const {
  const std::int64_t n = shape_.config.experts, tokens = shape_.tokens;
  const float* x32 = Widen(ctx, scratch, x);
  ctx.ops().gemm(ctx.device(), {.m = tokens,
                                .n = n,
                                .k = shape_.hidden,
                                .a = {.data = x32},
                                .b = {.data = shape_.weight},
                                .c = saved.logits,
                                .c_dtype = DType::kF32,
                                .ldc = 0,
                                .accumulate = false,
                                .mode = Accumulate::kPromoted});
  ctx.executed->CountFlops(FlopPrecision::kFp32, 2.0 * static_cast<double>(tokens) *
                                                     static_cast<double>(n) *
                                                     static_cast<double>(shape_.hidden));
  ctx.ops().zero(ctx.device(), scratch.z_sum, sizeof(double));
  ctx.ops().router_forward(ctx.device(), {.config = shape_.config,
                                          .tokens = tokens,
                                          .tokens_per_segment = tokens / shape_.segments(),
                                          .logits = saved.logits,
                                          .bias = shape_.bias,
                                          .topk_index = saved.topk_index,
                                          .topk_weight = saved.topk_weight,
                                          .counts = scratch.segment_counts,
                                          .score_sum = scratch.score_sum,
                                          .logsumexp = saved.logsumexp,
                                          .z_sum = scratch.z_sum});
  ctx.ops().route_index(ctx.device(), {.tokens = tokens,
                                       .experts = shape_.config.experts,
                                       .experts_per_token = shape_.config.experts_per_token,
                                       .topk_index = saved.topk_index,
                                       .align = shape_.align,
                                       .counts = scratch.counts,
                                       .begin = scratch.begin,
                                       .dest_row = saved.dest_row,
                                       .workspace = scratch.route_workspace});
  const auto fetch = [&ctx](void* host, const void* device, std::int64_t bytes) {
    ctx.ops().copy(ctx.device(), {.dst = host,
                                  .src = device,
                                  .bytes = bytes,
                                  .kind = CopyKind::kToHost,
                                  .lane = Lane::kCopy});
  };
  ctx.ops().order(ctx.device(), Lane::kCompute, Lane::kCopy);
  const std::int64_t all = shape_.segments() * n;
  fetch(scratch.host_segment_counts, scratch.segment_counts, all * 8);
  fetch(scratch.host_score_sum, scratch.score_sum, all * 4);
  fetch(scratch.host_z_sum, scratch.z_sum, sizeof(double));
}

absl::Status Router::Losses(const LayerContext& ctx, const RouterScratch& scratch, Exchange& world,
                            const std::int64_t* own_counts, std::vector<std::int64_t>* history,
                            RouterSaved& saved, RouterLosses* losses) const {
  const std::int64_t n = shape_.config.experts, segments = shape_.segments();
  losses->aux = 0;
  losses->z = static_cast<double>(shape_.loss_weight) * shape_.z_coefficient * *scratch.host_z_sum /
              static_cast<double>(shape_.tokens);
  if (shape_.aux_scope == AuxScope::kNone || shape_.aux_coefficient == 0) {
    return absl::OkStatus();
  }
  // Counts that give f, and what they are out of.
  const std::int64_t* counts = scratch.host_segment_counts;
  const double tokens = static_cast<double>(shape_.tokens) / static_cast<double>(segments);
  double choices = tokens * shape_.config.experts_per_token;
  std::vector<std::int64_t> global;
  if (shape_.aux_scope == AuxScope::kGlobal) {
    global.assign(own_counts, own_counts + n);
    RETURN_IF_ERROR(world.AllReduceHost(global.data(), n, DType::kI64, ReduceOp::kSum));
    if (history != nullptr) {
      for (std::int64_t e = 0; e < n; ++e) {
        (*history)[static_cast<std::size_t>(e)] += global[static_cast<std::size_t>(e)];
      }
      global = *history;
    }
    counts = global.data();
    choices = 0;
    for (std::int64_t c : global) {
      choices += static_cast<double>(c);
    }
  }
  float* coeff = scratch.host_aux_coeff + shape_.layer * segments * n;
  const double weight = static_cast<double>(shape_.loss_weight) * shape_.aux_coefficient *
                        static_cast<double>(n) / static_cast<double>(segments);
  for (std::int64_t i = 0; i < segments * n; ++i) {
    const double f = static_cast<double>(counts[i]) / choices;
    coeff[i] = static_cast<float>(weight * f / tokens);
    losses->aux += weight * f * static_cast<double>(scratch.host_score_sum[i]) / tokens;
  }
  ctx.ops().copy(ctx.device(), {.dst = saved.aux_coeff,
                                .src = coeff,
                                .bytes = segments * n * 4,
                                .kind = CopyKind::kToDevice});
  return absl::OkStatus();
}

void Router::Backward(const LayerContext& ctx, const RouterScratch& scratch,
                      const RouterSaved& saved, const void* x, const float* d_topk_weight,
                      float* dx32) const {
  const std::int64_t n = shape_.config.experts, tokens = shape_.tokens, hidden = shape_.hidden;
  const bool aux = shape_.aux_scope != AuxScope::kNone && shape_.aux_coefficient != 0;
  ctx.ops().router_backward(ctx.device(), {.config = shape_.config,
                                           .tokens = tokens,
                                           .tokens_per_segment = tokens / shape_.segments(),
                                           .logits = saved.logits,
                                           .topk_index = saved.topk_index,
                                           .dtopk_weight = d_topk_weight,
                                           .aux_coeff = aux ? saved.aux_coeff : nullptr,
                                           .z_coeff = shape_.loss_weight * shape_.z_coefficient /
                                                      static_cast<float>(tokens),
                                           .logsumexp = saved.logsumexp,
                                           .dlogits = scratch.d_logits});
  const float* x32 = Widen(ctx, scratch, x);
  const GemmOperand d_logits_columns{.data = scratch.d_logits, .k_contiguous = false};
  ctx.ops().gemm(ctx.device(), {.m = n,
                                .n = hidden,
                                .k = tokens,
                                .a = d_logits_columns,
                                .b = {.data = x32, .k_contiguous = false},
                                .c = shape_.weight_grad,
                                .c_dtype = DType::kF32,
                                .ldc = 0,
                                .accumulate = true,
                                .mode = Accumulate::kPromoted});
  ctx.ops().gemm(ctx.device(), {.m = tokens,
                                .n = hidden,
                                .k = n,
                                .a = {.data = scratch.d_logits},
                                .b = {.data = shape_.weight, .k_contiguous = false},
                                .c = dx32,
                                .c_dtype = DType::kF32,
                                .ldc = 0,
                                .accumulate = true,
                                .mode = Accumulate::kPromoted});
  ctx.executed->CountFlops(
      FlopPrecision::kFp32,
      4.0 * static_cast<double>(tokens) * static_cast<double>(n) * static_cast<double>(hidden));
}

}  // namespace octavo
