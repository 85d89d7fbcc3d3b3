// /metrics of the worker: what its ranks report, merged per host, in the names of ARCHITECTURE 8.
//
// One thing per number: series are values in a table that is turned into prometheus-cpp's plain
// MetricFamily at each scrape. (prometheus-cpp's own Family::Remove leaves references dangling, and
// series of ended jobs must go.) Job-wide values (steps, loss) come from rank 0's reports, so
// exactly one host exports them; counts of tensors come from merged telemetry, so they add up over
// hosts. The effective recipe is exported by the controller alone.
//
// Bounds: at most `series_max` series of jobs; more are not made, and counted in
// octavo_telemetry_dropped_total{reason="series_cap"}. Series of a job disappear kLingerMicros
// after its last rank here ended, late enough for one more scrape; a new attempt within that time
// goes on counting. telemetry.detail decides the labels of FP8 series: layer, layer+op,
// layer+op+tensor. Thread-safe.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "octavo/internal/v1/rank_service.pb.h"
#include "octavo/internal/v1/telemetry.pb.h"
#include "prometheus/metric_family.h"

namespace octavo {

class WorkerMetrics {
 public:
  static constexpr std::int64_t kLingerMicros = 90'000'000;  // > a scrape interval of one minute
  // Seconds, doubling: 0.05 … 102.4.
  static constexpr int kBuckets = 12;

  struct Options {
    std::string version;
    std::size_t series_max = 50000;  // proto/limits.h kMaxMetricSeries
  };
  // The daemon's own state, read at each scrape.
  struct HostState {
    int slots_free = 0;
    int slots_busy = 0;
    int slots_poisoned = 0;
    bool registered = false;
    bool draining = false;
    std::int64_t dropped_reports = 0;
  };

  explicit WorkerMetrics(Options options);

  void SetHost(const HostState& host);
  void ObserveStep(const std::string& train_job, const internal::v1::StepReport& report,
                   std::int64_t unix_micros);
  void ObserveTelemetry(const std::string& train_job, const std::string& detail,
                        const internal::v1::TelemetrySnapshot& snapshot);
  void ObserveCheckpoint(const std::string& train_job, const internal::v1::CheckpointDone& done,
                         std::int64_t unix_micros);
  // The job's last rank here has ended: its series go after kLingerMicros unless it comes back.
  void ForgetJob(const std::string& train_job, std::int64_t monotonic_micros);
  void Sweep(std::int64_t monotonic_micros);

  std::vector<prometheus::MetricFamily> Collect() const;
  std::string Text() const;  // Prometheus text format 0.0.4

 private:
  using Labels = std::vector<std::pair<std::string, std::string>>;
  struct Histogram {
    std::array<std::uint64_t, kBuckets> counts{};  // per bucket, not cumulative
    std::uint64_t count = 0;
    double sum = 0;
  };
  struct Series {
    double value = 0;
    Histogram histogram;
    std::string train_job;  // whose it is; empty: the host's
  };

  // REQUIRES: mutex_ held. nullptr: over the cap (counted).
  Series* Find(std::string_view metric, const std::string& train_job, const Labels& labels);
  void Add(std::string_view metric, const std::string& train_job, const Labels& labels,
           double amount);
  void Set(std::string_view metric, const std::string& train_job, const Labels& labels,
           double value);
  void Observe(std::string_view metric, const std::string& train_job, const Labels& labels,
               double seconds);
  void Touch(const std::string& train_job);

  const Options options_;
  mutable std::mutex mutex_;
  // All below guarded by mutex_.
  HostState host_;
  std::map<std::string, std::map<Labels, Series>, std::less<>> series_;  // by metric name
  std::size_t series_count_ = 0;
  std::uint64_t series_dropped_ = 0;
  std::uint64_t rank_dropped_ = 0;
  std::map<std::string, std::int64_t> forgotten_;  // job → when
};

}  // namespace octavo
