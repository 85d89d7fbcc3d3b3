#include "worker/rank/session.h"

#include <grpcpp/grpcpp.h>
#include <unistd.h>

#include <chrono>
#include <utility>

#include "base/log.h"
#include "base/status.h"
#include "base/str.h"
#include "base/version.h"
#include "proto/convert/precision.h"
#include "proto/limits.h"

namespace octavo {
namespace {

using std::chrono::milliseconds;

// How long a message that must arrive may wait for room in the outbox.
constexpr milliseconds kDeliverWait{5000};
constexpr milliseconds kCloseWait{5000};

}  // namespace

WorkerSession::WorkerSession(const Options& options)
    : options_(options), outbox_(static_cast<std::size_t>(kMaxRankQueue)) {}

absl::StatusOr<std::unique_ptr<WorkerSession>> WorkerSession::Connect(const Options& options) {
  auto session = std::unique_ptr<WorkerSession>(new WorkerSession(options));
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(static_cast<int>(kMaxInternalMessageBytes));
  const auto channel =
      grpc::CreateCustomChannel(options.socket, grpc::InsecureChannelCredentials(), arguments);
  const auto limit = milliseconds(kRankHelloTimeoutMs);
  const gpr_timespec deadline = gpr_time_add(
      gpr_now(GPR_CLOCK_MONOTONIC), gpr_time_from_millis(kRankHelloTimeoutMs, GPR_TIMESPAN));
  if (!channel->WaitForConnected(deadline)) {
    return DeadlineExceededError(StrCat("connecting to the worker at ", options.socket,
                                        ": no connection within ", kRankHelloTimeoutMs, " ms"));
  }
  session->stub_ = iv1::RankService::NewStub(channel);
  session->stream_ = session->stub_->Session(&session->context_);
  session->reader_ = std::jthread([s = session.get()] { s->ReadLoop(); });
  session->writer_ = std::jthread([s = session.get()] { s->WriteLoop(); });
  iv1::RankToWorker hello;
  hello.mutable_hello()->set_pid(::getpid());
  hello.mutable_hello()->set_version(kVersion);
  session->Deliver(std::move(hello));

  std::unique_lock<std::mutex> lock(session->mutex_);
  const bool answered = session->changed_.wait_for(
      lock, limit, [&] { return session->assigned_ || session->broken_; });
  if (!answered || !session->assigned_) {
    return answered ? UnavailableError("the worker ended the session before it gave an assignment")
                    : DeadlineExceededError(StrCat("no assignment from the worker within ",
                                                   kRankHelloTimeoutMs, " ms"));
  }
  const iv1::RankAssignment& given = session->assignment_;
  if (given.job_uid() != options.job_uid || given.attempt() != options.attempt ||
      given.rank() != options.rank) {
    return FailedPreconditionError(StrCat(
        "the assignment is for job ", given.job_uid(), " attempt ", given.attempt(), " rank ",
        given.rank(), ", not ", options.job_uid, " ", options.attempt, " ", options.rank));
  }
  return session;
}

WorkerSession::~WorkerSession() { Close(); }

void WorkerSession::Close() {
  if (closed_.exchange(true)) {
    return;
  }
  outbox_.Close();  // the writer drains it, then half-closes
  {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait_for(lock, kCloseWait, [this] { return broken_; });
  }
  if (stream_ == nullptr) {
    return;
  }
  context_.TryCancel();  // no effect when the worker has ended the stream
  writer_.join();
  reader_.join();
  stream_->Finish();  // the status says nothing that broken_ does not
}

void WorkerSession::WriteLoop() {
  bool alive = true;
  while (true) {
    std::optional<iv1::RankToWorker> message = outbox_.Pop(DeadlineAfter(std::chrono::hours(1)));
    if (message.has_value()) {
      alive = alive && stream_->Write(*message);
      continue;
    }
    if (outbox_.closed()) {
      break;
    }
  }
  stream_->WritesDone();
}

void WorkerSession::ReadLoop() {
  iv1::WorkerToRank message;
  while (stream_->Read(&message)) {
    std::lock_guard<std::mutex> lock(mutex_);
    switch (message.body_case()) {
      case iv1::WorkerToRank::kAssignment:
        if (!assigned_) {
          assignment_ = message.assignment();
          assigned_ = true;
        }
        break;
      case iv1::WorkerToRank::kPlan: {
        absl::StatusOr<PrecisionPlan> plan = PlanFromWire(message.plan());
        if (!plan.ok()) {
          LogError("plan_unreadable", {{"error", plan.status()}});
        } else if (!plan_.has_value() || plan->version > plan_->version) {
          plan_ = *std::move(plan);
        }
        break;
      }
      case iv1::WorkerToRank::kWishes: {
        const iv1::Wishes& w = message.wishes();
        if (w.sequence() >= wishes_.sequence) {
          wishes_.sequence = w.sequence();
          wishes_.checkpoint = w.checkpoint();
        }
        // Once asked to leave, always: a late message must not call a leaving rank back.
        wishes_.stop = wishes_.stop || w.stop();
        wishes_.suspend = wishes_.suspend || w.suspend();
        wishes_.stop_without_checkpoint =
            wishes_.stop_without_checkpoint || w.stop_without_checkpoint();
        break;
      }
      case iv1::WorkerToRank::kProfile:
        if (message.profile().id() > profile_.id) {
          profile_ = {.id = message.profile().id(), .steps = message.profile().steps()};
        }
        break;
      case iv1::WorkerToRank::kKv:
        if (const auto asked = replies_.find(message.kv().id()); asked != replies_.end()) {
          asked->second = message.kv();
        }
        break;
      case iv1::WorkerToRank::BODY_NOT_SET:
        break;
    }
    changed_.notify_all();
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    broken_ = true;
    if (!closed_) {
      wishes_.stop_without_checkpoint = true;
    }
  }
  if (!closed_) {
    LogError("worker_session_lost", {{"socket", options_.socket}});
  }
  changed_.notify_all();
}

void WorkerSession::Stamp(iv1::RankToWorker* message) const {
  message->set_job_uid(options_.job_uid);
  message->set_attempt(options_.attempt);
  message->set_rank(options_.rank);
}

ProfileRequest WorkerSession::profile() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return profile_;
}

