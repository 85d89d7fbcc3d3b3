// Dense SwiGLU MLP: fc2(silu(gate)·up), [gate; up] = fc1(x). Dense decoder layers, and shared
// experts (which are one wide dense MLP). Under FP8 the SwiGLU kernel casts its result directly.
#pragma once

#include <cstdint>

#include "worker/layers/linear.h"

namespace octavo {

struct DenseMlpShape {
  std::int32_t layer = 0;
  std::int64_t hidden = 0, ffn = 0, tokens = 0;
  WeightRef fc1, fc2;  // [2F, H] gate rows first, [H, F]
};

struct DenseMlpSaved {
  LinearSaved input;
  void* gate_up = nullptr;  // [T, 2F]
  void* act = nullptr;      // [T, F] when fc2's wgrad reads high precision
  QBuffer act_col;          // [T, F]
};

struct DenseMlpScratch {
  LinearScratch linear;
  void* d_act = nullptr;      // [T, F]; also holds act on the way to a per-tensor cast
  void* d_gate_up = nullptr;  // [T, 2F]
};

class DenseMlp {
 public:
  DenseMlp(const DenseMlpShape& shape, WeightCache& cache);

  static DenseMlpSaved TakeSaved(const DenseMlpShape& shape, DType act, bool mx, Arena& arena);

  // y [T, H] from x [T, H]; x must stay until backward.
  void Forward(const LayerContext& ctx, const DenseMlpScratch& scratch, const void* x,
               DenseMlpSaved& saved, void* y) const;
  void Backward(const LayerContext& ctx, const DenseMlpScratch& scratch, const DenseMlpSaved& saved,
                const void* dy, void* dx) const;

 private:
  const DenseMlpShape shape_;
  Linear fc1_;
  Product fc2_;
};

// SwiGLU's forward in the forms that fc2 wants, shared with the experts.
struct SwigluCast {
  OpSite site;           // fc2's
  const Recipe& recipe;  // fc2's
  RowGroups groups;
  std::int64_t ffn;
  const void* gate_up;           // [P, 2F]
  const float* weight;           // [P] or null
  void* act;                     // [P, F] act dtype: written when a high-precision form is needed
  QBuffer row, col;              // col null: not wanted (casting-free recipes transpose later)
  std::int32_t first_group = 0;  // of the site, when groups are some of its groups
};
Operand SwigluForward(const LayerContext& ctx, const SwigluCast& request);

// SwiGLU's backward in the forms that fc1's gradients want.
struct SwigluBackwardCast {
  OpSite site;           // fc1's
  const Recipe& recipe;  // fc1's
  RowGroups groups;
  std::int64_t ffn;
  const void* gate_up;  // [P, 2F]
  const void* d_act;    // [P, F]
  const float* weight;  // [P] or null
  float* dweight;       // [P] or null
  void* d_gate_up;      // [P, 2F] act dtype: written when a high-precision form is needed
  QBuffer row, col;
};
Operand SwigluBackward(const LayerContext& ctx, const SwigluBackwardCast& request);

}  // namespace octavo
