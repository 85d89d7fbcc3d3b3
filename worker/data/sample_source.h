// The samples of one dataset: sequences of S tokens with their targets, numbered from 0.
//
// How sequences meet documents (a job's data.documents):
//   packed    sample i is tokens [i·S, i·S + S] of the region: S inputs and, one further, S
//   targets;
//             documents follow each other and their ends are ordinary text
//   masked    the same, but no loss is taken for the first token of a document, which nothing
//             before it foretells
//   separate  a sample holds tokens of one document; a document of L tokens gives ceil((L−1)/S)
//             samples and the last is padded with token 0 without loss. No token sees another
//             document.
// A target of −1 has no loss.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/data/token_dataset.h"

namespace octavo {

enum class DocumentMode : std::uint8_t { kPacked, kMasked, kSeparate };

// Tokens [begin, end) of a dataset.
struct TokenRegion {
  std::int64_t begin = 0, end = 0;
  std::int64_t size() const { return end - begin; }
};

struct SampleSourceOptions {
  TokenRegion region;
  std::int64_t sequence_length = 0;
  DocumentMode documents = DocumentMode::kPacked;
};

// Immutable after Create; thread-safe.
class SampleSource {
 public:
  // INVALID_ARGUMENT when the region holds no sample, or documents matter and the format has none.
  static absl::StatusOr<SampleSource> Create(std::shared_ptr<const TokenDataset> dataset,
                                             const SampleSourceOptions& options);

  std::int64_t samples() const { return samples_; }
  // tokens, targets: [sequence_length].
  absl::Status Read(std::int64_t sample, std::span<std::int32_t> tokens,
                    std::span<std::int32_t> targets) const;
  // How many targets of the sample have a loss; known without reading tokens.
  std::int64_t CountTargets(std::int64_t sample) const;

  const TokenDataset& dataset() const { return *dataset_; }
  // Position in the dataset of a sample's first token.
  std::int64_t OffsetOf(std::int64_t sample) const { return PlaceOf(sample).offset; }

 private:
  struct Place {
    std::int64_t offset = 0;
    std::int64_t targets = 0;  // tokens that follow the first
  };
  SampleSource(std::shared_ptr<const TokenDataset> dataset, const SampleSourceOptions& options)
      : dataset_(std::move(dataset)), options_(options) {}
  absl::Status IndexDocuments();
  Place PlaceOf(std::int64_t sample) const;
  // Number of documents that end at or before token `position`.
  std::int64_t DocumentsBefore(std::int64_t position) const;

  std::shared_ptr<const TokenDataset> dataset_;
  SampleSourceOptions options_;
  std::int64_t samples_ = 0;
  // kSeparate: documents with at least two tokens in the region, and the samples before each.
  struct Document {
    std::int64_t begin = 0, end = 0;
    std::int64_t first_sample = 0;
  };
  std::vector<Document> documents_;
};

}  // namespace octavo
