#include "tests/system/temp_cluster.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <grpcpp/grpcpp.h>
#include <nlohmann/json.hpp>
#include <random>
#include <sstream>

namespace octavo {
namespace {

namespace fs = std::filesystem;
using std::chrono::seconds;

std::string Bin(const std::string& name) { return std::string(OCTAVO_BIN_DIR) + "/" + name; }

std::string ReadAll(const std::string& path) {
  std::ifstream in(path);
  std::ostringstream text;
  text << in.rdbuf();
  return text.str();
}

std::string Tail(const std::string& path, std::size_t bytes) {
  const std::string text = ReadAll(path);
  return text.size() <= bytes ? text : "…" + text.substr(text.size() - bytes);
}

// The file appears atomically (written then renamed); its folder is polled through the process's end
// as the only other event there is.
nlohmann::json WaitForPortFile(const std::string& path, Subprocess& process,
                               const std::string& log) {
  const auto end = std::chrono::steady_clock::now() + seconds(30);
  while (!fs::exists(path)) {
    if (process.Wait(std::chrono::steady_clock::now() + std::chrono::milliseconds(20))) {
      ADD_FAILURE() << "process ended at start: " << Tail(log, 2000);
      return {};
    }
    if (std::chrono::steady_clock::now() > end) {
      ADD_FAILURE() << "no port file " << path << " within 30 s: " << Tail(log, 2000);
      return {};
    }
  }
  return nlohmann::json::parse(ReadAll(path));
}

}  // namespace

bool IsTerminal(const v1::Job& job) {
  return job.state() == v1::SUCCEEDED || job.state() == v1::FAILED || job.state() == v1::CANCELLED;
}
std::function<bool(const v1::Job&)> Reaches(std::int64_t step) {
  return [step](const v1::Job& job) { return job.progress().step() >= step || IsTerminal(job); };
}
std::function<bool(const v1::Job&)> InState(v1::JobState state) {
  return [state](const v1::Job& job) { return job.state() == state; };
}

const std::string& SharedDataset() {
  static const std::string path = [] {
    const std::string folder = fs::temp_directory_path() / ("octavo-data-" + std::to_string(getpid()));
    fs::create_directories(folder);
    const std::string file = folder + "/text.octd";
    auto process = Subprocess::Spawn({.argv = {Bin("octavo"), "data", "build", "--output", file,
                                               "--max-bytes", "2MB", "/usr/share/common-licenses"},
                                      .stdout_path = folder + "/build.log",
                                      .stderr_path = folder + "/build.log"});
    EXPECT_TRUE(process.ok()) << process.status().ToString();
    const auto exit = (*process)->Wait(std::chrono::steady_clock::now() + seconds(60));
    EXPECT_TRUE(exit && exit->success()) << ReadAll(folder + "/build.log");
    std::atexit([] {
      fs::remove_all(fs::temp_directory_path() / ("octavo-data-" + std::to_string(getpid())));
    });
    return file;
  }();
  return path;
}

TempCluster::TempCluster(ClusterOptions options) : options_(std::move(options)) {
  std::random_device random;
  dir_ = fs::temp_directory_path() /
         ("octavo-system-" + std::to_string(getpid()) + "-" + std::to_string(random() % 1000000));
  fs::create_directories(dir_);
  StartController();
  workers_.resize(static_cast<std::size_t>(options_.workers));
  for (int i = 0; i < options_.workers; ++i) {
    StartWorker(i);
  }
  WaitForWorkers(options_.workers);
}

TempCluster::~TempCluster() {
  if (testing::Test::HasFailure()) {
    std::fprintf(stderr, "%s\n", Logs().c_str());
  }
  for (auto& w : workers_) {
    if (w) {
      Kill(w, SIGTERM, 30);
    }
  }
  if (controller_) {
    Kill(controller_, SIGTERM, 30);
  }
  for (int pid : RankPids()) {
    ADD_FAILURE() << "rank process " << pid << " outlived its worker";
    kill(pid, SIGKILL);
  }
  if (std::getenv("OCTAVO_KEEP") == nullptr) {
    fs::remove_all(dir_);
  }
}

void TempCluster::StartController() {
  const std::string port_file = dir_ + "/controller.json";
  fs::remove(port_file);
  const bool again = !grpc_address_.empty();
  const std::string any = options_.controller_address + ":0";
  std::vector<std::string> argv = {Bin("octavo-controller"),
                                   "--listen",
                                   again ? grpc_address_ : any,
                                   "--http",
                                   again ? http_address_ : any,
                                   "--data-dir",
                                   dir_ + "/controller",
                                   "--port-file",
                                   port_file};
  argv.insert(argv.end(), options_.controller_flags.begin(), options_.controller_flags.end());
  const std::string log = dir_ + "/controller.log";
  auto process = Subprocess::Spawn({.argv = argv, .stdout_path = log, .stderr_path = log});
  ASSERT_TRUE(process.ok()) << process.status().ToString();
  controller_ = std::move(*process);
  const nlohmann::json ports = WaitForPortFile(port_file, *controller_, log);
  ASSERT_TRUE(ports.contains("grpc_address") && ports.contains("http_address")) << ports.dump();
  grpc_address_ = ports["grpc_address"];
  http_address_ = ports["http_address"];
  if (!again) {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 50);
    arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 50);
    arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 500);
    channel_ = grpc::CreateCustomChannel(grpc_address_, grpc::InsecureChannelCredentials(), arguments);
    stub_ = v1::JobService::NewStub(channel_);
  }
}

