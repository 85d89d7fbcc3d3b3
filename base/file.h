// Files behind one narrow interface, so that tests can fill the disk, cut a file or lose power.
//
//   ASSIGN_OR_RETURN(std::string text, fs.ReadFile(path));
//   RETURN_IF_ERROR(fs.WriteFileAtomic(dir + "/manifest.json", text));
//   ASSIGN_OR_RETURN(auto file, fs.OpenForWrite(path));  file->Append(...), file->Sync(),
//   file->Close()
//
// Durability, the rule everybody relies on: bytes survive a power cut after Sync of the file, a
// name after SyncDirectory of its folder. WriteFileAtomic does all of it: temporary in the same
// folder, write, fsync, rename, fsync(folder); readers see the old or the new content, never a
// mixture.
//
// Errors name the operation, the path and the cause. Codes: NOT_FOUND (no such file or folder),
// ALREADY_EXISTS, RESOURCE_EXHAUSTED (no space, quota, too many files), PERMISSION_DENIED (also a
// read-only file system), FAILED_PRECONDITION (folder not empty, is or is not a folder, lock held),
// OUT_OF_RANGE (short read), UNAVAILABLE for the rest of errno. FileSystem objects are thread-safe;
// an open file belongs to one thread at a time (RandomAccessFile may be read from many).
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace octavo {

// Append-only. Destroying without Close closes silently; durable writers call Sync and Close.
class WritableFile {
 public:
  virtual ~WritableFile() = default;
  virtual absl::Status Append(std::string_view bytes) = 0;
  virtual absl::Status Sync() = 0;   // fsync: bytes appended so far survive a power cut
  virtual absl::Status Close() = 0;  // reports late write errors (NFS, quota); idempotent
};

// Read-only, positioned reads; thread-safe.
class RandomAccessFile {
 public:
  virtual ~RandomAccessFile() = default;
  virtual std::int64_t size_bytes() const = 0;
  // Fills `out` from `offset_bytes`, or OUT_OF_RANGE when the file ends before.
  virtual absl::Status ReadAt(std::int64_t offset_bytes, std::span<char> out) const = 0;
  // The whole file mapped read-only, valid while this object lives; empty for an empty file.
  virtual absl::StatusOr<std::string_view> Map() const = 0;
};

// An exclusive lock on a file, held until destroyed (or until the process dies).
class FileLock {
 public:
  virtual ~FileLock() = default;
};

class FileSystem {
 public:
  virtual ~FileSystem() = default;

  virtual absl::StatusOr<std::string> ReadFile(const std::string& path) const = 0;
  virtual absl::Status WriteFileAtomic(const std::string& path, std::string_view bytes);

  // Creates or truncates.
  virtual absl::StatusOr<std::unique_ptr<WritableFile>> OpenForWrite(const std::string& path) = 0;
  // Creates or continues at the end.
  virtual absl::StatusOr<std::unique_ptr<WritableFile>> OpenForAppend(const std::string& path) = 0;
  virtual absl::StatusOr<std::unique_ptr<RandomAccessFile>> OpenForRead(
      const std::string& path) const = 0;

  // Names (not paths), sorted, without "." and "..".
  virtual absl::StatusOr<std::vector<std::string>> ListDirectory(const std::string& path) const = 0;
  virtual absl::Status CreateDirectories(const std::string& path) = 0;  // existing is OK
  virtual absl::Status Remove(const std::string& path) = 0;             // a file or an empty folder
  // A folder and everything below; a missing path is OK; symbolic links are not followed.
  virtual absl::Status RemoveTree(const std::string& path) = 0;
  virtual absl::Status Rename(const std::string& from, const std::string& to) = 0;  // replaces
  virtual absl::Status SyncDirectory(const std::string& path) = 0;

  virtual absl::StatusOr<std::int64_t> FileSize(const std::string& path) const = 0;
  virtual absl::StatusOr<bool> IsDirectory(const std::string& path) const = 0;
  virtual bool Exists(const std::string& path) const = 0;
  // Bytes an unprivileged writer can still write to the file system that holds `path`.
  virtual absl::StatusOr<std::int64_t> FreeBytes(const std::string& path) const = 0;

  // Never waits: FAILED_PRECONDITION when another process or object holds it. Creates the file.
  virtual absl::StatusOr<std::unique_ptr<FileLock>> LockFile(const std::string& path) = 0;
};

class PosixFileSystem final : public FileSystem {
 public:
  static PosixFileSystem& Get();

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
};

// "opening /a/b: No such file or directory" with the code that fits `error` (an errno value).
absl::Status ErrnoStatus(int error, std::string_view attempted);

std::string JoinPath(std::string_view folder, std::string_view name);
std::string DirectoryName(std::string_view path);  // "/a/b" -> "/a"; "b" -> "."
std::string BaseName(std::string_view path);       // "/a/b" -> "b"

}  // namespace octavo
