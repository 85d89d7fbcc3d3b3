// The small HTTP endpoint of a daemon: GET handlers by exact path, on CivetWeb.
//
//   HttpServer server;
//   server.Handle("/healthz", [] { return HttpResponse{.body = "ok\n"}; });
//   RETURN_IF_ERROR(server.Start("127.0.0.1:0"));      // port() tells the bound one
//
// Why not prometheus-cpp's Exposer: it serves /metrics only, and adds series with foreign units.
// Handlers run on the server's threads, possibly several at once, must be thread-safe and must not
// block: read a snapshot and return. GET and HEAD only (405 otherwise), unknown paths are 404.
// A process that loads cuBLASLt at start-up cannot host this (94 KB of static TLS); daemons do not.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>

#include "absl/status/status.h"

namespace octavo {

struct HttpRequest {
  std::string path;
  std::string query;  // after '?', undecoded
};

struct HttpResponse {
  int status = 200;
  std::string content_type = "text/plain; charset=utf-8";
  std::string body;
};

class HttpServer {
 public:
  using Handler = std::function<HttpResponse(const HttpRequest&)>;

  HttpServer();
  ~HttpServer();  // stops; bounded by kRequestTimeout of a running request
  HttpServer(const HttpServer&) = delete;
  HttpServer& operator=(const HttpServer&) = delete;

  // Before Start. `path` is exact, e.g. "/metrics".
  void Handle(const std::string& path, Handler handler);

  // `address` is "host:port" or ":port"; port 0 picks a free one. Error: UNAVAILABLE with the
  // address when it cannot be bound, INVALID_ARGUMENT when it does not parse.
  absl::Status Start(const std::string& address);

  // Waits for running requests, at most a few seconds (the request time limit). Idempotent.
  void Stop();

  int port() const { return port_; }  // 0 before Start

 private:
  class Impl;
  std::map<std::string, Handler> handlers_;  // constant after Start
  std::unique_ptr<Impl> impl_;
  int port_ = 0;
};

}  // namespace octavo
