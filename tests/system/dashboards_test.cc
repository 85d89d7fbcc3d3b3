// Every expression of the boards and recording rules returns data from a real Prometheus that
// scraped a real run with faults; of alerts, what stands before the comparison.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <regex>
#include <set>

#include "tests/system/temp_cluster.h"

namespace octavo {
namespace {

namespace fs = std::filesystem;

// Expressions that are rightly empty in this run, with the reason.
const std::map<std::string, std::string>& MayBeEmpty() {
  static const std::map<std::string, std::string> list = {
      {"octavo_pending_jobs", "no job waits"},
      {"octavo_telemetry_dropped_total", "nothing is dropped in a small run"},
      {"octavo_job_attempts_total", "no attempt has ended when the run is looked at"},
      {"octavo_train_validation_loss", "validation runs at its own interval"},
      {"absent(", "absent() is empty while the controller answers: promtool shows the firing"},
      {"octavo_train_job_restarts_total", "only restarts count"},
  };
  return list;
}

std::string Encoded(const std::string& text) {
  static const char kHex[] = "0123456789ABCDEF";
  std::string out;
  for (const unsigned char c : text) {
    if (std::isalnum(c) != 0) {
      out += static_cast<char>(c);
    } else {
      out += '%';
      out += kHex[c >> 4];
      out += kHex[c & 15];
    }
  }
  return out;
}

std::string Replaced(std::string text, const std::string& from, const std::string& to) {
  for (std::size_t at = 0; (at = text.find(from, at)) != std::string::npos; at += to.size()) {
    text.replace(at, from.size(), to);
  }
  return text;
}

std::string ReadText(const fs::path& path) {
  std::ifstream in(path);
  return {std::istreambuf_iterator<char>(in), {}};
}

// where → expression.
std::vector<std::pair<std::string, std::string>> AllExpressions() {
  const fs::path root = fs::path(OCTAVO_SOURCE_DIR) / "dashboards";
  std::vector<std::pair<std::string, std::string>> all;
  for (const auto& entry : fs::directory_iterator(root / "grafana")) {
    const auto board = nlohmann::json::parse(ReadText(entry.path()));
    for (const auto& panel : board["panels"]) {
      for (const auto& target : panel["targets"]) {
        all.emplace_back(entry.path().filename().string() + ": " +
                             panel["title"].get<std::string>(),
                         target["expr"].get<std::string>());
      }
    }
  }
  static const std::regex kExpr(R"(\n\s+expr: ([^\n]+))");
  for (const char* name : {"recording.yml", "alerts.yml"}) {
    const std::string text = ReadText(root / "rules" / name);
    for (std::sregex_iterator m(text.begin(), text.end(), kExpr), none; m != none; ++m) {
      std::string expression = (*m)[1];
      if (std::string(name) == "alerts.yml") {  // the operand before the last comparison
        const std::size_t comparison = expression.find_last_of("<>");
        expression = expression.substr(0, comparison);
        if (!expression.empty() && (expression.back() == '=' || expression.back() == '!')) {
          expression.pop_back();
        }
      }
      all.emplace_back(name, expression);
    }
  }
  for (auto& [where, expression] : all) {
    for (const auto& [from, to] : {std::pair<std::string, std::string>{"$train_job", ".*"},
                                   {"$layer", ".*"},
                                   {"$__rate_interval", "20s"},
                                   {"$__interval", "20s"},
                                   {"[2m]", "[20s]"},
                                   {"[5m]", "[20s]"},
                                   {"[10m]", "[1m]"},
                                   {"[30m]", "[1m]"},
                                   {"[1h]", "[1m]"}}) {
      expression = Replaced(expression, from, to);
    }
  }
  return all;
}

TEST(Dashboards, EveryExpressionReturnsDataFromARealRunWithFaults) {
  TempCluster cluster({.workers = 1,
                       .slots = 2,
                       .worker_flags = {"--rank-binary",
                                        std::string(OCTAVO_BIN_DIR) + "/octavo-rank-test"}});
  const std::string config = cluster.dir() + "/prometheus.yml";
  std::ofstream(config) << "global: {scrape_interval: 1s, evaluation_interval: 1s}\nrule_files: ["
                        << OCTAVO_SOURCE_DIR << "/dashboards/rules/recording.yml, "
                        << OCTAVO_SOURCE_DIR
                        << "/dashboards/rules/alerts.yml]\nscrape_configs:\n- job_name: octavo\n"
                           "  http_sd_configs:\n  - url: http://"
                        << cluster.http_address() << "/sd\n    refresh_interval: 1s\n";
  const std::string address = "127.0.0.1:" + std::to_string(20000 + (getpid() + 7) % 20000);
  auto prometheus = Subprocess::Spawn(
      {.argv = {"prometheus", "--config.file=" + config,
                "--storage.tsdb.path=" + cluster.dir() + "/tsdb",
                "--web.listen-address=" + address, "--log.level=warn"},
       .stdout_path = cluster.dir() + "/prometheus.log",
       .stderr_path = cluster.dir() + "/prometheus.log"});
  ASSERT_TRUE(prometheus.ok()) << prometheus.status().ToString();
  // Delayed scaling meets an input that grew: saturation, a fallback; and one infinite element.
  cluster.Submit(cluster.Spec(
      {.name = "faulty",
       .steps = 100000,
       .recipe = "fp8_delayed",
       .extra = "labels: {inject.0: \"scale 1 attn_qkv 100 160 20\", inject.1: \"inf 1 attn_out 200 "
                "200 1\", inject.2: \"inf 0 attn_qkv 220 220 1\"}\n",
       .precision_extra = "  protect: 0\n  overrides:\n  - {layers: 2, recipe: {kind: fp8_flow}}\n"
                          "  policy: {grace_steps: 10, hold_steps: 10, healthy_snapshots: 2}\n"}));
  cluster.WaitFor("faulty", Reaches(240), "step 240", 200);

  const auto query = [&](const std::string& expression) -> nlohmann::json {
    const std::string body = HttpGet(address, "/api/v1/query?query=" + Encoded(expression));
    const auto start = body.find('{');
    const auto stop = body.rfind('}');
    if (start == std::string::npos || stop == std::string::npos) {
      return {};
    }
    const auto parsed =
        nlohmann::json::parse(body.substr(start, stop - start + 1), nullptr, false);
    return parsed.is_discarded() || !parsed.contains("data") ? nlohmann::json{}
                                                             : parsed["data"]["result"];
  };
  // Data arrive by scrapes: ask until all have been seen once or the time is over.
  auto missing = AllExpressions();
  const std::size_t total = missing.size();
  ASSERT_GT(total, 40u);
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(40);
  while (!missing.empty() && std::chrono::steady_clock::now() < deadline) {
    std::erase_if(missing, [&](const auto& e) { return query(e.second).size() > 0; });
    if ((*prometheus)->Wait(std::chrono::steady_clock::now() + std::chrono::milliseconds(500))) {
      FAIL() << ReadText(cluster.dir() + "/prometheus.log");
    }
    bool all_excused = true;
    for (const auto& [where, expression] : missing) {
      bool excused = false;
      for (const auto& [part, reason] : MayBeEmpty()) {
        excused = excused || expression.find(part) != std::string::npos;
      }
      all_excused = all_excused && excused;
    }
    if (all_excused) {
      break;
    }
  }
  for (const auto& [where, expression] : missing) {
    std::string excuse;
    for (const auto& [part, reason] : MayBeEmpty()) {
      if (expression.find(part) != std::string::npos) {
        excuse = reason;
      }
    }
    EXPECT_NE(excuse, "") << where << " is empty: " << expression;
  }
  EXPECT_LT(missing.size(), total / 4);
  EXPECT_TRUE((*prometheus)->Signal(15).ok());
  (*prometheus)->Wait(std::chrono::steady_clock::now() + std::chrono::seconds(20));
  cluster.Cli({"cancel", "faulty"});
  cluster.WaitForEnd("faulty");
}

}  // namespace
}  // namespace octavo
