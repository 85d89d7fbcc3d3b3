#include "controller/api/server.h"

#include <condition_variable>
#include <future>
#include <utility>

#include "base/log.h"
#include "base/status.h"
#include "base/str.h"
#include "grpcpp/ext/proto_server_reflection_plugin.h"
#include "grpcpp/health_check_service_interface.h"
#include "proto/limits.h"

namespace octavo {
namespace {

std::shared_ptr<grpc::ServerCredentials> Credentials(const std::optional<TlsMaterial>& tls) {
  if (!tls.has_value()) {
    return grpc::InsecureServerCredentials();
  }
  grpc::SslServerCredentialsOptions options(
      GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
  options.pem_root_certs = tls->ca_pem;
  options.pem_key_cert_pairs.push_back({tls->key_pem, tls->cert_pem});
  return grpc::SslServerCredentials(options);
}

std::string HostOf(const std::string& address) {
  const std::size_t colon = address.rfind(':');
  return colon == std::string::npos ? address : address.substr(0, colon);
}

// JSON strings here are host:port texts; everything that would need escaping is left out.
std::string JsonSafe(const std::string& text) {
  std::string safe;
  for (const char c : text) {
    if (c > ' ' && c != '"' && c != '\\' && c < 0x7f) {
      safe += c;
    }
  }
  return safe;
}

}  // namespace

ControllerServer::ControllerServer(ServerOptions options, JobStore* store, PolicyHook* policy,
                                   const Clock* clock)
    : options_(std::move(options)),
      clock_(clock),
      metrics_(options_.version),
      core_(options_.core, store, policy),
      store_(store),
      mailbox_(options_.mailbox, &core_, store, clock, this),
      rpc_{.mailbox = &mailbox_, .authorizer = &options_.authorizer, .metrics = &metrics_},
      watches_(rpc_),
      logs_(rpc_),
      job_service_(rpc_, &watches_, &logs_, options_.version),
      worker_service_(rpc_) {}

ControllerServer::~ControllerServer() {
  Shutdown(DeadlineAfter(std::chrono::milliseconds(kShutdownLimitMs)));
}

absl::Status ControllerServer::Start() {
  RETURN_IF_ERROR(Annotate(core_.Recover({clock_->MonotonicMicros(), clock_->UnixMicros()}),
                           "reading the job store"));
  Observe(core_.TakeCensus());
  RETURN_IF_ERROR(StartGrpc());
  mailbox_.Start();
  RETURN_IF_ERROR(StartHttp());
  serving_.store(true);
  return absl::OkStatus();
}

absl::Status ControllerServer::StartGrpc() {
  // Process-wide switches that must come before the builder.
  grpc::EnableDefaultHealthCheckService(true);
  if (options_.reflection) {
    grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  }
  grpc::ServerBuilder builder;
  builder.AddListeningPort(options_.listen, Credentials(options_.tls), &port_);
  builder.RegisterService(&job_service_);
  builder.RegisterService(&worker_service_);
  // One port for both services: the limit is the internal one; specs are bounded by kMaxSpecBytes.
  builder.SetMaxReceiveMessageSize(static_cast<int>(kMaxInternalMessageBytes));
  builder.SetMaxSendMessageSize(static_cast<int>(kMaxInternalMessageBytes));
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);  // a second controller must fail to bind
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 20'000);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  server_ = builder.BuildAndStart();
  if (server_ == nullptr || port_ == 0) {
    server_.reset();
    return UnavailableError(StrCat(
        "--listen ", options_.listen,
        ": cannot listen there; end what has the port (another controller?), give an address "
        "of this host, or port 0 for a free one"));
  }
  return absl::OkStatus();
}

absl::Status ControllerServer::StartHttp() {
  if (options_.http.empty()) {
    return absl::OkStatus();
  }
  http_.Handle("/metrics", [this](const HttpRequest&) {
    metrics_.ObserveMailbox(mailbox_.size(), mailbox_.refused());
    metrics_.SetWatchStreams(watches_.streams());
    return HttpResponse{.content_type = "text/plain; version=0.0.4; charset=utf-8",
                        .body = metrics_.Text()};
  });
  http_.Handle("/healthz", [](const HttpRequest&) { return HttpResponse{.body = "ok\n"}; });
  http_.Handle("/readyz", [this](const HttpRequest&) {
    const std::string reason = Readiness();
    return reason.empty() ? HttpResponse{.body = "ok\n"}
                          : HttpResponse{.status = 503, .body = reason + "\n"};
  });
  http_.Handle("/sd", [this](const HttpRequest&) {
    return HttpResponse{.content_type = "application/json", .body = ServiceDiscovery()};
  });
  const absl::Status http = http_.Start(options_.http);
  return http.ok() ? http
                   : MakeStatus(http.code(),
                                StrCat("--http ", options_.http, ": ", Message(http),
                                       "; end what listens there, or give another address (port 0 "
                                       "takes a free one)"));
}

std::string ControllerServer::Readiness() const {
  if (!serving_.load()) {
    return "the controller is starting or stopping";
  }
  if (!mailbox_.store_healthy()) {
    return "the job store cannot be written";
  }
  return {};
}

std::string ControllerServer::ServiceDiscovery() const {
  std::vector<std::string> targets;
  const std::string host =
      options_.advertise_http.empty() ? HostOf(options_.http) : options_.advertise_http;
  targets.push_back(StrCat(host, ":", http_.port()));
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const Census::WorkerFacts& worker : census_.workers) {
      if (!worker.http_address.empty() && !worker.lost) {
        targets.push_back(worker.http_address);
      }
    }
  }
  std::string json = "[";
  for (const std::string& target : targets) {
    StrAppend(&json, json.size() == 1 ? "" : ",", "{\"targets\":[\"", JsonSafe(target), "\"]}");
  }
  return json + "]\n";
}