void TempCluster::StartWorker(int index) {
  const std::string name = "w" + std::to_string(index);
  const std::string port_file = dir_ + "/" + name + ".json";
  fs::remove(port_file);
  std::vector<std::string> argv;
  std::string address = "127.0.0.1";
  if (!options_.namespaces.empty()) {
    argv = {"/usr/sbin/ip", "netns", "exec", options_.namespaces[static_cast<std::size_t>(index)]};
    address = options_.advertise_addresses[static_cast<std::size_t>(index)];
  }
  for (const std::string& a :
       {Bin("octavo-worker"), std::string("--name"), name, std::string("--controller"),
        grpc_address_, std::string("--slots"), std::to_string(options_.slots),
        std::string("--state-dir"), dir_ + "/" + name, std::string("--advertise-address"), address,
        std::string("--listen-http"), address + ":0", std::string("--port-file"), port_file}) {
    argv.push_back(a);
  }
  argv.insert(argv.end(), options_.worker_flags.begin(), options_.worker_flags.end());
  const std::string log = dir_ + "/" + name + ".log";
  auto process = Subprocess::Spawn({.argv = argv, .stdout_path = log, .stderr_path = log});
  ASSERT_TRUE(process.ok()) << process.status().ToString();
  workers_[static_cast<std::size_t>(index)] = std::move(*process);
  WaitForPortFile(port_file, *workers_[static_cast<std::size_t>(index)], log);
}

void TempCluster::Kill(std::unique_ptr<Subprocess>& process, int signal, int limit) {
  ASSERT_TRUE(process != nullptr);
  ASSERT_TRUE(process->Signal(signal).ok());
  const auto exit = process->Wait(std::chrono::steady_clock::now() + seconds(limit));
  EXPECT_TRUE(exit.has_value()) << "pid " << process->pid() << " still runs " << limit
                                << " s after signal " << signal;
  if (exit && signal == SIGTERM) {
    EXPECT_TRUE(exit->success()) << "SIGTERM ended with " << exit->DebugString();
  }
  process.reset();
}

void TempCluster::WaitForWorkers(int count, int limit) {
  const auto end = std::chrono::steady_clock::now() + seconds(limit);
  int ready = -1;
  while (std::chrono::steady_clock::now() < end) {
    grpc::ClientContext context;
    context.set_wait_for_ready(true);
    context.set_deadline(std::chrono::system_clock::now() + seconds(5));
    v1::ListWorkersResponse response;
    if (stub_->ListWorkers(&context, {}, &response).ok()) {
      ready = 0;
      for (const v1::Worker& w : response.workers()) {
        ready += w.state() == "READY";
      }
      if (ready == count) {
        return;
      }
    }
    // The registry has no watch; a worker's end is the event that would make waiting pointless.
    for (auto& w : workers_) {
      if (w && w->Wait(std::chrono::steady_clock::now() + std::chrono::milliseconds(20))) {
        break;
      }
    }
  }
  FAIL() << ready << " workers ready, waited " << limit << " s for " << count;
}

