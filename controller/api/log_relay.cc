#include "controller/api/log_relay.h"

#include <algorithm>
#include <utility>

#include "controller/api/stream_out.h"
#include "proto/limits.h"

namespace octavo {
namespace {

constexpr std::size_t kChunksQueued = 8;

}  // namespace

// Its steps run one after the other: on the mailbox's thread, or from OnWriteDone when a chunk has
// left. At any time exactly one of {a question to the core, a question to a worker, a write, a
// pause} is pending, so the members below need no lock beyond `mutex_` for visibility.
class LogStream final : public grpc::ServerWriteReactor<v1::LogChunk> {
 public:
  LogStream(LogRelay* relay, grpc::CallbackServerContext* context,
            const v1::ReadLogsRequest& request)
      : relay_(relay), context_(context), request_(request), out_(this, kChunksQueued) {}

  void Begin(std::shared_ptr<LogStream> self) { self_ = std::move(self); }

  // Finds the attempt, then asks its first rank.
  void Resolve() {
    const std::shared_ptr<LogStream> self = shared();
    const bool posted = relay_->rpc_.mailbox->Post([self](Core& core, Now) {
      absl::StatusOr<Core::LogTarget> target =
          core.FindLog(self->request_.name(), self->request_.attempt());
      return Mailbox::Release(
          [self, target = std::move(target)](const absl::Status&) { self->OnTarget(target); });
    });
    if (!posted) {
      End(MailboxFull());
    }
  }

  void OnReply(const internal::v1::LogReply& reply) {
    if (!reply.error().empty()) {
      End(WithDetail(NotFoundError(StrCat("rank ", reply_rank(), ": ", reply.error())), "NO_LOGS"));
      return;
    }
    v1::LogChunk chunk;
    bool ask_again = false;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      asked_micros_ = 0;
      RankCursor& rank = ranks_[current_];
      rank.offset = reply.next_offset();
      rank.started = true;
      rank.at_end = reply.end();
      chunk.set_rank(rank.rank);
      chunk.set_attempt(attempt_);
      chunk.set_text(reply.text());
      chunk.set_end(reply.end() && !(request_.follow() && live_));
      ask_again = chunk.text().empty() && !chunk.end();
    }
    if (ask_again) {
      Next();
    } else if (out_.Push(std::move(chunk)) == decltype(out_)::PushOutcome::kTooSlow) {
      End(ResourceExhaustedError("the reader does not take what it asked for"));
    }
  }

  void OnWriteDone(bool ok) override {
    out_.WriteDone(ok);
    if (ok) {
      Next();
    }
  }

