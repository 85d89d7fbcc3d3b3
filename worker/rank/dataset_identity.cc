#include "worker/rank/dataset_identity.h"

#include <algorithm>
#include <cstdint>
#include <vector>

#include "base/crc32c.h"
#include "base/status.h"

namespace octavo {
namespace {

constexpr std::int64_t kPieces = 64;
constexpr std::int64_t kPieceTokens = 4096;

template <class T>
void Extend(std::uint32_t* crc, const T& value) {
  *crc = Crc32cExtend(*crc, &value, sizeof(value));
}

absl::StatusOr<std::uint32_t> SampleTokens(const TokenDataset& dataset) {
  std::uint32_t crc = 0;
  const std::int64_t tokens = dataset.token_count();
  std::vector<std::int32_t> piece;
  const auto read = [&](std::int64_t offset, std::int64_t count) -> absl::Status {
    piece.resize(static_cast<std::size_t>(count));
    RETURN_IF_ERROR(dataset.Read(offset, piece));
    crc = Crc32cExtend(crc, piece.data(), piece.size() * sizeof(std::int32_t));
    return absl::OkStatus();
  };
  if (tokens <= kPieces * kPieceTokens) {
    for (std::int64_t at = 0; at < tokens; at += kPieceTokens) {
      RETURN_IF_ERROR(read(at, std::min(kPieceTokens, tokens - at)));
    }
    return crc;
  }
  // Piece 0 begins the dataset and the last one ends it. Divided first: no product overflows.
  const std::int64_t stride = (tokens - kPieceTokens) / (kPieces - 1);
  for (std::int64_t i = 0; i < kPieces; ++i) {
    RETURN_IF_ERROR(read(i + 1 < kPieces ? i * stride : tokens - kPieceTokens, kPieceTokens));
  }
  return crc;
}

}  // namespace

absl::StatusOr<DatasetIdentity> IdentifyDataset(const TokenDataset& dataset) {
  DatasetIdentity identity{.format = dataset.format_name(), .tokens = dataset.token_count()};
  if (const auto parts = dataset.parts(); !parts.empty()) {
    for (const BlendPart& part : parts) {
      ASSIGN_OR_RETURN(const DatasetIdentity of_part, IdentifyDataset(*part.dataset));
      identity.fingerprint =
          Crc32cExtend(identity.fingerprint, of_part.format.data(), of_part.format.size());
      Extend(&identity.fingerprint, of_part.tokens);
      Extend(&identity.fingerprint, of_part.fingerprint);
      Extend(&identity.fingerprint, part.weight);
    }
    return identity;
  }
  if (const auto stored = dataset.stored_checksum(); stored.has_value()) {
    identity.fingerprint = *stored;
    return identity;
  }
  ASSIGN_OR_RETURN(identity.fingerprint, SampleTokens(dataset));
  Extend(&identity.fingerprint, dataset.document_count());
  return identity;
}

}  // namespace octavo
