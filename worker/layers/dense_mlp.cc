#include "worker/layers/dense_mlp.h"

namespace octavo {
namespace {

// Tile-wise recipes whose wgrad is FP8 too never need SwiGLU's result in high precision.
bool CastsDirectly(const Recipe& recipe) {
  return recipe.is_fp8() && !recipe.is_per_tensor() && recipe.wgrad == WgradPrecision::kFp8;
}

}  // namespace

Operand SwigluForward(const LayerContext& ctx, const SwigluCast& r) {
  SwigluForwardArgs args{
      .groups = r.groups, .f = r.ffn, .gate_up = r.gate_up, .dtype = ctx.act, .weight = r.weight};
  if (!CastsDirectly(r.recipe)) {
    args.act = r.act;
    ctx.ops().swiglu_forward(ctx.device(), args);
    MeasureShadows(ctx, r.site, Tensor::kInput, r.act, r.ffn, r.groups, r.first_group);
    return r.recipe.is_fp8() ? Cast(ctx, {.site = r.site,
                                          .tensor = Tensor::kInput,
                                          .recipe = r.recipe,
                                          .x = r.act,
                                          .cols = r.ffn,
                                          .groups = r.groups,
                                          .row = r.row,
                                          .col = r.col,
                                          .first_group = r.first_group})
                             : Operand{.high = r.act};
  }
  Operand operand;
  args.rule = ActivationRule(r.recipe, Tensor::kInput);
  operand.row = r.row.Row(args.rule, r.groups.padded_rows, r.ffn);
  if (r.col.codes != nullptr) {
    operand.col = r.col.Col(args.rule, r.groups.padded_rows, r.ffn);
  }
  args.quant = operand.row;
  args.quant_col = operand.col;
  args.stats = ctx.Slots(r.site, Tensor::kInput, r.first_group);
  ctx.ops().swiglu_forward(ctx.device(), args);
  if (ctx.record && ctx.energies) {
    // The cast read FP32 values that exist nowhere; the act-dtype result stands in for them. Its
    // own rounding (2^-9) is far below the FP8 noise.
    args.quant = args.quant_col = QTensor{};
    args.stats = nullptr;
    args.act = r.act;
    ctx.ops().swiglu_forward(ctx.device(), args);
    MeasureEnergy(ctx, r.site, Tensor::kInput, r.act, r.ffn, r.groups, operand.row, false);
    MeasureShadows(ctx, r.site, Tensor::kInput, r.act, r.ffn, r.groups, r.first_group);
  }
  return operand;
}

Operand SwigluBackward(const LayerContext& ctx, const SwigluBackwardCast& r) {
  SwigluBackwardArgs args{.groups = r.groups,
                          .f = r.ffn,
                          .gate_up = r.gate_up,
                          .d_act = r.d_act,
                          .dtype = ctx.act,
                          .weight = r.weight,
                          .dweight = r.dweight};
  if (!CastsDirectly(r.recipe)) {
    args.d_gate_up = r.d_gate_up;
    ctx.ops().swiglu_backward(ctx.device(), args);
    MeasureShadows(ctx, r.site, Tensor::kGrad, r.d_gate_up, 2 * r.ffn, r.groups);
    return r.recipe.is_fp8() ? Cast(ctx, {.site = r.site,
                                          .tensor = Tensor::kGrad,
                                          .recipe = r.recipe,
                                          .x = r.d_gate_up,
                                          .cols = 2 * r.ffn,
                                          .groups = r.groups,
                                          .row = r.row,
                                          .col = r.col})
                             : Operand{.high = r.d_gate_up};
  }
  Operand operand;
  args.rule = ActivationRule(r.recipe, Tensor::kGrad);
  operand.row = r.row.Row(args.rule, r.groups.padded_rows, 2 * r.ffn);
  if (r.col.codes != nullptr) {
    operand.col = r.col.Col(args.rule, r.groups.padded_rows, 2 * r.ffn);
  }
  args.quant = operand.row;
  args.quant_col = operand.col;
  args.stats = ctx.Slots(r.site, Tensor::kGrad);
  ctx.ops().swiglu_backward(ctx.device(), args);
  if (ctx.record && ctx.energies) {
    args.quant = args.quant_col = QTensor{};
    args.stats = nullptr;
    args.dweight = nullptr;
    args.d_gate_up = r.d_gate_up;
    ctx.ops().swiglu_backward(ctx.device(), args);
    MeasureEnergy(ctx, r.site, Tensor::kGrad, r.d_gate_up, 2 * r.ffn, r.groups, operand.row, false);
    MeasureShadows(ctx, r.site, Tensor::kGrad, r.d_gate_up, 2 * r.ffn, r.groups);
  }
  return operand;
}

DenseMlp::DenseMlp(const DenseMlpShape& shape, WeightCache& cache)
    : shape_(shape),
      fc1_({.site = {shape.layer, Op::kMlpFc1},
            .n = 2 * shape.ffn,
            .k = shape.hidden,
            .weight = shape.fc1},
           cache),
      fc2_({.site = {shape.layer, Op::kMlpFc2},
            .n = shape.hidden,
            .k = shape.ffn,
            .weight = shape.fc2},
           cache) {}

DenseMlpSaved DenseMlp::TakeSaved(const DenseMlpShape& shape, DType act, bool mx, Arena& arena) {
  DenseMlpSaved saved;
  saved.input.col = QBuffer::Take(arena, shape.tokens, shape.hidden, 1, mx);
  saved.gate_up = arena.TakeBytes(shape.tokens * 2 * shape.ffn * DTypeBytes(act));
  saved.act = arena.TakeBytes(shape.tokens * shape.ffn * DTypeBytes(act));
  saved.act_col = QBuffer::Take(arena, shape.tokens, shape.ffn, 1, mx);
  return saved;
}

void DenseMlp::Forward(const LayerContext& ctx, const DenseMlpScratch& scratch, const void* x,
                       DenseMlpSaved& saved, void* y) const {
  const RowGroups& groups = ctx.dense_groups->Get(shape_.tokens);
  fc1_.Forward(ctx, scratch.linear, x, shape_.tokens, &saved.input, saved.gate_up);
  const Recipe& recipe = *ctx.Resolve(fc2_.shape().site).executed;
  const bool fp8_wgrad = recipe.is_fp8() && recipe.wgrad == WgradPrecision::kFp8;
  const Operand act = SwigluForward(ctx, {.site = fc2_.shape().site,
                                          .recipe = recipe,
                                          .groups = groups,
                                          .ffn = shape_.ffn,
                                          .gate_up = saved.gate_up,
                                          .weight = nullptr,
                                          .act = saved.act,
                                          .row = scratch.linear.row,
                                          .col = fp8_wgrad ? saved.act_col : QBuffer{}});
  fc2_.Fprop(ctx, act, groups, y);
}

void DenseMlp::Backward(const LayerContext& ctx, const DenseMlpScratch& scratch,
                        const DenseMlpSaved& saved, const void* dy, void* dx) const {
  const RowGroups& groups = ctx.dense_groups->Get(shape_.tokens);
  const auto fp8_wgrad = [](const Recipe& r) {
    return r.is_fp8() && r.wgrad == WgradPrecision::kFp8;
  };
  const Recipe& recipe2 = *ctx.Resolve(fc2_.shape().site).executed;
  MeasureShadows(ctx, fc2_.shape().site, Tensor::kGrad, dy, shape_.hidden, groups);
  Operand gradient{.high = dy};
  if (recipe2.is_fp8()) {
    gradient = Cast(ctx, {.site = fc2_.shape().site,
                          .tensor = Tensor::kGrad,
                          .recipe = recipe2,
                          .x = dy,
                          .cols = shape_.hidden,
                          .groups = groups,
                          .row = scratch.linear.row,
                          .col = fp8_wgrad(recipe2) ? scratch.linear.col : QBuffer{}});
  }
  fc2_.Dgrad(ctx, gradient, groups, scratch.d_act);
  Operand act{.high = saved.act};
  if (fp8_wgrad(recipe2)) {
    act.col = saved.act_col.Col(ActivationRule(recipe2, Tensor::kInput), shape_.tokens, shape_.ffn);
  }
  fc2_.Wgrad(ctx, gradient, act, groups);

  const OpSite site1 = fc1_.product().shape().site;
  const Recipe& recipe1 = *ctx.Resolve(site1).executed;
  const Operand d_gate_up =
      SwigluBackward(ctx, {.site = site1,
                           .recipe = recipe1,
                           .groups = groups,
                           .ffn = shape_.ffn,
                           .gate_up = saved.gate_up,
                           .d_act = scratch.d_act,
                           .weight = nullptr,
                           .dweight = nullptr,
                           .d_gate_up = scratch.d_gate_up,
                           .row = scratch.linear.row,
                           .col = fp8_wgrad(recipe1) ? scratch.linear.col : QBuffer{}});
  fc1_.product().Dgrad(ctx, d_gate_up, groups, dx);
  fc1_.product().Wgrad(ctx, d_gate_up,
                       SavedInput(ctx, site1, saved.input, shape_.tokens, shape_.hidden), groups);
}

}  // namespace octavo
