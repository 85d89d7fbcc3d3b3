#include "worker/agent/rank_host.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/file.h"
#include "base/log.h"
#include "base/status.h"

namespace octavo {
namespace {

PosixFileSystem& Files() { return PosixFileSystem::Get(); }

std::string ReadTail(const std::string& path, std::int64_t bytes) {
  const auto file = Files().OpenForRead(path);
  if (!file.ok()) {
    return "";
  }
  const std::int64_t size = (*file)->size_bytes();
  const std::int64_t offset = std::max<std::int64_t>(0, size - bytes);
  std::string text(static_cast<std::size_t>(size - offset), '\0');
  if (!(*file)->ReadAt(offset, text).ok()) {
    return "";
  }
  // Whole lines only, unless the one line is longer than the tail.
  const std::size_t line_end = text.find('\n');
  if (offset > 0 && line_end != std::string::npos && line_end + 1 < text.size()) {
    text.erase(0, line_end + 1);
  }
  return text;
}

// Protobuf strings must be UTF-8; a crashing process prints whatever it likes.
std::string ToAscii(std::string text) {
  std::replace_if(
      text.begin(), text.end(),
      [](char c) { return static_cast<unsigned char>(c) >= 0x80 || c == '\0'; }, '?');
  return text;
}

// How often the kernel has killed something in this daemon's cgroup (v2) for memory; 0 if unknown.
std::int64_t OomKills() {
  const auto own = Files().ReadFile("/proc/self/cgroup");
  if (!own.ok() || !StartsWith(*own, "0::")) {
    return 0;
  }
  const std::string group(StripSpace(std::string_view(*own).substr(3)));
  const auto events = Files().ReadFile(StrCat("/sys/fs/cgroup", group, "/memory.events"));
  if (!events.ok()) {
    return 0;
  }
  for (const std::string& line : StrSplit(*events, '\n')) {
    if (StartsWith(line, "oom_kill ")) {
      return ParseInt64(std::string_view(line).substr(9)).value_or(0);
    }
  }
  return 0;
}

// The uid becomes a folder name: a hostile one must not climb out of the state folder.
absl::Status CheckFolderName(const std::string& uid) {
  if (uid.empty() || uid[0] == '.' || uid.find('/') != std::string::npos) {
    return InvalidArgumentError(StrCat("job uid \"", uid, "\" is not a valid name"));
  }
  return absl::OkStatus();
}

}  // namespace

RankHost::RankHost(Options options, OnExit on_exit)
    : options_(std::move(options)), on_exit_(std::move(on_exit)) {
  wake_fd_ = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  OCTAVO_CHECK(wake_fd_ >= 0, "eventfd failed: errno %d", errno);
  watcher_ = std::jthread([this](const std::stop_token& stop) { Watch(stop); });
}

RankHost::~RankHost() {
  watcher_.request_stop();
  Wake();
  watcher_.join();
  live_.clear();
  ::close(wake_fd_);
}

std::string RankHost::RanksFolder() const { return JoinPath(options_.state_dir, "ranks"); }
std::string RankHost::RankFolder(const RankKey& key) const {
  return StrCat(RanksFolder(), "/", key.job_uid, "/", key.attempt, "/", key.rank);
}
std::string RankHost::LogPath(const RankKey& key) const {
  return JoinPath(RankFolder(key), "rank.log");
}

absl::StatusOr<int> RankHost::Spawn(const RankKey& key) {
  RETURN_IF_ERROR(CheckFolderName(key.job_uid));
  const std::string folder = RankFolder(key);
  RETURN_IF_ERROR(Files().RemoveTree(folder));
  RETURN_IF_ERROR(Files().CreateDirectories(folder));
  const std::string log = LogPath(key);
  ASSIGN_OR_RETURN(
      std::shared_ptr<Subprocess> process,
      Subprocess::Spawn(
          {.argv = {options_.rank_binary, "--socket", options_.socket_address, "--job-uid",
                    key.job_uid, "--attempt", StrCat(key.attempt), "--rank", StrCat(key.rank)},
           // A pool of OpenBLAS's would start before the rank's main can block signals in it: a
           // SIGTERM that it takes ends the process.
           .environment = {{"OPENBLAS_NUM_THREADS", "1"}},
           .working_directory = folder,
           .stdout_path = log,
           .stderr_path = log}));
  const int pid = process->pid();
  {
    std::lock_guard<std::mutex> lock(mutex_);
    live_[key] = {.process = std::move(process), .oom_kills_before = OomKills()};
  }
  Wake();
  return pid;
}

absl::Status RankHost::Signal(const RankKey& key, int signal) {
  std::shared_ptr<Subprocess> process;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = live_.find(key);
    if (found == live_.end()) {
      return absl::OkStatus();
    }
    process = found->second.process;
  }
  return process->SignalGroup(signal);
}

