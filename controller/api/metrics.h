// /metrics of the controller: jobs, queue, workers, RPCs, store, and per job what only the
// controller knows (info, plan version, effective recipe, precision changes, restarts).
//
// What ranks measure (loss, steps, FP8 statistics) is exported by the workers, so that no number
// has two sources; the effective recipe is exported here alone, from rank reports: exactly one
// series per (train_job, layer, op). Series of a job live in its JobSeries and disappear with it.
// Values are kept in plain tables and turned into prometheus-cpp's MetricFamily at each scrape (its
// own Family::Remove leaves dangling references). At most kMaxMetricSeries series of jobs; more are
// not made, and counted in octavo_telemetry_dropped_total{reason="series_cap"}. Thread-safe.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "controller/core/effects.h"
#include "prometheus/metric_family.h"

namespace octavo {

class ControllerMetrics {
 public:
  explicit ControllerMetrics(std::string version);

  // Effects that are facts for metrics; others are ignored.
  void Observe(const Effect& effect);
  void Observe(const Census& census);
  void ObserveRpc(const std::string& method, const std::string& code, double seconds);
  void ObserveCommit(double seconds);
  void ObservePass(double seconds);
  void ObserveMailbox(std::size_t queued, std::int64_t refused);
  void SetWatchStreams(std::int64_t streams);
  void CountWatchTooSlow();

  std::vector<prometheus::MetricFamily> Collect() const;
  std::string Text() const;  // Prometheus text format 0.0.4

 private:
  // Seconds, doubling from 50 µs to 105 s.
  static constexpr int kBuckets = 22;
  static constexpr double kFirstBucket = 0.00005;
  struct Histogram {
    std::array<std::uint64_t, kBuckets> counts{};
    std::uint64_t count = 0;
    double sum = 0;
    void Add(double seconds);
  };
  // Everything labelled train_job: removed as one when the job is over.
  struct JobSeries {
    std::string owner, model;
    std::int32_t world_size = 0;
    std::int64_t plan_version = 0;
    std::int64_t restarts = 0;
    std::map<std::pair<std::int32_t, std::string>, std::string> recipes;  // layer, op → kind
    std::map<std::pair<std::string, std::string>, std::int64_t> changes;  // direction, reason
    std::size_t size() const { return 3 + recipes.size() + changes.size(); }
  };
  using Counters = std::map<std::string, std::int64_t>;
  using PairCounters = std::map<std::pair<std::string, std::string>, std::int64_t>;

  JobSeries* Job(const std::string& train_job);  // nullptr: unknown, or over
  bool Room(std::size_t more);

  const std::string version_;
  mutable std::mutex mutex_;
  // All below: guarded by mutex_.
  std::map<std::string, JobSeries> jobs_;
  Census census_;
  PairCounters rpc_requests_;  // method, code
  std::map<std::string, Histogram> rpc_seconds_;
  Histogram commit_seconds_, pass_seconds_;
  std::map<std::string, Histogram> queue_wait_seconds_, gang_start_seconds_;
  PairCounters attempts_;  // result, reason
  Counters dropped_;
  std::int64_t steps_relayed_ = 0, telemetry_relayed_ = 0;
  std::int64_t mailbox_queued_ = 0, mailbox_refused_ = 0;
  std::int64_t watch_streams_ = 0;
};

}  // namespace octavo
