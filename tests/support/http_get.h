// A blocking HTTP GET to this host for tests: the whole reply with headers, empty when nobody
// answers.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <string>

#include "base/str.h"

namespace octavo {

inline std::string HttpGetReply(int port, const std::string& path) {
  const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const timeval limit = {.tv_sec = 10, .tv_usec = 0};
  ::setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<std::uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const std::string request =
      StrCat("GET ", path, " HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
  std::string reply;
  if (::connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0 &&
      ::send(fd, request.data(), request.size(), MSG_NOSIGNAL) == std::ssize(request)) {
    char chunk[4096];
    ssize_t count;
    while ((count = ::recv(fd, chunk, sizeof(chunk), 0)) > 0) {
      reply.append(chunk, static_cast<std::size_t>(count));
    }
  }
  ::close(fd);
  return reply;
}

}  // namespace octavo
