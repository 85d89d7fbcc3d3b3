#include "worker/data/loader.h"

#include <algorithm>

#include "base/check.h"
#include "base/status.h"
#include "base/str.h"
#include "worker/data/order.h"

namespace octavo {

TrainValidationSplit SplitTail(std::int64_t token_count, double validation_fraction) {
  OCTAVO_CHECK(validation_fraction >= 0 && validation_fraction <= 0.5);
  const auto held_out =
      static_cast<std::int64_t>(static_cast<double>(token_count) * validation_fraction);
  return {.train = {.begin = 0, .end = token_count - held_out},
          .validation = {.begin = token_count - held_out, .end = token_count}};
}

namespace {

// A fraction of a blend is the same fraction of every part; cuts of adjacent regions meet.
TokenRegion RegionOfPart(const TokenRegion& region, std::int64_t whole, std::int64_t part) {
  const auto cut = [&](std::int64_t at) {
    return static_cast<std::int64_t>(static_cast<__int128>(at) * part / whole);
  };
  return {.begin = cut(region.begin), .end = cut(region.end)};
}

}  // namespace

absl::StatusOr<Loader> Loader::Create(std::shared_ptr<const TokenDataset> dataset,
                                      const LoaderOptions& options) {
  OCTAVO_CHECK(options.region.begin >= 0 && options.region.end <= dataset->token_count());
  OCTAVO_CHECK(options.rank >= 0 && options.rank < options.ranks);
  std::vector<BlendPart> parts(dataset->parts().begin(), dataset->parts().end());
  if (parts.empty()) {
    parts.push_back({.dataset = dataset, .weight = 1});
  }
  std::vector<double> weights;
  for (const BlendPart& part : parts) {
    weights.push_back(part.weight);
  }
  absl::StatusOr<BlendOrder> blend =
      BlendOrder::Create(weights, options.shuffle ? options.seed : 0);
  RETURN_IF_ERROR(Annotate(blend.status(), dataset->path()));
  Loader loader(options, *std::move(blend));
  for (const BlendPart& part : parts) {
    const TokenDataset& of_part = *part.dataset;
    if (of_part.vocab_size() > options.vocab) {
      return InvalidArgumentError(StrCat(of_part.path(), ": its vocabulary has ",
                                         of_part.vocab_size(), " tokens, model.vocab_size is ",
                                         options.vocab, "; it must be at least as large"));
    }
    ASSIGN_OR_RETURN(
        SampleSource source,
        SampleSource::Create(
            part.dataset,
            {.region = RegionOfPart(options.region, dataset->token_count(), of_part.token_count()),
             .sequence_length = options.sequence_length,
             .documents = options.documents}));
    loader.sources_.push_back(std::move(source));
  }
  return loader;
}

std::int64_t Loader::samples() const {
  std::int64_t sum = 0;
  for (const SampleSource& source : sources_) {
    sum += source.samples();
  }
  return sum;
}

Loader::Sample Loader::SampleOf(std::int64_t position) const {
  const BlendSlot slot = blend_.At(position);
  const SampleSource& source = sources_[static_cast<std::size_t>(slot.part)];
  // Parts of equal size must not move in step.
  const OrderKey key{.seed = options_.seed ^ static_cast<std::uint64_t>(slot.part) << 32,
                     .samples = source.samples()};
  return {
      .source = &source,
      .index = options_.shuffle ? SampleAt(key, slot.position) : slot.position % source.samples()};
}

std::int64_t Loader::CountTargets(std::int64_t step) const {
  if (options_.documents == DocumentMode::kPacked) {
    return global_batch() * options_.sequence_length;
  }
  std::int64_t targets = 0;
  for (std::int64_t s = 0; s < global_batch(); ++s) {
    const Sample sample = SampleOf(step * global_batch() + s);
    targets += sample.source->CountTargets(sample.index);
  }
  return targets;
}

absl::Status Loader::Load(std::int64_t step, std::int32_t microbatch,
                          std::span<std::int32_t> tokens, std::span<std::int32_t> targets) {
  const auto length = static_cast<std::size_t>(options_.sequence_length);
  const auto sequences = static_cast<std::size_t>(options_.microbatch_sequences);
  OCTAVO_CHECK(microbatch >= 0 && microbatch < options_.microbatches);
  OCTAVO_CHECK_EQ(tokens.size(), sequences * length);
  OCTAVO_CHECK_EQ(targets.size(), sequences * length);
  const std::int64_t first = step * global_batch() + FirstSequence(microbatch);
  for (std::size_t s = 0; s < sequences; ++s) {
    const Sample sample = SampleOf(first + static_cast<std::int64_t>(s));
    const auto inputs = tokens.subspan(s * length, length);
    const auto outputs = targets.subspan(s * length, length);
    RETURN_IF_ERROR(sample.source->Read(sample.index, inputs, outputs));
    for (std::size_t i = 0; i < length; ++i) {
      const std::int32_t worst = std::max(inputs[i], outputs[i]);
      if (worst >= options_.vocab) {
        return DataLossError(StrCat(sample.source->dataset().path(), ": token ", worst,
                                    " at position ",
                                    sample.source->OffsetOf(sample.index) +
                                        static_cast<std::int64_t>(i) + (inputs[i] == worst ? 0 : 1),
                                    " is outside model.vocab_size ", options_.vocab));
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace octavo
