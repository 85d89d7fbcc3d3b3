#include "worker/model/execution_order.h"

#include <algorithm>
#include <array>

#include "base/check.h"

namespace octavo {
namespace {

constexpr std::array<Op, kOpCount> kForwardOrder = {
    Op::kAttnQkv, Op::kAttnOut, Op::kDispatch, Op::kMlpFc1, Op::kMlpFc2, Op::kFc1, Op::kFc2};
constexpr std::array<Op, kOpCount> kBackwardOrder = {
    Op::kDispatch, Op::kFc2, Op::kFc1, Op::kMlpFc2, Op::kMlpFc1, Op::kAttnOut, Op::kAttnQkv};
constexpr std::int64_t kForwardSlots = 2 * kOpCount;  // input, weight

std::int64_t IndexIn(const std::array<Op, kOpCount>& order, Op op) {
  return std::find(order.begin(), order.end(), op) - order.begin();
}

}  // namespace

std::int64_t ExecutionPosition(const OpSite& site, Tensor tensor, std::int32_t layers) {
  if (tensor == Tensor::kGrad) {
    return layers * kForwardSlots + (layers - 1 - site.layer) * std::int64_t{kOpCount} +
           IndexIn(kBackwardOrder, site.op);
  }
  return site.layer * kForwardSlots + 2 * IndexIn(kForwardOrder, site.op) +
         (tensor == Tensor::kWeight ? 1 : 0);
}

NonfiniteSite DecodeExecution(std::int64_t position, std::int32_t layers) {
  const std::int64_t forward = layers * kForwardSlots;
  OCTAVO_CHECK(position >= 0 && position < forward + layers * std::int64_t{kOpCount},
               "position %lld of %d layers", static_cast<long long>(position), layers);
  if (position < forward) {
    const std::int64_t in_layer = position % kForwardSlots;
    return {.site = {static_cast<std::int32_t>(position / kForwardSlots),
                     kForwardOrder[static_cast<std::size_t>(in_layer / 2)]},
            .tensor = in_layer % 2 == 0 ? Tensor::kInput : Tensor::kWeight};
  }
  const std::int64_t back = position - forward;
  return {.site = {static_cast<std::int32_t>(layers - 1 - back / kOpCount),
                   kBackwardOrder[static_cast<std::size_t>(back % kOpCount)]},
          .tensor = Tensor::kGrad};
}

std::int64_t FirstNonfinite(const std::vector<TensorSite>& sites,
                            const std::vector<StatSlot>& stats, std::int32_t layers) {
  std::int64_t first = kNoNonfinite;
  for (std::size_t i = 0; i < sites.size(); ++i) {
    if (stats[i].nonfinite > 0) {
      first = std::min(first, ExecutionPosition(sites[i].site, sites[i].tensor, layers));
    }
  }
  return first;
}

}  // namespace octavo
