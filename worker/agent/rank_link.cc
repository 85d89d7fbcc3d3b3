#include "worker/agent/rank_link.h"

#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <deque>
#include <utility>

#include "base/check.h"
#include "base/log.h"
#include "base/status.h"
#include "octavo/internal/v1/rank_service.grpc.pb.h"
#include "proto/limits.h"

namespace octavo {

class RankLink::Reactor final
    : public grpc::ServerBidiReactor<iv1::RankToWorker, iv1::WorkerToRank> {
 public:
  Reactor(RankLink* link, std::int64_t stream) : link_(link), stream_(stream) {}

  void Begin() { StartRead(&incoming_); }

  void OnReadDone(bool ok) override {
    if (!ok) {
      End(grpc::Status::OK);  // the rank half-closed, or the call broke
      return;
    }
    if (!link_->on_event_(FromRank{stream_, incoming_})) {
      End({grpc::StatusCode::RESOURCE_EXHAUSTED, "the worker's mailbox is full or closed"});
    }
  }

  void OnWriteDone(bool ok) override {
    std::lock_guard<std::mutex> lock(mutex_);
    writing_ = false;
    outgoing_.pop_front();
    if (ok) {
      StartNextWrite();
    }
  }

  void OnCancel() override { End(grpc::Status::CANCELLED); }

  void OnDone() override {
    link_->Forget(stream_);
    link_->on_event_(RankStreamClosed{stream_});
    delete this;
  }

  void ReadNext() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!finished_) {
      StartRead(&incoming_);
    }
  }

  void Send(iv1::WorkerToRank message) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (finished_) {
      return;
    }
    if (outgoing_.size() >= static_cast<std::size_t>(kMaxRankQueue)) {
      finished_ = true;
      Finish({grpc::StatusCode::RESOURCE_EXHAUSTED, "the rank does not read what it is sent"});
      return;
    }
    outgoing_.push_back(std::move(message));
    StartNextWrite();
  }

  void End(const grpc::Status& status) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!finished_) {
      finished_ = true;
      Finish(status);
    }
  }

 private:
  // REQUIRES: mutex_ held. gRPC allows one write in flight.
  void StartNextWrite() {
    if (!writing_ && !finished_ && !outgoing_.empty()) {
      writing_ = true;
      StartWrite(&outgoing_.front());
    }
  }

  RankLink* const link_;
  const std::int64_t stream_;
  iv1::RankToWorker incoming_;  // of the one read in flight
  std::mutex mutex_;
  std::deque<iv1::WorkerToRank> outgoing_;  // guarded by mutex_; front is in flight while writing_
  bool writing_ = false;                    // guarded by mutex_
  bool finished_ = false;                   // guarded by mutex_
};

class RankLink::Service final : public iv1::RankService::CallbackService {
 public:
  explicit Service(RankLink* link) : link_(link) {}

  grpc::ServerBidiReactor<iv1::RankToWorker, iv1::WorkerToRank>* Session(
      grpc::CallbackServerContext*) override {
    Reactor* reactor;
    {
      std::lock_guard<std::mutex> lock(link_->mutex_);
      reactor = new Reactor(link_, ++link_->last_stream_);
      link_->reactors_[link_->last_stream_] = reactor;
      if (link_->stopping_) {
        reactor->End({grpc::StatusCode::UNAVAILABLE, "the worker is stopping"});
        return reactor;
      }
    }
    reactor->Begin();
    return reactor;
  }

 private:
  RankLink* const link_;
};

RankLink::RankLink(OnEvent on_event)
    : on_event_(std::move(on_event)), service_(std::make_unique<Service>(this)) {}

RankLink::~RankLink() { Stop(); }

absl::Status RankLink::Start(const std::string& address) {
  constexpr std::string_view kScheme = "unix:";
  OCTAVO_CHECK(StartsWith(address, kScheme), "address %s", address.c_str());
  const std::string path = address.substr(kScheme.size());
  // The state folder's lock says that no other daemon uses it; a leftover file would refuse the
  // bind.
  ::unlink(path.c_str());
  grpc::ServerBuilder builder;
  builder.SetMaxReceiveMessageSize(static_cast<int>(kMaxInternalMessageBytes));
  builder.SetMaxSendMessageSize(static_cast<int>(kMaxInternalMessageBytes));
  int port = 0;
  builder.AddListeningPort(address, grpc::InsecureServerCredentials(), &port);
  builder.RegisterService(service_.get());
  server_ = builder.BuildAndStart();
  if (server_ == nullptr || port == 0) {
    return UnavailableError(
        StrCat("listening for ranks on ", address, ": cannot bind (path too long, or no rights?)"));
  }
  ::chmod(path.c_str(), 0600);  // ranks run as the daemon's own user
  return absl::OkStatus();
}

void RankLink::Stop() {
  if (server_ == nullptr) {
    return;
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
    for (const auto& [stream, reactor] : reactors_) {
      reactor->End({grpc::StatusCode::UNAVAILABLE, "the worker is stopping"});
    }
  }
  server_->Shutdown(std::chrono::system_clock::now() + std::chrono::milliseconds(kShutdownLimitMs));
  server_.reset();
}

void RankLink::ReadNext(std::int64_t stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = reactors_.find(stream);
  if (found != reactors_.end()) {
    found->second->ReadNext();
  }
}

void RankLink::Send(std::int64_t stream, iv1::WorkerToRank message) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = reactors_.find(stream);
  if (found != reactors_.end()) {
    found->second->Send(std::move(message));
  }
}

void RankLink::Close(std::int64_t stream, const std::string& reason) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = reactors_.find(stream);
  if (found != reactors_.end()) {
    LogInfo("rank_stream_closed", {{"stream", stream}, {"reason", reason}});
    found->second->End({grpc::StatusCode::FAILED_PRECONDITION, reason});
  }
}

void RankLink::Forget(std::int64_t stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  reactors_.erase(stream);
}

}  // namespace octavo