std::string TempCluster::Spec(const SpecOptions& o) const {
  std::ostringstream y;
  y << "name: " << o.name << "\npriority: " << o.priority << "\n"
    << "model:\n  family: mixtral\n  layers: " << o.layers
    << "\n  hidden: 128\n  heads: 4\n  kv_heads: 2\n  head_dim: 32\n  vocab_size: 256\n"
    << "  moe: {num_experts: 4, experts_per_token: 2, expert_hidden: 128}\n"
    << "parallel: {ranks: " << o.ranks << ", expert_parallel: " << o.expert_parallel << "}\n"
    << "train:\n  steps: " << o.steps << "\n  sequence_length: 64\n  global_batch: 4\n  seed: 7\n"
    << "  schedule: {kind: cosine, lr: 3e-3, min_lr: 3e-4, warmup_steps: " << std::min(5, o.steps - 1) << "}\n"
    << "data: {path: " << SharedDataset() << "}\n"
    << "checkpoint: {path: "
    << (o.checkpoint_path.empty() ? dir_ + "/checkpoints/" + o.name : o.checkpoint_path)
    << ", interval_steps: " << o.checkpoint_interval << ", keep: 3}\n"
    << "precision:\n  recipe: " << o.recipe << "\n"
    << o.precision_extra << "restart: {max: " << o.restart_max
    << ", backoff_seconds: " << o.backoff_seconds
    << ", gang_timeout_seconds: " << o.gang_timeout_seconds << ", collective_timeout_seconds: 30}\n"
    << o.telemetry << o.extra;
  return y.str();
}

grpc::Status TempCluster::TrySubmit(const std::string& yaml, const std::string& request_id,
                                    v1::Job* job) {
  static int counter = 0;
  v1::SubmitJobRequest request;
  request.set_spec_yaml(yaml);
  request.set_file_name("job.yaml");
  request.set_request_id(request_id.empty() ? "system-" + std::to_string(++counter) : request_id);
  grpc::Status status;
  // A connection that broke with the controller is UNAVAILABLE; the request id makes a repeat safe.
  for (int attempt = 0; attempt < 5; ++attempt) {
    grpc::ClientContext context;
    context.set_wait_for_ready(true);
    context.set_deadline(std::chrono::system_clock::now() + seconds(20));
    status = stub_->SubmitJob(&context, request, job);
    if (status.error_code() != grpc::StatusCode::UNAVAILABLE) {
      break;
    }
  }
  return status;
}

v1::Job TempCluster::Submit(const std::string& yaml, const std::string& request_id) {
  v1::Job job;
  const grpc::Status status = TrySubmit(yaml, request_id, &job);
  EXPECT_TRUE(status.ok()) << status.error_message();
  return job;
}

v1::Job TempCluster::Get(const std::string& name) {
  grpc::ClientContext context;
  context.set_wait_for_ready(true);
  context.set_deadline(std::chrono::system_clock::now() + seconds(20));
  v1::GetJobRequest request;
  request.set_name("jobs/" + name);
  v1::Job job;
  const grpc::Status status = stub_->GetJob(&context, request, &job);
  EXPECT_TRUE(status.ok()) << status.error_message();
  return job;
}

v1::Job TempCluster::WaitFor(const std::string& name,
                             const std::function<bool(const v1::Job&)>& done,
                             const std::string& what, int limit) {
  const auto deadline = std::chrono::system_clock::now() + seconds(limit);
  v1::Job last;
  std::string why;
  while (std::chrono::system_clock::now() < deadline) {
    grpc::ClientContext context;
    context.set_wait_for_ready(true);
    context.set_deadline(deadline);
    v1::WatchJobRequest request;
    request.set_name("jobs/" + name);
    auto reader = stub_->WatchJob(&context, request);
    v1::JobEvent event;
    while (reader->Read(&event)) {
      if (event.has_snapshot()) {
        last = event.snapshot();
        if (done(last)) {
          context.TryCancel();
          while (reader->Read(&event)) {
          }
          reader->Finish();
          return last;
        }
      }
    }
    const grpc::Status status = reader->Finish();
    why = status.error_message();
    if (status.error_code() == grpc::StatusCode::NOT_FOUND) {
      break;
    }
  }
  ADD_FAILURE() << "waited " << limit << " s for " << what << " of job " << name << " (" << why
                << "); last: " << v1::JobState_Name(last.state()) << " step "
                << last.progress().step() << " " << last.message() << " "
                << last.pending().sentence();
  return last;
}

