#include "worker/model/decoder.h"

#include <algorithm>

#include "base/status.h"
#include "base/str.h"

namespace octavo {

void Decoder::ResetStepCounts() {
  std::fill(step_counts_.begin(), step_counts_.end(), 0);
  for (Layer& layer : layers_) {
    std::fill(layer.aux_history.begin(), layer.aux_history.end(), 0);
  }
}

void Decoder::Norm(const LayerContext& ctx, const NormArgs& a) const {
  ctx.ops().rms_norm_forward(ctx.device(), {.rows = tokens_,
                                            .cols = model_.hidden,
                                            .x = a.x,
                                            .ld_x = model_.hidden,
                                            .residual = a.residual,
                                            .residual_out = a.residual_out,
                                            .w = a.w,
                                            .eps = model_.norm_eps,
                                            .dtype = ctx.act,
                                            .y = a.y,
                                            .ld_y = model_.hidden,
                                            .rstd = a.rstd});
}

void Decoder::NormBackward(const LayerContext& ctx, const NormBackwardArgs& a) const {
  ctx.ops().rms_norm_backward(ctx.device(), {.rows = tokens_,
                                             .cols = model_.hidden,
                                             .h = a.h,
                                             .ld_h = model_.hidden,
                                             .w = a.w,
                                             .rstd = a.rstd,
                                             .dy = a.dy,
                                             .ld_dy = model_.hidden,
                                             .d_residual = a.d_residual,
                                             .dtype = ctx.act,
                                             .dx = a.dx,
                                             .ld_dx = model_.hidden,
                                             .dw = a.dw,
                                             .workspace = norm_workspace_});
}

absl::Status Decoder::ForwardLayer(LayerContext& ctx, Layer& layer, std::int32_t index,
                                   DecoderPass* pass) {
  Saved& saved = *layer.saved;
  layer.attention->Forward(ctx, attention_scratch_, saved.normed1, saved.attention, branch_);
  Norm(ctx, {.x = branch_,
             .residual = layer.x_in,
             .residual_out = saved.x_mid,
             .w = layer.norm2,
             .y = saved.normed2,
             .rstd = saved.rstd2});
  if (layer.moe == nullptr) {
    layer.mlp->Forward(ctx, mlp_scratch_, saved.normed2, saved.mlp, branch_);
    return absl::OkStatus();
  }
  MoeReport report;
  if (pass->training) {
    report.step_counts = step_counts_.data() + static_cast<std::int64_t>(index) * model_.experts;
    report.history = &layer.aux_history;
  }
  RETURN_IF_ERROR(layer.moe->Forward(ctx, moe_scratch_, *dispatch_, *world_, saved.normed2,
                                     layer.routing, saved.moe, branch_, &report));
  pass->aux_loss += report.losses.aux;
  pass->z_loss += report.losses.z;
  multi_round_layers_ += pass->training && layer.routing.rounds > 1 ? 1 : 0;
  return absl::OkStatus();
}

absl::Status Decoder::Forward(LayerContext& ctx, DecoderPass* pass) {
  ctx.ops().embedding_forward(ctx.device(), {.tokens = pass->tokens,
                                             .count = tokens_,
                                             .hidden = model_.hidden,
                                             .vocab = model_.vocab,
                                             .table = embedding_,
                                             .out = layers_[0].x_in,
                                             .dtype = ctx.act});
  const void* stream = nullptr;  // stream before the branch that has not been added yet
  for (std::size_t l = 0; l < layers_.size(); ++l) {
    Layer& layer = layers_[l];
    ctx.ops().range_push(ctx.device(), layer.name.c_str());
    Norm(ctx, {.x = stream == nullptr ? layer.x_in : branch_,
               .residual = stream,
               .residual_out = stream == nullptr ? nullptr : layer.x_in,
               .w = layer.norm1,
               .y = layer.saved->normed1,
               .rstd = layer.saved->rstd1});
    const absl::Status status = ForwardLayer(ctx, layer, static_cast<std::int32_t>(l), pass);
    ctx.ops().range_pop(ctx.device());
    RETURN_IF_ERROR(Annotate(status, StrCat("forward of layer ", l)));
    stream = layer.saved->x_mid;
  }
  Norm(ctx, {.x = branch_,
             .residual = stream,
             .residual_out = x_final_,
             .w = final_norm_,
             .y = h_,
             .rstd = rstd_final_});
  if (pass->targets != nullptr) {
    head_->Run(ctx, head_scratch_, h_, pass->targets, pass->dloss, pass->loss_sum, d_normed_);
  }
  return absl::OkStatus();
}

absl::Status Decoder::RecomputeLayer(const LayerContext& ctx, Layer& layer) {
  LayerContext again = ctx;
  again.record = again.energies = false;  // forward counted it
  Saved& saved = *layer.saved;
  Norm(again, {.x = layer.x_in,
               .residual = nullptr,
               .residual_out = nullptr,
               .w = layer.norm1,
               .y = saved.normed1,
               .rstd = saved.rstd1});
  layer.attention->Forward(again, attention_scratch_, saved.normed1, saved.attention, branch_);
  Norm(again, {.x = branch_,
               .residual = layer.x_in,
               .residual_out = saved.x_mid,
               .w = layer.norm2,
               .y = saved.normed2,
               .rstd = saved.rstd2});
  if (layer.moe == nullptr) {
    layer.mlp->Forward(again, mlp_scratch_, saved.normed2, saved.mlp, branch_);
    return absl::OkStatus();
  }
  return layer.moe->Recompute(again, moe_scratch_, *dispatch_, saved.normed2, layer.routing,
                              saved.moe);
}

absl::Status Decoder::BackwardLayer(LayerContext& ctx, std::int32_t index,
                                    const DecoderPass& pass) {
  Layer& layer = layers_[static_cast<std::size_t>(index)];
  const auto reduce = [&]() -> absl::Status {
    return pass.final_from ? pass.final_from(index + 1) : absl::OkStatus();
  };
  if (layer.recompute || layer.moe == nullptr) {
    late_.Run();
  }
  if (layer.recompute) {
    RETURN_IF_ERROR(RecomputeLayer(ctx, layer));
  }
  Saved& saved = *layer.saved;
  if (layer.moe != nullptr) {
    // The layers above are reduced while this one computes, behind its first message.
    RETURN_IF_ERROR(layer.moe->Backward(ctx, moe_scratch_, *dispatch_, saved.normed2, d_stream_,
                                        layer.routing, saved.moe, d_normed_, &late_, reduce));
  } else {
    RETURN_IF_ERROR(reduce());
    layer.mlp->Backward(ctx, mlp_scratch_, saved.mlp, d_stream_, d_normed_);
  }
  NormBackward(ctx, {.h = saved.x_mid,
                     .w = layer.norm2,
                     .rstd = saved.rstd2,
                     .dy = d_normed_,
                     .d_residual = d_stream_,
                     .dx = d_stream_,
                     .dw = layer.norm2_grad});
  layer.attention->Backward(ctx, attention_scratch_, saved.attention, d_stream_, d_normed_);
  NormBackward(ctx, {.h = layer.x_in,
                     .w = layer.norm1,
                     .rstd = saved.rstd1,
                     .dy = d_normed_,
                     .d_residual = d_stream_,
                     .dx = d_stream_,
                     .dw = layer.norm1_grad});
  return absl::OkStatus();
}

absl::Status Decoder::Backward(LayerContext& ctx, const DecoderPass& pass) {
  // The head left the gradient of its input in d_normed_.
  NormBackward(ctx, {.h = x_final_,
                     .w = final_norm_,
                     .rstd = rstd_final_,
                     .dy = d_normed_,
                     .d_residual = nullptr,
                     .dx = d_stream_,
                     .dw = final_norm_grad_});
  late_.Drop();  // of a pass that failed
  for (std::int32_t l = model_.layers; l-- > 0;) {
    ctx.ops().range_push(ctx.device(), layers_[static_cast<std::size_t>(l)].name.c_str());
    const absl::Status status = BackwardLayer(ctx, l, pass);
    ctx.ops().range_pop(ctx.device());
    RETURN_IF_ERROR(Annotate(status, StrCat("backward of layer ", l)));
  }
  late_.Run();
  ctx.ops().embedding_backward(ctx.device(), {.tokens = pass.tokens,
                                              .count = tokens_,
                                              .hidden = model_.hidden,
                                              .vocab = model_.vocab,
                                              .d_out = d_stream_,
                                              .dtype = ctx.act,
                                              .d_table = embedding_grad_,
                                              .workspace = embedding_workspace_});
  return absl::OkStatus();
}

}  // namespace octavo
