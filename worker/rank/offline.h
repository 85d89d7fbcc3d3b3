// A model without a job: loss on a dataset, logits, text. One rank, no worker, no session.
//
//   ASSIGN_OR_RETURN(auto model, OfflineModel::Open(fs, {.path = "ckpt/step-…", .backend = backend,
//                                                        .sequence_length = 256}));
//   ASSIGN_OR_RETURN(EvaluationResult r, EvaluateDataset(*model, dataset, {}));
//   Generate(*model, prompt, {.tokens = 100}, on_token);
//
// It runs the same Transformer as training does, so what is measured is what was trained, in the
// recipe asked for. It also takes the memory of training (gradients and moments included): a model
// that trained on one rank evaluates there. `path` is a checkpoint, a folder of them (the newest),
// or a Hugging Face folder.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/file.h"
#include "kernels/arena.h"
#include "proto/precision/recipe.h"
#include "worker/comm/communicator.h"
#include "worker/data/sample_source.h"
#include "worker/model/transformer.h"

namespace octavo {

inline constexpr std::int64_t kUnknownSequenceLength = 256;

struct OfflineModelOptions {
  std::string path;
  Backend backend;  // not owned
  // 0: as the weights were trained (manifest) or are meant (Hugging Face's config.json, at most
  // 2048); kUnknownSequenceLength where neither says.
  std::int64_t sequence_length = 0;
  std::int32_t sequences = 1;  // in one pass
  RecipeKind recipe = RecipeKind::kBf16;
};

// Not thread-safe.
class OfflineModel {
 public:
  // Checksums of all shards are checked. NOT_FOUND, DATA_LOSS; INVALID_ARGUMENT when the recipe
  // does not fit the model or device; RESOURCE_EXHAUSTED names the bytes.
  static absl::StatusOr<std::unique_ptr<OfflineModel>> Open(const FileSystem& fs,
                                                            const OfflineModelOptions& options);

  // tokens, targets: [sequences · sequence_length] on the host. Adds the losses of targets >= 0.
  absl::Status Loss(std::span<const std::int32_t> tokens, std::span<const std::int32_t> targets,
                    double* loss_sum);
  // FP32 logits of rows [first, first + rows) of the pass into out [rows, V].
  absl::Status Logits(std::span<const std::int32_t> tokens, std::int64_t first, std::int64_t rows,
                      std::span<float> out);

  const ModelConfig& model() const { return model_; }
  const std::string& source() const { return source_; }  // checkpoint or folder that was read
  std::int64_t step() const { return step_; }            // trained steps; 0 for a folder
  std::int64_t sequence_length() const { return sequence_length_; }
  std::int32_t sequences() const { return options_.sequences; }

 private:
  explicit OfflineModel(const OfflineModelOptions& options);
  absl::Status Load(const FileSystem& fs);
  absl::Status Build();
  void ToDevice(std::span<const std::int32_t> host, std::int32_t* device);

  const OfflineModelOptions options_;
  std::string source_;
  std::int64_t step_ = 0;
  std::int64_t sequence_length_;
  ModelConfig model_;
  std::unique_ptr<Communicator> self_;
  Arena arena_;
  std::unique_ptr<Transformer> transformer_;
  std::int32_t* tokens_ = nullptr;  // device, [sequences · sequence_length]
  std::int32_t* targets_ = nullptr;
};

struct EvaluationOptions {
  TokenRegion region;  // of the dataset; empty: all of it
  DocumentMode documents = DocumentMode::kPacked;
  std::int64_t sequences_max = 0;  // 0: all
  std::string logits_file;         // safetensors with `tokens` [n, S] and `logits` [n, S, V]
  std::function<void(std::int64_t done, std::int64_t total)> progress;  // sequences; may be empty
};
struct EvaluationResult {
  std::int64_t sequences = 0, tokens = 0;  // tokens: targets that counted
  double loss = 0;                         // mean, nats
  double perplexity = 0;                   // e^loss
};
// Sequences in file order. DATA_LOSS when a token is outside the vocabulary or the loss is not
// finite. The logits' file appears whole or not at all.
absl::StatusOr<EvaluationResult> EvaluateDataset(FileSystem& fs, OfflineModel& model,
                                                 std::shared_ptr<const TokenDataset> dataset,
                                                 const EvaluationOptions& options);

struct SamplingOptions {
  std::int64_t tokens = 0;  // to generate
  double temperature = 0;   // 0: the likeliest token always
  double top_p = 1;         // only the likeliest tokens that together have this probability
  std::uint64_t seed = 0;   // the same seed gives the same text
};
// The token that logits [V] and a number in [0, 1) choose. Ties go to the lower token.
std::int32_t ChooseToken(std::span<const float> logits, const SamplingOptions& options,
                         double uniform);
// Appends options.tokens tokens to the prompt and calls on_token for each; it may end the
// generation by returning false. What is older than the model's sequence_length is forgotten.
// INVALID_ARGUMENT: no prompt, or a token outside the vocabulary.
absl::Status Generate(OfflineModel& model, std::span<const std::int32_t> prompt,
                      const SamplingOptions& options,
                      const std::function<bool(std::int32_t token)>& on_token);

// What `octavo-rank --offline` ends with, of the octavo command's exit codes: 1 for a damaged file
// and for a disk or device without room, 2 for a wrong argument, 3 for a file that is not there.
int OfflineExitCode(const absl::Status& status);

}  // namespace octavo
