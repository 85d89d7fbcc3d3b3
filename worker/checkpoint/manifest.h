// The manifest: what a checkpoint is, and the proof that it is whole. Written last.
//
// A checkpoint is a folder `step-<step>.a<attempt>` with manifest.json and one safetensors shard
// per rank that wrote it. The manifest lists the shards with size and CRC-32C and carries a
// checksum of itself. Everything that training needs beside tensors is in TrainState, so that N
// steps, save, load, M steps are the same M steps bit for bit.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/tensor.h"
#include "worker/model/config.h"

namespace octavo {

// Version of the names and layouts of precision state tensors (state/precision.*).
inline constexpr std::int32_t kPrecisionStateVersion = 1;
inline constexpr std::int32_t kManifestVersion = 1;
// Losses kept for reports and for the loss-spike window after a resume.
inline constexpr std::int64_t kLossHistory = 128;

struct TrainState {
  std::int64_t step = 0;           // steps completed
  std::int64_t adam_t = 0;         // optimizer steps applied (skipped ones are missing)
  std::int64_t tokens = 0;         // trained on, over all attempts
  std::int64_t data_position = 0;  // sequences of the data order consumed
  std::uint64_t seed = 0;
  std::int64_t plan_version = 0;
  std::uint64_t plan_hash = 0;  // SemanticHash of the plan in force
  std::int64_t retried_steps = 0, skipped_steps = 0;
  std::int32_t skips_in_a_row = 0;
  double first_loss = 0;       // of step 1
  std::vector<double> losses;  // of the last steps, oldest first, at most kLossHistory
  std::string blas_core;       // OpenBLAS kernels: bitwise resume needs the same
};

struct ShardFile {
  std::string file;  // name inside the folder
  std::int64_t bytes = 0;
  std::uint32_t crc32c = 0;
};

// What a job was trained on, so that a resumed one notices when the file was replaced.
struct DatasetIdentity {
  std::string format;  // "octavo v1", "megatron", ...
  std::int64_t tokens = 0;
  std::uint32_t fingerprint = 0;  // of the contents

  friend bool operator==(const DatasetIdentity&, const DatasetIdentity&) = default;
};

struct Manifest {
  std::string job_uid, job_name;
  std::int32_t attempt = 0;
  std::int32_t world_size = 1, expert_parallel = 1;
  DType moment_dtype = DType::kF32;
  std::int32_t precision_state_version = kPrecisionStateVersion;
  std::int64_t created_unix_micros = 0;
  ModelConfig model;
  std::int64_t sequence_length = 0;  // tokens that the model was trained to see; 0: not recorded
  TrainState state;
  // Nothing: written by an import or an older program; validation: or the job has no such dataset.
  std::optional<DatasetIdentity> dataset, validation;
  std::vector<ShardFile> shards;

  std::int64_t total_bytes() const {
    std::int64_t n = 0;
    for (const ShardFile& s : shards) {
      n += s.bytes;
    }
    return n;
  }
};

std::string SerializeManifest(const Manifest& manifest);
// DATA_LOSS for anything that SerializeManifest did not write; UNIMPLEMENTED for a newer version.
absl::StatusOr<Manifest> ParseManifest(std::string_view text, const std::string& path);

// Every field of the architecture as text, in order; equal configurations have equal lists.
struct NamedValue {
  std::string name, value;
};
std::vector<NamedValue> DescribeModel(const ModelConfig& model);
// OK, or FAILED_PRECONDITION that lists each field that differs, with both values.
absl::Status CompareModels(const ModelConfig& saved, const ModelConfig& wanted);
// The same for weights that another job continues with: initial values and balance losses, which
// say how a model was trained and not what it computes, may differ.
absl::Status CompareArchitectures(const ModelConfig& saved, const ModelConfig& wanted);

}  // namespace octavo
