// Products. The CPU result stands for FP64 over the same operands (it is within 1e-6 of it), so the
// tolerances are those of NUMERICS 12: FP32 out promoted 2e-4, BF16 out 2.5e-3 (rounding alone
// gives 1.7e-3), fast accumulation 4e-3.
#include "kernels/formats/fp8.h"
#include "tests/ops/cases.h"

namespace octavo::test {
namespace {

constexpr double kPromoted = 2e-4, kBf16Out = 2.5e-3, kFastOut = 4e-3, kF32 = 1e-5;

GemmOperand High(OpRun& run, std::int64_t rows, std::int64_t k, DType dtype, bool k_contiguous) {
  GemmOperand o;
  o.data = run.Activations(rows * k, dtype, 1.0f);
  o.dtype = dtype;
  o.k_contiguous = k_contiguous;
  return o;
}

// [rows, cols] codes of Gaussian data with D in the layout of a GEMM operand.
GemmOperand Quantised(OpRun& run, std::int64_t rows, std::int64_t cols, DType format, Tiling tiling,
                      std::int64_t groups = 1) {
  std::vector<std::uint8_t> q(static_cast<std::size_t>(rows * cols));
  const std::vector<float> x = run.Numbers(rows * cols, 100.0f);
  for (std::size_t i = 0; i < q.size(); ++i) {
    q[i] = Fp8Encode(format, x[i]);
  }
  QTensor t;
  t.format = format;
  t.tiling = tiling;
  t.rows = rows;
  t.cols = cols;
  std::int64_t count = groups;
  if (tiling == Tiling::kBlock128) {
    t.scale_row_stride = RoundUp(CeilDiv(cols, kTile), 4);
    t.scale_tile_stride = 1;
    count = CeilDiv(rows, kTile) * t.scale_row_stride;
  } else if (tiling != Tiling::kTensor) {
    t.scale_row_stride = 1;
    t.scale_tile_stride = rows;
    count = rows * CeilDiv(cols, tiling == Tiling::kRow32 ? kMxBlock : kTile);
  }
  std::vector<float> d(static_cast<std::size_t>(count));
  for (float& v : d) {
    v = std::ldexp(1.0f + static_cast<float>(run.Pick(0, 255)) / 256,
                   static_cast<int>(run.Pick(-9, -5)));
    if (tiling == Tiling::kRow32) {
      v = std::ldexp(1.0f, static_cast<int>(run.Pick(-9, -5)));
    }
  }
  t.q = run.In(q);
  t.dequant_scale = run.In(d);
  GemmOperand o;
  o.quant = t;
  return o;
}

void Dense(OpRun& run, std::int64_t m, std::int64_t n, std::int64_t k, const GemmOperand& a,
           const GemmOperand& b, DType c_dtype, bool accumulate, double tolerance,
           Accumulate mode = Accumulate::kPromoted) {
  GemmArgs g{};
  g.m = m;
  g.n = n;
  g.k = k;
  g.a = a;
  g.b = b;
  g.c = accumulate ? static_cast<void*>(run.InOut<float>(
                         "c", DType::kF32, run.Numbers(m * n, 10.0f), Agree::kRelative, tolerance))
                   : run.Out<void>("c", c_dtype, m * n, Agree::kRelative, tolerance);
  g.c_dtype = c_dtype;
  g.accumulate = accumulate;
  g.mode = mode;
  run.ops.gemm(run.context, g);
}

void HighCase(OpRun& run, DType dtype, bool a_kc, bool b_kc, DType c_dtype, bool accumulate,
              double tolerance, std::int64_t m = 136, std::int64_t n = 200, std::int64_t k = 320) {
  const GemmOperand a = High(run, m, k, dtype, a_kc), b = High(run, n, k, dtype, b_kc);
  Dense(run, m, n, k, a, b, c_dtype, accumulate, tolerance);
}

void Fp8Case(OpRun& run, Tiling ta, Tiling tb, DType fa, DType fb, DType c_dtype, bool accumulate,
             double tolerance, std::int64_t m = 264, std::int64_t n = 256, std::int64_t k = 512,
             Accumulate mode = Accumulate::kPromoted) {
  const GemmOperand a = Quantised(run, m, k, fa, ta), b = Quantised(run, n, k, fb, tb);
  Dense(run, m, n, k, a, b, c_dtype, accumulate, tolerance, mode);
}

// Padding rows of A are zeros, as every producer writes them.
GemmOperand ZeroPadded(OpRun& run, const RowGroups& g, std::int64_t k) {
  std::vector<float> x = run.Numbers(g.padded_rows * k, 1.0f);
  for (std::int32_t i = 0; i < g.count; ++i) {
    const std::int64_t end = g.host_begin[i] + g.host_rows[i];
    std::fill(x.begin() + end * k, x.begin() + RoundUp(end, kRowAlign) * k, 0.0f);
  }
  GemmOperand o;
  o.data = run.In(run.Encode(x, DType::kBF16));
  o.dtype = DType::kBF16;
  return o;
}

// An FP8 operand with zero codes where padding is; rows are K for a weight gradient.
GemmOperand ZeroPaddedFp8(OpRun& run, const RowGroups& g, std::int64_t width, DType format,
                          Tiling tiling, bool transposed) {
  const std::int64_t p = g.padded_rows;
  const std::int64_t rows = transposed ? width : p, cols = transposed ? p : width;
  std::vector<std::uint8_t> q(static_cast<std::size_t>(rows * cols), 0);
  const std::vector<float> x = run.Numbers(rows * cols, 100.0f);
  for (std::int32_t i = 0; i < g.count; ++i) {
    for (std::int64_t r = g.host_begin[i]; r < g.host_begin[i] + g.host_rows[i]; ++r) {
      for (std::int64_t c = 0; c < width; ++c) {
        const std::size_t at = static_cast<std::size_t>(transposed ? c * p + r : r * width + c);
        q[at] = Fp8Encode(format, x[at]);
      }
    }
  }
  GemmOperand o = Quantised(run, rows, cols, format, tiling, g.count);
  o.quant.q = run.In(q);
  return o;
}

void GroupedHigh(OpRun& run, bool b_kc, DType c_dtype, double tolerance) {
  const RowGroups groups = run.Groups(RaggedRows(), 128);
  const std::int64_t n = 256, k = 384;
  GroupedGemmArgs a{};
  a.groups = groups;
  a.n = n;
  a.k = k;
  a.a = ZeroPadded(run, groups, k);
  a.b = High(run, groups.count * n, k, DType::kBF16, true);
  a.b.k_contiguous = b_kc;
  a.c = run.Out<void>("c", c_dtype, groups.padded_rows * n, Agree::kRelative, tolerance);
  a.c_dtype = c_dtype;
  run.ops.grouped_gemm(run.context, a);
}

void GroupedFp8(OpRun& run, Tiling ta, Tiling tb, DType fa, DType c_dtype, double tolerance) {
  const RowGroups groups = run.Groups(RaggedRows(), 128);
  const std::int64_t n = 256, k = 384;
  GroupedGemmArgs a{};
  a.groups = groups;
  a.n = n;
  a.k = k;
  a.a = ZeroPaddedFp8(run, groups, k, fa, ta, false);
  a.b = Quantised(run, groups.count * n, k, DType::kE4M3, tb, groups.count);
  a.c = run.Out<void>("c", c_dtype, groups.padded_rows * n, Agree::kRelative, tolerance);
  a.c_dtype = c_dtype;
  run.ops.grouped_gemm(run.context, a);
}

void Wgrad(OpRun& run, bool fp8, Tiling tiling, DType fa, bool accumulate) {
  const RowGroups groups = run.Groups(RaggedRows());
  const std::int64_t m = 256, n = 384;
  GroupedWgradArgs a{};
  a.groups = groups;
  a.m = m;
  a.n = n;
  if (fp8) {
    a.a = ZeroPaddedFp8(run, groups, m, fa, tiling, true);
    a.b = ZeroPaddedFp8(run, groups, n, DType::kE4M3, tiling, true);
  } else {
    a.a = ZeroPadded(run, groups, m);
    a.b = ZeroPadded(run, groups, n);
  }
  const std::int64_t count = groups.count * m * n;
  a.c = accumulate ? run.InOut<float>("c", DType::kF32, run.Numbers(count, 1.0f), Agree::kRelative,
                                      kPromoted)
                   : run.Out<float>("c", DType::kF32, count, Agree::kRelative, kPromoted);
  a.accumulate = accumulate;
  run.ops.grouped_wgrad(run.context, a);
}

}  // namespace

std::vector<OpCase> GemmCases() {
  using D = DType;
  using T = Tiling;
  return {
      {"gemm_f32", [](OpRun& r) { HighCase(r, D::kF32, true, true, D::kF32, false, kF32); }},
      {"gemm_f32_transposed",
       [](OpRun& r) { HighCase(r, D::kF32, false, false, D::kF32, true, kF32); }},
      {"gemm_f32_odd",
       [](OpRun& r) { HighCase(r, D::kF32, true, false, D::kF32, false, kF32, 37, 5, 19); }},
      {"gemm_bf16", [](OpRun& r) { HighCase(r, D::kBF16, true, true, D::kBF16, false, kBf16Out); }},
      {"gemm_bf16_dgrad",
       [](OpRun& r) { HighCase(r, D::kBF16, true, false, D::kBF16, false, kBf16Out); }},
      {"gemm_bf16_wgrad",
       [](OpRun& r) { HighCase(r, D::kBF16, false, false, D::kF32, true, kF32); }},
      {"gemm_bf16_odd",
       [](OpRun& r) { HighCase(r, D::kBF16, true, true, D::kF32, false, kF32, 33, 7, 13); }},
      {"gemm_k_zero",
       [](OpRun& r) { HighCase(r, D::kBF16, true, true, D::kF32, false, kF32, 16, 16, 0); }},
      {"gemm_fp8_tensor",
       [](OpRun& r) {
         Fp8Case(r, T::kTensor, T::kTensor, D::kE4M3, D::kE4M3, D::kF32, false, kPromoted);
       }},
      {"gemm_fp8_tensor_fast_bf16",
       [](OpRun& r) {
         Fp8Case(r, T::kTensor, T::kTensor, D::kE5M2, D::kE4M3, D::kBF16, false, kFastOut, 264, 256,
                 512, Accumulate::kFast);
       }},
      {"gemm_fp8_rows_blocks",
       [](OpRun& r) {
         Fp8Case(r, T::kRow128, T::kBlock128, D::kE4M3, D::kE4M3, D::kF32, false, kPromoted);
       }},
      {"gemm_fp8_rows_blocks_bf16",
       [](OpRun& r) {
         Fp8Case(r, T::kRow128, T::kBlock128, D::kE4M3, D::kE4M3, D::kBF16, false, kBf16Out);
       }},
      {"gemm_fp8_rows_rows_accumulate",
       [](OpRun& r) {
         Fp8Case(r, T::kRow128, T::kRow128, D::kE5M2, D::kE4M3, D::kF32, true, kPromoted);
       }},
      {"gemm_fp8_odd_rows",
       [](OpRun& r) {
         Fp8Case(r, T::kRow128, T::kBlock128, D::kE4M3, D::kE4M3, D::kF32, false, kPromoted, 77);
       }},
      {"gemm_mx_emulated",
       [](OpRun& r) {
         Fp8Case(r, T::kRow32, T::kRow32, D::kE4M3, D::kE4M3, D::kF32, false, kPromoted, 65, 40,
                 96);
       }},
      {"gemm_e5m2_twice",
       [](OpRun& r) {
         Fp8Case(r, T::kTensor, T::kTensor, D::kE5M2, D::kE5M2, D::kF32, false, kPromoted);
       }},
      {"grouped_bf16", [](OpRun& r) { GroupedHigh(r, true, D::kBF16, kBf16Out); }},
      {"grouped_bf16_dgrad", [](OpRun& r) { GroupedHigh(r, false, D::kF32, kF32); }},
      {"grouped_fp8_blockwise",
       [](OpRun& r) { GroupedFp8(r, T::kRow128, T::kBlock128, D::kE4M3, D::kBF16, kBf16Out); }},
      {"grouped_fp8_blockwise_f32",
       [](OpRun& r) { GroupedFp8(r, T::kRow128, T::kBlock128, D::kE5M2, D::kF32, kPromoted); }},
      {"grouped_fp8_tensor",
       [](OpRun& r) { GroupedFp8(r, T::kTensor, T::kTensor, D::kE5M2, D::kF32, kPromoted); }},
      {"grouped_mx",
       [](OpRun& r) { GroupedFp8(r, T::kRow32, T::kRow32, D::kE4M3, D::kF32, kPromoted); }},
      {"wgrad_bf16", [](OpRun& r) { Wgrad(r, false, T::kNone, D::kBF16, false); }},
      {"wgrad_bf16_accumulate", [](OpRun& r) { Wgrad(r, false, T::kNone, D::kBF16, true); }},
      {"wgrad_fp8_rows", [](OpRun& r) { Wgrad(r, true, T::kRow128, D::kE4M3, false); }},
      {"wgrad_fp8_rows_accumulate", [](OpRun& r) { Wgrad(r, true, T::kRow128, D::kE5M2, true); }},
      {"wgrad_fp8_tensor", [](OpRun& r) { Wgrad(r, true, T::kTensor, D::kE5M2, true); }},
      {"wgrad_mx", [](OpRun& r) { Wgrad(r, true, T::kRow32, D::kE4M3, false); }},
  };
}

}  // namespace octavo::test
