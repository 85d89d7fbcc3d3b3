// What leaves a rank: step reports, heartbeats, telemetry snapshots. Counts and energies are added
// up over the interval here; sending never waits, and what is dropped is counted and said later.
//
//   reporter.AddPass(model, rolled_back);              after every FinishPass
//   reporter.AddSample(model);                         after a step with SQNR
//   reporter.ReportStep(report);                       rank 0
//   reporter.Snapshot(model, {first, last});           every telemetry interval, and before a
//   switch
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "kernels/stats.h"
#include "worker/comm/communicator.h"
#include "worker/model/transformer.h"
#include "worker/rank/training_host.h"

namespace octavo {

// Adds `from` to `into` as slots of one tensor add up (max, min over groups that saw values, sums).
void MergeSlot(const StatSlot& from, StatSlot* into);

// Statistics of one (layer, op, tensor) with its experts, for one snapshot. `slots[i]` belongs to
// `experts[i]` (−1: not of one expert). Carries the worst kWorstExperts experts of each ratio.
inline constexpr int kWorstExperts = 3;
iv1::TensorStats MakeTensorStats(const TensorSite& site, const std::vector<std::int32_t>& experts,
                                 const std::vector<StatSlot>& slots);

// Not thread-safe.
class Reporter {
 public:
  // `comms`: each communicator of this rank once. `all_to_all_seconds`: time spent in all-to-alls
  // since the start, where it is measured; may be empty.
  Reporter(TrainingHost& host, std::vector<const Communicator*> comms, std::int32_t rank,
           std::function<double()> all_to_all_seconds);

  // Statistics of the pass that has just finished. Of a pass that was rolled back only the
  // non-finite counts stay.
  void AddPass(const Transformer& model, bool rolled_back);
  void AddSample(const Transformer& model);
  // Non-finite elements that this rank saw in the last pass.
  static std::int64_t NonfiniteElements(const Transformer& model);

  void ReportStep(const iv1::StepReport& report);
  // After the last step: its report must arrive; waits for room if it was dropped.
  void DeliverLastStep();
  // At most one every kHeartbeatMs unless the phase changes.
  void Heartbeat(iv1::RankPhase phase, std::int64_t step, const std::string& detail);

  struct Interval {
    std::int64_t first_step, last_step;
  };
  // Sends what was added since the last snapshot and starts a new interval; nothing when empty.
  void Snapshot(const Transformer& model, const Interval& interval);

  std::int64_t dropped() const { return dropped_; }

 private:
  static constexpr std::int64_t kHeartbeatMs = 500;

  bool Send(iv1::RankToWorker message);
  void FillTensors(const Transformer& model, iv1::TelemetrySnapshot* snapshot);
  void FillExecuted(const Transformer& model, iv1::TelemetrySnapshot* snapshot);
  void FillTraffic(iv1::TelemetrySnapshot* snapshot);

  TrainingHost& host_;
  const std::vector<const Communicator*> comms_;
  const std::int32_t rank_;
  const std::function<double()> all_to_all_seconds_;
  std::vector<StatSlot> slots_;     // [stat_sites] of the interval
  std::vector<SqnrSlot> energies_;  // [sqnr_sites]
  // What shadow recipes would have done, of the interval, by site, tensor and recipe.
  std::map<std::tuple<OpSite, Tensor, std::string>, ShadowResult> shadows_;
  std::int64_t passes_ = 0;  // in the interval
  std::optional<iv1::StepReport> unsent_step_;  // the newest step's report, when it was dropped
  // Monotonic counters as of the last snapshot.
  std::map<std::tuple<std::int32_t, int, std::string, std::string, std::string>, std::int64_t>
      executed_before_;
  double all_to_all_seconds_before_ = 0;
  double flops_before_[kFlopPrecisionCount] = {};
  std::int64_t all_to_all_before_ = 0, all_reduce_before_ = 0;
  std::int64_t multi_round_before_ = 0;
  std::int64_t dropped_ = 0, dropped_before_ = 0;
  iv1::RankPhase last_phase_ = iv1::RANK_PHASE_UNSPECIFIED;
  std::int64_t last_beat_micros_ = 0;
};

}  // namespace octavo
