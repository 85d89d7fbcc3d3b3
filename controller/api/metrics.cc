#include "controller/api/metrics.h"

#include <algorithm>
#include <cmath>
#include <sstream>

#include "base/str.h"
#include "prometheus/text_serializer.h"
#include "proto/jobs/failure_class.h"
#include "proto/limits.h"

namespace octavo {
namespace {

using prometheus::ClientMetric;
using prometheus::MetricFamily;
using prometheus::MetricType;

using Labels = std::vector<std::pair<std::string, std::string>>;

// HELP has no newline and no backslash: prometheus-cpp 1.0.1 does not escape it.
class Builder {
 public:
  Builder(std::vector<MetricFamily>* families, const std::string& name, const std::string& help,
          MetricType type)
      : families_(families) {
    family_.name = name;
    family_.help = help;
    family_.type = type;
  }
  ~Builder() {
    if (!family_.metric.empty()) {
      families_->push_back(std::move(family_));
    }
  }
  void Add(const Labels& labels, double value) {
    ClientMetric& metric = New(labels);
    if (family_.type == MetricType::Counter) {
      metric.counter.value = value;
    } else {
      metric.gauge.value = value;
    }
  }
  ClientMetric& New(const Labels& labels) {
    ClientMetric& metric = family_.metric.emplace_back();
    for (const auto& [name, value] : labels) {
      metric.label.push_back({name, value});
    }
    return metric;
  }

 private:
  std::vector<MetricFamily>* families_;
  MetricFamily family_;
};

template <class H>
void AddHistogram(Builder& builder, const Labels& labels, const H& histogram, double first_bound) {
  ClientMetric& metric = builder.New(labels);
  metric.histogram.sample_count = histogram.count;
  metric.histogram.sample_sum = histogram.sum;
  std::uint64_t cumulative = 0;
  double bound = first_bound;
  for (const std::uint64_t count : histogram.counts) {
    cumulative += count;
    metric.histogram.bucket.push_back({cumulative, bound});
    bound *= 2;
  }
  metric.histogram.bucket.push_back({histogram.count, INFINITY});
}

}  // namespace

void ControllerMetrics::Histogram::Add(double seconds) {
  double bound = kFirstBucket;
  for (std::uint64_t& bucket : counts) {
    if (seconds <= bound) {
      ++bucket;
      break;
    }
    bound *= 2;
  }
  ++count;
  sum += seconds;
}

ControllerMetrics::ControllerMetrics(std::string version) : version_(std::move(version)) {
  // Known label values begin at 0, so that rates exist from the first event on.
  for (const char* result : {"succeeded", "stopped"}) {
    attempts_[{result, "NONE"}] = 0;
  }
  for (const FailureClassFacts& facts : kFailureClassFacts) {
    if (facts.counts_towards_restart_max) {
      attempts_[{"failed", std::string(facts.name)}] = 0;
    }
  }
  for (const char* reason : {"series_cap", "watch_too_slow", "mailbox_full"}) {
    dropped_[reason] = 0;
  }
  queue_wait_seconds_["placed"];
  gang_start_seconds_["formed"];
}

ControllerMetrics::JobSeries* ControllerMetrics::Job(const std::string& train_job) {
  const auto found = jobs_.find(train_job);
  return found == jobs_.end() ? nullptr : &found->second;
}

bool ControllerMetrics::Room(std::size_t more) {
  std::size_t used = 0;
  for (const auto& [name, job] : jobs_) {
    used += job.size();
  }
  if (used + more <= static_cast<std::size_t>(kMaxMetricSeries)) {
    return true;
  }
  dropped_["series_cap"] += static_cast<std::int64_t>(more);
  return false;
}

void ControllerMetrics::Observe(const Effect& effect) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (const auto* began = std::get_if<JobBegan>(&effect)) {
    if (jobs_.contains(began->train_job) || Room(JobSeries().size())) {
      JobSeries& job = jobs_[began->train_job];
      job.owner = began->owner;
      job.model = began->model;
      job.world_size = began->world_size;
      job.restarts = began->restarts;
    }
  } else if (const auto* over = std::get_if<JobOver>(&effect)) {
    jobs_.erase(over->train_job);
  } else if (const auto* plan = std::get_if<PlanVersionMetric>(&effect)) {
    if (JobSeries* job = Job(plan->train_job)) {
      job->plan_version = plan->version;
    }
  } else if (const auto* restart = std::get_if<JobRestarted>(&effect)) {
    if (JobSeries* job = Job(restart->train_job)) {
      job->restarts = restart->restarts;
    }
  } else if (const auto* change = std::get_if<PrecisionChangeMetric>(&effect)) {
    if (JobSeries* job = Job(change->train_job)) {
      ++job->changes[{change->direction, change->reason}];
    }
  } else if (const auto* recipes = std::get_if<RecipesInForce>(&effect)) {
    JobSeries* job = Job(recipes->train_job);
    if (job != nullptr && (!job->recipes.empty() ||
                           Room(static_cast<std::size_t>(recipes->effective.entries_size())))) {
      job->recipes.clear();
      for (const v1::LayerOpRecipe& entry : recipes->effective.entries()) {
        job->recipes[{entry.layer(), entry.op()}] = entry.recipe().kind();
      }
    }
  } else if (const auto* attempt = std::get_if<AttemptOver>(&effect)) {
    ++attempts_[{attempt->result, attempt->reason}];
  } else if (const auto* wait = std::get_if<QueueWait>(&effect)) {
    queue_wait_seconds_[wait->result].Add(wait->seconds);
  } else if (const auto* gang = std::get_if<GangStart>(&effect)) {
    gang_start_seconds_[gang->result].Add(gang->seconds);
  } else if (std::holds_alternative<StepMetric>(effect)) {
    ++steps_relayed_;
  } else if (std::holds_alternative<TelemetryMetric>(effect)) {
    ++telemetry_relayed_;
  }
}

