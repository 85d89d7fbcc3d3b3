#include <algorithm>
#include <bit>
#include <cstring>

#include "base/check.h"
#include "kernels/cpu/blas.h"
#include "kernels/cpu/rows.h"
#include "kernels/gemm/product.h"
#include "kernels/quantize/quantize_block.h"

namespace octavo::cpu {
namespace {

// Panels bound the FP32 scratch (A: kRowsA·K, B: kRowsB·K floats) and are large enough that sgemm
// does not notice. Re-widening A once per kRowsB columns costs 1/1000 of the product.
constexpr std::int64_t kRowsA = 1024;
constexpr std::int64_t kRowsB = 4096;
// The literal way's piece of C, with its accumulators, stays in the second-level cache.
constexpr std::int64_t kLiteralRows = 256;
constexpr std::int64_t kLiteralCols = 512;

// Largest D of the exact way: |decode(q)·D| < 2^56, so that sums of 2^14 products stay finite. No
// lower limit: decode(q)·2^-126 still has its last place above 2^-149, and products lose bits to
// underflow only where C itself is next to the subnormal numbers.
constexpr float kExactMax = 0x1p40f;

bool IsPowerOfTwo(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  return (bits & 0x807FFFFFu) == 0 && bits != 0 && bits != 0x7F800000u;
}

std::int64_t TileColumns(const QTensor& q) { return q.tiling == Tiling::kRow32 ? kMxBlock : kTile; }

float DequantScaleOf(const ProductOperand& operand, std::int64_t row, std::int64_t k) {
  const QTensor& q = *operand.quant;
  if (q.tiling == Tiling::kTensor) {
    return q.dequant_scale[operand.group];
  }
  const std::int64_t r = operand.row_begin + row;
  return q.dequant_scale[(q.tiling == Tiling::kBlock128 ? r / kTile : r) * q.scale_row_stride +
                         (operand.k_begin + k) / TileColumns(q) * q.scale_tile_stride];
}

// May operand be dequantised first without changing a bit of any product?
bool ExactWhenDequantised(const ProductOperand& operand, std::int64_t rows, std::int64_t k) {
  const std::int64_t tile = TileColumns(*operand.quant);
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t c = 0; c < k; c += tile) {
      const float d = DequantScaleOf(operand, r, c);
      if (!IsPowerOfTwo(d) || d > kExactMax) {
        return false;
      }
    }
  }
  return true;
}

// An FP32 panel: rows [begin, begin + rows) of an operand.
struct Panel {
  const float* data;
  std::int64_t ld;
  bool k_contiguous;
};

// How FP8 codes become numbers.
enum class Decoding : std::uint8_t { kValues, kDequantised };

Panel Widen(const ProductOperand& operand, std::int64_t begin, std::int64_t rows, std::int64_t k,
            Decoding decoding, Scratch& scratch) {
  if (operand.quant != nullptr) {
    float* out = scratch.Get<float>(rows * k);
    const QTensor& q = *operand.quant;
    for (std::int64_t r = 0; r < rows; ++r) {
      const std::int64_t row = operand.row_begin + begin + r;
      if (decoding == Decoding::kDequantised) {
        DecodeElements(
            {.src = &q, .row = row, .col_begin = operand.k_begin, .n = k, .group = operand.group},
            out + r * k);
      } else {
        DecodeRow(q.format, q.q + row * q.stride() + operand.k_begin, 1.0f, k, out + r * k);
      }
    }
    return {out, k, true};
  }
  const std::int64_t first = operand.k_contiguous ? begin * operand.ld : begin;
  if (operand.dtype == DType::kF32) {
    return {static_cast<const float*>(operand.data) + first, operand.ld, operand.k_contiguous};
  }
  const std::int64_t lines = operand.k_contiguous ? rows : k;
  const std::int64_t length = operand.k_contiguous ? k : rows;
  float* out = scratch.Get<float>(lines * length);
  for (std::int64_t line = 0; line < lines; ++line) {
    LoadRow(operand.data, operand.dtype, first + line * operand.ld, length, out + line * length);
  }
  return {out, length, operand.k_contiguous};
}

// C = A·Bᵀ + beta·C on panels.
struct PanelProduct {
  std::int64_t m, n, k;
  Panel a, b;
  float* c;
  std::int64_t ldc;
  float beta;
};
void SgemmPanels(const PanelProduct& p) {
  Sgemm({.m = p.m,
         .n = p.n,
         .k = p.k,
         .a = p.a.data,
         .a_transposed = p.a.k_contiguous ? Transposed::kNo : Transposed::kYes,
         .lda = p.a.ld,
         .b = p.b.data,
         .b_transposed = p.b.k_contiguous ? Transposed::kYes : Transposed::kNo,
         .ldb = p.b.ld,
         .c = p.c,
         .ldc = p.ldc,
         .beta = p.beta});
}

// c += (sum · d_a) · d_b, element by element.
OCTAVO_MULTIVERSION void AddScaled(const float* sum, float d_a, const float* d_b, std::int64_t n,
                                   float* c) {
  for (std::int64_t j = 0; j < n; ++j) {
    c[j] += (sum[j] * d_a) * d_b[j];
  }
}

