// The precision policy of controller/policy, one state per live job, behind the core's hook.
//
//   snapshots of w workers ─► joined per interval ─► PolicyOnSnapshot ─► plan n+1, or nothing
//   step reports ───────────────────────────────────► PolicyOnStep ────┘
//   everything ─► HistoryRows ─► the store ─► Replay
//            └──► RecentHealth ─► Health
//
// Falls, holds, relapses and the operator's sites are saved with the job (policy_memory.h) and come
// back after a restart of the controller; windows of statistics fill again. An alert that changes
// nothing is said once in kAlertRepeatSteps. Not thread-safe: the core's thread.
#pragma once

#include <deque>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "controller/core/history_rows.h"
#include "controller/core/policy_history.h"
#include "controller/core/policy_hook.h"
#include "controller/policy/fallback.h"
#include "proto/precision/health.h"

namespace octavo {

class PolicyDriver final : public PolicyHook {
 public:
  static constexpr std::int64_t kAlertRepeatSteps = 500;
  // Intervals that wait for slower workers; the oldest is judged incomplete beyond that.
  static constexpr std::size_t kOpenIntervals = 2;
  // Ended jobs whose history stays for replays.
  static constexpr std::size_t kEndedJobsKept = 16;

  void Restore(const v1::Job& job, const std::vector<PrecisionPlan>& history,
               const internal::v1::StoredPolicy* saved) override;
  internal::v1::StoredPolicy Save(const v1::Job& job) override;
  void RestoreTelemetry(const v1::Job& job, const std::vector<TelemetryRow>& rows,
                        const std::vector<StoredTelemetry>& newest) override;
  void SaveTelemetry(const std::string& job_uid, StoreBatch* batch) override;
  void OnAttempt(const v1::Job& job, const DeviceAbility& device, std::int64_t step) override;
  void OnPlanApplied(const v1::Job& job, std::int64_t version, std::int64_t step) override;
  PolicyAnswer OnStep(const v1::Job& job, const PrecisionPlan& newest,
                      const internal::v1::StepReport& report) override;
  PolicyAnswer OnSnapshot(const v1::Job& job, const PrecisionPlan& newest,
                          const internal::v1::TelemetrySnapshot& snapshot) override;
  void OnRefused(const v1::Job& job, const PrecisionPlan& newest) override;
  void OnOperatorPlan(const v1::Job& job, const PrecisionPlan& before,
                      const PrecisionPlan& after) override;
  void OnJobOver(const std::string& job_uid) override;
  void SetEnabled(const v1::Job& job, bool enabled) override;
  bool Enabled(const v1::Job& job) override;
  void SetOperatorSites(const v1::Job& job, const std::vector<OpSite>& sites,
                        bool release) override;
  absl::StatusOr<PolicyReplay> Replay(const v1::Job& job, const v1::PolicySpec* policy,
                                      const std::vector<StoredTelemetry>& stored,
                                      const PlanOf& plan_of) override;
  absl::StatusOr<PolicyHealth> Health(const v1::Job& job, const PrecisionPlan& newest) override;

 private:
  struct Interval {
    HealthSnapshot joined;
    std::int32_t ranks = 0;
  };
  struct JobPolicy {
    PolicyConfig config;
    DeviceAbility device;
    std::optional<bool> switched;  // by an operator; else the spec counts
    PolicyState state;
    std::map<std::int64_t, Interval> open;  // by last step
    std::int64_t judged_step = 0;           // intervals up to here have been judged
    RecentHealth recent;
    HistoryRows rows;
    std::map<std::string, std::int64_t> alerted;  // sentence without its numbers → step
  };
  JobPolicy& Of(const v1::Job& job);
  static void Remember(JobPolicy& policy, const HistoryItem& item);
  static void Configure(const v1::Job& job, JobPolicy& policy);
  PolicyAnswer Judge(JobPolicy& policy, const PrecisionPlan& newest);
  static PolicyAnswer ToAnswer(JobPolicy& policy, PolicyOutput output, std::int64_t step);

  std::map<std::string, JobPolicy> jobs_;  // by uid
  std::deque<std::string> ended_;
  std::vector<std::string> dropped_;  // their telemetry has yet to leave the store
};

}  // namespace octavo