v1::Job TempCluster::WaitForEnd(const std::string& name, int limit) {
  WaitFor(name, IsTerminal, "the end", limit);
  return Get(name);
}

std::vector<v1::JobEvent> TempCluster::Events(const std::string& name) {
  std::vector<v1::JobEvent> events;
  v1::ListEventsRequest request;
  request.set_name("jobs/" + name);
  request.set_page_size(1000);
  do {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + seconds(20));
    v1::ListEventsResponse response;
    const grpc::Status status = stub_->ListEvents(&context, request, &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    events.insert(events.end(), response.events().begin(), response.events().end());
    request.set_page_token(response.next_page_token());
  } while (!request.page_token().empty());
  return events;
}

CliResult TempCluster::Cli(const std::vector<std::string>& args, int limit) {
  static int counter = 0;
  const std::string stem = dir_ + "/cli-" + std::to_string(++counter);
  std::vector<std::string> argv = {Bin("octavo"), "--controller", grpc_address_};
  argv.insert(argv.end(), args.begin(), args.end());
  auto process = Subprocess::Spawn(
      {.argv = argv, .stdout_path = stem + ".out", .stderr_path = stem + ".err"});
  EXPECT_TRUE(process.ok()) << process.status().ToString();
  const auto exit = (*process)->Wait(std::chrono::steady_clock::now() + seconds(limit));
  CliResult result;
  result.out = ReadAll(stem + ".out");
  result.err = ReadAll(stem + ".err");
  if (exit) {
    result.exit_code = exit->code;
  } else {
    ADD_FAILURE() << "octavo did not end within " << limit << " s; stdout: " << result.out;
  }
  return result;
}

std::string TempCluster::worker_http(int index) const {
  return nlohmann::json::parse(ReadAll(dir_ + "/w" + std::to_string(index) + ".json"))["http"];
}

std::vector<int> TempCluster::RankPids(const std::string& job) const {
  std::vector<int> pids;
  for (const auto& entry : fs::directory_iterator("/proc")) {
    const std::string name = entry.path().filename();
    if (name.find_first_not_of("0123456789") != std::string::npos) {
      continue;
    }
    const std::string command = ReadAll(entry.path().string() + "/cmdline");
    if (command.find("octavo-rank") != std::string::npos &&
        command.find(dir_ + "/") != std::string::npos &&
        (job.empty() || command.find(job) != std::string::npos)) {
      pids.push_back(std::stoi(name));
    }
  }
  return pids;
}

std::string TempCluster::Logs() const {
  std::string text = "logs of " + dir_ + " (OCTAVO_KEEP=1 keeps them)\n";
  for (const auto& entry : fs::recursive_directory_iterator(dir_)) {
    if (entry.path().extension() == ".log") {
      text += "--- " + entry.path().string() + "\n" + Tail(entry.path(), 2500) + "\n";
    }
  }
  return text;
}

std::string HttpGet(const std::string& address, const std::string& path) {
  const auto colon = address.rfind(':');
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in to{};
  to.sin_family = AF_INET;
  to.sin_port = htons(static_cast<std::uint16_t>(std::stoi(address.substr(colon + 1))));
  inet_pton(AF_INET, address.substr(0, colon).c_str(), &to.sin_addr);
  const timeval limit{10, 0};
  setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
  std::string response;
  if (connect(fd, reinterpret_cast<sockaddr*>(&to), sizeof(to)) == 0) {
    const std::string request =
        "GET " + path + " HTTP/1.1\r\nHost: " + address + "\r\nConnection: close\r\n\r\n";
    if (write(fd, request.data(), request.size()) == static_cast<ssize_t>(request.size())) {
      char buffer[65536];
      for (ssize_t n = 0; (n = read(fd, buffer, sizeof(buffer))) > 0;) {
        response.append(buffer, static_cast<std::size_t>(n));
      }
    }
  }
  close(fd);
  const auto body = response.find("\r\n\r\n");
  return body == std::string::npos ? "" : response.substr(body + 4);
}

}  // namespace octavo
