// Several datasets mixed by weight, named by one small text file that takes a dataset's place:
//
//   octavo-blend v1
//   # weight  path (relative to this file, or absolute)
//   0.7       web.octd
//   0.3       /data/code
//
// A weight is the part's share of the sequences trained on. Which part a sequence comes from is,
// like everything about the order, a pure function of (seed, position): positions are taken in
// cycles of kBlendCycle; a cycle holds exactly each part's share of slots, in an order that is a
// keyed permutation of the cycle. A part is read in its own order, epoch after epoch, whatever the
// others do.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "base/file.h"
#include "worker/data/token_dataset.h"

namespace octavo {

inline constexpr char kBlendMagic[] = "octavo-blend v1";
inline constexpr std::int64_t kBlendCycle = 1 << 14;

struct BlendLine {
  double weight = 0;
  std::string path;
};
// INVALID_ARGUMENT names the line.
absl::StatusOr<std::vector<BlendLine>> ParseBlend(std::string_view text, const std::string& path);

absl::StatusOr<std::unique_ptr<TokenDataset>> OpenBlend(const FileSystem& fs,
                                                        const std::string& path);

struct BlendSlot {
  std::int32_t part = 0;
  std::int64_t position = 0;  // in the part's own order
};

// Immutable.
class BlendOrder {
 public:
  // INVALID_ARGUMENT when a part's share is below one slot of a cycle. One part: always that one.
  static absl::StatusOr<BlendOrder> Create(const std::vector<double>& weights, std::uint64_t seed);

  BlendSlot At(std::int64_t position) const;
  // Slots of the part in every cycle.
  std::int64_t slots(std::int32_t part) const {
    return first_[static_cast<std::size_t>(part) + 1] - first_[static_cast<std::size_t>(part)];
  }

 private:
  std::vector<std::int64_t> first_;  // [parts + 1] of a cycle's slots, before it is permuted
  std::uint64_t seed_ = 0;
};

}  // namespace octavo
