// llm.c's token files: 256 little-endian int32 of header (magic, version, token count, zeros), then
// tokens. Magic 20240520 with version 1: GPT-2 tokens, uint16. Magic 20240801 with version 7:
// Llama-3 tokens, uint32. The format has no checksum and no documents; the size must fit the count.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "worker/data/token_dataset.h"

namespace octavo {

// Whether the first eight bytes are llm.c's.
bool IsLlmcHead(const char head[8]);

absl::StatusOr<std::unique_ptr<TokenDataset>> OpenLlmcDataset(
    const std::string& path, std::unique_ptr<RandomAccessFile> file);

}  // namespace octavo
