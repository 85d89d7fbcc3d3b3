// A model's architecture as Hugging Face's config.json, both ways: pure text to value.
//
// Two families are spoken, each with its own limits:
//   Mixtral     softmax over the chosen experts (normalised), no q/k norms, every layer has experts
//   Qwen3-MoE   softmax over all experts, normalised or not, q/k norms always, dense layers by list
// What a family cannot express is refused by name, never dropped: a folder that transformers loads
// without a warning but that computes something else is worse than none. The same holds the other
// way round (attention biases, sliding windows, rescaled rotary positions).
//
// Written for transformers 4 and 5: the rotary base is given under its old and its new key.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/model/config.h"

namespace octavo {

enum class HfFormat : std::uint8_t {
  kBf16,
  kFp8,  // E4M3 with one FP32 dequant_scale per 128×128 block, stored as `weight_scale_inv`
};

// OK, or INVALID_ARGUMENT that names each thing that the family cannot express.
absl::Status CheckHfExpressible(const ModelConfig& model);

struct HfConfigOptions {
  HfFormat format = HfFormat::kBf16;
  std::int64_t max_positions = 0;  // context length stated in the file
};
// REQUIRES: CheckHfExpressible(model).
std::string WriteHfConfig(const ModelConfig& model, const HfConfigOptions& options);

struct HfConfig {
  ModelConfig model;  // router losses as the file states them; init_std from initializer_range
  bool fp8 = false;
  std::int64_t max_positions = 0;  // longest sequence that the file states; 0: none
  std::int64_t block_rows = 128, block_cols = 128;  // of FP8 scales
};
// INVALID_ARGUMENT: not JSON, a field is missing, or it says something that Octavo cannot compute
// (named). `path` is for messages.
absl::StatusOr<HfConfig> ParseHfConfig(std::string_view text, const std::string& path);

// The `model:` part of a job that trains this architecture on.
std::string ModelAsJobYaml(const ModelConfig& model);

}  // namespace octavo
