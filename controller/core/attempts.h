// Attempts: one placement of a job's gang, from StartRank to the last process's exit.
//
//   placed ──StartRank──► ranks meet, load ──► train ──► every rank ended ──► what next?
//                └─ a failure, a wish or a time limit: StopRank to the rest ─┘
//
// Rules. An attempt is over when EVERY rank has ended by evidence (its worker saw the exit, or the
// worker is lost); until then the job keeps its state and slots. What comes next is decided once,
// from the class of the cause; ranks that ended because we asked, or because a peer went away, are
// not causes. Reports that do not carry the current attempt's number change nothing (the fence).
#pragma once

#include <string>
#include <vector>

#include "controller/core/state.h"
#include "controller/scheduler/placement.h"
#include "proto/jobs/failure_class.h"

namespace octavo {

// Stores the placement and tells the workers. REQUIRES: the job waits and has no attempt.
void StartAttempt(CoreState& state, JobRecord& job, const std::vector<RankPlacement>& placement,
                  Now now);

// The job is SUSPENDING or CANCELLING: asks its ranks, or ends the matter when there are none.
void StopForVerb(CoreState& state, JobRecord& job, Now now);

void RequestCheckpoint(CoreState& state, JobRecord& job, Now now);
// To the workers of the current attempt. REQUIRES: job.current and job.profile.
void SendProfileWish(CoreState& state, JobRecord& job);
void SendPlanToRanks(CoreState& state, JobRecord& job);

// The current attempt with that number, or nullptr: the fence.
AttemptRecord* CurrentAttempt(JobRecord* job, std::int32_t attempt);

void OnRankEnded(CoreState& state, const std::string& worker, const internal::v1::RankEnded& ended,
                 Now now);
void OnRankProgress(CoreState& state, JobRecord& job, std::int32_t rank,
                    const internal::v1::RankProgress& progress, Now now);
void OnAttemptStart(CoreState& state, JobRecord& job, const internal::v1::AttemptStart& start,
                    Now now);
void OnCheckpoint(CoreState& state, JobRecord& job, std::int32_t rank,
                  const internal::v1::CheckpointDone& done, Now now);
// A first step was reported: all ranks have met and loaded.
void OnTraining(CoreState& state, JobRecord& job, Now now);

// Every rank of every attempt on that worker has ended: it is lost, or its daemon was restarted
// (then only ranks placed under an earlier incarnation).
void LoseRanksOn(CoreState& state, const std::string& worker, const std::string& why, Now now,
                 const std::string& unless_incarnation = {});

// Asks the attempts on a draining worker to save and end; they start again elsewhere.
void DrainAttemptsOn(CoreState& state, const std::string& worker, const std::string& why, Now now);

// The worker registered again and has reported what it runs: repeats what it may have missed.
void RepeatCommands(CoreState& state, WorkerRecord& worker, Now now);

// Gang and stall limits, rendezvous waits, of one job.
void CheckLimits(CoreState& state, JobRecord& job, Now now);

// A rendezvous request of a rank of the current attempt.
void OnKeyValue(CoreState& state, JobRecord& job, std::int32_t rank,
                const internal::v1::KeyValueRequest& request, Now now);

void SaveAttempt(CoreState& state, const AttemptRecord& attempt);

// Worker name (no prefix) of a rank of the current attempt.
std::string WorkerOf(const AttemptRecord& attempt, std::int32_t rank);

}  // namespace octavo
