// The one interface between the training code and the numbers.
//
// A backend is a struct of function pointers; each operation takes one Args struct of plain C++
// values. The CPU backend (kernels/cpu/backend.cc) is the specification; the CUDA backend comes from
// liboctavo_cuda.so (ops_abi.h). Layers are written once against this file.
//
// Rules that hold for every operation:
//  * Pointers are device pointers of the backend unless the name starts with host_.
//  * Calls are enqueued on the compute lane in order (copies on the lane they name); nothing waits
//    for the device but synchronize and synchronize_lane.
//  * Shape and type violations end the process (OCTAVO_CHECK): they are bugs of the caller.
//    Device faults are sticky; poll_error reports them once a step.
//  * rows == 0 or an empty group is legal everywhere and writes nothing but documented zeros.
//  * Offsets are 64-bit. No operation allocates device memory; scratch comes from `workspace`.
//  * "act dtype" is kBF16, or kF32 under recipe fp32. Accumulations over rows (weight gradients) add
//    to FP32 buffers when `accumulate` is set and overwrite otherwise.
//  * A StatSlot pointer may be null (no statistics wanted). With groups, slot g belongs to group g.
// Shape letters: T tokens, H hidden, E experts, k experts per token, F expert hidden, P padded rows.
#pragma once

#include <cstdint>

#include "kernels/stats.h"
#include "kernels/tensor.h"

