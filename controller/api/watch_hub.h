// Fan-out of job events to WatchJob streams; never waits for a reader.
//
//   WatchJob ─► mailbox: Core::Watch (backlog + place in the order) ─► Attach
//   effects  ─► Publish ─► every stream of that job: bounded queue
//
// A stream gets each stored event once, in the order of revisions: what its backlog already holds
// is dropped here. Progress is a snapshot: for a reader that is behind, a newer one replaces the
// queued one. A full queue ends the stream with RESOURCE_EXHAUSTED, reason WATCH_TOO_SLOW; a quiet
// stream carries a BOOKMARK every kWatchBookmarkMs; the stream ends with OK after the job's
// terminal state. Thread-safe.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "controller/api/rpc.h"
#include "octavo/v1/job_service.grpc.pb.h"

namespace octavo {

class WatchStream;

class WatchHub {
 public:
  explicit WatchHub(const RpcContext& rpc) : rpc_(rpc) {}

  // The reactor of one WatchJob call.
  grpc::ServerWriteReactor<v1::JobEvent>* Open(grpc::CallbackServerContext* context,
                                               const v1::WatchJobRequest* request);

  void Publish(const std::string& job_uid, const v1::JobEvent& event);
  // Bookmarks. Call about once a second.
  void Sweep(std::int64_t monotonic_micros);
  // Ends every stream with UNAVAILABLE; later ones are refused.
  void CloseAll();

  std::int64_t streams() const { return streams_.load(std::memory_order_relaxed); }

 private:
  friend class WatchStream;
  void Attach(const std::shared_ptr<WatchStream>& stream, const std::string& job_uid);
  void Done(WatchStream* stream);
  void PostUnwatch(const std::string& job_uid);
  std::vector<std::shared_ptr<WatchStream>> All() const;

  const RpcContext rpc_;
  std::atomic<std::int64_t> streams_{0};
  mutable std::mutex mutex_;
  std::map<std::string, std::vector<std::shared_ptr<WatchStream>>> by_job_;  // guarded by mutex_
  bool closed_ = false;                                                      // guarded by mutex_
};

}  // namespace octavo