void ControllerServer::Deliver(Effects effects) {
  for (Effect& effect : effects) {
    if (auto* send = std::get_if<SendToWorker>(&effect)) {
      worker_service_.Send(send->session, std::move(send->message));
    } else if (const auto* close = std::get_if<CloseWorkerSession>(&effect)) {
      worker_service_.Close(close->session, close->reason);
    } else if (const auto* publish = std::get_if<PublishEvent>(&effect)) {
      watches_.Publish(publish->job_uid, publish->event);
    } else if (const auto* log = std::get_if<LogAnswer>(&effect)) {
      logs_.Answer(log->reply);
    } else if (const auto* note = std::get_if<LogNote>(&effect)) {
      Log(note->event == "job_warning" ? LogLevel::kWarning : LogLevel::kInfo, note->event,
          {{"train_job", note->train_job}, {"text", note->text}});
    } else {
      metrics_.Observe(effect);
    }
  }
}

void ControllerServer::Observe(const Census& census) {
  metrics_.Observe(census);
  watches_.Sweep(clock_->MonotonicMicros());
  logs_.Sweep(clock_->MonotonicMicros());
  std::lock_guard<std::mutex> lock(mutex_);
  census_ = census;
}

void ControllerServer::StoreBroken(const absl::Status& status) {
  LogError("store_broken", {{"error", ToString(status)}});
  std::lock_guard<std::mutex> lock(mutex_);
  if (!fatal_.has_value()) {
    fatal_ = status;
  }
}

std::optional<absl::Status> ControllerServer::fatal() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return fatal_;
}

bool ControllerServer::Shutdown(SteadyTime deadline) {
  if (std::exchange(shut_down_, true)) {
    return true;
  }
  serving_.store(false);
  bool clean = true;
  if (server_ != nullptr) {
    if (grpc::HealthCheckServiceInterface* health = server_->GetHealthCheckService()) {
      health->SetServingStatus(false);
    }
    watches_.CloseAll();
    logs_.CloseAll();
    worker_service_.CloseAll();
    // Half of the time for calls to end by themselves, then they are cancelled.
    const auto now = std::chrono::steady_clock::now();
    const auto grace = deadline > now ? (deadline - now) / 2 : SteadyTime::duration::zero();
    auto done = std::make_shared<std::promise<void>>();
    std::future<void> ended = done->get_future();
    shutdown_thread_ = std::jthread([server = server_.get(), grace, done] {
      server->Shutdown(std::chrono::system_clock::now() +
                       std::chrono::duration_cast<std::chrono::system_clock::duration>(grace));
      done->set_value();
    });
    clean = ended.wait_until(deadline) == std::future_status::ready;
    if (!clean) {
      LogError("shutdown_overdue", {{"waited_for", "gRPC calls that do not end"},
                                    {"sessions", worker_service_.sessions()},
                                    {"watches", watches_.streams()}});
      return false;  // the caller ends the process; a join here would wait for ever
    }
    shutdown_thread_.join();
  }
  mailbox_.Stop();
  http_.Stop();
  server_.reset();
  return clean;
}

}  // namespace octavo