namespace octavo {

// ---------------------------------------------------------------- memory and streams

enum class Memory : std::uint8_t { kDevice, kHostPinned };
enum class CopyKind : std::uint8_t { kToDevice, kToHost, kOnDevice };

// A lane runs what is put on it in order; lanes run side by side unless `order` says otherwise. All
// operations run on kCompute. kCopy carries what comes and goes while a step computes (tokens,
// counts, statistics); kComm is the collectives' (worker/comm/nccl.cc). Whoever hands a buffer from
// one lane to another orders them, and again before the buffer is used anew. On the CPU everything
// is done when its call returns, so there lanes are one.
enum class Lane : std::uint8_t { kCompute, kCopy, kComm };
inline constexpr int kLanes = 3;

struct CopyArgs {
  void* dst;
  const void* src;
  std::int64_t bytes;
  CopyKind kind;
  Lane lane = Lane::kCompute;
};

// dst[r, c] = cast(src[r, c]); kF32 <-> kBF16 (round to nearest even) or same type.
struct CastArgs {
  Mat src, dst;
};

// y = a·x + b·y over n elements of act dtype or FP32, computed in FP32, rounded once.
struct AxpbyArgs {
  const void* x;
  DType x_dtype;
  float a;
  void* y;
  DType y_dtype;
  float b;
  std::int64_t n;
};

// ---------------------------------------------------------------- quantise (NUMERICS 2 to 4, 7)

// How dequant_scales are chosen.
struct QuantizeRule {
  DType format = DType::kE4M3;
  Tiling tiling = Tiling::kRow128;
  bool pow2 = false;       // Q rounded down to a power of two (mantissa cleared); amax 0 → D = 2^-126
  int margin = 0;          // per tensor only: M · 2^-margin
  float min_dequant_scale = 0;  // > 0: Q is at most 1/min_dequant_scale (before pow2 rounding); not MX
  // kRow32 always uses the MX rule: e8m0 exponent of amax/M rounded up, D = 2^(e8m0-127).
};

// Quantise x [rows, cols] by row tiles (kRow128 or kRow32 along cols).
// `row` gets the row-wise copy; `col`, when present, the column-wise one: payload [cols, P] with
// tiles along rows (each group padded by itself), quantised from x in the same pass. Padding rows of
// `row` and padding columns of `col` are written as zero codes with D = 2^-126 (pow2, MX) or 1.
// Either of row/col may be absent (q == nullptr), not both.
struct QuantizeRowsArgs {
  const void* x;        // [P, cols], row-major
  DType x_dtype;        // kBF16 or kF32
  std::int64_t cols;    // multiple of the tile
  RowGroups groups;     // which rows are real; P = groups.padded_rows. For dense tensors P may be any
                        // number of rows (count 1, begin 0, rows == padded_rows) and `col` then needs
                        // P % 128 == 0 or writes a zero-padded last tile (col.cols = RoundUp(P, 128)).
  QuantizeRule rule;
  QTensor row;          // [P, cols]
  QTensor col;          // [cols, RoundUp(P, 128)]
  StatSlot* stats;      // [groups.count]: one element counts once, though it may be cast twice;
                        // counters are of `row` when present, else of `col`
};

// Quantise weights w [G·N, K] by 128×128 blocks, and write the transposed copy too.
struct QuantizeBlocksArgs {
  const float* w;       // [groups, n, k] FP32 masters
  std::int64_t groups, n, k;
  QuantizeRule rule;    // tiling kBlock128
  QTensor row;          // [groups·n, k], D [groups][n/128][scale_row_stride]
  QTensor col;          // [groups·k, n] the same codes transposed (a 2-D block is its own transpose)
  StatSlot* stats;      // [groups]
};

// amax per group, over finite elements; adds elements/nonfinite to nothing (statistics come from the
// cast). amax[g] = max over rows of group g; 0 for an empty group. has_nonfinite[g] (may be null) = 1
// when the group held a NaN or infinity.
struct AmaxArgs {
  const void* x;        // [P, cols]
  DType x_dtype;
  std::int64_t cols;
  RowGroups groups;
  float* amax;          // [groups.count]
  std::int32_t* has_nonfinite;
};

// quant_scale[g] and dequant_scale[g] from amax[g] by NUMERICS 2 (all seven recipes' per-tensor rule).
struct ScaleFromAmaxArgs {
  const float* amax;    // [n]
  std::int64_t n;
  QuantizeRule rule;
  float* quant_scale;   // [n]
  float* dequant_scale; // [n]
};

// Cast with one given quant_scale per group; writes D = 1/Q to row.dequant_scale[g] (and col's).
struct QuantizeTensorArgs {
  const void* x;             // [P, cols]
  DType x_dtype;
  std::int64_t cols;
  RowGroups groups;
  const float* quant_scale;  // [groups.count]
  DType format;
  QTensor row;               // [P, cols], may be absent
  QTensor col;               // [cols, RoundUp(P, 128)], may be absent
  StatSlot* stats;           // [groups.count]; amax of what was seen is recorded here too
};

// x̂ = decode(q)·D into act dtype or FP32.
struct DequantizeArgs {
  QTensor src;
  RowGroups groups;     // for kTensor (which D) and to zero padding rows; count 0: all rows one group
  void* dst;            // [rows, cols]
  DType dst_dtype;
};

// Scaling-aware transpose (NUMERICS 6): row-tiled pow2 E4M3 [P, cols] → [cols, P], tiles along rows.
// Exponent arithmetic only. stats gets transpose_flushed (real rows only).
struct TransposeScaledArgs {
  QTensor src;          // kRow128, pow2
  RowGroups groups;
  QTensor dst;          // [cols, P], kRow128
  StatSlot* stats;      // [groups.count]
};

// Adds Σx² and Σ(x−x̂)² of real rows to slot (FP64).
struct SqnrArgs {
  const void* x;        // [P, cols]
  DType x_dtype;
  std::int64_t cols;
  RowGroups groups;
  QTensor q;            // row-wise copy of x, or column-wise when q_is_transposed
  bool q_is_transposed;
  SqnrSlot* slot;       // one for the whole tensor
};

// ---------------------------------------------------------------- matrix products

enum class Accumulate : std::uint8_t { kPromoted, kFast };

// One operand of C[M,N] = Σ_k A(m,k)·B(n,k).
// High precision (kF32, kBF16): k_contiguous says whether the memory is [M,K] (true) or [K,M].
// FP8: `quant` is set and is [M, K] with K contiguous.
struct GemmOperand {
  const void* data = nullptr;
  DType dtype = DType::kF32;
  bool k_contiguous = true;
  std::int64_t ld = 0;  // elements; 0: packed
  QTensor quant;        // used when quant.present()
};

// C[M,N] (+)= A·Bᵀ. Both operands FP8 or both high precision.
// FP32 inputs use true FP32 arithmetic (router), never TF32.
struct GemmArgs {
  std::int64_t m, n, k;
  GemmOperand a, b;
  void* c;              // [M, N]
  DType c_dtype;        // kF32 or kBF16
  std::int64_t ldc;     // 0: n
  bool accumulate;      // c_dtype kF32 only
  Accumulate mode;
};

// Rows grouped by expert: C rows of group g = A rows of group g · B[g]ᵀ (fprop, dgrad).
// Padding rows of C are written as zeros.
struct GroupedGemmArgs {
  RowGroups groups;
  std::int64_t n, k;
  GemmOperand a;        // [P, K]; FP8 kTensor: one D per group
  GemmOperand b;        // [groups, N, K] (k_contiguous) or [groups, K, N]; FP8: quant [groups·N, K]
  void* c;              // [P, N]
  DType c_dtype;
  Accumulate mode;
};

// Weight gradients: C[g] [M,N] (+)= Σ over rows t of group g of A(t,m)·B(t,n).
// High precision: A [P, M], B [P, N] as stored. FP8: A.quant [M, P], B.quant [N, P] (column-wise).
// An empty group writes zeros, or adds nothing when accumulating.
struct GroupedWgradArgs {
  RowGroups groups;
  std::int64_t m, n;
  GemmOperand a, b;
  float* c;             // [groups, M, N] FP32
  bool accumulate;
  Accumulate mode;
  // FP8 of 1×128 tiles: D is the same in all of every 128 rows of A and of B, as transpose_scaled
  // leaves it. A promise that saves work, not another layout.
  bool same_by_128 = false;
};

// ---------------------------------------------------------------- router (NUMERICS 8), FP32

enum class RouterScore : std::uint8_t { kSoftmax, kTopKSoftmax, kSigmoid };

struct RouterConfig {
  std::int32_t experts, experts_per_token;
  RouterScore score;
  bool normalize_topk;
  float routed_scaling_factor;
  std::int32_t n_group, topk_group;  // 1, 1: no groups
};

// Scores, selection and weights from logits. Ties go to the lower index. Non-finite logits select
// deterministically (NaN ranks below −∞) and yield NaN weights.
struct RouterForwardArgs {
  RouterConfig config;
  std::int64_t tokens;
  std::int64_t tokens_per_segment;   // statistics per segment (sequence); == tokens for one segment
  const float* logits;               // [T, E]
  const float* bias;                 // [E] selection bias, or null
  std::int32_t* topk_index;          // [T, k] in order of decreasing selection value
  float* topk_weight;                // [T, k] routing weight p (unbiased score, normalised, scaled)
  std::int64_t* counts;              // [segments, E] tokens per expert
  float* score_sum;                  // [segments, E] Σ_t score (softmax over all / sigmoid)
  float* logsumexp;                  // [T]
  double* z_sum;                     // [1] Σ_t logsumexp²
};

// dlogits [T,E] from the routing weights' gradient, auxiliary loss and z-loss.
//   aux: loss = Σ_seg aux_coeff[seg,e]·(score_sum[seg,e]) ⇒ d score(t,e) = aux_coeff[seg(t), e]
//        (the layer folds coeff·E·f_i/(tokens) and the loss weight into aux_coeff)
//   z:   d logit(t,e) += z_coeff · 2·lse(t)·softmax(t,e)
struct RouterBackwardArgs {
  RouterConfig config;
  std::int64_t tokens, tokens_per_segment;
  const float* logits;               // [T, E]
  const std::int32_t* topk_index;    // [T, k]
  const float* dtopk_weight;         // [T, k]
  const float* aux_coeff;            // [segments, E] or null
  float z_coeff;
  const float* logsumexp;            // [T]
  float* dlogits;                    // [T, E]
};

// bias[e] += rate · sign(total − E·counts[e]), total = Σ counts (64-bit integers; NUMERICS 8b).
struct RouterBiasUpdateArgs {
  const std::int64_t* counts;  // [E] over all ranks
  std::int32_t experts;
  float rate;
  float* bias;                 // [E]
};

// ---------------------------------------------------------------- permute (NUMERICS 6, 8)

// Where each (token, choice) goes. Destinations are ordered by (expert, token).
//   counts[e] = tokens of expert e; begin[e] = exclusive sum of RoundUp(counts, align);
//   dest_row[t, j] = begin[topk_index[t,j]] + rank of t among the tokens of that expert.
struct RouteIndexArgs {
  std::int64_t tokens;
  std::int32_t experts, experts_per_token;
  const std::int32_t* topk_index;  // [T, k]
  std::int64_t align;              // 1 (send order) or kRowAlign (padded groups, one rank)
  std::int64_t* counts;            // [E]
  std::int64_t* begin;             // [E]
  std::int32_t* dest_row;          // [T, k]
  void* workspace;                 // route_index_workspace_bytes
};

// Rows spread over memory: payload, optional dequant_scales, optional routing weight. Byte strides
// let one type describe split arrays and the packed records of an all-to-all message.
struct RowSet {
  std::uint8_t* payload = nullptr;
  std::int64_t payload_stride = 0;     // bytes between rows
  std::uint8_t* dequant_scale = nullptr;  // FP32 values at byte offsets row·row_stride + tile·tile_stride
  std::int64_t scale_row_stride = 0, scale_tile_stride = 0;  // bytes
  std::uint8_t* weight = nullptr;      // FP32 p (or dp), one per row
  std::int64_t weight_stride = 0;      // bytes
};

// dst[dest_row[r, j]] = src[r] for j < fanout; dest_row < 0 is skipped. Reads each source row once.
// src.weight is [rows, fanout] FP32 (element j goes with copy j; weight_stride is bytes per row).
struct PermuteArgs {
  RowSet src, dst;
  std::int64_t rows;              // source rows
  std::int32_t fanout;            // 1..k
  const std::int32_t* dest_row;   // [rows, fanout]
  std::int64_t payload_bytes;     // multiple of 16
  std::int32_t tiles;             // dequant_scales per row; 0: none
};

// Writes padding rows of every group: zero payload, D = 2^-126, weight 0.
struct PadRowsArgs {
  RowGroups groups;
  RowSet dst;
  std::int64_t payload_bytes;
  std::int32_t tiles;
};

// dest_row[i] for segments of rows: segment s maps source rows [src_begin, src_begin+rows) to
// dest rows dst_begin + i; source rows in no segment get −1.
struct RowSegment {
  std::int64_t src_begin, dst_begin, rows;
};
struct ExpandSegmentsArgs {
  const RowSegment* segments;  // device [count]
  std::int64_t count;
  std::int64_t src_rows;
  std::int32_t* dest_row;      // [src_rows]
  bool invert;                 // write src row at dest_row[dst row] instead (array of src_rows entries
                               // is then indexed by destination row and src_rows is their number)
};

// y[t] = Σ_j src[source_row[t, j]] in FP32, in order of j; one rounding. source_row < 0 adds nothing.
// weight_out[t, j] = src.weight[source_row[t, j]] when both are set (dp on its way back).
struct CombineArgs {
  RowSet src;                      // payload rows of H elements of src_dtype
  DType src_dtype;                 // act dtype
  std::int64_t tokens, hidden;
  std::int32_t fanout;
  const std::int32_t* source_row;  // [T, fanout]
  void* y;                         // [T, H]
  DType y_dtype;                   // act dtype or kF32
  bool accumulate;                 // y += (later rounds; y_dtype kF32)
  float* weight_out;               // [T, fanout] or null
};

// ---------------------------------------------------------------- SwiGLU × p

// act = silu(gate)·up·p computed in FP32 (p null: 1). Exactly one output form:
//   act (act dtype), or quant (+ quant_col) directly from the FP32 value (1×128 tiles).
struct SwigluForwardArgs {
  RowGroups groups;
  std::int64_t f;
  const void* gate_up;      // [P, 2F]: gate in columns [0,F), up in [F,2F)
  DType dtype;              // act dtype
  const float* weight;      // [P] routing weight p, or null
  void* act;                // [P, F] or null
  QuantizeRule rule;        // kRow128 / kRow32 when quantising
  QTensor quant, quant_col; // [P, F], [F, P]
  StatSlot* stats;
};

// From d_act [P,F] = gradient of act (which includes p):
//   dweight[r] = Σ_f silu(gate)·up·d_act; d_gate, d_up with d = d_act·p.
// Output d_gate_up in act dtype, or quantised directly from FP32. Padding rows are written as zeros.
struct SwigluBackwardArgs {
  RowGroups groups;
  std::int64_t f;
  const void* gate_up;      // [P, 2F]
  const void* d_act;        // [P, F]
  DType dtype;
  const float* weight;      // [P] or null
  void* d_gate_up;          // [P, 2F] or null
  QuantizeRule rule;
  QTensor quant, quant_col; // [P, 2F], [2F, P]
  StatSlot* stats;
  float* dweight;           // [P] or null
};

// ---------------------------------------------------------------- transformer parts

// h = x (+ residual); y = h · rstd · w, rstd = 1/sqrt(mean(h²) + eps), FP32 inside.
struct RmsNormForwardArgs {
  std::int64_t rows, cols;
  const void* x;          // [rows, cols], row stride ld_x elements
  std::int64_t ld_x;
  const void* residual;   // [rows, cols] or null
  void* residual_out;     // h, or null (may alias residual)
  const float* w;         // [cols]
  float eps;
  DType dtype;            // act dtype of x, residual, y
  void* y;                // row stride ld_y
  std::int64_t ld_y;
  float* rstd;            // [rows]
};

// dx = d(y → h) (+ d_residual); dw += Σ_rows dy·h·rstd.
struct RmsNormBackwardArgs {
  std::int64_t rows, cols;
  const void* h;          // saved input of the norm, stride ld_h
  std::int64_t ld_h;
  const float* w;
  const float* rstd;      // [rows]
  const void* dy;         // stride ld_dy
  std::int64_t ld_dy;
  const void* d_residual; // [rows, cols] or null, added to dx
  DType dtype;
  void* dx;               // stride ld_dx; may alias dy or d_residual
  std::int64_t ld_dx;
  float* dw;              // [cols] FP32, accumulated
  void* workspace;        // rms_norm_backward_workspace_bytes(rows, cols)
};

// Rotary embedding in place on heads [first_head, first_head + heads) of rows [B·S, row_stride]:
// pairs (i, i + D/2), angle = position · theta^(-2i/D), position = row % sequence. direction −1 undoes.
struct RopeArgs {
  void* x;
  DType dtype;
  std::int64_t rows, sequence, row_stride;  // elements
  std::int32_t first_head, heads, head_dim;
  float theta;
  int direction;  // +1 forward, −1 backward
};

// Causal grouped-query attention. qkv packed [B·S, (Hq + 2·Hkv)·D]: queries, keys, values.
struct AttentionForwardArgs {
  std::int64_t batch, sequence;
  std::int32_t heads, kv_heads, head_dim;
  const void* qkv;
  DType dtype;
  float softmax_factor;  // 1/sqrt(head_dim)
  void* out;             // [B·S, Hq·D]
  float* lse;            // [B, Hq, S] natural logarithm of the softmax denominator (max included)
  void* workspace;
  std::int64_t workspace_bytes;
};
struct AttentionBackwardArgs {
  std::int64_t batch, sequence;
  std::int32_t heads, kv_heads, head_dim;
  const void* qkv;
  const void* out;
  const void* d_out;
  const float* lse;
  DType dtype;
  float softmax_factor;
  void* d_qkv;           // packed like qkv, overwritten
  void* workspace;
  std::int64_t workspace_bytes;
};

// out[t] = table[token[t]]; table FP32 master, rounded to act dtype.
struct EmbeddingForwardArgs {
  const std::int32_t* tokens;  // [T]
  std::int64_t count, hidden, vocab;
  const float* table;          // [V, H]
  void* out;                   // [T, H]
  DType dtype;
};
// d_table[token[t]] += d_out[t].
struct EmbeddingBackwardArgs {
  const std::int32_t* tokens;
  std::int64_t count, hidden, vocab;
  const void* d_out;
  DType dtype;
  float* d_table;              // [V, H] accumulated
  void* workspace;             // embedding_backward_workspace_bytes
};

// loss_sum += Σ_rows (lse(logits) − logits[target]); logits are replaced by
// (softmax − onehot)·dloss. target < 0 is ignored (no loss, zero gradient).
struct CrossEntropyArgs {
  std::int64_t rows, vocab;
  void* logits;                // [rows, V] act dtype or FP32, overwritten with dlogits when dloss != 0
  DType dtype;
  const std::int32_t* target;  // [rows]
  float dloss;                 // gradient of the loss w.r.t. one token's loss; 0: forward only
  double* loss_sum;            // [1] accumulated
};

// AdamW with decoupled decay (arXiv 1711.05101), FP32 master. Reads clip factor and the non-finite
// flag on the device; flag set: changes nothing at all.
struct AdamWArgs {
  std::int64_t n;
  float* master;
  const float* grad;           // FP32
  void* m;                     // FP32 or BF16 (moment_dtype)
  void* v;
  DType moment_dtype;
  void* copy;                  // act dtype copy of the parameter, or null
  DType copy_dtype;
  float lr, beta1, beta2, eps, weight_decay;
  std::int64_t t;              // 1-based step for bias correction
  const float* grad_factor;    // device [1]: clip factor × 1/normaliser
  const std::int32_t* skip;    // device [1]: nonzero → no change
};

// out[0] += Σ x² in FP64 (finite or not: a NaN or infinity makes the sum non-finite).
struct SumSquaresArgs {
  const float* x;
  std::int64_t n;
  double* out;
  void* workspace;             // sum_squares_workspace_bytes
};

// count[0] += number of non-finite elements.
struct CountNonfiniteArgs {
  const void* x;
  DType dtype;
  std::int64_t n;
  std::uint64_t* count;
};

// Column sums and other plain reductions are not needed: no biases in these families.

// ---------------------------------------------------------------- the table

struct OpsContext;  // owned by the backend: lanes, handles, sticky error

struct WorkspaceSizes {
  std::int64_t route_index, rms_norm_backward, embedding_backward, sum_squares;
  std::int64_t attention_forward, attention_backward, gemm;
};
struct WorkspaceQuery {
  std::int64_t tokens, hidden, vocab, batch, sequence, parameters;
  std::int32_t experts, experts_per_token, heads, kv_heads, head_dim;
  DType dtype;
};

// A recipe question: can this backend run FP8 with such operands? Reason in English when not.
struct SupportQuery {
  Tiling tiling;
  DType format;
  bool emulate;  // the job allows emulation
};

// What a backend has done since it was created: the proof that a step neither allocates nor waits.
struct OpsCounters {
  std::int64_t allocations;       // of device or pinned memory, and growths of own scratch
  std::int64_t synchronizations;  // waits of the host for the device
  std::int64_t plans;             // shapes that a library was asked to choose a kernel for
};

struct Ops {
  const char* name;  // "cpu", "cuda"
  DType act_dtype_default;

