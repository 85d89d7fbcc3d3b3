#include "worker/data/loader.h"

#include <algorithm>

#include "base/check.h"
#include "base/status.h"
#include "base/str.h"

namespace octavo {

TrainValidationSplit SplitTail(std::int64_t token_count, double validation_fraction) {
  OCTAVO_CHECK(validation_fraction >= 0 && validation_fraction <= 0.5);
  const auto held_out =
      static_cast<std::int64_t>(static_cast<double>(token_count) * validation_fraction);
  return {.train = {.begin = 0, .end = token_count - held_out},
          .validation = {.begin = token_count - held_out, .end = token_count}};
}

absl::StatusOr<Loader> Loader::Create(std::shared_ptr<const TokenDataset> dataset,
                                      const LoaderOptions& options) {
  OCTAVO_CHECK(options.region.begin >= 0 && options.region.end <= dataset->token_count());
  OCTAVO_CHECK(options.rank >= 0 && options.rank < options.ranks);
  if (options.region.size() < options.sequence_length + 1) {
    return InvalidArgumentError(StrCat(
        dataset->path(), ": ", options.region.size(), " tokens (", options.region.begin, " to ",
        options.region.end, "); one sequence of ", options.sequence_length, " needs ",
        options.sequence_length + 1, ". Use more data or a smaller train.sequence_length"));
  }
  if (dataset->vocab_size() > options.vocab) {
    return InvalidArgumentError(StrCat(dataset->path(), ": its vocabulary has ",
                                       dataset->vocab_size(), " tokens, model.vocab_size is ",
                                       options.vocab, "; it must be at least as large"));
  }
  return Loader(std::move(dataset), options);
}

Loader::Loader(std::shared_ptr<const TokenDataset> dataset, const LoaderOptions& options)
    : dataset_(std::move(dataset)),
      options_(options),
      samples_((options.region.size() - 1) / options.sequence_length),
      sample_(static_cast<std::size_t>(options.sequence_length) + 1) {}

absl::Status Loader::Load(std::int64_t step, std::int32_t microbatch,
                          std::span<std::int32_t> tokens, std::span<std::int32_t> targets) {
  const auto length = static_cast<std::size_t>(options_.sequence_length);
  const auto sequences = static_cast<std::size_t>(options_.microbatch_sequences);
  OCTAVO_CHECK(microbatch >= 0 && microbatch < options_.microbatches);
  OCTAVO_CHECK_EQ(tokens.size(), sequences * length);
  OCTAVO_CHECK_EQ(targets.size(), sequences * length);
  const std::int64_t first = step * global_batch() + FirstSequence(microbatch);
  const OrderKey key{.seed = options_.seed, .samples = samples_};
  for (std::size_t s = 0; s < sequences; ++s) {
    const std::int64_t position = first + static_cast<std::int64_t>(s);
    const std::int64_t sample = options_.shuffle ? SampleAt(key, position) : position % samples_;
    const std::int64_t offset = options_.region.begin + sample * options_.sequence_length;
    RETURN_IF_ERROR(dataset_->Read(offset, sample_));
    const auto worst = std::max_element(sample_.begin(), sample_.end());
    if (*worst >= options_.vocab) {
      return DataLossError(StrCat(dataset_->path(), ": token ", *worst, " at position ",
                                  offset + (worst - sample_.begin()),
                                  " is outside model.vocab_size ", options_.vocab));
    }
    std::copy(sample_.begin(), sample_.end() - 1,
              tokens.begin() + static_cast<std::ptrdiff_t>(s * length));
    std::copy(sample_.begin() + 1, sample_.end(),
              targets.begin() + static_cast<std::ptrdiff_t>(s * length));
  }
  return absl::OkStatus();
}

}  // namespace octavo
