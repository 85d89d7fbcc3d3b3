// Exponential back-off with jitter: delays between retries that grow to a cap and never align.
//
//   Backoff backoff({.initial_seconds = 0.5, .max_seconds = 30});
//   double wait_seconds = backoff.NextSeconds(rng);   // any UniformRandomBitGenerator
//   backoff.Reset();                                   // after a success
//
// Delay n is uniform in [1 - jitter, 1] x min(max, initial x factor^n). Pure: the caller owns the
// generator and the waiting. Not thread-safe.
#pragma once

#include <algorithm>
#include <random>

#include "base/check.h"

namespace octavo {

struct BackoffOptions {
  double initial_seconds = 0.5;
  double factor = 2.0;      // >= 1
  double max_seconds = 30;  // >= initial_seconds
  double jitter = 0.5;      // in [0, 1]: the part of a delay that is random
};

class Backoff {
 public:
  explicit Backoff(const BackoffOptions& options)
      : options_(options), base_seconds_(options.initial_seconds) {
    OCTAVO_CHECK(options.initial_seconds > 0 && options.factor >= 1 &&
                 options.max_seconds >= options.initial_seconds);
    OCTAVO_CHECK(options.jitter >= 0 && options.jitter <= 1);
  }

  template <class Rng>
  double NextSeconds(Rng& rng) {
    const double base = base_seconds_;
    base_seconds_ = std::min(options_.max_seconds, base_seconds_ * options_.factor);
    ++attempts_;
    std::uniform_real_distribution<double> jitter(1 - options_.jitter, 1);
    return options_.jitter == 0 ? base : base * jitter(rng);
  }

  void Reset() {
    base_seconds_ = options_.initial_seconds;
    attempts_ = 0;
  }

  int attempts() const { return attempts_; }  // calls of NextSeconds since the last Reset

 private:
  const BackoffOptions options_;
  double base_seconds_;
  int attempts_ = 0;
};

}  // namespace octavo
