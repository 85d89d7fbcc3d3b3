#include "worker/layers/exchange.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <string_view>

#include "base/check.h"
#include "base/status.h"

namespace octavo {
namespace {

// Host values that pass through the device (counts, amax, control words) are small; larger arrays
// go in pieces.
constexpr std::int64_t kSmallBytes = 1 << 20;

}  // namespace

absl::Status StatusOf(const CommResult& result) {
  switch (result.code) {
    case CommResult::Code::kOk:
      return absl::OkStatus();
    case CommResult::Code::kTimeout:
      return DeadlineExceededError(result.message);
    case CommResult::Code::kPeerLost:
      return UnavailableError(result.message);
    case CommResult::Code::kFault:
      break;
  }
  return InternalError(result.message);
}

Exchange::Exchange(const Backend& backend, Communicator* comm, std::int64_t stage_bytes,
                   Arena& device, Arena& pinned)
    : backend_(backend),
      comm_(comm),
      on_device_(std::string_view(backend.ops->name) != "cpu"),
      stage_bytes_(std::max<std::int64_t>(stage_bytes, kSmallBytes)) {
  if (comm_->size() > 1 && host_staged()) {
    stage_send_ = pinned.Take<std::uint8_t>(stage_bytes_);
    stage_receive_ = pinned.Take<std::uint8_t>(stage_bytes_);
  }
  if (comm_->size() > 1 && device_staged()) {
    device_small_ = device.Take<std::uint8_t>(kSmallBytes * (1 + comm_->size()));
  }
}

void Exchange::Copy(void* dst, const void* src, std::int64_t bytes, CopyKind kind) {
  backend_.ops->copy(backend_.context, {.dst = dst, .src = src, .bytes = bytes, .kind = kind});
}

absl::Status Exchange::AllToAllV(const void* send, std::span<const std::int64_t> send_bytes,
                                 void* receive, std::span<const std::int64_t> receive_bytes) {
  if (!host_staged() || size() == 1) {
    return StatusOf(comm_->AllToAllV({.send = send,
                                      .receive = receive,
                                      .send_bytes = send_bytes,
                                      .receive_bytes = receive_bytes}));
  }
  const std::int64_t out = std::accumulate(send_bytes.begin(), send_bytes.end(), std::int64_t{0});
  const std::int64_t in =
      std::accumulate(receive_bytes.begin(), receive_bytes.end(), std::int64_t{0});
  OCTAVO_CHECK(out <= stage_bytes_ && in <= stage_bytes_, "%lld out, %lld in, %lld staged",
               static_cast<long long>(out), static_cast<long long>(in),
               static_cast<long long>(stage_bytes_));
  Copy(stage_send_, send, out, CopyKind::kToHost);
  backend_.ops->synchronize(backend_.context);
  RETURN_IF_ERROR(StatusOf(comm_->AllToAllV({.send = stage_send_,
                                             .receive = stage_receive_,
                                             .send_bytes = send_bytes,
                                             .receive_bytes = receive_bytes})));
  Copy(receive, stage_receive_, in, CopyKind::kToDevice);
  // The stage is reused by the next exchange.
  backend_.ops->synchronize(backend_.context);
  return absl::OkStatus();
}

absl::Status Exchange::AllReduce(void* data, std::int64_t count, DType dtype, ReduceOp op) {
  if (size() == 1 || count == 0) {
    return absl::OkStatus();
  }
  if (!host_staged()) {
    return StatusOf(comm_->AllReduce(data, count, dtype, op));
  }
  const std::int64_t width = DTypeBytes(dtype);
  const std::int64_t piece = stage_bytes_ / width;
  for (std::int64_t at = 0; at < count; at += piece) {
    const std::int64_t n = std::min(piece, count - at);
    auto* part = static_cast<std::uint8_t*>(data) + at * width;
    Copy(stage_send_, part, n * width, CopyKind::kToHost);
    backend_.ops->synchronize(backend_.context);
    RETURN_IF_ERROR(StatusOf(comm_->AllReduce(stage_send_, n, dtype, op)));
    Copy(part, stage_send_, n * width, CopyKind::kToDevice);
    backend_.ops->synchronize(backend_.context);
  }
  return absl::OkStatus();
}

absl::Status Exchange::AllReduceHost(void* data, std::int64_t count, DType dtype, ReduceOp op) {
  if (size() == 1 || count == 0) {
    return absl::OkStatus();
  }
  if (!device_staged()) {
    return StatusOf(comm_->AllReduce(data, count, dtype, op));
  }
  const std::int64_t width = DTypeBytes(dtype);
  const std::int64_t piece = kSmallBytes / width;
  for (std::int64_t at = 0; at < count; at += piece) {
    const std::int64_t n = std::min(piece, count - at);
    auto* part = static_cast<std::uint8_t*>(data) + at * width;
    Copy(device_small_, part, n * width, CopyKind::kToDevice);
    RETURN_IF_ERROR(StatusOf(comm_->AllReduce(device_small_, n, dtype, op)));
    Copy(part, device_small_, n * width, CopyKind::kToHost);
    backend_.ops->synchronize(backend_.context);
    RETURN_IF_ERROR(StatusOf(comm_->Check()));
  }
  return absl::OkStatus();
}

absl::Status Exchange::AllGatherHost(const std::int64_t* send, std::int64_t count,
                                     std::int64_t* all) {
  const std::int64_t bytes = count * static_cast<std::int64_t>(sizeof(std::int64_t));
  if (size() == 1) {
    std::memcpy(all, send, static_cast<std::size_t>(bytes));
    return absl::OkStatus();
  }
  if (!device_staged()) {
    return StatusOf(comm_->AllGather(send, all, bytes));
  }
  OCTAVO_CHECK(bytes <= kSmallBytes, "%lld bytes", static_cast<long long>(bytes));
  Copy(device_small_, send, bytes, CopyKind::kToDevice);
  RETURN_IF_ERROR(StatusOf(comm_->AllGather(device_small_, device_small_ + kSmallBytes, bytes)));
  Copy(all, device_small_ + kSmallBytes, bytes * size(), CopyKind::kToHost);
  backend_.ops->synchronize(backend_.context);
  return StatusOf(comm_->Check());
}

}  // namespace octavo
