// Puts chunks of several ranks' logs together into whole lines: chunks end anywhere, lines must not
// mix.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <utility>

namespace octavo {

class LogLines {
 public:
  struct Source {
    int attempt = 0;
    int rank = 0;
    friend bool operator<(const Source& a, const Source& b) {
      return std::pair(a.attempt, a.rank) < std::pair(b.attempt, b.rank);
    }
  };
  // Gets each line without its newline.
  using Sink = std::function<void(const Source&, std::string_view line)>;

  explicit LogLines(Sink sink) : sink_(std::move(sink)) {}

  void Add(const Source& source, std::string_view text);
  // Gives what is left, line by line, although no newline followed.
  void Flush();

 private:
  const Sink sink_;
  std::map<Source, std::string> open_;
};

}  // namespace octavo
