#include "worker/agent/metrics.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "base/str.h"
#include "prometheus/text_serializer.h"
#include "proto/precision/op_id.h"

namespace octavo {
namespace {

using prometheus::MetricType;

// The catalogue. HELP must stay on one line without backslashes: prometheus-cpp does not escape it.
struct MetricInfo {
  std::string_view name;
  MetricType type;
  std::string_view help;
};
constexpr MetricInfo kCatalogue[] = {
    {"octavo_train_steps_total", MetricType::Counter, "Optimizer steps completed"},
    {"octavo_train_tokens_total", MetricType::Counter, "Tokens trained on, all ranks of the job"},
    {"octavo_train_loss", MetricType::Gauge,
     "Cross entropy of the newest step, all ranks, in nats"},
    {"octavo_train_aux_loss", MetricType::Gauge, "Auxiliary balance loss of the newest step"},
    {"octavo_train_validation_loss", MetricType::Gauge, "Newest validation loss in nats"},
    {"octavo_train_grad_norm", MetricType::Gauge, "Global gradient norm before clipping"},
    {"octavo_learning_rate", MetricType::Gauge, "Learning rate of the newest step"},
    {"octavo_last_step_timestamp_seconds", MetricType::Gauge,
     "When the newest step was reported, Unix time"},
    {"octavo_step_seconds", MetricType::Histogram, "Duration of a step and of its phases"},
    {"octavo_nonfinite_steps_total", MetricType::Counter,
     "Steps with a non-finite gradient: retried in BF16 with success, or skipped"},
    {"octavo_nonfinite_elements_total", MetricType::Counter,
     "Non-finite elements seen in steps with a non-finite gradient"},
    {"octavo_fp8_elements_total", MetricType::Counter, "Elements cast to FP8"},
    {"octavo_fp8_nonzero_elements_total", MetricType::Counter, "Non-zero elements cast to FP8"},
    {"octavo_fp8_saturated_elements_total", MetricType::Counter,
     "Elements clipped to the largest FP8"},
    {"octavo_fp8_flushed_elements_total", MetricType::Counter,
     "Non-zero elements cast to FP8 zero"},
    {"octavo_fp8_transpose_flushed_elements_total", MetricType::Counter,
     "Non-zero FP8 codes that the scaling-aware transpose turned into zero"},
    {"octavo_fp8_nonfinite_elements_total", MetricType::Counter,
     "Non-finite elements before the cast"},
    {"octavo_fp8_signal_energy_total", MetricType::Counter,
     "Sum of squares of sampled tensors; SQNR is 10 log10 of signal over noise"},
    {"octavo_fp8_noise_energy_total", MetricType::Counter,
     "Sum of squared quantisation errors of sampled tensors"},
    {"octavo_fp8_amax", MetricType::Gauge, "Largest magnitude in the newest snapshot"},
    {"octavo_fp8_dequant_scale_min", MetricType::Gauge,
     "Smallest dequant_scale in the newest snapshot"},
    {"octavo_fp8_dequant_scale_max", MetricType::Gauge,
     "Largest dequant_scale in the newest snapshot"},
    {"octavo_precision_mismatch_total", MetricType::Counter,
     "Products that ran in another precision than planned"},
    {"octavo_train_flops_total", MetricType::Counter, "Executed GEMM FLOPs by precision"},
    {"octavo_expert_load_ratio", MetricType::Gauge,
     "Tokens per expert over the mean: max, min; and coefficient of variation"},
    {"octavo_expert_extra_rounds_total", MetricType::Counter,
     "Receive rounds beyond the first, because a rank got more rows than its capacity"},
    {"octavo_alltoall_bytes_total", MetricType::Counter, "Bytes sent in dispatch and combine"},
    {"octavo_alltoall_seconds_total", MetricType::Counter,
     "Rank-seconds spent in dispatch and combine"},
    {"octavo_allreduce_bytes_total", MetricType::Counter, "Bytes of all-reduce payloads"},
    {"octavo_padding_rows_total", MetricType::Counter, "Rows added to align expert groups"},
    {"octavo_rank_memory_bytes", MetricType::Gauge, "Arena memory of the job's ranks on this host"},
    {"octavo_checkpoint_seconds", MetricType::Histogram, "Duration of saving a checkpoint"},
    {"octavo_checkpoint_bytes", MetricType::Gauge, "Size of the newest checkpoint"},
    {"octavo_checkpoint_last_success_timestamp_seconds", MetricType::Gauge,
     "When a checkpoint was last saved, Unix time"},
    {"octavo_checkpoint_failures_total", MetricType::Counter,
     "Checkpoints that could not be saved"},
};

const MetricInfo& Info(std::string_view name) {
  for (const MetricInfo& info : kCatalogue) {
    if (info.name == name) {
      return info;
    }
  }
  OCTAVO_CHECK(false, "metric %.*s is not in the catalogue", static_cast<int>(name.size()),
               name.data());
}

double BucketBound(int bucket) { return 0.05 * std::ldexp(1.0, bucket); }

prometheus::MetricFamily Simple(std::string_view name, MetricType type, std::string_view help) {
  return {.name = std::string(name), .help = std::string(help), .type = type, .metric = {}};
}

void AddSample(prometheus::MetricFamily* family,
               const std::vector<std::pair<std::string, std::string>>& labels, double value) {
  prometheus::ClientMetric metric;
  for (const auto& [key, text] : labels) {
    metric.label.push_back({key, text});
  }
  metric.counter.value = value;
  metric.gauge.value = value;
  family->metric.push_back(std::move(metric));
}

}  // namespace

WorkerMetrics::WorkerMetrics(Options options) : options_(std::move(options)) {}

void WorkerMetrics::SetHost(const HostState& host) {
  std::lock_guard<std::mutex> lock(mutex_);
  host_ = host;
}

WorkerMetrics::Series* WorkerMetrics::Find(std::string_view metric, const std::string& train_job,
                                           const Labels& labels) {
  Labels all = {{"train_job", train_job}};
  all.insert(all.end(), labels.begin(), labels.end());
  auto family = series_.find(metric);
  if (family == series_.end()) {
    family = series_.emplace(std::string(Info(metric).name), std::map<Labels, Series>()).first;
  }
  const auto found = family->second.find(all);
  if (found != family->second.end()) {
    return &found->second;
  }
  if (series_count_ >= options_.series_max) {
    ++series_dropped_;
    return nullptr;
  }
  ++series_count_;
  Series& fresh = family->second[all];
  fresh.train_job = train_job;
  return &fresh;
}

void WorkerMetrics::Add(std::string_view metric, const std::string& train_job, const Labels& labels,
                        double amount) {
  if (Series* series = Find(metric, train_job, labels)) {
    series->value += amount;
  }
}

void WorkerMetrics::Set(std::string_view metric, const std::string& train_job, const Labels& labels,
                        double value) {
  if (Series* series = Find(metric, train_job, labels)) {
    series->value = value;
  }
}

void WorkerMetrics::Observe(std::string_view metric, const std::string& train_job,
                            const Labels& labels, double seconds) {
  Series* series = Find(metric, train_job, labels);
  if (series == nullptr) {
    return;
  }
  Histogram& histogram = series->histogram;
  ++histogram.count;
  histogram.sum += seconds;
  for (int bucket = 0; bucket < kBuckets; ++bucket) {
    if (seconds <= BucketBound(bucket)) {
      ++histogram.counts[static_cast<std::size_t>(bucket)];
      break;
    }
  }
}

void WorkerMetrics::Touch(const std::string& train_job) { forgotten_.erase(train_job); }

void WorkerMetrics::ObserveStep(const std::string& train_job,
                                const internal::v1::StepReport& report, std::int64_t unix_micros) {
  std::lock_guard<std::mutex> lock(mutex_);
  Touch(train_job);
  Add("octavo_train_steps_total", train_job, {}, 1);
  Add("octavo_train_tokens_total", train_job, {}, static_cast<double>(report.tokens()));
  Set("octavo_train_loss", train_job, {}, report.loss());
  Set("octavo_train_aux_loss", train_job, {}, report.aux_loss());
  Set("octavo_train_grad_norm", train_job, {}, report.grad_norm());
  Set("octavo_learning_rate", train_job, {}, report.learning_rate());
  Set("octavo_last_step_timestamp_seconds", train_job, {}, static_cast<double>(unix_micros) / 1e6);
  if (report.has_validation()) {
    Set("octavo_train_validation_loss", train_job, {}, report.validation_loss());
  }
  const std::pair<const char*, double> phases[] = {
      {"total", report.step_seconds()},
      {"forward", report.phase_forward_seconds()},
      {"backward", report.phase_backward_seconds()},
      {"optimizer", report.phase_optimizer_seconds()},
      {"dispatch", report.phase_dispatch_seconds()},
      {"checkpoint", report.phase_checkpoint_seconds()},
  };
  for (const auto& [phase, seconds] : phases) {
    if (seconds > 0) {
      Observe("octavo_step_seconds", train_job, {{"phase", phase}}, seconds);
    }
  }
  // Both outcomes exist from the first step on, so that an alert never waits for a missing series.
  Add("octavo_nonfinite_steps_total", train_job, {{"outcome", "retried_ok"}},
      report.outcome() == 1 ? 1 : 0);
  Add("octavo_nonfinite_steps_total", train_job, {{"outcome", "skipped"}},
      report.outcome() == 2 ? 1 : 0);
  Add("octavo_nonfinite_elements_total", train_job, {},
      static_cast<double>(report.nonfinite_elements()));
}

void WorkerMetrics::ObserveTelemetry(const std::string& train_job, const std::string& detail,
                                     const internal::v1::TelemetrySnapshot& snapshot) {
  std::lock_guard<std::mutex> lock(mutex_);
  Touch(train_job);
  struct Extremes {
    double amax = 0, min = 0, max = 0;
  };
  std::map<Labels, Extremes> extremes;  // per series, over what detail folds together
  for (const internal::v1::TensorStats& t : snapshot.tensors()) {
    if (t.shadow() || t.op() < 0 || t.op() >= kOpCount || t.tensor() < 0 ||
        t.tensor() >= kTensorCount) {
      continue;  // shadow statistics describe a cast that was not used
    }
    Labels labels = {{"layer", StrCat(t.layer())}};
    if (detail != "layer") {
      labels.emplace_back("op", kOpNames[static_cast<std::size_t>(t.op())]);
    }
    if (detail == "tensor") {
      labels.emplace_back("tensor", kTensorNames[static_cast<std::size_t>(t.tensor())]);
    }
    const auto count = [&](std::string_view metric, double amount) {
      Add(metric, train_job, labels, amount);
    };
    count("octavo_fp8_elements_total", static_cast<double>(t.elements()));
    count("octavo_fp8_nonzero_elements_total", static_cast<double>(t.nonzero()));
    count("octavo_fp8_saturated_elements_total", static_cast<double>(t.saturated()));
    count("octavo_fp8_flushed_elements_total", static_cast<double>(t.flushed()));
    count("octavo_fp8_transpose_flushed_elements_total",
          static_cast<double>(t.transpose_flushed()));
    count("octavo_fp8_nonfinite_elements_total", static_cast<double>(t.nonfinite()));
    count("octavo_fp8_signal_energy_total", t.signal_energy());
    count("octavo_fp8_noise_energy_total", t.noise_energy());
    Extremes& e = extremes[labels];
    e.amax = std::max(e.amax, static_cast<double>(t.amax()));
    if (t.dequant_scale_max() > 0) {
      e.min = e.max > 0 ? std::min(e.min, static_cast<double>(t.dequant_scale_min()))
                        : t.dequant_scale_min();
      e.max = std::max(e.max, static_cast<double>(t.dequant_scale_max()));
    }
  }
  for (const auto& [labels, e] : extremes) {
    Set("octavo_fp8_amax", train_job, labels, e.amax);
    Set("octavo_fp8_dequant_scale_min", train_job, labels, e.min);
    Set("octavo_fp8_dequant_scale_max", train_job, labels, e.max);
  }
  for (const internal::v1::ExecutedPrecision& e : snapshot.executed()) {
    if (e.planned() != e.executed() && e.op() >= 0 && e.op() < kOpCount) {
      Add("octavo_precision_mismatch_total", train_job,
          {{"layer", StrCat(e.layer())},
           {"op", std::string(kOpNames[static_cast<std::size_t>(e.op())])}},
          static_cast<double>(e.count()));
    }
  }
  for (const internal::v1::LayerLoad& load : snapshot.loads()) {
    const std::string layer = StrCat(load.layer());
    const auto ratio = [&](const char* stat, double value) {
      Set("octavo_expert_load_ratio", train_job, {{"layer", layer}, {"stat", stat}}, value);
    };
    ratio("max", load.max_ratio());
    ratio("min", load.min_ratio());
    ratio("cv", load.cv());
    Add("octavo_expert_extra_rounds_total", train_job, {{"layer", layer}},
        static_cast<double>(load.extra_rounds()));
  }
  for (const auto& [precision, flops] : snapshot.flops()) {
    Add("octavo_train_flops_total", train_job, {{"precision", precision}}, flops);
  }
  Add("octavo_alltoall_bytes_total", train_job, {},
      static_cast<double>(snapshot.all_to_all_bytes()));
  Add("octavo_alltoall_seconds_total", train_job, {}, snapshot.all_to_all_seconds());
  Add("octavo_allreduce_bytes_total", train_job, {},
      static_cast<double>(snapshot.all_reduce_bytes()));
  Add("octavo_padding_rows_total", train_job, {}, static_cast<double>(snapshot.padding_rows()));
  Set("octavo_rank_memory_bytes", train_job, {}, static_cast<double>(snapshot.memory_bytes()));
  rank_dropped_ +=
      static_cast<std::uint64_t>(std::max<std::int64_t>(0, snapshot.dropped_reports()));
}

void WorkerMetrics::ObserveCheckpoint(const std::string& train_job,
                                      const internal::v1::CheckpointDone& done,
                                      std::int64_t unix_micros) {
  std::lock_guard<std::mutex> lock(mutex_);
  Touch(train_job);
  Add("octavo_checkpoint_failures_total", train_job, {}, done.ok() ? 0 : 1);
  if (done.ok()) {
    Observe("octavo_checkpoint_seconds", train_job, {}, done.seconds());
    Set("octavo_checkpoint_bytes", train_job, {}, static_cast<double>(done.bytes()));
    Set("octavo_checkpoint_last_success_timestamp_seconds", train_job, {},
        static_cast<double>(unix_micros) / 1e6);
  }
}

void WorkerMetrics::ForgetJob(const std::string& train_job, std::int64_t monotonic_micros) {
  std::lock_guard<std::mutex> lock(mutex_);
  forgotten_[train_job] = monotonic_micros;
}

void WorkerMetrics::Sweep(std::int64_t monotonic_micros) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto it = forgotten_.begin(); it != forgotten_.end();) {
    if (monotonic_micros - it->second < kLingerMicros) {
      ++it;
      continue;
    }
    for (auto& [metric, series] : series_) {
      series_count_ -= std::erase_if(
          series, [&](const auto& entry) { return entry.second.train_job == it->first; });
    }
    it = forgotten_.erase(it);
  }
}

