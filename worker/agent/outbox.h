// What waits to go up to the controller: reliable reports until acknowledged, the rest while it
// may.
//
// Reliable reports get a sequence that grows per incarnation and are repeated in order on every new
// session until Ack. Everything else (steps, telemetry) is kept over a short outage in a bounded
// buffer, oldest dropped first and counted. Pure; one owner.
#pragma once

#include <cstdint>
#include <deque>
#include <utility>

#include "proto/limits.h"
#include "worker/agent/rank_key.h"

namespace octavo {

class Outbox {
 public:
  static constexpr std::size_t kBufferedBytesMax = 16 << 20;

  // Returns the report with its sequence, ready to send. When the queue is full the oldest report
  // that is not a RankEnded goes (ends are bounded by the ranks that ran, the others are not).
  const iv1::ReliableReport& AddReliable(iv1::ReliableReport report) {
    report.set_sequence(++last_sequence_);
    if (reliable_.size() >= static_cast<std::size_t>(kMaxReliableQueue)) {
      for (auto it = reliable_.begin(); it != reliable_.end(); ++it) {
        if (!it->has_ended()) {
          reliable_.erase(it);
          ++dropped_;
          break;
        }
      }
    }
    reliable_.push_back(std::move(report));
    return reliable_.back();
  }

  // All reports up to here are stored by the controller.
  void Ack(std::int64_t sequence) {
    while (!reliable_.empty() && reliable_.front().sequence() <= sequence) {
      reliable_.pop_front();
    }
  }
  const std::deque<iv1::ReliableReport>& reliable() const { return reliable_; }

  bool HasUnacknowledgedEnd(const RankKey& key) const {
    for (const iv1::ReliableReport& report : reliable_) {
      if (report.has_ended() && KeyOf(report.ended()) == key) {
        return true;
      }
    }
    return false;
  }

  void Buffer(iv1::WorkerToController message) {
    buffered_bytes_ += message.ByteSizeLong();
    buffered_.push_back(std::move(message));
    while (buffered_.size() > static_cast<std::size_t>(kMaxRankQueue) ||
           buffered_bytes_ > kBufferedBytesMax) {
      buffered_bytes_ -= buffered_.front().ByteSizeLong();
      buffered_.pop_front();
      ++dropped_;
    }
  }
  std::deque<iv1::WorkerToController> TakeBuffered() {
    buffered_bytes_ = 0;
    return std::exchange(buffered_, {});
  }

  void CountDropped(std::int64_t count) { dropped_ += count; }
  std::int64_t dropped() const { return dropped_; }

 private:
  std::deque<iv1::ReliableReport> reliable_;
  std::int64_t last_sequence_ = 0;
  std::deque<iv1::WorkerToController> buffered_;
  std::size_t buffered_bytes_ = 0;
  std::int64_t dropped_ = 0;
};

}  // namespace octavo
