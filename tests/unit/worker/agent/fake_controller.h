// The controller's end of WorkerService for tests: accepts everybody, keeps what it hears, answers
// key-value requests, and goes away when told. One session at a time.
#pragma once

#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/bounded_queue.h"
#include "base/str.h"
#include "grpcpp/grpcpp.h"
#include "gtest/gtest.h"
#include "octavo/internal/v1/worker_service.grpc.pb.h"

namespace octavo {

class FakeController final : public internal::v1::WorkerService::Service {
 public:
  using Up = internal::v1::WorkerToController;
  using Down = internal::v1::ControllerToWorker;

  explicit FakeController(
      bool acknowledge = true,
      std::shared_ptr<grpc::ServerCredentials> credentials = grpc::InsecureServerCredentials())
      : acknowledge_(acknowledge), credentials_(std::move(credentials)) {
    Start(0);
  }
  ~FakeController() override { Stop(); }

  void Start(int port) {
    grpc::ServerBuilder builder;
    builder.AddListeningPort(StrCat("127.0.0.1:", port), credentials_, &port_);
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
    ASSERT_NE(server_, nullptr);
  }
  // Like a killed controller: the streams break, the port is closed.
  void Stop() {
    if (server_ != nullptr) {
      server_->Shutdown(std::chrono::system_clock::now());
      server_.reset();
    }
  }
  int port() const { return port_; }
  std::string address() const { return StrCat("127.0.0.1:", port_); }

  void Disconnect() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (context_ != nullptr) {
      context_->TryCancel();
    }
  }

  void Send(const Down& message) {
    std::lock_guard<std::mutex> lock(mutex_);
    ASSERT_NE(stream_, nullptr) << "no worker is connected";
    stream_->Write(message);
  }
  void StartRank(const std::string& uid, int rank, int slot) {
    Down message;
    internal::v1::RankAssignment* assignment = message.mutable_start()->mutable_assignment();
    assignment->set_job_uid(uid);
    assignment->set_job_name("name-of-" + uid);
    assignment->set_attempt(1);
    assignment->set_rank(rank);
    assignment->set_slot(slot);
    Send(message);
  }

  // The first message from number `from` on (counted over all sessions) that satisfies `matches`.
  Up WaitFor(const std::string& what, const std::function<bool(const Up&)>& matches,
             std::size_t from = 0) {
    std::unique_lock<std::mutex> lock(mutex_);
    const SteadyTime deadline = DeadlineAfter(std::chrono::seconds(60));
    for (std::size_t at = from;; ++at) {
      if (!changed_.wait_until(lock, deadline, [&] { return heard_.size() > at; })) {
        ADD_FAILURE() << "no " << what << " within 60 s; heard " << heard_.size() << " messages";
        return {};
      }
      if (matches(heard_[at])) {
        return heard_[at];
      }
    }
  }
  Up WaitForEnd(const std::string& uid, std::size_t from = 0) {
    return WaitFor(
        "end of " + uid,
        [&](const Up& m) {
          return m.has_reliable() && m.reliable().has_ended() &&
                 m.reliable().ended().job_uid() == uid;
        },
        from);
  }
  // The authorization metadata of the newest session.
  std::string authorization() {
    std::lock_guard<std::mutex> lock(mutex_);
    return authorization_;
  }
  std::size_t heard() {
    std::lock_guard<std::mutex> lock(mutex_);
    return heard_.size();
  }

  grpc::Status Session(grpc::ServerContext* context,
                       grpc::ServerReaderWriter<Down, Up>* stream) override {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      context_ = context;
      stream_ = stream;
      const auto token = context->client_metadata().find("authorization");
      authorization_ = token == context->client_metadata().end()
                           ? ""
                           : std::string(token->second.data(), token->second.size());
    }
    Up message;
    while (stream->Read(&message)) {
      std::lock_guard<std::mutex> lock(mutex_);
      Answer(message, stream);
      heard_.push_back(message);
      changed_.notify_all();
    }
    std::lock_guard<std::mutex> lock(mutex_);
    if (stream_ == stream) {
      context_ = nullptr;
      stream_ = nullptr;
    }
    return grpc::Status::OK;
  }

 private:
  void Answer(const Up& message, grpc::ServerReaderWriter<Down, Up>* stream) {
    Down reply;
    if (message.has_register_()) {
      reply.mutable_registered()->set_accepted(true);
      reply.mutable_registered()->set_heartbeat_interval_ms(50);
      stream->Write(reply);
    } else if (message.has_reliable() && acknowledge_) {
      reply.mutable_ack()->set_sequence(message.reliable().sequence());
      stream->Write(reply);
    } else if (message.has_kv()) {
      const internal::v1::KeyValueRequest& request = message.kv().request();
      if (request.has_set()) {
        values_[request.set().key()] = request.set().value();
        Reply(message.kv(), "", stream);
      } else {
        waiting_.push_back(message.kv());
      }
      for (auto it = waiting_.begin(); it != waiting_.end();) {
        const auto value = values_.find(it->request().get().key());
        if (value == values_.end()) {
          ++it;
          continue;
        }
        Reply(*it, value->second, stream);
        it = waiting_.erase(it);
      }
    }
  }
  static void Reply(const internal::v1::RankKeyValue& request, const std::string& value,
                    grpc::ServerReaderWriter<Down, Up>* stream) {
    Down reply;
    internal::v1::RankKeyValueReply* kv = reply.mutable_kv();
    kv->set_job_uid(request.job_uid());
    kv->set_attempt(request.attempt());
    kv->set_rank(request.rank());
    kv->mutable_reply()->set_id(request.request().id());
    kv->mutable_reply()->set_ok(true);
    kv->mutable_reply()->set_value(value);
    stream->Write(reply);
  }

  const bool acknowledge_;
  const std::shared_ptr<grpc::ServerCredentials> credentials_;
  int port_ = 0;
  std::unique_ptr<grpc::Server> server_;
  std::mutex mutex_;
  std::condition_variable changed_;
  grpc::ServerContext* context_ = nullptr;                // guarded by mutex_
  grpc::ServerReaderWriter<Down, Up>* stream_ = nullptr;  // guarded by mutex_
  std::string authorization_;                             // guarded by mutex_
  std::vector<Up> heard_;                                 // guarded by mutex_
  std::map<std::string, std::string> values_;             // guarded by mutex_
  std::vector<internal::v1::RankKeyValue> waiting_;       // guarded by mutex_
};

}  // namespace octavo
