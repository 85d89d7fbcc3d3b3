// What the training loop wants from the outside, as one narrow interface: commands to read at step
// boundaries, and places for reports. The session to the worker implements it for a rank process;
// tests and benches have their own.
//
// Reading never waits. TryReport never waits either: telemetry is dropped and counted rather than
// holding up a step (ARCHITECTURE 6, invariant 8). Deliver may wait for room for a bounded time; it
// is for the few messages that must arrive (checkpoint saved, plan applied, start of the attempt).
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "octavo/internal/v1/rank_service.pb.h"
#include "proto/precision/plan.h"

namespace octavo {

namespace iv1 = internal::v1;

// The commands a rank can be under, oldest first served; once true they stay true, but for
// `checkpoint`, which is served once per `sequence`.
struct RankWishes {
  bool stop = false, checkpoint = false, suspend = false, stop_without_checkpoint = false;
  std::int64_t sequence = 0;
};

// Time every operation of the next `steps` steps. An id is served once.
struct ProfileRequest {
  std::int64_t id = 0;  // 0: none
  std::int32_t steps = 0;
};

// Thread-safe.
class TrainingHost {
 public:
  virtual ~TrainingHost() = default;
  virtual RankWishes wishes() const = 0;
  // The newest one that was asked for.
  virtual ProfileRequest profile() const { return {}; }
  // The newest plan that arrived after the last call, if any.
  virtual std::optional<PrecisionPlan> TakePlan() = 0;

  virtual bool TryReport(iv1::RankToWorker message) = 0;  // false: dropped
  virtual void Deliver(iv1::RankToWorker message) = 0;
};

// Messages of the trainer; job, attempt and rank are filled in by the host.
iv1::RankToWorker ProgressMessage(iv1::RankPhase phase, std::int64_t step, std::string detail);

}  // namespace octavo
