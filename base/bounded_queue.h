// A fixed-capacity queue between threads: many producers, one (or more) consumers.
//
//   BoundedQueue<Event> inbox(limits::kMailboxCapacity);
//   if (!inbox.TryPush(event)) { /* full or closed; counted in dropped() */ }
//   std::optional<Event> next = inbox.Pop(deadline);   // nullopt: deadline passed, or closed and
//   empty
//
// Producers that must not wait (telemetry) use TryPush, which drops the NEW item and counts it.
// Producers that must not lose use Push with a deadline. After Close, pushes fail and pops drain
// what is left. Deadlines are std::chrono::steady_clock time points, so no wait is unbounded.
// Thread-safe; no callback runs under the lock.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <utility>

#include "base/check.h"

namespace octavo {

using SteadyTime = std::chrono::steady_clock::time_point;

inline SteadyTime DeadlineAfter(std::chrono::microseconds wait) {
  return std::chrono::steady_clock::now() + wait;
}

enum class PushResult { kOk, kTimeout, kClosed };

template <class T>
class BoundedQueue {
 public:
  explicit BoundedQueue(std::size_t capacity) : capacity_(capacity) { OCTAVO_CHECK(capacity > 0); }
  BoundedQueue(const BoundedQueue&) = delete;
  BoundedQueue& operator=(const BoundedQueue&) = delete;

  // Never waits. False: full or closed; the item is dropped and counted.
  bool TryPush(T item) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (closed_ || items_.size() >= capacity_) {
        ++dropped_;
        return false;
      }
      items_.push_back(std::move(item));
    }
    not_empty_.notify_one();
    return true;
  }

  // Waits for room until `deadline`. The item is moved from only when the result is kOk.
  PushResult Push(T&& item, SteadyTime deadline) {
    {
      std::unique_lock<std::mutex> lock(mutex_);
      const bool ready = not_full_.wait_until(
          lock, deadline, [this] { return closed_ || items_.size() < capacity_; });
      if (closed_) {
        return PushResult::kClosed;
      }
      if (!ready) {
        return PushResult::kTimeout;
      }
      items_.push_back(std::move(item));
    }
    not_empty_.notify_one();
    return PushResult::kOk;
  }

  // The oldest item; nullopt when the deadline passed or the queue is closed and empty.
  std::optional<T> Pop(SteadyTime deadline) {
    std::optional<T> item;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      not_empty_.wait_until(lock, deadline, [this] { return closed_ || !items_.empty(); });
      if (items_.empty()) {
        return std::nullopt;
      }
      item.emplace(std::move(items_.front()));
      items_.pop_front();
    }
    not_full_.notify_one();
    return item;
  }

  std::optional<T> TryPop() { return Pop(SteadyTime::min()); }

  // Wakes every waiter. Idempotent.
  void Close() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      closed_ = true;
    }
    not_empty_.notify_all();
    not_full_.notify_all();
  }

  bool closed() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return closed_;
  }
  std::size_t size() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return items_.size();
  }
  std::size_t capacity() const { return capacity_; }
  std::int64_t dropped() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return dropped_;
  }

 private:
  const std::size_t capacity_;
  mutable std::mutex mutex_;
  std::condition_variable not_empty_;
  std::condition_variable not_full_;
  std::deque<T> items_;       // guarded by mutex_
  bool closed_ = false;       // guarded by mutex_
  std::int64_t dropped_ = 0;  // guarded by mutex_
};

}  // namespace octavo
