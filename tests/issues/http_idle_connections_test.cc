// /healthz starved: each of the server's four threads waited two seconds for the request of an idle
// connection, so that a few dozen of them kept health checks out for minutes.
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <vector>

#include "base/http_server.h"
#include "base/status.h"
#include "tests/support/http_get.h"

namespace octavo {
namespace {

class IdleConnections {
 public:
  IdleConnections(int port, int count) {
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<std::uint16_t>(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    for (int i = 0; i < count; ++i) {
      sockets_.push_back(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
      EXPECT_EQ(::connect(sockets_.back(), reinterpret_cast<sockaddr*>(&address), sizeof(address)),
                0);
    }
  }
  ~IdleConnections() {
    for (const int fd : sockets_) {
      ::close(fd);
    }
  }

 private:
  std::vector<int> sockets_;
};

double SecondsToHealth(int port) {
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_NE(HttpGetReply(port, "/healthz").find("200 OK"), std::string::npos);
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

TEST(HttpIdleConnections, DoNotDelayAHealthCheck) {
  HttpServer server;
  server.Handle("/healthz", [](const HttpRequest&) { return HttpResponse{.body = "ok\n"}; });
  const absl::Status started = server.Start("127.0.0.1:0");
  ASSERT_TRUE(started.ok()) << ToString(started);
  {
    const IdleConnections idle(server.port(), 40);
    // Four threads of two seconds needed 20 s; now a thread is free. The rest is for a busy
    // machine.
    EXPECT_LT(SecondsToHealth(server.port()), 5);
  }
  // More than there are threads: the first go after a second.
  const IdleConnections idle(server.port(), 120);
  EXPECT_LT(SecondsToHealth(server.port()), 9);
}

}  // namespace
}  // namespace octavo
