// Weights from a Hugging Face folder (Mixtral or Qwen3-MoE; BF16, F16, FP32 or FP8 blockwise) as a
// checkpoint of step 0 that a job names as `checkpoint.start_from`.
//
//   ASSIGN_OR_RETURN(HfImportSummary summary, ImportFromHf(fs, {.folder = "hf", .output =
//   "start"}));
//
// Masters are FP32: BF16 and F16 widen exactly, FP8 becomes q · dequant_scale, one rounding.
// Experts may stand one by one, as released models have them, or stacked (hf_names.h). Every tensor
// that the architecture needs must be there with its shape, and nothing else may be: a tensor
// without a place here (a bias, an adapter) is something the model would compute and we would not.
// HfWeights is also how the offline evaluation reads such a folder without writing anything.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/file.h"
#include "worker/checkpoint/hf_config.h"
#include "worker/checkpoint/hf_names.h"
#include "worker/checkpoint/safetensors.h"

namespace octavo {

// One of our tensors and the Hugging Face tensors whose rows it is made of, in order.
struct HfSources {
  std::string stored;
  std::vector<std::int64_t> shape;  // ours
  std::vector<HfTensor> parts;
};
// All of our tensors of a model, in the order of HfTensors.
std::vector<HfSources> HfSourcesOf(const ModelConfig& model);

// An open folder. Thread-safe after Open.
class HfWeights {
 public:
  // INVALID_ARGUMENT: config.json is refused, a tensor is missing, has another shape or no place;
  // NOT_FOUND; DATA_LOSS: damaged.
  static absl::StatusOr<std::unique_ptr<HfWeights>> Open(const FileSystem& fs,
                                                         const std::string& folder);

  const HfConfig& config() const { return config_; }
  const std::vector<HfSources>& sources() const { return sources_; }
  // What the weights can be used with when nobody says otherwise: the longest sequence that
  // config.json states, at most 2048 tokens; 0 when it states none.
  std::int64_t default_sequence_length() const;
  // FP32 values of sources()[i], joined from its parts.
  absl::Status Read(std::size_t i, std::vector<float>* out) const;

 private:
  struct Place {
    const SafetensorsFile* file;
    const SafetensorsEntry* entry;
  };
  absl::Status OpenFiles(const FileSystem& fs);
  // model.safetensors.index.json, where there is one: every file it names must be in the folder.
  absl::Status CheckIndex(const FileSystem& fs, const std::vector<std::string>& names) const;
  // Enters a tensor of a file under its own name, or its slices under theirs.
  absl::Status AddTensor(const SafetensorsFile& file, const std::string& name,
                         const SafetensorsEntry& entry);
  absl::Status AddStack(const SafetensorsFile& file, const SafetensorsEntry& entry,
                        const HfStack& stack, bool scales);
  absl::Status AddPlace(const std::string& name, const SafetensorsFile& file,
                        const SafetensorsEntry& entry);
  absl::Status CheckTensors() const;
  absl::Status ReadPart(const HfTensor& part, std::span<float> out) const;
  absl::Status ReadFloats(const Place& place, std::span<float> out) const;

  std::string folder_;
  HfConfig config_;
  std::vector<HfSources> sources_;
  std::vector<std::unique_ptr<SafetensorsFile>> files_;
  std::map<std::string, HfStack> stacks_;  // by name
  std::deque<SafetensorsEntry> slices_;    // of stacks that were found; never moved
  std::map<std::string, Place> places_;
};

struct HfImportOptions {
  std::string folder;
  std::string output;  // becomes <output>/step-000000000000.a000000
  std::function<void(std::int64_t done, std::int64_t total)> progress;  // bytes; may be empty
};

struct HfImportSummary {
  std::string checkpoint;
  ModelConfig model;
  std::int64_t tensors = 0, bytes = 0;
  bool fp8 = false;
};

// One tensor is in memory at a time. ALREADY_EXISTS when the output holds an import already. A
// failed import leaves nothing behind: an output folder that did not exist is removed again.
absl::StatusOr<HfImportSummary> ImportFromHf(FileSystem& fs, const HfImportOptions& options);

// Whether `path` is a Hugging Face folder rather than a checkpoint.
bool IsHfFolder(const FileSystem& fs, const std::string& path);

}  // namespace octavo
