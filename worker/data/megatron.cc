#include "worker/data/megatron.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "base/status.h"
#include "base/str.h"

namespace octavo {
namespace {

constexpr char kMagic[] = "MMIDIDX\0";  // nine bytes with the literal's own zero
constexpr std::int64_t kHeadBytes = 9 + 8 + 1 + 8 + 8;

// Bytes of a token by the index's type code; 0: not an integer type.
std::int32_t TokenBytes(std::uint8_t code) {
  switch (code) {
    case 1:
    case 2:
      return 1;
    case 3:
    case 8:
      return 2;
    case 4:
      return 4;
    case 5:
      return 8;
    default:
      return 0;
  }
}
bool IsSigned(std::uint8_t code) { return code >= 2 && code <= 5; }

template <class T>
T Load(std::string_view bytes, std::int64_t offset) {
  T value;
  std::memcpy(&value, bytes.data() + offset, sizeof(T));
  return value;
}

struct Sequence {
  std::int64_t first_token;  // position in the row of all tokens
  std::int64_t byte_offset;  // in .bin
};

class MegatronDataset final : public TokenDataset {
 public:
  std::int64_t token_count() const override { return token_count_; }
  std::int64_t vocab_size() const override { return 0; }
  std::int64_t document_count() const override {
    return static_cast<std::int64_t>(document_ends_.size());
  }
  std::int64_t DocumentEnd(std::int64_t index) const override {
    return document_ends_[static_cast<std::size_t>(index)];
  }
  std::int32_t token_bytes() const override { return token_bytes_; }
  std::string format_name() const override { return "megatron"; }
  const std::string& path() const override { return path_; }
  absl::Status Verify() const override { return absl::OkStatus(); }

  absl::Status Read(std::int64_t offset, std::span<std::int32_t> out) const override {
    const auto count = static_cast<std::int64_t>(out.size());
    if (offset < 0 || offset > token_count_ - count) {
      return OutOfRangeError(StrCat("reading tokens ", offset, " to ", offset + count, " of ",
                                    path_, ": it has ", token_count_));
    }
    auto sequence = std::upper_bound(
        sequences_.begin(), sequences_.end(), offset,
        [](std::int64_t value, const Sequence& s) { return value < s.first_token; });
    std::int64_t done = 0;
    while (done < count) {
      const Sequence& at = *(sequence - 1);
      const std::int64_t end = sequence == sequences_.end() ? token_count_ : sequence->first_token;
      const std::int64_t position = offset + done;
      const std::int64_t part = std::min(count - done, end - position);
      const std::int64_t byte = at.byte_offset + (position - at.first_token) * token_bytes_;
      RETURN_IF_ERROR(Decode(
          byte, out.subspan(static_cast<std::size_t>(done), static_cast<std::size_t>(part))));
      done += part;
      ++sequence;
    }
    return absl::OkStatus();
  }

  static absl::StatusOr<std::unique_ptr<TokenDataset>> Open(const FileSystem& fs,
                                                            const std::string& prefix);

 private:
  absl::Status Decode(std::int64_t byte, std::span<std::int32_t> out) const {
    for (std::size_t i = 0; i < out.size(); ++i) {
      const std::int64_t at = byte + static_cast<std::int64_t>(i) * token_bytes_;
      std::uint64_t raw = 0;
      std::memcpy(&raw, bytes_.data() + at, static_cast<std::size_t>(token_bytes_));
      const int unused = 64 - 8 * token_bytes_;
      const std::int64_t token = is_signed_ ? static_cast<std::int64_t>(raw << unused) >> unused
                                            : static_cast<std::int64_t>(raw);
      if (token < 0 || token > 0x7FFFFFFF) {
        return DataLossError(StrCat(path_, ".bin: token ", token, " at byte offset ", at,
                                    "; valid are 0 to 2147483647"));
      }
      out[i] = static_cast<std::int32_t>(token);
    }
    return absl::OkStatus();
  }