void ControllerMetrics::Observe(const Census& census) {
  std::lock_guard<std::mutex> lock(mutex_);
  census_ = census;
}

void ControllerMetrics::ObserveRpc(const std::string& method, const std::string& code,
                                   double seconds) {
  std::lock_guard<std::mutex> lock(mutex_);
  ++rpc_requests_[{method, code}];
  rpc_seconds_[method].Add(seconds);
}

void ControllerMetrics::ObserveCommit(double seconds) {
  std::lock_guard<std::mutex> lock(mutex_);
  commit_seconds_.Add(seconds);
}

void ControllerMetrics::ObservePass(double seconds) {
  std::lock_guard<std::mutex> lock(mutex_);
  pass_seconds_.Add(seconds);
}

void ControllerMetrics::ObserveMailbox(std::size_t queued, std::int64_t refused) {
  std::lock_guard<std::mutex> lock(mutex_);
  mailbox_queued_ = static_cast<std::int64_t>(queued);
  dropped_["mailbox_full"] = refused;
}

void ControllerMetrics::SetWatchStreams(std::int64_t streams) {
  std::lock_guard<std::mutex> lock(mutex_);
  watch_streams_ = streams;
}

void ControllerMetrics::CountWatchTooSlow() {
  std::lock_guard<std::mutex> lock(mutex_);
  ++dropped_["watch_too_slow"];
}

