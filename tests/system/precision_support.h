// What the tests of precision share: small jobs, their plans, their losses step by step.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "proto/precision/op_id.h"
#include "tests/system/temp_cluster.h"

namespace octavo {

// The policy does nothing, and a switch waits for no checkpoint.
inline constexpr char kNoPolicy[] =
    "  protect: 0\n"
    "  policy: {enabled: false, checkpoint_before_switch: false}\n";

// A cluster whose ranks obey the faults of a job's labels (tests/support/inject).
ClusterOptions WithFaults(int workers = 1);

struct SmallJob {
  std::string name;
  int steps = 60;
  std::string recipe = "bf16";
  std::vector<std::string> faults;  // for ranks of WithFaults
  std::string precision = kNoPolicy;
  int layers = 2;
  bool router_bias = false;  // a starved expert needs one
};
// One rank, no checkpoints but the last.
std::string SmallSpec(const TempCluster& cluster, const SmallJob& job);

// Oldest first.
std::vector<v1::PrecisionPlan> Plans(TempCluster& cluster, const std::string& job);
v1::JobPrecision Precision(TempCluster& cluster, const std::string& job);

// A change by an operator; etag may be empty.
struct Change {
  std::string layers;
  std::vector<std::string> ops;  // empty: all
  std::string recipe;
  std::string etag;
};
grpc::Status Set(TempCluster& cluster, const std::string& job, const Change& change,
                 v1::SetPrecisionResponse* response);
// Set, expected to work; the version it made.
std::int64_t MustSet(TempCluster& cluster, const std::string& job, const Change& change);

// Ranks run this version, or the job has ended.
std::function<bool(const v1::Job&)> Runs(std::int64_t version);
// version → first step of the newest attempt, as each rank's own log tells it.
std::vector<std::map<int, int>> AppliedByRank(TempCluster& cluster, const std::string& job,
                                              int ranks);
// The recipe kind of (layer, op) in a plan.
std::string KindAt(const v1::PrecisionPlan& plan, int layer, Op op);
// Recipes in force are those of the newest plan, and all ran as planned.
void ExpectEffectiveIsPlanned(TempCluster& cluster, const std::string& job);

// Loss of each of the last 128 steps, exactly as trained, from the newest checkpoint's manifest.
std::map<std::int64_t, double> StepLosses(const TempCluster& cluster, const std::string& job);
// Mean of |a − b| over the steps first to last.
double MeanDifference(const std::map<std::int64_t, double>& a,
                      const std::map<std::int64_t, double>& b, std::int64_t first,
                      std::int64_t last);

}  // namespace octavo
