// Bytes and FLOPs of an operation, for profiles: each input read once, each output written once,
// matrix products as 2·m·n·k. Zero where nobody counts them.
#pragma once

#include "kernels/ops.h"

namespace octavo {

struct OpWork {
  double bytes = 0, flops = 0;
};

template <class Args>
OpWork WorkOf(const Args&) {
  return {};
}

OpWork WorkOf(const CopyArgs& args);
OpWork WorkOf(const CastArgs& args);
OpWork WorkOf(const AxpbyArgs& args);
OpWork WorkOf(const QuantizeRowsArgs& args);
OpWork WorkOf(const QuantizeBlocksArgs& args);
OpWork WorkOf(const QuantizeTensorArgs& args);
OpWork WorkOf(const AmaxArgs& args);
OpWork WorkOf(const DequantizeArgs& args);
OpWork WorkOf(const TransposeScaledArgs& args);
OpWork WorkOf(const GemmArgs& args);
OpWork WorkOf(const GroupedGemmArgs& args);  // rows as the host knows them, padding not counted
OpWork WorkOf(const GroupedWgradArgs& args);
OpWork WorkOf(const PermuteArgs& args);
OpWork WorkOf(const CombineArgs& args);
OpWork WorkOf(const SwigluForwardArgs& args);
OpWork WorkOf(const SwigluBackwardArgs& args);
OpWork WorkOf(const RmsNormForwardArgs& args);
OpWork WorkOf(const RmsNormBackwardArgs& args);
OpWork WorkOf(const AttentionForwardArgs& args);  // causal: half of the square
OpWork WorkOf(const AttentionBackwardArgs& args);
OpWork WorkOf(const CrossEntropyArgs& args);
OpWork WorkOf(const AdamWArgs& args);
OpWork WorkOf(const SumSquaresArgs& args);

}  // namespace octavo
