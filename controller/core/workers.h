// Workers: who is registered, what it says it runs, whether it is heard from.
//
//   Register ─► READY ──stream breaks──► SILENT ──lease over──► LOST (its ranks have ended)
//                 └─ drain (operator, or its own SIGTERM) ─► DRAINING
//
// A stream carries messages of the worker that registered on it; older streams of the same worker
// are closed and ignored. Reliable reports are acknowledged after the batch that holds their effect
// is stored; repeats are recognised by what they say, so a restarted controller needs no sequence.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "controller/core/state.h"
#include "controller/scheduler/placement.h"

namespace octavo {

void OnWorkerMessage(CoreState& state, SessionId session,
                     const internal::v1::WorkerToController& message, Now now);
void OnSessionClosed(CoreState& state, SessionId session, Now now);

// Leases, and lost workers that nobody asks about any more.
void CheckLeases(CoreState& state, Now now);

// Known from the store before it registers again: silent, with a whole lease to come back.
void ExpectWorker(CoreState& state, const std::string& worker, Now now);

struct DrainArgs {
  std::string name;  // workers/{worker}
  std::string request_id;
  std::string reason;
  bool undo = false;
  std::string caller;
};
absl::StatusOr<v1::Worker> DrainWorker(CoreState& state, const DrainArgs& args, Now now);

// Condition, device and poisoned slots; free slots are ClusterOf's matter.
WorkerView ViewOf(const WorkerRecord& worker);
// With free slots: neither placed in a current attempt nor reported as running anything.
ClusterView ClusterOf(const CoreState& state);
v1::Worker RenderWorker(const CoreState& state, const WorkerRecord& worker);
// All, by name.
std::vector<v1::Worker> RenderWorkers(const CoreState& state);

// READY DRAINING SILENT LOST
const char* ConditionName(WorkerCondition condition);

}  // namespace octavo
