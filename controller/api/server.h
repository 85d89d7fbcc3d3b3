// The controller's process but for flags and store: mailbox, gRPC server, HTTP endpoint, and an
// orderly end.
//
//   ControllerServer server(options, &store, policy, &clock);
//   RETURN_IF_ERROR(server.Start());
//   ... server.port(), server.http_port() ...
//   bool clean = server.Shutdown(SteadyTime deadline);
//
// Shutdown: readiness and health turn first, streams are ended with UNAVAILABLE, the server stops,
// then the mailbox runs out. grpc::Server::Shutdown of 1.51 can hang for ever on one unfinished
// reactor, so it runs on a thread of its own; when the deadline passes, Shutdown returns false and
// the caller ends the process.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "base/clock.h"
#include "base/credentials.h"
#include "base/http_server.h"
#include "controller/api/authz.h"
#include "controller/api/job_service.h"
#include "controller/api/log_relay.h"
#include "controller/api/metrics.h"
#include "controller/api/watch_hub.h"
#include "controller/api/worker_service.h"
#include "controller/core/mailbox.h"

namespace octavo {

struct ServerOptions {
  std::string listen = "127.0.0.1:0";  // gRPC
  std::string http = "127.0.0.1:0";    // "" : no HTTP endpoint
  std::string advertise_http;          // host in /sd; default: the host of `http`
  std::string version = "0";
  std::optional<TlsMaterial> tls;
  Authorizer authorizer;
  bool reflection = false;
  CoreOptions core;
  MailboxOptions mailbox;
};

class ControllerServer final : public EffectSink {
 public:
  // Store, policy (may be null) and clock outlive the server.
  ControllerServer(ServerOptions options, JobStore* store, PolicyHook* policy, const Clock* clock);
  ~ControllerServer() override;

  // Recovers the state and serves. UNAVAILABLE: an address cannot be bound.
  absl::Status Start();
  int port() const { return port_; }
  int http_port() const { return http_.port(); }

  // True: everything ended in time. Idempotent.
  bool Shutdown(SteadyTime deadline);

  // Set when the store cannot be written any more; the process should end with it.
  std::optional<absl::Status> fatal() const;

  const ControllerMetrics& metrics() const { return metrics_; }

  // EffectSink, on the mailbox's thread.
  void Deliver(Effects effects) override;
  void Observe(const Census& census) override;
  void ObserveCommitSeconds(double seconds) override { metrics_.ObserveCommit(seconds); }
  void ObservePassSeconds(double seconds) override { metrics_.ObservePass(seconds); }
  void StoreBroken(const absl::Status& status) override;

 private:
  absl::Status StartGrpc();
  absl::Status StartHttp();
  std::string Readiness() const;  // "" when ready, else the reason
  std::string ServiceDiscovery() const;

  const ServerOptions options_;
  const Clock* const clock_;
  ControllerMetrics metrics_;
  Core core_;  // the mailbox's thread only, after Start
  JobStore* const store_;
  Mailbox mailbox_;
  const RpcContext rpc_;
  WatchHub watches_;
  LogRelay logs_;
  JobServiceImpl job_service_;
  WorkerServiceImpl worker_service_;
  HttpServer http_;
  std::unique_ptr<grpc::Server> server_;
  std::jthread shutdown_thread_;
  int port_ = 0;
  std::atomic<bool> serving_{false};
  bool shut_down_ = false;
  mutable std::mutex mutex_;
  Census census_;                      // guarded by mutex_
  std::optional<absl::Status> fatal_;  // guarded by mutex_
};

}  // namespace octavo
