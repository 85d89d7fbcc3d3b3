// octavo-rank: one process per slot, alive as long as one attempt of one job. Flags, wiring,
// signals.
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "base/log.h"
#include "base/signals.h"
#include "base/status.h"
#include "base/str.h"
#include "base/version.h"
#include "kernels/cpu/blas.h"
#include "proto/convert/precision.h"
#include "worker/rank/assignment.h"
#include "worker/rank/backend_loader.h"
#include "worker/rank/failure.h"
#include "worker/rank/groups.h"
#include "worker/rank/hooks_main.h"
#include "worker/rank/offline_main.h"
#include "worker/rank/session.h"
#include "worker/rank/training.h"

namespace octavo {
namespace {

constexpr int kExitOk = 0;        // finished, stopped or suspended as wished
constexpr int kExitFailed = 1;    // the outcome says why
constexpr int kExitUsage = 2;     // a flag is wrong
constexpr int kExitNoWorker = 3;  // no session with the worker

struct Flags {
  std::string socket, job_uid, device = "cpu", log_level = "info";
  int attempt = 0, rank = 0, device_ordinal = 0;
  bool probe = false;
};

// SIGTERM: first the wish to leave, then, when a collective holds the rank, its abortion.
class Terminator {
 public:
  Terminator(const StopSignals& signals, WorkerSession& session)
      : signals_(signals),
        session_(session),
        thread_([this](std::stop_token stop) { Run(stop); }) {}

  void Watch(RankGroups* groups) {
    std::lock_guard<std::mutex> lock(mutex_);
    groups_ = groups;
  }

 private:
  // Less than the worker's SIGTERM → SIGKILL time, so that the last word can still be said.
  static constexpr std::chrono::seconds kCollectiveGrace{2};

  void Run(const std::stop_token& stop) {
    bool leaving = false;
    SteadyTime abort_at = SteadyTime::max();
    while (!stop.stop_requested()) {
      if (signals_.Wait(DeadlineAfter(std::chrono::milliseconds(200))).has_value() && !leaving) {
        leaving = true;
        LogInfo("signal_received", {{"effect", "leaving without a checkpoint"}});
        session_.LeaveNow();
        abort_at = DeadlineAfter(kCollectiveGrace);
      }
      if (std::chrono::steady_clock::now() > abort_at) {
        abort_at = SteadyTime::max();
        std::lock_guard<std::mutex> lock(mutex_);
        if (groups_ != nullptr) {
          groups_->Abort();
        }
      }
    }
  }

