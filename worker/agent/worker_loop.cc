#include "worker/agent/worker_loop.h"

#include <algorithm>
#include <chrono>
#include <deque>
#include <utility>

#include "base/log.h"
#include "base/status.h"
#include "proto/limits.h"
#include "worker/agent/log_reader.h"

namespace octavo {
namespace {

template <class... Functions>
struct Overloaded : Functions... {
  using Functions::operator()...;
};
template <class... Functions>
Overloaded(Functions...) -> Overloaded<Functions...>;

}  // namespace

WorkerLoop::WorkerLoop(Options options, const Clock& clock)
    : options_(std::move(options)),
      clock_(clock),
      metrics_({.version = options_.agent.version,
                .series_max = static_cast<std::size_t>(kMaxMetricSeries)}),
      host_(options_.ranks, [this](RankExited exited) { Deliver(std::move(exited)); }),
      link_([this](Event event) { return TryDeliver(std::move(event)); }),
      session_(options_.session, [this](Event event) { Deliver(std::move(event)); }) {}

WorkerLoop::~WorkerLoop() {
  mailbox_.Close();
  session_.Stop();
  link_.Stop();
  http_.Stop();
}

absl::Status WorkerLoop::Start() {
  last_round_micros_ = clock_.MonotonicMicros();
  http_.Handle("/metrics", [this](const HttpRequest&) {
    return HttpResponse{.content_type = "text/plain; version=0.0.4; charset=utf-8",
                        .body = metrics_.Text()};
  });
  http_.Handle("/healthz", [this](const HttpRequest&) {
    const std::int64_t silent = clock_.MonotonicMicros() - last_round_micros_;
    return silent < kLoopSilentMicros
               ? HttpResponse{.body = "ok\n"}
               : HttpResponse{
                     .status = 503,
                     .body = StrCat("the loop has not come round for ",
                                    HumanDuration(static_cast<double>(silent) / 1e6), "\n")};
  });
  http_.Handle("/readyz", [this](const HttpRequest&) { return Ready(); });
  if (const absl::Status http = http_.Start(options_.listen_http); !http.ok()) {
    return MakeStatus(
        http.code(),
        StrCat("--listen-http ", options_.listen_http, ": ", Message(http),
               "; end what listens there (another worker of this host?), or give this one its own "
               "address: --listen-http 0.0.0.0:0 takes a free port"));
  }
  const std::string host = options_.listen_http.substr(0, options_.listen_http.rfind(':'));
  const bool any = host.empty() || host == "0.0.0.0" || host == "[::]";
  options_.agent.http_address = StrCat(any ? options_.agent.address : host, ":", http_.port());
  RETURN_IF_ERROR(host_.PruneJobs());
  RETURN_IF_ERROR(link_.Start(options_.ranks.socket_address));
  agent_ = std::make_unique<Agent>(options_.agent, clock_.MonotonicMicros());
  session_.Start();
  return absl::OkStatus();
}

void WorkerLoop::Run(const StopSignals& signals) {
  std::int64_t next_tick = clock_.MonotonicMicros();
  bool drained_once = false;
  while (!agent_->finished(clock_.MonotonicMicros())) {
    const std::int64_t now = clock_.MonotonicMicros();
    last_round_micros_ = now;
    if (now >= next_tick) {
      next_tick = now + kTickMicros;
      HandleOne(Tick{});
      metrics_.Sweep(now);
      PublishState();
      if (const std::optional<int> signal = signals.Wait(SteadyTime::min())) {
        if (drained_once) {
          LogWarning("second_signal", {{"signal", *signal}, {"effect", "ranks are killed"}});
          return;  // the destructors kill what is left
        }
        drained_once = true;
        HandleOne(DrainRequested{StrCat("the worker got signal ", *signal)});
      }
    }
    if (const std::optional<Event> event =
            mailbox_.Pop(DeadlineAfter(std::chrono::microseconds(kTickMicros)))) {
      HandleOne(*event);
      if (const auto* from_rank = std::get_if<FromRank>(&*event)) {
        link_.ReadNext(from_rank->stream);
      }
    }
  }
  LogInfo("drained");
}

bool WorkerLoop::TryDeliver(Event event) { return mailbox_.TryPush(std::move(event)); }

void WorkerLoop::Deliver(Event event) {
  while (mailbox_.Push(std::move(event), DeadlineAfter(std::chrono::seconds(10))) ==
         PushResult::kTimeout) {
    LogWarning("mailbox_full", {{"capacity", mailbox_.capacity()}});
  }
}

void WorkerLoop::HandleOne(const Event& event) {
  // A command may have an immediate answer (RankSpawned), which is one more event.
  std::deque<Event> events = {event};
  while (!events.empty()) {
    Commands commands = agent_->Handle(events.front(), clock_.MonotonicMicros());
    events.pop_front();
    for (Command& command : commands) {
      if (const auto* spawn = std::get_if<SpawnRank>(&command)) {
        const absl::StatusOr<int> pid = host_.Spawn(spawn->key);
        if (pid.ok()) {
          events.push_back(RankSpawned{spawn->key, *pid});
        } else {
          events.push_back(RankSpawnFailed{spawn->key, Message(pid.status())});
        }
      } else {
        Carry(command);
      }
    }
  }
  registered_ = agent_->registered();
  draining_ = agent_->draining();
}

void WorkerLoop::Carry(Command& command) {
  const auto warn = [](const char* event, const absl::Status& status) {
    if (!status.ok()) {
      LogWarning(event, {{"error", ToString(status)}});
    }
  };
  std::visit(
      Overloaded{
          [&](SendToController& c) { session_.Send(std::move(c.message)); },
          [&](CloseSession& c) { session_.Close(c.reason); },
          [&](SpawnRank&) {},  // handled by HandleOne
          [&](SignalRank& c) { warn("signal_failed", host_.Signal(c.key, c.signal)); },
          [&](SendToRank& c) { link_.Send(c.stream, std::move(c.message)); },
          [&](CloseRankStream& c) { link_.Close(c.stream, c.reason); },
          [&](ReadLog& c) {
            iv1::WorkerToController message;
            *message.mutable_log() = ReadLogChunk(c.request, host_.RanksFolder());
            session_.Send(std::move(message));
          },
          [&](ForgetJobFiles& c) { warn("forget_failed", host_.ForgetJob(c.job_uid)); },
          [&](ObserveStep& c) { metrics_.ObserveStep(c.train_job, c.report, clock_.UnixMicros()); },
          [&](ObserveTelemetry& c) {
            metrics_.ObserveTelemetry(c.train_job, c.detail, c.snapshot);
          },
          [&](ObserveCheckpoint& c) {
            metrics_.ObserveCheckpoint(c.train_job, c.done, clock_.UnixMicros());
          },
          [&](ForgetJobSeries& c) { metrics_.ForgetJob(c.train_job, clock_.MonotonicMicros()); },
          [&](LogEvent& c) {
            Log(c.warning ? LogLevel::kWarning : LogLevel::kInfo, c.event, {{"detail", c.text}});
          },
      },
      command);
}

void WorkerLoop::PublishState() {
  const int slots = static_cast<int>(options_.agent.slots.size());
  const int poisoned = agent_->slots_poisoned();
  const int busy = agent_->slots_busy();
  metrics_.SetHost({.slots_free = std::max(0, slots - poisoned - busy),
                    .slots_busy = busy,
                    .slots_poisoned = poisoned,
                    .registered = registered_,
                    .draining = draining_,
                    .dropped_reports = agent_->dropped_reports()});
}

HttpResponse WorkerLoop::Ready() const {
  if (draining_) {
    return {.status = 503, .body = "draining\n"};
  }
  if (!registered_) {
    return {.status = 503,
            .body = StrCat("not registered with ", options_.session.controller, "\n")};
  }
  return {.body = "ok\n"};
}

}  // namespace octavo
