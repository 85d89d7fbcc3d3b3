// Who may include whom. A single include root means that a header-only misuse compiles and links;
// only a reader of #include lines can see it. Rules: layering.txt.
#include <gtest/gtest.h>

#include <fstream>
#include <functional>
#include <map>
#include <regex>
#include <set>
#include <sstream>

#include "tests/tidy/source_tree.h"

namespace octavo::tidy {
namespace {

struct Rule {
  std::string prefix, suffix;
  std::set<std::string> allowed;
};

std::vector<Rule> ReadRules() {
  std::vector<Rule> rules;
  std::ifstream in(std::string(OCTAVO_SOURCE_DIR) + "/tests/tidy/layering.txt");
  for (std::string line; std::getline(in, line);) {
    if (line.empty() || line[0] == '#') {
      continue;
    }
    const auto colon = line.find(" : ");
    if (colon == std::string::npos) {
      ADD_FAILURE() << "layering.txt: no ' : ' in: " << line;
      continue;
    }
    Rule rule;
    std::istringstream(line.substr(0, colon)) >> rule.prefix;
    const auto star = rule.prefix.find('*');
    if (star != std::string::npos) {
      rule.suffix = rule.prefix.substr(star + 1);
      rule.prefix.resize(star);
    }
    std::istringstream words(line.substr(colon + 3));
    for (std::string w; words >> w;) {
      rule.allowed.insert(w);
    }
    rules.push_back(rule);
  }
  return rules;
}

bool EndsWith(const std::string& s, const std::string& suffix) {
  return s.size() >= suffix.size() && s.compare(s.size() - suffix.size(), suffix.size(), suffix) == 0;
}

const Rule* Match(const std::vector<Rule>& rules, const std::string& path) {
  const Rule* found = nullptr;
  for (const Rule& rule : rules) {
    if (path.rfind(rule.prefix, 0) == 0 && EndsWith(path, rule.suffix)) {
      found = &rule;
    }
  }
  return found;
}

// The library (or "ours") behind an include.
std::string Classify(const std::string& include, bool angle) {
  static const std::vector<std::pair<std::regex, std::string>> kTable = {
      {std::regex("^octavo/.*\\.grpc\\.pb\\.h$"), "generated_grpc"},
      {std::regex("^octavo/.*\\.pb\\.h$"), "generated"},
      {std::regex("^absl/.*"), "absl"},
      {std::regex("^(grpc|grpcpp|grpc\\+\\+)/.*"), "grpc"},
      {std::regex("^google/protobuf/.*"), "protobuf"},
      {std::regex("^spdlog/.*"), "spdlog"},
      {std::regex("^(CivetServer|civetweb)\\.h$"), "civetweb"},
      {std::regex("^openssl/.*"), "openssl"},
      {std::regex("^yaml-cpp/.*"), "yaml"},
      {std::regex("^nlohmann/.*"), "nlohmann"},
      {std::regex("^CLI/.*"), "cli11"},
      {std::regex("^sqlite3\\.h$"), "sqlite"},
      {std::regex("^prometheus/.*"), "prometheus"},
      {std::regex("^gloo/.*"), "gloo"},
      {std::regex("^nccl\\.h$"), "nccl"},
      {std::regex("^(cuda|cub|cudnn|nvtx3|cooperative_groups|nv/).*"), "cuda"},
      {std::regex("^cblas.*\\.h$"), "cblas"},
      {std::regex("^hwy/.*"), "highway"},
      {std::regex("^sentencepiece.*"), "sentencepiece"},
      {std::regex("^(gtest|gmock)/.*"), "gtest"},
      {std::regex("^benchmark/.*"), "benchmark"},
      {std::regex("^(thread|mutex|shared_mutex|condition_variable|chrono|fstream|filesystem|future|stop_token)$"),
       "os"},
      {std::regex("^(sys|netinet|arpa|linux)/.*"), "os"},
      {std::regex("^(unistd|fcntl|poll|signal|dlfcn|pthread|netdb|ifaddrs|pwd|termios|sched|spawn|dirent|time)\\.h$"),
       "os"},
  };
  for (const auto& [pattern, name] : kTable) {
    if (std::regex_match(include, pattern)) {
      return name;
    }
  }
  return angle ? "std" : "ours";
}

std::string Folder(const std::string& path) {
  const auto slash = path.rfind('/');
  return slash == std::string::npos ? path : path.substr(0, slash);
}

// The rule folder that a path belongs to, for cycles: two levels under worker, controller, proto.
std::string Room(const std::string& path) {
  const auto first = path.find('/');
  const std::string top = path.substr(0, first);
  if (top != "worker" && top != "controller" && top != "proto") {
    return top;
  }
  const auto second = path.find('/', first + 1);
  return second == std::string::npos ? path : path.substr(0, second);
}

bool Allowed(const Rule& rule, const std::string& file, const std::string& include, bool angle) {
  if (rule.allowed.count("*")) {
    return true;
  }
  const std::string kind = Classify(include, angle);
  if (kind != "ours") {
    return rule.allowed.count(kind) > 0;
  }
  if (Folder(include) == Folder(file) || include.rfind(rule.prefix, 0) == 0) {
    return true;
  }
  for (const std::string& allowed : rule.allowed) {
    if (include == allowed || include.rfind(allowed + "/", 0) == 0) {
      return true;
    }
  }
  return false;
}

const std::regex kInclude(R"(^\s*#\s*include\s*([<"])([^>"]+)[>"])");

TEST(Layering, EveryIncludeIsAllowedByTheTable) {
  const std::vector<Rule> rules = ReadRules();
  int includes = 0;
  for (const SourceFile& file : ReadSourceTree()) {
    const Rule* rule = Match(rules, file.path);
    if (rule == nullptr) {
      if (EndsWith(file.path, ".proto")) {
        continue;
      }
      ADD_FAILURE() << file.path << ": no rule in tests/tidy/layering.txt; add the folder's row";
      continue;
    }
    for (std::size_t i = 0; i < file.lines.size(); ++i) {
      std::smatch m;
      if (!std::regex_search(file.lines[i], m, kInclude)) {
        continue;
      }
      ++includes;
      if (!Allowed(*rule, file.path, m[2], m[1] == "<")) {
        std::string set;
        for (const std::string& a : rule->allowed) {
          set += " " + a;
        }
        ADD_FAILURE() << file.path << ":" << i + 1 << ": includes " << m[2] << " ("
                      << Classify(m[2], m[1] == "<") << "), but '" << rule->prefix
                      << rule->suffix << "' may include only:" << set;
      }
    }
  }
  EXPECT_GT(includes, 100) << "the test saw no includes: is OCTAVO_SOURCE_DIR right?";
}

TEST(Layering, RoomsHaveNoCycles) {
  std::map<std::string, std::map<std::string, std::string>> edges;  // room → room → example
  for (const SourceFile& file : ReadSourceTree()) {
    const std::string from = Room(file.path);
    if (from == "tests" || from == "bench" || EndsWith(file.path, "main.cc")) {
      continue;
    }
    for (std::size_t i = 0; i < file.lines.size(); ++i) {
      std::smatch m;
      if (std::regex_search(file.lines[i], m, kInclude) && m[1] == "\"" &&
          Classify(m[2], false) == "ours") {
        const std::string include = m[2];
        // Plain values that sit below their folder (config.h is data shared with layers).
        if (include == "worker/model/config.h" || include == "worker/comm/communicator.h" ||
            include == "worker/comm/nccl.h") {
          continue;
        }
        const std::string to = Room(include);
        if (to != from) {
          edges[from].emplace(to, file.path + ":" + std::to_string(i + 1));
        }
      }
    }
  }
  // Depth-first search; a grey node reached again closes a cycle.
  std::map<std::string, int> colour;
  std::vector<std::string> stack;
  std::function<void(const std::string&)> visit = [&](const std::string& room) {
    colour[room] = 1;
    stack.push_back(room);
    for (const auto& [to, where] : edges[room]) {
      if (colour[to] == 1) {
        std::string cycle;
        for (const std::string& s : stack) {
          cycle += s + " → ";
        }
        ADD_FAILURE() << "include cycle: " << cycle << to << " (closed at " << where << ")";
      } else if (colour[to] == 0) {
        visit(to);
      }
    }
    stack.pop_back();
    colour[room] = 2;
  };
  const auto copy = edges;
  for (const auto& [room, unused] : copy) {
    if (colour[room] == 0) {
      visit(room);
    }
  }
}

}  // namespace
}  // namespace octavo::tidy