  const StopSignals& signals_;
  WorkerSession& session_;
  std::mutex mutex_;
  RankGroups* groups_ = nullptr;  // guarded by mutex_
  std::jthread thread_;
};

absl::StatusOr<TrainingOutcome> Train(WorkerSession& session, Terminator& terminator) {
  const iv1::RankAssignment& assignment = session.assignment();
  ASSIGN_OR_RETURN(const TrainingConfig config, ConfigFromAssignment(assignment));
  ASSIGN_OR_RETURN(const PrecisionPlan plan, PlanFromWire(assignment.plan()));
  absl::StatusOr<std::unique_ptr<LoadedBackend>> backend =
      LoadedBackend::Open(assignment.spec().device(), assignment.device_ordinal());
  RETURN_IF_ERROR(WithFailure(backend.status(), FailureClass::kDeviceFault));

  session.TryReport(ProgressMessage(iv1::RANK_MEETING, 0, ""));
  ASSIGN_OR_RETURN(const std::unique_ptr<RankGroups> groups,
                   RankGroups::Create({.config = config,
                                       .backend = **backend,
                                       .store = session,
                                       .bind_address = assignment.bind_address(),
                                       .device_id = (*backend)->device_uuid()}));
  LogInfo("gang_met", {{"ranks", config.run.world_size},
                       {"expert_parallel", config.run.expert_parallel},
                       {"transport", groups->transport()}});
  terminator.Watch(groups.get());
  const TrainingOutcome outcome = RunTraining({.config = config,
                                               .plan = plan,
                                               .backend = (*backend)->backend(),
                                               .comms = groups->comms(),
                                               .all_to_all_seconds = groups->all_to_all_seconds(),
                                               .host = &session,
                                               .fs = &PosixFileSystem::Get(),
                                               .blas_core = BlasCoreType(),
                                               .hooks = HooksOf(assignment)});
  terminator.Watch(nullptr);
  return outcome;
}

int RunRank(const Flags& flags, const StopSignals& signals) {
  SetLogContext({.train_job = flags.job_uid, .attempt = flags.attempt, .rank = flags.rank});
  LogInfo("rank_started",
          {{"pid", ::getpid()}, {"version", kVersion}, {"blas_core", BlasCoreType()}});
  absl::StatusOr<std::unique_ptr<WorkerSession>> session =
      WorkerSession::Connect({.socket = flags.socket,
                              .job_uid = flags.job_uid,
                              .attempt = flags.attempt,
                              .rank = flags.rank});
  if (!session.ok()) {
    LogError("no_session", {{"error", session.status()}});
    return kExitNoWorker;
  }
  Terminator terminator(signals, **session);
  absl::StatusOr<TrainingOutcome> outcome = Train(**session, terminator);
  if (!outcome.ok()) {
    outcome = TrainingOutcome{.failure = FailureOf(outcome.status()),
                              .message = Message(outcome.status())};
  }
  // A rank that was told to leave while it met or waited for the others did what it was told.
  if (!outcome->ok() && (*session)->wishes().stop_without_checkpoint) {
    LogInfo("left_on_wish", {{"interrupted", outcome->message}});
    outcome = TrainingOutcome{.step = outcome->step, .stopped = true};
  }
  LogInfo("rank_ends", {{"failure", Name(outcome->failure)},
                        {"step", outcome->step},
                        {"stopped", outcome->stopped},
                        {"suspended", outcome->suspended},
                        {"message", outcome->message}});
  (*session)->TryReport(ProgressMessage(iv1::RANK_FINISHED, outcome->step, ""));
  (*session)->SendOutcome(*outcome);
  (*session)->Close();
  return outcome->ok() ? kExitOk : kExitFailed;
}

int RunProbe(const Flags& flags) {
  const absl::StatusOr<std::string> facts = ProbeDevice(flags.device, flags.device_ordinal);
  if (!facts.ok()) {
    std::fprintf(stderr, "octavo-rank: %s\n", Message(facts.status()).c_str());
    return kExitFailed;
  }
  std::printf("%s\n", facts->c_str());
  return kExitOk;
}

int Main(int argc, char** argv) {
  MaybeRunBlasProbe(argc, argv);
  if (IsOffline(argc, argv)) {
    return OfflineMain(argc, argv);
  }
  const StopSignals signals;
  Flags flags;
  CLI::App app{"octavo-rank: trains one rank of a job; started by octavo-worker", "octavo-rank"};
  app.set_version_flag("--version", kVersion);
  app.add_option("--socket", flags.socket, "gRPC address of the worker, unix:/path");
  app.add_option("--job-uid", flags.job_uid, "unique id of the job");
  app.add_option("--attempt", flags.attempt, "number of the attempt");
  app.add_option("--rank", flags.rank, "rank in the job");
  app.add_flag("--probe", flags.probe, "print facts about the device as JSON and exit");
  app.add_option("--device", flags.device, "with --probe: cpu or cuda")->capture_default_str();
  app.add_option("--device-ordinal", flags.device_ordinal, "with --probe: which device")
      ->capture_default_str();
  app.add_option("--log-level", flags.log_level, "debug, info, warning or error")
      ->capture_default_str();
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? kExitOk : kExitUsage;
  }
  const std::optional<LogLevel> level = ParseLogLevel(flags.log_level);
  if (!level.has_value() || (!flags.probe && (flags.socket.empty() || flags.job_uid.empty()))) {
    std::fprintf(stderr,
                 "octavo-rank: --socket and --job-uid are needed (octavo-worker gives them), "
                 "--log-level is debug, info, warning or error\n");
    return kExitUsage;
  }
  if (flags.device == "cpu") {
    EnsureBlasCoreType(argv);  // may start this program again, before there are threads
  }
  const absl::Status logging = InitLog({.component = "octavo-rank", .min_level = *level});
  if (!logging.ok()) {
    std::fprintf(stderr, "octavo-rank: %s\n", Message(logging).c_str());
    return kExitUsage;
  }
  return flags.probe ? RunProbe(flags) : RunRank(flags, signals);
}

}  // namespace
}  // namespace octavo

int main(int argc, char** argv) { return octavo::Main(argc, argv); }
