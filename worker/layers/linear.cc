#include "worker/layers/linear.h"

#include <numeric>

#include "kernels/ops_range.h"
#include "worker/precision/quantizer.h"

namespace octavo {
namespace {

bool WgradIsFp8(const Recipe& recipe) {
  return recipe.is_fp8() && recipe.wgrad == WgradPrecision::kFp8;
}

// Names are of literals, so data() ends with a zero.
class SiteRange final : public OpsRange {
 public:
  SiteRange(const LayerContext& ctx, const OpSite& site)
      : OpsRange(ctx.backend, Name(site.op).data()) {}
};

GemmOperand High(const LayerContext& ctx, const void* data, bool k_contiguous) {
  return {.data = data, .dtype = ctx.act, .k_contiguous = k_contiguous};
}

// The weights of `count` groups from `first` on; w is [groups, rows, cols].
GemmOperand SomeGroups(GemmOperand w, std::int64_t first, std::int64_t count, std::int64_t rows,
                       std::int64_t cols) {
  if (!w.quant.present()) {
    w.data = static_cast<const std::uint8_t*>(w.data) + first * rows * cols * DTypeBytes(w.dtype);
    return w;
  }
  QTensor& q = w.quant;
  const std::int64_t scale_rows = q.tiling == Tiling::kBlock128 ? rows / kTile : rows;
  q.q += first * rows * q.stride();
  q.rows = count * rows;
  q.dequant_scale += first * (q.tiling == Tiling::kTensor ? 1 : scale_rows * q.scale_row_stride);
  return w;
}

}  // namespace

Product::Product(const ProductShape& shape, WeightCache& cache)
    : shape_(shape),
      cache_handle_(cache.Add({.site = shape.site,
                               .groups = shape.groups,
                               .n = shape.n,
                               .k = shape.k,
                               .master = shape.weight.master})) {}

void Product::Count(const LayerContext& ctx, GemmPass pass, const RowGroups& groups) const {
  const ResolvedRecipe recipe = ctx.Resolve(shape_.site);
  const std::int64_t rows =
      std::accumulate(groups.host_rows, groups.host_rows + groups.count, std::int64_t{0});
  ctx.executed->Count({.site = shape_.site,
                       .planned = *recipe.planned,
                       .executed = *recipe.executed,
                       .reason = recipe.reason,
                       .precision = FlopsOf(*recipe.executed, pass),
                       .flops = 2.0 * static_cast<double>(rows) * static_cast<double>(shape_.n) *
                                static_cast<double>(shape_.k)});
}

GemmOperand Product::Weight(const LayerContext& ctx, const Recipe& recipe, GemmPass pass) const {
  if (!recipe.is_fp8()) {
    // [n, k] is K-contiguous for fprop; dgrad contracts over n.
    return High(ctx, ctx.WeightData(shape_.weight), pass == GemmPass::kFprop);
  }
  const WeightCopies& copies =
      ctx.weights->Get(cache_handle_, recipe, ctx.record, ctx.record && ctx.energies);
  return {.quant = pass == GemmPass::kFprop ? copies.row : copies.col};
}

void Product::Fprop(const LayerContext& ctx, const Operand& x, const RowGroups& groups, void* y,
                    std::int32_t first_group) const {
  const SiteRange range(ctx, shape_.site);
  const Recipe& recipe = *ctx.Resolve(shape_.site).executed;
  Count(ctx, GemmPass::kFprop, groups);
  if (ctx.record && ctx.energies && ctx.shadows != nullptr && first_group == 0) {
    for (const ShadowStates::Entry& entry : ctx.shadows->Find(shape_.site, Tensor::kWeight)) {
      ctx.weights->Measure(cache_handle_, entry.cast, entry.slots, entry.energy);
    }
  }
  const GemmOperand a = recipe.is_fp8() ? GemmOperand{.quant = x.row} : High(ctx, x.high, true);
  const GemmOperand b = Weight(ctx, recipe, GemmPass::kFprop);
  const Accumulate mode = AccumulateOf(recipe, GemmPass::kFprop);
  if (shape_.grouped) {
    ctx.ops().grouped_gemm(ctx.device(),
                           {.groups = groups,
                            .n = shape_.n,
                            .k = shape_.k,
                            .a = a,
                            .b = SomeGroups(b, first_group, groups.count, shape_.n, shape_.k),
                            .c = y,
                            .c_dtype = ctx.act,
                            .mode = mode});
  } else {
    ctx.ops().gemm(ctx.device(), {.m = groups.padded_rows,
                                  .n = shape_.n,
                                  .k = shape_.k,
                                  .a = a,
                                  .b = b,
                                  .c = y,
                                  .c_dtype = ctx.act,
                                  .ldc = 0,
                                  .accumulate = false,
                                  .mode = mode});
  }
}

void Product::Dgrad(const LayerContext& ctx, const Operand& dy, const RowGroups& groups,
                    void* dx) const {
  const SiteRange range(ctx, shape_.site);
  const Recipe& recipe = *ctx.Resolve(shape_.site).executed;
  Count(ctx, GemmPass::kDgrad, groups);
  const GemmOperand a = recipe.is_fp8() ? GemmOperand{.quant = dy.row} : High(ctx, dy.high, true);
  const GemmOperand b = Weight(ctx, recipe, GemmPass::kDgrad);
  const Accumulate mode = AccumulateOf(recipe, GemmPass::kDgrad);
  if (shape_.grouped) {
    ctx.ops().grouped_gemm(ctx.device(), {.groups = groups,
                                          .n = shape_.k,
                                          .k = shape_.n,
                                          .a = a,
                                          .b = b,
                                          .c = dx,
                                          .c_dtype = ctx.act,
                                          .mode = mode});
  } else {
    // Column-wise weights of mxfp8 and per-tensor kinds are padded along the contraction with zero
    // codes; the contraction itself stays n.
    ctx.ops().gemm(ctx.device(), {.m = groups.padded_rows,
                                  .n = shape_.k,
                                  .k = shape_.n,
                                  .a = a,
                                  .b = b,
                                  .c = dx,
                                  .c_dtype = ctx.act,
                                  .ldc = 0,
                                  .accumulate = false,
                                  .mode = mode});
  }
}

void Product::WgradOf(const LayerContext& ctx, const Operand& dy, const Operand& x,
                      const RowGroups& groups, std::int32_t first, std::int32_t last) const {
  const SiteRange range(ctx, shape_.site);
  const Recipe& recipe = *ctx.Resolve(shape_.site).executed;
  // Some groups: the same operands with another first group; rows keep their places.
  RowGroups some = groups;
  some.count = last - first;
  some.begin += first;
  some.rows += first;
  some.host_begin += first;
  some.host_rows += first;
  Count(ctx, GemmPass::kWgrad, some);
  const bool fp8 = WgradIsFp8(recipe);
  GemmOperand a = fp8 ? GemmOperand{.quant = dy.col} : High(ctx, dy.high, false);
  GemmOperand b = fp8 ? GemmOperand{.quant = x.col} : High(ctx, x.high, false);
  for (GemmOperand* operand : {&a, &b}) {
    if (operand->quant.present() && operand->quant.tiling == Tiling::kTensor) {
      operand->quant.dequant_scale += first;
    }
  }
  const Accumulate mode = AccumulateOf(recipe, GemmPass::kWgrad);
  if (shape_.grouped) {
    WeightState* const state = shape_.weight.state;
    const bool overwrite = state != nullptr && state->AllUnwritten(first, last);
    for (std::int32_t g = first; state != nullptr && !overwrite && g < last; ++g) {
      if (state->Unwritten(g)) {
        const std::int64_t one = shape_.n * shape_.k;
        ctx.ops().zero(ctx.device(), shape_.weight.grad + g * one,
                       one * static_cast<std::int64_t>(sizeof(float)));
      }
    }
    if (state != nullptr) {
      state->MarkWritten(first, last);
    }
    ctx.ops().grouped_wgrad(ctx.device(), {.groups = some,
                                           .m = shape_.n,
                                           .n = shape_.k,
                                           .a = a,
                                           .b = b,
                                           .c = shape_.weight.grad + first * shape_.n * shape_.k,
                                           .accumulate = !overwrite,
                                           .mode = mode,
                                           .same_by_128 = fp8 && IsCastingFree(recipe)});
  } else {
    ctx.ops().gemm(ctx.device(),
                   {.m = shape_.n,
                    .n = shape_.k,
                    .k = fp8 ? RoundUp(groups.padded_rows, kTile) : groups.padded_rows,
                    .a = a,
                    .b = b,
                    .c = shape_.weight.grad,
                    .c_dtype = DType::kF32,
                    .ldc = 0,
                    .accumulate = true,
                    .mode = mode});
  }
}

void MeasureEnergy(const LayerContext& ctx, const OpSite& site, Tensor tensor, const void* x,
                   std::int64_t cols, const RowGroups& groups, const QTensor& q, bool transposed) {
  if (!ctx.record || !ctx.energies || !q.present()) {
    return;
  }
  ctx.ops().sqnr(ctx.device(), {.x = x,
                                .x_dtype = ctx.act,
                                .cols = cols,
                                .groups = groups,
                                .q = q,
                                .q_is_transposed = transposed,
                                .slot = ctx.states->energy(site, tensor)});
}

void MeasureShadows(const LayerContext& ctx, const OpSite& site, Tensor tensor, const void* x,
                    std::int64_t cols, const RowGroups& groups, std::int32_t first_group) {
  if (!ctx.record || !ctx.energies || ctx.shadows == nullptr) {
    return;
  }
  for (const ShadowStates::Entry& entry : ctx.shadows->Find(site, tensor)) {
    const QuantizeRule rule = ActivationRule(entry.cast, tensor);
    const QTensor row = ctx.shadow_row.Row(rule, groups.padded_rows, cols);
    QuantizeInto(ctx.backend, *ctx.states,
                 {.recipe = entry.cast,
                  .rule = rule,
                  .x = x,
                  .x_dtype = ctx.act,
                  .cols = cols,
                  .groups = groups,
                  .state_index = ctx.states->Index(site, tensor) + first_group,
                  .row = row,
                  .col = {},
                  .stats = entry.slots + first_group});
    ctx.ops().sqnr(ctx.device(), {.x = x,
                                  .x_dtype = ctx.act,
                                  .cols = cols,
                                  .groups = groups,
                                  .q = row,
                                  .q_is_transposed = false,
                                  .slot = entry.energy});
    if (IsCastingFree(entry.cast) && (site.op == Op::kFc1 || site.op == Op::kFc2)) {
      ctx.ops().transpose_scaled(ctx.device(),
                                 {.src = row,
                                  .groups = groups,
                                  .dst = ctx.shadow_col.Col(rule, groups.padded_rows, cols),
                                  .stats = entry.slots + first_group});
    }
  }
}

Operand Cast(const LayerContext& ctx, const CastRequest& r) {
  const SiteRange range(ctx, r.site);
  Operand operand{.high = r.x};
  const QuantizeRule rule = ActivationRule(r.recipe, r.tensor);
  const std::int64_t rows = r.groups.padded_rows;
  if (r.row.codes != nullptr) {
    operand.row = r.row.Row(rule, rows, r.cols);
  }
  if (r.col.codes != nullptr) {
    operand.col = r.col.Col(rule, rows, r.cols);
  }
  QuantizeInto(ctx.backend, *ctx.states,
               {.recipe = r.recipe,
                .rule = rule,
                .x = r.x,
                .x_dtype = ctx.act,
                .cols = r.cols,
                .groups = r.groups,
                .state_index = ctx.states->Index(r.site, r.tensor) + r.first_group,
                .row = operand.row,
                .col = operand.col,
                .stats = ctx.Slots(r.site, r.tensor, r.first_group)});
  MeasureEnergy(ctx, r.site, r.tensor, r.x, r.cols, r.groups,
                operand.row.present() ? operand.row : operand.col, !operand.row.present());
  return operand;
}

Operand SavedInput(const LayerContext& ctx, const OpSite& site, const LinearSaved& saved,
                   std::int64_t rows, std::int64_t cols) {
  Operand x{.high = saved.x};
  const Recipe& recipe = *ctx.Resolve(site).executed;
  if (WgradIsFp8(recipe)) {
    x.col = saved.col.Col(ActivationRule(recipe, Tensor::kInput), rows, cols);
  }
  return x;
}

void Linear::Forward(const LayerContext& ctx, const LinearScratch& scratch, const void* x,
                     std::int64_t rows, LinearSaved* saved, void* y) const {
  const ProductShape& shape = product_.shape();
  const Recipe& recipe = *ctx.Resolve(shape.site).executed;
  const RowGroups& groups = ctx.dense_groups->Get(rows);
  MeasureShadows(ctx, shape.site, Tensor::kInput, x, shape.k, groups);
  Operand operand{.high = x};
  if (recipe.is_fp8()) {
    const bool keep = saved != nullptr && WgradIsFp8(recipe);
    operand = Cast(ctx, {.site = shape.site,
                         .tensor = Tensor::kInput,
                         .recipe = recipe,
                         .x = x,
                         .cols = shape.k,
                         .groups = groups,
                         .row = scratch.row,
                         .col = keep ? saved->col : QBuffer{}});
  }
  if (saved != nullptr) {
    saved->x = x;
  }
  product_.Fprop(ctx, operand, groups, y);
}

void Linear::Backward(const LayerContext& ctx, const LinearScratch& scratch, const void* dy,
                      std::int64_t rows, const LinearSaved& saved, void* dx) const {
  const ProductShape& shape = product_.shape();
  const Recipe& recipe = *ctx.Resolve(shape.site).executed;
  const RowGroups& groups = ctx.dense_groups->Get(rows);
  MeasureShadows(ctx, shape.site, Tensor::kGrad, dy, shape.n, groups);
  Operand gradient{.high = dy};
  if (recipe.is_fp8()) {
    gradient = Cast(ctx, {.site = shape.site,
                          .tensor = Tensor::kGrad,
                          .recipe = recipe,
                          .x = dy,
                          .cols = shape.n,
                          .groups = groups,
                          .row = scratch.row,
                          .col = WgradIsFp8(recipe) ? scratch.col : QBuffer{}});
  }
  if (dx != nullptr) {
    product_.Dgrad(ctx, gradient, groups, dx);
  }
  product_.Wgrad(ctx, gradient, SavedInput(ctx, shape.site, saved, rows, shape.k), groups);
}

}  // namespace octavo
