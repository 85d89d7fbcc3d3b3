// octavo-controller: one per cluster. Flags, wiring, signals; nothing else.
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <optional>
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
#include "controller/api/server.h"
#include "controller/core/policy_driver.h"
#include "controller/store/sqlite_store.h"
#include "grpc/support/log.h"
#include "nlohmann/json.hpp"
#include "proto/limits.h"

namespace octavo {
namespace {

constexpr int kExitUsage = 2;   // a flag, file or credential is wrong
constexpr int kExitStart = 3;   // an address, lock or the store failed at the start
constexpr int kExitStore = 4;   // the store broke while running
constexpr int kExitForced = 5;  // the shutdown limit passed

struct Flags {
  std::string listen = "127.0.0.1:7070";
  std::string http = "127.0.0.1:7071";
  std::string advertise_http;
  std::string data_dir;
  std::string port_file;
  std::string log_file;
  std::string log_level = "info";
  std::string token_file;
  TlsFiles tls;
  std::map<std::string, std::string> certificate_roles;
  int ended_jobs_kept = CoreOptions().ended_jobs_kept;
  double worker_lease_seconds = kWorkerLeaseMs / 1e3;
  bool reflection = false;
};

void Declare(CLI::App& app, Flags* f) {
  app.add_option("--listen", f->listen, "host:port of the gRPC services; port 0 picks one")
      ->check(ListenAddress())
      ->capture_default_str();
  app.add_option("--http,--listen-http", f->http,
                 "host:port of /metrics, /healthz, /readyz and /sd; port 0 picks one")
      ->check(ListenAddress())
      ->capture_default_str();
  app.add_option("--advertise-http", f->advertise_http,
                 "host under which Prometheus reaches --http; default: its host");
  app.add_option("--data-dir", f->data_dir, "folder of the job store; one controller at a time")
      ->required();
  app.add_option("--port-file", f->port_file, "where to write the bound addresses as JSON");
  app.add_option("--tls-cert", f->tls.cert_path, "PEM certificate chain of this controller");
  app.add_option("--tls-key", f->tls.key_path, "PEM private key of --tls-cert");
  app.add_option("--tls-ca", f->tls.ca_path,
                 "PEM authority that clients and workers must be signed by");
  app.add_option("--token-file", f->token_file,
                 "bearer tokens, one `token role name` a line; turns authorisation on");
  app.add_option("--certificate-role", f->certificate_roles,
                 "role of a client certificate, as `common-name role`; turns authorisation on");
  app.add_option("--keep-ended-jobs", f->ended_jobs_kept,
                 "ended jobs that stay listed; older ones leave the store")
      ->check(CLI::Range(1, 1000000))
      ->capture_default_str();
  app.add_option("--worker-lease", f->worker_lease_seconds,
                 "seconds of silence after which a worker is lost")
      ->check(FiniteRange(kReconnectBackoffMaxMs / 1e3, 3600.0))
      ->capture_default_str();
  app.add_flag("--reflection", f->reflection, "serve gRPC reflection, for grpcurl");
  app.add_option("--log-file", f->log_file, "log to this file as well as to stderr");
  app.add_option("--log-level", f->log_level, "least severe event to log")
      ->check(CLI::IsMember({"debug", "info", "warning", "error"}))
      ->capture_default_str();
}

absl::StatusOr<Authorizer> MakeAuthorizer(const Flags& flags, const FileSystem& fs) {
  std::optional<TokenTable> tokens;
  if (!flags.token_file.empty()) {
    ASSIGN_OR_RETURN(tokens, TokenTable::Load(flags.token_file, fs));
  }
  std::map<std::string, Role> names;
  for (const auto& [name, role] : flags.certificate_roles) {
    if (role == RoleName(Role::kViewer)) {
      names[name] = Role::kViewer;
    } else if (role == RoleName(Role::kSubmitter)) {
      names[name] = Role::kSubmitter;
    } else if (role == RoleName(Role::kOperator)) {
      names[name] = Role::kOperator;
    } else {
      return InvalidArgumentError(StrCat("--certificate-role ", name, " ", role,
                                         ": the role must be viewer, submitter or operator"));
    }
  }
  if (!names.empty() && flags.tls.empty()) {
    return InvalidArgumentError("--certificate-role needs --tls-cert, --tls-key and --tls-ca");
  }
  return Authorizer(std::move(tokens), std::move(names));
}

int Fail(int code, const absl::Status& status) {
  LogError("controller_failed", {{"error", ToString(status)}});
  std::fprintf(stderr, "octavo-controller: %s\n", Message(status).c_str());
  return code;
}

std::string PortFile(const Flags& flags, const ControllerServer& server) {
  nlohmann::ordered_json json;
  json["pid"] = static_cast<int>(::getpid());
  json["grpc_port"] = server.port();
  json["grpc_address"] =
      StrCat(flags.listen.substr(0, flags.listen.rfind(':')), ":", server.port());
  json["http_port"] = server.http_port();
  json["http_address"] =
      StrCat(flags.http.substr(0, flags.http.rfind(':')), ":", server.http_port());
  return json.dump(2) + "\n";
}

// Waits for a signal or a broken store; then the end, bounded whatever clients do.
int Serve(const StopSignals& signals, ControllerServer& server) {
  while (true) {
    const std::optional<int> signal = signals.Wait(DeadlineAfter(std::chrono::milliseconds(500)));
    if (const std::optional<absl::Status> fatal = server.fatal()) {
      Fail(kExitStore, Annotate(*fatal, "the job store cannot be written; ending"));
      std::_Exit(kExitStore);  // what was acknowledged is on disk; nothing else may leave
    }
    if (signal.has_value()) {
      LogInfo("stopping", {{"signal", *signal}});
      break;
    }
  }
  signals.ExitOnNext();
  if (!server.Shutdown(DeadlineAfter(std::chrono::milliseconds(kShutdownLimitMs)))) {
    std::_Exit(kExitForced);
  }
  LogInfo("stopped");
  return 0;
}

int Run(int argc, char** argv) {
  const StopSignals signals;  // before any thread starts
  Flags flags;
  CLI::App app("The Octavo controller: jobs, placement, precision plans.", "octavo-controller");
  app.set_version_flag("--version", kVersion);
  Declare(app, &flags);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    const int code = app.exit(error);
    return code == 0 ? 0 : kExitUsage;
  }
  PosixFileSystem& fs = PosixFileSystem::Get();
  const absl::Status logging = InitLog({.component = "octavo-controller",
                                        .min_level = *ParseLogLevel(flags.log_level),
                                        .file = flags.log_file});
  if (!logging.ok()) {
    return Fail(kExitUsage, logging);
  }
  // gRPC writes to stderr by itself; as one-line events it does not interleave with ours.
  gpr_set_log_function([](gpr_log_func_args* args) {
    const LogLevel level =
        args->severity == GPR_LOG_SEVERITY_ERROR ? LogLevel::kWarning : LogLevel::kDebug;
    Log(level, "grpc", {{"text", args->message}});
  });
  ServerOptions options{.listen = flags.listen,
                        .http = flags.http,
                        .advertise_http = flags.advertise_http,
                        .version = kVersion,
                        .reflection = flags.reflection};
  if (!flags.tls.empty()) {
    absl::StatusOr<TlsMaterial> tls = LoadTls(flags.tls, fs);
    if (!tls.ok()) {
      return Fail(kExitUsage, tls.status());
    }
    options.tls = *std::move(tls);
  }
  absl::StatusOr<Authorizer> authorizer = MakeAuthorizer(flags, fs);
  if (!authorizer.ok()) {
    return Fail(kExitUsage, authorizer.status());
  }
  options.authorizer = *std::move(authorizer);
  options.core.version = kVersion;
  options.core.ended_jobs_kept = flags.ended_jobs_kept;
  options.core.worker_lease_ms = static_cast<std::int64_t>(flags.worker_lease_seconds * 1e3);
  std::random_device random;
  options.core.seed = (static_cast<std::uint64_t>(random()) << 32) ^ random();

  absl::StatusOr<std::unique_ptr<SqliteStore>> store = SqliteStore::Open(flags.data_dir, fs);
  if (!store.ok()) {
    return Fail(kExitStart, store.status());
  }
  PolicyDriver policy;
  ControllerServer server(std::move(options), store->get(), &policy, &RealClock::Get());
  const absl::Status started = server.Start();
  if (!started.ok()) {
    return Fail(kExitStart, started);
  }
  if (!flags.port_file.empty()) {
    const absl::Status written = fs.WriteFileAtomic(flags.port_file, PortFile(flags, server));
    if (!written.ok()) {
      return Fail(kExitStart, written);
    }
  }
  LogInfo("serving", {{"version", kVersion},
                      {"grpc_port", server.port()},
                      {"http_port", server.http_port()},
                      {"data_dir", flags.data_dir}});
  return Serve(signals, server);
}

}  // namespace
}  // namespace octavo

int main(int argc, char** argv) { return octavo::Run(argc, argv); }