  // The next question, a pause, or the end.
  void Next() {
    enum class Step { kAsk, kEnd, kPause } step = Step::kAsk;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (ranks_[current_].at_end) {
        if (current_ + 1 < ranks_.size()) {
          ++current_;
        } else {
          current_ = 0;
          step = request_.follow() ? Step::kPause : Step::kEnd;
          paused_ = step == Step::kPause;
        }
      }
    }
    if (step == Step::kAsk) {
      Ask();
    } else if (step == Step::kEnd) {
      out_.FinishAfterQueue(grpc::Status::OK);
    }
  }

  void Sweep(std::int64_t now) {
    bool resolve = false;
    bool late = false;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      resolve = std::exchange(paused_, false);
      if (asked_micros_ == kJustAsked) {
        asked_micros_ = now;
      } else if (asked_micros_ != 0 && now - asked_micros_ > kUnaryDeadlineMs * 1000) {
        late = true;
      }
    }
    if (late) {
      End(WithDetail(UnavailableError(StrCat("the worker of rank ", reply_rank(),
                                             " did not answer within ", kUnaryDeadlineMs, " ms")),
                     "WORKER_NOT_CONNECTED"));
    } else if (resolve) {
      Resolve();  // is the attempt still the current one?
    }
  }

  void End(const absl::Status& status) {
    std::call_once(ended_, [&] { out_.FinishNow(ToGrpc(context_, status)); });
  }
  void OnCancel() override {
    out_.FinishNow(grpc::Status(grpc::StatusCode::CANCELLED, "the reader went away"));
  }
  void OnDone() override {
    relay_->Done(this);
    std::shared_ptr<LogStream> last;  // outlives the lock
    std::lock_guard<std::mutex> lock(self_mutex_);
    last = std::move(self_);
  }

 private:
  static constexpr std::int64_t kJustAsked = -1;
  struct RankCursor {
    std::int32_t rank = 0;
    std::int64_t offset = 0;
    bool started = false;
    bool at_end = false;
  };

  std::shared_ptr<LogStream> shared() {
    std::lock_guard<std::mutex> lock(self_mutex_);
    return self_;
  }
  std::int32_t reply_rank() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return ranks_.empty() ? 0 : ranks_[current_].rank;
  }

  void OnTarget(const absl::StatusOr<Core::LogTarget>& target) {
    if (!target.ok()) {
      End(target.status());
      return;
    }
    bool over = false;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (attempt_ == target->attempt) {
        // Another round; the last one after the attempt has ended.
        const bool named = request_.attempt() != 0;
        if (!live_ && last_round_done_) {
          over = named || target->job_over;
          paused_ = !over;
        } else {
          last_round_done_ = !target->live;
          live_ = target->live;
          for (RankCursor& rank : ranks_) {
            rank.at_end = false;
          }
        }
        if (paused_) {
          return;
        }
      } else {
        if (request_.rank() >= target->ranks) {
          over = true;
        }
        attempt_ = target->attempt;
        live_ = target->live;
        last_round_done_ = !target->live;
        current_ = 0;
        ranks_.clear();
        for (std::int32_t rank = 0; rank < target->ranks; ++rank) {
          if (request_.rank() < 0 || request_.rank() == rank) {
            ranks_.push_back({.rank = rank});
          }
        }
      }
    }
    if (over) {
      if (request_.rank() >= target->ranks) {
        End(WithDetail(InvalidArgumentError(StrCat("rank ", request_.rank(),
                                                   " does not exist; valid is 0 to ",
                                                   target->ranks - 1)),
                       "NO_LOGS"));
      } else {
        out_.FinishAfterQueue(grpc::Status::OK);
      }
      return;
    }
    Ask();
  }

  void Ask() {
    const std::shared_ptr<LogStream> self = shared();
    if (self == nullptr || out_.over()) {
      return;
    }
    internal::v1::LogRequest ask;
    ask.set_id(relay_->Register(self));
    {
      std::lock_guard<std::mutex> lock(mutex_);
      const RankCursor& rank = ranks_[current_];
      ask.set_attempt(attempt_);
      ask.set_rank(rank.rank);
      ask.set_offset(rank.offset);
      ask.set_max_bytes(kMaxLogChunkBytes);
      ask.set_tail_lines(rank.started ? 0 : request_.tail_lines());
      asked_micros_ = kJustAsked;
    }
    const bool posted = relay_->rpc_.mailbox->Post([self, ask](Core& core, Now) {
      absl::Status asked = core.AskLog(self->request_.name(), ask);
      return Mailbox::Release([self, asked = std::move(asked)](const absl::Status&) {
        if (!asked.ok()) {
          self->End(asked);
        }
      });
    });
    if (!posted) {
      End(MailboxFull());
    }
  }

  LogRelay* const relay_;
  grpc::CallbackServerContext* const context_;
  const v1::ReadLogsRequest request_;
  StreamOut<LogStream, v1::LogChunk> out_;
  std::once_flag ended_;
  std::mutex self_mutex_;
  std::shared_ptr<LogStream> self_;  // guarded by self_mutex_
  mutable std::mutex mutex_;
  // Guarded by mutex_.
  std::int32_t attempt_ = 0;
  bool live_ = false;             // the attempt was the current one when last looked at
  bool last_round_done_ = false;  // a round has begun after the attempt's end
  std::vector<RankCursor> ranks_;
  std::size_t current_ = 0;
  bool paused_ = false;
  std::int64_t asked_micros_ = 0;  // 0: no question to a worker is open
};

grpc::ServerWriteReactor<v1::LogChunk>* LogRelay::Open(grpc::CallbackServerContext* context,
                                                       const v1::ReadLogsRequest* request) {
  auto stream = std::make_shared<LogStream>(this, context, *request);
  stream->Begin(stream);
  bool closed = false;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    closed = closed_;
    streams_[stream.get()] = stream;
  }
  const absl::StatusOr<std::string> caller = rpc_.authorizer->Check(*context, Role::kViewer);
  if (closed) {
    stream->End(UnavailableError("the controller is stopping"));
  } else if (!caller.ok()) {
    stream->End(caller.status());
  } else {
    stream->Resolve();
  }
  return stream.get();
}

std::int64_t LogRelay::Register(const std::shared_ptr<LogStream>& stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  const std::int64_t id = next_id_++;
  waiting_[id] = stream;
  return id;
}

void LogRelay::Done(LogStream* stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  streams_.erase(stream);
  std::erase_if(waiting_, [stream](const auto& entry) { return entry.second.get() == stream; });
}

std::vector<std::shared_ptr<LogStream>> LogRelay::All() const {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<std::shared_ptr<LogStream>> all;
  for (const auto& [key, stream] : streams_) {
    all.push_back(stream);
  }
  return all;
}

void LogRelay::Answer(const internal::v1::LogReply& reply) {
  std::shared_ptr<LogStream> stream;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = waiting_.find(reply.id());
    if (found == waiting_.end()) {
      return;  // the reader went away
    }
    stream = std::move(found->second);
    waiting_.erase(found);
  }
  stream->OnReply(reply);
}

void LogRelay::Sweep(std::int64_t monotonic_micros) {
  for (const std::shared_ptr<LogStream>& stream : All()) {
    stream->Sweep(monotonic_micros);
  }
}

void LogRelay::CloseAll() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    closed_ = true;
  }
  for (const std::shared_ptr<LogStream>& stream : All()) {
    stream->End(UnavailableError("the controller is stopping; read the logs again"));
  }
}

}  // namespace octavo
