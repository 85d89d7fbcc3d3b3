// SentencePiece models: train one on text, turn text into tokens and back, build datasets with it.
//
//   RETURN_IF_ERROR(TrainSentencePiece(fs, {.inputs = {"text/"}, .output = "sp.model",
//                                           .vocab_size = 8192}).status());
//   ASSIGN_OR_RETURN(auto tokenizer, SentencePieceTokenizer::Load(fs, "sp.model"));
//   BuildSentencePieceDataset(fs, *tokenizer, {.inputs = {"text/"}, .output = "text.octd"});
//
// Models trained here keep text as it is (no normalisation, byte pieces for what is rare), so
// decode inverts encode; other models do what they were trained to do. Every file is a document and
// ends in the model's end-of-document token, if it has one. Files are encoded by several threads
// and written in their order: the dataset does not depend on the number of threads.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/file.h"
#include "worker/data/build.h"

namespace octavo {

namespace sentencepiece_bridge {
class Model;
}

// Immutable; thread-safe.
class SentencePieceTokenizer {
 public:
  // NOT_FOUND; INVALID_ARGUMENT when the file is no SentencePiece model.
  static absl::StatusOr<std::unique_ptr<SentencePieceTokenizer>> Load(const FileSystem& fs,
                                                                      const std::string& path);
  ~SentencePieceTokenizer();

  std::int64_t vocab_size() const;
  // Ends a document; −1: the model has none.
  std::int32_t end_id() const;
  absl::StatusOr<std::vector<std::int32_t>> Encode(std::string_view text) const;
  absl::StatusOr<std::string> Decode(std::span<const std::int32_t> tokens) const;

 private:
  explicit SentencePieceTokenizer(std::unique_ptr<sentencepiece_bridge::Model> model);
  std::unique_ptr<sentencepiece_bridge::Model> model_;
};

// Texts longer than this are encoded in parts that end at a line end, which bounds memory.
inline constexpr std::int64_t kEncodePartBytes = 4 << 20;

struct BuildSentencePieceOptions {
  std::vector<std::string> inputs;  // files and folders, in this order
  std::string output;
  std::int64_t max_bytes = 0;  // stop after so many bytes of text; 0: no limit
  std::int32_t threads = 0;    // 0: as many as the machine has cores
  std::function<void(const BuildProgress&)> progress;  // from the calling thread; may be empty
};
absl::StatusOr<BuildSummary> BuildSentencePieceDataset(FileSystem& fs,
                                                       const SentencePieceTokenizer& tokenizer,
                                                       const BuildSentencePieceOptions& options);

enum class SentencePieceType : std::uint8_t { kBpe, kUnigram };

struct TrainSentencePieceOptions {
  std::vector<std::string> inputs;
  std::string output;  // the model
  std::int64_t vocab_size = 0;
  SentencePieceType type = SentencePieceType::kBpe;
  std::int64_t max_bytes = 100 << 20;  // of text read, spread evenly over the files
  double character_coverage = 0.9995;  // rarer characters become bytes
  std::int32_t threads = 0;
};
struct TrainSentencePieceSummary {
  std::int64_t files = 0, lines = 0, bytes = 0;
  std::int64_t vocab_size = 0;
};
// INVALID_ARGUMENT: no text, or a vocabulary that the text cannot fill (the library's message says
// the largest possible).
absl::StatusOr<TrainSentencePieceSummary> TrainSentencePiece(
    FileSystem& fs, const TrainSentencePieceOptions& options);

}  // namespace octavo
