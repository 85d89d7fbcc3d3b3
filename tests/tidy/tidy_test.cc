// The few rules a compiler cannot see. Each message has file:line and the better way.
#include <gtest/gtest.h>

#include <fstream>
#include <regex>
#include <set>
#include <sstream>

#include "tests/tidy/source_tree.h"

namespace octavo::tidy {
namespace {

bool StartsWith(const std::string& s, const char* prefix) { return s.rfind(prefix, 0) == 0; }

bool IsLibraryCode(const std::string& path) {
  return !StartsWith(path, "tests/") && !StartsWith(path, "bench/") &&
         (path.find(".cc") != std::string::npos || path.find(".h") != std::string::npos ||
          path.find(".cu") != std::string::npos);
}

// The line without string literals and without a trailing comment.
std::string Code(const std::string& line) {
  std::string out;
  bool in_string = false;
  for (std::size_t i = 0; i < line.size(); ++i) {
    const char c = line[i];
    if (in_string) {
      if (c == '\\') {
        ++i;
      } else if (c == '"') {
        in_string = false;
      }
      continue;
    }
    if (c == '"') {
      in_string = true;
      continue;
    }
    if (c == '/' && i + 1 < line.size() && line[i + 1] == '/') {
      break;
    }
    out += c;
  }
  return out;
}

void ForbidPattern(const std::regex& pattern, const std::set<std::string>& exempt_prefixes,
                   bool library_only, const std::string& better) {
  for (const SourceFile& file : ReadSourceTree()) {
    if (library_only && !IsLibraryCode(file.path)) {
      continue;
    }
    bool exempt = StartsWith(file.path, "tests/tidy/");
    for (const std::string& prefix : exempt_prefixes) {
      exempt = exempt || StartsWith(file.path, prefix.c_str());
    }
    if (exempt) {
      continue;
    }
    for (std::size_t i = 0; i < file.lines.size(); ++i) {
      const std::string code = Code(file.lines[i]);
      if (std::regex_search(code, pattern)) {
        ADD_FAILURE() << file.path << ":" << i + 1 << ": " << code << "\n  better: " << better;
      }
    }
  }
}

TEST(Tidy, NothingSleepsAsSynchronisation) {
  ForbidPattern(std::regex(R"(\b(sleep_for|sleep_until|usleep|nanosleep|sleep)\s*\()"), {"kernels/cuda/", "worker/comm/nccl"},
                false, "wait for the event with a deadline (condition variable, poll, BoundedQueue::Pop)");
}

TEST(Tidy, LibraryCodeReadsTheClockThroughClock) {
  ForbidPattern(std::regex(R"(\b(system_clock|gettimeofday|clock_gettime|std::time)\b)"),
                // gRPC takes its deadlines as system_clock time points.
                {"base/", "bench/", "cli/client.cc", "worker/agent/rank_link.cc",
                 "worker/agent/session.cc", "controller/api/",
                 // Processor time of the sgemm probe, which no Clock gives.
                 "kernels/cpu/blas.cc"},
                true, "take `now` as an argument or use base/clock.h");
}

TEST(Tidy, NoExceptionIsSwallowed) {
  ForbidPattern(std::regex(R"(catch\s*\(\s*\.\.\.\s*\))"), {}, true,
                "catch the library's exception type and turn it into a Status with what was attempted");
}

TEST(Tidy, ScalesHaveADirection) {
  ForbidPattern(std::regex(R"((^|[^\w.>])(float|double|auto|float\s*\*|const float\s*\*)\s*&?\s*scale(s)?\s*([;=,)\[]|$))"), {}, false,
                "say quant_scale (multiplies before the cast) or dequant_scale (multiplies after)");
}

TEST(Tidy, NoFileIsABlob) {
  for (const auto& [path, size] : ListAllFiles()) {
    EXPECT_LE(size, 256u * 1024) << path << ": over 256 KiB; generate it or fetch it by package";
  }
}

TEST(Tidy, NoUnfinishedMarks) {
  for (const SourceFile& file : ReadSourceTree()) {
    if (StartsWith(file.path, "tests/tidy/")) {
      continue;
    }
    for (std::size_t i = 0; i < file.lines.size(); ++i) {
      static const std::regex kMarks(R"(\b(TODO|FIXME|XXX)\b)");
      EXPECT_FALSE(std::regex_search(file.lines[i], kMarks))
          << file.path << ":" << i + 1 << ": finish it or file an issue";
    }
  }
}

TEST(Tidy, HeadersAreGuardedAndHaveAnEssay) {
  for (const SourceFile& file : ReadSourceTree()) {
    if (file.path.size() < 2 || file.path.compare(file.path.size() - 2, 2, ".h") != 0) {
      continue;
    }
    bool guarded = false;
    for (const std::string& line : file.lines) {
      guarded = guarded || StartsWith(line, "#pragma once") || StartsWith(line, "#ifndef");
    }
    EXPECT_TRUE(guarded) << file.path << ": no #pragma once";
    EXPECT_TRUE(!file.lines.empty() && StartsWith(file.lines[0], "//"))
        << file.path << ":1: a header opens with what it is for";
  }
}

}  // namespace
}  // namespace octavo::tidy
