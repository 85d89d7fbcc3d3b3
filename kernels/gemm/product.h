// One matrix product over any operand that the training code has: FP32, BF16, FP8 in every tiling.
// gemm and grouped_gemm are loops around it.
//
// FP32 comes from sgemm. BF16 panels are widened (exact). FP8 operands take one of two ways:
//  * exact: every D is a power of two of moderate size (or its tile is all zero). Then decode(q)·D
//  and
//    every product are exact FP32 numbers, so dequantised panels go through one sgemm.
//  * literal: sgemm over the codes' values of one K tile, then accumulator · D_A · D_B, one after
//  the
//    other, added to C in FP32 (NUMERICS 2). For FP32 scales.
// Both stay below 1e-6 of the FP64 product of the same operands (gemm_test).
#pragma once

#include <cstdint>

#include "kernels/cpu/context.h"
#include "kernels/ops.h"

namespace octavo::cpu {

// Rows of a GEMM operand. FP8 operands may be a window of a larger tensor.
struct ProductOperand {
  const void* data = nullptr;  // kF32 or kBF16, [rows, K] or [K, rows]
  DType dtype = DType::kF32;
  bool k_contiguous = true;
  std::int64_t ld = 0;
  const QTensor* quant = nullptr;  // FP8: element (r, k) is quant(row_begin + r, k_begin + k)
  std::int64_t row_begin = 0, k_begin = 0;
  std::int64_t group = 0;  // which D of a kTensor operand
};

// C[M,N] (+)= Σ_k A(m,k)·B(n,k); accumulate needs kF32.
struct ProductArgs {
  std::int64_t m, n, k;
  ProductOperand a, b;
  void* c;
  DType c_dtype;
  std::int64_t ldc;
  bool accumulate;
};
void Product(Context& context, const ProductArgs& args);

// The operand of ops.h for a product with `rows` rows and contraction k.
ProductOperand MakeOperand(const GemmOperand& operand, std::int64_t rows, std::int64_t k);

}  // namespace octavo::cpu
