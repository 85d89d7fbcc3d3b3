#include "worker/rank/token_feed.h"

#include <algorithm>
#include <utility>

#include "base/status.h"
#include "base/str.h"

namespace octavo {

absl::StatusOr<TokenFeed> TokenFeed::Create(const Backend& backend, Loader loader,
                                            std::int32_t microbatches, std::int64_t tokens,
                                            Arena& device, Arena& pinned) {
  TokenFeed feed(backend, std::move(loader));
  feed.microbatches_ = microbatches;
  feed.tokens_ = tokens;
  for (Half& half : feed.halves_) {
    half.target_counts.resize(static_cast<std::size_t>(microbatches));
  }
  const std::int64_t count = 2 * feed.half_elements();
  feed.device_ = device.Take<std::int32_t>(count);
  feed.pinned_ = pinned.Take<std::int32_t>(count);
  if (feed.device_ == nullptr || feed.pinned_ == nullptr) {
    return ResourceExhaustedError(StrCat("no memory for ", count * 4, " bytes of tokens"));
  }
  return feed;
}

absl::Status TokenFeed::LoadStep(std::int64_t step) {
  const std::size_t other = 1 - current_;
  if (halves_[other].step != step) {
    RETURN_IF_ERROR(Load(step, other));
  }
  current_ = other;
  backend_.ops->order(backend_.context, Lane::kCopy, Lane::kCompute);
  return absl::OkStatus();
}

void TokenFeed::Prefetch(std::int64_t step) {
  const std::size_t other = 1 - current_;
  if (halves_[other].step != step && !Load(step, other).ok()) {
    halves_[other].step = -1;
  }
}

absl::Status TokenFeed::Load(std::int64_t step, std::size_t into) {
  // Nobody reads this half: it held the step before the current one, whose last pass ended with a
  // wait for what it enqueued, the copy out of the pinned half included.
  Half& half = halves_[into];
  half.step = -1;
  std::int32_t* const pinned = pinned_ + static_cast<std::int64_t>(into) * half_elements();
  const auto n = static_cast<std::size_t>(tokens_);
  half.step_targets = loader_.CountTargets(step);
  for (std::int32_t m = 0; m < microbatches_; ++m) {
    std::int32_t* at = pinned + m * 2 * tokens_;
    RETURN_IF_ERROR(loader_.Load(step, m, {at, n}, {at + tokens_, n}));
    half.target_counts[static_cast<std::size_t>(m)] =
        tokens_ - std::count(at + tokens_, at + 2 * tokens_, -1);
  }
  backend_.ops->copy(backend_.context, {.dst = device_half(into),
                                        .src = pinned,
                                        .bytes = half_elements() * 4,
                                        .kind = CopyKind::kToDevice,
                                        .lane = Lane::kCopy});
  half.step = step;
  return absl::OkStatus();
}

}  // namespace octavo
