#include "cli/follow.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "base/clock.h"
#include "base/status.h"
#include "base/str.h"
#include "cli/output/text.h"
#include "proto/convert/job.h"
#include "proto/limits.h"

namespace octavo {
namespace {

// A live stream says something at least every kWatchBookmarkMs.
constexpr std::int64_t kQuietLimitMs = 4 * kWatchBookmarkMs;
constexpr std::int64_t kWatchdogMs = 200;
constexpr double kReconnectSeconds = 1.0;

bool IsEnd(v1::JobState state) {
  const std::optional<JobState> value = FromWire(state);
  return value.has_value() && (IsTerminal(*value) || *value == JobState::kSuspended);
}

std::int64_t NowMs() { return RealClock::Get().MonotonicMicros() / kMicrosPerMilli; }

// Cancels a stream that is interrupted by the user or has gone quiet. Sync reads have no other end.
class Watchdog {
 public:
  Watchdog(grpc::ClientContext* context, const StopSignals* signals)
      : context_(context),
        signals_(signals),
        last_ms_(NowMs()),
        thread_([this](const std::stop_token& stop) { Loop(stop); }) {}

  void Touch() { last_ms_ = NowMs(); }

  // Ends the thread; true when the user interrupted. Only an answer after the join is final: until
  // then the thread may still take a signal off the process, and nobody else would see it.
  bool Join() {
    thread_.request_stop();
    if (thread_.joinable()) {
      thread_.join();
    }
    return interrupted_;
  }

 private:
  // Waits a little; true when the user interrupted.
  bool WaitForSignal(const std::stop_token& stop) {
    if (signals_ != nullptr) {
      return signals_->Wait(DeadlineAfter(std::chrono::milliseconds(kWatchdogMs))).has_value();
    }
    std::unique_lock<std::mutex> lock(mu_);
    changed_.wait_for(lock, stop, std::chrono::milliseconds(kWatchdogMs), [] { return false; });
    return false;
  }

  void Loop(const std::stop_token& stop) {
    while (!stop.stop_requested()) {
      if (WaitForSignal(stop)) {
        interrupted_ = true;
        context_->TryCancel();
        return;
      }
      if (NowMs() - last_ms_ > kQuietLimitMs) {
        context_->TryCancel();
        return;
      }
    }
  }

  grpc::ClientContext* const context_;
  const StopSignals* const signals_;
  std::atomic<std::int64_t> last_ms_;
  std::atomic<bool> interrupted_{false};
  std::mutex mu_;
  std::condition_variable_any changed_;
  std::jthread thread_;  // last: it uses the others
};

class Follower {
 public:
  Follower(Client& client, const FollowArgs& args)
      : client_(client), args_(args), token_(args.resume_token), last_contact_ms_(NowMs()) {}

  absl::StatusOr<v1::Job> Run() {
    while (true) {
      const absl::Status status = WatchOnce();
      if (interrupted_) {
        return Interrupted();
      }
      if (ended_) {
        absl::StatusOr<v1::Job> job = GetJob();
        // Replayed history may hold an end (SUSPENDED) that was left since.
        if (!job.ok() || IsEnd(job->state())) {
          return job;
        }
        ended_ = false;
        continue;
      }
      if (status.code() == absl::StatusCode::kOutOfRange) {
        token_ = 0;  // too old: begin again with a snapshot
        continue;
      }
      RETURN_IF_ERROR(AwaitReconnect(status));
    }
  }

 private:
  absl::Status Interrupted() const {
    return CancelledError(StrCat("interrupted; the job goes on, and octavo watch ",
                                 BareName(args_.job), " continues here"));
  }

  absl::StatusOr<v1::Job> GetJob() {
    v1::GetJobRequest request;
    request.set_name(args_.job);
    return client_.Call(&JobStub::GetJob, request);
  }

  absl::Status WatchOnce() {
    grpc::ClientContext context;
    client_.Prepare(&context);
    v1::WatchJobRequest request;
    request.set_name(args_.job);
    request.set_resume_token(token_);
    const auto reader = client_.stub().WatchJob(&context, request);
    Watchdog watchdog(&context, args_.signals);
    v1::JobEvent event;
    while (reader->Read(&event)) {
      watchdog.Touch();
      last_contact_ms_ = NowMs();
      lost_ = false;
      token_ = std::max(token_, event.revision());
      if (args_.on_event) {
        args_.on_event(event);
      }
      if (EndsHere(event)) {
        ended_ = true;
        context.TryCancel();
        break;
      }
    }
    const grpc::Status status = reader->Finish();
    interrupted_ = watchdog.Join() || interrupted_;
    return client_.ToAbsl(status, context);
  }

  static bool EndsHere(const v1::JobEvent& event) {
    return (event.kind() == "STATE" && IsEnd(event.state())) ||
           (event.has_snapshot() && IsEnd(event.snapshot().state()));
  }

  // OK: try again. The stream may end for many reasons while the job is fine: a restart of the
  // controller, a slow reader cut off, a proxy; only a clear refusal is final.
  absl::Status AwaitReconnect(const absl::Status& status) {
    const bool refused = !status.ok() && !client_.IsTransient(status) &&
                         status.code() != absl::StatusCode::kResourceExhausted &&
                         status.code() != absl::StatusCode::kCancelled &&
                         status.code() != absl::StatusCode::kDeadlineExceeded &&
                         status.code() != absl::StatusCode::kInternal;
    if (refused) {
      return status;
    }
    const double silent = static_cast<double>(NowMs() - last_contact_ms_) / 1000;
    if (silent > args_.give_up_seconds) {
      return UnavailableError(StrCat("no word from the controller at ",
                                     client_.options().controller, " for ", HumanDuration(silent),
                                     "; the job may well go on: octavo watch ", BareName(args_.job),
                                     " continues"));
    }
    if (!lost_ && args_.on_note) {
      args_.on_note("connection to the controller lost; the job goes on; reconnecting");
    }
    lost_ = true;
    return PauseUnlessInterrupted();
  }

  absl::Status PauseUnlessInterrupted() {
    const SteadyTime deadline = DeadlineAfter(std::chrono::milliseconds(kWatchdogMs));
    if (args_.signals == nullptr) {
      std::mutex mu;
      std::unique_lock<std::mutex> lock(mu);
      std::condition_variable().wait_until(lock, deadline, [] { return false; });
    } else if (args_.signals->Wait(deadline).has_value()) {
      return Interrupted();
    }
    client_.AwaitConnection(kReconnectSeconds);
    return absl::OkStatus();
  }

  Client& client_;
  const FollowArgs& args_;
  std::int64_t token_;
  std::int64_t last_contact_ms_;
  bool ended_ = false, interrupted_ = false, lost_ = false;
};

}  // namespace

absl::StatusOr<v1::Job> Follow(Client& client, const FollowArgs& args) {
  return Follower(client, args).Run();
}

}  // namespace octavo