  // Memory. allocate returns null when out of memory.
  void* (*allocate)(OpsContext*, std::int64_t bytes, Memory);
  void (*release)(OpsContext*, void*, Memory);
  void (*copy)(OpsContext*, const CopyArgs&);     // ordered on its lane, asynchronous
  void (*zero)(OpsContext*, void*, std::int64_t bytes);
  void (*synchronize)(OpsContext*);               // waits for the compute lane
  void (*synchronize_lane)(OpsContext*, Lane);
  // What is put on `later` from now on begins after all that `earlier` holds now.
  void (*order)(OpsContext*, Lane earlier, Lane later);
  // Returns 0, or nonzero and a message once a device fault happened (sticky).
  int (*poll_error)(OpsContext*, char* message, std::int64_t message_bytes);
  int (*supports)(OpsContext*, const SupportQuery&, char* reason, std::int64_t reason_bytes);  // 1 yes
  void (*workspace_sizes)(OpsContext*, const WorkspaceQuery&, WorkspaceSizes*);
  void (*set_gemm_workspace)(OpsContext*, void*, std::int64_t bytes);
  void (*range_push)(OpsContext*, const char* name);  // profiler range (NVTX), may do nothing
  void (*range_pop)(OpsContext*);
  void* (*stream)(OpsContext*);  // cudaStream_t of compute, null on the CPU
  void (*counters)(OpsContext*, OpsCounters*);
  // Marks: moments on a lane, for profiles. reserve_marks makes room for so many (it may allocate; 0
  // on success); mark enqueues one, index < room, and does not wait; seconds between two marks are
  // known once their lanes were waited for.
  int (*reserve_marks)(OpsContext*, std::int32_t count);
  void (*mark)(OpsContext*, std::int32_t index, Lane lane);
  double (*mark_seconds)(OpsContext*, std::int32_t from, std::int32_t to);