  std::string path_;  // prefix
  std::unique_ptr<RandomAccessFile> file_;
  std::string_view bytes_;
  std::int32_t token_bytes_ = 0;
  bool is_signed_ = false;
  std::int64_t token_count_ = 0;
  std::vector<Sequence> sequences_;  // without the empty ones
  std::vector<std::int64_t> document_ends_;
};

absl::StatusOr<std::unique_ptr<TokenDataset>> MegatronDataset::Open(const FileSystem& fs,
                                                                    const std::string& prefix) {
  const std::string index_path = prefix + ".idx";
  ASSIGN_OR_RETURN(const std::string index, fs.ReadFile(index_path));
  const auto size = static_cast<std::int64_t>(index.size());
  if (size < kHeadBytes) {
    return DataLossError(
        StrCat(index_path, ": cut at byte offset ", size, "; the head has ", kHeadBytes, " bytes"));
  }
  if (std::memcmp(index.data(), kMagic, 9) != 0) {
    return DataLossError(StrCat(index_path, ": no Megatron mark (MMIDIDX) at byte offset 0"));
  }
  if (const auto version = Load<std::uint64_t>(index, 9); version != 1) {
    return DataLossError(
        StrCat(index_path, ": version ", version, " at byte offset 9; valid is 1"));
  }
  const auto code = Load<std::uint8_t>(index, 17);
  if (TokenBytes(code) == 0) {
    return DataLossError(StrCat(index_path, ": type code ", static_cast<int>(code),
                                " at byte offset 17; valid are the integers 1, 2, 3, 4, 5 and 8"));
  }
  const auto sequences = Load<std::uint64_t>(index, 18);
  const auto documents = Load<std::uint64_t>(index, 26);
  const auto limit = static_cast<std::uint64_t>(size);
  if (sequences > limit || documents > limit) {
    return DataLossError(StrCat(index_path, ": ", sequences, " sequences and ", documents,
                                " documents at byte offset 18 do not fit a file of ", size,
                                " bytes"));
  }
  const auto s = static_cast<std::int64_t>(sequences);
  const auto d = static_cast<std::int64_t>(documents);
  const std::int64_t lengths_at = kHeadBytes;
  const std::int64_t offsets_at = lengths_at + 4 * s;
  const std::int64_t documents_at = offsets_at + 8 * s;
  const std::int64_t end = documents_at + 8 * d;
  if (size != end && size != end + s) {
    return DataLossError(StrCat(index_path, ": ", size, " bytes, the head describes ", end, " or ",
                                end + s, " (with modes); cut or damaged"));
  }

  auto dataset = std::make_unique<MegatronDataset>();
  dataset->path_ = prefix;
  dataset->token_bytes_ = TokenBytes(code);
  dataset->is_signed_ = IsSigned(code);
  ASSIGN_OR_RETURN(dataset->file_, fs.OpenForRead(prefix + ".bin"));
  ASSIGN_OR_RETURN(dataset->bytes_, dataset->file_->Map());
  const auto bin_bytes = static_cast<std::int64_t>(dataset->bytes_.size());
  std::vector<std::int64_t> first_token(static_cast<std::size_t>(s) + 1);
  for (std::int64_t i = 0; i < s; ++i) {
    const std::int64_t length = Load<std::int32_t>(index, lengths_at + 4 * i);
    const auto offset = Load<std::int64_t>(index, offsets_at + 8 * i);
    if (length < 0 || offset < 0 || offset > bin_bytes ||
        length * dataset->token_bytes_ > bin_bytes - offset) {
      return DataLossError(StrCat(index_path, ": sequence ", i, " (byte offset ",
                                  lengths_at + 4 * i, ") has ", length, " tokens at byte offset ",
                                  offset, " of ", prefix, ".bin, which has ", bin_bytes,
                                  " bytes; cut or damaged"));
    }
    first_token[static_cast<std::size_t>(i)] = dataset->token_count_;
    if (length > 0) {
      dataset->sequences_.push_back({.first_token = dataset->token_count_, .byte_offset = offset});
    }
    dataset->token_count_ += length;
  }
  first_token[static_cast<std::size_t>(s)] = dataset->token_count_;
  std::int64_t previous = 0;
  for (std::int64_t i = 0; i < d; ++i) {
    const auto document = Load<std::int64_t>(index, documents_at + 8 * i);
    if (document < previous || document > s) {
      return DataLossError(StrCat(index_path, ": document index ", document, " at byte offset ",
                                  documents_at + 8 * i, "; valid are ", previous, " to ", s));
    }
    if (i > 0) {
      dataset->document_ends_.push_back(first_token[static_cast<std::size_t>(document)]);
    }
    previous = document;
  }
  return std::unique_ptr<TokenDataset>(std::move(dataset));
}

}  // namespace

absl::StatusOr<std::unique_ptr<TokenDataset>> OpenMegatronDataset(const FileSystem& fs,
                                                                  const std::string& path) {
  std::string prefix = path;
  if (EndsWith(path, ".idx") || EndsWith(path, ".bin")) {
    prefix.resize(prefix.size() - 4);
  }
  return MegatronDataset::Open(fs, prefix);
}

}  // namespace octavo
