// Tokens of a whole step on the device: loaded once, so that a retried pass runs on the same ones.
// Those of the step after it can be loaded and sent on the copy lane while this one computes.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/arena.h"
#include "kernels/ops.h"
#include "worker/data/loader.h"

namespace octavo {

// Not thread-safe. Memory: twice microbatches · 2 · tokens · 4 bytes on the device, and pinned.
class TokenFeed {
 public:
  // RESOURCE_EXHAUSTED when the arenas are full.
  static absl::StatusOr<TokenFeed> Create(const Backend& backend, Loader loader,
                                          std::int32_t microbatches, std::int64_t tokens,
                                          Arena& device, Arena& pinned);

  // Makes `step` (0-based) the current one; loads and sends all its microbatches unless Prefetch
  // did. Does not wait for the device. Between two steps somebody waits for the compute lane (a
  // pass does, at its end): then nothing reads the tokens of the step before.
  absl::Status LoadStep(std::int64_t step);
  // Loads `step` and sends it while the device works on the current step. An error is said by
  // LoadStep(step).
  void Prefetch(std::int64_t step);
  const std::int32_t* tokens(std::int32_t microbatch) const {
    return device_half(current_) + microbatch * 2 * tokens_;
  }
  const std::int32_t* targets(std::int32_t microbatch) const {
    return device_half(current_) + (microbatch * 2 + 1) * tokens_;
  }
  std::int32_t microbatches() const { return microbatches_; }
  // Targets with a loss: of the microbatch on this rank, and of the loaded step over all ranks.
  std::int64_t target_count(std::int32_t microbatch) const {
    return halves_[current_].target_counts[static_cast<std::size_t>(microbatch)];
  }
  std::int64_t step_targets() const { return halves_[current_].step_targets; }

 private:
  TokenFeed(const Backend& backend, Loader loader)
      : backend_(backend), loader_(std::move(loader)) {}

  // A step's tokens: one is current, the other may be on its way.
  struct Half {
    std::int64_t step = -1;
    std::vector<std::int64_t> target_counts;  // [microbatches]
    std::int64_t step_targets = 0;
  };
  std::int64_t half_elements() const { return std::int64_t{microbatches_} * 2 * tokens_; }
  std::int32_t* device_half(std::size_t half) const {
    return device_ + static_cast<std::int64_t>(half) * half_elements();
  }
  absl::Status Load(std::int64_t step, std::size_t into);

  Backend backend_;
  Loader loader_;
  std::int32_t microbatches_ = 0;
  std::int64_t tokens_ = 0;  // of a microbatch
  Half halves_[2];
  std::size_t current_ = 0;
  std::int32_t* device_ = nullptr;
  std::int32_t* pinned_ = nullptr;
};

}  // namespace octavo
