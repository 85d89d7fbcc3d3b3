#include "tests/system/precision_support.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

namespace octavo {

ClusterOptions WithFaults(int workers) {
  return {.workers = workers,
          .slots = 2,
          .worker_flags = {"--rank-binary", std::string(OCTAVO_BIN_DIR) + "/octavo-rank-test"}};
}

std::string SmallSpec(const TempCluster& cluster, const SmallJob& job) {
  std::string labels;
  for (std::size_t i = 0; i < job.faults.size(); ++i) {
    labels += (i == 0 ? "labels: {inject." : ", inject.") + std::to_string(i) + ": \"" +
              job.faults[i] + "\"";
  }
  std::string yaml = cluster.Spec({.name = job.name,
                                   .steps = job.steps,
                                   .ranks = 1,
                                   .expert_parallel = 1,
                                   .layers = job.layers,
                                   .recipe = job.recipe,
                                   .checkpoint_interval = 0,
                                   .restart_max = 0,
                                   .extra = labels.empty() ? "" : labels + "}\n",
                                   .precision_extra = job.precision});
  if (job.router_bias) {
    const std::string moe = "expert_hidden: 128}";
    yaml.replace(yaml.find(moe), moe.size(),
                 "expert_hidden: 128, router: {bias_update_rate: 0.001, aux_loss: none}}");
  }
  return yaml;
}

std::vector<v1::PrecisionPlan> Plans(TempCluster& cluster, const std::string& job) {
  v1::ListPlansRequest request;
  request.set_name("jobs/" + job);
  request.set_page_size(1000);
  v1::ListPlansResponse response;
  grpc::ClientContext context;
  context.set_wait_for_ready(true);
  const grpc::Status status = cluster.stub().ListPlans(&context, request, &response);
  EXPECT_TRUE(status.ok()) << status.error_message();
  return {response.plans().rbegin(), response.plans().rend()};
}

v1::JobPrecision Precision(TempCluster& cluster, const std::string& job) {
  v1::GetPrecisionRequest request;
  request.set_name("jobs/" + job);
  v1::JobPrecision response;
  grpc::ClientContext context;
  context.set_wait_for_ready(true);
  const grpc::Status status = cluster.stub().GetPrecision(&context, request, &response);
  EXPECT_TRUE(status.ok()) << status.error_message();
  return response;
}

grpc::Status Set(TempCluster& cluster, const std::string& job, const Change& change,
                 v1::SetPrecisionResponse* response) {
  static std::atomic<int> counter{0};
  v1::SetPrecisionRequest request;
  request.set_name("jobs/" + job);
  request.set_request_id("set-" + std::to_string(++counter));
  request.set_etag(change.etag);
  v1::PrecisionOverride& wanted = *request.add_overrides();
  wanted.set_layers(change.layers);
  for (const std::string& op : change.ops) {
    wanted.add_ops(op);
  }
  wanted.mutable_recipe()->set_kind(change.recipe);
  grpc::ClientContext context;
  context.set_wait_for_ready(true);
  return cluster.stub().SetPrecision(&context, request, response);
}

std::int64_t MustSet(TempCluster& cluster, const std::string& job, const Change& change) {
  v1::SetPrecisionResponse response;
  const grpc::Status status = Set(cluster, job, change, &response);
  EXPECT_TRUE(status.ok()) << status.error_message();
  return response.plan().version();
}

std::function<bool(const v1::Job&)> Runs(std::int64_t version) {
  return [version](const v1::Job& job) {
    return job.progress().plan_version() >= version || IsTerminal(job);
  };
}

std::vector<std::map<int, int>> AppliedByRank(TempCluster& cluster, const std::string& job,
                                              int ranks) {
  std::vector<std::map<int, int>> applied(static_cast<std::size_t>(ranks));
  for (int rank = 0; rank < ranks; ++rank) {
    const CliResult logs = cluster.Cli({"logs", job, "--rank", std::to_string(rank)});
    EXPECT_EQ(logs.exit_code, 0) << logs.err;
    std::size_t at = 0;
    while ((at = logs.out.find("plan_applied", at)) != std::string::npos) {
      const std::size_t version = logs.out.find("version=", at);
      const std::size_t step = logs.out.find("first_step=", at);
      if (version == std::string::npos || step == std::string::npos) {
        break;
      }
      applied[static_cast<std::size_t>(rank)][std::atoi(logs.out.c_str() + version + 8)] =
          std::atoi(logs.out.c_str() + step + 11);
      at += 12;
    }
  }
  return applied;
}

std::string KindAt(const v1::PrecisionPlan& plan, int layer, Op op) {
  return plan.entries(layer * kOpCount + static_cast<int>(op)).recipe().kind();
}

void ExpectEffectiveIsPlanned(TempCluster& cluster, const std::string& job) {
  const v1::JobPrecision precision = Precision(cluster, job);
  EXPECT_EQ(precision.effective().plan_version(), precision.plan().version());
  EXPECT_EQ(precision.effective().mismatches_size(), 0);
  for (const v1::LayerOpRecipe& entry : precision.effective().entries()) {
    const std::optional<Op> op = ParseOp(entry.op());
    ASSERT_TRUE(op.has_value()) << entry.op();
    EXPECT_EQ(entry.recipe().kind(), KindAt(precision.plan(), entry.layer(), *op))
        << "layer " << entry.layer() << " " << entry.op();
  }
  EXPECT_GT(precision.effective().entries_size(), 0);
}

std::map<std::int64_t, double> StepLosses(const TempCluster& cluster, const std::string& job) {
  nlohmann::json newest = {{"step", -1}};
  const std::string root = cluster.dir() + "/checkpoints/" + job;
  if (std::filesystem::exists(root)) {
    for (const auto& entry : std::filesystem::recursive_directory_iterator(root)) {
      if (entry.path().filename() == "manifest.json") {
        std::ifstream in(entry.path());
        nlohmann::json manifest = nlohmann::json::parse(in);
        if (manifest["step"] > newest["step"]) {
          newest = std::move(manifest);
        }
      }
    }
  }
  std::map<std::int64_t, double> losses;
  EXPECT_GT(newest["step"], 0) << "no checkpoint of " << job;
  if (newest["step"] > 0) {
    std::int64_t step =
        newest["step"].get<std::int64_t>() - static_cast<std::int64_t>(newest["losses"].size());
    for (const nlohmann::json& loss : newest["losses"]) {
      losses[++step] = loss.is_number() ? loss.get<double>() : std::nan("");
    }
  }
  return losses;
}

double MeanDifference(const std::map<std::int64_t, double>& a,
                      const std::map<std::int64_t, double>& b, std::int64_t first,
                      std::int64_t last) {
  double sum = 0;
  for (std::int64_t step = first; step <= last; ++step) {
    EXPECT_TRUE(a.contains(step) && b.contains(step)) << "no loss of step " << step;
    if (a.contains(step) && b.contains(step)) {
      sum += std::abs(a.at(step) - b.at(step));
    }
  }
  return sum / static_cast<double>(last - first + 1);
}

}  // namespace octavo
