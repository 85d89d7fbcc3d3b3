#include "tests/sim/sim_cluster.h"

#include <algorithm>
#include <utility>

#include "base/status.h"
#include "base/str.h"
#include "proto/convert/error_detail.h"
#include "proto/spec/job_spec.h"

namespace octavo::sim {
namespace {

constexpr std::int64_t kMilli = 1000;
constexpr std::int64_t kSecond = 1000 * kMilli;

v1::JobSpec MakeSpec(const std::string& name, std::int32_t ranks, std::int64_t steps,
                     std::int32_t priority) {
  v1::JobSpec spec;
  spec.set_name(name);
  spec.set_priority(priority);
  spec.mutable_model()->set_family("mixtral");
  spec.mutable_model()->set_layers(4);
  spec.mutable_model()->set_hidden(128);
  spec.mutable_model()->set_heads(2);
  spec.mutable_model()->set_vocab_size(256);
  spec.mutable_model()->mutable_moe()->set_num_experts(12);
  spec.mutable_model()->mutable_moe()->set_experts_per_token(2);
  spec.mutable_model()->mutable_moe()->set_expert_hidden(128);
  spec.mutable_parallel()->set_ranks(ranks);
  spec.mutable_train()->set_steps(steps);
  spec.mutable_train()->set_sequence_length(64);
  spec.mutable_train()->set_global_batch(ranks);
  spec.mutable_data()->set_path("/data");
  spec.mutable_checkpoint()->set_path("/" + name);
  spec.mutable_precision()->set_recipe("fp8_flow");
  spec.mutable_restart()->set_max(1000);
  spec.mutable_restart()->set_max_without_progress(100);
  spec.mutable_restart()->set_backoff_seconds(1);
  spec.mutable_restart()->set_gang_timeout_seconds(30);
  spec.mutable_restart()->set_stall_timeout_seconds(40);
  ApplyDefaults(&spec);
  return spec;
}

}  // namespace

Cluster::Cluster(const ClusterOptions& options)
    : options_(options),
      loop_(options.seed),
      ranks_(&loop_, &disk_, [this](const std::string& host, Event event) {
        const int index = IndexOf(host);
        if (index >= 0) {
          ToAgent(index, event);
        }
      }) {
  hosts_.resize(static_cast<std::size_t>(options.workers));
  StartController();
  ControllerTick();
  for (int i = 0; i < options.workers; ++i) {
    hosts_[static_cast<std::size_t>(i)].name = StrCat("w", i);
    StartAgent(i);
    AgentTick(i);
  }
  for (int i = 0; i < options.jobs; ++i) {
    const auto ranks = static_cast<std::int32_t>(loop_.Uniform(1, 4));
    jobs_.push_back({.name = StrCat("job-", i), .request_id = StrCat("request-", i)});
    jobs_.back().spec = MakeSpec(jobs_.back().name, ranks, loop_.Uniform(20, 120),
                                 static_cast<std::int32_t>(loop_.Uniform(0, 2)));
  }
}

Cluster::~Cluster() = default;

int Cluster::IndexOf(const std::string& host) const {
  // "w3#2" is host w3 in its second life: events of an earlier life go nowhere.
  for (std::size_t i = 0; i < hosts_.size(); ++i) {
    if (hosts_[i].agent != nullptr && StrCat(hosts_[i].name, "#", hosts_[i].incarnation) == host) {
      return static_cast<int>(i);
    }
  }
  return -1;
}

void Cluster::Fail(const std::string& what) {
  if (violation_.empty()) {
    violation_ = StrCat("at ", static_cast<double>(loop_.now()) / 1e6, " s: ", what);
  }
}

// ---------------------------------------------------------------- controller

void Cluster::StartController() {
  CoreOptions options;
  options.seed = options_.seed * 1000 + static_cast<std::uint64_t>(core_life_);
  core_ = std::make_unique<Core>(options, &store_, nullptr);
  ++core_life_;
  const absl::Status recovered = core_->Recover(NowTime());
  if (!recovered.ok()) {
    Fail(StrCat("recovery failed: ", ToString(recovered)));
  }
  core_->TakeEffects();  // facts for metrics only
}

void Cluster::CrashController() {
  ++counts_.controller_crashes;
  core_.reset();
  host_of_session_.clear();
  for (std::size_t i = 0; i < hosts_.size(); ++i) {
    Close(static_cast<int>(i));
  }
  loop_.After(loop_.Uniform(100, 15000) * kMilli, [this] { StartController(); });
}

template <class Handle>
bool Cluster::OnCore(Handle handle) {
  if (core_ == nullptr) {
    return false;
  }
  handle(*core_);
  core_->Tick(NowTime());
  if (core_->WantsSchedule(NowTime())) {
    core_->Schedule(NowTime());
  }
  const StoreBatch batch = core_->TakeBatch();
  Effects effects = core_->TakeEffects();
  const bool crash = faults_ && !batch.empty() && loop_.Chance(0.003);
  if (crash && loop_.Chance(0.5)) {
    CrashController();  // before the commit: nobody has heard of it
    return false;
  }
  if (!batch.empty()) {
    for (const StoredEvent& event : batch.events) {
      if (event.event.revision() != last_revision_ + 1) {
        Fail(StrCat("revision ", event.event.revision(), " follows ", last_revision_));
      }
      last_revision_ = event.event.revision();
    }
    const absl::Status stored = store_.Commit(batch);
    if (!stored.ok()) {
      Fail(ToString(stored));
    }
  }
  if (crash) {
    CrashController();  // after the commit, before anybody is told
    return false;
  }
  for (const Effect& effect : effects) {
    Deliver(effect);
  }
  return true;
}

void Cluster::Deliver(const Effect& effect) {
  if (const auto* send = std::get_if<SendToWorker>(&effect)) {
    const auto index = host_of_session_.find(send->session);
    if (index == host_of_session_.end()) {
      return;
    }
    const std::shared_ptr<Connection> connection =
        hosts_[static_cast<std::size_t>(index->second)].connection;
    if (connection == nullptr || !connection->alive || connection->session != send->session) {
      return;
    }
    connection->down_free =
        std::max(connection->down_free, loop_.now() + loop_.Uniform(1, 40) * kMilli);
    loop_.At(connection->down_free,
             [this, index = index->second, connection, message = send->message] {
               if (connection->alive) {
                 ToAgent(index, FromController{message});
               }
             });
  } else if (const auto* close = std::get_if<CloseWorkerSession>(&effect)) {
    const auto index = host_of_session_.find(close->session);
    if (index != host_of_session_.end()) {
      loop_.After(50 * kMilli, [this, session = close->session, index = index->second] {
        const Host& host = hosts_[static_cast<std::size_t>(index)];
        if (host.connection != nullptr && host.connection->session == session) {
          Close(index);
        }
      });
    }
  }
}

void Cluster::ControllerTick() {
  OnCore([](Core&) {});
  Check();
  loop_.After(200 * kMilli, [this] { ControllerTick(); });
}

// ---------------------------------------------------------------- workers and links

void Cluster::StartAgent(int index) {
  Host& host = hosts_[static_cast<std::size_t>(index)];
  ++host.incarnation;
  AgentConfig config{.worker = host.name,
                     .incarnation = StrCat(host.name, "-", host.incarnation),
                     .address = "10.0.0.1",
                     .host = host.name,
                     .version = CoreOptions().version,
                     .device = "cpu",
                     .slots = std::vector<v1::SlotFacts>(static_cast<std::size_t>(options_.slots))};
  host.agent = std::make_unique<Agent>(config, loop_.now());
  Dial(index);
}

void Cluster::CrashAgent(int index) {
  Host& host = hosts_[static_cast<std::size_t>(index)];
  if (host.agent == nullptr) {
    return;
  }
  ++counts_.agent_crashes;
  ranks_.HostDied(StrCat(host.name, "#", host.incarnation));
  host.agent.reset();
  Close(index);
  loop_.After(loop_.Uniform(200, 20000) * kMilli, [this, index] { StartAgent(index); });
}

void Cluster::Dial(int index) {
  Host& host = hosts_[static_cast<std::size_t>(index)];
  if (host.dialling) {
    return;
  }
  host.dialling = true;
  loop_.After(loop_.Uniform(kReconnectBackoffMinMs, kReconnectBackoffMaxMs) * kMilli,
              [this, index] {
                Host& dialling = hosts_[static_cast<std::size_t>(index)];
                dialling.dialling = false;
                if (dialling.agent == nullptr || dialling.connection != nullptr) {
                  return;
                }
                if (dialling.cut || core_ == nullptr) {
                  Dial(index);
                  return;
                }
                dialling.connection = std::make_shared<Connection>();
                dialling.connection->session = next_session_++;
                host_of_session_[dialling.connection->session] = index;
                ToAgent(index, SessionOpened{});
              });
}

// Both sides notice; each in its own time. The controller may not notice at all: then the lease
// does.
void Cluster::Close(int index) {
  Host& host = hosts_[static_cast<std::size_t>(index)];
  if (host.connection == nullptr) {
    return;
  }
  const std::shared_ptr<Connection> closed = std::exchange(host.connection, nullptr);
  closed->alive = false;
  if (!loop_.Chance(0.3)) {
    loop_.After(loop_.Uniform(1, 3000) * kMilli,
                [this, session = closed->session, life = core_life_] {
                  if (core_ != nullptr && life == core_life_) {
                    OnCore([&](Core& core) { core.SessionClosed(session, NowTime()); });
                  }
                });
  }
  if (host.agent != nullptr) {
    ToAgent(index, SessionClosed{"closed"});
    Dial(index);
  }
}

void Cluster::Cut(int index, std::int64_t micros) {
  Host& host = hosts_[static_cast<std::size_t>(index)];
  if (host.cut) {
    return;
  }
  ++counts_.cuts;
  host.cut = true;
  Close(index);
  loop_.After(micros, [this, index] { hosts_[static_cast<std::size_t>(index)].cut = false; });
}

void Cluster::ToAgent(int index, const Event& event) {
  Host& host = hosts_[static_cast<std::size_t>(index)];
  if (host.agent != nullptr) {
    Carry(index, host.agent->Handle(event, loop_.now()));
  }
}

void Cluster::Carry(int index, Commands commands) {
  Host& host = hosts_[static_cast<std::size_t>(index)];
  const std::string life = StrCat(host.name, "#", host.incarnation);
  for (Command& command : commands) {
    if (auto* up = std::get_if<SendToController>(&command)) {
      const std::shared_ptr<Connection> connection = host.connection;
      if (connection == nullptr) {
        continue;
      }
      connection->up_free =
          std::max(connection->up_free, loop_.now() + loop_.Uniform(1, 40) * kMilli);
      loop_.At(connection->up_free, [this, connection, message = std::move(up->message)] {
        if (connection->alive) {
          OnCore([&](Core& core) { core.WorkerMessage(connection->session, message, NowTime()); });
        }
      });
    } else if (std::holds_alternative<CloseSession>(command)) {
      loop_.After(kMilli, [this, index] { Close(index); });
    } else if (const auto* spawn = std::get_if<SpawnRank>(&command)) {
      ranks_.Spawn(life, spawn->key);
    } else if (const auto* signal = std::get_if<SignalRank>(&command)) {
      ranks_.Signal(life, signal->key, signal->signal);
    } else if (const auto* to_rank = std::get_if<SendToRank>(&command)) {
      loop_.After(kMilli, [this, stream = to_rank->stream, message = to_rank->message] {
        ranks_.ToRank(stream, message);
      });
    }
  }
}

void Cluster::AgentTick(int index) {
  ToAgent(index, Tick{});
  loop_.After(250 * kMilli, [this, index] { AgentTick(index); });
}

// ---------------------------------------------------------------- client

void Cluster::SubmitOrRetry(ClientJob& job) {
  absl::StatusOr<v1::Job> answer = UnavailableError("no controller");
  const bool answered = OnCore([&](Core& core) {
    answer = core.Submit({.request_id = job.request_id,
                          .spec = job.spec,
                          .spec_yaml = job.spec.name(),
                          .caller = "sim"},
                         NowTime());
  });
  ++(job.acknowledged ? counts_.retries : counts_.submits);
  if (!answered) {
    return;  // the client does not know; it asks again with the same id
  }
  if (!answer.ok()) {
    Fail(StrCat("submit of ", job.name, ": ", ToString(answer.status())));
    return;
  }
  if (job.acknowledged && answer->uid() != job.uid) {
    Fail(StrCat("request ", job.request_id, " gave ", answer->uid(), " and before ", job.uid));
  }
  job.acknowledged = true;
  job.uid = answer->uid();
}

void Cluster::ClientAct() {
  ClientJob& job = jobs_[static_cast<std::size_t>(
      loop_.Uniform(0, static_cast<std::int64_t>(jobs_.size()) - 1))];
  if (!job.acknowledged || loop_.Chance(0.1)) {
    SubmitOrRetry(job);
    return;
  }
  const std::int64_t what = loop_.Uniform(0, 99);
  OnCore([&](Core& core) {
    if (what < 3) {
      ++counts_.verbs;
      core.Verb(JobVerb::kCancel, {.name = job.name}, NowTime()).IgnoreError();
    } else if (what < 13) {
      ++counts_.verbs;
      core.Verb(JobVerb::kSuspend, {.name = job.name}, NowTime()).IgnoreError();
    } else if (what < 43) {
      ++counts_.verbs;
      core.Verb(JobVerb::kResume, {.name = job.name}, NowTime()).IgnoreError();
    } else if (what < 50) {
      core.Verb(JobVerb::kCheckpoint, {.name = job.name}, NowTime()).IgnoreError();
    } else if (what < 60) {
      PlanEdit edit{.name = job.name};
      v1::PrecisionOverride& change = edit.overrides.emplace_back();
      change.set_layers(StrCat(loop_.Uniform(0, 3)));
      change.mutable_recipe()->set_kind(loop_.Chance(0.5) ? "bf16" : "fp8_flow");
      counts_.plans += core.SetPlan(edit, NowTime()).ok() ? 1 : 0;
    } else if (what < 66) {
      const std::string worker = StrCat("w", loop_.Uniform(0, options_.workers - 1));
      core.Drain({.name = worker, .reason = "sim", .undo = loop_.Chance(0.7)}, NowTime())
          .IgnoreError();
    }
  });
}

void Cluster::Fault() {
  const auto host = static_cast<int>(loop_.Uniform(0, options_.workers - 1));
  switch (loop_.Uniform(0, 9)) {
    case 0:
    case 1:
    case 2:
      ++counts_.kills;
      ranks_.KillSome();
      break;
    case 3:
    case 4:
      Cut(host, loop_.Uniform(100, 30000) * kMilli);
      break;
    case 5:
      Close(host);
      break;
    case 6:
    case 7:
      CrashAgent(host);
      break;
    case 8:
      if (core_ != nullptr) {
        CrashController();
      }
      break;
    default:
      ++counts_.hangs;
      ranks_.HangSome();
  }
}

// ---------------------------------------------------------------- phases and invariants

void Cluster::SafetyPhase(int seconds) {
  faults_ = true;
  for (int i = 0; i < seconds && violation_.empty(); ++i) {
    if (loop_.Chance(0.5)) {
      ClientAct();
    }
    if (loop_.Chance(options_.faults_per_second)) {
      Fault();
    }
    loop_.RunUntil(loop_.now() + kSecond);
  }
}

void Cluster::LivenessPhase(int seconds) {
  faults_ = false;
  const std::int64_t end = loop_.now() + seconds * kSecond;
  while (loop_.now() < end && violation_.empty()) {
    for (ClientJob& job : jobs_) {
      if (!job.acknowledged) {
        SubmitOrRetry(job);
      }
    }
    OnCore([&](Core& core) {
      for (int i = 0; i < options_.workers; ++i) {
        core.Drain({.name = StrCat("w", i), .undo = true}, NowTime()).IgnoreError();
      }
      for (const ClientJob& job : jobs_) {
        if (job.acknowledged && core.Get(job.name).ok() &&
            core.Get(job.name)->state() == v1::SUSPENDED) {
          core.Verb(JobVerb::kResume, {.name = job.name}, NowTime()).IgnoreError();
        }
      }
    });
    loop_.RunUntil(loop_.now() + 10 * kSecond);
    if (Unfinished().empty()) {
      return;
    }
  }
}

void Cluster::Check() {
  if (!ranks_.violation().empty()) {
    Fail(ranks_.violation());
  }
  if (core_ == nullptr) {
    return;
  }
  const CoreState& state = core_->state();
  for (ClientJob& job : jobs_) {
    if (!job.acknowledged) {
      continue;
    }
    const auto found = state.jobs.find(job.uid);
    if (found == state.jobs.end()) {
      Fail(StrCat(job.name, " was acknowledged and is gone"));
      continue;
    }
    const v1::JobState now = found->second->job().state();
    if (job.terminal != v1::JOB_STATE_UNSPECIFIED && now != job.terminal) {
      Fail(StrCat(job.name, " was ", v1::JobState_Name(job.terminal), " and is ",
                  v1::JobState_Name(now)));
    }
    if (IsTerminal(static_cast<JobState>(now))) {
      job.terminal = now;
    }
    // Success is told only by evidence, and what succeeded is on the disk.
    if (now == v1::SUCCEEDED &&
        (!ranks_.finished(job.uid) || disk_.newest_step(job.uid) != job.spec.train().steps())) {
      Fail(StrCat(job.name, " is SUCCEEDED, but its ranks have not finished"));
    }
  }
  std::set<std::pair<std::string, std::int32_t>> slots;
  for (const auto& [uid, job] : state.jobs) {
    std::int32_t number = 0;
    for (const internal::v1::StoredAttempt& past : job->past) {
      if (past.attempt().number() <= number) {
        Fail("attempt numbers do not grow");
      }
      number = past.attempt().number();
    }
    if (IsWaiting(job->state()) && !state.schedule_wanted && !job->job().has_pending()) {
      Fail(StrCat(job->job().name(), " waits without a reason"));
    }
    if (job->current.has_value() != HoldsSlots(job->state())) {
      Fail(StrCat(job->job().name(), " is ", Name(job->state()), " with",
                  job->current.has_value() ? "" : "out", " an attempt"));
    }
    if (!job->current.has_value()) {
      continue;
    }
    if (job->current->number() <= number) {
      Fail("attempt numbers do not grow");
    }
    for (int rank = 0; rank < job->current->stored.ranks_size(); ++rank) {
      const v1::Placement& placement = job->current->stored.attempt().placements(rank);
      if (!job->current->stored.ranks(rank).ended() &&
          !slots.insert({placement.worker(), placement.slot()}).second) {
        Fail(StrCat(placement.worker(), " slot ", placement.slot(), " is given to two ranks"));
      }
    }
  }
}

std::string Cluster::Unfinished() {
  std::string text;
  for (const ClientJob& job : jobs_) {
    if (core_ == nullptr || !job.acknowledged) {
      StrAppend(&text, job.name, " is not even acknowledged; ");
      continue;
    }
    const auto found = core_->state().jobs.find(job.uid);
    if (found == core_->state().jobs.end() || !IsTerminal(found->second->state())) {
      StrAppend(&text, job.name, " is ",
                found == core_->state().jobs.end() ? "gone" : Name(found->second->state()), ": ",
                found == core_->state().jobs.end() ? "" : found->second->job().message(), " ",
                found == core_->state().jobs.end() ? "" : found->second->job().pending().sentence(),
                "; ");
    }
  }
  return text;
}

std::int64_t Cluster::attempts() {
  std::int64_t attempts = 0;
  if (core_ != nullptr) {
    for (const auto& [uid, job] : core_->state().jobs) {
      attempts += static_cast<std::int64_t>(job->past.size());
    }
  }
  return attempts;
}

std::map<std::string, int> Cluster::ends() {
  std::map<std::string, int> ends;
  if (core_ != nullptr) {
    for (const auto& [uid, job] : core_->state().jobs) {
      for (const internal::v1::StoredAttempt& past : job->past) {
        ++ends[v1::FailureClass_Name(past.attempt().end_class())];
      }
    }
  }
  return ends;
}

}  // namespace octavo::sim
