// Reads tensors of a complete checkpoint by name, whichever shard holds them.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/file.h"
#include "worker/checkpoint/manifest.h"
#include "worker/checkpoint/safetensors.h"

namespace octavo {

// Thread-safe after Open.
class CheckpointReader {
 public:
  // Reads the manifest and all shard headers. Checksums of shard contents are VerifyShard's work.
  // NOT_FOUND without a manifest; DATA_LOSS: damaged, or a shard that it lists is missing.
  static absl::StatusOr<std::unique_ptr<CheckpointReader>> Open(const FileSystem& fs,
                                                                const std::string& path);

  const Manifest& manifest() const { return manifest_; }
  const std::string& path() const { return path_; }
  std::vector<std::string> names() const;                       // sorted
  const SafetensorsEntry* Find(const std::string& name) const;  // null when there is none

  // The tensor's bytes; DATA_LOSS when it is missing or has another type or size.
  absl::Status Read(const std::string& name, DType dtype, std::span<char> out) const;

  // Checksum of shard `index` of the manifest.
  absl::Status VerifyShard(std::int32_t index) const;
  // Of all shards, one after the other: for programs that read a checkpoint alone.
  absl::Status VerifyShards() const;

 private:
  struct Place {
    const SafetensorsFile* file;
    const SafetensorsEntry* entry;
  };
  const FileSystem* fs_ = nullptr;
  std::string path_;
  Manifest manifest_;
  std::vector<std::unique_ptr<SafetensorsFile>> files_;
  std::map<std::string, Place> places_;
};

}  // namespace octavo
