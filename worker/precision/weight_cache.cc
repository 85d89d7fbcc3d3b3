#include "worker/precision/weight_cache.h"

#include <algorithm>

#include "base/check.h"
#include "worker/precision/quantizer.h"
#include "worker/precision/treatment.h"

namespace octavo {
namespace {

// Blockwise scales: rows padded to four floats, as cuBLASLt wants them.
std::int64_t BlockStride(std::int64_t cols) { return RoundUp(CeilDiv(cols, kTile), 4); }

}  // namespace

WeightCache::WeightCache(const Backend& backend, TensorStates* states, DenseGroups* dense, bool mx,
                         Arena& arena)
    : backend_(backend), states_(states), dense_(dense), mx_(mx), arena_(arena) {}

std::int32_t WeightCache::Add(const WeightSource& source) {
  const std::int64_t n_padded = RoundUp(source.n, kTile);
  const std::int64_t groups = source.groups;
  const std::int64_t tile = mx_ ? kMxBlock : kTile;
  Entry entry{.source = source};
  entry.row_codes = arena_.Take<std::uint8_t>(groups * source.n * source.k);
  entry.col_codes = arena_.Take<std::uint8_t>(groups * source.k * n_padded);
  std::int64_t row_scales = groups * CeilDiv(source.n, kTile) * BlockStride(source.k) + groups;
  std::int64_t col_scales = groups * CeilDiv(source.k, kTile) * BlockStride(source.n) + groups;
  if (mx_) {
    row_scales = std::max(row_scales, groups * source.n * CeilDiv(source.k, tile));
    col_scales = std::max(col_scales, groups * source.k * CeilDiv(n_padded, tile));
  }
  entry.row_scales = arena_.Take<float>(row_scales);
  entry.col_scales = arena_.Take<float>(col_scales);
  entries_.push_back(entry);
  dense_->Prepare(source.n);
  return static_cast<std::int32_t>(entries_.size()) - 1;
}

void WeightCache::Invalidate() {
  for (Entry& entry : entries_) {
    entry.valid = entry.counted = false;
  }
}

const WeightCopies& WeightCache::Get(std::int32_t handle, const Recipe& recipe, bool record,
                                     bool energies) {
  Entry& entry = entries_[static_cast<std::size_t>(handle)];
  if (!entry.valid || !(entry.recipe == recipe)) {
    const OpSite& site = entry.source.site;
    const bool count = record && !entry.counted;
    Cast(entry, recipe, count ? states_->slots(states_->Index(site, Tensor::kWeight)) : nullptr,
         count && energies ? states_->energy(site, Tensor::kWeight) : nullptr);
    entry.counted |= count;
    entry.valid = true;
    entry.recipe = recipe;
  }
  return entry.copies;
}

void WeightCache::Measure(std::int32_t handle, const Recipe& recipe, StatSlot* slots,
                          SqnrSlot* energy) {
  Entry& entry = entries_[static_cast<std::size_t>(handle)];
  Cast(entry, recipe, slots, energy);
  entry.valid = false;  // the copies are not those of the recipe that runs
}

void WeightCache::Cast(Entry& entry, const Recipe& recipe, StatSlot* stats, SqnrSlot* energy) {
  const WeightSource& w = entry.source;
  const QuantizeRule rule = WeightRule(recipe);
  entry.copies.row = QTensor{.q = entry.row_codes,
                             .format = rule.format,
                             .tiling = rule.tiling,
                             .rows = w.groups * w.n,
                             .cols = w.k,
                             .dequant_scale = entry.row_scales};
  entry.copies.col = entry.copies.row;
  entry.copies.col.q = entry.col_codes;
  entry.copies.col.dequant_scale = entry.col_scales;
  entry.copies.col.rows = w.groups * w.k;
  if (rule.tiling == Tiling::kBlock128) {
    entry.copies.row.scale_row_stride = BlockStride(w.k);
    entry.copies.row.scale_tile_stride = 1;
    entry.copies.col.cols = w.n;
    entry.copies.col.scale_row_stride = BlockStride(w.n);
    entry.copies.col.scale_tile_stride = 1;
    backend_.ops->quantize_blocks(backend_.context, {.w = w.master,
                                                     .groups = w.groups,
                                                     .n = w.n,
                                                     .k = w.k,
                                                     .rule = rule,
                                                     .row = entry.copies.row,
                                                     .col = entry.copies.col,
                                                     .stats = stats});
  } else {
    OCTAVO_CHECK(rule.tiling != Tiling::kRow32 || mx_, "mxfp8 weights without room for scales");
    entry.copies.col.cols = w.n;
    entry.copies.col.ld = RoundUp(w.n, kTile);
    if (rule.tiling == Tiling::kRow32) {
      entry.copies.row.scale_row_stride = w.k / kMxBlock;
      entry.copies.col.scale_row_stride = entry.copies.col.ld / kMxBlock;
      entry.copies.row.scale_tile_stride = entry.copies.col.scale_tile_stride = 1;
    }
    CastPerGroup(entry, recipe, stats);
  }
  if (energy != nullptr) {
    AddEnergies(entry, energy);
  }
}

// Column-wise copies of several groups are one [k, n] matrix each, which the kernels' grouped
// column form ([k, Σn]) is not; so each group is a dense tensor of its own.
void WeightCache::CastPerGroup(Entry& entry, const Recipe& recipe, StatSlot* stats) {
  const WeightSource& w = entry.source;
  const std::int32_t base = states_->Index(w.site, Tensor::kWeight);
  for (std::int32_t g = 0; g < w.groups; ++g) {
    const auto part = [&](const QTensor& whole, std::int64_t rows) {
      QTensor one = whole;
      one.rows = rows;
      one.cols = whole.stride();  // the cast writes the zero codes up to the stride too
      one.q = whole.q + g * rows * whole.stride();
      one.dequant_scale = whole.tiling == Tiling::kTensor
                              ? whole.dequant_scale + g
                              : whole.dequant_scale + g * rows * whole.scale_row_stride;
      return one;
    };
    QuantizeInto(backend_, *states_,
                 {.recipe = recipe,
                  .rule = WeightRule(recipe),
                  .x = w.master + g * w.n * w.k,
                  .x_dtype = DType::kF32,
                  .cols = w.k,
                  .groups = dense_->Get(w.n),
                  .state_index = base + g,
                  .row = part(entry.copies.row, w.n),
                  .col = part(entry.copies.col, w.k),
                  .stats = stats == nullptr ? nullptr : stats + g});
  }
}

void WeightCache::AddEnergies(const Entry& entry, SqnrSlot* energy) {
  const WeightSource& w = entry.source;
  for (std::int32_t g = 0; g < w.groups; ++g) {
    QTensor one = entry.copies.row;
    one.rows = w.n;
    one.q += g * w.n * w.k;
    one.dequant_scale += one.tiling == Tiling::kTensor ? g
                         : one.tiling == Tiling::kBlock128
                             ? g * (w.n / kTile) * one.scale_row_stride
                             : g * w.n * one.scale_row_stride;
    backend_.ops->sqnr(backend_.context, {.x = w.master + g * w.n * w.k,
                                          .x_dtype = DType::kF32,
                                          .cols = w.k,
                                          .groups = dense_->Get(w.n),
                                          .q = one,
                                          .q_is_transposed = false,
                                          .slot = energy});
  }
}

}  // namespace octavo
