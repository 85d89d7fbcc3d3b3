#include "worker/checkpoint/store.h"

#include <algorithm>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "base/status.h"
#include "base/str.h"
#include "worker/checkpoint/reader.h"
#include "worker/checkpoint/safetensors.h"

namespace octavo {
namespace {

constexpr char kPartial[] = ".partial";
constexpr char kDeleting[] = ".deleting";

std::string FolderName(std::int64_t step, std::int32_t attempt) {
  char text[64];
  std::snprintf(text, sizeof(text), "step-%012lld.a%06d", static_cast<long long>(step), attempt);
  return text;
}
std::string MarkerName(std::int32_t attempt) {
  char text[64];
  std::snprintf(text, sizeof(text), "attempt-%06d.json", attempt);
  return text;
}

// step-<step>.a<attempt>, exactly as written; anything else is not a checkpoint.
bool ParseFolderName(std::string_view name, std::int64_t* step, std::int32_t* attempt) {
  const std::size_t dot = name.find(".a");
  if (!StartsWith(name, "step-") || dot == std::string_view::npos) {
    return false;
  }
  const auto parse = [](std::string_view digits) -> std::optional<std::int64_t> {
    const std::size_t first = std::min(digits.find_first_not_of('0'), digits.size() - 1);
    return digits.empty() ? std::nullopt : ParseInt64(digits.substr(first));
  };
  const auto s = parse(name.substr(5, dot - 5));
  const auto a = parse(name.substr(dot + 2));
  if (!s || !a || *s < 0 || *a < 0 || *a > INT32_MAX) {
    return false;
  }
  *step = *s;
  *attempt = static_cast<std::int32_t>(*a);
  return FolderName(*step, *attempt) == name;
}

absl::StatusOr<std::vector<AttemptMarker>> ReadMarkers(const FileSystem& fs,
                                                       const std::string& root) {
  ASSIGN_OR_RETURN(const std::vector<std::string> names, fs.ListDirectory(root));
  std::vector<AttemptMarker> markers;
  for (const std::string& name : names) {
    if (!StartsWith(name, "attempt-") || !EndsWith(name, ".json")) {
      continue;
    }
    ASSIGN_OR_RETURN(const std::string text, fs.ReadFile(JoinPath(root, name)));
    const auto in = nlohmann::json::parse(text, nullptr, false);
    // Markers are written atomically: a malformed one is damage, and guessing could publish twice.
    if (!in.is_object() || !in.contains("attempt") || !in["attempt"].is_number_integer() ||
        !in.contains("start_step") || !in["start_step"].is_number_integer()) {
      return DataLossError(StrCat(JoinPath(root, name), ": damaged attempt marker"));
    }
    markers.push_back({.attempt = in["attempt"].get<std::int32_t>(),
                       .start_step = in["start_step"].get<std::int64_t>()});
  }
  return markers;
}

// Reads the manifest and compares sizes: cheap, finds cut and missing files, not flipped bits.
CheckpointInfo Inspect(const FileSystem& fs, const std::string& path) {
  CheckpointInfo info;
  info.path = path;
  if (!ParseFolderName(BaseName(path), &info.step, &info.attempt)) {
    info.problem = "its folder is not named step-<step>.a<attempt>";
  }
  const absl::StatusOr<std::string> text = fs.ReadFile(JoinPath(path, kManifestFile));
  if (!text.ok()) {
    info.problem = Message(text.status());
    return info;
  }
  absl::StatusOr<Manifest> manifest = ParseManifest(*text, JoinPath(path, kManifestFile));
  if (!manifest.ok()) {
    info.problem = Message(manifest.status());
    return info;
  }
  info.manifest = *std::move(manifest);
  if (info.problem.empty() &&
      (info.manifest.state.step != info.step || info.manifest.attempt != info.attempt)) {
    info.problem = StrCat("the manifest is of step ", info.manifest.state.step, ", attempt ",
                          info.manifest.attempt);
  }
  info.step = info.manifest.state.step;
  info.attempt = info.manifest.attempt;
  for (const ShardFile& shard : info.manifest.shards) {
    const absl::StatusOr<std::int64_t> size = fs.FileSize(JoinPath(path, shard.file));
    if (!size.ok()) {
      info.problem = Message(size.status());
    } else if (*size != shard.bytes) {
      info.problem = StrCat(JoinPath(path, shard.file), ": cut at byte offset ", *size,
                            "; expected ", shard.bytes, " bytes");
    }
  }
  info.usable = info.problem.empty();
  return info;
}

absl::StatusOr<std::vector<CheckpointInfo>> ScanFolder(const FileSystem& fs,
                                                       const std::string& root) {
  ASSIGN_OR_RETURN(const std::vector<std::string> names, fs.ListDirectory(root));
  ASSIGN_OR_RETURN(const std::vector<AttemptMarker> markers, ReadMarkers(fs, root));
  std::vector<CheckpointInfo> found;
  for (const std::string& name : names) {
    std::int64_t step;
    std::int32_t attempt;
    if (!ParseFolderName(name, &step, &attempt)) {
      continue;
    }
    CheckpointInfo info = Inspect(fs, JoinPath(root, name));
    for (const AttemptMarker& m : markers) {
      if (m.attempt > attempt && step > m.start_step) {
        info.usable = false;
        info.fenced = true;
        info.problem = StrCat("written by attempt ", attempt, " after attempt ", m.attempt,
                              " had begun from step ", m.start_step);
      }
    }
    found.push_back(std::move(info));
  }
  // Newest step first; of the same step the newest attempt.
  std::sort(found.begin(), found.end(), [](const CheckpointInfo& a, const CheckpointInfo& b) {
    return a.step != b.step ? a.step > b.step : a.attempt > b.attempt;
  });
  return found;
}

}  // namespace

std::string ShardFileName(std::int32_t rank) {
  char text[48];
  std::snprintf(text, sizeof(text), "rank-%05d.safetensors", rank);
  return text;
}

absl::StatusOr<std::vector<CheckpointInfo>> ListCheckpoints(const FileSystem& fs,
                                                            const std::string& root) {
  if (fs.Exists(JoinPath(root, kManifestFile))) {
    return std::vector<CheckpointInfo>{Inspect(fs, root)};
  }
  ASSIGN_OR_RETURN(std::vector<CheckpointInfo> found, ScanFolder(fs, root));
  ASSIGN_OR_RETURN(const std::vector<std::string> names, fs.ListDirectory(root));
  for (const std::string& name : names) {
    const std::string path = JoinPath(root, name);
    const absl::StatusOr<bool> folder = fs.IsDirectory(path);
    if (StartsWith(name, "step-") || !folder.ok() || !*folder) {
      continue;
    }
    ASSIGN_OR_RETURN(std::vector<CheckpointInfo> more, ScanFolder(fs, path));
    found.insert(found.end(), std::make_move_iterator(more.begin()),
                 std::make_move_iterator(more.end()));
  }
  return found;
}

absl::StatusOr<std::string> FindCheckpoint(const FileSystem& fs, const std::string& path) {
  ASSIGN_OR_RETURN(const std::vector<CheckpointInfo> found, ListCheckpoints(fs, path));
  const CheckpointInfo* newest = nullptr;
  std::vector<std::string> problems;
  bool damaged = false;
  for (const CheckpointInfo& info : found) {
    if (!info.usable) {
      damaged = damaged || !info.fenced;
      problems.push_back(StrCat(info.path, ": ", info.problem));
      continue;
    }
    if (newest != nullptr && info.manifest.job_uid != newest->manifest.job_uid) {
      return InvalidArgumentError(StrCat(path, " holds checkpoints of several jobs, for example ",
                                         newest->path, " and ", info.path, "; name one of them"));
    }
    if (newest == nullptr || info.step > newest->step) {
      newest = &info;
    }
  }
  if (newest == nullptr) {
    const std::string text = StrCat("no usable checkpoint in ", path, problems.empty() ? "" : ": ",
                                    StrJoin(problems, "; "));
    return damaged ? DataLossError(text) : NotFoundError(text);
  }
  return newest->path;
}

absl::Status VerifyCheckpoint(const FileSystem& fs, const std::string& path) {
  const CheckpointInfo info = Inspect(fs, path);
  if (!info.usable) {
    return DataLossError(StrCat("checkpoint ", path, ": ", info.problem));
  }
  for (const ShardFile& shard : info.manifest.shards) {
    const std::string file = JoinPath(path, shard.file);
    ASSIGN_OR_RETURN(const FileDigest digest, DigestFile(fs, file));
    if (digest.crc32c != shard.crc32c) {
      return DataLossError(
          StrCat(file, ": damaged (checksum ", digest.crc32c, ", expected ", shard.crc32c, ")"));
    }
  }
  return CheckpointReader::Open(fs, path).status();
}

absl::StatusOr<std::vector<CheckpointInfo>> CheckpointStore::Candidates() {
  RETURN_IF_ERROR(fs_.CreateDirectories(root_));
  ASSIGN_OR_RETURN(std::vector<CheckpointInfo> found, ScanFolder(fs_, root_));
  for (CheckpointInfo& info : found) {
    if (info.usable && info.manifest.job_uid != job_uid_) {
      info.usable = false;
      info.problem = StrCat("it belongs to job ", info.manifest.job_uid, ", not ", job_uid_);
    }
  }
  return found;
}

absl::Status CheckpointStore::CheckNotFenced() const {
  ASSIGN_OR_RETURN(const std::vector<AttemptMarker> markers, ReadMarkers(fs_, root_));
  for (const AttemptMarker& m : markers) {
    if (m.attempt > attempt_) {
      return AbortedError(StrCat("attempt ", attempt_, " is fenced: attempt ", m.attempt,
                                 " has begun in ", root_, " from step ", m.start_step));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckpointStore::Begin(std::int64_t start_step) {
  RETURN_IF_ERROR(fs_.CreateDirectories(root_));
  RETURN_IF_ERROR(CheckNotFenced());
  const std::string path = JoinPath(root_, MarkerName(attempt_));
  if (fs_.Exists(path)) {
    return AbortedError(StrCat("attempt ", attempt_, " has begun before: ", path, " exists"));
  }
  // Best effort: whether there is room now, the marker shows.
  RemoveLeavings(0).IgnoreError();
  const nlohmann::json marker = {
      {"attempt", attempt_}, {"start_step", start_step}, {"job_uid", job_uid_}};
  return fs_.WriteFileAtomic(path, marker.dump() + "\n");
}

std::string CheckpointStore::PartialPath(std::int64_t step) const {
  return JoinPath(root_, FolderName(step, attempt_) + kPartial);
}
std::string CheckpointStore::FinalPath(std::int64_t step) const {
  return JoinPath(root_, FolderName(step, attempt_));
}

absl::Status CheckpointStore::Publish(const Manifest& manifest) {
  const std::int64_t step = manifest.state.step;
  if (fs_.Exists(FinalPath(step))) {
    return AlreadyExistsError(StrCat(FinalPath(step), " exists"));
  }
  RETURN_IF_ERROR(CheckNotFenced());
  RETURN_IF_ERROR(fs_.SyncDirectory(PartialPath(step)));  // the shards' names
  RETURN_IF_ERROR(
      fs_.WriteFileAtomic(JoinPath(PartialPath(step), kManifestFile), SerializeManifest(manifest)));
  RETURN_IF_ERROR(fs_.Rename(PartialPath(step), FinalPath(step)));
  return fs_.SyncDirectory(root_);
}

absl::Status CheckpointStore::Retain(std::int32_t keep) {
  RETURN_IF_ERROR(CheckNotFenced());
  ASSIGN_OR_RETURN(const std::vector<CheckpointInfo> found, ScanFolder(fs_, root_));
  absl::Status first;
  std::int32_t kept = 0;
  std::int64_t newest = 0;
  for (const CheckpointInfo& info : found) {
    newest = std::max(newest, info.usable ? info.step : 0);
    if (info.usable && kept < keep) {
      ++kept;
      continue;
    }
    if (!info.usable && !info.fenced && kept < keep) {
      continue;  // damaged, and there are not yet enough good ones: a person may want to look
    }
    // Renamed first, so that a kill in the middle leaves nothing that looks complete.
    const absl::Status renamed = fs_.Rename(info.path, info.path + kDeleting);
    UpdateStatus(&first, renamed);
    if (renamed.ok()) {
      UpdateStatus(&first, fs_.RemoveTree(info.path + kDeleting));
    }
  }
  UpdateStatus(&first, RemoveLeavings(newest));
  return first;
}

absl::Status CheckpointStore::RemoveLeavings(std::int64_t below) {
  ASSIGN_OR_RETURN(const std::vector<std::string> names, fs_.ListDirectory(root_));
  absl::Status first;
  for (const std::string& name : names) {
    std::int64_t step;
    std::int32_t attempt;
    if (EndsWith(name, kDeleting)) {
      UpdateStatus(&first, fs_.RemoveTree(JoinPath(root_, name)));
    } else if (EndsWith(name, kPartial) &&
               ParseFolderName(std::string_view(name).substr(0, name.size() - sizeof(kPartial) + 1),
                               &step, &attempt) &&
               (attempt < attempt_ || (attempt == attempt_ && step < below))) {
      UpdateStatus(&first, fs_.RemoveTree(JoinPath(root_, name)));
    }
  }
  return first;
}

}  // namespace octavo
