// The folder of a job's checkpoints: what is complete, who may publish, what is deleted.
//
//   <root>/attempt-000002.json         marker: attempt 2 began from step 120
//   <root>/step-000000000120.a000001/  complete: manifest.json and shards
//   <root>/step-000000000180.a000002.partial/   being written; never read
//
// Publishing is one rename of a folder whose every file and name is already on disk. Fencing
// (ARCHITECTURE 6, invariant 2): attempt a begins by writing its marker; a checkpoint of an older
// attempt beyond the marker's step is not history but a zombie's work: ignored, later deleted. An
// attempt that finds the marker of a newer one publishes nothing.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/file.h"
#include "worker/checkpoint/manifest.h"

namespace octavo {

struct CheckpointInfo {
  std::string path;
  std::int64_t step = 0;
  std::int32_t attempt = 0;
  bool usable = false;  // manifest whole, sizes of all shards right, not fenced out
  bool fenced = false;  // a zombie's work: no damage, but not history either
  std::string problem;  // why not usable
  Manifest manifest;    // meaningful when it could be read
};

struct AttemptMarker {
  std::int32_t attempt = 0;
  std::int64_t start_step = 0;
};

// Every checkpoint below `root`, newest step first, unusable ones with their reason. `root` may be
// a job's folder, a folder of such folders, or one checkpoint. NOT_FOUND when there is no such
// folder.
absl::StatusOr<std::vector<CheckpointInfo>> ListCheckpoints(const FileSystem& fs,
                                                            const std::string& root);

// The checkpoint that a person means by `path`: that folder itself, or the newest usable one below
// it. NOT_FOUND says why those that are there cannot be used; INVALID_ARGUMENT when checkpoints of
// several jobs are below it.
absl::StatusOr<std::string> FindCheckpoint(const FileSystem& fs, const std::string& path);

// Reads every byte: checksums of all shards, their headers. OK, or the first damage found.
absl::Status VerifyCheckpoint(const FileSystem& fs, const std::string& path);

// Differences between two checkpoints in words, e.g. for `octavo checkpoints diff`: train state,
// model, and per tensor the largest absolute difference. Empty: identical training state.
absl::StatusOr<std::vector<std::string>> DiffCheckpoints(const FileSystem& fs, const std::string& a,
                                                         const std::string& b);

// One job's folder, for the rank that coordinates. Not thread-safe.
class CheckpointStore {
 public:
  CheckpointStore(FileSystem& fs, std::string root, std::string job_uid, std::int32_t attempt)
      : fs_(fs), root_(std::move(root)), job_uid_(std::move(job_uid)), attempt_(attempt) {}

  // Candidates to start from, best first. Creates the folder.
  absl::StatusOr<std::vector<CheckpointInfo>> Candidates();
  // Removes what older attempts left half-written or half-deleted (they are fenced, and the disk
  // may be full of it), then writes this attempt's marker. ABORTED when this or a newer attempt has
  // one already.
  absl::Status Begin(std::int64_t start_step);

  // Folder for the shards of this step; every writing rank may call it.
  std::string PartialPath(std::int64_t step) const;
  std::string FinalPath(std::int64_t step) const;
  // Writes the manifest into the partial folder and makes it the checkpoint. ABORTED when fenced,
  // ALREADY_EXISTS when this step was published before.
  absl::Status Publish(const Manifest& manifest);
  // Deletes all but the newest `keep` usable checkpoints, fenced ones, and leavings of older
  // attempts or steps. Best effort: the first error is returned, everything else is still tried.
  absl::Status Retain(std::int32_t keep);

  const std::string& root() const { return root_; }

 private:
  absl::Status CheckNotFenced() const;
  // Deletions cut short, partial folders of older attempts and of this one's steps below `below`.
  absl::Status RemoveLeavings(std::int64_t below);

  FileSystem& fs_;
  const std::string root_;
  const std::string job_uid_;
  const std::int32_t attempt_;
};

inline constexpr char kManifestFile[] = "manifest.json";
std::string ShardFileName(std::int32_t rank);  // rank-00003.safetensors

}  // namespace octavo
