// A JobStore in memory, for tests and the simulator: what Commit accepted survives a "restart" of
// the core that used it, and Commit can be told to fail.
#pragma once

#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "controller/store/job_store.h"

namespace octavo {

class MemoryStore final : public JobStore {
 public:
  absl::StatusOr<StoreSnapshot> Load() override;
  absl::Status Commit(const StoreBatch& batch) override;
  absl::StatusOr<std::vector<v1::JobEvent>> ReadEvents(const std::string& job_uid,
                                                       std::int64_t after,
                                                       std::int64_t limit) override;
  absl::StatusOr<std::vector<TelemetryRow>> ListTelemetry(const std::string& job_uid) override;
  absl::StatusOr<std::vector<StoredTelemetry>> ReadTelemetry(const std::string& job_uid,
                                                             std::int64_t first) override;

  // The next commits fail with this status, applying nothing, until it is OK again.
  void FailCommits(absl::Status status) {
    std::lock_guard<std::mutex> lock(mutex_);
    commit_status_ = std::move(status);
  }
  std::int64_t commits() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return commits_;
  }

 private:
  // Tests look in while the owner's thread runs; everything below is guarded by it.
  mutable std::mutex mutex_;
  std::map<std::string, internal::v1::StoredJob> jobs_;
  std::map<std::pair<std::string, std::int32_t>, internal::v1::StoredAttempt> attempts_;
  std::map<std::pair<std::string, std::int64_t>, v1::PrecisionPlan> plans_;
  std::map<std::string, StoredRequest> requests_;
  std::map<std::string, std::string> drains_;
  std::map<std::string, std::map<std::int64_t, v1::JobEvent>> events_;
  std::map<std::string, std::map<std::int64_t, StoredTelemetry>> telemetry_;
  std::int64_t revision_ = 0;
  std::int64_t commits_ = 0;
  absl::Status commit_status_;
};

}  // namespace octavo
