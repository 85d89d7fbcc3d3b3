// Grouped products over the experts of a rank: one Product per group that has rows.
#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "kernels/cpu/ops_cpu.h"
#include "kernels/gemm/product.h"
#include "kernels/quantize/quantize_block.h"

namespace octavo::cpu {
namespace {

const void* Advance(const void* data, DType dtype, std::int64_t elements) {
  return static_cast<const std::uint8_t*>(data) + elements * DTypeBytes(dtype);
}

// The promise of GroupedWgradArgs::same_by_128.
void CheckSameBy128(const QTensor& q, std::int64_t tiles) {
  for (std::int64_t t = 0; t < tiles; ++t) {
    for (std::int64_t r = 0; r < q.rows; ++r) {
      const float* column = q.dequant_scale + t * q.scale_tile_stride;
      OCTAVO_CHECK(column[r * q.scale_row_stride] == column[r / kTile * kTile * q.scale_row_stride],
                   "grouped_wgrad: D of row %lld, tile %lld is not that of its 128 rows",
                   static_cast<long long>(r), static_cast<long long>(t));
    }
  }
}

}  // namespace

void GroupedGemm(OpsContext* ops_context, const GroupedGemmArgs& args) {
  const RowGroups& groups = args.groups;
  OCTAVO_CHECK(args.a.quant.present() || args.a.k_contiguous, "grouped_gemm: A is [P, K]");
  if (args.a.quant.present() && args.b.quant.present()) {
    CheckQTensor(args.a.quant, groups.padded_rows, args.k, "grouped_gemm, A");
    CheckQTensor(args.b.quant, groups.count * args.n, args.k, "grouped_gemm, B");
  }
  const std::int64_t row_bytes = args.n * DTypeBytes(args.c_dtype);
  auto* c = static_cast<std::uint8_t*>(args.c);
  for (std::int64_t g = 0; g < groups.count; ++g) {
    const std::int64_t begin = groups.host_begin[g];
    const std::int64_t rows = groups.host_rows[g];
    ProductOperand a = MakeOperand(args.a, groups.padded_rows, args.k);
    ProductOperand b = MakeOperand(args.b, args.n, args.k);
    a.group = b.group = g;
    a.row_begin = begin;
    b.row_begin = g * args.n;
    if (a.quant == nullptr) {
      a.data = Advance(a.data, a.dtype, begin * a.ld);
    }
    if (b.quant == nullptr) {
      b.data = Advance(b.data, b.dtype, g * (b.k_contiguous ? args.n : args.k) * b.ld);
    }
    Product(Get(ops_context), {.m = rows,
                               .n = args.n,
                               .k = args.k,
                               .a = a,
                               .b = b,
                               .c = c + begin * row_bytes,
                               .c_dtype = args.c_dtype,
                               .ldc = args.n,
                               .accumulate = false});
    const std::int64_t end = std::min(begin + RoundUp(rows, kRowAlign), groups.padded_rows);
    if (end > begin + rows) {
      std::memset(c + (begin + rows) * row_bytes, 0,
                  static_cast<std::size_t>((end - begin - rows) * row_bytes));
    }
  }
}

void GroupedWgrad(OpsContext* ops_context, const GroupedWgradArgs& args) {
  const RowGroups& groups = args.groups;
  const std::int64_t columns = RoundUp(groups.padded_rows, kTile);
  if (args.a.quant.present() && args.b.quant.present()) {
    CheckQTensor(args.a.quant, args.m, columns, "grouped_wgrad, A");
    CheckQTensor(args.b.quant, args.n, columns, "grouped_wgrad, B");
  }
  if (args.same_by_128) {
    for (std::int64_t g = 0; g < groups.count; ++g) {
      const std::int64_t first = groups.host_begin[g] / kTile;
      const std::int64_t tiles = CeilDiv(groups.host_rows[g], kTile);
      for (QTensor q : {args.a.quant, args.b.quant}) {
        q.dequant_scale += first * q.scale_tile_stride;
        CheckSameBy128(q, tiles);
      }
    }
  }
  for (std::int64_t g = 0; g < groups.count; ++g) {
    const std::int64_t begin = groups.host_begin[g];
    const auto make = [&](const GemmOperand& operand, std::int64_t width) {
      // High precision is stored [P, width], which is [K, width] of this product.
      ProductOperand result = {.data = operand.data,
                               .dtype = operand.dtype,
                               .k_contiguous = false,
                               .ld = operand.ld != 0 ? operand.ld : width,
                               .quant = operand.quant.present() ? &operand.quant : nullptr,
                               .k_begin = begin,
                               .group = g};
      if (result.quant == nullptr) {
        result.data = Advance(result.data, result.dtype, begin * result.ld);
        result.k_begin = 0;
      }
      return result;
    };
    // Padding is zero in every operand, so the contraction stops at the last real row.
    Product(Get(ops_context), {.m = args.m,
                               .n = args.n,
                               .k = groups.host_rows[g],
                               .a = make(args.a, args.m),
                               .b = make(args.b, args.n),
                               .c = args.c + g * args.m * args.n,
                               .c_dtype = DType::kF32,
                               .ldc = args.n,
                               .accumulate = args.accumulate});
  }
}

}  // namespace octavo::cpu
