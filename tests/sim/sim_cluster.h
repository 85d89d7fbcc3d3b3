// A whole cluster in one process: the real controller core on a memory store, real agent cores, and
// simulated everything else. Faults come from the seed; invariants are checked all the time.
//
//   client ─► Core ─► effects ─► [link: latency, cuts] ─► Agent ─► RankWorld
//                └─ batch ─► MemoryStore (survives a crash; the core does not)
#pragma once

#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "controller/core/core.h"
#include "controller/store/memory_store.h"
#include "tests/sim/sim_loop.h"
#include "tests/sim/sim_ranks.h"
#include "worker/agent/agent.h"

namespace octavo::sim {

struct ClusterOptions {
  std::uint64_t seed = 1;
  int workers = 4;
  int slots = 2;
  int jobs = 6;
  double faults_per_second = 0.15;
};

class Cluster {
 public:
  explicit Cluster(const ClusterOptions& options);
  ~Cluster();

  // Faults everywhere; nothing that was promised may break.
  void SafetyPhase(int seconds);
  // Everything is healed; every job must come to an end.
  void LivenessPhase(int seconds);

  // "" or the first broken invariant, with the time.
  const std::string& violation() const { return violation_; }
  // "" or the jobs that are not over, with their states and reasons.
  std::string Unfinished();
  // What happened, for the test's own check that faults were real.
  struct Counts {
    std::int64_t controller_crashes = 0, agent_crashes = 0, cuts = 0, kills = 0, hangs = 0;
    std::int64_t submits = 0, retries = 0, verbs = 0, plans = 0;
  };
  const Counts& counts() const { return counts_; }
  std::int64_t attempts();
  std::map<std::string, int> ends();

 private:
  struct Connection {
    SessionId session = 0;
    bool alive = true;                        // both directions
    std::int64_t up_free = 0, down_free = 0;  // messages of one direction keep their order
  };
  struct Host {
    std::string name;
    std::unique_ptr<Agent> agent;
    std::shared_ptr<Connection> connection;
    bool cut = false;  // the network is down
    bool dialling = false;
    std::int64_t incarnation = 0;
  };
  struct ClientJob {
    std::string name, request_id, uid;  // uid: as acknowledged
    v1::JobSpec spec;
    bool acknowledged = false;
    v1::JobState terminal = v1::JOB_STATE_UNSPECIFIED;  // once seen, for ever
  };

  Now NowTime() const {
    return {.mono_micros = 1000000 + loop_.now(), .unix_micros = 1790000000000000 + loop_.now()};
  }

  // Controller.
  void StartController();
  void CrashController();
  // Runs one event, commits, delivers; a crash may come before or after the commit. False: crashed,
  // the answer is lost.
  template <class Handle>
  bool OnCore(Handle handle);
  void Deliver(const Effect& effect);
  void ControllerTick();

  // Workers and links.
  void StartAgent(int index);
  void CrashAgent(int index);
  void Dial(int index);
  void Cut(int index, std::int64_t micros);
  void Close(int index);
  void ToAgent(int index, const Event& event);
  void Carry(int index, Commands commands);
  void AgentTick(int index);
  int IndexOf(const std::string& host) const;

  // Client and faults.
  void ClientAct();
  void SubmitOrRetry(ClientJob& job);
  void Fault();
  void Check();
  void Fail(const std::string& what);

  const ClusterOptions options_;
  Loop loop_;
  MemoryStore store_;
  Disk disk_;
  RankWorld ranks_;
  std::unique_ptr<Core> core_;  // null while the controller is down
  std::int64_t core_life_ = 0;
  std::vector<Host> hosts_;
  std::map<SessionId, int> host_of_session_;
  SessionId next_session_ = 1;
  std::vector<ClientJob> jobs_;
  bool faults_ = false;
  std::string violation_;
  Counts counts_;
  std::int64_t last_revision_ = 0;
};

}  // namespace octavo::sim
