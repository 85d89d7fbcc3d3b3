// The rim of octavo-worker: one mailbox, one loop, and the four parts it drives.
//
//   session  (controller)  ─┐                       ┌─► session.Send / Close
//   rank_link (ranks)      ─┼─► mailbox ─► Agent ───┼─► rank_link.Send / Close / ReadNext
//   rank_host (processes)  ─┤   (this loop)         ├─► rank_host.Spawn / Signal / ForgetJob
//   signals, ticks         ─┘                       └─► metrics, log
//
// Run is called from main's thread: ranks die with the thread that spawned them. It returns when
// the agent has drained after SIGTERM, or at once (killing its ranks) after a second signal.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "base/bounded_queue.h"
#include "base/clock.h"
#include "base/http_server.h"
#include "base/signals.h"
#include "worker/agent/agent.h"
#include "worker/agent/metrics.h"
#include "worker/agent/rank_host.h"
#include "worker/agent/rank_link.h"
#include "worker/agent/session.h"

namespace octavo {

class WorkerLoop {
 public:
  struct Options {
    AgentConfig agent;  // http_address is filled in by Start
    Session::Options session;
    RankHost::Options ranks;
    std::string listen_http;  // host:port
  };

  WorkerLoop(Options options, const Clock& clock);
  ~WorkerLoop();

  // Binds the socket and the HTTP port, so that http_port() and the probes' facts can be published.
  absl::Status Start();
  int http_port() const { return http_.port(); }

  void Run(const StopSignals& signals);

 private:
  static constexpr std::size_t kMailboxCapacity = 65536;
  static constexpr std::int64_t kTickMicros = 100'000;
  // The loop is stuck when it has not come round for so long; /healthz says so.
  static constexpr std::int64_t kLoopSilentMicros = 30'000'000;

  bool TryDeliver(Event event);
  void Deliver(Event event);  // waits for room, gives up when the loop is over
  void HandleOne(const Event& event);
  void Carry(Command& command);
  void PublishState();
  HttpResponse Ready() const;

  Options options_;
  const Clock& clock_;
  BoundedQueue<Event> mailbox_{kMailboxCapacity};
  WorkerMetrics metrics_;
  std::unique_ptr<Agent> agent_;
  RankHost host_;
  RankLink link_;
  Session session_;
  HttpServer http_;
  std::atomic<std::int64_t> last_round_micros_{0};
  std::atomic<bool> registered_{false};
  std::atomic<bool> draining_{false};
};

}  // namespace octavo
