#include "worker/data/sample_source.h"

#include <algorithm>

#include "base/check.h"
#include "base/status.h"
#include "base/str.h"

namespace octavo {

absl::StatusOr<SampleSource> SampleSource::Create(std::shared_ptr<const TokenDataset> dataset,
                                                  const SampleSourceOptions& options) {
  const TokenRegion& region = options.region;
  OCTAVO_CHECK(region.begin >= 0 && region.end <= dataset->token_count());
  SampleSource source(std::move(dataset), options);
  const std::string& path = source.dataset_->path();
  if (options.documents != DocumentMode::kPacked && source.dataset_->document_count() == 0) {
    return InvalidArgumentError(StrCat(path, ": ", source.dataset_->format_name(),
                                       " data without documents; valid is data.documents: packed"));
  }
  if (options.documents == DocumentMode::kSeparate) {
    RETURN_IF_ERROR(source.IndexDocuments());
    return source;
  }
  if (region.size() < options.sequence_length + 1) {
    return InvalidArgumentError(StrCat(path, ": ", region.size(), " tokens (", region.begin, " to ",
                                       region.end, "); one sequence of ", options.sequence_length,
                                       " needs ", options.sequence_length + 1,
                                       ". Use more data or a smaller train.sequence_length"));
  }
  source.samples_ = (region.size() - 1) / options.sequence_length;
  return source;
}

absl::Status SampleSource::IndexDocuments() {
  const TokenRegion& region = options_.region;
  std::int64_t begin = 0;
  for (std::int64_t d = 0; d < dataset_->document_count() && begin < region.end; ++d) {
    const std::int64_t end = dataset_->DocumentEnd(d);
    const Document document{.begin = std::max(begin, region.begin),
                            .end = std::min(end, region.end),
                            .first_sample = samples_};
    begin = end;
    const std::int64_t targets = document.end - document.begin - 1;
    if (targets < 1) {
      continue;  // one token has nothing to foretell
    }
    samples_ += (targets + options_.sequence_length - 1) / options_.sequence_length;
    documents_.push_back(document);
  }
  if (samples_ == 0) {
    return InvalidArgumentError(StrCat(dataset_->path(), ": no document of two tokens or more in [",
                                       region.begin, ", ", region.end, ")"));
  }
  return absl::OkStatus();
}

SampleSource::Place SampleSource::PlaceOf(std::int64_t sample) const {
  const std::int64_t length = options_.sequence_length;
  if (options_.documents != DocumentMode::kSeparate) {
    return {.offset = options_.region.begin + sample * length, .targets = length};
  }
  const auto after = std::upper_bound(
      documents_.begin(), documents_.end(), sample,
      [](std::int64_t s, const Document& document) { return s < document.first_sample; });
  const Document& document = *std::prev(after);
  const std::int64_t offset = document.begin + (sample - document.first_sample) * length;
  return {.offset = offset, .targets = std::min(length, document.end - 1 - offset)};
}

std::int64_t SampleSource::DocumentsBefore(std::int64_t position) const {
  std::int64_t low = 0, high = dataset_->document_count();
  while (low < high) {
    const std::int64_t middle = low + (high - low) / 2;
    if (dataset_->DocumentEnd(middle) <= position) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

std::int64_t SampleSource::CountTargets(std::int64_t sample) const {
  const Place place = PlaceOf(sample);
  if (options_.documents != DocumentMode::kMasked) {
    return place.targets;
  }
  // Targets are tokens offset + 1 … offset + S; those where a document has just ended do not count.
  return place.targets -
         (DocumentsBefore(place.offset + place.targets) - DocumentsBefore(place.offset));
}

absl::Status SampleSource::Read(std::int64_t sample, std::span<std::int32_t> tokens,
                                std::span<std::int32_t> targets) const {
  const Place place = PlaceOf(sample);
  const auto n = static_cast<std::size_t>(place.targets);
  // Tokens first, the last target aside: it is the token behind them.
  RETURN_IF_ERROR(dataset_->Read(place.offset, tokens.first(n)));
  std::copy(tokens.begin() + 1, tokens.begin() + static_cast<std::ptrdiff_t>(n), targets.begin());
  RETURN_IF_ERROR(dataset_->Read(place.offset + place.targets, targets.subspan(n - 1, 1)));
  std::fill(tokens.begin() + static_cast<std::ptrdiff_t>(n), tokens.end(), 0);
  std::fill(targets.begin() + static_cast<std::ptrdiff_t>(n), targets.end(), -1);
  if (options_.documents == DocumentMode::kMasked) {
    for (std::int64_t d = DocumentsBefore(place.offset); d < dataset_->document_count(); ++d) {
      const std::int64_t end = dataset_->DocumentEnd(d);
      if (end > place.offset + place.targets) {
        break;
      }
      targets[static_cast<std::size_t>(end - place.offset - 1)] = -1;
    }
  }
  return absl::OkStatus();
}

}  // namespace octavo
