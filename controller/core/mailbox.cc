#include "controller/core/mailbox.h"

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <utility>

#include "base/log.h"
#include "base/status.h"
#include "base/str.h"

namespace octavo {
namespace {

constexpr std::int64_t kCommitRetryMs = 200;
constexpr std::int64_t kPassRest = 4;  // times as long as the pass

// A wait that ends early when the thread is asked to stop.
void WaitFor(std::int64_t milliseconds, const std::stop_token& stop) {
  std::mutex mutex;
  std::condition_variable_any wake;
  std::unique_lock<std::mutex> lock(mutex);
  wake.wait_for(lock, stop, std::chrono::milliseconds(milliseconds), [] { return false; });
}

}  // namespace

Mailbox::Mailbox(const MailboxOptions& options, Core* core, JobStore* store, const Clock* clock,
                 EffectSink* sink)
    : options_(options),
      core_(core),
      store_(store),
      clock_(clock),
      sink_(sink),
      queue_(options.capacity) {}

Mailbox::~Mailbox() { Stop(); }

void Mailbox::Start() {
  thread_ = std::jthread([this](const std::stop_token& stop) { Run(stop); });
}

void Mailbox::Stop() {
  queue_.Close();
  if (thread_.joinable()) {
    thread_.request_stop();
    thread_.join();
  }
}

bool Mailbox::Post(Event event) { return queue_.TryPush(std::move(event)); }

void Mailbox::Run(const std::stop_token& stop) {
  stop_ = stop;
  while (true) {
    std::vector<Event> events;
    std::optional<Event> event = queue_.Pop(DeadlineAfter(UntilPass()));
    if (!event.has_value() && queue_.closed()) {
      core_->SaveProgress(Time());
      RunBatch({});  // what the last events left to store
      return;
    }
    while (event.has_value()) {
      events.push_back(std::move(*event));
      event = events.size() < options_.batch_max ? queue_.TryPop() : std::nullopt;
    }
    RunBatch(std::move(events));
  }
}

void Mailbox::RunBatch(std::vector<Event> events) {
  std::vector<Output> outputs;
  outputs.reserve(events.size() + 1);
  for (Event& event : events) {
    Release release = event(*core_, Time());
    outputs.push_back({.effects = core_->TakeEffects(), .release = std::move(release)});
  }
  if (const std::int64_t tick = clock_->MonotonicMicros();
      tick - last_tick_ >= Core::kTickMs * 1000 / 2) {
    last_tick_ = tick;
    core_->Tick(Time());
  }
  outputs.push_back({.effects = core_->TakeEffects(), .release = {}});
  CommitAndRelease(std::move(outputs));
  // A client's answer does not wait for the pass that its request asks for.
  if (clock_->MonotonicMicros() >= next_pass_ && core_->WantsSchedule(Time())) {
    SchedulePass();
  }
  const std::int64_t now = clock_->MonotonicMicros();
  if (now - last_census_ >= options_.census_ms * 1000) {
    last_census_ = now;
    sink_->Observe(core_->TakeCensus());
  }
}

void Mailbox::SchedulePass() {
  const std::int64_t begin = clock_->MonotonicMicros();
  core_->Schedule(Time());
  sink_->ObservePassSeconds(static_cast<double>(clock_->MonotonicMicros() - begin) / 1e6);
  std::vector<Output> placed;
  placed.push_back({.effects = core_->TakeEffects(), .release = {}});
  CommitAndRelease(std::move(placed));
  // Its commit and its messages to workers count too: they keep the thread as busy.
  const std::int64_t end = clock_->MonotonicMicros();
  next_pass_ = end + std::clamp(kPassRest * (end - begin), options_.pass_rest_min_ms * 1000,
                                options_.pass_rest_max_ms * 1000);
}

std::chrono::microseconds Mailbox::UntilPass() const {
  const std::int64_t tick = Core::kTickMs * 1000;
  if (!core_->WantsSchedule(Time())) {
    return std::chrono::microseconds(tick);
  }
  return std::chrono::microseconds(
      std::clamp<std::int64_t>(next_pass_ - clock_->MonotonicMicros(), 0, tick));
}

void Mailbox::CommitAndRelease(std::vector<Output> outputs) {
  const StoreBatch batch = core_->TakeBatch();
  const absl::Status stored = batch.empty() ? absl::OkStatus() : Commit(batch, stop_);
  for (Output& output : outputs) {
    if (stored.ok() && !output.effects.empty()) {
      sink_->Deliver(std::move(output.effects));
    }
    if (output.release) {
      output.release(stored);
    }
  }
}

absl::Status Mailbox::StoreStatus() const {
  if (store_healthy()) {
    return absl::OkStatus();
  }
  std::lock_guard<std::mutex> lock(store_error_mutex_);
  return UnavailableError(StrCat("the job store cannot be written: ", Message(store_error_),
                                 "; nothing is accepted until it can"));
}

absl::Status Mailbox::Commit(const StoreBatch& batch, const std::stop_token& stop) {
  if (!broken_.ok()) {
    return broken_;  // what follows builds on a batch that was never stored
  }
  const std::int64_t begin = clock_->MonotonicMicros();
  while (true) {
    const absl::Status status = store_->Commit(batch);
    if (status.ok()) {
      store_healthy_.store(true, std::memory_order_relaxed);
      sink_->ObserveCommitSeconds(static_cast<double>(clock_->MonotonicMicros() - begin) / 1e6);
      return status;
    }
    {
      std::lock_guard<std::mutex> lock(store_error_mutex_);
      store_error_ = status;
    }
    if (store_healthy_.exchange(false, std::memory_order_relaxed)) {
      LogError("store_commit_failed", {{"error", ToString(status)}});
    }
    if (clock_->MonotonicMicros() - begin > options_.store_retry_ms * 1000 ||
        stop.stop_requested()) {
      sink_->StoreBroken(status);
      broken_ = Annotate(UnavailableError(Message(status)), "the job store cannot be written");
      return broken_;
    }
    WaitFor(kCommitRetryMs, stop);
  }
}

}  // namespace octavo
