// The controller under load: 1000 workers, 200 jobs, 1000 step reports and 1000 heartbeats a
// second; then telemetry of every quantised tensor beside them.
//
//   bench_control_plane [seconds] [folder for the store]
//
// The controller runs in a child process with SQLite on disk and real gRPC streams, so that its CPU
// time and memory are its own; this process plays the workers and the clients. The scheduling pass
// is measured on the core alone, at its worst: every job waits and every worker has room.
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <deque>
#include <fstream>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/file.h"
#include "base/log.h"
#include "base/status.h"
#include "base/str.h"
#include "controller/api/server.h"
#include "controller/core/policy_driver.h"
#include "controller/store/memory_store.h"
#include "controller/store/sqlite_store.h"
#include "grpcpp/grpcpp.h"
#include "octavo/internal/v1/worker_service.grpc.pb.h"
#include "octavo/v1/job_service.grpc.pb.h"
#include "proto/spec/job_spec.h"

namespace octavo {
namespace {

using SteadyClock = std::chrono::steady_clock;

constexpr int kWorkers = 1000;
constexpr int kSlots = 8;
constexpr int kJobs = 200;
constexpr int kRanks = 32;  // 200 jobs x 32 ranks on 8000 slots
constexpr int kReportsPerSecond = 1000;
constexpr int kSnapshotEvery = 10;  // steps of a job (telemetry.interval_steps' default)
constexpr int kSnapshotTensors = 32 * 4 * 3;
constexpr int kChannels = 16;

double Seconds(SteadyClock::duration duration) {
  return std::chrono::duration<double>(duration).count();
}

std::string SpecYaml(int job) {
  return StrCat("name: job-", job, R"yaml(
model:
  family: mixtral
  layers: 32
  hidden: 1024
  heads: 16
  vocab_size: 32000
  moe: {num_experts: 64, experts_per_token: 2, expert_hidden: 1024}
train: {steps: 1000000, sequence_length: 1024, global_batch: 64}
data: {path: /data/x}
checkpoint: {path: /ckpt/x}
precision: {recipe: fp8_flow}
parallel: {ranks: )yaml",
                kRanks, ", expert_parallel: 8}\n");
}

internal::v1::WorkerToController MakeRegister(int worker) {
  internal::v1::WorkerToController message;
  internal::v1::Register& request = *message.mutable_register_();
  request.set_worker(StrCat("worker-", worker));
  request.set_incarnation("bench");
  request.set_version(CoreOptions().version);
  request.set_address("10.0.0.1");
  request.set_http_address(StrCat("10.0.0.1:", 1000 + worker));
  request.set_device("cpu");
  for (int slot = 0; slot < kSlots; ++slot) {
    request.add_slots()->set_slot(slot);
  }
  return message;
}

// Of this thread: on a busy machine the wall clock measures the neighbours.
double ThreadCpuSeconds() {
  timespec time{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) / 1e9;
}

struct Row {
  std::string what, target, figure;
  bool met;
};

// ---------------------------------------------------------------- the pass

struct PassFigures {
  double worst_seconds = 0;
  double all_seconds = 0;  // until every job is placed
  int passes = 0;
};

PassFigures MeasurePasses() {
  MemoryStore store;
  PassFigures figures;
  Core core(CoreOptions(), &store, nullptr);
  const Now now{.mono_micros = 1, .unix_micros = 1};
  for (int job = 0; job < kJobs; ++job) {
    const ParsedJobSpec parsed = ParseJobSpec(SpecYaml(job), "bench.yaml");
    if (!parsed.ok() || !core.Submit({.spec = parsed.spec}, now).ok()) {
      std::fprintf(stderr, "bench spec: %s\n", parsed.Text().c_str());
      std::exit(1);
    }
  }
  for (int worker = 0; worker < kWorkers; ++worker) {
    core.WorkerMessage(static_cast<SessionId>(worker + 1), MakeRegister(worker), now);
  }
  do {
    core.TakeEffects();
    const double begin = ThreadCpuSeconds();
    core.Schedule(now);
    const double seconds = ThreadCpuSeconds() - begin;
    figures.worst_seconds = std::max(figures.worst_seconds, seconds);
    figures.all_seconds += seconds;
    ++figures.passes;
  } while (core.WantsSchedule(now) && figures.passes < kJobs);
  return figures;
}

// ---------------------------------------------------------------- the child

[[noreturn]] void RunController(const std::string& folder, int port_pipe) {
  auto store = SqliteStore::Open(folder, PosixFileSystem::Get());
  if (!store.ok()) {
    std::fprintf(stderr, "%s\n", ToString(store.status()).c_str());
    std::_Exit(1);
  }
  PolicyDriver policy;
  ControllerServer server({.version = "bench"}, store->get(), &policy, &RealClock::Get());
  const absl::Status started = server.Start();
  const int port = started.ok() ? server.port() : 0;
  if (::write(port_pipe, &port, sizeof(port)) != sizeof(port) || port == 0) {
    std::_Exit(1);
  }
  while (true) {
    ::pause();
  }
}

double CpuSeconds(pid_t pid) {
  std::ifstream file(StrCat("/proc/", pid, "/stat"));
  std::string text((std::istreambuf_iterator<char>(file)), {});
  const std::vector<std::string> fields = StrSplit(text.substr(text.rfind(')') + 2), ' ');
  return (std::strtod(fields[11].c_str(), nullptr) + std::strtod(fields[12].c_str(), nullptr)) /
         static_cast<double>(::sysconf(_SC_CLK_TCK));
}

double PeakMebibytes(pid_t pid) {
  std::ifstream file(StrCat("/proc/", pid, "/status"));
  std::string line;
  while (std::getline(file, line)) {
    if (StartsWith(line, "VmHWM:")) {
      return std::strtod(line.c_str() + 6, nullptr) / 1024;
    }
  }
  return 0;
}

// ---------------------------------------------------------------- the workers

// One worker's stream: takes every StartRank at its word and reports what the load loop tells it
// to.
class BenchWorker final : public grpc::ClientBidiReactor<internal::v1::WorkerToController,
                                                         internal::v1::ControllerToWorker> {
 public:
  BenchWorker(internal::v1::WorkerService::Stub* stub, int index) : index_(index) {
    stub->async()->Session(&context_, this);
    Write(MakeRegister(index));
    StartRead(&incoming_);
    StartCall();
  }

  void Write(internal::v1::WorkerToController message) {
    std::lock_guard<std::mutex> lock(mutex_);
    outgoing_.push_back(std::move(message));
    if (outgoing_.size() == 1) {
      StartWrite(&outgoing_.front());
    }
  }
  void Heartbeat() {
    internal::v1::WorkerToController message;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      message.mutable_heartbeat();
      for (const internal::v1::RunningRank& rank : running_) {
        *message.mutable_heartbeat()->add_running() = rank;
      }
    }
    Write(std::move(message));
  }
  // A report of step `step` for the job whose rank 0 runs here, if any.
  bool Step(std::int64_t step) {
    internal::v1::WorkerToController message;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!leads_) {
        return false;
      }
      message.mutable_step()->set_job_uid(lead_.job_uid());
      message.mutable_step()->set_attempt(lead_.attempt());
    }
    internal::v1::StepReport& report = *message.mutable_step()->mutable_report();
    report.set_step(step);
    report.set_loss(2.5);
    report.set_grad_norm(1);
    report.set_tokens(65536);
    report.set_step_seconds(0.2);
    report.set_plan_version(1);
    Write(std::move(message));
    return true;
  }
  // What this worker's ranks measured over the steps up to `step`, for each job it runs.
  int Snapshot(const std::string& job_uid, std::int64_t step) {
    internal::v1::WorkerToController message;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      int ranks = 0;
      for (const internal::v1::RunningRank& rank : running_) {
        if (rank.job_uid() == job_uid) {
          ++ranks;
          message.mutable_telemetry()->set_attempt(rank.attempt());
        }
      }
      if (ranks == 0) {
        return 0;
      }
      message.mutable_telemetry()->mutable_snapshot()->set_ranks(ranks);
    }
    message.mutable_telemetry()->set_job_uid(job_uid);
    internal::v1::TelemetrySnapshot& snapshot = *message.mutable_telemetry()->mutable_snapshot();
    snapshot.set_first_step(step - kSnapshotEvery + 1);
    snapshot.set_last_step(step);
    snapshot.set_plan_version(1);
    for (int i = 0; i < kSnapshotTensors; ++i) {
      internal::v1::TensorStats& tensor = *snapshot.add_tensors();
      tensor.set_layer(i / 12);
      tensor.set_op(i / 3 % 4);
      tensor.set_tensor(i % 3);
      tensor.set_amax(3.5F);
      tensor.set_dequant_scale_min(0.01F);
      tensor.set_dequant_scale_max(0.02F);
      tensor.set_elements(1 << 20);
      tensor.set_nonzero(1000000);
      tensor.set_flushed(1000);
      tensor.set_signal_energy(1e6);
      tensor.set_noise_energy(1e2);
    }
    Write(std::move(message));
    return 1;
  }
  std::string lead_job() {
    std::lock_guard<std::mutex> lock(mutex_);
    return lead_.job_uid();
  }
  bool leads() {
    std::lock_guard<std::mutex> lock(mutex_);
    return leads_;
  }
  void Cancel() { context_.TryCancel(); }
  void AwaitDone() {
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait_for(lock, std::chrono::seconds(10), [this] { return is_done_; });
  }

  void OnReadDone(bool ok) override {
    if (!ok) {
      return;
    }
    if (incoming_.has_start()) {
      const internal::v1::RankAssignment& start = incoming_.start().assignment();
      internal::v1::RunningRank rank;
      rank.set_job_uid(start.job_uid());
      rank.set_attempt(start.attempt());
      rank.set_rank(start.rank());
      rank.set_slot(start.slot());
      rank.mutable_progress()->set_phase(internal::v1::RANK_TRAINING);
      std::lock_guard<std::mutex> lock(mutex_);
      running_.push_back(rank);
      for (const internal::v1::StartRank::Seat& seat : incoming_.start().more()) {
        internal::v1::RunningRank& other = running_.emplace_back(rank);
        other.set_rank(seat.rank());
        other.set_slot(seat.slot());
      }
      if (start.rank() == 0) {
        leads_ = true;
        lead_ = rank;
      }
    }
    StartRead(&incoming_);
  }
  void OnWriteDone(bool ok) override {
    std::lock_guard<std::mutex> lock(mutex_);
    outgoing_.pop_front();
    if (ok && !outgoing_.empty()) {
      StartWrite(&outgoing_.front());
    }
  }
  void OnDone(const grpc::Status&) override {
    std::lock_guard<std::mutex> lock(mutex_);
    is_done_ = true;
    done_.notify_all();
  }

 private:
  const int index_;
  grpc::ClientContext context_;
  internal::v1::ControllerToWorker incoming_;
  std::mutex mutex_;
  std::condition_variable done_;
  std::deque<internal::v1::WorkerToController> outgoing_;
  std::vector<internal::v1::RunningRank> running_;
  internal::v1::RunningRank lead_;
  bool leads_ = false;
  bool is_done_ = false;
};

