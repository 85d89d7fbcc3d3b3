// Pieces that the files of `octavo precision` share.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

#include "cli/session.h"
#include "octavo/v1/job_service.pb.h"

namespace octavo {

// auto, pin, replay.
void AddPrecisionPolicy(CLI::App& group, Session& session);
// A table of what fell, is pinned or the operator's; empty when nothing is.
std::string PolicySitesText(const v1::JobPrecision& precision);
std::string ReplayText(const v1::ReplayPolicyResponse& replay);

}  // namespace octavo
