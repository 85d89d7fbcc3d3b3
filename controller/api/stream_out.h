// The writing half of a server stream, with a bound: at most one write in flight, a queue behind
// it, a cut when the reader is too slow.
//
// The pattern that works with gRPC's callback API (control-plane 2.2): Push starts a write only
// when none is in flight; OnWriteDone starts the next; Finish is called exactly once, also when the
// call is cancelled; OnDone lets go of the last reference. A Finish behind a write in flight is
// fine: the peer gets the message first, then the status. Thread-safe.
#pragma once

#include <cstddef>
#include <deque>
#include <mutex>
#include <utility>

#include "grpcpp/grpcpp.h"

namespace octavo {

// `Reactor` has StartWrite(const Message*) and Finish(grpc::Status).
template <class Reactor, class Message>
class StreamOut {
 public:
  StreamOut(Reactor* reactor, std::size_t capacity) : reactor_(reactor), capacity_(capacity) {}

  enum class PushOutcome { kQueued, kOver, kTooSlow };

  // kTooSlow: the queue is full (nothing was queued); the owner decides what to do. kOver: the
  // stream is finished or finishing.
  PushOutcome Push(Message message) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (finishing_ || finished_) {
      return PushOutcome::kOver;
    }
    if (queue_.size() >= capacity_) {
      return PushOutcome::kTooSlow;
    }
    queue_.push_back(std::move(message));
    StartNextLocked();
    return PushOutcome::kQueued;
  }

  // Replaces the newest queued message that is not in flight when `same(it)`; false: nothing to
  // replace.
  template <class Same>
  bool ReplaceNewest(const Message& message, Same same) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (finishing_ || finished_ || queue_.size() < 2 || !same(queue_.back())) {
      return false;
    }
    queue_.back() = message;
    return true;
  }

  // Sends what is queued, then the status.
  void FinishAfterQueue(grpc::Status status) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (finishing_ || finished_) {
      return;
    }
    finishing_ = true;
    status_ = std::move(status);
    if (queue_.empty()) {
      FinishLocked(status_);
    }
  }

  // Drops what is queued. Idempotent; the first status wins.
  void FinishNow(grpc::Status status) {
    std::lock_guard<std::mutex> lock(mutex_);
    FinishLocked(status);
  }

  // From OnWriteDone.
  void WriteDone(bool ok) {
    std::lock_guard<std::mutex> lock(mutex_);
    writing_ = false;
    if (finished_) {
      queue_.clear();
      return;
    }
    queue_.pop_front();
    if (!ok) {
      FinishLocked(grpc::Status(grpc::StatusCode::UNAVAILABLE, "the stream is broken"));
      return;
    }
    StartNextLocked();
    if (finishing_ && queue_.empty()) {
      FinishLocked(status_);
    }
  }

  // Runs `start` (which may start a read) unless the stream is finished; a read begun here keeps
  // the call alive until it completes.
  template <class Start>
  void IfOpen(Start start) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!finished_) {
      start();
    }
  }

  bool over() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return finishing_ || finished_;
  }
  bool idle() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return queue_.empty();
  }

 private:
  void StartNextLocked() {
    if (!writing_ && !queue_.empty()) {
      writing_ = true;
      reactor_->StartWrite(&queue_.front());  // a deque keeps the element in place
    }
  }
  void FinishLocked(const grpc::Status& status) {
    if (!finished_) {
      finished_ = true;
      reactor_->Finish(status);
    }
  }

  Reactor* const reactor_;
  const std::size_t capacity_;
  mutable std::mutex mutex_;
  // Guarded by mutex_.
  std::deque<Message> queue_;  // the front is in flight while writing_
  bool writing_ = false;
  bool finishing_ = false;
  bool finished_ = false;
  grpc::Status status_;
};

}  // namespace octavo
