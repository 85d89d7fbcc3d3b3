// Writes a dataset of our own format (token_dataset.h) front to back, then makes it visible at
// once: temporary file beside it, fsync, rename. A crash or a full disk leaves no half dataset
// behind under the final name.
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

namespace octavo {

// Not thread-safe. Destroyed without Finish: the temporary file is removed.
class DatasetWriter {
 public:
  // token_bytes: 1, 2 or 4; vocab_size <= 2^(8·token_bytes).
  static absl::StatusOr<std::unique_ptr<DatasetWriter>> Create(FileSystem& fs,
                                                               const std::string& path,
                                                               std::int32_t token_bytes,
                                                               std::int64_t vocab_size);
  ~DatasetWriter();
  DatasetWriter(const DatasetWriter&) = delete;
  DatasetWriter& operator=(const DatasetWriter&) = delete;

  // Tokens of the current document. INVALID_ARGUMENT for a token outside the vocabulary.
  absl::Status Append(std::span<const std::int32_t> tokens);
  // The same from bytes; REQUIRES token_bytes == 1 and vocab_size == 256.
  absl::Status AppendBytes(std::string_view bytes);
  // Ends the current document (an empty one is not recorded).
  void EndDocument();
  absl::Status Finish();

  std::int64_t token_count() const { return token_count_; }
  std::int64_t document_count() const { return static_cast<std::int64_t>(ends_.size()); }

 private:
  DatasetWriter(FileSystem& fs, std::string path, std::int32_t token_bytes,
                std::int64_t vocab_size);
  absl::Status AppendPayload(std::string_view bytes);

  FileSystem& fs_;
  const std::string path_, temporary_;
  const std::int32_t token_bytes_;
  const std::int64_t vocab_size_;
  std::unique_ptr<WritableFile> file_;
  std::int64_t token_count_ = 0;
  std::int64_t chunk_filled_ = 0;  // bytes of the current chunk
  std::uint32_t chunk_crc_ = 0;
  std::vector<std::uint32_t> chunks_;
  std::vector<std::uint64_t> ends_;
};

}  // namespace octavo
