// Every compute operation of Ops, once: table field, function name, Args type. Backends use it to
// declare and fill their tables, so an operation that is missing does not link.
#pragma once

#define OCTAVO_COMPUTE_OPS(X)                                  \
  X(cast, Cast, CastArgs)                                      \
  X(axpby, Axpby, AxpbyArgs)                                   \
  X(quantize_rows, QuantizeRows, QuantizeRowsArgs)             \
  X(quantize_blocks, QuantizeBlocks, QuantizeBlocksArgs)       \
  X(amax, Amax, AmaxArgs)                                      \
  X(scale_from_amax, ScaleFromAmax, ScaleFromAmaxArgs)         \
  X(quantize_tensor, QuantizeTensor, QuantizeTensorArgs)       \
  X(dequantize, Dequantize, DequantizeArgs)                    \
  X(transpose_scaled, TransposeScaled, TransposeScaledArgs)    \
  X(sqnr, Sqnr, SqnrArgs)                                      \
  X(gemm, Gemm, GemmArgs)                                      \
  X(grouped_gemm, GroupedGemm, GroupedGemmArgs)                \
  X(grouped_wgrad, GroupedWgrad, GroupedWgradArgs)             \
  X(router_forward, RouterForward, RouterForwardArgs)          \
  X(router_backward, RouterBackward, RouterBackwardArgs)       \
  X(router_bias_update, RouterBiasUpdate, RouterBiasUpdateArgs) \
  X(route_index, RouteIndex, RouteIndexArgs)                   \
  X(permute, Permute, PermuteArgs)                             \
  X(pad_rows, PadRows, PadRowsArgs)                            \
  X(expand_segments, ExpandSegments, ExpandSegmentsArgs)       \
  X(combine, Combine, CombineArgs)                             \
  X(swiglu_forward, SwigluForward, SwigluForwardArgs)          \
  X(swiglu_backward, SwigluBackward, SwigluBackwardArgs)       \
  X(rms_norm_forward, RmsNormForward, RmsNormForwardArgs)      \
  X(rms_norm_backward, RmsNormBackward, RmsNormBackwardArgs)   \
  X(rope, Rope, RopeArgs)                                      \
  X(attention_forward, AttentionForward, AttentionForwardArgs) \
  X(attention_backward, AttentionBackward, AttentionBackwardArgs) \
  X(embedding_forward, EmbeddingForward, EmbeddingForwardArgs) \
  X(embedding_backward, EmbeddingBackward, EmbeddingBackwardArgs) \
  X(cross_entropy, CrossEntropy, CrossEntropyArgs)             \
  X(adamw, AdamW, AdamWArgs)                                   \
  X(sum_squares, SumSquares, SumSquaresArgs)                   \
  X(count_nonfinite, CountNonfinite, CountNonfiniteArgs)
