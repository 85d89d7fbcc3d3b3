#include "controller/api/worker_service.h"

#include <utility>
#include <vector>

#include "base/log.h"
#include "controller/api/stream_out.h"
#include "proto/limits.h"

namespace octavo {
namespace {

constexpr int kInFlight = 64;                // messages of one worker in the mailbox
constexpr std::size_t kCommandsMax = 65536;  // queued for one worker

}  // namespace

class WorkerSession final : public grpc::ServerBidiReactor<internal::v1::WorkerToController,
                                                           internal::v1::ControllerToWorker> {
 public:
  WorkerSession(WorkerServiceImpl* service, grpc::CallbackServerContext* context, SessionId id)
      : service_(service), context_(context), id_(id), out_(this, kCommandsMax) {}

  void Begin(std::shared_ptr<WorkerSession> self) {
    self_ = std::move(self);
    StartRead(&message_);
  }

  void Send(internal::v1::ControllerToWorker message) {
    if (out_.Push(message) == decltype(out_)::PushOutcome::kTooSlow) {
      End(ResourceExhaustedError(
          StrCat("the worker is more than ", kCommandsMax, " commands behind; register again")));
    }
  }

  // What is queued (a refusal, for example) goes first.
  void Close(const std::string& reason) {
    out_.FinishAfterQueue(grpc::Status(grpc::StatusCode::ABORTED, reason));
  }
  void End(const absl::Status& status) {
    std::call_once(ended_, [&] { out_.FinishNow(ToGrpc(context_, status)); });
  }

  void OnReadDone(bool ok) override {
    if (!ok) {
      out_.FinishNow(grpc::Status::OK);  // half-closed or broken
      return;
    }
    const bool read_on = in_flight_.fetch_add(1, std::memory_order_acq_rel) + 1 < kInFlight;
    auto message = std::make_shared<internal::v1::WorkerToController>(std::move(message_));
    message_.Clear();
    const bool posted = service_->rpc_.mailbox->Post(
        [self = self_, message = std::move(message)](Core& core, Now now) {
          core.WorkerMessage(self->id_, *message, now);
          return Mailbox::Release([self](const absl::Status&) { self->Processed(); });
        });
    if (!posted) {
      End(MailboxFull());  // reliable reports are repeated on the next stream
      return;
    }
    if (read_on) {
      StartRead(&message_);
    }
  }
  void OnWriteDone(bool ok) override { out_.WriteDone(ok); }
  void OnCancel() override {
    out_.FinishNow(grpc::Status(grpc::StatusCode::CANCELLED, "the worker went away"));
  }
  void OnDone() override {
    service_->rpc_.mailbox->Post([id = id_](Core& core, Now now) {
      core.SessionClosed(id, now);
      return Mailbox::Release();
    });
    service_->Remove(id_);
    self_.reset();
  }

 private:
  // A message has been handled and stored; reading goes on when it had paused.
  void Processed() {
    if (in_flight_.fetch_sub(1, std::memory_order_acq_rel) == kInFlight) {
      out_.IfOpen([this] { StartRead(&message_); });
    }
  }

  WorkerServiceImpl* const service_;
  grpc::CallbackServerContext* const context_;
  const SessionId id_;
  std::shared_ptr<WorkerSession> self_;
  internal::v1::WorkerToController message_;
  std::atomic<int> in_flight_{0};
  StreamOut<WorkerSession, internal::v1::ControllerToWorker> out_;
  std::once_flag ended_;
};

grpc::ServerBidiReactor<internal::v1::WorkerToController, internal::v1::ControllerToWorker>*
WorkerServiceImpl::Session(grpc::CallbackServerContext* context) {
  const SessionId id = next_.fetch_add(1, std::memory_order_relaxed);
  auto session = std::make_shared<WorkerSession>(this, context, id);
  bool closed = false;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    closed = closed_;
    sessions_[id] = session;
  }
  const absl::StatusOr<std::string> caller = rpc_.authorizer->Check(*context, Role::kOperator);
  session->Begin(session);
  if (closed) {
    session->End(UnavailableError("the controller is stopping"));
  } else if (!caller.ok()) {
    session->End(caller.status());
  }
  return session.get();
}

std::shared_ptr<WorkerSession> WorkerServiceImpl::Find(SessionId session) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = sessions_.find(session);
  return found == sessions_.end() ? nullptr : found->second;
}

void WorkerServiceImpl::Remove(SessionId session) {
  std::lock_guard<std::mutex> lock(mutex_);
  sessions_.erase(session);
}

void WorkerServiceImpl::Send(SessionId session, internal::v1::ControllerToWorker message) {
  if (const std::shared_ptr<WorkerSession> found = Find(session)) {
    found->Send(std::move(message));
  }
}

void WorkerServiceImpl::Close(SessionId session, const std::string& reason) {
  if (const std::shared_ptr<WorkerSession> found = Find(session)) {
    LogInfo("worker_session_closed", {{"session", session}, {"reason", reason}});
    found->Close(reason);
  }
}

void WorkerServiceImpl::CloseAll() {
  std::vector<std::shared_ptr<WorkerSession>> all;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    closed_ = true;
    for (const auto& [id, session] : sessions_) {
      all.push_back(session);
    }
  }
  for (const std::shared_ptr<WorkerSession>& session : all) {
    session->End(UnavailableError("the controller is stopping; dial again"));
  }
}

std::size_t WorkerServiceImpl::sessions() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return sessions_.size();
}

}  // namespace octavo
