#include "controller/api/watch_hub.h"

#include <algorithm>

#include "controller/api/stream_out.h"
#include "controller/core/jobs.h"
#include "proto/jobs/job_state.h"
#include "proto/limits.h"

namespace octavo {

class WatchStream final : public grpc::ServerWriteReactor<v1::JobEvent> {
 public:
  WatchStream(WatchHub* hub, grpc::CallbackServerContext* context)
      : hub_(hub), context_(context), out_(this, static_cast<std::size_t>(kMaxWatchQueue)) {}

  static std::shared_ptr<WatchStream> Make(WatchHub* hub, grpc::CallbackServerContext* context) {
    auto stream = std::make_shared<WatchStream>(hub, context);
    stream->self_ = stream;  // until OnDone
    return stream;
  }

  // On the mailbox's thread, before any Publish for this stream.
  void Begin(WatchStart start) {
    revision_ = start.revision;
    for (v1::JobEvent& event : start.backlog) {
      out_.Push(std::move(event));
    }
    if (start.over) {
      out_.FinishAfterQueue(grpc::Status::OK);
    }
  }

  // On the mailbox's thread.
  void Take(const v1::JobEvent& event) {
    const bool progress = event.kind() == "PROGRESS" || event.kind() == "BOOKMARK";
    if (!progress && event.revision() <= revision_) {
      return;  // in the backlog
    }
    revision_ = std::max(revision_, event.revision());
    const auto same = [&event](const v1::JobEvent& queued) {
      return queued.kind() == event.kind();
    };
    if (progress && out_.ReplaceNewest(event, same)) {
      return;
    }
    if (out_.Push(event) == decltype(out_)::PushOutcome::kTooSlow) {
      hub_->rpc_.metrics->CountWatchTooSlow();
      End(WithDetail(ResourceExhaustedError(StrCat(
                         "the reader is more than ", kMaxWatchQueue,
                         " events behind; watch again from revision of the last event received")),
                     "WATCH_TOO_SLOW"));
      return;
    }
    last_sent_micros_ = 0;
    if (!progress && IsTerminal(static_cast<JobState>(event.state()))) {
      out_.FinishAfterQueue(grpc::Status::OK);
    }
  }

  void Bookmark(std::int64_t monotonic_micros) {
    if (last_sent_micros_ == 0) {
      last_sent_micros_ = monotonic_micros;
    } else if (monotonic_micros - last_sent_micros_ >= kWatchBookmarkMs * 1000) {
      last_sent_micros_ = monotonic_micros;
      v1::JobEvent bookmark;
      bookmark.set_revision(revision_);
      bookmark.set_kind("BOOKMARK");
      SetTimestamp(bookmark.mutable_time(), RealClock::Get().UnixMicros());
      if (out_.idle()) {  // a reader that is behind has enough to read
        out_.Push(std::move(bookmark));
      }
    }
  }

  void End(const absl::Status& status) {
    std::call_once(ended_, [&] { out_.FinishNow(ToGrpc(context_, status)); });
  }

  void OnWriteDone(bool ok) override { out_.WriteDone(ok); }
  void OnCancel() override {
    out_.FinishNow(grpc::Status(grpc::StatusCode::CANCELLED, "the watcher went away"));
  }
  void OnDone() override {
    hub_->Done(this);
    self_.reset();
  }

 private:
  WatchHub* const hub_;
  grpc::CallbackServerContext* const context_;
  std::shared_ptr<WatchStream> self_;
  StreamOut<WatchStream, v1::JobEvent> out_;
  std::once_flag ended_;
  // Used on the mailbox's thread.
  std::int64_t revision_ = 0;
  std::int64_t last_sent_micros_ = 0;
  // Guarded by the hub's mutex.
  friend class WatchHub;
  std::string job_uid_;  // empty: not attached
  bool done_ = false;
};

grpc::ServerWriteReactor<v1::JobEvent>* WatchHub::Open(grpc::CallbackServerContext* context,
                                                       const v1::WatchJobRequest* request) {
  std::shared_ptr<WatchStream> stream = WatchStream::Make(this, context);
  streams_.fetch_add(1, std::memory_order_relaxed);
  const absl::StatusOr<std::string> caller = rpc_.authorizer->Check(*context, Role::kViewer);
  if (!caller.ok()) {
    stream->End(caller.status());
    return stream.get();
  }
  const bool posted = rpc_.mailbox->Post([this, stream, request = *request](Core& core, Now now) {
    absl::StatusOr<WatchStart> start = core.Watch(request, now);
    return Mailbox::Release(
        [this, stream, start = std::move(start)](const absl::Status& stored) mutable {
          if (!stored.ok() || !start.ok()) {
            stream->End(stored.ok() ? start.status() : stored);
            return;
          }
          const std::string uid = start->job_uid;
          stream->Begin(*std::move(start));
          Attach(stream, uid);
        });
  });
  if (!posted) {
    stream->End(MailboxFull());
  }
  return stream.get();
}

void WatchHub::Attach(const std::shared_ptr<WatchStream>& stream, const std::string& job_uid) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!closed_ && !stream->done_) {
      stream->job_uid_ = job_uid;
      by_job_[job_uid].push_back(stream);
      return;
    }
  }
  PostUnwatch(job_uid);
  stream->End(UnavailableError("the controller is stopping; watch again"));
}

void WatchHub::Done(WatchStream* stream) {
  streams_.fetch_sub(1, std::memory_order_relaxed);
  std::string job_uid;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stream->done_ = true;
    job_uid = stream->job_uid_;
    const auto found = by_job_.find(job_uid);
    if (found != by_job_.end()) {
      std::erase_if(found->second, [stream](const auto& other) { return other.get() == stream; });
      if (found->second.empty()) {
        by_job_.erase(found);
      }
    }
  }
  if (!job_uid.empty()) {
    PostUnwatch(job_uid);
  }
}

void WatchHub::PostUnwatch(const std::string& job_uid) {
  rpc_.mailbox->Post([job_uid](Core& core, Now) {
    core.Unwatch(job_uid);
    return Mailbox::Release();
  });
}

std::vector<std::shared_ptr<WatchStream>> WatchHub::All() const {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<std::shared_ptr<WatchStream>> streams;
  for (const auto& [uid, of_job] : by_job_) {
    streams.insert(streams.end(), of_job.begin(), of_job.end());
  }
  return streams;
}

void WatchHub::Publish(const std::string& job_uid, const v1::JobEvent& event) {
  std::vector<std::shared_ptr<WatchStream>> streams;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = by_job_.find(job_uid);
    if (found == by_job_.end()) {
      return;
    }
    streams = found->second;
  }
  for (const std::shared_ptr<WatchStream>& stream : streams) {
    stream->Take(event);
  }
}

void WatchHub::Sweep(std::int64_t monotonic_micros) {
  for (const std::shared_ptr<WatchStream>& stream : All()) {
    stream->Bookmark(monotonic_micros);
  }
}

void WatchHub::CloseAll() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    closed_ = true;
  }
  for (const std::shared_ptr<WatchStream>& stream : All()) {
    stream->End(UnavailableError("the controller is stopping; watch again"));
  }
}

}  // namespace octavo
