#include "worker/layers/moe.h"

#include "base/status.h"
#include "base/str.h"
#include "kernels/ops_range.h"
#include "worker/precision/quantizer.h"

namespace octavo {

Moe::Moe(const MoeShape& shape, WeightCache& cache)
    : shape_(shape),
      layer_name_(StrCat("layer ", shape.router.layer)),
      router_(shape.router),
      experts_(shape.experts, cache) {
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

absl::Status Moe::RunExperts(const LayerContext& ctx, const MoeScratch& scratch,
                             MoeDispatch& dispatch, const MoeRouting& routing, MoeSaved& saved,
                             std::int32_t round, std::int32_t parts, bool activations_only) const {
  dispatch.SetRound(ctx, routing.counts, round, parts);
  const Payload x =
      experts_.InputTarget(ctx, scratch.experts, saved.experts, dispatch.groups().padded_rows);
  // On the communication lane: send 0, send 1, return 0, send 2, return 1, …; products of part p
  // run beside return p − 1 and send p + 1. Each Join is placed so that it waits for no message
  // that was started for later.
  RETURN_IF_ERROR(dispatch.StartSend(0));
  dispatch.Join();
  for (std::int32_t part = 0; part < parts; ++part) {
    if (part + 1 < parts) {
      RETURN_IF_ERROR(dispatch.StartSend(part + 1));
    }
    dispatch.FinishSend(ctx, part, x, saved.experts.weight);
    experts_.Forward(ctx, scratch.experts, x, dispatch.Part(part), saved.experts, activations_only);
    if (activations_only) {
      dispatch.Join();
      continue;
    }
    dispatch.PackReturn(ctx, part, scratch.experts.rows, nullptr);
    dispatch.Join();
    RETURN_IF_ERROR(dispatch.StartReturn(part));
  }
  return absl::OkStatus();
}

absl::Status Moe::Forward(const LayerContext& ctx, const MoeScratch& scratch, MoeDispatch& dispatch,
                          Exchange& world, const void* x, MoeRouting& routing, MoeSaved& saved,
                          void* y, MoeReport* report) const {
  router_.Forward(ctx, scratch.router, x, routing.router);
  RETURN_IF_ERROR(dispatch.StartCounts(scratch.router.counts));
  const Payload source = CastPayload(ctx, dispatch, Tensor::kInput, x, scratch.wire_x);
  dispatch.Pack(ctx, {.source = source,
                      .dest_row = routing.router.dest_row,
                      .weight = routing.router.topk_weight});
  if (shared_ != nullptr) {
    shared_->Forward(ctx, scratch.shared, x, saved.shared, scratch.shared_rows);
  }
  // The one wait of a layer: the host needs the counts to size messages and groups.
  RETURN_IF_ERROR(dispatch.FinishCounts(&routing.counts));
  const auto experts = static_cast<std::size_t>(shape_.router.config.experts);
  const std::int64_t* own =
      routing.counts.data() + static_cast<std::size_t>(dispatch.rank()) * experts;
  RETURN_IF_ERROR(router_.Losses(ctx, scratch.router, world, own, report->history, routing.router,
                                 &report->losses));
  routing.rounds = dispatch.Rounds(routing.counts);
  for (std::size_t i = 0; report->step_counts != nullptr && i < routing.counts.size(); ++i) {
    report->step_counts[i % experts] += routing.counts[i];
  }

  for (std::int32_t round = 0; round < routing.rounds; ++round) {
    RETURN_IF_ERROR(RunExperts(ctx, scratch, dispatch, routing, saved, round, shape_.parts,
                               /*activations_only=*/false));
    dispatch.Join();
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
  dispatch.Pack(ctx, {.source = source,
                      .dest_row = routing.router.dest_row,
                      .weight = routing.router.topk_weight});
  return RunExperts(ctx, scratch, dispatch, routing, saved, 0, shape_.parts,
                    /*activations_only=*/true);
}

absl::Status Moe::Backward(const LayerContext& ctx, const MoeScratch& scratch,
                           MoeDispatch& dispatch, const void* x, const void* dy,
                           MoeRouting& routing, MoeSaved& saved, void* dx, LateWgrad* late,
                           const std::function<absl::Status()>& beside) const {
  LayerContext again = ctx;  // what forward counted already
  again.record = again.energies = false;
  const bool rounds = routing.rounds > 1;
  const Payload dy_source = CastPayload(ctx, dispatch, Tensor::kGrad, dy, scratch.wire_dy);
  Payload x_source;
  if (rounds) {
    x_source = CastPayload(again, dispatch, Tensor::kInput, x, scratch.wire_x);
    late->Run();  // its operands go when x arrives again
  }
  for (std::int32_t round = 0; round < routing.rounds; ++round) {
    if (rounds) {
      dispatch.Pack(ctx, {.source = x_source,
                          .dest_row = routing.router.dest_row,
                          .weight = routing.router.topk_weight});
      RETURN_IF_ERROR(RunExperts(again, scratch, dispatch, routing, saved, round, 1,
                                 /*activations_only=*/true));
    } else {
      dispatch.SetRound(ctx, routing.counts, 0, 1);
    }
    dispatch.Pack(ctx,
                  {.source = dy_source, .dest_row = routing.router.dest_row, .weight = nullptr});
    RETURN_IF_ERROR(dispatch.StartSend(0));
    // dY travels.
    late->Run();
    Experts::Gradients gradients =
        experts_.PrepareBackward(ctx, scratch.experts, dispatch.groups(), saved.experts);
    if (shared_ != nullptr && round == 0) {
      shared_->Backward(ctx, scratch.shared, saved.shared, dy, scratch.shared_rows);
    }
    dispatch.Join();
    if (round == 0) {
      RETURN_IF_ERROR(beside());
    }
    const Payload arrived =
        experts_.GradTarget(ctx, scratch.experts, dispatch.groups().padded_rows);
    dispatch.FinishSend(ctx, 0, arrived, nullptr);
    experts_.BackwardToInput(ctx, scratch.experts, arrived, saved.experts, &gradients);
    dispatch.PackReturn(ctx, 0, scratch.experts.rows, scratch.experts.d_weight);
    RETURN_IF_ERROR(dispatch.StartReturn(0));
    // dX travels.
    experts_.PrepareInputWgrad(ctx, scratch.experts, saved.experts, &gradients);
    const std::int32_t count = gradients.groups.count;
    const bool leave = dispatch.ranks() > 1 && !rounds;
    const std::int32_t now = leave ? count - count / 2 : count;
    experts_.InputWgrad(ctx, gradients, 0, now);
    if (leave) {
      late->Leave([this, &ctx, gradients, now, count] {
        const OpsRange range(ctx.backend, layer_name_.c_str());
        experts_.InputWgrad(ctx, gradients, now, count);
      });
    }
    dispatch.Join();
  }
  // Routed, router and shared gradients add up in FP32 and are rounded once.
  dispatch.Combine(ctx, {.dest_row = routing.router.dest_row,
                         .y = scratch.sum,
                         .y_dtype = DType::kF32,
                         .weight_out = scratch.d_topk_weight});
  router_.Backward(ctx, scratch.router, routing.router, x, scratch.d_topk_weight, scratch.sum);
  const std::int64_t n = shape_.router.tokens * shape_.router.hidden;
  if (shared_ != nullptr) {
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
