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
                   Arena& device, Arena& pinned, bool overlap)
    : backend_(backend),
      comm_(comm),
      on_device_(std::string_view(backend.ops->name) != "cpu"),
      overlap_(overlap),
      stage_bytes_(std::max<std::int64_t>(stage_bytes, kSmallBytes)) {
  if (comm_->size() > 1 && host_staged()) {
    stage_send_ = pinned.Take<std::uint8_t>(stage_bytes_);
    stage_receive_ = pinned.Take<std::uint8_t>(stage_bytes_);
    gather_small_ = pinned.Take<std::int64_t>(kSmallBytes / 8);
  }
  if (comm_->size() > 1 && device_staged()) {
    // One for values on their way, one for a gather, which other values may pass.
    device_small_ = device.Take<std::uint8_t>(kSmallBytes * (1 + comm_->size()));
  }
}

void Exchange::Copy(void* dst, const void* src, std::int64_t bytes, CopyKind kind, Lane lane) {
  backend_.ops->copy(backend_.context,
                     {.dst = dst, .src = src, .bytes = bytes, .kind = kind, .lane = lane});
}

absl::Status Exchange::AllToAllV(const void* send, std::span<const std::int64_t> send_bytes,
                                 void* receive, std::span<const std::int64_t> receive_bytes) {
  RETURN_IF_ERROR(StartAllToAllV({.send = send,
                                  .receive = receive,
                                  .send_bytes = send_bytes,
                                  .receive_bytes = receive_bytes}));
  Join();
  return absl::OkStatus();
}

absl::Status Exchange::StartAllToAllV(const AllToAllVArgs& args) {
  if (host_staged() && size() > 1) {
    return StagedAllToAllV(args);
  }
  return StatusOf(overlaps() ? comm_->StartAllToAllV(args) : comm_->AllToAllV(args));
}

absl::Status Exchange::StagedAllToAllV(const AllToAllVArgs& args) {
  std::int64_t out = 0, in = 0;
  PeerOffsets send_offsets(args.send_bytes, args.send_offsets);
  for (std::size_t peer = 0; peer < args.send_bytes.size(); ++peer) {
    const std::int64_t bytes = args.send_bytes[peer], at = send_offsets.Next(peer);
    OCTAVO_CHECK(out + bytes <= stage_bytes_, "%lld out, %lld staged",
                 static_cast<long long>(out + bytes), static_cast<long long>(stage_bytes_));
    Copy(stage_send_ + out, static_cast<const std::uint8_t*>(args.send) + at, bytes,
         CopyKind::kToHost);
    out += bytes;
  }
  in = std::accumulate(args.receive_bytes.begin(), args.receive_bytes.end(), std::int64_t{0});
  OCTAVO_CHECK(in <= stage_bytes_, "%lld in, %lld staged", static_cast<long long>(in),
               static_cast<long long>(stage_bytes_));
  backend_.ops->synchronize(backend_.context);
  RETURN_IF_ERROR(StatusOf(comm_->AllToAllV({.send = stage_send_,
                                             .receive = stage_receive_,
                                             .send_bytes = args.send_bytes,
                                             .receive_bytes = args.receive_bytes})));
  PeerOffsets receive_offsets(args.receive_bytes, args.receive_offsets);
  std::int64_t from = 0;
  for (std::size_t peer = 0; peer < args.receive_bytes.size(); ++peer) {
    const std::int64_t at = receive_offsets.Next(peer);
    Copy(static_cast<std::uint8_t*>(args.receive) + at, stage_receive_ + from,
         args.receive_bytes[peer], CopyKind::kToDevice);
    from += args.receive_bytes[peer];
  }
  // The stage is reused by the next exchange.
  backend_.ops->synchronize(backend_.context);
  return absl::OkStatus();
}

absl::Status Exchange::AllReduce(void* data, std::int64_t count, DType dtype, ReduceOp op) {
  RETURN_IF_ERROR(StartAllReduce(data, count, dtype, op));
  Join();
  return absl::OkStatus();
}

absl::Status Exchange::StartAllReduce(void* data, std::int64_t count, DType dtype, ReduceOp op) {
  if (size() == 1 || count == 0) {
    return absl::OkStatus();
  }
  if (!host_staged()) {
    return StatusOf(overlaps() ? comm_->StartAllReduce(data, count, dtype, op)
                               : comm_->AllReduce(data, count, dtype, op));
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

absl::Status Exchange::StartGather(const std::int64_t* send, std::int64_t count,
                                   std::int64_t* all) {
  const std::int64_t bytes = count * static_cast<std::int64_t>(sizeof(std::int64_t));
  OCTAVO_CHECK(bytes <= kSmallBytes, "%lld bytes", static_cast<long long>(bytes));
  gather_count_ = count;
  gather_all_ = all;
  const Ops& ops = *backend_.ops;
  const void* source = send;
  Lane from = Lane::kCompute;
  if (size() > 1 && device_staged()) {
    source = device_small_ + kSmallBytes;
    from = Lane::kComm;
    RETURN_IF_ERROR(StatusOf(comm_->StartAllGather(send, device_small_ + kSmallBytes, bytes)));
  } else if (size() > 1 && !host_staged()) {
    return StatusOf(comm_->AllGather(send, all, bytes));  // the CPU's memory is the host's
  }
  ops.order(backend_.context, from, Lane::kCopy);
  const bool gathered = from == Lane::kComm;
  Copy(size() > 1 && !gathered ? gather_small_ : all, source, gathered ? bytes * size() : bytes,
       CopyKind::kToHost, Lane::kCopy);
  return absl::OkStatus();
}

absl::Status Exchange::FinishGather() {
  backend_.ops->synchronize_lane(backend_.context, Lane::kCopy);
  if (size() > 1 && host_staged()) {
    return StatusOf(
        comm_->AllGather(gather_small_, gather_all_,
                         gather_count_ * static_cast<std::int64_t>(sizeof(std::int64_t))));
  }
  return StatusOf(comm_->Check());
}

}  // namespace octavo
