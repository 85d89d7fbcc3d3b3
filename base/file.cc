#include "base/file.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <utility>

#include "base/status.h"
#include "base/str.h"

namespace octavo {
namespace {

// Retries calls that a signal interrupted.
template <class Call>
auto RetryOnSignal(Call call) {
  auto result = call();
  while (result < 0 && errno == EINTR) {
    result = call();
  }
  return result;
}

class Fd {
 public:
  explicit Fd(int fd) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd(const Fd&) = delete;
  Fd& operator=(const Fd&) = delete;
  ~Fd() {
    if (fd_ >= 0) {
      ::close(fd_);
    }
  }
  int get() const { return fd_; }
  int Release() { return std::exchange(fd_, -1); }

 private:
  int fd_;
};

absl::StatusOr<Fd> OpenFd(const std::string& path, int flags, std::string_view purpose) {
  const int fd = RetryOnSignal([&] { return ::open(path.c_str(), flags | O_CLOEXEC, 0644); });
  if (fd < 0) {
    return ErrnoStatus(errno, StrCat("opening ", path, purpose));
  }
  return Fd(fd);
}

absl::Status ReadExactly(int fd, const std::string& path, std::int64_t offset,
                         std::span<char> out) {
  std::size_t done = 0;
  while (done < out.size()) {
    const ssize_t count = RetryOnSignal([&] {
      return ::pread(fd, out.data() + done, out.size() - done,
                     static_cast<off_t>(offset) + static_cast<off_t>(done));
    });
    if (count < 0) {
      return ErrnoStatus(errno, StrCat("reading ", path));
    }
    if (count == 0) {
      return OutOfRangeError(StrCat("reading ", path, ": wanted ", out.size(), " bytes at offset ",
                                    offset, ", file ends after ", done));
    }
    done += static_cast<std::size_t>(count);
  }
  return absl::OkStatus();
}

class PosixWritableFile final : public WritableFile {
 public:
  PosixWritableFile(Fd fd, std::string path) : fd_(std::move(fd)), path_(std::move(path)) {}

  absl::Status Append(std::string_view bytes) override {
    while (!bytes.empty()) {
      const ssize_t count =
          RetryOnSignal([&] { return ::write(fd_.get(), bytes.data(), bytes.size()); });
      if (count < 0) {
        return ErrnoStatus(errno, StrCat("writing ", path_));
      }
      bytes.remove_prefix(static_cast<std::size_t>(count));
    }
    return absl::OkStatus();
  }

  absl::Status Sync() override {
    if (RetryOnSignal([&] { return ::fsync(fd_.get()); }) != 0) {
      return ErrnoStatus(errno, StrCat("syncing ", path_));
    }
    return absl::OkStatus();
  }

  absl::Status Close() override {
    const int fd = fd_.Release();
    if (fd >= 0 && ::close(fd) != 0 && errno != EINTR) {
      return ErrnoStatus(errno, StrCat("closing ", path_));
    }
    return absl::OkStatus();
  }

 private:
  Fd fd_;
  const std::string path_;
};

class PosixRandomAccessFile final : public RandomAccessFile {
 public:
  PosixRandomAccessFile(Fd fd, std::string path, std::int64_t size_bytes)
      : fd_(std::move(fd)), path_(std::move(path)), size_bytes_(size_bytes) {}
  ~PosixRandomAccessFile() override {
    if (mapped_ != nullptr) {
      ::munmap(mapped_, static_cast<std::size_t>(size_bytes_));
    }
  }

  std::int64_t size_bytes() const override { return size_bytes_; }

  absl::Status ReadAt(std::int64_t offset_bytes, std::span<char> out) const override {
    if (offset_bytes < 0) {
      return OutOfRangeError(StrCat("reading ", path_, ": negative offset ", offset_bytes));
    }
    return ReadExactly(fd_.get(), path_, offset_bytes, out);
  }

