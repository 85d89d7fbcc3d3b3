#include "worker/layers/moe.h"

#include "base/status.h"
#include "worker/precision/quantizer.h"

namespace octavo {

Moe::Moe(const MoeShape& shape, WeightCache& cache)
    : shape_(shape), router_(shape.router), experts_(shape.experts, cache) {
  if (shape.shared) {
    shared_ = std::make_unique<DenseMlp>(shape.shared_mlp, cache);
  }
}

Payload Moe::CastPayload(const LayerContext& ctx, const MoeDispatch& dispatch, Tensor tensor,
                         const void* rows, const QBuffer& wire) const {
  const ResolvedRecipe recipe = ctx.Resolve(Site(Op::kDispatch));
  ctx.executed->Count({.site = Site(Op::kDispatch),
                       .planned = *recipe.planned,
                       .executed = *recipe.executed,
                       .reason = recipe.reason,
                       .precision = FlopsOf(*recipe.executed, GemmPass::kFprop),
                       .flops = 0});
  const RowGroups& groups = ctx.dense_groups->Get(shape_.router.tokens);
  MeasureShadows(ctx, Site(Op::kDispatch), tensor, rows, shape_.router.hidden, groups);
  if (!recipe.executed->is_fp8()) {
    return {.high = const_cast<void*>(rows)};
  }
  const QuantizeRule rule = ActivationRule(*recipe.executed, tensor);
  const Payload payload{.quant = dispatch.WireTensor(wire, rule)};
  QuantizeInto(ctx.backend, *ctx.states,
               {.recipe = *recipe.executed,
                .rule = rule,
                .x = rows,
                .x_dtype = ctx.act,
                .cols = shape_.router.hidden,
                .groups = groups,
                .state_index = ctx.states->Index(Site(Op::kDispatch), tensor),
                .row = payload.quant,
                .col = {},
                .stats = ctx.Slots(Site(Op::kDispatch), tensor)});
  MeasureEnergy(ctx, Site(Op::kDispatch), tensor, rows, shape_.router.hidden, groups, payload.quant,
                false);
  return payload;
}

absl::Status Moe::DispatchInput(const LayerContext& ctx, const MoeScratch& scratch,
                                MoeDispatch& dispatch, const Payload& source, MoeRouting& routing,
                                MoeSaved& saved, std::int32_t round, bool activations_only) const {
  dispatch.SetRound(ctx, routing.counts, round, routing.rounds);
  const Payload x =
      experts_.InputTarget(ctx, scratch.experts, saved.experts, dispatch.groups().padded_rows);
  RETURN_IF_ERROR(dispatch.Send(ctx, {.source = source,
                                      .dest_row = routing.router.dest_row,
                                      .weight = routing.router.topk_weight,
                                      .target = x,
                                      .target_weight = saved.experts.weight}));
  experts_.Forward(ctx, scratch.experts, x, dispatch.groups(), saved.experts, activations_only);
  return absl::OkStatus();
}

absl::Status Moe::Forward(const LayerContext& ctx, const MoeScratch& scratch, MoeDispatch& dispatch,
                          Exchange& world, const void* x, MoeRouting& routing, MoeSaved& saved,
                          void* y, MoeReport* report) const {
  router_.Forward(ctx, scratch.router, x, routing.router);
  const Payload source = CastPayload(ctx, dispatch, Tensor::kInput, x, scratch.wire_x);
  if (shared_ != nullptr) {
    shared_->Forward(ctx, scratch.shared, x, saved.shared, scratch.shared_rows);
  }
  // The one wait of a layer: the host needs the counts to size messages and groups.
  ctx.ops().synchronize(ctx.device());
  RETURN_IF_ERROR(
      router_.Losses(ctx, scratch.router, world, report->history, routing.router, &report->losses));
  RETURN_IF_ERROR(dispatch.GatherCounts(scratch.router.host_counts, &routing.counts));
  routing.rounds = dispatch.Rounds(routing.counts);
  for (std::int32_t e = 0; report->step_counts != nullptr && e < shape_.router.config.experts;
       ++e) {
    report->step_counts[e] += scratch.router.host_counts[e];
  }

  for (std::int32_t round = 0; round < routing.rounds; ++round) {
    RETURN_IF_ERROR(DispatchInput(ctx, scratch, dispatch, source, routing, saved, round, false));
    RETURN_IF_ERROR(dispatch.Return(ctx, scratch.experts.rows, nullptr));
  }
  if (shared_ == nullptr) {
    dispatch.Combine(ctx, {.dest_row = routing.router.dest_row, .y = y, .y_dtype = ctx.act});
    return absl::OkStatus();
  }
  // Routed and shared parts add up in FP32 and are rounded once.
  dispatch.Combine(ctx,
                   {.dest_row = routing.router.dest_row, .y = scratch.sum, .y_dtype = DType::kF32});
  const std::int64_t n = shape_.router.tokens * shape_.router.hidden;
  ctx.ops().axpby(ctx.device(), {.x = scratch.sum,
                                 .x_dtype = DType::kF32,
                                 .a = 1.0f,
                                 .y = scratch.shared_rows,
                                 .y_dtype = ctx.act,
                                 .b = 1.0f,
                                 .n = n});
  ctx.ops().copy(ctx.device(), {.dst = y,
                                .src = scratch.shared_rows,
                                .bytes = n * ctx.act_bytes(),
                                .kind = CopyKind::kOnDevice});
  return absl::OkStatus();
}

absl::Status Moe::Recompute(const LayerContext& ctx, const MoeScratch& scratch,
                            MoeDispatch& dispatch, const void* x, MoeRouting& routing,
                            MoeSaved& saved) const {
  if (shared_ != nullptr) {
    shared_->Forward(ctx, scratch.shared, x, saved.shared, scratch.shared_rows);
  }
  if (routing.rounds > 1) {
    return absl::OkStatus();  // backward does it round by round
  }
  const Payload source = CastPayload(ctx, dispatch, Tensor::kInput, x, scratch.wire_x);
  return DispatchInput(ctx, scratch, dispatch, source, routing, saved, 0, true);
}

absl::Status Moe::Backward(const LayerContext& ctx, const MoeScratch& scratch,
                           MoeDispatch& dispatch, const void* x, const void* dy,
                           MoeRouting& routing, MoeSaved& saved, void* dx) const {
  LayerContext again = ctx;  // what forward counted already
  again.record = again.energies = false;
  const bool rounds = routing.rounds > 1;
  const Payload dy_source = CastPayload(ctx, dispatch, Tensor::kGrad, dy, scratch.wire_dy);
  Payload x_source;
  if (rounds) {
    x_source = CastPayload(again, dispatch, Tensor::kInput, x, scratch.wire_x);
  }
  for (std::int32_t round = 0; round < routing.rounds; ++round) {
    if (rounds) {
      RETURN_IF_ERROR(
          DispatchInput(again, scratch, dispatch, x_source, routing, saved, round, true));
    } else {
      dispatch.SetRound(ctx, routing.counts, 0, 1);
    }
    const Payload gradient =
        experts_.GradTarget(ctx, scratch.experts, dispatch.groups().padded_rows);
    RETURN_IF_ERROR(dispatch.Send(ctx, {.source = dy_source,
                                        .dest_row = routing.router.dest_row,
                                        .weight = nullptr,
                                        .target = gradient,
                                        .target_weight = nullptr}));
    experts_.Backward(ctx, scratch.experts, gradient, dispatch.groups(), saved.experts);
    RETURN_IF_ERROR(dispatch.Return(ctx, scratch.experts.rows, scratch.experts.d_weight));
  }
  // Routed, router and shared gradients add up in FP32 and are rounded once.
  dispatch.Combine(ctx, {.dest_row = routing.router.dest_row,
                         .y = scratch.sum,
                         .y_dtype = DType::kF32,
                         .weight_out = scratch.d_topk_weight});
  router_.Backward(ctx, scratch.router, routing.router, x, scratch.d_topk_weight, scratch.sum);
  const std::int64_t n = shape_.router.tokens * shape_.router.hidden;
  if (shared_ != nullptr) {
    shared_->Backward(ctx, scratch.shared, saved.shared, dy, scratch.shared_rows);
    ctx.ops().axpby(ctx.device(), {.x = scratch.shared_rows,
                                   .x_dtype = ctx.act,
                                   .a = 1.0f,
                                   .y = scratch.sum,
                                   .y_dtype = DType::kF32,
                                   .b = 1.0f,
                                   .n = n});
  }
  ctx.ops().cast(ctx.device(),
                 {.src = {.data = scratch.sum, .dtype = DType::kF32, .rows = 1, .cols = n},
                  .dst = {.data = dx, .dtype = ctx.act, .rows = 1, .cols = n}});
  return absl::OkStatus();
}

}  // namespace octavo
