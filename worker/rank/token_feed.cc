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
  feed.target_counts_.resize(static_cast<std::size_t>(microbatches));
  const std::int64_t count = std::int64_t{microbatches} * 2 * tokens;
  feed.device_ = device.Take<std::int32_t>(count);
  feed.pinned_ = pinned.Take<std::int32_t>(2 * count);
  if (feed.device_ == nullptr || feed.pinned_ == nullptr) {
    return ResourceExhaustedError(StrCat("no memory for ", count * 4, " bytes of tokens"));
  }
  return feed;
}

absl::Status TokenFeed::LoadStep(std::int64_t step) {
  // The device may still be copying the step before out of its half of the pinned buffer, and
  // should be busy with its optimizer: no wait here. The step before that is over, because every
  // pass ends with a wait for its sums.
  half_ = 1 - half_;
  const std::int64_t count = std::int64_t{microbatches_} * 2 * tokens_;
  std::int32_t* const pinned = pinned_ + half_ * count;
  const auto n = static_cast<std::size_t>(tokens_);
  step_targets_ = loader_.CountTargets(step);
  for (std::int32_t m = 0; m < microbatches_; ++m) {
    std::int32_t* at = pinned + m * 2 * tokens_;
    RETURN_IF_ERROR(loader_.Load(step, m, {at, n}, {at + tokens_, n}));
    target_counts_[static_cast<std::size_t>(m)] =
        tokens_ - std::count(at + tokens_, at + 2 * tokens_, -1);
  }
  backend_.ops->copy(
      backend_.context,
      {.dst = device_, .src = pinned, .bytes = count * 4, .kind = CopyKind::kToDevice});
  return absl::OkStatus();
}

}  // namespace octavo
