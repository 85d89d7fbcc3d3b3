// What every layer needs to run: backend, precision state, and how this pass counts.
//
// Layers hold shapes and weights; activations saved for backward live in structs that the model
// owns (one per layer, or one shared by layers that recompute); scratch is shared by all layers,
// because one layer runs at a time. All of it is taken at creation.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string_view>
#include <vector>

#include "kernels/arena.h"
#include "kernels/ops.h"
#include "proto/precision/plan.h"
#include "worker/layers/weight.h"
#include "worker/precision/dense_groups.h"
#include "worker/precision/executed.h"
#include "worker/precision/shadow.h"
#include "worker/precision/tensor_state.h"
#include "worker/precision/weight_cache.h"

namespace octavo {

struct ResolvedRecipe {
  const Recipe* planned;
  const Recipe* executed;
  std::string_view reason;
};

// Memory of one FP8 copy, row-wise or column-wise, of up to [rows, cols].
struct QBuffer {
  std::uint8_t* codes = nullptr;
  float* dequant_scales = nullptr;
  // A view of some rows of a matrix of total_rows; total_rows == 0: of all.
  std::int64_t first_row = 0, total_rows = 0;
  std::int32_t first_group = 0;

  // mx: room for one scale per 32 elements. groups: room for per-tensor scales.
  static QBuffer Take(Arena& arena, std::int64_t rows, std::int64_t cols, std::int64_t groups,
                      bool mx) {
    const std::int64_t tile = mx ? kMxBlock : kTile;
    const std::int64_t padded = RoundUp(rows, kTile);
    const std::int64_t row_scales = CeilDiv(cols, tile) * RoundUp(rows, 4);
    const std::int64_t col_scales = padded / tile * RoundUp(cols, 4);
    return {arena.Take<std::uint8_t>(padded * RoundUp(cols, 16)),
            arena.Take<float>(std::max(row_scales, col_scales) + groups)};
  }

  // Rows [row, …) of a matrix of `rows`, the first of them of group `group`; row: multiple of 128.
  QBuffer From(std::int64_t row, std::int64_t rows, std::int32_t group) const {
    return {codes, dequant_scales, row, rows, group};
  }
  // Row-wise copy of [rows, cols], scales as GEMM operands want them.
  QTensor Row(const QuantizeRule& rule, std::int64_t rows, std::int64_t cols) const {
    const bool per_group = rule.tiling == Tiling::kTensor;
    return {.q = codes + first_row * cols,
            .format = rule.format,
            .tiling = rule.tiling,
            .rows = rows,
            .cols = cols,
            .dequant_scale = dequant_scales + (per_group ? first_group : first_row),
            .scale_row_stride = 1,
            .scale_tile_stride = RoundUp(total_rows == 0 ? rows : total_rows, 4)};
  }
  // Column-wise copy of [rows, cols]: payload [cols, rows padded to 128].
  QTensor Col(const QuantizeRule& rule, std::int64_t rows, std::int64_t cols) const {
    const std::int64_t tile = rule.tiling == Tiling::kRow32 ? kMxBlock : kTile;
    const std::int64_t tile_stride = RoundUp(cols, 4);
    const bool per_group = rule.tiling == Tiling::kTensor;
    return {.q = codes + first_row,
            .format = rule.format,
            .tiling = rule.tiling,
            .rows = cols,
            .cols = RoundUp(rows, kTile),
            .ld = RoundUp(total_rows == 0 ? rows : total_rows, kTile),
            .dequant_scale =
                dequant_scales + (per_group ? first_group : first_row / tile * tile_stride),
            .scale_row_stride = 1,
            .scale_tile_stride = tile_stride};
  }
};

struct LayerContext {
  Backend backend;
  DType act = DType::kBF16;
  TensorStates* states = nullptr;
  WeightCache* weights = nullptr;
  ExecutedCounters* executed = nullptr;
  DenseGroups* dense_groups = nullptr;
  const PrecisionPlan* plan = nullptr;
  std::vector<std::uint8_t> held;  // [layers] nonzero: BF16 for this pass (step retry)
  bool record = false;             // statistics of this pass count (not recompute, not evaluation)
  bool energies = false;           // and SQNR is measured, and shadows
  const ShadowStates* shadows = nullptr;
  QBuffer shadow_row, shadow_col;  // scratch of shadow casts, [most rows, widest]

  const Ops& ops() const { return *backend.ops; }
  OpsContext* device() const { return backend.context; }
  std::int64_t act_bytes() const { return DTypeBytes(act); }

  // The one question about precision, asked once per GEMM or payload.
  ResolvedRecipe Resolve(const OpSite& site) const {
    static const Recipe kHeld = DefaultRecipe(RecipeKind::kBf16);
    const Recipe* planned = &plan->Resolve(site.layer, site.op);
    const bool is_held = held[static_cast<std::size_t>(site.layer)] != 0 && planned->is_fp8();
    return is_held ? ResolvedRecipe{planned, &kHeld, "retry after a non-finite value"}
                   : ResolvedRecipe{planned, planned, ""};
  }
  StatSlot* Slots(const OpSite& site, Tensor tensor, std::int32_t first_group = 0) const {
    return record ? states->slots(states->Index(site, tensor) + first_group) : nullptr;
  }
  // The weights in act dtype. A stale copy is made anew.
  const void* WeightData(const WeightRef& w) const {
    if (act == DType::kF32) {
      return w.master;
    }
    if (w.state != nullptr && w.state->copy_stale) {
      const std::int64_t n = w.state->elements;
      ops().cast(device(), {.src = {.data = const_cast<float*>(w.master),
                                    .dtype = DType::kF32,
                                    .rows = 1,
                                    .cols = n},
                            .dst = {.data = w.copy, .dtype = act, .rows = 1, .cols = n}});
      w.state->copy_stale = false;
    }
    if (w.state != nullptr) {
      w.state->copy_read = true;
    }
    return w.copy;
  }
};

}  // namespace octavo
