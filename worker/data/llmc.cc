#include "worker/data/llmc.h"

#include <cstring>

#include "base/status.h"
#include "base/str.h"

namespace octavo {
namespace {

constexpr std::int64_t kHeaderBytes = 256 * 4;
constexpr std::int32_t kMagicGpt2 = 20240520;
constexpr std::int32_t kMagicLlama3 = 20240801;

class LlmcDataset final : public TokenDataset {
 public:
  LlmcDataset(std::string path, std::unique_ptr<RandomAccessFile> file, std::string_view bytes,
              std::int64_t token_count, std::int32_t token_bytes)
      : path_(std::move(path)),
        file_(std::move(file)),
        bytes_(bytes),
        token_count_(token_count),
        token_bytes_(token_bytes) {}

  std::int64_t token_count() const override { return token_count_; }
  std::int64_t vocab_size() const override { return 0; }
  std::int64_t document_count() const override { return 0; }
  std::int64_t DocumentEnd(std::int64_t) const override { return token_count_; }
  std::int32_t token_bytes() const override { return token_bytes_; }
  std::string format_name() const override { return "llm.c"; }
  const std::string& path() const override { return path_; }

  absl::Status Read(std::int64_t offset, std::span<std::int32_t> out) const override {
    const auto count = static_cast<std::int64_t>(out.size());
    if (offset < 0 || offset > token_count_ - count) {
      return OutOfRangeError(StrCat("reading tokens ", offset, " to ", offset + count, " of ",
                                    path_, ": it has ", token_count_));
    }
    const char* at = bytes_.data() + kHeaderBytes + offset * token_bytes_;
    for (std::int64_t i = 0; i < count; ++i) {
      std::uint32_t token = 0;
      std::memcpy(&token, at + i * token_bytes_, static_cast<std::size_t>(token_bytes_));
      if (token > 0x7FFFFFFFu) {
        return DataLossError(StrCat(path_, ": token ", token, " at byte offset ",
                                    kHeaderBytes + (offset + i) * token_bytes_,
                                    " does not fit 31 bits"));
      }
      out[static_cast<std::size_t>(i)] = static_cast<std::int32_t>(token);
    }
    return absl::OkStatus();
  }
  absl::Status Verify() const override { return absl::OkStatus(); }

 private:
  const std::string path_;
  const std::unique_ptr<RandomAccessFile> file_;  // owns the mapping
  const std::string_view bytes_;
  const std::int64_t token_count_;
  const std::int32_t token_bytes_;
};

}  // namespace

bool IsLlmcHead(const char head[8]) {
  std::int32_t magic;
  std::memcpy(&magic, head, 4);
  return magic == kMagicGpt2 || magic == kMagicLlama3;
}

absl::StatusOr<std::unique_ptr<TokenDataset>> OpenLlmcDataset(
    const std::string& path, std::unique_ptr<RandomAccessFile> file) {
  ASSIGN_OR_RETURN(const std::string_view bytes, file->Map());
  const auto size = static_cast<std::int64_t>(bytes.size());
  if (size < kHeaderBytes) {
    return DataLossError(StrCat(path, ": cut at byte offset ", size, "; llm.c's header has ",
                                kHeaderBytes, " bytes"));
  }
  std::int32_t head[3];
  std::memcpy(head, bytes.data(), sizeof(head));
  const bool wide = head[0] == kMagicLlama3;
  const std::int32_t version = wide ? 7 : 1;
  if (head[1] != version) {
    return DataLossError(StrCat(path, ": version ", head[1], " at byte offset 4; valid for magic ",
                                head[0], " is ", version));
  }
  const std::int32_t token_bytes = wide ? 4 : 2;
  const std::int64_t expected = kHeaderBytes + std::int64_t{head[2]} * token_bytes;
  if (head[2] < 0 || expected != size) {
    return DataLossError(StrCat(path, ": the header at byte offset 8 says ", head[2], " tokens (",
                                expected, " bytes), the file has ", size,
                                "; it was cut or damaged"));
  }
  return std::unique_ptr<TokenDataset>(
      new LlmcDataset(path, std::move(file), bytes, head[2], token_bytes));
}

}  // namespace octavo
