// Products Y = X·Wᵀ and their gradients, for every recipe, dense or grouped by expert.
//
//   Product   the GEMMs of one (layer, op): fprop, dgrad, wgrad over operands that are ready
//   Operand   one activation or gradient in the forms that those GEMMs read
//   Linear    a dense product that also casts its operands (attention projections, dense MLP)
//
// Operand forms by recipe (NUMERICS 4): high precision reads `high` everywhere; FP8 reads `row` in
// fprop and dgrad and `col` in wgrad, or `high` in wgrad when the recipe says wgrad: bf16.
#pragma once

#include <cstdint>

#include "worker/layers/context.h"
#include "worker/precision/treatment.h"

namespace octavo {

struct Operand {
  const void* high = nullptr;  // [P, cols] act dtype
  QTensor row;                 // [P, cols]
  QTensor col;                 // [cols, RoundUp(P, 128)]
};

struct ProductShape {
  OpSite site;
  bool grouped = false;  // by expert; else one dense matrix
  std::int32_t groups = 1;
  std::int64_t n = 0, k = 0;  // W [groups, n, k]
  WeightRef weight;
};

// Holds no activations. Weight copies come from the context's cache.
class Product {
 public:
  // Registers the weight in the cache; during creation only.
  Product(const ProductShape& shape, WeightCache& cache);

  // y [P, n] act dtype. groups: real rows of x; a dense product has one group. They may be some of
  // the weight's, from first_group on.
  void Fprop(const LayerContext& ctx, const Operand& x, const RowGroups& groups, void* y,
             std::int32_t first_group = 0) const;
  // dx [P, k] act dtype.
  void Dgrad(const LayerContext& ctx, const Operand& dy, const RowGroups& groups, void* dx) const;
  // weight.grad += dyᵀ·x.
  void Wgrad(const LayerContext& ctx, const Operand& dy, const Operand& x,
             const RowGroups& groups) const {
    WgradOf(ctx, dy, x, groups, 0, groups.count);
  }
  // Of groups [first, last) of a grouped product alone.
  void WgradOf(const LayerContext& ctx, const Operand& dy, const Operand& x,
               const RowGroups& groups, std::int32_t first, std::int32_t last) const;

  const ProductShape& shape() const { return shape_; }

 private:
  void Count(const LayerContext& ctx, GemmPass pass, const RowGroups& groups) const;
  GemmOperand Weight(const LayerContext& ctx, const Recipe& recipe, GemmPass pass) const;

  const ProductShape shape_;
  std::int32_t cache_handle_;
};

// Casts `x` for `recipe` into the given buffers (null codes: that copy is not wanted) and records
// statistics at (site, tensor). Measures SQNR of the row-wise (else column-wise) copy when asked.
struct CastRequest {
  OpSite site;
  Tensor tensor;
  const Recipe& recipe;
  const void* x;  // [P, cols] act dtype
  std::int64_t cols;
  RowGroups groups;
  QBuffer row, col;
  std::int32_t first_group = 0;  // of the site, when groups are some of its groups
};
Operand Cast(const LayerContext& ctx, const CastRequest& request);

// Adds the SQNR energies of q against x when this pass measures them.
void MeasureEnergy(const LayerContext& ctx, const OpSite& site, Tensor tensor, const void* x,
                   std::int64_t cols, const RowGroups& groups, const QTensor& q, bool transposed);

// Casts x by the recipes that the plan wants measured beside this site's own, for their numbers. In
// passes that sample energies only.
void MeasureShadows(const LayerContext& ctx, const OpSite& site, Tensor tensor, const void* x,
                    std::int64_t cols, const RowGroups& groups, std::int32_t first_group = 0);

// Scratch of dense products, shared by all of them.
struct LinearScratch {
  QBuffer row, col;  // [T, widest]
};

// What backward needs of a dense product's input.
struct LinearSaved {
  QBuffer col;              // taken at creation, [T, k]
  const void* x = nullptr;  // high precision, owned by the layer before
};

class Linear {
 public:
  Linear(const ProductShape& shape, WeightCache& cache) : product_(shape, cache) {}

  // y [T, n] = x [T, k]·Wᵀ. x must stay until backward when saved (the caller keeps it).
  void Forward(const LayerContext& ctx, const LinearScratch& scratch, const void* x,
               std::int64_t rows, LinearSaved* saved, void* y) const;
  // dx [T, k]; dx may be null (not wanted). Adds to the weight's gradient.
  void Backward(const LayerContext& ctx, const LinearScratch& scratch, const void* dy,
                std::int64_t rows, const LinearSaved& saved, void* dx) const;

  const Product& product() const { return product_; }

 private:
  Product product_;
};

// The column-wise copy that forward saved, described again.
Operand SavedInput(const LayerContext& ctx, const OpSite& site, const LinearSaved& saved,
                   std::int64_t rows, std::int64_t cols);

}  // namespace octavo
