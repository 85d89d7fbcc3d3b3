// The processes of the ranks: one folder and one captured log per rank, ends seen from the kernel.
//
// How a rank is started (the contract with octavo-rank):
//
//   octavo-rank --socket unix:/run/octavo/worker.sock --job-uid UID --attempt A --rank R
//
//   working folder   <state-dir>/ranks/<job_uid>/<attempt>/<rank>/   (fresh)
//   stdout, stderr   rank.log in it, appended
//   it dials the socket, calls RankService.Session, sends RankHello first; the assignment answers.
//   SIGTERM means: leave soon without a checkpoint. SIGKILL follows. A stop WISH (with checkpoint)
//   comes over the stream before either. It gets SIGKILL when the daemon dies (PDEATHSIG).
//
// And how a slot is probed, once, at the daemon's start (see inventory.h):
//
//   octavo-rank --probe --device cpu|cuda --device-ordinal N      one JSON object on stdout
//
// Spawn must be called from the thread that lives longest (the loop's): parent-death follows the
// spawning thread. Ends are pushed to `on_exit` from the watcher thread. Thread-safe.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/subprocess.h"
#include "worker/agent/events.h"

namespace octavo {

class RankHost {
 public:
  struct Options {
    std::string rank_binary;     // path of octavo-rank
    std::string state_dir;       // of the daemon
    std::string socket_address;  // "unix:/path", passed on
  };
  using OnExit = std::function<void(RankExited)>;
  static constexpr std::int64_t kLogTailBytes = 4096;  // of rank.log, in RankExited
  static constexpr int kJobFoldersKept = 100;

  RankHost(Options options, OnExit on_exit);
  ~RankHost();  // kills what is left, bounded by Subprocess::kDestroyWait each
  RankHost(const RankHost&) = delete;
  RankHost& operator=(const RankHost&) = delete;

  // The process id. Errors: folder or log cannot be made, program cannot be executed.
  absl::StatusOr<int> Spawn(const RankKey& key);

  // To the rank's process group; an ended or unknown rank is OK.
  absl::Status Signal(const RankKey& key, int signal);

  // A job is over. Its logs are wanted most just then, so nothing goes at once: of the jobs without
  // live ranks the folders of the newest kJobFoldersKept stay, older ones are removed.
  absl::Status ForgetJob(const std::string& job_uid);
  absl::Status PruneJobs();  // the same bound; also at the daemon's start

  std::string RankFolder(const RankKey& key) const;
  std::string LogPath(const RankKey& key) const;
  std::string RanksFolder() const;  // of all jobs

 private:
  struct Live {
    std::shared_ptr<Subprocess> process;
    std::int64_t oom_kills_before = 0;  // of our cgroup, when it was started
  };

  void Watch(const std::stop_token& stop);
  void Wake();

  const Options options_;
  const OnExit on_exit_;
  int wake_fd_ = -1;  // eventfd; constant after construction
  std::mutex mutex_;
  std::map<RankKey, Live> live_;  // guarded by mutex_
  std::jthread watcher_;          // last: stops before the rest goes
};

}  // namespace octavo
