// The core of octavo-worker: events in, commands out; no sockets, processes, files or clocks.
//
//   Agent agent(config, now);
//   for (Command& command : agent.Handle(event, now)) { ... the rim carries it out ... }
//
// The rim (worker_loop) owns the one mailbox, calls Handle from one thread, and ticks a few times a
// second. tests/sim runs many agents and a controller in one process, with the simulator as rim.
//
// What it promises:
//  - A slot runs one process. StartRank is idempotent by (job, attempt, rank); attempts older than
//  the
//    newest known of the job are refused, a newer attempt kills what is left of the older ones.
//  - A rank's end is reported from the process's end alone (or from the bound after SIGKILL), in a
//    ReliableReport that is repeated until acknowledged, over any number of reconnects. What the
//    rank wrote before it ended (its last word) is read first, within a bound.
//  - Every made-to-leave follows wish → SIGTERM → SIGKILL → slot poisoned, each with a bound
//    (rank_process.h).
//  - Cut off from the controller, ranks go on for orphan_grace, then get the stop wish.
//  - Key-value requests of ranks outlive a reconnect: unanswered ones are sent again.
//  - Draining: no new ranks; the stop wish to all; finished() when they are gone and reported.
//  - Telemetry of one attempt's ranks is merged before it travels (telemetry_merge.h).
// Not thread-safe: one owner.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "octavo/v1/job.pb.h"
#include "worker/agent/events.h"
#include "worker/agent/outbox.h"
#include "worker/agent/rank_process.h"
#include "worker/agent/telemetry_merge.h"

namespace octavo {

struct AgentConfig {
  std::string worker;       // name, unique in the cluster
  std::string incarnation;  // random per process start
  std::string address;      // that ranks bind
  std::string host;
  std::string http_address;  // host:port of /metrics
  std::string version;
  std::string device;                // cpu | cuda
  std::vector<v1::SlotFacts> slots;  // index = slot
  std::int64_t orphan_grace_ms = 0;  // 0: as the controller says
  std::int64_t drain_grace_ms = 0;   // 0: kRankStopGraceMs
};

class Agent {
 public:
  Agent(AgentConfig config, std::int64_t now_micros);

  Commands Handle(const Event& event, std::int64_t now_micros);

  // Draining and done: every rank has ended, and the controller knows (or cannot be told in time).
  bool finished(std::int64_t now_micros) const;

  // For /readyz and tests.
  bool registered() const { return registered_; }
  bool draining() const { return draining_; }
  int slots_busy() const;
  int slots_poisoned() const;
  std::int64_t dropped_reports() const { return outbox_.dropped(); }
  const std::map<RankKey, RankProcess>& ranks() const { return ranks_; }

 private:
  struct PendingKv {
    iv1::KeyValueRequest request;
    std::int64_t deadline_micros = 0;
  };
  using JobAttempt = std::pair<std::string, std::int32_t>;

  void On(const SessionOpened&);
  void On(const SessionClosed& event);
  void On(const FromController& event);
  void On(const FromRank& event);
  void On(const RankStreamClosed& event);
  void On(const RankSpawned& event);
  void On(const RankSpawnFailed& event);
  void On(const RankExited& event);
  void On(const DrainRequested& event);
  void On(const Tick&);

  void OnRegistered(const iv1::Registered& registered);
  void OnStart(const iv1::StartRank& start);
  void OnStartRank(const iv1::RankAssignment& assignment);
  void OnStopRank(const iv1::StopRank& stop);
  void OnPlan(const iv1::SendPlan& plan);
  void OnWishes(const iv1::SendWishes& wishes);
  void OnProfile(const iv1::SendProfile& profile);
  void OnKvReply(const iv1::RankKeyValueReply& reply);

  void OnHello(std::int64_t stream, const RankKey& key);
  void OnRankBody(RankProcess& rank, const iv1::RankToWorker& message);
  void OnKvRequest(RankProcess& rank, const iv1::KeyValueRequest& request);

  // Not started, and why: evidence for the controller as good as an end.
  void RefuseStart(const iv1::RankAssignment& assignment, v1::FailureClass failure,
                   const std::string& why);
  void ReportEnd(iv1::RankEnded ended);
  // The process has ended and its stream too (or the wait for it): report and free the slot.
  void FinishRank(const RankKey& key);
  void RemoveRank(const RankKey& key);
  void StopForLocalCause(RankProcess& rank, std::int64_t grace_ms, v1::FailureClass failure,
                         const std::string& cause);
  void SendWishesTo(const RankProcess& rank);

  void SendUp(iv1::WorkerToController message);        // now; REQUIRES registered_
  void SendOrBuffer(iv1::WorkerToController message);  // may be dropped, counted
  void AddReliable(iv1::ReliableReport report);
  void ForwardTelemetry(const JobAttempt& id, std::vector<iv1::TelemetrySnapshot> snapshots);
  void FillRunning(google::protobuf::RepeatedPtrField<iv1::RunningRank>* running) const;
  void ExpireKv();
  void SendHeartbeat();
  void Log(bool warning, std::string event, std::string text);

  const AgentConfig config_;
  std::int64_t now_micros_ = 0;  // of the event being handled
  Commands out_;

  // The link to the controller.
  bool session_open_ = false;
  bool registered_ = false;
  std::int64_t session_opened_micros_ = 0;
  std::int64_t disconnected_since_micros_ = 0;  // meaningful while !registered_
  std::int64_t heartbeat_interval_micros_;
  std::int64_t orphan_grace_micros_;
  std::int64_t next_heartbeat_micros_ = 0;
  std::string last_refusal_;  // logged once per reason
  bool orphaned_ = false;     // the grace is over and the ranks were told
  Outbox outbox_;

  // Ranks and slots.
  std::map<RankKey, RankProcess> ranks_;
  std::map<std::int64_t, RankKey> streams_;
  std::vector<bool> poisoned_;                                          // by slot
  std::map<std::string, std::int32_t> newest_attempt_;                  // by job, until ForgetJob
  std::map<std::pair<std::string, std::int32_t>, std::int32_t> ended_;  // (job, rank) → attempt
  std::map<std::pair<RankKey, std::int64_t>, PendingKv> pending_kv_;    // (rank, request id)
  std::map<JobAttempt, TelemetryMerger> mergers_;

  bool draining_ = false;
  std::string drain_reason_;
  std::int64_t drain_deadline_micros_ = 0;  // for the controller to learn the ends
};

}  // namespace octavo