// The literal way on one panel pair. First rows of the panels within the operands: a_begin,
// b_begin.
void LiteralProduct(Context& context, const ProductArgs& args, std::int64_t a_begin,
                    std::int64_t b_begin, const PanelProduct& p) {
  const bool whole_k =
      args.a.quant->tiling == Tiling::kTensor && args.b.quant->tiling == Tiling::kTensor;
  const auto step_of = [&](const QTensor& q) {
    return q.tiling == Tiling::kTensor ? p.k : TileColumns(q);
  };
  const std::int64_t step = whole_k ? std::max<std::int64_t>(p.k, 1)
                                    : std::min(step_of(*args.a.quant), step_of(*args.b.quant));
  float* sum = context.product.Get<float>(kLiteralRows * kLiteralCols);
  float d_b[kLiteralCols];
  for (std::int64_t i = 0; i < p.m; ++i) {
    if (p.beta == 0) {
      std::fill_n(p.c + i * p.ldc, p.n, 0.0f);
    }
  }
  for (std::int64_t i0 = 0; i0 < p.m; i0 += kLiteralRows) {
    const std::int64_t rows = std::min(kLiteralRows, p.m - i0);
    for (std::int64_t j0 = 0; j0 < p.n; j0 += kLiteralCols) {
      const std::int64_t cols = std::min(kLiteralCols, p.n - j0);
      for (std::int64_t k0 = 0; k0 < p.k; k0 += step) {
        SgemmPanels({.m = rows,
                     .n = cols,
                     .k = std::min(step, p.k - k0),
                     .a = {p.a.data + i0 * p.a.ld + k0, p.a.ld, true},
                     .b = {p.b.data + j0 * p.b.ld + k0, p.b.ld, true},
                     .c = sum,
                     .ldc = kLiteralCols,
                     .beta = 0});
        for (std::int64_t j = 0; j < cols; ++j) {
          d_b[j] = DequantScaleOf(args.b, b_begin + j0 + j, k0);
        }
        for (std::int64_t i = 0; i < rows; ++i) {
          AddScaled(sum + i * kLiteralCols, DequantScaleOf(args.a, a_begin + i0 + i, k0), d_b, cols,
                    p.c + (i0 + i) * p.ldc + j0);
        }
      }
    }
  }
}

void CheckOperand(const ProductOperand& operand, const char* name) {
  if (operand.quant != nullptr) {
    OCTAVO_CHECK(IsFp8(operand.quant->format) && operand.quant->dequant_scale != nullptr &&
                     operand.quant->tiling != Tiling::kNone,
                 "operand %s: an FP8 operand needs an FP8 format, a tiling and dequant_scales",
                 name);
    OCTAVO_CHECK(operand.k_begin % kTile == 0, "operand %s: K starts at %lld inside a tile", name,
                 static_cast<long long>(operand.k_begin));
  } else {
    OCTAVO_CHECK(operand.dtype == DType::kF32 || operand.dtype == DType::kBF16,
                 "operand %s: dtype %d is neither FP32 nor BF16", name,
                 static_cast<int>(operand.dtype));
  }
}

}  // namespace

void Product(Context& context, const ProductArgs& args) {
  CheckOperand(args.a, "A");
  CheckOperand(args.b, "B");
  OCTAVO_CHECK((args.a.quant != nullptr) == (args.b.quant != nullptr),
               "both operands must be FP8 or both high precision");
  OCTAVO_CHECK(args.c_dtype == DType::kF32 || (args.c_dtype == DType::kBF16 && !args.accumulate),
               "C is FP32, or BF16 without accumulation");
  if (args.m == 0 || args.n == 0) {
    return;
  }
  const bool literal = args.a.quant != nullptr && !(ExactWhenDequantised(args.a, args.m, args.k) &&
                                                    ExactWhenDequantised(args.b, args.n, args.k));
  const Decoding decoding = literal ? Decoding::kValues : Decoding::kDequantised;
  for (std::int64_t j = 0; j < args.n; j += kRowsB) {
    const std::int64_t cols = std::min(kRowsB, args.n - j);
    const Panel b = Widen(args.b, j, cols, args.k, decoding, context.operand_b);
    for (std::int64_t i = 0; i < args.m; i += kRowsA) {
      const std::int64_t rows = std::min(kRowsA, args.m - i);
      const Panel a = Widen(args.a, i, rows, args.k, decoding, context.operand_a);
      const bool narrow = args.c_dtype == DType::kBF16;
      PanelProduct p = {.m = rows,
                        .n = cols,
                        .k = args.k,
                        .a = a,
                        .b = b,
                        .c = narrow ? context.wide_c.Get<float>(rows * cols)
                                    : static_cast<float*>(args.c) + i * args.ldc + j,
                        .ldc = narrow ? cols : args.ldc,
                        .beta = args.accumulate ? 1.0f : 0.0f};
      if (literal) {
        LiteralProduct(context, args, i, j, p);
      } else {
        SgemmPanels(p);
      }
      for (std::int64_t r = 0; narrow && r < rows; ++r) {
        StoreRow(p.c + r * cols, cols, args.c, args.c_dtype, (i + r) * args.ldc + j);
      }
    }
  }
}

ProductOperand MakeOperand(const GemmOperand& operand, std::int64_t rows, std::int64_t k) {
  if (operand.quant.present()) {
    return {.quant = &operand.quant};
  }
  return {.data = operand.data,
          .dtype = operand.dtype,
          .k_contiguous = operand.k_contiguous,
          .ld = operand.ld != 0 ? operand.ld : (operand.k_contiguous ? k : rows)};
}

}  // namespace octavo::cpu
