// octavo-worker: one per host. Flags, wiring, signals; nothing else.
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>

#include "CLI/CLI.hpp"
#include "base/credentials.h"
#include "base/file.h"
#include "base/log.h"
#include "base/signals.h"
#include "base/status.h"
#include "base/str.h"
#include "base/version.h"
#include "cli/validators.h"
#include "grpc/support/log.h"
#include "nlohmann/json.hpp"
#include "proto/limits.h"
#include "worker/agent/inventory.h"
#include "worker/agent/worker_loop.h"

namespace octavo {
namespace {

constexpr int kExitUsage = 2;  // a flag, file or credential is wrong
constexpr int kExitStart = 3;  // a port, socket, lock or probe failed
constexpr double kGraceSecondsMax = 30 * 86400;
constexpr std::size_t kSocketPathMax = 100;  // sun_path holds 108 bytes with the terminator

struct Flags {
  std::string controller;
  int slots = 1;
  std::string state_dir;
  std::string listen_http = "127.0.0.1:0";
  std::string name;
  std::string advertise_address;
  std::string device = "cpu";
  std::string rank_binary;
  double orphan_grace_seconds = 0;
  double drain_grace_seconds = kRankStopGraceMs / 1e3;
  std::string port_file;
  std::string log_file;
  std::string log_level = "info";
  TlsFiles tls;
  std::string token_file;
};

void Declare(CLI::App& app, Flags* f) {
  app.add_option("--controller", f->controller, "gRPC address of the controller, host:port")
      ->envname("OCTAVO_CONTROLLER")
      ->check(NotEmpty())
      ->required();
  app.add_option("--slots", f->slots, "ranks that may run here at once")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
  app.add_option("--state-dir", f->state_dir,
                 "folder for rank logs and the ranks' socket; one daemon at a time")
      ->required();
  app.add_option("--listen-http", f->listen_http,
                 "host:port of /metrics, /healthz and /readyz; port 0 picks one")
      ->check(ListenAddress())
      ->capture_default_str();
  app.add_option("--name", f->name, "name in the cluster; default: the host's name")
      ->check(PlainName());
  app.add_option(
      "--advertise-address", f->advertise_address,
      "address that ranks bind and peers reach; default: the first that is not loopback");
  app.add_option("--device", f->device, "what the slots are")
      ->check(CLI::IsMember({"cpu", "cuda"}))
      ->capture_default_str();
  app.add_option("--rank-binary", f->rank_binary,
                 "path of octavo-rank; default: beside this program");
  app.add_option("--orphan-grace", f->orphan_grace_seconds,
                 "seconds that ranks go on without a controller; 0: as the controller says")
      ->check(FiniteRange(0, kGraceSecondsMax));
  app.add_option("--drain-grace", f->drain_grace_seconds,
                 "seconds that ranks get for a last checkpoint after SIGTERM")
      ->check(FiniteRange(0.1, kGraceSecondsMax))
      ->capture_default_str();
  app.add_option("--port-file", f->port_file, "where to write the bound addresses as JSON");
  app.add_option("--log-file", f->log_file, "log to this file as well as to stderr");
  app.add_option("--log-level", f->log_level, "least severe event to log")
      ->check(CLI::IsMember({"debug", "info", "warning", "error"}))
      ->capture_default_str();
  app.add_option("--tls-cert", f->tls.cert_path, "PEM certificate of this worker (mutual TLS)");
  app.add_option("--tls-key", f->tls.key_path, "PEM key of this worker");
  app.add_option("--tls-ca", f->tls.ca_path, "PEM certificate of the cluster's authority");
  app.add_option("--token-file", f->token_file, "file with the bearer token for the controller");
  app.set_version_flag("--version", kVersion);
}

int Fail(int code, const absl::Status& status) {
  std::fprintf(stderr, "octavo-worker: %s\n", Message(status).c_str());
  return code;
}

std::string BesideThisProgram(const std::string& name) {
  char path[4096];
  const ssize_t size = ::readlink("/proc/self/exe", path, sizeof(path));
  return size <= 0 ? name
                   : JoinPath(DirectoryName(std::string_view(path, static_cast<std::size_t>(size))),
                              name);
}

std::string RandomIncarnation() {
  std::random_device device;
  char text[40];
  std::snprintf(text, sizeof(text), "%08x%08x-%d", device(), device(), ::getpid());
  return text;
}

// Unix socket paths are short; a deep state folder gets a private folder in /tmp instead.
absl::StatusOr<std::string> SocketAddress(const std::string& state_dir) {
  const std::string path = JoinPath(state_dir, "ranks.sock");
  if (path.size() <= kSocketPathMax && path[0] == '/') {
    return "unix:" + path;
  }
  std::string folder = "/tmp/octavo-worker.XXXXXX";
  if (::mkdtemp(folder.data()) == nullptr) {
    return ErrnoStatus(errno, "making a folder for the ranks' socket in /tmp");
  }
  return "unix:" + JoinPath(folder, "ranks.sock");
}

// gRPC's own messages become events of ours instead of a second format on stderr.
void RedirectGrpcLog() {
  gpr_set_log_function([](gpr_log_func_args* args) {
    Log(args->severity == GPR_LOG_SEVERITY_ERROR ? LogLevel::kWarning : LogLevel::kDebug, "grpc",
        {{"file", BaseName(args->file)}, {"line", args->line}, {"text", args->message}});
  });
}

int Main(int argc, char** argv) {
  const StopSignals signals;  // first: threads started later inherit the mask
  Flags flags;
  CLI::App app{"octavo-worker: runs the ranks of one host"};
  // A wrapper may append a flag to override an earlier one.
  app.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  Declare(app, &flags);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    const int code = app.exit(error);  // prints help, version or the error
    return code == 0 ? 0 : kExitUsage;
  }
  PosixFileSystem& fs = PosixFileSystem::Get();
  const absl::Status logging = InitLog({.component = "octavo-worker",
                                        .min_level = *ParseLogLevel(flags.log_level),
                                        .file = flags.log_file});
  if (!logging.ok()) {
    return Fail(kExitUsage, logging);
  }
  RedirectGrpcLog();
  Session::Options session = {.controller = flags.controller,
                              .jitter_seed = std::random_device()()};
  if (!flags.tls.empty()) {
    absl::StatusOr<TlsMaterial> tls = LoadTls(flags.tls, fs);
    if (!tls.ok()) {
      return Fail(kExitUsage, tls.status());
    }
    session.tls = *std::move(tls);
  }
  if (!flags.token_file.empty()) {
    absl::StatusOr<std::string> token = LoadSecret(flags.token_file, fs);
    if (!token.ok()) {
      return Fail(kExitUsage, token.status());
    }
    session.bearer_token = *std::move(token);
  }
  if (flags.rank_binary.empty()) {
    flags.rank_binary = BesideThisProgram("octavo-rank");
  }
  if (!fs.Exists(flags.rank_binary)) {
    return Fail(kExitUsage,
                NotFoundError(StrCat("--rank-binary ", flags.rank_binary,
                                     ": no such program; build octavo-rank or name it")));
  }
  const absl::Status made = fs.CreateDirectories(flags.state_dir);
  if (!made.ok()) {
    return Fail(kExitStart, Annotate(made, "--state-dir"));
  }
  char* real = ::realpath(flags.state_dir.c_str(), nullptr);  // ranks run in other folders
  if (real != nullptr) {
    flags.state_dir = real;
    std::free(real);
  }
  const absl::StatusOr<std::unique_ptr<FileLock>> lock =
      fs.LockFile(JoinPath(flags.state_dir, "lock"));
  if (!lock.ok()) {
    return Fail(kExitStart, Annotate(lock.status(), "--state-dir"));
  }
  const absl::StatusOr<std::string> socket = SocketAddress(flags.state_dir);
  if (!socket.ok()) {
    return Fail(kExitStart, socket.status());
  }
  absl::StatusOr<std::vector<v1::SlotFacts>> slots = ProbeSlots({.rank_binary = flags.rank_binary,
                                                                 .device = flags.device,
                                                                 .slots = flags.slots,
                                                                 .folder = flags.state_dir});
  if (!slots.ok()) {
    return Fail(kExitStart, slots.status());
  }
  const std::string host = HostName();
  if (flags.name.empty() && !IsPlainName(host)) {
    return Fail(kExitUsage, InvalidArgumentError(StrCat("the host's name \"", host,
                                                        "\" cannot be the worker's: give --name "
                                                        "with letters, digits, '.', '_' or '-'")));
  }
  WorkerLoop loop(
      {.agent = {.worker = flags.name.empty() ? host : flags.name,
                 .incarnation = RandomIncarnation(),
                 .address = flags.advertise_address.empty() ? DefaultAdvertiseAddress()
                                                            : flags.advertise_address,
                 .host = host,
                 .version = kVersion,
                 .device = flags.device,
                 .slots = *std::move(slots),
                 .orphan_grace_ms = static_cast<std::int64_t>(flags.orphan_grace_seconds * 1e3),
                 .drain_grace_ms = static_cast<std::int64_t>(flags.drain_grace_seconds * 1e3)},
       .session = std::move(session),
       .ranks = {.rank_binary = flags.rank_binary,
                 .state_dir = flags.state_dir,
                 .socket_address = *socket},
       .listen_http = flags.listen_http},
      RealClock::Get());
  const absl::Status started = loop.Start();
  if (!started.ok()) {
    return Fail(kExitStart, started);
  }
  if (!flags.port_file.empty()) {
    const std::string http_host = flags.listen_http.substr(0, flags.listen_http.rfind(':'));
    const nlohmann::json ports = {{"http", StrCat(http_host, ":", loop.http_port())},
                                  {"pid", ::getpid()}};
    const absl::Status written = fs.WriteFileAtomic(flags.port_file, ports.dump() + "\n");
    if (!written.ok()) {
      return Fail(kExitStart, Annotate(written, "--port-file"));
    }
  }
  LogInfo("started", {{"version", kVersion},
                      {"controller", flags.controller},
                      {"slots", flags.slots},
                      {"device", flags.device},
                      {"http_port", loop.http_port()}});
  loop.Run(signals);
  return 0;
}

}  // namespace
}  // namespace octavo

int main(int argc, char** argv) { return octavo::Main(argc, argv); }
