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

// Padding rows of A are zeros, as every producer writes them; rows behind all groups hold NaN,
// which nothing may read.
GemmOperand ZeroPadded(OpRun& run, const RowGroups& g, std::int64_t k) {
  std::vector<float> x = run.Numbers(g.padded_rows * k, 1.0f);
  std::int64_t used = 0;
  for (std::int32_t i = 0; i < g.count; ++i) {
    const std::int64_t end = g.host_begin[i] + g.host_rows[i];
    used = RoundUp(end, kRowAlign);
    std::fill(x.begin() + end * k, x.begin() + used * k, 0.0f);
  }
  std::fill(x.begin() + used * k, x.end(), __builtin_nanf(""));
  GemmOperand o;
  o.data = run.In(run.Encode(x, DType::kBF16));
  o.dtype = DType::kBF16;
  return o;
}

// How the D of an FP8 operand are laid out or chosen.
enum class ScaleForm : std::uint8_t {
  kRandom,      // by row, one row after the other
  kTokenMajor,  // as dispatch leaves them: all of a row together
  kByBlock,     // one power of two for 128 rows, as a casting-free transpose leaves them
};

// An FP8 operand with zero codes where padding is and NaN behind all groups; rows are K for a
// weight gradient (transposed).
GemmOperand ZeroPaddedFp8(OpRun& run, const RowGroups& g, std::int64_t width, DType format,
                          Tiling tiling, bool transposed, ScaleForm form = ScaleForm::kRandom) {
  const std::int64_t p = g.padded_rows;
  const std::int64_t rows = transposed ? width : p, cols = transposed ? p : width;
  std::vector<std::uint8_t> q(static_cast<std::size_t>(rows * cols), 0);
  const std::vector<float> x = run.Numbers(rows * cols, 100.0f);
  const auto at = [&](std::int64_t r, std::int64_t c) {
    return static_cast<std::size_t>(transposed ? c * p + r : r * width + c);
  };
  std::int64_t used = 0;
  for (std::int32_t i = 0; i < g.count; ++i) {
    for (std::int64_t r = g.host_begin[i]; r < g.host_begin[i] + g.host_rows[i]; ++r) {
      for (std::int64_t c = 0; c < width; ++c) {
        q[at(r, c)] = Fp8Encode(format, x[at(r, c)]);
      }
    }
    used = RoundUp(g.host_begin[i] + g.host_rows[i], kRowAlign);
  }
  for (std::int64_t r = used; r < p; ++r) {
    for (std::int64_t c = 0; c < width; ++c) {
      q[at(r, c)] = 0x7F;
    }
  }
  GemmOperand o = Quantised(run, rows, cols, format, tiling, g.count);
  o.quant.q = run.In(q);
  if (form == ScaleForm::kTokenMajor) {
    o.quant.scale_row_stride = CeilDiv(cols, kTile);
    o.quant.scale_tile_stride = 1;
  } else if (form == ScaleForm::kByBlock) {
    const std::int64_t tiles = CeilDiv(cols, kTile);
    std::vector<float> d(static_cast<std::size_t>(rows * tiles));
    for (std::int64_t t = 0; t < tiles; ++t) {
      float block = 0;
      for (std::int64_t r = 0; r < rows; ++r) {
        if (r % kTile == 0) {
          block = std::ldexp(1.0f, static_cast<int>(run.Pick(-12, -5)));
        }
        d[static_cast<std::size_t>(t * rows + r)] = block;
      }
    }
    o.quant.dequant_scale = run.In(d);
  }
  return o;
}

// Shapes of the grouped cases; the defaults have everything ragged and rows behind the groups.
struct GroupedShape {
  std::vector<std::int64_t> rows = RaggedRows();
  std::int64_t m = 256, n = 256, k = 384;  // m: wgrad
  std::int64_t slack = 128;
  ScaleForm form = ScaleForm::kRandom;
  Accumulate mode = Accumulate::kPromoted;
};

