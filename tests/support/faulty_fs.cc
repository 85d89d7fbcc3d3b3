#include "tests/support/faulty_fs.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "base/check.h"
#include "base/status.h"
#include "base/str.h"

namespace octavo {

class FaultyFileSystem::File final : public WritableFile {
 public:
  File(FaultyFileSystem* fs, std::string path, std::unique_ptr<WritableFile> file)
      : fs_(fs), path_(std::move(path)), file_(std::move(file)) {}
  absl::Status Append(std::string_view bytes) override {
    return fs_->AppendTo(path_, file_.get(), bytes);
  }
  absl::Status Sync() override { return fs_->SyncFile(path_, file_.get()); }
  absl::Status Close() override { return file_->Close(); }

 private:
  FaultyFileSystem* const fs_;
  const std::string path_;
  const std::unique_ptr<WritableFile> file_;
};

void FaultyFileSystem::FailWritesAfterBytes(std::int64_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  full_at_bytes_ = bytes_written_ + bytes;
}

void FaultyFileSystem::StopAfterBytes(std::int64_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  stop_at_bytes_ = bytes_written_ + bytes;
}

void FaultyFileSystem::StopAfterOperations(std::int64_t count) {
  std::lock_guard<std::mutex> lock(mutex_);
  stop_at_operations_ = operations_ + count;
}

void FaultyFileSystem::FailNextSync(std::string_view path_part) {
  std::lock_guard<std::mutex> lock(mutex_);
  fail_sync_of_ = std::string(path_part);
}

void FaultyFileSystem::TurnReadOnly() {
  std::lock_guard<std::mutex> lock(mutex_);
  read_only_ = true;
}

void FaultyFileSystem::ClearFaults() {
  std::lock_guard<std::mutex> lock(mutex_);
  full_at_bytes_ = stop_at_bytes_ = stop_at_operations_ = kNever;
  fail_sync_of_.reset();
  stopped_ = false;
  read_only_ = false;
}

void FaultyFileSystem::LosePower() {
  ClearFaults();
  std::lock_guard<std::mutex> lock(mutex_);
  // Contents first (paths are those of now), then names, newest first.
  for (const auto& [path, bytes] : durable_bytes_) {
    const absl::StatusOr<std::int64_t> size = base_->FileSize(path);
    if (size.ok() && *size > bytes) {
      OCTAVO_CHECK(::truncate(path.c_str(), bytes) == 0, "truncating %s failed", path.c_str());
    }
  }
  for (auto pending = pending_names_.rbegin(); pending != pending_names_.rend(); ++pending) {
    pending->undo();
  }
  pending_names_.clear();
  durable_bytes_.clear();
}

std::int64_t FaultyFileSystem::operations() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return operations_;
}
std::int64_t FaultyFileSystem::bytes_written() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return bytes_written_;
}
bool FaultyFileSystem::stopped() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return stopped_;
}

