// What the process's exit status means; documented in `octavo --help` and README. Scripts may rely
// on these numbers: a value never changes its meaning.
#pragma once

#include <string_view>

#include "absl/status/status.h"
#include "octavo/v1/job.pb.h"

namespace octavo {

enum ExitCode : int {
  kExitOk = 0,
  kExitJobFailed = 1,      // the job that was followed ended FAILED; a file is damaged, a disk full
  kExitUsage = 2,          // a flag, file or specification is wrong; nothing was changed
  kExitNotFound = 3,       // no such job, worker, dataset or checkpoint
  kExitConflict = 4,       // not possible in this state, or somebody else was faster
  kExitUnavailable = 5,    // the controller cannot be reached, or did not answer in time
  kExitJobCancelled = 6,   // the job that was followed ended CANCELLED
  kExitInternal = 7,       // an error inside Octavo; worth a report
  kExitPermission = 8,     // the controller does not let this user do that
  kExitJobSuspended = 9,   // following ended because the job was suspended
  kExitInterrupted = 130,  // Ctrl-C while following; the job goes on
};

inline constexpr char kExitCodesHelp[] =
    "Exit status:\n"
    "  0    done; a job that was followed SUCCEEDED\n"
    "  1    a job that was followed FAILED, a file is damaged, or a disk is full\n"
    "  2    a flag, file or specification is wrong; nothing was changed\n"
    "  3    no such job, worker, dataset or checkpoint\n"
    "  4    not possible in this state, or changed by somebody else meanwhile\n"
    "  5    the controller cannot be reached or did not answer in time\n"
    "  6    a job that was followed was CANCELLED\n"
    "  7    an error inside Octavo\n"
    "  8    not allowed for this user\n"
    "  9    following ended because the job was SUSPENDED\n"
    "  130  interrupted while following; the job goes on";

// For a failed call or a local error. OK gives kExitOk.
ExitCode ExitCodeOf(const absl::Status& status);

// The same for a command that works on files and asks no controller: RESOURCE_EXHAUSTED and
// UNAVAILABLE are a full disk or a failing one, kExitJobFailed.
ExitCode LocalExitCodeOf(const absl::Status& status);

// For a job that was followed to `state`; kExitOk for states that are no end.
ExitCode ExitCodeOf(v1::JobState state);

}  // namespace octavo
