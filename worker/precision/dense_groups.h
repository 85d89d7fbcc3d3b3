// RowGroups of dense tensors: one group that owns all rows. Built while the model is created,
// looked up in a step.
#pragma once

#include <cstdint>
#include <map>

#include "base/check.h"
#include "kernels/arena.h"
#include "kernels/ops.h"

namespace octavo {

class DenseGroups {
 public:
  DenseGroups(const Backend& backend, Arena& device, Arena& pinned)
      : backend_(backend), device_(device), pinned_(pinned) {}

  // During creation only.
  void Prepare(std::int64_t rows) {
    if (by_rows_.contains(rows)) {
      return;
    }
    auto* host = pinned_.Take<std::int64_t>(2);
    auto* device = device_.Take<std::int64_t>(2);
    if (host == nullptr || device == nullptr) {
      return;  // the arenas have failed and creation ends
    }
    host[0] = 0;
    host[1] = rows;
    backend_.ops->copy(backend_.context, {.dst = device,
                                          .src = host,
                                          .bytes = 2 * sizeof(std::int64_t),
                                          .kind = CopyKind::kToDevice});
    by_rows_[rows] = RowGroups{.count = 1,
                               .begin = device,
                               .rows = device + 1,
                               .host_begin = host,
                               .host_rows = host + 1,
                               .padded_rows = rows};
  }
  // REQUIRES: prepared.
  const RowGroups& Get(std::int64_t rows) const {
    const auto found = by_rows_.find(rows);
    OCTAVO_CHECK(found != by_rows_.end(), "%lld rows", static_cast<long long>(rows));
    return found->second;
  }

 private:
  const Backend backend_;
  Arena& device_;
  Arena& pinned_;
  std::map<std::int64_t, RowGroups> by_rows_;
};

}  // namespace octavo