struct RateFigures {
  double cores = 0, reports_per_second = 0, snapshots_per_second = 0;
};
struct LoadFigures {
  double submit_p50_ms = 0, submit_p99_ms = 0, placed_seconds = 0;
  double mebibytes = 0, telemetry_mebibytes = 0;  // peaks without and with telemetry
  RateFigures reports, telemetry;
  int running = 0;
};

// Steps of the leads at the target rate for `seconds`, going on from `*sent`; with snapshots of all
// workers of a job every kSnapshotEvery steps when `telemetry`.
RateFigures Report(const std::vector<BenchWorker*>& leads,
                   const std::vector<std::unique_ptr<BenchWorker>>& workers, pid_t controller,
                   double seconds, bool telemetry, std::int64_t* sent) {
  std::mutex mutex;
  std::condition_variable wake;
  const double cpu_before = CpuSeconds(controller);
  const auto begin = SteadyClock::now();
  auto next = begin;
  std::int64_t reports = 0, snapshots = 0;
  while (Seconds(SteadyClock::now() - begin) < seconds) {
    // A tick of 10 ms; each lead's steps grow by one per report.
    for (int i = 0; i < kReportsPerSecond / 100; ++i, ++*sent, ++reports) {
      const auto lead = static_cast<std::size_t>(*sent) % leads.size();
      const std::int64_t step = 1 + *sent / static_cast<std::int64_t>(leads.size());
      leads[lead]->Step(step);
      // Jobs take their snapshots at different times, as jobs do.
      if (telemetry && (step + static_cast<std::int64_t>(lead)) % kSnapshotEvery == 0) {
        const std::string job = leads[lead]->lead_job();
        for (const auto& worker : workers) {
          snapshots += worker->Snapshot(job, step);
        }
      }
    }
    next += std::chrono::milliseconds(10);
    std::unique_lock<std::mutex> lock(mutex);
    wake.wait_until(lock, next, [] { return false; });
  }
  const double elapsed = Seconds(SteadyClock::now() - begin);
  return {.cores = (CpuSeconds(controller) - cpu_before) / elapsed,
          .reports_per_second = static_cast<double>(reports) / elapsed,
          .snapshots_per_second = static_cast<double>(snapshots) / elapsed};
}