absl::Status FaultyFileSystem::BeginOperation(std::string_view what) {
  stopped_ = stopped_ || operations_ >= stop_at_operations_;
  if (stopped_) {
    return AbortedError(StrCat(what, ": simulated kill"));
  }
  ++operations_;
  return read_only_ ? ErrnoStatus(EROFS, std::string(what)) : absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<WritableFile>> FaultyFileSystem::Open(const std::string& path,
                                                                     bool append) {
  std::lock_guard<std::mutex> lock(mutex_);
  RETURN_IF_ERROR(BeginOperation(StrCat("opening ", path)));
  const bool existed = base_->Exists(path);
  if (!existed && bytes_written_ >= full_at_bytes_) {
    return ErrnoStatus(ENOSPC, StrCat("opening ", path));
  }
  ASSIGN_OR_RETURN(std::unique_ptr<WritableFile> file,
                   append ? base_->OpenForAppend(path) : base_->OpenForWrite(path));
  if (!existed) {
    pending_names_.push_back({DirectoryName(path), [this, path] {
                                base_->Remove(path).IgnoreError();  // a later Remove is fine too
                              }});
  }
  if (!append || !existed) {
    durable_bytes_[path] = 0;
  } else if (durable_bytes_.count(path) == 0) {
    ASSIGN_OR_RETURN(durable_bytes_[path], base_->FileSize(path));
  }
  return std::make_unique<File>(this, path, std::move(file));
}

absl::StatusOr<std::unique_ptr<WritableFile>> FaultyFileSystem::OpenForWrite(
    const std::string& path) {
  return Open(path, /*append=*/false);
}
absl::StatusOr<std::unique_ptr<WritableFile>> FaultyFileSystem::OpenForAppend(
    const std::string& path) {
  return Open(path, /*append=*/true);
}

absl::Status FaultyFileSystem::AppendTo(const std::string& path, WritableFile* file,
                                        std::string_view bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  RETURN_IF_ERROR(BeginOperation(StrCat("writing ", path)));
  const std::int64_t room = std::min(full_at_bytes_, stop_at_bytes_) - bytes_written_;
  const auto count = static_cast<std::size_t>(std::clamp<std::int64_t>(room, 0, std::ssize(bytes)));
  RETURN_IF_ERROR(file->Append(bytes.substr(0, count)));
  bytes_written_ += static_cast<std::int64_t>(count);
  if (count == bytes.size()) {
    return absl::OkStatus();
  }
  if (stop_at_bytes_ <= full_at_bytes_) {
    stopped_ = true;
    return AbortedError(StrCat("writing ", path, ": simulated kill"));
  }
  return ErrnoStatus(ENOSPC, StrCat("writing ", path));
}

absl::Status FaultyFileSystem::SyncFile(const std::string& path, WritableFile* file) {
  std::lock_guard<std::mutex> lock(mutex_);
  RETURN_IF_ERROR(BeginOperation(StrCat("syncing ", path)));
  if (fail_sync_of_.has_value() && path.find(*fail_sync_of_) != std::string::npos) {
    fail_sync_of_.reset();
    return ErrnoStatus(EIO, StrCat("syncing ", path));
  }
  RETURN_IF_ERROR(file->Sync());
  ASSIGN_OR_RETURN(durable_bytes_[path], base_->FileSize(path));
  return absl::OkStatus();
}

absl::StatusOr<std::string> FaultyFileSystem::ReadFile(const std::string& path) const {
  return base_->ReadFile(path);
}
absl::StatusOr<std::unique_ptr<RandomAccessFile>> FaultyFileSystem::OpenForRead(
    const std::string& path) const {
  return base_->OpenForRead(path);
}
absl::StatusOr<std::vector<std::string>> FaultyFileSystem::ListDirectory(
    const std::string& path) const {
  return base_->ListDirectory(path);
}

absl::Status FaultyFileSystem::CreateDirectories(const std::string& path) {
  std::lock_guard<std::mutex> lock(mutex_);
  RETURN_IF_ERROR(BeginOperation(StrCat("creating folder ", path)));
  std::vector<std::string> missing;  // innermost first
  for (std::string folder = path; !base_->Exists(folder); folder = DirectoryName(folder)) {
    missing.push_back(folder);
  }
  RETURN_IF_ERROR(base_->CreateDirectories(path));
  for (auto folder = missing.rbegin(); folder != missing.rend(); ++folder) {
    pending_names_.push_back({DirectoryName(*folder), [this, created = *folder] {
                                base_->RemoveTree(created).IgnoreError();
                              }});
  }
  return absl::OkStatus();
}

absl::Status FaultyFileSystem::Remove(const std::string& path) {
  std::lock_guard<std::mutex> lock(mutex_);
  RETURN_IF_ERROR(BeginOperation(StrCat("removing ", path)));
  durable_bytes_.erase(path);
  return base_->Remove(path);
}

absl::Status FaultyFileSystem::RemoveTree(const std::string& path) {
  std::lock_guard<std::mutex> lock(mutex_);
  RETURN_IF_ERROR(BeginOperation(StrCat("removing ", path)));
  std::erase_if(durable_bytes_, [&](const auto& entry) {
    return entry.first == path || StartsWith(entry.first, path + "/");
  });
  return base_->RemoveTree(path);
}

void FaultyFileSystem::MoveState(const std::string& from, const std::string& to) {
  std::map<std::string, std::int64_t> moved;
  for (const auto& [path, bytes] : durable_bytes_) {
    if (path == from || StartsWith(path, from + "/")) {
      moved[to + path.substr(from.size())] = bytes;
    } else if (path != to) {
      moved.emplace(path, bytes);
    }
  }
  durable_bytes_ = std::move(moved);
}

absl::Status FaultyFileSystem::Rename(const std::string& from, const std::string& to) {
  std::lock_guard<std::mutex> lock(mutex_);
  RETURN_IF_ERROR(BeginOperation(StrCat("renaming ", from, " to ", to)));
  std::optional<std::string> replaced;
  const absl::StatusOr<bool> is_directory = base_->IsDirectory(to);
  if (is_directory.ok() && !*is_directory) {
    ASSIGN_OR_RETURN(replaced, base_->ReadFile(to));
  }
  RETURN_IF_ERROR(base_->Rename(from, to));
  MoveState(from, to);
  pending_names_.push_back({DirectoryName(to), [this, from, to, replaced] {
                              base_->Rename(to, from).IgnoreError();
                              if (replaced.has_value()) {
                                auto file = base_->OpenForWrite(to);
                                OCTAVO_CHECK(file.ok() && (*file)->Append(*replaced).ok());
                              }
                            }});
  return absl::OkStatus();
}

absl::Status FaultyFileSystem::SyncDirectory(const std::string& path) {
  std::lock_guard<std::mutex> lock(mutex_);
  RETURN_IF_ERROR(BeginOperation(StrCat("syncing folder ", path)));
  RETURN_IF_ERROR(base_->SyncDirectory(path));
  std::erase_if(pending_names_, [&](const PendingName& name) { return name.folder == path; });
  return absl::OkStatus();
}

absl::StatusOr<std::int64_t> FaultyFileSystem::FileSize(const std::string& path) const {
  return base_->FileSize(path);
}
absl::StatusOr<bool> FaultyFileSystem::IsDirectory(const std::string& path) const {
  return base_->IsDirectory(path);
}
bool FaultyFileSystem::Exists(const std::string& path) const { return base_->Exists(path); }

absl::StatusOr<std::int64_t> FaultyFileSystem::FreeBytes(const std::string& path) const {
  std::lock_guard<std::mutex> lock(mutex_);
  if (full_at_bytes_ != kNever) {
    return std::max<std::int64_t>(0, full_at_bytes_ - bytes_written_);
  }
  return base_->FreeBytes(path);
}
absl::StatusOr<std::unique_ptr<FileLock>> FaultyFileSystem::LockFile(const std::string& path) {
  return base_->LockFile(path);
}

}  // namespace octavo
