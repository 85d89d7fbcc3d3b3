// A checkpoint as a folder that Hugging Face's transformers loads: config.json, safetensors shards
// and model.safetensors.index.json.
//
//   ASSIGN_OR_RETURN(HfExportSummary summary,
//                    ExportToHf(fs, {.checkpoint = path, .folder = "out", .format =
//                    HfFormat::kFp8}));
//
// Weights are the FP32 masters, rounded once: to BF16 (nearest even), or for linear layers in FP8
// folders to E4M3 with one FP32 dequant_scale per 128×128 block (NUMERICS 2; blocks at the edges
// are smaller). Every Hugging Face tensor is quantised by itself; where a projection's rows are a
// multiple of 128 its blocks are those that training with `fp8_blockwise` uses.
//
// One tensor is in memory at a time, whatever the size of the model. The folder appears whole or
// not at all: it is written beside its final name and renamed.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "base/file.h"
#include "worker/checkpoint/hf_config.h"

namespace octavo {

struct HfExportOptions {
  std::string checkpoint;  // a checkpoint's folder (step-…), or a folder of them: the newest usable
  std::string folder;      // must not exist
  HfFormat format = HfFormat::kBf16;
  std::int64_t max_positions = 32768;                // context length stated in config.json
  std::int64_t shard_bytes = std::int64_t{4} << 30;  // a shard ends at the tensor that reaches this
  std::function<void(std::int64_t done, std::int64_t total)> progress;  // bytes; may be empty
};

struct HfExportSummary {
  std::string checkpoint;  // that was read
  std::int64_t step = 0;
  std::int64_t tensors = 0, bytes = 0, shards = 0;
};

// Errors: INVALID_ARGUMENT names what the family cannot express; NOT_FOUND, ALREADY_EXISTS;
// DATA_LOSS when the checkpoint is damaged; those of the file system.
absl::StatusOr<HfExportSummary> ExportToHf(FileSystem& fs, const HfExportOptions& options);

// One weight matrix in FP8 by blocks of 128×128: codes [rows, cols], dequant_scale
// [ceil(rows/128), ceil(cols/128)], both row-major.
struct Fp8Matrix {
  std::vector<std::uint8_t> codes;
  std::vector<float> dequant_scale;
};
Fp8Matrix QuantizeHfMatrix(std::span<const float> values, std::int64_t rows, std::int64_t cols);

}  // namespace octavo
