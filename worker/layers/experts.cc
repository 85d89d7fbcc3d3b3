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
                      const RoundPart& part, ExpertsSaved& saved, bool activations_only) const {
  const Recipe& dispatch = RecipeOf(ctx, Op::kDispatch);
  const Recipe& recipe1 = RecipeOf(ctx, Op::kFc1);
  const Recipe& recipe2 = RecipeOf(ctx, Op::kFc2);
  const Form form1 = InputForm(dispatch, recipe1);
  const RowGroups& groups = part.groups;
  // The part's rows of what holds the whole round.
  const auto rows_of = [&](void* base, std::int64_t cols) -> void* {
    return static_cast<std::uint8_t*>(base) + part.first_row * cols * ctx.act_bytes();
  };
  const auto copy_of = [&](const QBuffer& buffer) {
    return buffer.From(part.first_row, part.total_rows, part.first_group);
  };
  QTensor arrived = x.quant;
  if (arrived.present()) {
    arrived.q += part.first_row * arrived.stride();
    arrived.rows = groups.padded_rows;
    arrived.dequant_scale += part.first_row * arrived.scale_row_stride;
  }
  void* const gate_up = rows_of(saved.gate_up, 2 * shape_.ffn);

  Operand input;
  if (SameRowForm(dispatch, recipe1, Tensor::kInput)) {
    input.row = arrived;
  } else {
    input.high = dispatch.is_fp8() ? nullptr : rows_of(x.high, shape_.hidden);
    if (dispatch.is_fp8()) {
      void* high = rows_of(form1 == Form::kHigh ? saved.x.data : scratch.high, shape_.hidden);
      Dequantize(ctx, arrived, groups, high);
      input.high = high;
    }
    MeasureShadows(ctx, {shape_.layer, Op::kFc1}, Tensor::kInput, input.high, shape_.hidden, groups,
                   part.first_group);
    if (recipe1.is_fp8()) {
      input = Cast(ctx, {.site = {shape_.layer, Op::kFc1},
                         .tensor = Tensor::kInput,
                         .recipe = recipe1,
                         .x = input.high,
                         .cols = shape_.hidden,
                         .groups = groups,
                         .row = copy_of(form1 == Form::kRow ? saved.x.codes() : scratch.row),
                         .col = form1 == Form::kCol ? copy_of(saved.x.codes()) : QBuffer{},
                         .first_group = part.first_group});
    }
  }
  fc1_.Fprop(ctx, input, groups, gate_up, part.first_group);

  const Form form2 = ActForm(recipe2);
  const Operand act = SwigluForward(
      ctx, {.site = {shape_.layer, Op::kFc2},
            .recipe = recipe2,
            .groups = groups,
            .ffn = shape_.ffn,
            .gate_up = gate_up,
            .weight = saved.weight + part.first_row,
            .act = rows_of(form2 == Form::kHigh ? saved.act.data : scratch.act, shape_.ffn),
            .row = copy_of(form2 == Form::kRow ? saved.act.codes() : scratch.row),
            .col = form2 == Form::kCol ? copy_of(saved.act.codes()) : QBuffer{},
            .first_group = part.first_group});
  if (!activations_only) {
    fc2_.Fprop(ctx, act, groups, rows_of(scratch.rows, shape_.hidden), part.first_group);
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

Operand Experts::WgradInput(const LayerContext& ctx, const RowGroups& groups, Op op, Form form,
                            const KeptMatrix& kept, std::int64_t cols, void* high,
                            const QBuffer& col) const {
  const Recipe& recipe = RecipeOf(ctx, op);
  const QuantizeRule rule = ActivationRule(recipe, Tensor::kInput);
  switch (form) {
    case Form::kRow:
      return FromRows(ctx, groups,
                      {.op = op,
                       .tensor = Tensor::kInput,
                       .recipe = recipe,
                       .row = kept.codes().Row(rule, groups.padded_rows, cols),
                       .cols = cols,
                       .high = high,
                       .col = col});
    case Form::kCol:
      return {.high = kept.data, .col = kept.codes().Col(rule, groups.padded_rows, cols)};
    case Form::kHigh:
      break;
  }
  return {.high = kept.data};
}

Experts::Gradients Experts::PrepareBackward(const LayerContext& ctx, const ExpertsScratch& scratch,
                                            const RowGroups& groups,
                                            const ExpertsSaved& saved) const {
  return {.groups = groups,
          .act = WgradInput(ctx, groups, Op::kFc2, ActForm(RecipeOf(ctx, Op::kFc2)), saved.act,
                            shape_.ffn, scratch.act, scratch.col_b)};
}

void Experts::BackwardToInput(const LayerContext& ctx, const ExpertsScratch& scratch,
                              const Payload& dy, const ExpertsSaved& saved,
                              Gradients* gradients) const {
  const Recipe& dispatch = RecipeOf(ctx, Op::kDispatch);
  const Recipe& recipe1 = RecipeOf(ctx, Op::kFc1);
  const Recipe& recipe2 = RecipeOf(ctx, Op::kFc2);
  const RowGroups& groups = gradients->groups;

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
  fc2_.Wgrad(ctx, gradient, gradients->act, groups);

  // SwiGLU, then fc1.
  const bool col1 = WgradIsFp8(recipe1) && !IsCastingFree(recipe1);
  gradients->d_gate_up = SwigluBackward(ctx, {.site = {shape_.layer, Op::kFc1},
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
  fc1_.Dgrad(ctx, gradients->d_gate_up, groups, scratch.rows);
}

void Experts::PrepareInputWgrad(const LayerContext& ctx, const ExpertsScratch& scratch,
                                const ExpertsSaved& saved, Gradients* gradients) const {
  const Recipe& recipe = RecipeOf(ctx, Op::kFc1);
  const RowGroups& groups = gradients->groups;
  if (WgradIsFp8(recipe) && !gradients->d_gate_up.col.present()) {
    gradients->d_gate_up = FromRows(ctx, groups,
                                    {.op = Op::kFc1,
                                     .tensor = Tensor::kGrad,
                                     .recipe = recipe,
                                     .row = gradients->d_gate_up.row,
                                     .cols = 2 * shape_.ffn,
                                     .high = scratch.d_gate_up,
                                     .col = scratch.col_a});
  }
  gradients->x = WgradInput(ctx, groups, Op::kFc1, InputForm(RecipeOf(ctx, Op::kDispatch), recipe),
                            saved.x, shape_.hidden, scratch.high, scratch.col_b);
}

}  // namespace octavo
