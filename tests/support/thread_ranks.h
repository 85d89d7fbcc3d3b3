// Ranks as threads of the test: a function runs once per rank, each with a real gloo communicator
// over loopback and a shared in-process store.
//
//   const absl::Status status = RunThreadRanks({.size = 4}, [](ThreadRank& r) -> absl::Status {
//     double x = r.rank();
//     RETURN_IF_ERROR(ToStatus(r.world().AllReduce(&x, 1, DType::kF64, ReduceOp::kSum)));
//     EXPECT_EQ(x, 6.0);
//     return absl::OkStatus();
//   });
//   EXPECT_TRUE(status.ok()) << ToString(status);
//
// A rank that returns loses its connections, so that the others fail instead of waiting for it.
// After the deadline all communicators are aborted; a rank that still does not return ends the
// process with its number.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "worker/comm/communicator.h"
#include "worker/comm/rendezvous.h"

namespace octavo {

struct ThreadRankOptions {
  int size = 1;
  double deadline_seconds = 60;  // for the whole run
  double timeout_seconds = 30;   // of a collective
};

// What one rank's function sees. Its methods are for its own thread.
class ThreadRank {
 public:
  ThreadRank(int rank, const ThreadRankOptions& options, KeyValueStore* store);

  int rank() const { return rank_; }
  int size() const { return options_.size; }
  KeyValueStore* store() const { return store_; }
  Communicator& world() const { return *world_; }

  // A communicator over some world ranks, in this order; this rank must be one of them. Lives until
  // the function returns. Every member calls it, with the same name.
  absl::StatusOr<Communicator*> Group(const std::string& name, const std::vector<int>& members);

 private:
  friend class ThreadRankRunner;
  void AbortAll();  // any thread
  void Close();

  const int rank_;
  const ThreadRankOptions options_;
  KeyValueStore* const store_;
  Communicator* world_ = nullptr;
  absl::Mutex mu_;
  std::vector<std::unique_ptr<Communicator>> groups_ ABSL_GUARDED_BY(mu_);
  bool aborted_ ABSL_GUARDED_BY(mu_) = false;
};

using ThreadRankFunction = std::function<absl::Status(ThreadRank&)>;

// One status per rank.
std::vector<absl::Status> RunThreadRanksEach(const ThreadRankOptions& options,
                                             const ThreadRankFunction& function);

// OK, or the failures of all ranks in one message (code of the first).
absl::Status RunThreadRanks(const ThreadRankOptions& options, const ThreadRankFunction& function);

}  // namespace octavo
