// Rank processes and the shared disk, as the agents and the controller see them: they say hello,
// meet through the rendezvous store, load the newest checkpoint, step in lockstep, save, obey
// wishes, and die in every way.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>

#include "tests/sim/sim_loop.h"
#include "worker/agent/events.h"

namespace octavo::sim {

// Checkpoints of all jobs. An attempt begins by writing its marker; afterwards older attempts
// publish nothing (ARCHITECTURE 6, 2).
class Disk {
 public:
  // False: a newer attempt has begun, this one is fenced.
  bool Begin(const std::string& job, std::int32_t attempt);
  bool Save(const std::string& job, std::int32_t attempt, std::int64_t step);
  std::int64_t newest_step(const std::string& job) const;

 private:
  struct Folder {
    std::int32_t marker = 0;
    std::int64_t step = 0;
  };
  std::map<std::string, Folder> folders_;
};

class RankWorld {
 public:
  // `to_agent` delivers an event to the agent of that host, if it still lives.
  using ToAgent = std::function<void(const std::string& host, Event event)>;
  RankWorld(Loop* loop, Disk* disk, ToAgent to_agent);
  ~RankWorld();

  void Spawn(const std::string& host, const RankKey& key);
  void Signal(const std::string& host, const RankKey& key, int signal);
  void ToRank(std::int64_t stream, const iv1::WorkerToRank& message);
  // The daemon died: its ranks die with it and nobody hears of it.
  void HostDied(const std::string& host);

  // Faults.
  void KillSome();  // a random rank dies by SIGKILL from outside
  void HangSome();  // a random gang stops stepping

  // Facts for the invariants.
  std::int64_t spawned() const { return spawned_; }
  std::int64_t alive() const { return static_cast<std::int64_t>(ranks_.size()); }
  bool finished(const std::string& job_uid) const { return finished_.contains(job_uid); }
  const std::string& violation() const { return violation_; }

 private:
  struct Rank;
  struct Gang;
  using GangKey = std::pair<std::string, std::int32_t>;

  void Say(Rank& rank, iv1::RankToWorker message);
  void SayPhase(Rank& rank, iv1::RankPhase phase);
  void Meet(Rank& rank);
  void OnReply(Rank& rank, const iv1::KeyValueReply& reply);
  void Load(Rank& rank);
  void TryStep(const GangKey& key);
  void StepGang(const GangKey& key);
  void ObeyEarly(Rank& rank);
  // The process ends after its last word.
  void Leave(Rank& rank, iv1::RankOutcome outcome, int code);
  void Exit(RankKey key, int code, int signal);  // by value: the rank that holds it goes
  void PeersNotice(const GangKey& key);
  Rank* Find(const RankKey& key);
  // Runs `run` later if that process (not only that key) still lives.
  void Later(const Rank& rank, std::int64_t micros, std::function<void(Rank&)> run);

  Loop* const loop_;
  Disk* const disk_;
  const ToAgent to_agent_;
  std::map<RankKey, std::unique_ptr<Rank>> ranks_;
  std::map<std::int64_t, RankKey> streams_;
  std::map<GangKey, std::unique_ptr<Gang>> gangs_;
  std::set<RankKey> ever_;
  std::set<std::string> finished_;
  std::int64_t next_stream_ = 1;
  std::int64_t spawned_ = 0;
  std::string violation_;
};

}  // namespace octavo::sim