RankWishes WorkerSession::wishes() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return wishes_;
}

std::optional<PrecisionPlan> WorkerSession::TakePlan() {
  std::lock_guard<std::mutex> lock(mutex_);
  return std::exchange(plan_, std::nullopt);
}

bool WorkerSession::TryReport(iv1::RankToWorker message) {
  Stamp(&message);
  return outbox_.TryPush(std::move(message));
}

void WorkerSession::Deliver(iv1::RankToWorker message) {
  Stamp(&message);
  if (outbox_.Push(std::move(message), DeadlineAfter(kDeliverWait)) != PushResult::kOk) {
    LogError("report_lost",
             {{"what", "a message that must arrive"}, {"waited_ms", kDeliverWait.count()}});
  }
}

absl::StatusOr<std::string> WorkerSession::Ask(iv1::KeyValueRequest request, double timeout_seconds,
                                               const std::string& what) {
  std::int64_t id;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    id = next_request_++;
    replies_[id] = std::nullopt;
  }
  request.set_id(id);
  iv1::RankToWorker message;
  *message.mutable_kv() = std::move(request);
  Deliver(std::move(message));
  std::unique_lock<std::mutex> lock(mutex_);
  const auto answered = [&] { return broken_ || replies_[id].has_value(); };
  // A little longer than the controller waits, so that its answer (which names the key) gets
  // through.
  const auto limit = milliseconds(static_cast<std::int64_t>(timeout_seconds * 1000) + 2000);
  changed_.wait_for(lock, limit, answered);
  std::optional<iv1::KeyValueReply> reply = std::move(replies_[id]);
  replies_.erase(id);
  if (!reply.has_value()) {
    return broken_
               ? UnavailableError(StrCat(what, ": the session to the worker is lost"))
               : DeadlineExceededError(StrCat(what, ": no answer within ", limit.count(), " ms"));
  }
  if (!reply->ok()) {
    return DeadlineExceededError(StrCat(what, ": ", reply->error()));
  }
  return std::move(*reply->mutable_value());
}

absl::Status WorkerSession::Set(const std::string& key, const std::string& value) {
  iv1::KeyValueRequest request;
  request.mutable_set()->set_key(key);
  request.mutable_set()->set_value(value);
  return Ask(std::move(request), static_cast<double>(kRendezvousGetMs) / 1000,
             StrCat("setting rendezvous key ", key))
      .status();
}

absl::StatusOr<std::string> WorkerSession::Get(const std::string& key, double timeout_seconds) {
  iv1::KeyValueRequest request;
  request.mutable_get()->set_key(key);
  request.mutable_get()->set_timeout_ms(static_cast<std::int64_t>(timeout_seconds * 1000));
  return Ask(std::move(request), timeout_seconds, StrCat("waiting for rendezvous key ", key));
}

void WorkerSession::LeaveNow() {
  std::lock_guard<std::mutex> lock(mutex_);
  wishes_.stop_without_checkpoint = true;
  ++wishes_.sequence;
}

void WorkerSession::SendOutcome(const TrainingOutcome& outcome) {
  iv1::RankToWorker message;
  auto& last = *message.mutable_outcome();
  last.set_failure_class(static_cast<int>(outcome.failure));
  last.set_message(outcome.message);
  last.set_step(outcome.step);
  last.set_suspended(outcome.suspended);
  last.set_stopped(outcome.stopped);
  Deliver(std::move(message));
}

}  // namespace octavo