  void (*cast)(OpsContext*, const CastArgs&);
  void (*axpby)(OpsContext*, const AxpbyArgs&);

  void (*quantize_rows)(OpsContext*, const QuantizeRowsArgs&);
  void (*quantize_blocks)(OpsContext*, const QuantizeBlocksArgs&);
  void (*amax)(OpsContext*, const AmaxArgs&);
  void (*scale_from_amax)(OpsContext*, const ScaleFromAmaxArgs&);
  void (*quantize_tensor)(OpsContext*, const QuantizeTensorArgs&);
  void (*dequantize)(OpsContext*, const DequantizeArgs&);
  void (*transpose_scaled)(OpsContext*, const TransposeScaledArgs&);
  void (*sqnr)(OpsContext*, const SqnrArgs&);
  void (*stats_reset)(OpsContext*, StatSlot*, std::int64_t count);

  void (*gemm)(OpsContext*, const GemmArgs&);
  void (*grouped_gemm)(OpsContext*, const GroupedGemmArgs&);
  void (*grouped_wgrad)(OpsContext*, const GroupedWgradArgs&);

  void (*router_forward)(OpsContext*, const RouterForwardArgs&);
  void (*router_backward)(OpsContext*, const RouterBackwardArgs&);
  void (*router_bias_update)(OpsContext*, const RouterBiasUpdateArgs&);