absl::Status RankHost::ForgetJob(const std::string& job_uid) {
  RETURN_IF_ERROR(CheckFolderName(job_uid));
  // The end of a job makes its folder the newest one.
  ::utimensat(AT_FDCWD, JoinPath(RanksFolder(), job_uid).c_str(), nullptr, 0);
  return PruneJobs();
}

absl::Status RankHost::PruneJobs() {
  if (!Files().Exists(RanksFolder())) {
    return absl::OkStatus();
  }
  ASSIGN_OR_RETURN(const std::vector<std::string> jobs, Files().ListDirectory(RanksFolder()));
  std::vector<std::pair<std::int64_t, std::string>> idle;  // time of last change in ns, job
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const std::string& job : jobs) {
      const bool live = std::any_of(live_.begin(), live_.end(),
                                    [&](const auto& entry) { return entry.first.job_uid == job; });
      struct stat info;
      if (!live && ::stat(JoinPath(RanksFolder(), job).c_str(), &info) == 0) {
        idle.emplace_back(info.st_mtim.tv_sec * 1'000'000'000 + info.st_mtim.tv_nsec, job);
      }
    }
  }
  std::sort(idle.begin(), idle.end());
  absl::Status status;
  for (std::size_t i = 0; i + kJobFoldersKept < idle.size(); ++i) {
    UpdateStatus(&status, Files().RemoveTree(JoinPath(RanksFolder(), idle[i].second)));
  }
  return status;
}

void RankHost::Wake() {
  const std::uint64_t one = 1;
  // EAGAIN means that the counter is full, so the watcher is about to wake anyway.
  [[maybe_unused]] const ssize_t ignored = ::write(wake_fd_, &one, sizeof(one));
}

void RankHost::Watch(const std::stop_token& stop) {
  while (!stop.stop_requested()) {
    std::vector<std::pair<RankKey, Live>> watched;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      watched.assign(live_.begin(), live_.end());
    }
    std::vector<pollfd> fds = {{.fd = wake_fd_, .events = POLLIN, .revents = 0}};
    for (const auto& [key, live] : watched) {
      fds.push_back({.fd = live.process->pidfd(), .events = POLLIN, .revents = 0});
    }
    ::poll(fds.data(), fds.size(), 60'000);  // wakes for an end, a new process, or stop
    std::uint64_t count;
    [[maybe_unused]] const ssize_t ignored = ::read(wake_fd_, &count, sizeof(count));
    for (const auto& [key, live] : watched) {
      const std::optional<ExitReason> exit = live.process->Poll();
      if (!exit.has_value()) {
        continue;
      }
      {
        std::lock_guard<std::mutex> lock(mutex_);
        live_.erase(key);
      }
      on_exit_({.key = key,
                .exit = *exit,
                .log_tail = ToAscii(ReadTail(LogPath(key), kLogTailBytes)),
                .out_of_memory = OomKills() > live.oom_kills_before});
    }
  }
}

}  // namespace octavo
