// ReadLogs: chunks of captured rank logs, fetched from the workers one at a time.
//
//   ReadLogs ─► Core::FindLog (attempt, ranks) ─► per rank: Core::AskLog ─► worker ─► LogReply ─►
//   chunk
//
// One request is in flight per stream; a worker that does not answer within kUnaryDeadlineMs ends
// it with UNAVAILABLE. Without `follow` the stream ends at what the files hold now and never waits;
// with it, ranks are asked again about once a second until the attempt is over, and (when no
// attempt was named) the next attempt is taken up, until the job is over. Thread-safe.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "controller/api/rpc.h"
#include "octavo/internal/v1/worker_service.pb.h"
#include "octavo/v1/job_service.grpc.pb.h"

namespace octavo {

class LogStream;

class LogRelay {
 public:
  explicit LogRelay(const RpcContext& rpc) : rpc_(rpc) {}

  grpc::ServerWriteReactor<v1::LogChunk>* Open(grpc::CallbackServerContext* context,
                                               const v1::ReadLogsRequest* request);
  // From the worker's stream.
  void Answer(const internal::v1::LogReply& reply);
  // Timeouts and the next round of followers. Call about once a second.
  void Sweep(std::int64_t monotonic_micros);
  void CloseAll();

 private:
  friend class LogStream;
  std::int64_t Register(const std::shared_ptr<LogStream>& stream);
  void Done(LogStream* stream);
  std::vector<std::shared_ptr<LogStream>> All() const;

  const RpcContext rpc_;
  mutable std::mutex mutex_;
  // Guarded by mutex_.
  std::map<const LogStream*, std::shared_ptr<LogStream>> streams_;
  std::map<std::int64_t, std::shared_ptr<LogStream>> waiting_;  // request id → stream
  std::int64_t next_id_ = 1;
  bool closed_ = false;
};

}  // namespace octavo
