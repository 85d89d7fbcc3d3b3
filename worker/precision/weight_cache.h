// FP8 copies of weights, cast once per optimizer step from the FP32 masters and shared by all
// microbatches; never derived from dequantised values (NUMERICS 4).
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/arena.h"
#include "kernels/ops.h"
#include "proto/precision/recipe.h"
#include "worker/precision/dense_groups.h"
#include "worker/precision/tensor_state.h"

namespace octavo {

// Weights of one product: [groups, n, k] FP32 masters.
struct WeightSource {
  OpSite site;
  std::int32_t groups = 1;
  std::int64_t n = 0, k = 0;
  const float* master = nullptr;
};

struct WeightCopies {
  QTensor row;  // [groups·n, k]: B of fprop
  QTensor col;  // [groups·k, n] (mxfp8, per tensor: n padded to 128): B of dgrad
};

// Not thread-safe.
class WeightCache {
 public:
  // mx: copies of mxfp8 need four times the scales; taken only when the job allows emulation.
  WeightCache(const Backend& backend, TensorStates* states, DenseGroups* dense, bool mx,
              Arena& arena);

  // Reserves memory; returns the handle. During creation only.
  std::int32_t Add(const WeightSource& source);
  // All copies are stale: masters, plan or pass changed.
  void Invalidate();
  // The copies for this recipe; casts when they are stale or of another recipe. Statistics of the
  // cast are recorded when `record`.
  const WeightCopies& Get(std::int32_t handle, const Recipe& recipe, bool record, bool energies);
  // Casts by a recipe that does not run, for its numbers: slots [groups], one energy.
  void Measure(std::int32_t handle, const Recipe& recipe, StatSlot* slots, SqnrSlot* energy);

 private:
  struct Entry {
    WeightSource source;
    std::uint8_t* row_codes;
    std::uint8_t* col_codes;
    float* row_scales;
    float* col_scales;
    bool valid = false;
    bool counted = false;  // statistics of this step's cast were recorded
    Recipe recipe;
    WeightCopies copies;
  };
  void Cast(Entry& entry, const Recipe& recipe, StatSlot* stats, SqnrSlot* energy);
  void CastPerGroup(Entry& entry, const Recipe& recipe, StatSlot* stats);
  void AddEnergies(const Entry& entry, SqnrSlot* energy);

  const Backend backend_;
  TensorStates* const states_;
  DenseGroups* const dense_;
  const bool mx_;
  Arena& arena_;
  std::vector<Entry> entries_;
};

}  // namespace octavo
