#include "worker/data/dataset_writer.h"

#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "base/check.h"
#include "base/crc32c.h"
#include "base/status.h"
#include "base/str.h"
#include "worker/data/token_dataset.h"

namespace octavo {

absl::StatusOr<std::unique_ptr<DatasetWriter>> DatasetWriter::Create(FileSystem& fs,
                                                                     const std::string& path,
                                                                     std::int32_t token_bytes,
                                                                     std::int64_t vocab_size) {
  OCTAVO_CHECK(token_bytes == 1 || token_bytes == 2 || token_bytes == 4);
  if (vocab_size < 1 || (token_bytes < 4 && vocab_size > (1ll << (8 * token_bytes))) ||
      vocab_size > (1ll << 31)) {
    return InvalidArgumentError(StrCat("writing ", path, ": vocabulary of ", vocab_size,
                                       " does not fit tokens of ", token_bytes, " bytes"));
  }
  auto writer =
      std::unique_ptr<DatasetWriter>(new DatasetWriter(fs, path, token_bytes, vocab_size));
  RETURN_IF_ERROR(fs.CreateDirectories(DirectoryName(path)));
  ASSIGN_OR_RETURN(writer->file_, fs.OpenForWrite(writer->temporary_));
  std::string head(dataset_format::kHeadMagic, 8);
  const std::uint32_t fields[2] = {dataset_format::kVersion,
                                   static_cast<std::uint32_t>(token_bytes)};
  head.append(reinterpret_cast<const char*>(fields), sizeof(fields));
  RETURN_IF_ERROR(writer->file_->Append(head));
  return writer;
}

DatasetWriter::DatasetWriter(FileSystem& fs, std::string path, std::int32_t token_bytes,
                             std::int64_t vocab_size)
    : fs_(fs),
      path_(std::move(path)),
      temporary_(StrCat(path_, ".tmp.", getpid())),
      token_bytes_(token_bytes),
      vocab_size_(vocab_size) {}

DatasetWriter::~DatasetWriter() {
  if (file_ != nullptr) {
    file_.reset();
    fs_.Remove(temporary_).IgnoreError();
  }
}

absl::Status DatasetWriter::Append(std::span<const std::int32_t> tokens) {
  std::string bytes(tokens.size() * static_cast<std::size_t>(token_bytes_), '\0');
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    if (tokens[i] < 0 || tokens[i] >= vocab_size_) {
      return InvalidArgumentError(StrCat("writing ", path_, ": token ", tokens[i], " at position ",
                                         token_count_ + static_cast<std::int64_t>(i),
                                         "; valid are 0 to ", vocab_size_ - 1));
    }
    std::memcpy(&bytes[i * static_cast<std::size_t>(token_bytes_)], &tokens[i],
                static_cast<std::size_t>(token_bytes_));
  }
  RETURN_IF_ERROR(AppendPayload(bytes));
  token_count_ += static_cast<std::int64_t>(tokens.size());
  return absl::OkStatus();
}

absl::Status DatasetWriter::AppendBytes(std::string_view bytes) {
  OCTAVO_CHECK(token_bytes_ == 1 && vocab_size_ == 256);
  RETURN_IF_ERROR(AppendPayload(bytes));
  token_count_ += static_cast<std::int64_t>(bytes.size());
  return absl::OkStatus();
}

absl::Status DatasetWriter::AppendPayload(std::string_view bytes) {
  RETURN_IF_ERROR(file_->Append(bytes));
  while (!bytes.empty()) {
    const auto part = static_cast<std::size_t>(std::min<std::int64_t>(
        static_cast<std::int64_t>(bytes.size()), dataset_format::kChunkBytes - chunk_filled_));
    chunk_crc_ = Crc32cExtend(chunk_crc_, bytes.data(), part);
    chunk_filled_ += static_cast<std::int64_t>(part);
    bytes.remove_prefix(part);
    if (chunk_filled_ == dataset_format::kChunkBytes) {
      chunks_.push_back(chunk_crc_);
      chunk_crc_ = 0;
      chunk_filled_ = 0;
    }
  }
  return absl::OkStatus();
}

void DatasetWriter::EndDocument() {
  const auto end = static_cast<std::uint64_t>(token_count_);
  if (end > (ends_.empty() ? 0 : ends_.back())) {
    ends_.push_back(end);
  }
}

absl::Status DatasetWriter::Finish() {
  OCTAVO_CHECK(file_ != nullptr);
  EndDocument();
  const std::string zeros(8, '\0');
  const std::int64_t payload = token_count_ * token_bytes_;
  const std::int64_t pad = (8 - payload % 8) % 8;
  RETURN_IF_ERROR(AppendPayload(std::string_view(zeros).substr(0, static_cast<std::size_t>(pad))));
  if (chunk_filled_ > 0) {
    chunks_.push_back(chunk_crc_);
  }
  dataset_format::Foot foot{};
  foot.token_count = static_cast<std::uint64_t>(token_count_);
  foot.document_count = ends_.size();
  foot.vocab_size = static_cast<std::uint64_t>(vocab_size_);
  foot.chunk_bytes = dataset_format::kChunkBytes;
  foot.ends_crc = Crc32c(ends_.data(), ends_.size() * 8);
  foot.chunks_crc = Crc32c(chunks_.data(), chunks_.size() * 4);
  foot.foot_crc = Crc32c(&foot, offsetof(dataset_format::Foot, foot_crc));
  std::memcpy(foot.magic, dataset_format::kFootMagic, 8);
  if (chunks_.size() % 2 != 0) {
    chunks_.push_back(0);  // padding to 8 bytes, after the checksum was taken
  }
  const auto view = [](const void* data, std::size_t size) {
    return std::string_view(static_cast<const char*>(data), size);
  };
  RETURN_IF_ERROR(file_->Append(view(ends_.data(), ends_.size() * 8)));
  RETURN_IF_ERROR(file_->Append(view(chunks_.data(), chunks_.size() * 4)));
  RETURN_IF_ERROR(file_->Append(view(&foot, sizeof(foot))));
  RETURN_IF_ERROR(file_->Sync());
  RETURN_IF_ERROR(file_->Close());
  RETURN_IF_ERROR(fs_.Rename(temporary_, path_));
  file_.reset();
  return fs_.SyncDirectory(DirectoryName(path_));
}

}  // namespace octavo
