// What every handler needs: the mailbox, who may call, metrics; and one way to answer.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "base/status.h"
#include "base/str.h"
#include "controller/api/authz.h"
#include "controller/api/metrics.h"
#include "controller/core/mailbox.h"
#include "grpcpp/grpcpp.h"
#include "proto/convert/error_detail.h"

namespace octavo {

struct RpcContext {
  Mailbox* mailbox = nullptr;
  const Authorizer* authorizer = nullptr;
  ControllerMetrics* metrics = nullptr;
};

// Status with the ErrorDetail in the trailer; the codes of absl and gRPC are the same numbers.
inline grpc::Status ToGrpc(grpc::ServerContextBase* context, const absl::Status& status) {
  if (status.ok()) {
    return grpc::Status::OK;
  }
  const std::string trailer = ErrorTrailerBytes(status);
  if (!trailer.empty()) {
    context->AddTrailingMetadata(kErrorTrailer, trailer);
  }
  return grpc::Status(static_cast<grpc::StatusCode>(status.code()), ErrorWireMessage(status));
}

inline absl::Status MailboxFull() {
  return WithDetail(
      ResourceExhaustedError("the controller is overloaded: its event queue is full; try again"),
      "OVERLOADED");
}

// One unary call: checks the role on gRPC's thread, runs `handle(core, now, caller)` on the core's,
// and answers after the commit. The reactor is finished on every path.
template <class Response, class Handle>
grpc::ServerUnaryReactor* RunUnary(const RpcContext& rpc, grpc::CallbackServerContext* context,
                                   const char* method, Role needed, Response* response,
                                   Handle handle) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  const auto begin = std::chrono::steady_clock::now();
  const auto finish = [context, reactor, method, begin,
                       metrics = rpc.metrics](const absl::Status& status) {
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
    metrics->ObserveRpc(method, absl::StatusCodeToString(status.code()), seconds.count());
    reactor->Finish(ToGrpc(context, status));
  };
  absl::StatusOr<std::string> caller = rpc.authorizer->Check(*context, needed);
  if (!caller.ok()) {
    finish(caller.status());
    return reactor;
  }
  if (const absl::Status store = rpc.mailbox->StoreStatus(); !store.ok()) {
    finish(WithDetail(store, "STORE_UNAVAILABLE"));  // at once: the queue does not move
    return reactor;
  }
  const bool posted = rpc.mailbox->Post([handle = std::move(handle), response, finish,
                                         caller = *std::move(caller)](Core& core, Now now) mutable {
    absl::StatusOr<Response> result = handle(core, now, caller);
    return Mailbox::Release(
        [response, finish, result = std::move(result)](const absl::Status& stored) mutable {
          if (stored.ok() && result.ok()) {
            *response = *std::move(result);
          }
          finish(stored.ok() ? result.status() : WithDetail(stored, "STORE_UNAVAILABLE"));
        });
  });
  if (!posted) {
    finish(MailboxFull());
  }
  return reactor;
}

}  // namespace octavo
