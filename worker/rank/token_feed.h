// Tokens of a whole step on the device: loaded once, so that a retried pass runs on the same ones.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/arena.h"
#include "kernels/ops.h"
#include "worker/data/loader.h"

namespace octavo {

// Not thread-safe. Memory: microbatches · 2 · tokens · 4 bytes on the device, twice that pinned.
class TokenFeed {
 public:
  // RESOURCE_EXHAUSTED when the arenas are full.
  static absl::StatusOr<TokenFeed> Create(const Backend& backend, Loader loader,
                                          std::int32_t microbatches, std::int64_t tokens,
                                          Arena& device, Arena& pinned);

  // Loads and sends all microbatches of the step (0-based), without waiting for the device. Between
  // two calls somebody waits for the device (a pass does, at its end).
  absl::Status LoadStep(std::int64_t step);
  const std::int32_t* tokens(std::int32_t microbatch) const {
    return device_ + microbatch * 2 * tokens_;
  }
  const std::int32_t* targets(std::int32_t microbatch) const {
    return device_ + (microbatch * 2 + 1) * tokens_;
  }
  std::int32_t microbatches() const { return microbatches_; }
  // Targets with a loss: of the microbatch on this rank, and of the loaded step over all ranks.
  std::int64_t target_count(std::int32_t microbatch) const {
    return target_counts_[static_cast<std::size_t>(microbatch)];
  }
  std::int64_t step_targets() const { return step_targets_; }

 private:
  TokenFeed(const Backend& backend, Loader loader)
      : backend_(backend), loader_(std::move(loader)) {}

  Backend backend_;
  Loader loader_;
  std::int32_t microbatches_ = 0;
  std::int64_t tokens_ = 0;                  // of a microbatch
  std::vector<std::int64_t> target_counts_;  // [microbatches]
  std::int64_t step_targets_ = 0;
  std::int32_t* device_ = nullptr;
  std::int32_t* pinned_ = nullptr;  // two steps, in turn
  int half_ = 0;
};

}  // namespace octavo
