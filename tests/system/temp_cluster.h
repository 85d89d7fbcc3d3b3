// A whole Octavo in a temporary folder: one controller, N workers, real rank processes.
//
//   TempCluster cluster({.workers = 2});
//   cluster.Submit(cluster.Spec({.steps = 40}));
//   v1::Job job = cluster.WaitFor("test", Reaches(10), "step 10");
//   cluster.worker(0).SignalGroup(SIGKILL);
//
// Waiting is by events (WatchJob, process exit), never by sleeping; every wait has a deadline and a
// failure prints the last state and where the logs are. The destructor stops everything.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/subprocess.h"
#include "octavo/v1/job_service.grpc.pb.h"

namespace octavo {

struct SpecOptions {
  std::string name = "test";
  int steps = 30;
  int ranks = 2;
  int expert_parallel = 2;
  int layers = 3;
  std::string recipe = "bf16";
  int checkpoint_interval = 10;
  int priority = 0;
  int restart_max = 5;
  int gang_timeout_seconds = 60;
  int backoff_seconds = 0;
  std::string checkpoint_path;  // default: inside the cluster's folder
  std::string extra;            // YAML appended at top level
  std::string precision_extra;  // lines below precision:, indented by two blanks
  std::string telemetry = "telemetry: {interval_steps: 2, sqnr_interval: 4}\n";
};

struct ClusterOptions {
  int workers = 2;
  int slots = 1;
  std::vector<std::string> controller_flags;
  std::vector<std::string> worker_flags;
  // One network namespace per worker (made by the test); the controller listens on this address.
  std::vector<std::string> namespaces;
  std::vector<std::string> advertise_addresses;
  std::string controller_address = "127.0.0.1";
};

struct CliResult {
  int exit_code = -1;
  std::string out, err;
};

class TempCluster {
 public:
  explicit TempCluster(ClusterOptions options = {});
  ~TempCluster();

  // Spec text for a tiny model on the cluster's dataset.
  std::string Spec(const SpecOptions& options) const;

  v1::Job Submit(const std::string& yaml, const std::string& request_id = "");
  grpc::Status TrySubmit(const std::string& yaml, const std::string& request_id, v1::Job* job);
  v1::Job Get(const std::string& name);
  // Blocks until the predicate holds for the job; follows it across controller restarts.
  v1::Job WaitFor(const std::string& name, const std::function<bool(const v1::Job&)>& done,
                  const std::string& what, int seconds = 120);
  v1::Job WaitForEnd(const std::string& name, int seconds = 240);
  std::vector<v1::JobEvent> Events(const std::string& name);

  CliResult Cli(const std::vector<std::string>& args, int seconds = 120);

  void StartController();
  void StartWorker(int index);
  // Signals and waits for the end of the process.
  void Kill(std::unique_ptr<Subprocess>& process, int signal, int seconds = 30);
  std::unique_ptr<Subprocess>& controller() { return controller_; }
  std::unique_ptr<Subprocess>& worker(int index) { return workers_[static_cast<size_t>(index)]; }
  // Waits until the controller sees `count` workers READY.
  void WaitForWorkers(int count, int seconds = 30);

  v1::JobService::Stub& stub() { return *stub_; }
  const std::string& dir() const { return dir_; }
  std::string grpc_address() const { return grpc_address_; }
  std::string http_address() const { return http_address_; }
  std::string worker_http(int index) const;
  // Process ids of rank processes of this cluster that are alive.
  std::vector<int> RankPids(const std::string& job = "") const;
  std::string Logs() const;  // tails of all logs, for failure messages

 private:
  ClusterOptions options_;
  std::string dir_;
  std::string grpc_address_, http_address_;
  std::unique_ptr<Subprocess> controller_;
  std::vector<std::unique_ptr<Subprocess>> workers_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::JobService::Stub> stub_;
};

bool IsTerminal(const v1::Job& job);
std::function<bool(const v1::Job&)> Reaches(std::int64_t step);
std::function<bool(const v1::Job&)> InState(v1::JobState state);

// The byte dataset every test shares, built once per process by the CLI.
const std::string& SharedDataset();
// HTTP GET over plain sockets; empty body on failure.
std::string HttpGet(const std::string& address, const std::string& path);

}  // namespace octavo