void GroupedHigh(OpRun& run, bool b_kc, DType c_dtype, double tolerance,
                 const GroupedShape& s = {}) {
  const RowGroups groups = run.Groups(s.rows, s.slack);
  GroupedGemmArgs a{};
  a.groups = groups;
  a.n = s.n;
  a.k = s.k;
  a.a = ZeroPadded(run, groups, s.k);
  a.b = High(run, groups.count * s.n, s.k, DType::kBF16, true);
  a.b.k_contiguous = b_kc;
  a.c = run.Out<void>("c", c_dtype, groups.padded_rows * s.n, Agree::kRelative, tolerance);
  a.c_dtype = c_dtype;
  run.ops.grouped_gemm(run.context, a);
}

void GroupedFp8(OpRun& run, Tiling ta, Tiling tb, DType fa, DType c_dtype, double tolerance,
                const GroupedShape& s = {}) {
  const RowGroups groups = run.Groups(s.rows, s.slack);
  GroupedGemmArgs a{};
  a.groups = groups;
  a.n = s.n;
  a.k = s.k;
  a.a = ZeroPaddedFp8(run, groups, s.k, fa, ta, false, s.form);
  a.b = Quantised(run, groups.count * s.n, s.k, DType::kE4M3, tb, groups.count);
  a.c = run.Out<void>("c", c_dtype, groups.padded_rows * s.n, Agree::kRelative, tolerance);
  a.c_dtype = c_dtype;
  a.mode = s.mode;
  run.ops.grouped_gemm(run.context, a);
}

void GroupedBlockwise(OpRun& run, DType c_dtype, const GroupedShape& s) {
  GroupedFp8(run, Tiling::kRow128, Tiling::kBlock128, DType::kE4M3, c_dtype,
             c_dtype == DType::kF32 ? kPromoted : kBf16Out, s);
}

void Wgrad(OpRun& run, bool fp8, Tiling tiling, DType fa, bool accumulate,
           const GroupedShape& s = {.n = 384}) {
  const RowGroups groups = run.Groups(s.rows, s.slack);
  GroupedWgradArgs a{};
  a.groups = groups;
  a.m = s.m;
  a.n = s.n;
  if (fp8) {
    a.a = ZeroPaddedFp8(run, groups, s.m, fa, tiling, true, s.form);
    a.b = ZeroPaddedFp8(run, groups, s.n, DType::kE4M3, tiling, true, s.form);
  } else {
    a.a = ZeroPadded(run, groups, s.m);
    a.b = ZeroPadded(run, groups, s.n);
  }
  const std::int64_t count = groups.count * s.m * s.n;
  const double tolerance = s.mode == Accumulate::kFast ? kFastOut : kPromoted;
  a.c = accumulate ? run.InOut<float>("c", DType::kF32, run.Numbers(count, 1.0f), Agree::kRelative,
                                      tolerance)
                   : run.Out<float>("c", DType::kF32, count, Agree::kRelative, tolerance);
  a.accumulate = accumulate;
  a.mode = s.mode;
  a.same_by_128 = s.form == ScaleForm::kByBlock;
  run.ops.grouped_wgrad(run.context, a);
}