  void (*route_index)(OpsContext*, const RouteIndexArgs&);
  void (*permute)(OpsContext*, const PermuteArgs&);
  void (*pad_rows)(OpsContext*, const PadRowsArgs&);
  void (*expand_segments)(OpsContext*, const ExpandSegmentsArgs&);
  void (*combine)(OpsContext*, const CombineArgs&);

  void (*swiglu_forward)(OpsContext*, const SwigluForwardArgs&);
  void (*swiglu_backward)(OpsContext*, const SwigluBackwardArgs&);

  void (*rms_norm_forward)(OpsContext*, const RmsNormForwardArgs&);
  void (*rms_norm_backward)(OpsContext*, const RmsNormBackwardArgs&);
  void (*rope)(OpsContext*, const RopeArgs&);
  void (*attention_forward)(OpsContext*, const AttentionForwardArgs&);
  void (*attention_backward)(OpsContext*, const AttentionBackwardArgs&);
  void (*embedding_forward)(OpsContext*, const EmbeddingForwardArgs&);
  void (*embedding_backward)(OpsContext*, const EmbeddingBackwardArgs&);
  void (*cross_entropy)(OpsContext*, const CrossEntropyArgs&);
  void (*adamw)(OpsContext*, const AdamWArgs&);
  void (*sum_squares)(OpsContext*, const SumSquaresArgs&);
  void (*count_nonfinite)(OpsContext*, const CountNonfiniteArgs&);
};

// A backend instance: the table and its state. Owned by whoever created it (CreateCpuBackend, or the
// plug-in's octavo_backend_create).
struct Backend {
  const Ops* ops = nullptr;
  OpsContext* context = nullptr;
};

}  // namespace octavo
