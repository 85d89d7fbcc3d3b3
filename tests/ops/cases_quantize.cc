// Casts, quantisers, the scaling-aware transpose: bit-equal (NUMERICS 12).
#include "kernels/formats/scale.h"
#include "tests/ops/cases.h"

namespace octavo::test {
namespace {

struct RowsCase {
  DType x_dtype = DType::kBF16;
  DType format = DType::kE4M3;
  Tiling tiling = Tiling::kRow128;
  bool pow2 = false, row = true, col = false, by_row = true, poison = true;
  float min_dequant_scale = 0;
  std::int64_t cols = 384;
  std::int64_t dense_rows = 0;  // > 0: a dense tensor instead of ragged groups
};

void Rows(OpRun& run, const RowsCase& c) {
  const RowGroups groups =
      c.dense_rows > 0 ? run.Dense(c.dense_rows) : run.Groups(RaggedRows(), 256);
  const std::int64_t p = groups.padded_rows;
  QuantizeRowsArgs a{};
  a.x = run.Activations(p * c.cols, c.x_dtype, 1.0f, c.poison);
  a.x_dtype = c.x_dtype;
  a.cols = c.cols;
  a.groups = groups;
  a.rule = {.format = c.format,
            .tiling = c.tiling,
            .pow2 = c.pow2,
            .min_dequant_scale = c.min_dequant_scale};
  if (c.row) {
    a.row = OutQTensor(run, "row", p, c.cols, c.format, c.tiling, c.by_row);
  }
  if (c.col) {
    a.col = OutQTensor(run, "col", c.cols, RoundUp(p, kTile), c.format, c.tiling, c.by_row);
  }
  a.stats = run.Stats(groups.count);
  run.ops.quantize_rows(run.context, a);
}

void Tensor(OpRun& run, DType x_dtype, DType format, bool row, bool col) {
  const RowGroups groups = run.Groups(RaggedRows(), 128);
  const std::int64_t p = groups.padded_rows, cols = 208;
  const void* x = run.Activations(p * cols, x_dtype, 3.0f, true);
  float* amax = run.Out<float>("amax", DType::kF32, groups.count);
  std::int32_t* bad = run.Out<std::int32_t>("nonfinite", DType::kI32, groups.count);
  run.ops.amax(run.context, {x, x_dtype, cols, groups, amax, bad});
  float* quant = run.Out<float>("Q", DType::kF32, groups.count);
  float* dequant = run.Out<float>("D", DType::kF32, groups.count);
  run.ops.scale_from_amax(run.context, {amax,
                                        groups.count,
                                        {.format = format, .tiling = Tiling::kTensor, .margin = 1},
                                        quant,
                                        dequant});
  // Scales of an earlier step: some elements saturate.
  std::vector<float> old(static_cast<std::size_t>(groups.count));
  for (float& q : old) {
    q = std::ldexp(1.0f, static_cast<int>(run.Pick(-4, 8)));
  }
  QuantizeTensorArgs a{};
  a.x = x;
  a.x_dtype = x_dtype;
  a.cols = cols;
  a.groups = groups;
  a.quant_scale = run.In(old);
  a.format = format;
  if (row) {
    a.row = OutQTensor(run, "row", p, cols, format, Tiling::kTensor, true, groups.count);
  }
  if (col) {
    a.col = OutQTensor(run, "col", cols, p, format, Tiling::kTensor, true, groups.count);
  }
  a.stats = run.Stats(groups.count);
  run.ops.quantize_tensor(run.context, a);
}

void Blocks(OpRun& run, DType format, bool pow2, bool col) {
  const std::int64_t groups = 3, n = 256, k = 384;
  std::vector<float> w = run.Numbers(groups * n * k, 0.02f, true);
  std::fill(w.begin() + n * k, w.begin() + n * k + 128 * k, 0.0f);  // tiles of zeros
  QuantizeBlocksArgs a{};
  a.w = run.In(w);
  a.groups = groups;
  a.n = n;
  a.k = k;
  a.rule = {.format = format,
            .tiling = Tiling::kBlock128,
            .pow2 = pow2,
            .min_dequant_scale = pow2 ? 1e-4f : 0.0f};
  a.row = OutQTensor(run, "row", groups * n, k, format, Tiling::kBlock128, true);
  if (col) {
    a.col = OutQTensor(run, "col", groups * k, n, format, Tiling::kBlock128, true);
  }
  a.stats = run.Stats(groups);
  run.ops.quantize_blocks(run.context, a);
}

// Every code and every distance of exponents occurs; one row group is all padding scale.
void Transpose(OpRun& run, bool by_row) {
  const RowGroups groups = run.Groups(RaggedRows(), 128);
  const std::int64_t p = groups.padded_rows, cols = 384, tiles = cols / kTile;
  std::vector<std::uint8_t> q(static_cast<std::size_t>(p * cols));
  for (auto& code : q) {
    code = static_cast<std::uint8_t>(run.Pick(0, 255));
  }
  std::vector<float> d(static_cast<std::size_t>(p * tiles));
  for (float& v : d) {
    v = run.Pick(0, 9) == 0 ? kDequantScaleMin
                            : std::ldexp(1.0f, static_cast<int>(run.Pick(-24, 0)));
  }
  QTensor src;
  src.q = run.In(q);
  src.tiling = Tiling::kRow128;
  src.rows = p;
  src.cols = cols;
  src.dequant_scale = run.In(d);
  src.scale_row_stride = by_row ? 1 : tiles;
  src.scale_tile_stride = by_row ? p : 1;
  const QTensor dst = OutQTensor(run, "dst", cols, p, DType::kE4M3, Tiling::kRow128, true);
  run.ops.transpose_scaled(run.context, {src, groups, dst, run.Stats(groups.count)});
}

void Decode(OpRun& run, Tiling tiling, DType format, DType dst_dtype) {
  const bool block = tiling == Tiling::kBlock128;
  const RowGroups groups = block ? RowGroups{} : run.Groups(RaggedRows(), 128);
  const std::int64_t rows = block ? 256 : groups.padded_rows, cols = 384;
  std::vector<std::uint8_t> q(static_cast<std::size_t>(rows * cols));
  for (auto& code : q) {
    code = static_cast<std::uint8_t>(run.Pick(0, 255));
  }
  std::vector<float> d(static_cast<std::size_t>(rows * cols / 32 + 16));
  for (float& v : d) {
    v = std::ldexp(1.0f + static_cast<float>(run.Pick(0, 100)) / 101,
                   static_cast<int>(run.Pick(-20, 3)));
  }
  QTensor src;
  src.q = run.In(q);
  src.format = format;
  src.tiling = tiling;
  src.rows = rows;
  src.cols = cols;
  src.dequant_scale = run.In(d);
  src.scale_row_stride = block ? 4 : 1;
  src.scale_tile_stride = block ? 1 : rows;
  run.ops.dequantize(run.context,
                     {src, groups, run.Out<void>("x", dst_dtype, rows * cols), dst_dtype});
}

void SqnrOf(OpRun& run, bool transposed) {
  const RowGroups groups = run.Groups(RaggedRows());
  const std::int64_t p = groups.padded_rows, cols = 256;
  const void* x = run.Activations(p * cols, DType::kBF16, 1.0f);
  QuantizeRowsArgs a{};
  a.x = x;
  a.x_dtype = DType::kBF16;
  a.cols = cols;
  a.groups = groups;
  a.row = OutQTensor(run, "row", p, cols, DType::kE4M3, Tiling::kRow128, true);
  a.col = OutQTensor(run, "col", cols, p, DType::kE4M3, Tiling::kRow128, true);
  run.ops.quantize_rows(run.context, a);
  // FP64 sums in another order.
  double* slot = run.InOut<double>("sqnr", DType::kF64, {1.0, 2.0}, Agree::kRelative, 1e-12);
  run.ops.sqnr(run.context, {x, DType::kBF16, cols, groups, transposed ? a.col : a.row, transposed,
                             reinterpret_cast<SqnrSlot*>(slot)});
}

}  // namespace

std::vector<OpCase> QuantizeCases() {
  using D = DType;
  using T = Tiling;
  return {
      {"rows_bf16", [](OpRun& r) { Rows(r, {}); }},
      {"rows_wide_wire_layout", [](OpRun& r) { Rows(r, {.by_row = false, .cols = 2176}); }},
      {"rows_f32_e5m2", [](OpRun& r) { Rows(r, {.x_dtype = D::kF32, .format = D::kE5M2}); }},
      {"rows_pow2", [](OpRun& r) { Rows(r, {.pow2 = true}); }},
      {"rows_least_scale", [](OpRun& r) { Rows(r, {.col = true, .min_dequant_scale = 0.01f}); }},
      {"rows_least_scale_pow2",
       [](OpRun& r) { Rows(r, {.pow2 = true, .min_dequant_scale = 0.01f}); }},
      {"rows_mx", [](OpRun& r) { Rows(r, {.tiling = T::kRow32, .cols = 352}); }},
      {"rows_dense_odd", [](OpRun& r) { Rows(r, {.dense_rows = 201}); }},
      {"rows_and_columns", [](OpRun& r) { Rows(r, {.col = true}); }},
      {"rows_and_columns_pow2_f32",
       [](OpRun& r) { Rows(r, {.x_dtype = D::kF32, .pow2 = true, .col = true, .by_row = false}); }},
      {"rows_and_columns_e5m2", [](OpRun& r) { Rows(r, {.format = D::kE5M2, .col = true}); }},
      {"rows_and_columns_mx", [](OpRun& r) { Rows(r, {.tiling = T::kRow32, .col = true}); }},
      {"rows_and_columns_dense_odd", [](OpRun& r) { Rows(r, {.col = true, .dense_rows = 201}); }},
      {"columns_alone", [](OpRun& r) { Rows(r, {.row = false, .col = true}); }},
      {"columns_alone_mx",
       [](OpRun& r) {
         Rows(r, {.x_dtype = D::kF32, .tiling = T::kRow32, .row = false, .col = true});
       }},
      {"tensor_rows", [](OpRun& r) { Tensor(r, D::kBF16, D::kE4M3, true, false); }},
      {"tensor_both_e5m2", [](OpRun& r) { Tensor(r, D::kF32, D::kE5M2, true, true); }},
      {"tensor_columns", [](OpRun& r) { Tensor(r, D::kBF16, D::kE4M3, false, true); }},
      {"blocks", [](OpRun& r) { Blocks(r, D::kE4M3, false, true); }},
      {"blocks_pow2_row_only", [](OpRun& r) { Blocks(r, D::kE4M3, true, false); }},
      {"transpose_scaled", [](OpRun& r) { Transpose(r, true); }},
      {"transpose_scaled_wire", [](OpRun& r) { Transpose(r, false); }},
      {"dequantize_rows", [](OpRun& r) { Decode(r, T::kRow128, D::kE4M3, D::kBF16); }},
      {"dequantize_tensor", [](OpRun& r) { Decode(r, T::kTensor, D::kE5M2, D::kF32); }},
      {"dequantize_mx", [](OpRun& r) { Decode(r, T::kRow32, D::kE4M3, D::kF32); }},
      {"dequantize_blocks", [](OpRun& r) { Decode(r, T::kBlock128, D::kE4M3, D::kBF16); }},
      {"sqnr_rows", [](OpRun& r) { SqnrOf(r, false); }},
      {"sqnr_columns", [](OpRun& r) { SqnrOf(r, true); }},
  };
}

}  // namespace octavo::test