// Submits all jobs while heartbeats flow, then reports steps at the target rate for `seconds`.
LoadFigures RunLoad(int port, pid_t controller, double seconds) {
  const std::string address = StrCat("127.0.0.1:", port);
  std::vector<std::unique_ptr<internal::v1::WorkerService::Stub>> stubs;
  for (int i = 0; i < kChannels; ++i) {
    grpc::ChannelArguments arguments;
    arguments.SetInt("grpc.use_local_subchannel_pool", 1);
    stubs.push_back(internal::v1::WorkerService::NewStub(
        grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments)));
  }
  std::vector<std::unique_ptr<BenchWorker>> workers;
  for (int i = 0; i < kWorkers; ++i) {
    workers.push_back(std::make_unique<BenchWorker>(stubs[i % kChannels].get(), i));
  }
  std::atomic<bool> stop{false};
  std::mutex mutex;
  std::condition_variable_any wake;
  // Heartbeats, spread over their second.
  std::jthread heart([&](const std::stop_token& token) {
    auto next = SteadyClock::now();
    for (std::size_t i = 0; !token.stop_requested(); i = (i + 1) % workers.size()) {
      workers[i]->Heartbeat();
      next += std::chrono::microseconds(1000000 / kWorkers);
      std::unique_lock<std::mutex> lock(mutex);
      wake.wait_until(lock, token, next, [] { return false; });
    }
  });

  const auto jobs =
      v1::JobService::NewStub(grpc::CreateChannel(address, grpc::InsecureChannelCredentials()));
  std::vector<double> submit_ms;
  for (int i = 0; i < kJobs; ++i) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(30));
    v1::SubmitJobRequest request;
    request.set_request_id(StrCat("bench-", i));
    request.set_spec_yaml(SpecYaml(i));
    v1::Job job;
    const auto begin = SteadyClock::now();
    const grpc::Status status = jobs->SubmitJob(&context, request, &job);
    submit_ms.push_back(Seconds(SteadyClock::now() - begin) * 1e3);
    if (!status.ok()) {
      std::fprintf(stderr, "submit: %s\n", status.error_message().c_str());
      std::exit(1);
    }
  }
  const auto submitted = SteadyClock::now();
  const auto pause = [&](std::chrono::milliseconds time) {
    std::unique_lock<std::mutex> lock(mutex);
    wake.wait_until(lock, heart.get_stop_token(), SteadyClock::now() + time, [] { return false; });
  };
  std::vector<BenchWorker*> leads;
  do {
    pause(std::chrono::milliseconds(20));
    leads.clear();
    for (const auto& worker : workers) {
      if (worker->leads()) {
        leads.push_back(worker.get());
      }
    }
  } while (leads.size() < kJobs && Seconds(SteadyClock::now() - submitted) < 60);
  LoadFigures figures{.placed_seconds = Seconds(SteadyClock::now() - submitted),
                      .running = static_cast<int>(leads.size())};
  pause(std::chrono::seconds(3));  // every worker has been heard twice since
  if (!leads.empty()) {
    std::int64_t sent = 0;
    figures.reports = Report(leads, workers, controller, seconds, false, &sent);
    figures.mebibytes = PeakMebibytes(controller);
    figures.telemetry = Report(leads, workers, controller, seconds, true, &sent);
  }
  figures.telemetry_mebibytes = PeakMebibytes(controller);
  std::sort(submit_ms.begin(), submit_ms.end());
  figures.submit_p50_ms = submit_ms[submit_ms.size() / 2];
  figures.submit_p99_ms = submit_ms[submit_ms.size() * 99 / 100];
  heart.request_stop();
  heart.join();
  for (const auto& worker : workers) {
    worker->Cancel();
  }
  for (const auto& worker : workers) {
    worker->AwaitDone();
  }
  return figures;
}

