// A real Prometheus finds controller and workers through /sd; promtool accepts every exposition.
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "tests/system/temp_cluster.h"

namespace octavo {
namespace {

// Runs promtool with `text` on its stdin.
int PromtoolCheck(const std::string& text, const std::string& folder, std::string* output) {
  const std::string in = folder + "/metrics.txt";
  std::ofstream(in) << text;
  auto process = Subprocess::Spawn(
      {.argv = {"/bin/sh", "-c", "promtool check metrics < '" + in + "' 2>&1"},
       .stdout_path = in + ".out"});
  if (!process.ok()) {
    return -1;
  }
  const auto exit = (*process)->Wait(std::chrono::steady_clock::now() + std::chrono::seconds(30));
  std::ifstream out(in + ".out");
  output->assign(std::istreambuf_iterator<char>(out), {});
  return exit ? exit->code : -1;
}

TEST(Metrics, PromtoolFindsNothingToSayAboutAnyProcess) {
  TempCluster cluster({.workers = 1});
  cluster.Submit(cluster.Spec({.steps = 5000, .ranks = 1, .expert_parallel = 1, .recipe = "fp8_flow"}));
  cluster.WaitFor("test", Reaches(300), "step 300");  // gauges follow within a second
  for (const std::string& address : {cluster.http_address(), cluster.worker_http(0)}) {
    const std::string text = HttpGet(address, "/metrics");
    ASSERT_NE(text.find("octavo_"), std::string::npos) << address << ": " << text.substr(0, 300);
    std::string output;
    EXPECT_EQ(PromtoolCheck(text, cluster.dir(), &output), 0) << address << ":\n" << output;
    EXPECT_EQ(output.find("error"), std::string::npos) << output;
    EXPECT_NE(HttpGet(address, "/healthz"), "");
    EXPECT_NE(HttpGet(address, "/readyz"), "");
  }
  const std::string controller = HttpGet(cluster.http_address(), "/metrics");
  EXPECT_NE(controller.find("octavo_layer_recipe_info{"), std::string::npos);
  EXPECT_NE(controller.find("octavo_jobs{state=\"RUNNING\"} 1"), std::string::npos) << controller;
  const std::string worker = HttpGet(cluster.worker_http(0), "/metrics");
  EXPECT_NE(worker.find("octavo_fp8_elements_total{"), std::string::npos);
  EXPECT_NE(worker.find("octavo_fp8_amax{"), std::string::npos);
  EXPECT_NE(worker.find("octavo_train_loss{train_job=\"test\"}"), std::string::npos);
  cluster.Cli({"cancel", "test"});
  cluster.WaitForEnd("test");
  // Series of ended jobs disappear: the controller's with the next update of the gauges; a worker
  // keeps its own for one more scrape (kLingerMicros, tested in unit_worker_agent).
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(15);
  std::string left;
  do {
    left = HttpGet(cluster.http_address(), "/metrics");
  } while (left.find("train_job=\"test\"") != std::string::npos &&
           std::chrono::steady_clock::now() < deadline);
  const auto at = left.find("train_job=\"test\"");
  EXPECT_EQ(at, std::string::npos) << left.substr(at == std::string::npos ? 0 : at - 80, 200);
}

TEST(Metrics, ARealPrometheusScrapesControllerAndWorkersThroughServiceDiscovery) {
  TempCluster cluster({.workers = 2});
  cluster.Submit(cluster.Spec({.steps = 5000, .recipe = "fp8_flow"}));
  cluster.WaitFor("test", Reaches(5), "step 5");
  const std::string config = cluster.dir() + "/prometheus.yml";
  std::ofstream(config) << "global: {scrape_interval: 1s}\nscrape_configs:\n- job_name: octavo\n"
                           "  http_sd_configs:\n  - url: http://"
                        << cluster.http_address() << "/sd\n    refresh_interval: 1s\n";
  // Prometheus cannot bind port 0 and say which; take a free one from the kernel.
  const std::string port = std::to_string(20000 + getpid() % 20000);
  const std::string address = "127.0.0.1:" + port;
  auto prometheus = Subprocess::Spawn(
      {.argv = {"prometheus", "--config.file=" + config, "--storage.tsdb.path=" + cluster.dir() + "/tsdb",
                "--web.listen-address=" + address, "--log.level=warn"},
       .stdout_path = cluster.dir() + "/prometheus.log",
       .stderr_path = cluster.dir() + "/prometheus.log"});
  ASSERT_TRUE(prometheus.ok()) << prometheus.status().ToString();
  const auto query = [&](const std::string& expression) -> nlohmann::json {
    const std::string body = HttpGet(address, "/api/v1/query?query=" + expression);
    const auto start = body.find('{');
    const auto stop = body.rfind('}');
    if (start == std::string::npos || stop == std::string::npos) {
      return {};
    }
    const auto parsed = nlohmann::json::parse(body.substr(start, stop - start + 1), nullptr, false);
    return parsed.is_discarded() || !parsed.contains("data") ? nlohmann::json{}
                                                              : parsed["data"]["result"];
  };
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  nlohmann::json up, loss;
  while (std::chrono::steady_clock::now() < deadline) {
    up = query("up==1");
    loss = query("octavo_train_loss");
    if (up.size() >= 3 && loss.size() >= 1) {
      break;
    }
    // A scrape is Prometheus' own event; its process ending is ours.
    if ((*prometheus)->Wait(std::chrono::steady_clock::now() + std::chrono::milliseconds(200))) {
      FAIL() << "prometheus ended; see " << cluster.dir() << "/prometheus.log";
    }
  }
  EXPECT_EQ(up.size(), 3u) << up.dump();
  ASSERT_EQ(loss.size(), 1u) << loss.dump();
  EXPECT_EQ(loss[0]["metric"]["train_job"], "test");
  EXPECT_FALSE(loss[0]["metric"].contains("exported_job"));
  EXPECT_TRUE((*prometheus)->Signal(15).ok());
  (*prometheus)->Wait(std::chrono::steady_clock::now() + std::chrono::seconds(20));
  cluster.Cli({"cancel", "test"});
  cluster.WaitForEnd("test");
}

}  // namespace
}  // namespace octavo
