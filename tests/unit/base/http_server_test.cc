#include "base/http_server.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/status.h"
#include "base/str.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace octavo {
namespace {

using ::testing::HasSubstr;

std::string Request(int port, const std::string& request) {
  const int fd = ::socket(AF_INET, SOCK_STREAM, 0);
  const timeval limit = {.tv_sec = 10, .tv_usec = 0};
  ::setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<std::uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  std::string reply;
  if (::connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0 &&
      ::send(fd, request.data(), request.size(), 0) == std::ssize(request)) {
    char chunk[4096];
    ssize_t count;
    while ((count = ::recv(fd, chunk, sizeof(chunk), 0)) > 0) {
      reply.append(chunk, static_cast<std::size_t>(count));
    }
  }
  ::close(fd);
  return reply;
}

std::string Get(int port, const std::string& path) {
  return Request(port, StrCat("GET ", path, " HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"));
}

TEST(HttpServer, ServesHandlersByExactPathOnAFreePort) {
  HttpServer server;
  server.Handle("/healthz", [](const HttpRequest&) { return HttpResponse{.body = "ok\n"}; });
  server.Handle("/readyz", [](const HttpRequest& request) {
    return HttpResponse{.status = 503, .content_type = "application/json", .body = request.query};
  });
  ASSERT_TRUE(server.Start("127.0.0.1:0").ok());
  ASSERT_GT(server.port(), 0);
  const std::string health = Get(server.port(), "/healthz");
  EXPECT_THAT(health, HasSubstr("HTTP/1.1 200 OK"));
  EXPECT_TRUE(EndsWith(health, "\r\n\r\nok\n")) << health;
  const std::string ready = Get(server.port(), "/readyz?verbose=1");
  EXPECT_THAT(ready, HasSubstr("503 Service Unavailable"));
  EXPECT_THAT(ready, HasSubstr("Content-Type: application/json"));
  EXPECT_TRUE(EndsWith(ready, "verbose=1"));
  EXPECT_THAT(Get(server.port(), "/healthz/x"), HasSubstr("404 Not Found"));
  EXPECT_THAT(
      Request(server.port(), "POST /healthz HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n"),
      HasSubstr("405"));
  const int port = server.port();
  server.Stop();
  server.Stop();
  EXPECT_EQ(Get(port, "/healthz"), "");
}

TEST(HttpServer, AddressErrorsSayWhatIsValid) {
  HttpServer server;
  for (const char* bad : {"", "localhost", "host:", "host:x", "host:70000"}) {
    const absl::Status status = server.Start(bad);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << bad;
    EXPECT_THAT(Message(status), HasSubstr("127.0.0.1:9400"));
  }
  HttpServer first, second;
  ASSERT_TRUE(first.Start("127.0.0.1:0").ok());
  const absl::Status taken = second.Start(StrCat("127.0.0.1:", first.port()));
  EXPECT_EQ(taken.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(Message(taken), HasSubstr(StrCat(first.port())));
}

}  // namespace
}  // namespace octavo