// What the disk itself takes for a synchronous write of one page: a submit cannot be faster.
struct DiskFigures {
  double p50_ms = 0, p99_ms = 0;
};
DiskFigures MeasureDisk(const std::string& folder) {
  const std::string path = JoinPath(folder, "probe");
  const int fd = ::open(path.c_str(), O_CREAT | O_WRONLY | O_DSYNC | O_CLOEXEC, 0600);
  const std::vector<char> page(4096);
  std::vector<double> ms;
  for (int i = 0; i < 200; ++i) {
    const auto begin = SteadyClock::now();
    if (fd < 0 || ::write(fd, page.data(), page.size()) != static_cast<ssize_t>(page.size())) {
      std::perror(path.c_str());
      std::exit(1);
    }
    ms.push_back(Seconds(SteadyClock::now() - begin) * 1e3);
  }
  ::close(fd);
  ::unlink(path.c_str());
  std::sort(ms.begin(), ms.end());
  return {.p50_ms = ms[ms.size() / 2], .p99_ms = ms[ms.size() * 99 / 100]};
}

std::string Fixed(double value, int digits) {
  char text[48];
  std::snprintf(text, sizeof(text), "%.*f", digits, value);
  return text;
}

int Main(int argc, char** argv) {
  const double seconds = argc > 1 ? std::max(1.0, std::atof(argv[1])) : 20;
  std::string folder = argc > 2 ? argv[2] : "/tmp/octavo_bench_XXXXXX";
  const bool own_folder = argc <= 2;
  if (own_folder && ::mkdtemp(folder.data()) == nullptr) {
    std::perror("mkdtemp");
    return 1;
  }
  int pipe_fds[2];
  if (::pipe(pipe_fds) != 0) {
    std::perror("pipe");
    return 1;
  }
  const pid_t child = ::fork();  // before gRPC has threads
  if (child == 0) {
    const absl::Status logging = InitLog({.component = "bench", .min_level = LogLevel::kError});
    RunController(folder, logging.ok() ? pipe_fds[1] : -1);
  }
  int port = 0;
  if (::read(pipe_fds[0], &port, sizeof(port)) != sizeof(port) || port == 0) {
    std::fprintf(stderr, "the controller did not start\n");
    return 1;
  }
  const LoadFigures load = RunLoad(port, child, seconds);
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  const DiskFigures disk = MeasureDisk(folder);
  const PassFigures pass = MeasurePasses();
  if (own_folder) {
    PosixFileSystem::Get().RemoveTree(folder).IgnoreError();
  }

  double loads[1] = {0};
  ::getloadavg(loads, 1);
  const std::vector<Row> rows = {
      {"scheduling pass (CPU), 200 jobs, 1000 workers", "< 50 ms",
       Fixed(pass.worst_seconds * 1e3, 1) + " ms", pass.worst_seconds < 0.050},
      {"all 200 jobs placed, in passes", "",
       StrCat(pass.passes, " passes, ", Fixed(pass.all_seconds * 1e3, 0), " ms"), true},
      {"submit p99, SQLite on disk", "< 20 ms", Fixed(load.submit_p99_ms, 1) + " ms",
       load.submit_p99_ms < 20},
      {"a synchronous 4 KiB write there, p50 and p99", "",
       StrCat(Fixed(disk.p50_ms, 1), " and ", Fixed(disk.p99_ms, 1), " ms"), true},
      {"submit p50", "", Fixed(load.submit_p50_ms, 1) + " ms", true},
      {"all 200 jobs told to their workers, after the last submit", "",
       Fixed(load.placed_seconds, 1) + " s", true},
      {"step reports", StrCat(kReportsPerSecond, "/s"),
       Fixed(load.reports.reports_per_second, 0) + "/s",
       load.reports.reports_per_second > 0.95 * kReportsPerSecond},
      {"controller CPU at that rate", "< 0.5 cores", Fixed(load.reports.cores, 2) + " cores",
       load.reports.cores < 0.5},
      {StrCat("the same with ", Fixed(load.telemetry.snapshots_per_second, 0), " snapshots/s of ",
              kSnapshotTensors, " tensors"),
       "", Fixed(load.telemetry.cores, 2) + " cores", true},
      {"controller memory, peak", "< 300 MiB", Fixed(load.mebibytes, 0) + " MiB",
       load.mebibytes < 300},
      {"with that telemetry", "", Fixed(load.telemetry_mebibytes, 0) + " MiB", true},
      {"jobs running at once", StrCat(kJobs), StrCat(load.running), load.running == kJobs}};
  std::printf("control plane: %d workers, %d slots, %d jobs of %d ranks; load average %.1f\n",
              kWorkers, kWorkers * kSlots, kJobs, kRanks, loads[0]);
  std::printf("%-46s %-12s %-20s %s\n", "measure", "target", "figure", "met");
  bool all_met = true;
  for (const Row& row : rows) {
    std::printf("%-46s %-12s %-20s %s\n", row.what.c_str(), row.target.c_str(), row.figure.c_str(),
                row.target.empty() ? ""
                : row.met          ? "yes"
                                   : "NO");
    all_met = all_met && row.met;
  }
  return all_met ? 0 : 1;
}

}  // namespace
}  // namespace octavo

int main(int argc, char** argv) { return octavo::Main(argc, argv); }
