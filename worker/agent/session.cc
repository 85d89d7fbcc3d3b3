#include "worker/agent/session.h"

#include <chrono>
#include <future>
#include <random>
#include <utility>

#include "base/backoff.h"
#include "base/log.h"
#include "proto/limits.h"

namespace octavo {
namespace {

constexpr std::chrono::seconds kWriterWait{2};

std::shared_ptr<grpc::Channel> Dial(const Session::Options& options) {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(static_cast<int>(kMaxInternalMessageBytes));
  arguments.SetMaxSendMessageSize(static_cast<int>(kMaxInternalMessageBytes));
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, 30'000);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 10'000);
  // The channel's own back-off must not outlast ours (its default cap is two minutes).
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, static_cast<int>(kReconnectBackoffMinMs));
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, static_cast<int>(kConnectTimeoutMs));
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, static_cast<int>(kReconnectBackoffMaxMs));
  std::shared_ptr<grpc::ChannelCredentials> credentials = grpc::InsecureChannelCredentials();
  if (!options.tls.ca_pem.empty()) {
    credentials = grpc::SslCredentials({.pem_root_certs = options.tls.ca_pem,
                                        .pem_private_key = options.tls.key_pem,
                                        .pem_cert_chain = options.tls.cert_pem});
  }
  return grpc::CreateCustomChannel(options.controller, credentials, arguments);
}

}  // namespace

Session::Session(Options options, OnEvent on_event)
    : options_(std::move(options)),
      on_event_(std::move(on_event)),
      stub_(iv1::WorkerService::NewStub(Dial(options_))) {}

Session::~Session() { Stop(); }

void Session::Start() {
  thread_ = std::jthread([this](const std::stop_token& stop) { Run(stop); });
}

void Session::Stop() {
  thread_.request_stop();
  Close("the daemon is stopping");
  wake_.notify_all();
  if (thread_.joinable()) {
    thread_.join();
  }
}

void Session::Send(iv1::WorkerToController message) {
  std::shared_ptr<BoundedQueue<iv1::WorkerToController>> queue;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    queue = sending_;
  }
  if (queue != nullptr && !queue->TryPush(std::move(message)) && !queue->closed()) {
    Close("the controller reads too slowly; the send queue is full");
  }
}

void Session::Close(const std::string& reason) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (context_ != nullptr) {
    if (close_reason_.empty()) {
      close_reason_ = reason;
    }
    context_->TryCancel();
  }
}

void Session::Run(const std::stop_token& stop) {
  std::mt19937 rng(options_.jitter_seed);
  Backoff backoff({.initial_seconds = kReconnectBackoffMinMs / 1e3,
                   .factor = 2,
                   .max_seconds = kReconnectBackoffMaxMs / 1e3,
                   .jitter = 0.5});
  std::string last_reason;
  while (!stop.stop_requested()) {
    const auto dialled = std::chrono::steady_clock::now();
    const std::string reason = RunStream(stop);
    if (std::chrono::steady_clock::now() - dialled >
        std::chrono::milliseconds(kReconnectBackoffMaxMs)) {
      backoff.Reset();
      last_reason.clear();
    }
    if (!stop.stop_requested() && reason != last_reason) {  // once per cause, not once per try
      LogWarning("session_ended", {{"controller", options_.controller}, {"reason", reason}});
      last_reason = reason;
    }
    const auto wait = std::chrono::duration<double>(backoff.NextSeconds(rng));
    std::unique_lock<std::mutex> lock(mutex_);
    wake_.wait_for(lock, stop, wait, [] { return false; });
  }
}

std::string Session::RunStream(const std::stop_token& stop) {
  grpc::ClientContext context;
  if (!options_.bearer_token.empty()) {
    context.AddMetadata("authorization", "Bearer " + options_.bearer_token);
  }
  auto queue = std::make_shared<BoundedQueue<iv1::WorkerToController>>(kSendQueueCapacity);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    context_ = &context;
    sending_ = queue;
    close_reason_.clear();
  }
  if (stop.stop_requested()) {
    context.TryCancel();
  }
  const std::unique_ptr<Stream> stream = stub_->Session(&context);
  on_event_(SessionOpened{});
  {
    std::promise<void> written;
    const std::jthread writer([&] {
      WriteLoop(stream.get(), queue.get());
      written.set_value();
    });
    iv1::ControllerToWorker message;
    while (stream->Read(&message)) {
      on_event_(FromController{std::move(message)});
      message.Clear();
    }
    queue->Close();
    // A write fails once the call is over. Cancelling at once would replace the controller's status
    // by ours; so it is only the bound.
    if (written.get_future().wait_for(kWriterWait) != std::future_status::ready) {
      context.TryCancel();
    }
  }
  std::string reason;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    context_ = nullptr;
    sending_ = nullptr;
    reason = close_reason_;
  }
  const grpc::Status status = stream->Finish();
  if (reason.empty()) {
    reason = status.ok() ? "the controller ended the stream" : status.error_message();
  }
  on_event_(SessionClosed{reason});
  return reason;
}

void Session::WriteLoop(Stream* stream, BoundedQueue<iv1::WorkerToController>* queue) {
  // The deadline only bounds one wait; Close ends the loop.
  while (true) {
    const std::optional<iv1::WorkerToController> message =
        queue->Pop(DeadlineAfter(std::chrono::seconds(60)));
    if (!message.has_value()) {
      if (queue->closed()) {
        return;
      }
      continue;
    }
    if (!stream->Write(*message)) {
      return;  // the stream is broken: Read returns too
    }
  }
}

}  // namespace octavo
