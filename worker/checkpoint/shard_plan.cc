#include "worker/checkpoint/shard_plan.h"

#include <algorithm>

#include "base/check.h"
#include "base/str.h"

namespace octavo {

std::vector<ShardPiece> HeldPieces(const std::vector<Parameter>& parameters,
                                   const ShardLayout& layout) {
  const std::int32_t ep = layout.expert_parallel;
  OCTAVO_CHECK(ep >= 1 && layout.world_size % ep == 0);
  const std::int32_t groups = layout.world_size / ep;
  std::vector<std::int64_t> load(static_cast<std::size_t>(layout.world_size));
  std::vector<ShardPiece> pieces;

  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const Parameter& p = parameters[i];
    if (p.region != ParameterRegion::kExpert) {
      continue;
    }
    const std::int64_t experts = p.shape[0];
    const std::int64_t per_rank = experts / ep;
    const std::int64_t size = p.full_elements() / experts;
    for (std::int64_t e = 0; e < experts; ++e) {
      const auto position = static_cast<std::int32_t>(e / per_rank);
      const auto group = static_cast<std::int32_t>((e + static_cast<std::int64_t>(i)) % groups);
      const std::int32_t owner = group * ep + position;
      load[static_cast<std::size_t>(owner)] += size;
      if (layout.rank % ep == position) {
        pieces.push_back({.base = StrCat(p.name, "#", e),
                          .parameter = static_cast<std::int32_t>(i),
                          .local_first = (e - p.expert_first()) * size,
                          .count = size,
                          .shape = {p.shape.begin() + 1, p.shape.end()},
                          .owner = owner});
      }
    }
  }
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const Parameter& p = parameters[i];
    if (p.region != ParameterRegion::kDense) {
      continue;
    }
    const auto least = std::min_element(load.begin(), load.end());
    *least += p.full_elements();
    pieces.push_back({.base = p.name,
                      .parameter = static_cast<std::int32_t>(i),
                      .local_first = 0,
                      .count = p.full_elements(),
                      .shape = p.shape,
                      .owner = static_cast<std::int32_t>(least - load.begin())});
  }
  std::stable_sort(pieces.begin(), pieces.end(), [](const ShardPiece& a, const ShardPiece& b) {
    return a.parameter < b.parameter;
  });
  return pieces;
}

bool StoresState(bool expert, const ShardLayout& layout) {
  return expert ? layout.rank < layout.expert_parallel : layout.rank == 0;
}

}  // namespace octavo