// One to three rows in most of 256 groups.
std::vector<std::int64_t> ManyGroups() {
  std::vector<std::int64_t> rows;
  for (std::int64_t i = 0; i < 256; ++i) {
    rows.push_back(i % 4);
  }
  return rows;
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
      {"grouped_bf16_narrow",
       [](OpRun& r) { GroupedHigh(r, true, D::kBF16, kBf16Out, {.n = 136, .k = 200}); }},
      {"grouped_bf16_dgrad_narrow",
       [](OpRun& r) { GroupedHigh(r, false, D::kBF16, kBf16Out, {.n = 192, .k = 136}); }},
      {"grouped_bf16_odd",
       [](OpRun& r) { GroupedHigh(r, true, D::kF32, kF32, {.n = 100, .k = 36}); }},
      {"grouped_bf16_many",
       [](OpRun& r) {
         GroupedHigh(r, true, D::kBF16, kBf16Out, {ManyGroups(), 0, 64, 64});
       }},
      {"grouped_fp8_token_major",
       [](OpRun& r) { GroupedBlockwise(r, D::kF32, {.form = ScaleForm::kTokenMajor}); }},
      {"grouped_fp8_one_expert",
       [](OpRun& r) {
         GroupedBlockwise(r, D::kBF16, {{700}, 0, 640, 128});
       }},
      {"grouped_fp8_single_rows",
       [](OpRun& r) {
         GroupedBlockwise(r, D::kF32, {{1, 1, 1, 1}, 0, 384, 128});
       }},
      {"grouped_fp8_all_empty",
       [](OpRun& r) {
         GroupedBlockwise(r, D::kBF16, {{0, 0, 0}, 0, 256, 256});
       }},
      {"grouped_fp8_deep",
       [](OpRun& r) {
         GroupedBlockwise(r, D::kF32, {{129, 5}, 0, 128, 7168});
       }},
      {"grouped_fp8_many",
       [](OpRun& r) {
         GroupedBlockwise(r, D::kF32, {ManyGroups(), 0, 128, 128});
       }},
      {"grouped_fp8_tensor_narrow",
       [](OpRun& r) {
         GroupedFp8(r, T::kTensor, T::kTensor, D::kE4M3, D::kBF16, kBf16Out, {.n = 200, .k = 144});
       }},
      {"grouped_fp8_tensor_fast",
       [](OpRun& r) {
         GroupedFp8(r, T::kTensor, T::kTensor, D::kE5M2, D::kBF16, kFastOut,
                    {.mode = Accumulate::kFast});
       }},
      {"wgrad_bf16", [](OpRun& r) { Wgrad(r, false, T::kNone, D::kBF16, false); }},
      {"wgrad_bf16_accumulate", [](OpRun& r) { Wgrad(r, false, T::kNone, D::kBF16, true); }},
      {"wgrad_fp8_rows", [](OpRun& r) { Wgrad(r, true, T::kRow128, D::kE4M3, false); }},
      {"wgrad_fp8_rows_accumulate", [](OpRun& r) { Wgrad(r, true, T::kRow128, D::kE5M2, true); }},
      {"wgrad_fp8_tensor", [](OpRun& r) { Wgrad(r, true, T::kTensor, D::kE5M2, true); }},
      {"wgrad_bf16_narrow",
       [](OpRun& r) { Wgrad(r, false, T::kNone, D::kBF16, true, {.m = 64, .n = 192}); }},
      {"wgrad_bf16_odd",
       [](OpRun& r) { Wgrad(r, false, T::kNone, D::kBF16, false, {.m = 72, .n = 40}); }},
      {"wgrad_all_empty",
       [](OpRun& r) {
         Wgrad(r, true, T::kRow128, D::kE4M3, false, {{0, 0, 0}, 128, 256});
       }},
      {"wgrad_all_empty_accumulate",
       [](OpRun& r) {
         Wgrad(r, true, T::kRow128, D::kE4M3, true, {{0, 0, 0}, 128, 256});
       }},
      {"wgrad_fp8_narrow",
       [](OpRun& r) { Wgrad(r, true, T::kRow128, D::kE4M3, false, {.m = 136, .n = 140}); }},
      {"wgrad_fp8_by_block",
       [](OpRun& r) {
         Wgrad(r, true, T::kRow128, D::kE4M3, true,
               {.m = 384, .n = 640, .form = ScaleForm::kByBlock});
       }},
      // Wide and narrow tiles of C one after the other, groups of no rows too.
      {"wgrad_bf16_narrow_tiles",
       [](OpRun& r) {
         Wgrad(r, false, T::kNone, D::kBF16, false, {ManyGroups(), 192, 320});
       }},
      {"wgrad_fp8_deep",
       [](OpRun& r) {
         Wgrad(r, true, T::kRow128, D::kE4M3, false, {{7168}, 128, 128});
       }},
      {"wgrad_fp8_many",
       [](OpRun& r) {
         Wgrad(r, true, T::kRow128, D::kE4M3, true, {ManyGroups(), 64, 64});
       }},
      {"wgrad_fp8_tensor_fast",
       [](OpRun& r) {
         Wgrad(r, true, T::kTensor, D::kE5M2, false, {.n = 384, .mode = Accumulate::kFast});
       }},
      {"wgrad_mx", [](OpRun& r) { Wgrad(r, true, T::kRow32, D::kE4M3, false); }},
  };
}

}  // namespace octavo::test
