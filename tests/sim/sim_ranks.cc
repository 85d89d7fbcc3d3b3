#include "tests/sim/sim_ranks.h"

#include <csignal>
#include <utility>
#include <vector>

#include "base/str.h"

namespace octavo::sim {
namespace {

constexpr std::int64_t kMilli = 1000;
constexpr std::int64_t kSecond = 1000 * kMilli;
constexpr std::int64_t kCheckpointEvery = 10;

}  // namespace

bool Disk::Begin(const std::string& job, std::int32_t attempt) {
  Folder& folder = folders_[job];
  if (attempt < folder.marker) {
    return false;
  }
  folder.marker = attempt;
  return true;
}

bool Disk::Save(const std::string& job, std::int32_t attempt, std::int64_t step) {
  Folder& folder = folders_[job];
  if (attempt < folder.marker) {
    return false;
  }
  folder.step = step;
  return true;
}

std::int64_t Disk::newest_step(const std::string& job) const {
  const auto found = folders_.find(job);
  return found == folders_.end() ? 0 : found->second.step;
}

struct RankWorld::Rank {
  std::string host;
  RankKey key;
  std::int64_t process = 0;  // tells one process from another with the same key
  std::int64_t stream = 0;
  std::optional<iv1::RankAssignment> assignment;
  iv1::Wishes wishes;
  iv1::RankPhase phase = iv1::RANK_STARTING;
  std::set<std::int64_t> unanswered;
  std::int64_t plan_held = 1;
  bool ready = false;
  bool leaving = false;
};

struct RankWorld::Gang {
  std::int64_t step = 0;
  std::int64_t plan_applied = 1;
  bool stepping = false;
  bool hung = false;
  bool broken = false;
};

RankWorld::RankWorld(Loop* loop, Disk* disk, ToAgent to_agent)
    : loop_(loop), disk_(disk), to_agent_(std::move(to_agent)) {}
RankWorld::~RankWorld() = default;

RankWorld::Rank* RankWorld::Find(const RankKey& key) {
  const auto found = ranks_.find(key);
  return found == ranks_.end() ? nullptr : found->second.get();
}

void RankWorld::Later(const Rank& rank, std::int64_t micros, std::function<void(Rank&)> run) {
  loop_->After(micros, [this, key = rank.key, process = rank.process, run = std::move(run)] {
    Rank* alive = Find(key);
    if (alive != nullptr && alive->process == process) {
      run(*alive);
    }
  });
}

void RankWorld::Spawn(const std::string& host, const RankKey& key) {
  if (loop_->Chance(0.01)) {
    loop_->After(5 * kMilli, [this, host, key] {
      to_agent_(host, RankSpawnFailed{key, "fork: resource temporarily unavailable"});
    });
    return;
  }
  // One process per (job, attempt, rank) for ever: the fence.
  if (!ever_.insert(key).second && violation_.empty()) {
    violation_ = StrCat(key.DebugString(), " was started twice");
  }
  ++spawned_;
  auto rank = std::make_unique<Rank>();
  rank->host = host;
  rank->key = key;
  rank->process = spawned_;
  rank->stream = next_stream_++;
  streams_[rank->stream] = key;
  Rank& started = *(ranks_[key] = std::move(rank));
  loop_->After(kMilli, [this, host, key, pid = static_cast<int>(spawned_)] {
    to_agent_(host, RankSpawned{key, pid});
  });
  Later(started, loop_->Uniform(5, 800) * kMilli, [this](Rank& r) {
    iv1::RankToWorker hello;
    hello.mutable_hello()->set_pid(static_cast<int>(r.process));
    Say(r, hello);
  });
}

void RankWorld::Say(Rank& rank, iv1::RankToWorker message) {
  message.set_job_uid(rank.key.job_uid);
  message.set_attempt(rank.key.attempt);
  message.set_rank(rank.key.rank);
  const std::int64_t stream = rank.stream;
  loop_->After(kMilli, [this, host = rank.host, stream, message = std::move(message)] {
    to_agent_(host, FromRank{stream, message});
  });
}

void RankWorld::SayPhase(Rank& rank, iv1::RankPhase phase) {
  rank.phase = phase;
  iv1::RankToWorker message;
  message.mutable_progress()->set_phase(phase);
  Say(rank, message);
}

void RankWorld::ToRank(std::int64_t stream, const iv1::WorkerToRank& message) {
  const auto key = streams_.find(stream);
  Rank* rank = key == streams_.end() ? nullptr : Find(key->second);
  if (rank == nullptr || rank->stream != stream || rank->leaving) {
    return;
  }
  if (message.has_assignment()) {
    rank->assignment = message.assignment();
    rank->plan_held = message.assignment().plan().version();
    gangs_.try_emplace({rank->key.job_uid, rank->key.attempt}, std::make_unique<Gang>());
    Meet(*rank);
  } else if (message.has_plan()) {
    rank->plan_held = std::max(rank->plan_held, message.plan().version());
  } else if (message.has_wishes()) {
    rank->wishes = message.wishes();
    ObeyEarly(*rank);
  } else if (message.has_kv()) {
    OnReply(*rank, message.kv());
  }
}

// Wishes are polled in every long phase, not only in steps.
void RankWorld::ObeyEarly(Rank& rank) {
  if (rank.phase >= iv1::RANK_TRAINING || rank.leaving || !rank.assignment.has_value()) {
    return;
  }
  if (rank.wishes.stop() || rank.wishes.suspend() || rank.wishes.stop_without_checkpoint()) {
    iv1::RankOutcome outcome;
    outcome.set_stopped(!rank.wishes.suspend());
    outcome.set_suspended(rank.wishes.suspend());
    Leave(rank, outcome, 0);
  }
}

void RankWorld::Meet(Rank& rank) {
  SayPhase(rank, iv1::RANK_MEETING);
  ObeyEarly(rank);
  if (rank.leaving) {
    return;
  }
  const std::int32_t world = rank.assignment->world_size();
  for (std::int32_t peer = -1; peer < world; ++peer) {
    iv1::RankToWorker message;
    iv1::KeyValueRequest& request = *message.mutable_kv();
    request.set_id(peer + 2);
    if (peer < 0) {
      request.mutable_set()->set_key(StrCat("address/", rank.key.rank));
      request.mutable_set()->set_value(StrCat(rank.host, ":", rank.process));
    } else {
      request.mutable_get()->set_key(StrCat("address/", peer));
      request.mutable_get()->set_timeout_ms(60000);
    }
    rank.unanswered.insert(request.id());
    Say(rank, message);
  }
}

void RankWorld::OnReply(Rank& rank, const iv1::KeyValueReply& reply) {
  if (rank.unanswered.erase(reply.id()) == 0) {
    return;
  }
  if (!reply.ok()) {
    iv1::RankOutcome outcome;
    outcome.set_failure_class(v1::GANG_TIMEOUT);
    outcome.set_message(reply.error());
    Leave(rank, outcome, 1);
    return;
  }
  if (rank.unanswered.empty()) {
    SayPhase(rank, iv1::RANK_LOADING);
    Later(rank, loop_->Uniform(50, 2000) * kMilli, [this](Rank& r) { Load(r); });
  }
}

void RankWorld::Load(Rank& rank) {
  if (rank.leaving) {
    return;
  }
  if (rank.key.rank == 0) {
    if (!disk_->Begin(rank.key.job_uid, rank.key.attempt)) {
      iv1::RankOutcome outcome;
      outcome.set_failure_class(v1::RANK_EXIT);
      outcome.set_message("a newer attempt has begun");
      Leave(rank, outcome, 1);
      return;
    }
    Gang& gang = *gangs_.at({rank.key.job_uid, rank.key.attempt});
    gang.step = disk_->newest_step(rank.key.job_uid);
    iv1::RankToWorker message;
    message.mutable_attempt_start()->set_loaded_step(gang.step);
    Say(rank, message);
  }
  rank.ready = true;
  SayPhase(rank, iv1::RANK_TRAINING);
  TryStep({rank.key.job_uid, rank.key.attempt});
}

void RankWorld::TryStep(const GangKey& key) {
  Gang& gang = *gangs_.at(key);
  if (gang.stepping || gang.broken) {
    return;
  }
  Rank* first = Find({key.first, key.second, 0});
  if (first == nullptr || !first->ready) {
    return;
  }
  for (std::int32_t rank = 0; rank < first->assignment->world_size(); ++rank) {
    const Rank* member = Find({key.first, key.second, rank});
    if (member == nullptr || !member->ready || member->leaving) {
      return;
    }
  }
  gang.stepping = true;
  loop_->After(loop_->Uniform(200, 1000) * kMilli, [this, key] { StepGang(key); });
}

// One step of all ranks: the control vector makes plan version and wishes common.
void RankWorld::StepGang(const GangKey& key) {
  Gang& gang = *gangs_.at(key);
  gang.stepping = false;
  if (gang.broken || gang.hung) {
    return;
  }
  std::vector<Rank*> members;
  Rank* first = Find({key.first, key.second, 0});
  const std::int32_t world = first == nullptr ? 0 : first->assignment->world_size();
  std::int64_t plan = 1 << 30;
  bool stop = false, suspend = false, save = false, at_once = false;
  for (std::int32_t rank = 0; rank < world; ++rank) {
    Rank* member = Find({key.first, key.second, rank});
    if (member == nullptr || member->leaving) {
      return;  // PeersNotice is on its way
    }
    members.push_back(member);
    plan = std::min(plan, member->plan_held);
    stop = stop || member->wishes.stop();
    suspend = suspend || member->wishes.suspend();
    save = save || member->wishes.checkpoint();
    at_once = at_once || member->wishes.stop_without_checkpoint();
  }
  if (members.empty()) {
    return;
  }
  const std::int64_t total = first->assignment->spec().train().steps();
  gang.step = std::min(gang.step + 1, total);  // loaded from the last step: nothing left to train
  for (Rank* member : members) {
    iv1::RankToWorker progress;
    progress.mutable_progress()->set_phase(iv1::RANK_TRAINING);
    progress.mutable_progress()->set_step(gang.step);
    Say(*member, progress);
    if (plan > gang.plan_applied) {
      iv1::RankToWorker applied;
      applied.mutable_plan_applied()->set_version(plan);
      applied.mutable_plan_applied()->set_step(gang.step);
      Say(*member, applied);
    }
  }
  gang.plan_applied = std::max(gang.plan_applied, plan);
  iv1::RankToWorker report;
  report.mutable_step()->set_step(gang.step);
  report.mutable_step()->set_loss(5.0 / static_cast<double>(gang.step));
  report.mutable_step()->set_tokens(100);
  report.mutable_step()->set_step_seconds(0.5);
  report.mutable_step()->set_plan_version(plan);
  Say(*first, report);
  const bool last = gang.step >= total;
  const bool ends = last || stop || suspend || at_once;
  if (last || ((save || stop || suspend || gang.step % kCheckpointEvery == 0) && !at_once)) {
    const bool saved = disk_->Save(key.first, key.second, gang.step);
    iv1::RankToWorker done;
    done.mutable_checkpoint()->set_ok(saved);
    done.mutable_checkpoint()->set_step(gang.step);
    done.mutable_checkpoint()->set_path(StrCat("/", key.first, "/", gang.step));
    done.mutable_checkpoint()->set_error(saved ? "" : "fenced");
    Say(*first, done);
    if (!saved) {
      for (Rank* member : members) {
        iv1::RankOutcome outcome;
        outcome.set_failure_class(v1::RANK_EXIT);
        outcome.set_message("fenced");
        Leave(*member, outcome, 1);
      }
      return;
    }
    for (Rank* member : members) {
      member->wishes.set_checkpoint(false);
    }
  }
  if (ends) {
    if (last) {
      finished_.insert(key.first);
    }
    for (Rank* member : members) {
      iv1::RankOutcome outcome;
      outcome.set_step(gang.step);
      outcome.set_suspended(!last && suspend);
      outcome.set_stopped(!last && !suspend);
      Leave(*member, outcome, 0);
    }
    return;
  }
  TryStep(key);
}

void RankWorld::Leave(Rank& rank, iv1::RankOutcome outcome, int code) {
  if (rank.leaving) {
    return;
  }
  rank.leaving = true;
  const bool clean = code == 0;
  iv1::RankToWorker message;
  *message.mutable_outcome() = std::move(outcome);
  Say(rank, message);
  if (!clean || rank.phase < iv1::RANK_TRAINING) {
    PeersNotice({rank.key.job_uid, rank.key.attempt});
  }
  Later(rank, loop_->Uniform(2, 300) * kMilli, [this, code](Rank& r) { Exit(r.key, code, 0); });
}

void RankWorld::Exit(RankKey key, int code, int signal) {
  const auto found = ranks_.find(key);
  if (found == ranks_.end()) {
    return;
  }
  const std::string host = found->second->host;
  const std::int64_t stream = found->second->stream;
  const bool was_leaving = found->second->leaving;
  streams_.erase(stream);
  ranks_.erase(found);
  loop_->After(loop_->Uniform(1, 20) * kMilli,
               [this, host, stream] { to_agent_(host, RankStreamClosed{stream}); });
  loop_->After(loop_->Uniform(1, 20) * kMilli, [this, host, key, code, signal] {
    to_agent_(host, RankExited{key, ExitReason{.code = signal == 0 ? code : -1, .signal = signal},
                               "last line\n"});
  });
  if (!was_leaving) {
    PeersNotice({key.job_uid, key.attempt});
  }
}

// A dead peer breaks the collectives of the others, soon but not at once.
void RankWorld::PeersNotice(const GangKey& key) {
  const auto gang = gangs_.find(key);
  if (gang == gangs_.end() || gang->second->broken) {
    return;
  }
  gang->second->broken = true;
  for (auto& [rank_key, rank] : ranks_) {
    if (rank_key.job_uid != key.first || rank_key.attempt != key.second ||
        rank->phase < iv1::RANK_LOADING) {
      continue;
    }
    Later(*rank, loop_->Uniform(10, 4000) * kMilli, [this](Rank& r) {
      iv1::RankOutcome outcome;
      outcome.set_failure_class(v1::COLLECTIVE_TIMEOUT);
      outcome.set_message("connection closed by peer");
      Leave(r, outcome, 1);
    });
  }
}

void RankWorld::Signal(const std::string& host, const RankKey& key, int signal) {
  Rank* rank = Find(key);
  if (rank == nullptr || rank->host != host) {
    return;
  }
  if (signal == SIGTERM && loop_->Chance(0.3)) {
    return;  // ignores it; SIGKILL follows
  }
  Later(*rank, loop_->Uniform(1, 50) * kMilli,
        [this, signal](Rank& r) { Exit(r.key, -1, signal); });
}

void RankWorld::HostDied(const std::string& host) {
  std::set<GangKey> broken;
  std::erase_if(ranks_, [&](const auto& entry) {
    if (entry.second->host != host) {
      return false;
    }
    streams_.erase(entry.second->stream);
    broken.insert({entry.first.job_uid, entry.first.attempt});
    return true;
  });
  for (const GangKey& key : broken) {
    PeersNotice(key);
  }
}

void RankWorld::KillSome() {
  if (!ranks_.empty()) {
    auto victim = ranks_.begin();
    std::advance(victim, loop_->Uniform(0, static_cast<std::int64_t>(ranks_.size()) - 1));
    Exit(victim->first, -1, SIGKILL);
  }
}

void RankWorld::HangSome() {
  if (!gangs_.empty()) {
    auto victim = gangs_.begin();
    std::advance(victim, loop_->Uniform(0, static_cast<std::int64_t>(gangs_.size()) - 1));
    victim->second->hung = true;
  }
}

}  // namespace octavo::sim
