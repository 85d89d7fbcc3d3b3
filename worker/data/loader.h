// Gives a rank its tokens: microbatch m of step s, as a pure function of position.
//
// The sequences of a step are numbered 0..global_batch-1. Microbatch m of all ranks together is the
// contiguous block [m·R·b, (m+1)·R·b) and rank r holds the contiguous block [r·b, (r+1)·b) of it
// (R ranks, b sequences a rank and pass). So the same microbatch spread over more ranks is the same
// tokens in the same global order (NUMERICS 6), and what a step trains on does not depend on R.
//
// What a sequence is, sample_source.h says; a blend (blend.h) chooses the part it comes from. The
// tail of the dataset can be held out for validation (of a blend: of every part); the two regions
// share no token.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/data/blend.h"
#include "worker/data/sample_source.h"
#include "worker/data/token_dataset.h"

namespace octavo {

struct TrainValidationSplit {
  TokenRegion train, validation;
};
// The last floor(fraction · count) tokens are held out. REQUIRES: 0 <= fraction <= 0.5.
TrainValidationSplit SplitTail(std::int64_t token_count, double validation_fraction);

struct LoaderOptions {
  TokenRegion region;  // of a blend: the same fraction of every part
  std::int64_t sequence_length = 0;
  std::int64_t vocab = 0;  // of the model; a token outside is an error
  std::uint64_t seed = 0;
  std::int32_t rank = 0, ranks = 1;
  std::int32_t microbatch_sequences = 1;
  std::int32_t microbatches = 1;
  bool shuffle = true;  // false: in file order (validation)
  DocumentMode documents = DocumentMode::kPacked;
};

// Not thread-safe.
class Loader {
 public:
  // INVALID_ARGUMENT when the region is too short for one sequence or the dataset's vocabulary is
  // larger than the model's.
  static absl::StatusOr<Loader> Create(std::shared_ptr<const TokenDataset> dataset,
                                       const LoaderOptions& options);

  // tokens, targets: [microbatch_sequences · sequence_length]; targets of −1 have no loss.
  absl::Status Load(std::int64_t step, std::int32_t microbatch, std::span<std::int32_t> tokens,
                    std::span<std::int32_t> targets);
  // Targets with a loss in the whole step, over all ranks: the same number on each.
  std::int64_t CountTargets(std::int64_t step) const;

  std::int64_t samples() const;  // of all parts
  std::int64_t global_batch() const {
    return std::int64_t{options_.ranks} * options_.microbatch_sequences * options_.microbatches;
  }
  // Sequence number in the step of this rank's first sequence in the microbatch.
  std::int64_t FirstSequence(std::int32_t microbatch) const {
    return (std::int64_t{microbatch} * options_.ranks + options_.rank) *
           options_.microbatch_sequences;
  }

 private:
  struct Sample {
    const SampleSource* source;
    std::int64_t index;
  };
  Loader(const LoaderOptions& options, BlendOrder blend)
      : options_(options), blend_(std::move(blend)) {}
  // The sample at `position` of the whole order.
  Sample SampleOf(std::int64_t position) const;

  LoaderOptions options_;
  BlendOrder blend_;
  std::vector<SampleSource> sources_;  // one, or one a part of a blend
};

}  // namespace octavo
