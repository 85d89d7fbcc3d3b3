// A FileSystem that breaks on command: full disk, read-only, kill at any instant, power cut.
//
//   FaultyFileSystem fs(&PosixFileSystem::Get());
//   fs.FailWritesAfterBytes(1000);          // ENOSPC: the write that crosses 1000 bytes is cut
//   short fs.StopAfterOperations(7);              // kill -9: operation 8 and all later ones change
//   nothing fs.StopAfterBytes(1234);                // kill -9 in the middle of a write
//   fs.LosePower();                         // then: undo everything that was not synced
//
// A test of crash safety runs its writer once to learn operations(), then once per possible
// instant:
//   for (int n = 0; n <= total; ++n) { fs.StopAfterOperations(n); Write(&fs); fs.LosePower();
//   Read(); }
//
// LosePower is the worst case that POSIX allows: bytes after the last Sync of a file are gone, and
// names created or renamed since the last SyncDirectory of their folder are undone (a replaced file
// comes back). Removal counts as durable at once. Mutating operations are: OpenForWrite,
// OpenForAppend, Append, Sync, CreateDirectories, Remove, RemoveTree, Rename, SyncDirectory.
// Thread-safe.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/file.h"

namespace octavo {

class FaultyFileSystem final : public FileSystem {
 public:
  explicit FaultyFileSystem(FileSystem* base) : base_(base) {}

  void FailWritesAfterBytes(
      std::int64_t bytes);                       // counted from now; space returns with ClearFaults
  void TurnReadOnly();                           // as after an error of the device: EROFS
  void StopAfterBytes(std::int64_t bytes);       // counted from now
  void StopAfterOperations(std::int64_t count);  // counted from now
  void FailNextSync(std::string_view path_part);  // one Sync of a path containing it: EIO
  void ClearFaults();                             // also ends a stop, as a new process would

  // Also ends a stop. Open files of before must not be used any more.
  void LosePower();

  std::int64_t operations() const;     // mutating operations attempted so far
  std::int64_t bytes_written() const;  // bytes appended so far
  bool stopped() const;

  absl::StatusOr<std::string> ReadFile(const std::string& path) const override;
  absl::StatusOr<std::unique_ptr<WritableFile>> OpenForWrite(const std::string& path) override;
  absl::StatusOr<std::unique_ptr<WritableFile>> OpenForAppend(const std::string& path) override;
  absl::StatusOr<std::unique_ptr<RandomAccessFile>> OpenForRead(
      const std::string& path) const override;
  absl::StatusOr<std::vector<std::string>> ListDirectory(const std::string& path) const override;
  absl::Status CreateDirectories(const std::string& path) override;
  absl::Status Remove(const std::string& path) override;
  absl::Status RemoveTree(const std::string& path) override;
  absl::Status Rename(const std::string& from, const std::string& to) override;
  absl::Status SyncDirectory(const std::string& path) override;
  absl::StatusOr<std::int64_t> FileSize(const std::string& path) const override;
  absl::StatusOr<bool> IsDirectory(const std::string& path) const override;
  bool Exists(const std::string& path) const override;
  absl::StatusOr<std::int64_t> FreeBytes(const std::string& path) const override;
  absl::StatusOr<std::unique_ptr<FileLock>> LockFile(const std::string& path) override;

 private:
  class File;
  // One name change that the folder has not been synced for yet, and how to take it back.
  struct PendingName {
    std::string folder;
    std::function<void()> undo;
  };
  static constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();

  // Counts the operation; an error when the simulated process is dead.
  absl::Status BeginOperation(std::string_view what);  // REQUIRES: mutex_ held
  absl::StatusOr<std::unique_ptr<WritableFile>> Open(const std::string& path, bool append);
  absl::Status AppendTo(const std::string& path, WritableFile* file, std::string_view bytes);
  absl::Status SyncFile(const std::string& path, WritableFile* file);
  void MoveState(const std::string& from, const std::string& to);  // REQUIRES: mutex_ held

  FileSystem* const base_;
  mutable std::mutex mutex_;
  // All below guarded by mutex_.
  std::map<std::string, std::int64_t> durable_bytes_;  // of files written through us, by path now
  std::vector<PendingName> pending_names_;
  std::int64_t operations_ = 0;
  std::int64_t bytes_written_ = 0;
  std::int64_t full_at_bytes_ = kNever;
  std::int64_t stop_at_bytes_ = kNever;
  std::int64_t stop_at_operations_ = kNever;
  std::optional<std::string> fail_sync_of_;
  bool stopped_ = false;
  bool read_only_ = false;
};

}  // namespace octavo
