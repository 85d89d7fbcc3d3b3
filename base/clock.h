// Time as a value that is passed in: pure code takes `now`, code at the rim takes a Clock.
//
// Wall time (UnixMicros) is for people and records; it may jump. Waits, leases and rates use
// MonotonicMicros. tests/support has the fake clock.
#pragma once

#include <chrono>
#include <cstdint>

namespace octavo {

inline constexpr std::int64_t kMicrosPerSecond = 1'000'000;
inline constexpr std::int64_t kMicrosPerMilli = 1'000;

// Thread-safe; implementations never block.
class Clock {
 public:
  virtual ~Clock() = default;
  virtual std::int64_t UnixMicros() const = 0;       // since 1970-01-01T00:00:00Z
  virtual std::int64_t MonotonicMicros() const = 0;  // since an arbitrary start; never decreases
};

class RealClock final : public Clock {
 public:
  static RealClock& Get() {
    static RealClock clock;
    return clock;
  }
  std::int64_t UnixMicros() const override {
    return std::chrono::duration_cast<std::chrono::microseconds>(
               std::chrono::system_clock::now().time_since_epoch())
        .count();
  }
  std::int64_t MonotonicMicros() const override {
    return std::chrono::duration_cast<std::chrono::microseconds>(
               std::chrono::steady_clock::now().time_since_epoch())
        .count();
  }
};

}  // namespace octavo
