// What the agent's core hears and what it answers: plain values, so that a simulator can play both.
#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "base/subprocess.h"
#include "worker/agent/rank_key.h"

namespace octavo {

// ---------------------------------------------------------------- events

// A new stream to the controller is open; the core answers with Register.
struct SessionOpened {};
struct SessionClosed {
  std::string reason;
};
struct FromController {
  iv1::ControllerToWorker message;
};
// `stream` is the link's own number of one connection of one rank.
struct FromRank {
  std::int64_t stream = 0;
  iv1::RankToWorker message;
};
struct RankStreamClosed {
  std::int64_t stream = 0;
};
struct RankSpawned {
  RankKey key;
  int pid = 0;
};
struct RankSpawnFailed {
  RankKey key;
  std::string error;
};
struct RankExited {
  RankKey key;
  ExitReason exit;
  std::string log_tail;
  bool out_of_memory = false;  // the kernel killed something in our cgroup for memory meanwhile
};
// SIGTERM to the daemon, or an operator's wish.
struct DrainRequested {
  std::string reason;
};
struct Tick {};

using Event = std::variant<SessionOpened, SessionClosed, FromController, FromRank, RankStreamClosed,
                           RankSpawned, RankSpawnFailed, RankExited, DrainRequested, Tick>;

// ---------------------------------------------------------------- commands

struct SendToController {
  iv1::WorkerToController message;
};
struct CloseSession {  // the session reconnects after its back-off
  std::string reason;
};
struct SpawnRank {  // answered by RankSpawned or RankSpawnFailed
  RankKey key;
};
struct SignalRank {
  RankKey key;
  int signal = 0;
};
struct SendToRank {
  std::int64_t stream = 0;
  iv1::WorkerToRank message;
};
struct CloseRankStream {
  std::int64_t stream = 0;
  std::string reason;
};
struct ReadLog {  // the rim reads the file and sends LogReply itself
  iv1::LogRequest request;
};
struct ForgetJobFiles {
  std::string job_uid;
};
// For /metrics. `train_job` is the job's name.
struct ObserveStep {
  std::string train_job;
  iv1::StepReport report;
};
struct ObserveTelemetry {
  std::string train_job;
  std::string detail;  // TelemetrySpec.detail
  iv1::TelemetrySnapshot snapshot;
};
struct ObserveCheckpoint {
  std::string train_job;
  iv1::CheckpointDone done;
};
struct ForgetJobSeries {  // its last rank on this host has ended
  std::string train_job;
};
struct LogEvent {
  bool warning = false;
  std::string event;
  std::string text;
};

using Command = std::variant<SendToController, CloseSession, SpawnRank, SignalRank, SendToRank,
                             CloseRankStream, ReadLog, ForgetJobFiles, ObserveStep,
                             ObserveTelemetry, ObserveCheckpoint, ForgetJobSeries, LogEvent>;
using Commands = std::vector<Command>;

}  // namespace octavo
