#include "worker/tokenizer/sentencepiece_tokenizer.h"

#include <algorithm>
#include <atomic>
#include <thread>

#include "base/status.h"
#include "base/str.h"
#include "worker/data/dataset_writer.h"
#include "worker/data/token_dataset.h"
#include "worker/tokenizer/sentencepiece_bridge.h"

namespace octavo {
namespace {

std::int32_t ThreadCount(std::int32_t wanted) {
  return wanted > 0 ? wanted
                    : std::max(1, static_cast<std::int32_t>(std::thread::hardware_concurrency()));
}

// The part of `text` to encode next: all, or up to the last line end within the limit.
std::string_view NextPart(std::string_view text) {
  if (static_cast<std::int64_t>(text.size()) <= kEncodePartBytes) {
    return text;
  }
  const std::size_t line_end = text.rfind('\n', static_cast<std::size_t>(kEncodePartBytes) - 1);
  return text.substr(0, line_end == std::string_view::npos
                            ? static_cast<std::size_t>(kEncodePartBytes)
                            : line_end + 1);
}

// One file on its way to the dataset.
struct Job {
  std::string path;
  std::int64_t bytes_max = 0;
  std::int64_t bytes = 0;  // 0: unreadable or empty
  std::vector<std::int32_t> tokens;
  absl::Status status;
};

void EncodeFile(const FileSystem& fs, const SentencePieceTokenizer& tokenizer, Job* job) {
  const absl::StatusOr<std::string> text = fs.ReadFile(job->path);
  if (!text.ok() || text->empty()) {
    return;  // counted as skipped, like every unreadable file
  }
  std::string_view rest = std::string_view(*text).substr(
      0, static_cast<std::size_t>(
             std::min<std::int64_t>(static_cast<std::int64_t>(text->size()), job->bytes_max)));
  job->bytes = static_cast<std::int64_t>(rest.size());
  while (!rest.empty()) {
    const std::string_view part = NextPart(rest);
    absl::StatusOr<std::vector<std::int32_t>> tokens = tokenizer.Encode(part);
    if (!tokens.ok()) {
      job->status = Annotate(tokens.status(), job->path);
      return;
    }
    job->tokens.insert(job->tokens.end(), tokens->begin(), tokens->end());
    rest.remove_prefix(part.size());
  }
  if (tokenizer.end_id() >= 0) {
    job->tokens.push_back(tokenizer.end_id());
  }
}

// Encodes all jobs; returns when they are done.
void EncodeAll(const FileSystem& fs, const SentencePieceTokenizer& tokenizer, std::int32_t threads,
               std::vector<Job>* jobs) {
  std::atomic<std::size_t> next{0};
  const auto work = [&] {
    for (std::size_t i = next.fetch_add(1); i < jobs->size(); i = next.fetch_add(1)) {
      EncodeFile(fs, tokenizer, &(*jobs)[i]);
    }
  };
  std::vector<std::jthread> helpers;
  for (std::int32_t t = 1; t < threads; ++t) {
    helpers.emplace_back(work);
  }
  work();
}

// Lines of files, at most `share` bytes of each, one after the other.
class LineReader {
 public:
  LineReader(const FileSystem& fs, std::vector<std::string> files, std::int64_t share)
      : fs_(fs), files_(std::move(files)), share_(share) {}

  bool Next(std::string* line) {
    while (at_ >= text_.size()) {
      if (file_ == files_.size()) {
        return false;
      }
      absl::StatusOr<std::string> text = fs_.ReadFile(files_[file_++]);
      text_ = text.ok() ? *std::move(text) : std::string();
      text_.resize(std::min(text_.size(), static_cast<std::size_t>(share_)));
      at_ = 0;
      summary_.files += text_.empty() ? 0 : 1;
    }
    const std::size_t end = std::min(text_.find('\n', at_), text_.size());
    *line = text_.substr(at_, end - at_);
    // Inside files that are no text: the trainer takes NUL for its own.
    std::replace(line->begin(), line->end(), '\0', ' ');
    at_ = end + 1;
    ++summary_.lines;
    summary_.bytes += static_cast<std::int64_t>(line->size());
    return true;
  }
  const TrainSentencePieceSummary& summary() const { return summary_; }

