// The rim towards ranks: RankService on a Unix socket of this host.
//
// Each connection gets a number (`stream`). Its reactor does nothing but hand one message to
// `on_event` and wait: the next message is read when the loop calls ReadNext, so a flood from one
// rank waits in that rank's own socket, and at most one message per rank is in the mailbox.
//
// gRPC 1.51: Server::Shutdown never returns while one callback reactor is unfinished. So every
// reactor calls Finish exactly once: in OnCancel, when the rank half-closes, or when we Close it;
// and Stop closes all before it shuts the server down with a deadline. Thread-safe. `on_event` is
// called from gRPC's threads and must not block.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "absl/status/status.h"
#include "grpcpp/grpcpp.h"
#include "worker/agent/events.h"

namespace octavo {

class RankLink {
 public:
  // False: the mailbox is full or closed; the stream is then ended.
  using OnEvent = std::function<bool(Event)>;

  explicit RankLink(OnEvent on_event);
  ~RankLink();
  RankLink(const RankLink&) = delete;
  RankLink& operator=(const RankLink&) = delete;

  // `address` is "unix:/path". An old socket file of a dead daemon is replaced.
  absl::Status Start(const std::string& address);
  void Stop();  // idempotent; bounded by kShutdownLimitMs

  void ReadNext(std::int64_t stream);  // after a FromRank event has been handled
  void Send(std::int64_t stream, iv1::WorkerToRank message);  // an ended stream: dropped
  void Close(std::int64_t stream, const std::string& reason);

 private:
  class Service;
  class Reactor;

  void Forget(std::int64_t stream);

  const OnEvent on_event_;
  std::unique_ptr<Service> service_;
  std::unique_ptr<grpc::Server> server_;
  std::mutex mutex_;
  std::map<std::int64_t, Reactor*> reactors_;  // guarded by mutex_; each deletes itself in OnDone
  std::int64_t last_stream_ = 0;               // guarded by mutex_
  bool stopping_ = false;                      // guarded by mutex_
};

}  // namespace octavo
