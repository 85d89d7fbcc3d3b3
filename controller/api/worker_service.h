// The server side of WorkerService.Session: streams in, commands out; no decisions.
//
// A message of a worker becomes an event in the mailbox; commands come back as effects and are
// queued on the worker's stream. Flow control: at most kInFlight messages of one worker wait in the
// mailbox, then its stream is not read further, so a flood of one worker slows that worker alone.
// Thread-safe.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

#include "controller/api/rpc.h"
#include "octavo/internal/v1/worker_service.grpc.pb.h"

namespace octavo {

class WorkerSession;

class WorkerServiceImpl final : public internal::v1::WorkerService::CallbackService {
 public:
  explicit WorkerServiceImpl(const RpcContext& rpc) : rpc_(rpc) {}

  grpc::ServerBidiReactor<internal::v1::WorkerToController, internal::v1::ControllerToWorker>*
  Session(grpc::CallbackServerContext* context) override;

  // A command for a stream that is gone is dropped: the core repeats it when the worker registers.
  void Send(SessionId session, internal::v1::ControllerToWorker message);
  void Close(SessionId session, const std::string& reason);
  void CloseAll();

  std::size_t sessions() const;

 private:
  friend class WorkerSession;
  std::shared_ptr<WorkerSession> Find(SessionId session) const;
  void Remove(SessionId session);

  const RpcContext rpc_;
  std::atomic<SessionId> next_{1};
  mutable std::mutex mutex_;
  std::map<SessionId, std::shared_ptr<WorkerSession>> sessions_;  // guarded by mutex_
  bool closed_ = false;                                           // guarded by mutex_
};

}  // namespace octavo
