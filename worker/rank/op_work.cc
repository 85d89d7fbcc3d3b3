#include "worker/rank/op_work.h"

#include <numeric>

namespace octavo {
namespace {

double Of(std::int64_t rows, std::int64_t cols) {
  return static_cast<double>(rows) * static_cast<double>(cols);
}
double Width(DType dtype) { return static_cast<double>(DTypeBytes(dtype)); }

// One byte an element and the FP32 scales of its tiles.
double QuantBytes(const QTensor& q) {
  if (!q.present()) {
    return 0;
  }
  const double elements = Of(q.rows, q.cols);
  switch (q.tiling) {
    case Tiling::kRow32:
      return elements * (1 + 4.0 / 32);
    case Tiling::kRow128:
      return elements * (1 + 4.0 / 128);
    default:
      return elements;
  }
}

double RealRows(const RowGroups& groups) {
  return static_cast<double>(
      std::accumulate(groups.host_rows, groups.host_rows + groups.count, std::int64_t{0}));
}

double OperandBytes(const GemmOperand& o, double elements) {
  return elements * (o.quant.present() ? 1.0 : Width(o.dtype));
}

// Query-key pairs under the causal mask, over all heads.
double Pairs(std::int64_t batch, std::int64_t sequence, std::int32_t heads) {
  return Of(batch, heads) * static_cast<double>(sequence) * static_cast<double>(sequence + 1) / 2;
}

}  // namespace

OpWork WorkOf(const CopyArgs& a) {
  return {.bytes = (a.kind == CopyKind::kOnDevice ? 2.0 : 1.0) * static_cast<double>(a.bytes)};
}

OpWork WorkOf(const CastArgs& a) {
  return {.bytes = Of(a.src.rows, a.src.cols) * (Width(a.src.dtype) + Width(a.dst.dtype))};
}

OpWork WorkOf(const AxpbyArgs& a) {
  return {.bytes = static_cast<double>(a.n) *
                   (Width(a.x_dtype) + (a.b == 0.0f ? 1.0 : 2.0) * Width(a.y_dtype))};
}

OpWork WorkOf(const QuantizeRowsArgs& a) {
  return {.bytes = Of(a.groups.padded_rows, a.cols) * Width(a.x_dtype) + QuantBytes(a.row) +
                   QuantBytes(a.col)};
}

OpWork WorkOf(const QuantizeBlocksArgs& a) {
  const double copies = (a.row.present() ? 1 : 0) + (a.col.present() ? 1 : 0);
  return {.bytes = Of(a.groups * a.n, a.k) * (4 + copies)};
}

OpWork WorkOf(const QuantizeTensorArgs& a) {
  return {.bytes = Of(a.groups.padded_rows, a.cols) * Width(a.x_dtype) + QuantBytes(a.row) +
                   QuantBytes(a.col)};
}

OpWork WorkOf(const AmaxArgs& a) {
  return {.bytes = Of(a.groups.padded_rows, a.cols) * Width(a.x_dtype)};
}

OpWork WorkOf(const DequantizeArgs& a) {
  return {.bytes = QuantBytes(a.src) + Of(a.src.rows, a.src.cols) * Width(a.dst_dtype)};
}

OpWork WorkOf(const TransposeScaledArgs& a) {
  return {.bytes = QuantBytes(a.src) + QuantBytes(a.dst)};
}

OpWork WorkOf(const GemmArgs& a) {
  return {.bytes = OperandBytes(a.a, Of(a.m, a.k)) + OperandBytes(a.b, Of(a.n, a.k)) +
                   (a.accumulate ? 2 : 1) * Of(a.m, a.n) * Width(a.c_dtype),
          .flops = 2 * Of(a.m, a.n) * static_cast<double>(a.k)};
}

OpWork WorkOf(const GroupedGemmArgs& a) {
  const double rows = RealRows(a.groups);
  return {.bytes = OperandBytes(a.a, rows * static_cast<double>(a.k)) +
                   OperandBytes(a.b, Of(a.n, a.k) * a.groups.count) +
                   rows * static_cast<double>(a.n) * Width(a.c_dtype),
          .flops = 2 * rows * Of(a.n, a.k)};
}

OpWork WorkOf(const GroupedWgradArgs& a) {
  const double rows = RealRows(a.groups);
  return {.bytes = OperandBytes(a.a, rows * static_cast<double>(a.m)) +
                   OperandBytes(a.b, rows * static_cast<double>(a.n)) +
                   (a.accumulate ? 2 : 1) * Of(a.m, a.n) * a.groups.count * 4,
          .flops = 2 * rows * Of(a.m, a.n)};
}

OpWork WorkOf(const PermuteArgs& a) {
  const double row = static_cast<double>(a.payload_bytes) + 4.0 * a.tiles;
  return {.bytes = static_cast<double>(a.rows) * (1 + a.fanout) * row};
}

OpWork WorkOf(const CombineArgs& a) {
  return {.bytes = Of(a.tokens, a.hidden) *
                   (a.fanout * Width(a.src_dtype) + (a.accumulate ? 2 : 1) * Width(a.y_dtype))};
}

OpWork WorkOf(const SwigluForwardArgs& a) {
  const double elements = Of(a.groups.padded_rows, a.f);
  return {.bytes = elements * Width(a.dtype) * (a.act != nullptr ? 3 : 2) + QuantBytes(a.quant) +
                   QuantBytes(a.quant_col)};
}

OpWork WorkOf(const SwigluBackwardArgs& a) {
  const double elements = Of(a.groups.padded_rows, a.f);
  return {.bytes = elements * Width(a.dtype) * (a.d_gate_up != nullptr ? 5 : 3) +
                   QuantBytes(a.quant) + QuantBytes(a.quant_col)};
}

OpWork WorkOf(const RmsNormForwardArgs& a) {
  const double copies = 2 + (a.residual != nullptr ? 1 : 0) + (a.residual_out != nullptr ? 1 : 0);
  return {.bytes = Of(a.rows, a.cols) * Width(a.dtype) * copies};
}

OpWork WorkOf(const RmsNormBackwardArgs& a) {
  return {.bytes = Of(a.rows, a.cols) * Width(a.dtype) * (a.d_residual != nullptr ? 4 : 3)};
}

OpWork WorkOf(const AttentionForwardArgs& a) {
  const double rows = Of(a.batch, a.sequence), heads = 2.0 * (a.heads + a.kv_heads);
  return {.bytes = rows * heads * a.head_dim * Width(a.dtype),
          .flops = 4 * Pairs(a.batch, a.sequence, a.heads) * a.head_dim};
}

OpWork WorkOf(const AttentionBackwardArgs& a) {
  const double rows = Of(a.batch, a.sequence), heads = 4.0 * (a.heads + a.kv_heads);
  return {.bytes = rows * heads * a.head_dim * Width(a.dtype),
          .flops = 10 * Pairs(a.batch, a.sequence, a.heads) * a.head_dim};
}

OpWork WorkOf(const CrossEntropyArgs& a) {
  return {.bytes = Of(a.rows, a.vocab) * Width(a.dtype) * (a.dloss != 0 ? 2 : 1)};
}

OpWork WorkOf(const AdamWArgs& a) {
  return {.bytes = static_cast<double>(a.n) * (12 + 4 * Width(a.moment_dtype) +
                                               (a.copy != nullptr ? Width(a.copy_dtype) : 0))};
}

OpWork WorkOf(const SumSquaresArgs& a) { return {.bytes = 4.0 * static_cast<double>(a.n)}; }

}  // namespace octavo
