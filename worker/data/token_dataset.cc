#include "worker/data/token_dataset.h"

#include <atomic>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <vector>

#include "base/crc32c.h"
#include "base/status.h"
#include "base/str.h"
#include "worker/data/blend.h"
#include "worker/data/llmc.h"
#include "worker/data/megatron.h"

namespace octavo {
namespace dataset_format {

static_assert(std::endian::native == std::endian::little, "files are mapped as they lie");

Extent ExtentOf(std::int64_t token_count, std::int64_t token_bytes, std::int64_t document_count,
                std::int64_t chunk_bytes) {
  const auto round8 = [](std::int64_t n) { return (n + 7) / 8 * 8; };
  Extent e;
  e.tokens_bytes = round8(token_count * token_bytes);
  e.ends_offset = kHeadBytes + e.tokens_bytes;
  e.chunks_offset = e.ends_offset + document_count * 8;
  e.chunk_count = (e.tokens_bytes + chunk_bytes - 1) / chunk_bytes;
  e.foot_offset = e.chunks_offset + round8(e.chunk_count * 4);
  e.file_bytes = e.foot_offset + kFootBytes;
  return e;
}

}  // namespace dataset_format

namespace {

using dataset_format::Extent;
using dataset_format::Foot;

class OctavoDataset final : public TokenDataset {
 public:
  OctavoDataset(std::string path, std::unique_ptr<RandomAccessFile> file, std::string_view bytes,
                std::int32_t token_bytes, const Foot& foot, const Extent& extent)
      : path_(std::move(path)),
        file_(std::move(file)),
        bytes_(bytes),
        token_bytes_(token_bytes),
        foot_(foot),
        extent_(extent),
        verified_(static_cast<std::size_t>(extent.chunk_count)) {}

  std::int64_t token_count() const override { return static_cast<std::int64_t>(foot_.token_count); }
  std::int64_t vocab_size() const override { return static_cast<std::int64_t>(foot_.vocab_size); }
  std::int64_t document_count() const override {
    return static_cast<std::int64_t>(foot_.document_count);
  }
  std::int64_t DocumentEnd(std::int64_t index) const override {
    std::uint64_t end;
    std::memcpy(&end, bytes_.data() + extent_.ends_offset + index * 8, 8);
    return static_cast<std::int64_t>(end);
  }
  std::int32_t token_bytes() const override { return token_bytes_; }
  std::string format_name() const override { return "octavo v1"; }
  const std::string& path() const override { return path_; }

  absl::Status Read(std::int64_t offset, std::span<std::int32_t> out) const override {
    const auto count = static_cast<std::int64_t>(out.size());
    if (offset < 0 || offset > token_count() - count) {
      return OutOfRangeError(StrCat("reading tokens ", offset, " to ", offset + count, " of ",
                                    path_, ": it has ", token_count()));
    }
    RETURN_IF_ERROR(VerifyChunks(offset * token_bytes_, count * token_bytes_));
    const char* at = bytes_.data() + dataset_format::kHeadBytes + offset * token_bytes_;
    for (std::int64_t i = 0; i < count; ++i) {
      std::uint32_t token = 0;
      std::memcpy(&token, at + i * token_bytes_, static_cast<std::size_t>(token_bytes_));
      if (token >= foot_.vocab_size) {
        return DataLossError(StrCat(path_, ": token ", token, " at byte offset ",
                                    dataset_format::kHeadBytes + (offset + i) * token_bytes_,
                                    " is outside the dataset's vocabulary of ", foot_.vocab_size,
                                    "; build it again"));
      }
      out[static_cast<std::size_t>(i)] = static_cast<std::int32_t>(token);
    }
    return absl::OkStatus();
  }

  absl::Status Verify() const override { return VerifyChunks(0, extent_.tokens_bytes); }
  // Of the foot, which holds the checksums of the chunks' checksums and of the documents' ends.
  std::optional<std::uint32_t> stored_checksum() const override { return foot_.foot_crc; }

