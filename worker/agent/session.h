// The rim towards the controller: one bidirectional stream, dialled by us, for as long as we live.
//
// A thread dials, reads and pushes what it hears into `events`; a second one writes. When the
// stream ends, for whatever reason, SessionClosed follows SessionOpened exactly once, and the next
// dial comes after a back-off (proto/limits.h) that a stream which lasted resets (a refused
// one does not).
// Calls are not wait_for_ready: Register must describe the moment it is sent, not the one before a
// long outage. Liveness is the application's heartbeats; transport keepalive stays at 30 s (faster
// pings make a default server close the stream with "Too many pings"). Thread-safe. Stop is
// bounded: it cancels the call, and both threads only wait with bounds.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "base/bounded_queue.h"
#include "base/credentials.h"
#include "grpcpp/grpcpp.h"
#include "octavo/internal/v1/worker_service.grpc.pb.h"
#include "worker/agent/events.h"

namespace octavo {

class Session {
 public:
  struct Options {
    std::string controller;    // host:port
    TlsMaterial tls;           // empty: plain text
    std::string bearer_token;  // empty: none
    std::uint32_t jitter_seed = 0;
  };
  // Called from the session's thread; may wait. Messages arrive in order.
  using OnEvent = std::function<void(Event)>;

  Session(Options options, OnEvent on_event);
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  void Start();
  void Stop();  // idempotent

  // Queues for the current stream; dropped when there is none (the core repeats what matters).
  void Send(iv1::WorkerToController message);
  // Ends the current stream; the next one is dialled after the back-off.
  void Close(const std::string& reason);

 private:
  using Stream = grpc::ClientReaderWriter<iv1::WorkerToController, iv1::ControllerToWorker>;
  static constexpr std::size_t kSendQueueCapacity =
      131072;  // > kMaxReliableQueue: a full replay fits

  void Run(const std::stop_token& stop);
  // One stream from dial to end; why it ended.
  std::string RunStream(const std::stop_token& stop);
  void WriteLoop(Stream* stream, BoundedQueue<iv1::WorkerToController>* queue);

  const Options options_;
  const OnEvent on_event_;
  std::unique_ptr<iv1::WorkerService::Stub> stub_;
  std::mutex mutex_;
  std::condition_variable_any wake_;
  grpc::ClientContext* context_ = nullptr;                          // guarded by mutex_
  std::shared_ptr<BoundedQueue<iv1::WorkerToController>> sending_;  // guarded by mutex_
  std::string close_reason_;                                        // guarded by mutex_
  std::jthread thread_;
};

}  // namespace octavo
