// Megatron's indexed datasets: PREFIX.idx (magic, widths, lengths, offsets, documents) and
// PREFIX.bin (tokens). Little-endian: "MMIDIDX\0\0"; u64 version 1; u8 type (1 u8, 2 i8, 3 i16, 4
// i32, 5 i64, 6 f64, 7 f32, 8 u16); u64 sequences S; u64 documents D; S × i32 lengths; S × i64 byte
// offsets into .bin; D × i64 document indices (first is 0, last is S); optionally S × i8 modes.
//
// Tokens are read in the order of the index, sequences one after the other (Megatron packs its
// samples from the same row). Floating-point types are refused: they are not tokens.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "worker/data/token_dataset.h"

namespace octavo {

// `path`: the .idx, the .bin or their common prefix.
absl::StatusOr<std::unique_ptr<TokenDataset>> OpenMegatronDataset(const FileSystem& fs,
                                                                  const std::string& path);

}  // namespace octavo