std::vector<MetricFamily> ControllerMetrics::Collect() const {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<MetricFamily> families;
  const auto gauge = [&](const char* name, const char* help) {
    return Builder(&families, name, help, MetricType::Gauge);
  };
  const auto counter = [&](const char* name, const char* help) {
    return Builder(&families, name, help, MetricType::Counter);
  };
  const auto seconds = [&](const char* name, const char* help) {
    return Builder(&families, name, help, MetricType::Histogram);
  };
  gauge("octavo_build_info", "Version of this process; always 1.")
      .Add({{"version", version_}, {"component", "controller"}}, 1);
  {
    Builder jobs = gauge("octavo_jobs", "Jobs that the controller keeps, by state.");
    for (const auto& [state, count] : census_.jobs_by_state) {
      jobs.Add({{"state", state}}, static_cast<double>(count));
    }
  }
  {
    Builder pending = gauge("octavo_pending_jobs", "Waiting jobs by the reason they wait for.");
    for (const auto& [reason, count] : census_.pending_by_reason) {
      pending.Add({{"reason", reason}}, static_cast<double>(count));
    }
  }
  {
    Builder workers = gauge("octavo_workers", "Registered workers by state.");
    for (const auto& [state, count] : census_.workers_by_state) {
      workers.Add({{"state", state}}, static_cast<double>(count));
    }
  }
  {
    Builder seen = gauge("octavo_worker_last_heartbeat_timestamp_seconds",
                         "When the worker was last heard, in Unix time.");
    Builder free = gauge("octavo_worker_slots_free", "Slots that a rank could be placed in now.");
    for (const Census::WorkerFacts& worker : census_.workers) {
      seen.Add({{"worker", worker.name}}, static_cast<double>(worker.last_seen_unix_micros) / 1e6);
      free.Add({{"worker", worker.name}}, worker.slots_free);
    }
  }
  {
    Builder info = gauge("octavo_train_job_info", "A live job; always 1. Join on train_job.");
    Builder plan = gauge("octavo_plan_version", "Newest precision plan of the job.");
    Builder restarts = counter("octavo_train_job_restarts_total",
                               "Failures of the job that were counted towards restart.max.");
    Builder recipe = gauge("octavo_layer_recipe_info",
                           "The recipe that ranks report for a layer and op; always 1.");
    Builder changes =
        counter("octavo_precision_changes_total", "Changes of the precision plan after the first.");
    for (const auto& [name, job] : jobs_) {
      info.Add({{"train_job", name}, {"owner", job.owner}, {"model", job.model}}, 1);
      plan.Add({{"train_job", name}}, static_cast<double>(job.plan_version));
      restarts.Add({{"train_job", name}}, static_cast<double>(job.restarts));
      for (const auto& [site, kind] : job.recipes) {
        recipe.Add({{"train_job", name},
                    {"layer", StrCat(site.first)},
                    {"op", site.second},
                    {"recipe", kind}},
                   1);
      }
      for (const auto& [key, count] : job.changes) {
        changes.Add({{"train_job", name}, {"direction", key.first}, {"reason", key.second}},
                    static_cast<double>(count));
      }
    }
  }
  {
    Builder attempts =
        counter("octavo_job_attempts_total", "Attempts that have ended, by result and class.");
    for (const auto& [key, count] : attempts_) {
      attempts.Add({{"result", key.first}, {"reason", key.second}}, static_cast<double>(count));
    }
  }
  {
    Builder wait = seconds("octavo_queue_wait_seconds", "From waiting to placed or withdrawn.");
    for (const auto& [result, histogram] : queue_wait_seconds_) {
      AddHistogram(wait, {{"result", result}}, histogram, kFirstBucket);
    }
    Builder gang =
        seconds("octavo_gang_start_seconds", "From the placement to the first step of all ranks.");
    for (const auto& [result, histogram] : gang_start_seconds_) {
      AddHistogram(gang, {{"result", result}}, histogram, kFirstBucket);
    }
  }
  {
    Builder requests = counter("octavo_rpc_requests_total", "RPCs that have ended.");
    for (const auto& [key, count] : rpc_requests_) {
      requests.Add({{"method", key.first}, {"code", key.second}}, static_cast<double>(count));
    }
    Builder rpc = seconds("octavo_rpc_seconds", "Duration of unary RPCs, the store included.");
    for (const auto& [method, histogram] : rpc_seconds_) {
      AddHistogram(rpc, {{"method", method}}, histogram, kFirstBucket);
    }
  }
  {
    Builder commit = seconds("octavo_store_commit_seconds", "Commits of the store, durable.");
    AddHistogram(commit, {}, commit_seconds_, kFirstBucket);
    Builder pass = seconds("octavo_scheduler_pass_seconds", "Scheduling passes.");
    AddHistogram(pass, {}, pass_seconds_, kFirstBucket);
  }
  counter("octavo_step_reports_total", "Step reports taken from workers.")
      .Add({}, static_cast<double>(steps_relayed_));
  counter("octavo_telemetry_snapshots_total", "Telemetry snapshots taken from workers.")
      .Add({}, static_cast<double>(telemetry_relayed_));
  {
    Builder dropped =
        counter("octavo_telemetry_dropped_total", "Reports, events and series not kept.");
    for (const auto& [reason, count] : dropped_) {
      dropped.Add({{"reason", reason}}, static_cast<double>(count));
    }
  }
  gauge("octavo_mailbox_events", "Events that wait for the core.")
      .Add({}, static_cast<double>(mailbox_queued_));
  gauge("octavo_watch_streams", "Open WatchJob streams.")
      .Add({}, static_cast<double>(watch_streams_));
  return families;
}

std::string ControllerMetrics::Text() const {
  std::ostringstream out;
  prometheus::TextSerializer().Serialize(out, Collect());
  return out.str();
}

}  // namespace octavo