std::vector<prometheus::MetricFamily> WorkerMetrics::Collect() const {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<prometheus::MetricFamily> families;
  const auto host = [&families](std::string_view name, MetricType type, std::string_view help) {
    families.push_back(Simple(name, type, help));
    return &families.back();
  };
  AddSample(host("octavo_build_info", MetricType::Gauge, "Version of this process"),
            {{"version", options_.version}, {"component", "octavo-worker"}}, 1);
  prometheus::MetricFamily* slots =
      host("octavo_worker_slots", MetricType::Gauge, "Slots of this worker by state");
  AddSample(slots, {{"state", "free"}}, host_.slots_free);
  AddSample(slots, {{"state", "busy"}}, host_.slots_busy);
  AddSample(slots, {{"state", "poisoned"}}, host_.slots_poisoned);
  AddSample(host("octavo_worker_registered", MetricType::Gauge,
                 "1 while the controller has accepted this worker"),
            {}, host_.registered ? 1 : 0);
  AddSample(host("octavo_worker_draining", MetricType::Gauge, "1 while this worker drains"), {},
            host_.draining ? 1 : 0);
  prometheus::MetricFamily* dropped =
      host("octavo_telemetry_dropped_total", MetricType::Counter,
           "Reports or series that were not kept, by the bound that was reached");
  AddSample(dropped, {{"reason", "rank_queue"}}, static_cast<double>(rank_dropped_));
  AddSample(dropped, {{"reason", "worker_buffer"}}, static_cast<double>(host_.dropped_reports));
  AddSample(dropped, {{"reason", "series_cap"}}, static_cast<double>(series_dropped_));
  for (const auto& [name, series] : series_) {
    if (series.empty()) {
      continue;
    }
    const MetricInfo& info = Info(name);
    prometheus::MetricFamily family = Simple(name, info.type, info.help);
    for (const auto& [labels, one] : series) {
      AddSample(&family, labels, one.value);
      if (info.type == MetricType::Histogram) {
        prometheus::ClientMetric::Histogram& out = family.metric.back().histogram;
        std::uint64_t cumulative = 0;
        for (int bucket = 0; bucket < kBuckets; ++bucket) {
          cumulative += one.histogram.counts[static_cast<std::size_t>(bucket)];
          out.bucket.push_back(
              {.cumulative_count = cumulative, .upper_bound = BucketBound(bucket)});
        }
        // The text serializer adds +Inf from sample_count.
        out.sample_count = one.histogram.count;
        out.sample_sum = one.histogram.sum;
      }
    }
    families.push_back(std::move(family));
  }
  return families;
}

std::string WorkerMetrics::Text() const {
  return prometheus::TextSerializer().Serialize(Collect());
}

}  // namespace octavo
