// An Ops table that counts calls of the CPU backend's functions on this thread.
#pragma once

#include "kernels/cpu/backend.h"
#include "kernels/ops.h"

namespace octavo::testing {

struct OpCounts {
  int allocate = 0, dequantize = 0, quantize_rows = 0, transpose_scaled = 0, quantize_tensor = 0;
  int quantize_blocks = 0, grouped_gemm = 0;
  int dequantize_before_fc1 = 0;  // between the last permute and a grouped GEMM
  bool after_permute = false;
};

inline thread_local OpCounts op_counts;
inline thread_local const Ops* inner_ops = nullptr;

// The table of `backend` with counting wrappers. One table a process, reused.
inline const Ops* CountingOps(const Backend& backend) {
  inner_ops = backend.ops;
  op_counts = OpCounts{};
  static Ops table = [](Ops ops) {
    ops.allocate = [](OpsContext* c, std::int64_t bytes, Memory memory) {
      ++op_counts.allocate;
      return inner_ops->allocate(c, bytes, memory);
    };
    ops.dequantize = [](OpsContext* c, const DequantizeArgs& args) {
      ++op_counts.dequantize;
      op_counts.dequantize_before_fc1 += op_counts.after_permute ? 1 : 0;
      inner_ops->dequantize(c, args);
    };
    ops.permute = [](OpsContext* c, const PermuteArgs& args) {
      op_counts.after_permute = true;
      inner_ops->permute(c, args);
    };
    ops.grouped_gemm = [](OpsContext* c, const GroupedGemmArgs& args) {
      ++op_counts.grouped_gemm;
      op_counts.after_permute = false;
      inner_ops->grouped_gemm(c, args);
    };
    ops.quantize_rows = [](OpsContext* c, const QuantizeRowsArgs& args) {
      ++op_counts.quantize_rows;
      inner_ops->quantize_rows(c, args);
    };
    ops.quantize_tensor = [](OpsContext* c, const QuantizeTensorArgs& args) {
      ++op_counts.quantize_tensor;
      inner_ops->quantize_tensor(c, args);
    };
    ops.quantize_blocks = [](OpsContext* c, const QuantizeBlocksArgs& args) {
      ++op_counts.quantize_blocks;
      inner_ops->quantize_blocks(c, args);
    };
    ops.transpose_scaled = [](OpsContext* c, const TransposeScaledArgs& args) {
      ++op_counts.transpose_scaled;
      inner_ops->transpose_scaled(c, args);
    };
    return ops;
  }(*backend.ops);
  return &table;
}

}  // namespace octavo::testing