 private:
  absl::Status VerifyChunks(std::int64_t begin, std::int64_t size) const {
    const std::int64_t chunk_bytes = foot_.chunk_bytes;
    for (std::int64_t c = begin / chunk_bytes; c * chunk_bytes < begin + size; ++c) {
      auto& done = verified_[static_cast<std::size_t>(c)];
      if (done.load(std::memory_order_acquire) != 0) {
        continue;
      }
      const std::int64_t at = c * chunk_bytes;
      const std::int64_t bytes = std::min(chunk_bytes, extent_.tokens_bytes - at);
      const std::uint32_t found =
          Crc32c(bytes_.data() + dataset_format::kHeadBytes + at, static_cast<std::size_t>(bytes));
      std::uint32_t wanted;
      std::memcpy(&wanted, bytes_.data() + extent_.chunks_offset + c * 4, 4);
      if (found != wanted) {
        return DataLossError(StrCat(path_, ": damaged between byte offsets ",
                                    dataset_format::kHeadBytes + at, " and ",
                                    dataset_format::kHeadBytes + at + bytes, " (checksum ", found,
                                    ", expected ", wanted, "); build it again"));
      }
      done.store(1, std::memory_order_release);
    }
    return absl::OkStatus();
  }

  const std::string path_;
  const std::unique_ptr<RandomAccessFile> file_;  // owns the mapping
  const std::string_view bytes_;
  const std::int32_t token_bytes_;
  const Foot foot_;
  const Extent extent_;
  mutable std::vector<std::atomic<std::uint8_t>> verified_;  // own synchronisation; [chunk_count]
};

absl::StatusOr<std::unique_ptr<TokenDataset>> OpenOctavo(const std::string& path,
                                                         std::unique_ptr<RandomAccessFile> file) {
  using dataset_format::kFootBytes;
  using dataset_format::kHeadBytes;
  ASSIGN_OR_RETURN(const std::string_view bytes, file->Map());
  const auto size = static_cast<std::int64_t>(bytes.size());
  if (size < kHeadBytes + kFootBytes) {
    return DataLossError(StrCat(path, ": cut at byte offset ", size, "; the smallest dataset has ",
                                kHeadBytes + kFootBytes, " bytes"));
  }
  std::uint32_t version, token_bytes;
  std::memcpy(&version, bytes.data() + 8, 4);
  std::memcpy(&token_bytes, bytes.data() + 12, 4);
  if (version != dataset_format::kVersion) {
    return DataLossError(StrCat(path, ": format version ", version,
                                " at byte offset 8; this program reads version ",
                                dataset_format::kVersion));
  }
  if (token_bytes != 1 && token_bytes != 2 && token_bytes != 4) {
    return DataLossError(StrCat(path, ": ", token_bytes,
                                " bytes per token at byte offset 12; valid are 1, 2 and 4"));
  }
  Foot foot;
  const std::int64_t foot_at = size - kFootBytes;
  std::memcpy(&foot, bytes.data() + foot_at, sizeof(foot));
  if (std::memcmp(foot.magic, dataset_format::kFootMagic, 8) != 0) {
    return DataLossError(
        StrCat(path, ": cut or still being written: no end mark at byte offset ", size - 8));
  }
  if (Crc32c(&foot, offsetof(Foot, foot_crc)) != foot.foot_crc) {
    return DataLossError(StrCat(path, ": damaged foot at byte offset ", foot_at, " (checksum)"));
  }
  // Bounds before arithmetic, so that a forged foot cannot overflow.
  const auto limit = static_cast<std::uint64_t>(size);
  if (foot.token_count > limit || foot.document_count > limit || foot.chunk_bytes == 0 ||
      foot.chunk_bytes % 8 != 0 || foot.vocab_size == 0 || foot.vocab_size > (1ull << 31)) {
    return DataLossError(StrCat(path, ": impossible counts in the foot at byte offset ", foot_at));
  }
  const Extent extent =
      dataset_format::ExtentOf(static_cast<std::int64_t>(foot.token_count), token_bytes,
                               static_cast<std::int64_t>(foot.document_count), foot.chunk_bytes);
  if (extent.file_bytes != size) {
    return DataLossError(StrCat(path, ": ", size, " bytes, but the foot describes ",
                                extent.file_bytes,
                                "; bytes are missing or added before byte offset ", foot_at));
  }
  if (Crc32c(bytes.data() + extent.ends_offset, foot.document_count * 8) != foot.ends_crc) {
    return DataLossError(
        StrCat(path, ": damaged document table at byte offset ", extent.ends_offset));
  }
  if (Crc32c(bytes.data() + extent.chunks_offset,
             static_cast<std::size_t>(extent.chunk_count) * 4) != foot.chunks_crc) {
    return DataLossError(
        StrCat(path, ": damaged checksum table at byte offset ", extent.chunks_offset));
  }
  std::uint64_t previous = 0;
  for (std::uint64_t d = 0; d < foot.document_count; ++d) {
    std::uint64_t end;
    std::memcpy(&end, bytes.data() + extent.ends_offset + d * 8, 8);
    if (end < previous || end > foot.token_count) {
      return DataLossError(StrCat(path, ": document ", d, " ends at token ", end, " (byte offset ",
                                  extent.ends_offset + static_cast<std::int64_t>(d) * 8,
                                  "), after ", previous, " of ", foot.token_count));
    }
    previous = end;
  }
  return std::unique_ptr<TokenDataset>(new OctavoDataset(
      path, std::move(file), bytes, static_cast<std::int32_t>(token_bytes), foot, extent));
}

}  // namespace

absl::StatusOr<std::unique_ptr<TokenDataset>> OpenTokenDataset(const FileSystem& fs,
                                                               const std::string& path) {
  if (EndsWith(path, ".idx") || fs.Exists(path + ".idx") ||
      (EndsWith(path, ".bin") && fs.Exists(path.substr(0, path.size() - 4) + ".idx"))) {
    return OpenMegatronDataset(fs, path);
  }
  if (const absl::StatusOr<bool> folder = fs.IsDirectory(path); folder.ok() && *folder) {
    return InvalidArgumentError(
        StrCat(path, ": a folder; valid is a dataset's file, as `octavo data build` writes it"));
  }
  ASSIGN_OR_RETURN(std::unique_ptr<RandomAccessFile> file, fs.OpenForRead(path));
  char head[8] = {};
  const std::int64_t size = file->size_bytes();
  if (size >= 8) {
    RETURN_IF_ERROR(file->ReadAt(0, head));
  }
  if (size >= 8 && std::memcmp(head, dataset_format::kHeadMagic, 8) == 0) {
    return OpenOctavo(path, std::move(file));
  }
  if (size >= 8 && IsLlmcHead(head)) {
    return OpenLlmcDataset(path, std::move(file));
  }
  if (size >= 8 && std::memcmp(head, kBlendMagic, 8) == 0) {
    return OpenBlend(fs, path);
  }
  return InvalidArgumentError(StrCat(
      path, ": not a token dataset (", size,
      " bytes; byte offset 0 holds none of the known marks). Valid are files of `octavo data "
      "build`, Megatron .bin/.idx pairs, llm.c .bin files and lists that begin with \"",
      kBlendMagic, "\""));
}

absl::StatusOr<double> UnigramEntropy(const TokenDataset& dataset, std::int64_t begin,
                                      std::int64_t end) {
  constexpr std::int64_t kPart = 1 << 16;
  std::vector<std::int64_t> count(
      static_cast<std::size_t>(std::max<std::int64_t>(dataset.vocab_size(), 0)));
  std::vector<std::int32_t> part;
  for (std::int64_t at = begin; at < end; at += kPart) {
    part.resize(static_cast<std::size_t>(std::min(kPart, end - at)));
    RETURN_IF_ERROR(dataset.Read(at, part));
    for (const std::int32_t token : part) {
      if (static_cast<std::size_t>(token) >= count.size()) {
        count.resize(static_cast<std::size_t>(token) + 1);
      }
      ++count[static_cast<std::size_t>(token)];
    }
  }
  const auto total = static_cast<double>(end - begin);
  double entropy = 0;
  for (const std::int64_t c : count) {
    if (c > 0) {
      const double p = static_cast<double>(c) / total;
      entropy -= p * std::log(p);
    }
  }
  return entropy;
}

}  // namespace octavo
