// A Clock that moves only when the test says so. Thread-safe.
#pragma once

#include <atomic>
#include <cstdint>

#include "base/clock.h"

namespace octavo {

class FakeClock final : public Clock {
 public:
  // 2026-01-01T00:00:00Z by default, so that printed times look like times.
  explicit FakeClock(std::int64_t unix_micros = 1'767'225'600 * kMicrosPerSecond)
      : unix_micros_(unix_micros) {}

  std::int64_t UnixMicros() const override { return unix_micros_.load(); }
  std::int64_t MonotonicMicros() const override { return monotonic_micros_.load(); }

  void AdvanceMicros(std::int64_t micros) {
    unix_micros_ += micros;
    monotonic_micros_ += micros;
  }
  void AdvanceSeconds(double seconds) {
    AdvanceMicros(static_cast<std::int64_t>(seconds * kMicrosPerSecond));
  }
  // The wall clock jumps (NTP, operator); monotonic time does not.
  void JumpUnixMicros(std::int64_t micros) { unix_micros_ += micros; }

 private:
  std::atomic<std::int64_t> unix_micros_;
  std::atomic<std::int64_t> monotonic_micros_{1'000'000};
};

}  // namespace octavo