 private:
  const FileSystem& fs_;
  const std::vector<std::string> files_;
  const std::int64_t share_;
  std::size_t file_ = 0;
  std::string text_;
  std::size_t at_ = 0;
  TrainSentencePieceSummary summary_;
};

}  // namespace

SentencePieceTokenizer::SentencePieceTokenizer(std::unique_ptr<sentencepiece_bridge::Model> model)
    : model_(std::move(model)) {}
SentencePieceTokenizer::~SentencePieceTokenizer() = default;

absl::StatusOr<std::unique_ptr<SentencePieceTokenizer>> SentencePieceTokenizer::Load(
    const FileSystem& fs, const std::string& path) {
  ASSIGN_OR_RETURN(const std::string bytes, fs.ReadFile(path));
  auto model = std::make_unique<sentencepiece_bridge::Model>();
  const std::string error = model->Load(bytes);
  if (!error.empty() || model->vocab_size() == 0) {
    return InvalidArgumentError(StrCat(path, ": not a SentencePiece model: ", error));
  }
  return std::unique_ptr<SentencePieceTokenizer>(new SentencePieceTokenizer(std::move(model)));
}

std::int64_t SentencePieceTokenizer::vocab_size() const { return model_->vocab_size(); }
std::int32_t SentencePieceTokenizer::end_id() const { return model_->end_id(); }

absl::StatusOr<std::vector<std::int32_t>> SentencePieceTokenizer::Encode(
    std::string_view text) const {
  std::vector<int> ids;
  const std::string error = model_->Encode(text, &ids);
  if (!error.empty()) {
    return InvalidArgumentError(StrCat("encoding ", text.size(), " bytes: ", error));
  }
  return ids;
}

absl::StatusOr<std::string> SentencePieceTokenizer::Decode(
    std::span<const std::int32_t> tokens) const {
  for (const std::int32_t token : tokens) {
    if (token < 0 || token >= vocab_size()) {
      return InvalidArgumentError(
          StrCat("decoding token ", token, "; the model has 0 to ", vocab_size() - 1));
    }
  }
  std::string text;
  const std::string error = model_->Decode({tokens.begin(), tokens.end()}, &text);
  if (!error.empty()) {
    return InvalidArgumentError(StrCat("decoding ", tokens.size(), " tokens: ", error));
  }
  return text;
}

absl::StatusOr<BuildSummary> BuildSentencePieceDataset(FileSystem& fs,
                                                       const SentencePieceTokenizer& tokenizer,
                                                       const BuildSentencePieceOptions& options) {
  constexpr std::int64_t kBatchBytes = 64 << 20;  // of text in memory, the last file of it whole
  constexpr std::size_t kBatchFiles = 4096;
  BuildSummary summary;
  ASSIGN_OR_RETURN(const std::vector<std::string> files,
                   ListInputFiles(options.inputs, &summary.skipped));
  const std::int64_t vocab = tokenizer.vocab_size();
  ASSIGN_OR_RETURN(std::unique_ptr<DatasetWriter> writer,
                   DatasetWriter::Create(fs, options.output,
                                         vocab <= 256     ? 1
                                         : vocab <= 65536 ? 2
                                                          : 4,
                                         vocab));
  const std::int32_t threads = ThreadCount(options.threads);
  const std::int64_t limit = options.max_bytes > 0 ? options.max_bytes : INT64_MAX;
  BuildProgress progress{.files_total = static_cast<std::int64_t>(files.size())};
  std::size_t next = 0;
  while (next < files.size() && progress.bytes_done < limit) {
    std::vector<Job> jobs;
    // Sizes are looked up first, so that the byte limit falls on the same byte for any batch.
    for (std::int64_t bytes = 0; next < files.size() && jobs.size() < kBatchFiles &&
                                 bytes < kBatchBytes && progress.bytes_done + bytes < limit;
         ++next) {
      jobs.push_back({.path = files[next], .bytes_max = limit - progress.bytes_done - bytes});
      const absl::StatusOr<std::int64_t> size = fs.FileSize(files[next]);
      bytes += size.ok() ? std::min(*size, jobs.back().bytes_max) : 0;
    }
    EncodeAll(fs, tokenizer, threads, &jobs);
    for (const Job& job : jobs) {
      RETURN_IF_ERROR(job.status);
      ++progress.files_done;
      if (job.bytes == 0) {
        ++summary.skipped;
        continue;
      }
      RETURN_IF_ERROR(writer->Append(job.tokens));
      writer->EndDocument();
      ++summary.files;
      progress.bytes_done += job.bytes;
    }
    if (options.progress) {
      options.progress(progress);
    }
  }
  if (writer->token_count() == 0) {
    return InvalidArgumentError(StrCat("building ", options.output, ": no readable text in ",
                                       StrJoin(options.inputs, ", ")));
  }
  summary.tokens = writer->token_count();
  summary.documents = writer->document_count();
  RETURN_IF_ERROR(writer->Finish());
  ASSIGN_OR_RETURN(const std::unique_ptr<TokenDataset> dataset,
                   OpenTokenDataset(fs, options.output));
  ASSIGN_OR_RETURN(summary.unigram_entropy, UnigramEntropy(*dataset, 0, summary.tokens));
  return summary;
}

absl::StatusOr<TrainSentencePieceSummary> TrainSentencePiece(
    FileSystem& fs, const TrainSentencePieceOptions& options) {
  std::int64_t skipped = 0;
  ASSIGN_OR_RETURN(const std::vector<std::string> files, ListInputFiles(options.inputs, &skipped));
  if (files.empty()) {
    return InvalidArgumentError(
        StrCat("training a tokenizer: no files in ", StrJoin(options.inputs, ", ")));
  }
  // Small files give less than their share; what they leave is not handed to others, so that the
  // sample of a tree does not depend on the order of its files.
  const std::int64_t share =
      std::max<std::int64_t>(options.max_bytes / static_cast<std::int64_t>(files.size()), 1);
  LineReader reader(fs, files, share);
  std::string model;
  const std::string error = sentencepiece_bridge::Train(
      {.vocab_size = static_cast<int>(options.vocab_size),
       .type = options.type == SentencePieceType::kBpe ? "bpe" : "unigram",
       .threads = ThreadCount(options.threads),
       .character_coverage = options.character_coverage,
       .next = [&reader](std::string* line) { return reader.Next(line); }},
      &model);
  TrainSentencePieceSummary summary = reader.summary();
  if (!error.empty()) {
    return InvalidArgumentError(StrCat("training a tokenizer of ", options.vocab_size,
                                       " pieces on ", summary.bytes, " bytes: ", error));
  }
  RETURN_IF_ERROR(fs.WriteFileAtomic(options.output, model));
  ASSIGN_OR_RETURN(const std::unique_ptr<SentencePieceTokenizer> tokenizer,
                   SentencePieceTokenizer::Load(fs, options.output));
  summary.vocab_size = tokenizer->vocab_size();
  return summary;
}

}  // namespace octavo
