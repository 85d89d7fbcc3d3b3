// The rank's line to its worker: one gRPC stream over a Unix socket.
//
//   ASSIGN_OR_RETURN(auto session, WorkerSession::Connect({.socket = "unix:/run/w.sock", …}));
//   const iv1::RankAssignment& assignment = session->assignment();
//   … RunTraining with *session as its TrainingHost and KeyValueStore …
//   session->SendOutcome(outcome);      // the last word; then Close
//
// One thread reads (plans, wishes, answers of the key-value store), one writes from a bounded
// queue. The training loop never touches the socket. When the stream breaks, the worker is gone:
// the wish to leave without a checkpoint is set, because nobody could be told of one.
#pragma once

#include <atomic>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "absl/status/statusor.h"
#include "base/bounded_queue.h"
#include "octavo/internal/v1/rank_service.grpc.pb.h"
#include "worker/comm/rendezvous.h"
#include "worker/rank/training.h"
#include "worker/rank/training_host.h"

namespace octavo {

// Thread-safe after Connect.
class WorkerSession final : public TrainingHost, public KeyValueStore {
 public:
  struct Options {
    std::string socket;  // gRPC target, "unix:/path"
    std::string job_uid;
    std::int32_t attempt = 0;
    std::int32_t rank = 0;
  };
  // Dials, says hello, waits for the assignment (kRankHelloTimeoutMs). DEADLINE_EXCEEDED,
  // UNAVAILABLE, or FAILED_PRECONDITION when the assignment is for somebody else.
  static absl::StatusOr<std::unique_ptr<WorkerSession>> Connect(const Options& options);
  ~WorkerSession() override;

  const iv1::RankAssignment& assignment() const { return assignment_; }

  // TrainingHost.
  RankWishes wishes() const override;
  ProfileRequest profile() const override;
  std::optional<PrecisionPlan> TakePlan() override;
  bool TryReport(iv1::RankToWorker message) override;
  void Deliver(iv1::RankToWorker message) override;

  // KeyValueStore; answered by the controller.
  absl::Status Set(const std::string& key, const std::string& value) override;
  absl::StatusOr<std::string> Get(const std::string& key, double timeout_seconds) override;

  // SIGTERM: leave soon without a checkpoint.
  void LeaveNow();
  void SendOutcome(const TrainingOutcome& outcome);
  // Sends what is queued and ends the stream; bounded.
  void Close();

 private:
  explicit WorkerSession(const Options& options);
  void ReadLoop();
  void WriteLoop();
  absl::StatusOr<std::string> Ask(iv1::KeyValueRequest request, double timeout_seconds,
                                  const std::string& what);
  void Stamp(iv1::RankToWorker* message) const;

  const Options options_;
  std::unique_ptr<iv1::RankService::Stub> stub_;
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReaderWriter<iv1::RankToWorker, iv1::WorkerToRank>> stream_;
  BoundedQueue<iv1::RankToWorker> outbox_;
  iv1::RankAssignment assignment_;  // constant after Connect

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_.
  bool assigned_ = false;
  bool broken_ = false;
  RankWishes wishes_;
  ProfileRequest profile_;
  std::optional<PrecisionPlan> plan_;
  std::int64_t next_request_ = 1;
  std::map<std::int64_t, std::optional<iv1::KeyValueReply>> replies_;  // asked; value: answered

  std::atomic<bool> closed_{false};
  std::jthread reader_, writer_;
};

}  // namespace octavo