  absl::StatusOr<std::string_view> Map() const override {
    if (size_bytes_ == 0) {
      return std::string_view();
    }
    std::lock_guard<std::mutex> lock(mutex_);
    if (mapped_ == nullptr) {
      void* address = ::mmap(nullptr, static_cast<std::size_t>(size_bytes_), PROT_READ, MAP_PRIVATE,
                             fd_.get(), 0);
      if (address == MAP_FAILED) {
        return ErrnoStatus(errno, StrCat("mapping ", path_));
      }
      mapped_ = address;
    }
    return std::string_view(static_cast<const char*>(mapped_),
                            static_cast<std::size_t>(size_bytes_));
  }

 private:
  const Fd fd_;
  const std::string path_;
  const std::int64_t size_bytes_;
  mutable std::mutex mutex_;
  mutable void* mapped_ = nullptr;  // guarded by mutex_
};

class PosixFileLock final : public FileLock {
 public:
  explicit PosixFileLock(Fd fd) : fd_(std::move(fd)) {}

 private:
  const Fd fd_;  // closing the descriptor releases the flock
};

absl::Status RemoveTreeAt(int parent, const char* name, const std::string& path) {
  struct stat info;
  if (::fstatat(parent, name, &info, AT_SYMLINK_NOFOLLOW) != 0) {
    return errno == ENOENT ? absl::OkStatus() : ErrnoStatus(errno, StrCat("inspecting ", path));
  }
  if (!S_ISDIR(info.st_mode)) {
    if (::unlinkat(parent, name, 0) != 0 && errno != ENOENT) {
      return ErrnoStatus(errno, StrCat("removing ", path));
    }
    return absl::OkStatus();
  }
  const int fd = ::openat(parent, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
  if (fd < 0) {
    return ErrnoStatus(errno, StrCat("opening folder ", path));
  }
  DIR* folder = ::fdopendir(fd);
  if (folder == nullptr) {
    const int error = errno;
    ::close(fd);
    return ErrnoStatus(error, StrCat("opening folder ", path));
  }
  absl::Status status;
  while (const dirent* entry = ::readdir(folder)) {
    const std::string child = entry->d_name;
    if (child != "." && child != "..") {
      UpdateStatus(&status, RemoveTreeAt(fd, child.c_str(), JoinPath(path, child)));
    }
  }
  ::closedir(folder);
  RETURN_IF_ERROR(status);
  if (::unlinkat(parent, name, AT_REMOVEDIR) != 0 && errno != ENOENT) {
    return ErrnoStatus(errno, StrCat("removing folder ", path));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status ErrnoStatus(int error, std::string_view attempted) {
  char buffer[128];
  // GNU strerror_r returns the text, which may or may not be in `buffer`.
  const std::string text = StrCat(attempted, ": ", ::strerror_r(error, buffer, sizeof(buffer)));
  switch (error) {
    case ENOENT:
      return NotFoundError(text);
    case EEXIST:
      return AlreadyExistsError(text);
    case ENOSPC:
    case EDQUOT:
    case EMFILE:
    case ENFILE:
    case ENOMEM:
    case EFBIG:
      return ResourceExhaustedError(text);
    case EACCES:
    case EPERM:
    case EROFS:
      return PermissionDeniedError(text);
    case ENOTEMPTY:
    case EISDIR:
    case ENOTDIR:
    case EBUSY:
    case ETXTBSY:
      return FailedPreconditionError(text);
    case EINVAL:
    case ENAMETOOLONG:
      return InvalidArgumentError(text);
    default:
      return UnavailableError(text);
  }
}

std::string JoinPath(std::string_view folder, std::string_view name) {
  if (folder.empty() || StartsWith(name, "/")) {
    return std::string(name);
  }
  return EndsWith(folder, "/") ? StrCat(folder, name) : StrCat(folder, "/", name);
}

std::string DirectoryName(std::string_view path) {
  const std::size_t at = path.rfind('/');
  if (at == std::string_view::npos) {
    return ".";
  }
  return at == 0 ? "/" : std::string(path.substr(0, at));
}

std::string BaseName(std::string_view path) {
  const std::size_t at = path.rfind('/');
  return std::string(at == std::string_view::npos ? path : path.substr(at + 1));
}

// Built from the primitives so that a faulty file system exercises every step of it.
absl::Status FileSystem::WriteFileAtomic(const std::string& path, std::string_view bytes) {
  static std::atomic<std::uint64_t> counter{0};
  const std::string temporary = StrCat(path, ".tmp.", ::getpid(), ".", counter.fetch_add(1));
  const auto write = [&]() -> absl::Status {
    ASSIGN_OR_RETURN(std::unique_ptr<WritableFile> file, OpenForWrite(temporary));
    RETURN_IF_ERROR(file->Append(bytes));
    RETURN_IF_ERROR(file->Sync());
    RETURN_IF_ERROR(file->Close());
    return Rename(temporary, path);
  };
  const absl::Status written = write();
  if (!written.ok()) {
    Remove(temporary).IgnoreError();  // best effort: the first error is what the caller must see
    return Annotate(written, StrCat("writing ", path, " atomically"));
  }
  return Annotate(SyncDirectory(DirectoryName(path)), StrCat("writing ", path, " atomically"));
}

PosixFileSystem& PosixFileSystem::Get() {
  static PosixFileSystem fs;
  return fs;
}

absl::StatusOr<std::string> PosixFileSystem::ReadFile(const std::string& path) const {
  ASSIGN_OR_RETURN(const Fd fd, OpenFd(path, O_RDONLY, ""));
  std::string text;
  // Read to the end rather than trusting st_size: files in /proc and pipes say 0.
  while (true) {
    char chunk[64 * 1024];
    const ssize_t count = RetryOnSignal([&] { return ::read(fd.get(), chunk, sizeof(chunk)); });
    if (count < 0) {
      return ErrnoStatus(errno, StrCat("reading ", path));
    }
    if (count == 0) {
      return text;
    }
    text.append(chunk, static_cast<std::size_t>(count));
  }
}

absl::StatusOr<std::unique_ptr<WritableFile>> PosixFileSystem::OpenForWrite(
    const std::string& path) {
  ASSIGN_OR_RETURN(Fd fd, OpenFd(path, O_WRONLY | O_CREAT | O_TRUNC, " for writing"));
  return std::make_unique<PosixWritableFile>(std::move(fd), path);
}

absl::StatusOr<std::unique_ptr<WritableFile>> PosixFileSystem::OpenForAppend(
    const std::string& path) {
  ASSIGN_OR_RETURN(Fd fd, OpenFd(path, O_WRONLY | O_CREAT | O_APPEND, " for appending"));
  return std::make_unique<PosixWritableFile>(std::move(fd), path);
}

absl::StatusOr<std::unique_ptr<RandomAccessFile>> PosixFileSystem::OpenForRead(
    const std::string& path) const {
  ASSIGN_OR_RETURN(Fd fd, OpenFd(path, O_RDONLY, ""));
  struct stat info;
  if (::fstat(fd.get(), &info) != 0) {
    return ErrnoStatus(errno, StrCat("inspecting ", path));
  }
  if (S_ISDIR(info.st_mode)) {
    return ErrnoStatus(EISDIR, StrCat("opening ", path));
  }
  return std::make_unique<PosixRandomAccessFile>(std::move(fd), path, info.st_size);
}

absl::StatusOr<std::vector<std::string>> PosixFileSystem::ListDirectory(
    const std::string& path) const {
  DIR* folder = ::opendir(path.c_str());
  if (folder == nullptr) {
    return ErrnoStatus(errno, StrCat("listing ", path));
  }
  std::vector<std::string> names;
  errno = 0;
  while (const dirent* entry = ::readdir(folder)) {
    const std::string name = entry->d_name;
    if (name != "." && name != "..") {
      names.push_back(name);
    }
    errno = 0;
  }
  const int error = errno;
  ::closedir(folder);
  if (error != 0) {
    return ErrnoStatus(error, StrCat("listing ", path));
  }
  std::sort(names.begin(), names.end());
  return names;
}

absl::Status PosixFileSystem::CreateDirectories(const std::string& path) {
  for (std::size_t at = 0; at != std::string::npos;) {
    at = path.find('/', at + 1);
    const std::string prefix = path.substr(0, at);
    if (::mkdir(prefix.c_str(), 0755) == 0) {
      continue;
    }
    const int error = errno;
    struct stat info;
    if (::stat(prefix.c_str(), &info) == 0 && S_ISDIR(info.st_mode)) {
      continue;  // also covers EROFS and EACCES of mkdir on folders that exist
    }
    return ErrnoStatus(error == EEXIST ? ENOTDIR : error, StrCat("creating folder ", prefix));
  }
  return absl::OkStatus();
}

absl::Status PosixFileSystem::Remove(const std::string& path) {
  if (std::remove(path.c_str()) != 0) {
    return ErrnoStatus(errno, StrCat("removing ", path));
  }
  return absl::OkStatus();
}

absl::Status PosixFileSystem::RemoveTree(const std::string& path) {
  return RemoveTreeAt(AT_FDCWD, path.c_str(), path);
}

absl::Status PosixFileSystem::Rename(const std::string& from, const std::string& to) {
  if (std::rename(from.c_str(), to.c_str()) != 0) {
    return ErrnoStatus(errno, StrCat("renaming ", from, " to ", to));
  }
  return absl::OkStatus();
}

absl::Status PosixFileSystem::SyncDirectory(const std::string& path) {
  ASSIGN_OR_RETURN(const Fd fd, OpenFd(path, O_RDONLY | O_DIRECTORY, " as a folder"));
  if (RetryOnSignal([&] { return ::fsync(fd.get()); }) != 0) {
    return ErrnoStatus(errno, StrCat("syncing folder ", path));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::int64_t> PosixFileSystem::FileSize(const std::string& path) const {
  struct stat info;
  if (::stat(path.c_str(), &info) != 0) {
    return ErrnoStatus(errno, StrCat("inspecting ", path));
  }
  return static_cast<std::int64_t>(info.st_size);
}

absl::StatusOr<bool> PosixFileSystem::IsDirectory(const std::string& path) const {
  struct stat info;
  if (::stat(path.c_str(), &info) != 0) {
    return ErrnoStatus(errno, StrCat("inspecting ", path));
  }
  return S_ISDIR(info.st_mode);
}

bool PosixFileSystem::Exists(const std::string& path) const {
  struct stat info;
  return ::stat(path.c_str(), &info) == 0;
}

absl::StatusOr<std::int64_t> PosixFileSystem::FreeBytes(const std::string& path) const {
  struct statvfs info;
  if (::statvfs(path.c_str(), &info) != 0) {
    return ErrnoStatus(errno, StrCat("asking for free space at ", path));
  }
  return static_cast<std::int64_t>(info.f_bavail) * static_cast<std::int64_t>(info.f_frsize);
}

absl::StatusOr<std::unique_ptr<FileLock>> PosixFileSystem::LockFile(const std::string& path) {
  ASSIGN_OR_RETURN(Fd fd, OpenFd(path, O_RDWR | O_CREAT, " to lock it"));
  if (RetryOnSignal([&] { return ::flock(fd.get(), LOCK_EX | LOCK_NB); }) != 0) {
    if (errno == EWOULDBLOCK) {
      return FailedPreconditionError(
          StrCat("locking ", path, ": another process holds the lock (is one already running?)"));
    }
    return ErrnoStatus(errno, StrCat("locking ", path));
  }
  return std::make_unique<PosixFileLock>(std::move(fd));
}

}  // namespace octavo
