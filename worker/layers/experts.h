// The experts of this rank on rows that dispatch delivered: fc1, SwiGLU × p, fc2, and back.
//
// Operands come in three forms: high precision, row-wise FP8, column-wise FP8. What arrives (the
// dispatch recipe) and what the products want (fc1's and fc2's) may differ; this file is where they
// meet (NUMERICS 4). Under `fp8_flow` the arriving rows are fc1's operand as they are, and wgrad's
// column-wise operands come from the scaling-aware transpose: nothing is dequantised.
#pragma once

#include <cstdint>

#include "worker/layers/dense_mlp.h"
#include "worker/layers/linear.h"
#include "worker/layers/moe_dispatch.h"

namespace octavo {

struct ExpertsShape {
  std::int32_t layer = 0;
  std::int64_t hidden = 0, ffn = 0;
  std::int32_t local_experts = 0;
  std::int64_t padded_capacity = 0;  // rows
  WeightRef fc1, fc2;                // [local, 2F, H], [local, H, F]
};

// One matrix kept for backward in whichever form the recipe needs.
struct KeptMatrix {
  void* data = nullptr;  // [P, cols] act dtype, or codes
  float* dequant_scales = nullptr;
  QBuffer codes() const { return {static_cast<std::uint8_t*>(data), dequant_scales}; }
};

// Activations of one layer (one-round layers), taken at creation.
struct ExpertsSaved {
  KeptMatrix x;             // fc1's input
  void* gate_up = nullptr;  // [P, 2F]
  KeptMatrix act;           // fc2's input
  float* weight = nullptr;  // [P] routing weight p
};

struct ExpertsScratch {
  void* high = nullptr;       // [P, H] a payload in high precision
  QBuffer payload;            // [P, H] a payload that backward does not need
  QBuffer row;                // [P, max(H, 2F)]
  QBuffer col_a, col_b;       // [P, max(H, 2F)] gradients; [P, max(H, F)] inputs
  void* act = nullptr;        // [P, F]
  void* d_act = nullptr;      // [P, F]
  void* d_gate_up = nullptr;  // [P, 2F]
  void* rows = nullptr;       // [P, H] fc2's output, or dX
  float* d_weight = nullptr;  // [P]
};

class Experts {
 public:
  Experts(const ExpertsShape& shape, WeightCache& cache);

  static ExpertsSaved TakeSaved(const ExpertsShape& shape, DType act, bool mx, Arena& arena);
  static ExpertsScratch TakeScratch(const ExpertsShape& shape, DType act, bool mx, Arena& arena);

  // Where dispatch must deliver x (forward) so that nothing is copied again.
  Payload InputTarget(const LayerContext& ctx, const ExpertsScratch& scratch, ExpertsSaved& saved,
                      std::int64_t padded_rows) const;
  // Where it must deliver dY.
  Payload GradTarget(const LayerContext& ctx, const ExpertsScratch& scratch,
                     std::int64_t padded_rows) const;

  // One part of a round: x (of the whole round) as InputTarget said and saved.weight filled for its
  // rows. Writes the part of scratch.rows unless only the activations for backward are wanted.
  void Forward(const LayerContext& ctx, const ExpertsScratch& scratch, const Payload& x,
               const RoundPart& part, ExpertsSaved& saved, bool activations_only) const;

  // Backward in stages, so that what needs no message runs beside one; each is called once, in this
  // order.
  struct Gradients {
    RowGroups groups;
    Operand act;           // fc2's input, for its wgrad
    Operand x, d_gate_up;  // fc1's, for its wgrad
  };
  // Needs no dY: fc2's input in the form that its wgrad reads.
  Gradients PrepareBackward(const LayerContext& ctx, const ExpertsScratch& scratch,
                            const RowGroups& groups, const ExpertsSaved& saved) const;
  // dY as GradTarget said. Writes scratch.rows (dX) and scratch.d_weight; adds fc2's weight
  // gradient.
  void BackwardToInput(const LayerContext& ctx, const ExpertsScratch& scratch, const Payload& dy,
                       const ExpertsSaved& saved, Gradients* gradients) const;
  // The forms that fc1's wgrad reads. They stay until the next BackwardToInput, but for
  // scratch.high and saved.x, which the next dispatch may write.
  void PrepareInputWgrad(const LayerContext& ctx, const ExpertsScratch& scratch,
                         const ExpertsSaved& saved, Gradients* gradients) const;
  // Adds fc1's weight gradient of experts [first, last).
  void InputWgrad(const LayerContext& ctx, const Gradients& gradients, std::int32_t first,
                  std::int32_t last) const {
    fc1_.WgradOf(ctx, gradients.d_gate_up, gradients.x, gradients.groups, first, last);
  }

 private:
  enum class Form : std::uint8_t { kHigh, kRow, kCol };
  // Form of fc1's input that backward keeps.
  Form InputForm(const Recipe& dispatch, const Recipe& fc1) const;
  Form ActForm(const Recipe& fc2) const;
  const Recipe& RecipeOf(const LayerContext& ctx, Op op) const {
    return *ctx.Resolve({shape_.layer, op}).executed;
  }
  void Dequantize(const LayerContext& ctx, const QTensor& q, const RowGroups& groups,
                  void* high) const;

  struct ColumnRequest {
    Op op;
    Tensor tensor;
    const Recipe& recipe;
    QTensor row;  // row-wise copy, no high-precision source
    std::int64_t cols;
    void* high;  // [P, cols] scratch
    QBuffer col;
  };
  // The column-wise (or high-precision) form of a matrix that exists row-wise in FP8 only.
  Operand FromRows(const LayerContext& ctx, const RowGroups& groups,
                   const ColumnRequest& request) const;
  // What a weight gradient reads of an input that forward kept in this form, [P, cols]. high, col:
  // scratch for what has to be made of it.
  Operand WgradInput(const LayerContext& ctx, const RowGroups& groups, Op op, Form form,
                     const KeptMatrix& kept, std::int64_t cols, void* high,
                     const QBuffer& col) const;

  const ExpertsShape shape_;
  Product fc1_, fc2_;
};

}  // namespace octavo
