// Token datasets: a long row of token ids on disk, mapped into memory, read by position.
//
//   ASSIGN_OR_RETURN(auto dataset, OpenTokenDataset(PosixFileSystem::Get(), "text.octd"));
//   RETURN_IF_ERROR(dataset->Read(offset, tokens));           // tokens: std::span<std::int32_t>
//
// A reader is a row of tokens and nothing else: sequences, order, epochs and the validation tail
// are arithmetic on positions (order.h, sample_source.h, loader.h). Formats: our own (below),
// Megatron .bin/.idx (megatron.h), llm.c .bin (llmc.h) and lists of datasets to mix (blend.h);
// OpenTokenDataset looks at the first bytes and decides.
//
// Our format, version 1, little-endian, written front to back so that a builder never seeks:
//   head    16 bytes  "OCTAVODS", u32 version, u32 bytes per token (1, 2 or 4)
//   tokens  token_count × bytes, zero-padded to a multiple of 8
//   ends    document_count × u64: token index one past the end of each document, rising
//   chunks  u32 CRC-32C of every kChunkBytes of `tokens` (padding included), zero-padded to 8
//   foot    64 bytes  token_count, document_count, vocab_size (u64 each), u32 chunk bytes,
//                     u32 CRC of `ends`, u32 CRC of `chunks`, zeros, u32 CRC of the foot's first 52
//                     bytes, "OCTAVOEN"
// A file without its foot was cut; a wrong size, checksum or token is damage. Errors name the
// offset. Chunks are verified when they are first read (once), so opening costs nothing however
// large.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/file.h"

namespace octavo {

class TokenDataset;

// One of the datasets of a blend.
struct BlendPart {
  std::shared_ptr<const TokenDataset> dataset;
  double weight = 0;
};

// Read-only; thread-safe.
class TokenDataset {
 public:
  virtual ~TokenDataset() = default;
  virtual std::int64_t token_count() const = 0;
  // Upper bound of token ids + 1; 0 when the format does not say (then every read is checked by the
  // loader against the model's vocabulary).
  virtual std::int64_t vocab_size() const = 0;
  virtual std::int64_t document_count() const = 0;
  // Token index one past the end of document `index`.
  virtual std::int64_t DocumentEnd(std::int64_t index) const = 0;
  virtual std::int32_t token_bytes() const = 0;
  virtual std::string format_name() const = 0;  // "octavo v1", "megatron", "llm.c"
  virtual const std::string& path() const = 0;

  // Tokens [offset, offset + out.size()). OUT_OF_RANGE beyond the end; DATA_LOSS with the byte
  // offset when what is stored is damaged.
  virtual absl::Status Read(std::int64_t offset, std::span<std::int32_t> out) const = 0;
  // Verifies every checksum the format has.
  virtual absl::Status Verify() const = 0;
  // A checksum that the file carries and that covers every token; nothing when the format has none.
  virtual std::optional<std::uint32_t> stored_checksum() const { return std::nullopt; }
  // The datasets that this one mixes (blend.h); empty for all others.
  virtual std::span<const BlendPart> parts() const { return {}; }
};

// Opens by content: our own format, else Megatron (path.idx beside path.bin, or the path of either,
// or their common prefix), else llm.c, else a blend. Errors: NOT_FOUND, DATA_LOSS (damaged or cut,
// with the offset), INVALID_ARGUMENT (none of the formats).
absl::StatusOr<std::unique_ptr<TokenDataset>> OpenTokenDataset(const FileSystem& fs,
                                                               const std::string& path);

// Entropy of the distribution of single tokens in [begin, end), in nats per token: the loss of a
// model that knows nothing but frequencies. REQUIRES: 0 <= begin < end <= token_count.
absl::StatusOr<double> UnigramEntropy(const TokenDataset& dataset, std::int64_t begin,
                                      std::int64_t end);

namespace dataset_format {

inline constexpr char kHeadMagic[] = "OCTAVODS";
inline constexpr char kFootMagic[] = "OCTAVOEN";
inline constexpr std::uint32_t kVersion = 1;
inline constexpr std::int64_t kHeadBytes = 16;
inline constexpr std::int64_t kFootBytes = 64;
inline constexpr std::int64_t kChunkBytes = 1 << 20;

struct Foot {
  std::uint64_t token_count;
  std::uint64_t document_count;
  std::uint64_t vocab_size;
  std::uint32_t chunk_bytes;
  std::uint32_t ends_crc;
  std::uint32_t chunks_crc;
  std::uint32_t zero[3];
  std::uint32_t foot_crc;  // of everything before it
  std::uint32_t zero_end;
  char magic[8];
};
static_assert(sizeof(Foot) == kFootBytes, "the foot is written as it lies in memory");

// Byte offsets that follow from the head and the foot.
struct Extent {
  std::int64_t tokens_bytes;  // padded
  std::int64_t ends_offset;
  std::int64_t chunks_offset;
  std::int64_t chunk_count;
  std::int64_t foot_offset;
  std::int64_t file_bytes;
};
Extent ExtentOf(std::int64_t token_count, std::int64_t token_bytes, std::int64_t document_count,
                std::int64_t chunk_bytes);

}  // namespace dataset_format
}  // namespace octavo
