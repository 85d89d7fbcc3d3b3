#include "base/http_server.h"

#include <exception>
#include <utility>
#include <vector>

#include "CivetServer.h"
#include "base/check.h"
#include "base/log.h"
#include "base/status.h"
#include "base/str.h"

namespace octavo {
namespace {

// A connection holds a thread until its request has come: health checks must get through beside
// dozens of idle ones, and idle ones must go soon. Waiting threads cost address space only.
constexpr char kRequestTimeoutMillis[] = "1000";
constexpr char kThreads[] = "64";
constexpr char kConnectionQueue[] = "128";

const char* ReasonPhrase(int status) {
  switch (status) {
    case 200:
      return "OK";
    case 404:
      return "Not Found";
    case 405:
      return "Method Not Allowed";
    case 503:
      return "Service Unavailable";
    default:
      return status < 400 ? "OK" : "Error";
  }
}

void Send(mg_connection* connection, const HttpResponse& response, bool with_body) {
  mg_printf(connection,
            "HTTP/1.1 %d %s\r\nContent-Type: %s\r\nContent-Length: %zu\r\n"
            "Cache-Control: no-store\r\nConnection: close\r\n\r\n",
            response.status, ReasonPhrase(response.status), response.content_type.c_str(),
            response.body.size());
  if (with_body) {
    mg_write(connection, response.body.data(), response.body.size());
  }
}

}  // namespace

class HttpServer::Impl final : public CivetHandler {
 public:
  Impl(const std::map<std::string, Handler>& handlers, const std::vector<std::string>& options)
      : handlers_(handlers), server_(options) {
    server_.addHandler("/",
                       this);  // one entry: CivetWeb itself matches by prefix, we by exact path
  }
  ~Impl() override { server_.close(); }

  int Port() {
    const std::vector<int> ports = server_.getListeningPorts();
    return ports.empty() ? 0 : ports[0];
  }

  bool handleGet(CivetServer*, mg_connection* connection) override {
    return Answer(connection, /*with_body=*/true);
  }
  bool handleHead(CivetServer*, mg_connection* connection) override {
    return Answer(connection, /*with_body=*/false);
  }
  bool handlePost(CivetServer*, mg_connection* connection) override { return Refuse(connection); }
  bool handlePut(CivetServer*, mg_connection* connection) override { return Refuse(connection); }
  bool handleDelete(CivetServer*, mg_connection* connection) override { return Refuse(connection); }
  bool handlePatch(CivetServer*, mg_connection* connection) override { return Refuse(connection); }
  bool handleOptions(CivetServer*, mg_connection* connection) override {
    return Refuse(connection);
  }

 private:
  bool Answer(mg_connection* connection, bool with_body) {
    const mg_request_info* info = mg_get_request_info(connection);
    const HttpRequest request = {.path = info->local_uri == nullptr ? "" : info->local_uri,
                                 .query = info->query_string == nullptr ? "" : info->query_string};
    const auto found = handlers_.find(request.path);
    if (found == handlers_.end()) {
      std::string known;
      for (const auto& [path, handler] : handlers_) {
        StrAppend(&known, "  ", path, "\n");
      }
      Send(connection,
           {.status = 404, .body = StrCat("no such page: ", request.path, "\nknown:\n", known)},
           with_body);
      return true;
    }
    Send(connection, found->second(request), with_body);
    return true;
  }

  static bool Refuse(mg_connection* connection) {
    Send(connection, {.status = 405, .body = "only GET and HEAD are served here\n"}, true);
    return true;
  }

  const std::map<std::string, Handler>& handlers_;
  CivetServer server_;
};

HttpServer::HttpServer() = default;
HttpServer::~HttpServer() { Stop(); }

void HttpServer::Handle(const std::string& path, Handler handler) {
  OCTAVO_CHECK(impl_ == nullptr, "Handle(%s) after Start", path.c_str());
  OCTAVO_CHECK(StartsWith(path, "/"), "path %s must begin with '/'", path.c_str());
  handlers_[path] = std::move(handler);
}

absl::Status HttpServer::Start(const std::string& address) {
  OCTAVO_CHECK(impl_ == nullptr, "Start called twice");
  const std::size_t colon = address.rfind(':');
  const auto port = colon == std::string::npos
                        ? std::nullopt
                        : ParseInt64(std::string_view(address).substr(colon + 1));
  if (!port.has_value() || *port < 0 || *port > 65535) {
    return InvalidArgumentError(
        StrCat("HTTP address \"", address, "\": want host:port or :port, e.g. 127.0.0.1:9400"));
  }
  const std::string host = address.substr(0, colon);
  const std::string listening = host.empty() ? StrCat(*port) : StrCat(host, ":", *port);
  const std::vector<std::string> options = {"listening_ports",    listening,
                                            "num_threads",        kThreads,
                                            "request_timeout_ms", kRequestTimeoutMillis,
                                            "connection_queue",   kConnectionQueue,
                                            "enable_keep_alive",  "no"};
  try {
    impl_ = std::make_unique<Impl>(handlers_, options);
  } catch (const CivetException& error) {
    return UnavailableError(StrCat("listening for HTTP on ", address, ": ", error.what(),
                                   " (is the port in use, or the host name not local?)"));
  }
  port_ = impl_->Port();
  return absl::OkStatus();
}

void HttpServer::Stop() { impl_.reset(); }

}  // namespace octavo
