#include "controller/core/profiles.h"

#include <algorithm>

#include "base/status.h"
#include "base/str.h"
#include "controller/core/attempts.h"
#include "controller/core/jobs.h"
#include "proto/convert/error_detail.h"
#include "proto/limits.h"

namespace octavo {
namespace {

constexpr std::size_t kAnswerBytesMax = 3 << 20;
static_assert(kAnswerBytesMax < kMaxMessageBytes);

}  // namespace

absl::StatusOr<v1::JobProfile> StartProfile(CoreState& state, const ProfileArgs& args, Now now) {
  if (args.steps < 1 || args.steps > kProfileStepsMax) {
    return WithDetail(InvalidArgumentError(
                          StrCat("steps: ", args.steps, " is not within 1 to ", kProfileStepsMax)),
                      "INVALID_ARGUMENT");
  }
  const std::uint64_t fingerprint =
      Fingerprint(StrCat(StripPrefix(args.name, "jobs/"), " ", args.steps));
  ASSIGN_OR_RETURN(const std::string known,
                   FindRequest(state, args.request_id, "ProfileJob", fingerprint));
  if (!known.empty()) {
    JobRecord* job = FindJobByUid(state, known);
    if (job != nullptr && job->profile.has_value()) {
      return *job->profile;
    }
  }
  ASSIGN_OR_RETURN(JobRecord * job, FindJob(state, args.name));
  if (job->state() != JobState::kRunning || !job->current.has_value()) {
    return WithDetail(FailedPreconditionError(StrCat("cannot profile: ", job->job().name(), " is ",
                                                     Name(job->state()), "; it must be RUNNING")),
                      "ILLEGAL_TRANSITION");
  }
  const AttemptRecord& attempt = *job->current;
  v1::JobProfile profile;
  profile.set_job(job->job().name());
  profile.set_attempt(attempt.number());
  // Ranks serve growing numbers only, also those of a controller before this one.
  profile.set_id(std::max(now.unix_micros, job->profile.has_value() ? job->profile->id() + 1 : 0));
  profile.set_steps(args.steps);
  profile.set_ranks_expected(attempt.stored.ranks_size());
  job->profile = profile;
  SendProfileWish(state, *job);
  EmitEvent(state, *job, "PROFILE",
            StrCat("profile of ", args.steps, " steps asked for by ",
                   args.caller.empty() ? "a client" : args.caller),
            now);
  RememberRequest(state, args.request_id, "ProfileJob", job->uid(), fingerprint);
  return profile;
}

absl::StatusOr<v1::JobProfile> ReadProfile(CoreState& state, const v1::GetProfileRequest& request) {
  ASSIGN_OR_RETURN(JobRecord * job, FindJob(state, request.name()));
  if (request.id() != 0 && job->profile.has_value() && job->profile->id() > request.id()) {
    return WithDetail(AbortedError(StrCat("a newer profile of ", job->job().name(),
                                          " has replaced this one; ranks serve one at a time")),
                      "PROFILE_REPLACED");
  }
  if (!job->profile.has_value() || (request.id() != 0 && job->profile->id() != request.id())) {
    return WithDetail(NotFoundError(StrCat(
                          "no ", request.id() == 0 ? "" : "such ", "profile of ", job->job().name(),
                          " is kept (until the next one, or a restart of the controller); "
                          "octavo profile takes one")),
                      "PROFILE_NOT_FOUND");
  }
  v1::JobProfile profile = *job->profile;
  if (request.ranks_size() > 0) {
    profile.clear_ranks();
    for (const v1::RankProfile& rank : job->profile->ranks()) {
      if (std::find(request.ranks().begin(), request.ranks().end(), rank.rank()) !=
          request.ranks().end()) {
        *profile.add_ranks() = rank;
      }
    }
  }
  for (int i = profile.ranks_size() - 1; i > 0 && profile.ByteSizeLong() > kAnswerBytesMax; --i) {
    profile.mutable_ranks(i)->clear_entries();
    profile.mutable_ranks(i)->set_entries_left_out(true);
  }
  profile.set_over(!profile.complete() &&
                   (!job->current.has_value() || job->current->number() != profile.attempt()));
  return profile;
}

void OnRankProfile(JobRecord& job, const v1::RankProfile& profile) {
  if (!job.profile.has_value() || job.profile->id() != profile.id() || profile.rank() < 0 ||
      profile.rank() >= job.profile->ranks_expected()) {
    return;  // of an older wish
  }
  auto& ranks = *job.profile->mutable_ranks();
  for (const v1::RankProfile& known : ranks) {
    if (known.rank() == profile.rank()) {
      return;
    }
  }
  *ranks.Add() = profile;
  std::sort(ranks.begin(), ranks.end(),
            [](const v1::RankProfile& a, const v1::RankProfile& b) { return a.rank() < b.rank(); });
  job.profile->set_complete(ranks.size() == job.profile->ranks_expected());
}

}  // namespace octavo
