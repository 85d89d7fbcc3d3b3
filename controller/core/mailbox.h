// The thread that owns the core: a bounded queue in front of it, a store and a sink behind it.
//
//   Post(event) ─► [queue] ─► run a batch of events ─► JobStore::Commit ─► deliver, in order
//
// Group commit: all events that are waiting run as one batch with one transaction, so a slow disk
// makes batches larger instead of the queue longer. An event is a function on the core; what it
// returns is released after the commit, in order with the effects. A scheduling pass comes after
// the answers of its batch, at once when the last one is long ago, else after a short rest. When
// the store cannot be written, nothing is released: the commit is tried again, and after
// store_retry_ms the mailbox reports the store as broken (the process ends; acknowledged work is on
// disk).
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "base/bounded_queue.h"
#include "base/clock.h"
#include "controller/core/core.h"

namespace octavo {

class EffectSink {
 public:
  virtual ~EffectSink() = default;
  // On the mailbox's thread; must not block.
  virtual void Deliver(Effects effects) = 0;
  virtual void Observe(const Census& census) = 0;
  virtual void ObserveCommitSeconds(double seconds) = 0;
  virtual void ObservePassSeconds(double seconds) = 0;
  // The store has refused commits for store_retry_ms: nothing will be released any more.
  virtual void StoreBroken(const absl::Status& status) = 0;
};

struct MailboxOptions {
  std::size_t capacity = 65536;
  std::size_t batch_max = 512;
  std::int64_t store_retry_ms = 30000;
  std::int64_t census_ms = 1000;
  // Scheduling passes rest, so that they take about a fifth of the thread: what arrives meanwhile
  // is answered first and judged by one pass. Bounds of the rest after a pass:
  std::int64_t pass_rest_min_ms = 5;
  std::int64_t pass_rest_max_ms = 50;
};

class Mailbox {
 public:
  // Runs on the core's thread; returns what to run after the commit (may be empty), with how that
  // went: OK, or why nothing was stored (then nothing happened, as far as others may know).
  using Release = std::function<void(const absl::Status& stored)>;
  using Event = std::function<Release(Core&, Now)>;

  // All outlive the mailbox.
  Mailbox(const MailboxOptions& options, Core* core, JobStore* store, const Clock* clock,
          EffectSink* sink);
  ~Mailbox();

  void Start();
  // Runs what is queued, commits, and ends the thread. Bounded by the work in the queue.
  void Stop();

  // Never waits. False: full (RESOURCE_EXHAUSTED to the caller) or stopped.
  bool Post(Event event);

  std::size_t size() const { return queue_.size(); }
  std::int64_t refused() const { return queue_.dropped(); }
  bool store_healthy() const { return store_healthy_.load(std::memory_order_relaxed); }
  // While the store cannot be written the core's thread repeats its commit and hears nobody: why,
  // for those who would wait in vain. OK when it is healthy.
  absl::Status StoreStatus() const;

 private:
  struct Output {
    Effects effects;
    Release release;
  };

  void Run(const std::stop_token& stop);
  void RunBatch(std::vector<Event> events);
  void SchedulePass();
  std::chrono::microseconds UntilPass() const;
  void CommitAndRelease(std::vector<Output> outputs);
  absl::Status Commit(const StoreBatch& batch, const std::stop_token& stop);
  Now Time() const { return {clock_->MonotonicMicros(), clock_->UnixMicros()}; }

  const MailboxOptions options_;
  Core* const core_;
  JobStore* const store_;
  const Clock* const clock_;
  EffectSink* const sink_;
  BoundedQueue<Event> queue_;
  std::atomic<bool> store_healthy_{true};
  mutable std::mutex store_error_mutex_;
  absl::Status store_error_;  // of the newest failed commit; guarded
  std::int64_t last_census_ = 0;
  std::int64_t last_tick_ = 0;
  std::int64_t next_pass_ = 0;  // not before
  absl::Status broken_;  // once the store counts as broken, nothing is stored or released again
  std::stop_token stop_;
  std::jthread thread_;
};

}  // namespace octavo
