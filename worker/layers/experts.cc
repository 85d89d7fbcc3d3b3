#include "worker/layers/experts.h"

#include <algorithm>

#include "kernels/ops_range.h"
#include "worker/precision/quantizer.h"

namespace octavo {
namespace {

bool WgradIsFp8(const Recipe& recipe) {
  return recipe.is_fp8() && recipe.wgrad == WgradPrecision::kFp8;
}

KeptMatrix TakeKept(Arena& arena, std::int64_t rows, std::int64_t cols, std::int64_t groups,
                    DType act, bool mx) {
  const std::int64_t tile = mx ? kMxBlock : kTile;
  return {arena.TakeBytes(rows * RoundUp(cols, 16) * DTypeBytes(act)),
          arena.Take<float>(std::max(CeilDiv(cols, tile) * RoundUp(rows, 4),
                                     RoundUp(rows, kTile) / tile * RoundUp(cols, 4)) +
                            groups)};
}

}  // namespace

Experts::Experts(const ExpertsShape& shape, WeightCache& cache)
    : shape_(shape),
      fc1_({.site = {shape.layer, Op::kFc1},
            .grouped = true,
            .groups = shape.local_experts,
            .n = 2 * shape.ffn,
            .k = shape.hidden,
            .weight = shape.fc1},
           cache),
      fc2_({.site = {shape.layer, Op::kFc2},
            .grouped = true,
            .groups = shape.local_experts,
            .n = shape.hidden,
            .k = shape.ffn,
            .weight = shape.fc2},
           cache) {}

ExpertsSaved Experts::TakeSaved(const ExpertsShape& s, DType act, bool mx, Arena& arena) {
  const std::int64_t rows = s.padded_capacity;
  ExpertsSaved saved;
  saved.x = TakeKept(arena, rows, s.hidden, s.local_experts, act, mx);
  saved.gate_up = arena.TakeBytes(rows * 2 * s.ffn * DTypeBytes(act));
  saved.act = TakeKept(arena, rows, s.ffn, s.local_experts, act, mx);
  saved.weight = arena.Take<float>(rows);
  return saved;
}

ExpertsScratch Experts::TakeScratch(const ExpertsShape& s, DType act, bool mx, Arena& arena) {
  const std::int64_t rows = s.padded_capacity, bytes = DTypeBytes(act);
  const std::int64_t wide = std::max(s.hidden, 2 * s.ffn), groups = s.local_experts;
  return {.high = arena.TakeBytes(rows * s.hidden * bytes),
          .payload = QBuffer::Take(arena, rows, s.hidden, groups, mx),
          .row = QBuffer::Take(arena, rows, wide, groups, mx),
          .col_a = QBuffer::Take(arena, rows, wide, groups, mx),
          .col_b = QBuffer::Take(arena, rows, std::max(s.hidden, s.ffn), groups, mx),
          .act = arena.TakeBytes(rows * s.ffn * bytes),
          .d_act = arena.TakeBytes(rows * s.ffn * bytes),
          .d_gate_up = arena.TakeBytes(rows * 2 * s.ffn * bytes),
          .rows = arena.TakeBytes(rows * s.hidden * bytes),
          .d_weight = arena.Take<float>(rows)};
}

Experts::Form Experts::InputForm(const Recipe& dispatch, const Recipe& fc1) const {
  if (!fc1.is_fp8()) {
    return Form::kHigh;
  }
  if (SameRowForm(dispatch, fc1, Tensor::kInput)) {
    return Form::kRow;
  }
  if (fc1.wgrad == WgradPrecision::kBf16) {
    return Form::kHigh;
  }
  return IsCastingFree(fc1) ? Form::kRow : Form::kCol;
}

Experts::Form Experts::ActForm(const Recipe& fc2) const {
  if (!WgradIsFp8(fc2)) {
    return Form::kHigh;
  }
  return IsCastingFree(fc2) ? Form::kRow : Form::kCol;
}

Payload Experts::InputTarget(const LayerContext& ctx, const ExpertsScratch& scratch,
                             ExpertsSaved& saved, std::int64_t padded_rows) const {
  const Recipe& dispatch = RecipeOf(ctx, Op::kDispatch);
  const Recipe& fc1 = RecipeOf(ctx, Op::kFc1);
  if (!dispatch.is_fp8()) {
    const bool kept = InputForm(dispatch, fc1) == Form::kHigh;
    return {.high = kept ? saved.x.data : scratch.high};
  }
  const QuantizeRule rule = ActivationRule(dispatch, Tensor::kInput);
  const bool kept = SameRowForm(dispatch, fc1, Tensor::kInput);
  return {.quant =
              (kept ? saved.x.codes() : scratch.payload).Row(rule, padded_rows, shape_.hidden)};
}

Payload Experts::GradTarget(const LayerContext& ctx, const ExpertsScratch& scratch,
                            std::int64_t padded_rows) const {
  const Recipe& dispatch = RecipeOf(ctx, Op::kDispatch);
  if (!dispatch.is_fp8()) {
    return {.high = scratch.high};
  }
  return {.quant = scratch.payload.Row(ActivationRule(dispatch, Tensor::kGrad), padded_rows,
                                       shape_.hidden)};
}

void Experts::Dequantize(const LayerContext& ctx, const QTensor& q, const RowGroups& groups,
                         void* high) const {
  ctx.ops().dequantize(ctx.device(),
                       {.src = q, .groups = groups, .dst = high, .dst_dtype = ctx.act});
}

void Experts::Forward(const LayerContext& ctx, const ExpertsScratch& scratch, const Payload& x,
                      const RowGroups& groups, ExpertsSaved& saved, bool activations_only) const {
  const Recipe& dispatch = RecipeOf(ctx, Op::kDispatch);
  const Recipe& recipe1 = RecipeOf(ctx, Op::kFc1);
  const Recipe& recipe2 = RecipeOf(ctx, Op::kFc2);
  const Form form1 = InputForm(dispatch, recipe1);

  Operand input;
  if (SameRowForm(dispatch, recipe1, Tensor::kInput)) {
    input.row = x.quant;
  } else {
    input.high = x.high;
    if (dispatch.is_fp8()) {
      void* high = form1 == Form::kHigh ? saved.x.data : scratch.high;
      Dequantize(ctx, x.quant, groups, high);
      input.high = high;
    }
    MeasureShadows(ctx, {shape_.layer, Op::kFc1}, Tensor::kInput, input.high, shape_.hidden,
                   groups);
    if (recipe1.is_fp8()) {
      input = Cast(ctx, {.site = {shape_.layer, Op::kFc1},
                         .tensor = Tensor::kInput,
                         .recipe = recipe1,
                         .x = input.high,
                         .cols = shape_.hidden,
                         .groups = groups,
                         .row = form1 == Form::kRow ? saved.x.codes() : scratch.row,
                         .col = form1 == Form::kCol ? saved.x.codes() : QBuffer{}});
    }
  }
  fc1_.Fprop(ctx, input, groups, saved.gate_up);

  const Form form2 = ActForm(recipe2);
  const Operand act =
      SwigluForward(ctx, {.site = {shape_.layer, Op::kFc2},
                          .recipe = recipe2,
                          .groups = groups,
                          .ffn = shape_.ffn,
                          .gate_up = saved.gate_up,
                          .weight = saved.weight,
                          .act = form2 == Form::kHigh ? saved.act.data : scratch.act,
                          .row = form2 == Form::kRow ? saved.act.codes() : scratch.row,
                          .col = form2 == Form::kCol ? saved.act.codes() : QBuffer{}});
  if (!activations_only) {
    fc2_.Fprop(ctx, act, groups, scratch.rows);
  }
}

Operand Experts::FromRows(const LayerContext& ctx, const RowGroups& groups,
                          const ColumnRequest& r) const {
  const OpsRange range(ctx.backend, Name(r.op).data());
  const OpSite site{shape_.layer, r.op};
  Operand operand{.row = r.row};
  if (IsCastingFree(r.recipe) && WgradIsFp8(r.recipe)) {
    operand.col = r.col.Col(ActivationRule(r.recipe, r.tensor), groups.padded_rows, r.cols);
    ctx.ops().transpose_scaled(
        ctx.device(),
        {.src = r.row, .groups = groups, .dst = operand.col, .stats = ctx.Slots(site, r.tensor)});
    return operand;
  }
  Dequantize(ctx, r.row, groups, r.high);
  operand.high = r.high;
  if (WgradIsFp8(r.recipe)) {
    // Requantised: the second rounding is this tensor's SQNR sample (zero noise with power-of-two
    // scales in the normal range). Counted where the first cast was, not again here.
    const QuantizeRule rule = ActivationRule(r.recipe, r.tensor);
    operand.col = r.col.Col(rule, groups.padded_rows, r.cols);
    QuantizeInto(ctx.backend, *ctx.states,
                 {.recipe = r.recipe,
                  .rule = rule,
                  .x = r.high,
                  .x_dtype = ctx.act,
                  .cols = r.cols,
                  .groups = groups,
                  .state_index = ctx.states->Index(site, r.tensor),
                  .row = {},
                  .col = operand.col,
                  .stats = nullptr});
    MeasureEnergy(ctx, site, r.tensor, r.high, r.cols, groups, operand.col, true);
  }
  return operand;
}

void Experts::Backward(const LayerContext& ctx, const ExpertsScratch& scratch, const Payload& dy,
                       const RowGroups& groups, const ExpertsSaved& saved) const {
  const Recipe& dispatch = RecipeOf(ctx, Op::kDispatch);
  const Recipe& recipe1 = RecipeOf(ctx, Op::kFc1);
  const Recipe& recipe2 = RecipeOf(ctx, Op::kFc2);
  const std::int64_t rows = groups.padded_rows;

  // fc2: dY is what arrived, or cast from it.
  Operand gradient{.high = dy.high, .row = dy.quant};
  const bool direct = SameRowForm(dispatch, recipe2, Tensor::kGrad);
  if (dispatch.is_fp8() && !direct) {
    Dequantize(ctx, dy.quant, groups, scratch.high);
    gradient = {.high = scratch.high};
  }
  if (!direct) {
    MeasureShadows(ctx, {shape_.layer, Op::kFc2}, Tensor::kGrad, gradient.high, shape_.hidden,
                   groups);
  }
  if (recipe2.is_fp8() && !direct) {
    const bool col = WgradIsFp8(recipe2) && !IsCastingFree(recipe2);
    gradient = Cast(ctx, {.site = {shape_.layer, Op::kFc2},
                          .tensor = Tensor::kGrad,
                          .recipe = recipe2,
                          .x = gradient.high,
                          .cols = shape_.hidden,
                          .groups = groups,
                          .row = scratch.row,
                          .col = col ? scratch.col_a : QBuffer{}});
  }
  fc2_.Dgrad(ctx, gradient, groups, scratch.d_act);

  const bool missing_form =
      WgradIsFp8(recipe2) ? !gradient.col.present() : gradient.high == nullptr;
  if (recipe2.is_fp8() && missing_form) {
    gradient = FromRows(ctx, groups,
                        {.op = Op::kFc2,
                         .tensor = Tensor::kGrad,
                         .recipe = recipe2,
                         .row = gradient.row,
                         .cols = shape_.hidden,
                         .high = scratch.high,
                         .col = scratch.col_a});
  }
  const QuantizeRule act_rule = ActivationRule(recipe2, Tensor::kInput);
  Operand act{.high = saved.act.data};
  if (ActForm(recipe2) == Form::kRow) {
    act = FromRows(ctx, groups,
                   {.op = Op::kFc2,
                    .tensor = Tensor::kInput,
                    .recipe = recipe2,
                    .row = saved.act.codes().Row(act_rule, rows, shape_.ffn),
                    .cols = shape_.ffn,
                    .high = scratch.act,
                    .col = scratch.col_b});
  } else if (ActForm(recipe2) == Form::kCol) {
    act.col = saved.act.codes().Col(act_rule, rows, shape_.ffn);
  }
  fc2_.Wgrad(ctx, gradient, act, groups);

  // SwiGLU, then fc1.
  const bool col1 = WgradIsFp8(recipe1) && !IsCastingFree(recipe1);
  Operand d_gate_up = SwigluBackward(ctx, {.site = {shape_.layer, Op::kFc1},
                                           .recipe = recipe1,
                                           .groups = groups,
                                           .ffn = shape_.ffn,
                                           .gate_up = saved.gate_up,
                                           .d_act = scratch.d_act,
                                           .weight = saved.weight,
                                           .dweight = scratch.d_weight,
                                           .d_gate_up = scratch.d_gate_up,
                                           .row = scratch.row,
                                           .col = col1 ? scratch.col_a : QBuffer{}});
  fc1_.Dgrad(ctx, d_gate_up, groups, scratch.rows);
  if (WgradIsFp8(recipe1) && !d_gate_up.col.present()) {
    d_gate_up = FromRows(ctx, groups,
                         {.op = Op::kFc1,
                          .tensor = Tensor::kGrad,
                          .recipe = recipe1,
                          .row = d_gate_up.row,
                          .cols = 2 * shape_.ffn,
                          .high = scratch.d_gate_up,
                          .col = scratch.col_a});
  }
  const Form form1 = InputForm(dispatch, recipe1);
  const QuantizeRule x_rule = ActivationRule(recipe1, Tensor::kInput);
  Operand x{.high = saved.x.data};
  if (form1 == Form::kRow) {
    x = FromRows(ctx, groups,
                 {.op = Op::kFc1,
                  .tensor = Tensor::kInput,
                  .recipe = recipe1,
                  .row = saved.x.codes().Row(x_rule, rows, shape_.hidden),
                  .cols = shape_.hidden,
                  .high = scratch.high,
                  .col = scratch.col_b});
  } else if (form1 == Form::kCol) {
    x.col = saved.x.codes().Col(x_rule, rows, shape_.hidden);
  }
  fc1_.Wgrad(ctx, d_gate_up, x, groups);
}

}  // namespace octavo
