// Simulated time: a queue of events and one random generator; the same seed gives the same run.
#pragma once

#include <cstdint>
#include <functional>
#include <queue>
#include <random>
#include <vector>

namespace octavo::sim {

class Loop {
 public:
  explicit Loop(std::uint64_t seed) : rng_(seed) {}

  std::int64_t now() const { return now_; }  // microseconds since the start
  std::mt19937_64& rng() { return rng_; }
  // Uniform in [low, high].
  std::int64_t Uniform(std::int64_t low, std::int64_t high) {
    return std::uniform_int_distribution<std::int64_t>(low, high)(rng_);
  }
  bool Chance(double probability) {
    return std::uniform_real_distribution<double>(0, 1)(rng_) < probability;
  }

  void At(std::int64_t time, std::function<void()> run) {
    queue_.push({time < now_ ? now_ : time, next_++, std::move(run)});
  }
  void After(std::int64_t micros, std::function<void()> run) { At(now_ + micros, std::move(run)); }

  void RunUntil(std::int64_t time) {
    while (!queue_.empty() && queue_.top().time <= time) {
      Entry entry = queue_.top();
      queue_.pop();
      now_ = entry.time;
      entry.run();
    }
    now_ = time;
  }

 private:
  struct Entry {
    std::int64_t time;
    std::uint64_t order;  // first come, first served at equal times
    std::function<void()> run;
    bool operator<(const Entry& other) const {
      return time != other.time ? time > other.time : order > other.order;
    }
  };
  std::priority_queue<Entry> queue_;
  std::mt19937_64 rng_;
  std::int64_t now_ = 0;
  std::uint64_t next_ = 0;
};

}  // namespace octavo::sim
