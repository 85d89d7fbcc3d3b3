#include "tests/support/thread_ranks.h"

#include <thread>
#include <utility>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/check.h"
#include "base/status.h"
#include "base/str.h"
#include "worker/comm/gloo.h"

namespace octavo {

ThreadRank::ThreadRank(int rank, const ThreadRankOptions& options, KeyValueStore* store)
    : rank_(rank), options_(options), store_(store) {}

absl::StatusOr<Communicator*> ThreadRank::Group(const std::string& name,
                                                const std::vector<int>& members) {
  int position = -1;
  for (std::size_t i = 0; i < members.size(); ++i) {
    if (members[i] == rank_) {
      position = static_cast<int>(i);
    }
  }
  OCTAVO_CHECK(position >= 0, "rank %d is not a member of group %s", rank_, name.c_str());
  absl::StatusOr<std::unique_ptr<Communicator>> made =
      CreateGlooCommunicator({.rank = position,
                              .size = static_cast<int>(members.size()),
                              .group = name,
                              .world_ranks = members,
                              .bind_address = "127.0.0.1",
                              .store = store_,
                              .connect_timeout_seconds = options_.timeout_seconds,
                              .timeout_seconds = options_.timeout_seconds});
  if (!made.ok()) {
    return made.status();
  }
  Communicator* group = made->get();
  absl::MutexLock lock(&mu_);
  if (aborted_) {
    group->Abort();
  }
  groups_.push_back(*std::move(made));
  return group;
}

void ThreadRank::AbortAll() {
  absl::MutexLock lock(&mu_);
  aborted_ = true;
  for (const auto& group : groups_) {
    group->Abort();
  }
}

void ThreadRank::Close() {
  std::vector<std::unique_ptr<Communicator>> closing;
  {
    absl::MutexLock lock(&mu_);
    closing.swap(groups_);
  }
  world_ = nullptr;
}

class ThreadRankRunner {
 public:
  ThreadRankRunner(const ThreadRankOptions& options, const ThreadRankFunction& function)
      : options_(options), function_(function) {
    statuses_.resize(static_cast<std::size_t>(options.size));
    done_.resize(static_cast<std::size_t>(options.size), false);
    for (int r = 0; r < options.size; ++r) {
      ranks_.push_back(std::make_unique<ThreadRank>(r, options, &store_));
    }
  }

  std::vector<absl::Status> Run() {
    const absl::Time deadline = absl::Now() + absl::Seconds(options_.deadline_seconds);
    std::vector<std::jthread> threads;
    for (int r = 0; r < options_.size; ++r) {
      threads.emplace_back([this, r] { RunOne(r); });
    }
    absl::MutexLock lock(&mu_);
    if (!mu_.AwaitWithDeadline(absl::Condition(this, &ThreadRankRunner::AllDone), deadline)) {
      for (std::size_t r = 0; r < done_.size(); ++r) {
        if (!done_[r]) {
          late_.push_back(static_cast<int>(r));
        }
      }
      for (int r : late_) {
        ranks_[static_cast<std::size_t>(r)]->AbortAll();
      }
      const bool stopped = mu_.AwaitWithTimeout(absl::Condition(this, &ThreadRankRunner::AllDone),
                                                absl::Seconds(options_.deadline_seconds));
      OCTAVO_CHECK(stopped, "rank %d neither finished in %g s nor stopped after an abort",
                   late_.front(), options_.deadline_seconds);
    }
    for (int r : late_) {
      absl::Status& status = statuses_[static_cast<std::size_t>(r)];
      status = DeadlineExceededError(StrCat("rank ", r, " did not finish within ",
                                            HumanDuration(options_.deadline_seconds), ": ",
                                            ToString(status)));
    }
    return statuses_;
  }

 private:
  bool AllDone() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    for (const bool done : done_) {
      if (!done) {
        return false;
      }
    }
    return true;
  }

  void RunOne(int r) {
    ThreadRank& rank = *ranks_[static_cast<std::size_t>(r)];
    std::vector<int> everyone;
    for (int i = 0; i < options_.size; ++i) {
      everyone.push_back(i);
    }
    absl::StatusOr<Communicator*> world = rank.Group("world", everyone);
    absl::Status status = world.status();
    if (world.ok()) {
      rank.world_ = *world;
      status = function_(rank);
    }
    rank.Close();
    absl::MutexLock lock(&mu_);
    statuses_[static_cast<std::size_t>(r)] = status;
    done_[static_cast<std::size_t>(r)] = true;
  }

  const ThreadRankOptions options_;
  const ThreadRankFunction& function_;
  InProcessStore store_;
  std::vector<std::unique_ptr<ThreadRank>> ranks_;

  absl::Mutex mu_;
  std::vector<absl::Status> statuses_ ABSL_GUARDED_BY(mu_);
  std::vector<bool> done_ ABSL_GUARDED_BY(mu_);
  std::vector<int> late_ ABSL_GUARDED_BY(mu_);
};

std::vector<absl::Status> RunThreadRanksEach(const ThreadRankOptions& options,
                                             const ThreadRankFunction& function) {
  return ThreadRankRunner(options, function).Run();
}

absl::Status RunThreadRanks(const ThreadRankOptions& options, const ThreadRankFunction& function) {
  absl::Status first;
  std::vector<std::string> texts;
  const std::vector<absl::Status> statuses = RunThreadRanksEach(options, function);
  for (std::size_t r = 0; r < statuses.size(); ++r) {
    UpdateStatus(&first, statuses[r]);
    if (!statuses[r].ok()) {
      texts.push_back(StrCat("[rank ", r, "] ", ToString(statuses[r])));
    }
  }
  return first.ok() ? first : MakeStatus(first.code(), StrJoin(texts, "\n"));
}

}  // namespace octavo
