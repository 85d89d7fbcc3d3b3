#include "worker/rank/host_collectives.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "base/check.h"
#include "base/status.h"
#include "base/str.h"
#include "worker/comm/comm_status.h"
#include "worker/rank/failure.h"

namespace octavo {
namespace {

absl::Status Marked(const CommResult& result) {
  return WithFailure(ToStatus(result), FailureClass::kCollectiveTimeout);
}

}  // namespace

HostCollectives::HostCollectives(const Backend& backend, Communicator* comm, Arena& device)
    : backend_(backend), comm_(comm) {
  if (comm->device_pointers()) {
    device_send_ = device.TakeBytes(kMaxBytes);
    device_receive_ = device.TakeBytes(kMaxBytes);
    OCTAVO_CHECK(device_send_ != nullptr && device_receive_ != nullptr);
  }
}

absl::Status HostCollectives::AllReduce(std::span<double> values, ReduceOp op) {
  return op == ReduceOp::kSum ? AllReduce(values, std::span<double>())
                              : AllReduce(std::span<double>(), values);
}

absl::Status HostCollectives::AllReduce(std::span<double> sums, std::span<double> maxima) {
  struct Part {
    std::span<double> values;
    ReduceOp op;
    std::int64_t count() const { return static_cast<std::int64_t>(values.size()); }
  };
  const Part parts[] = {{sums, ReduceOp::kSum}, {maxima, ReduceOp::kMax}};
  auto* device = static_cast<double*>(device_send_);
  OCTAVO_CHECK_LE((parts[0].count() + parts[1].count()) * 8, kMaxBytes);
  const Ops& ops = *backend_.ops;
  for (const Part& part : parts) {
    if (part.values.empty()) {
      continue;
    }
    if (device == nullptr) {
      RETURN_IF_ERROR(
          Marked(comm_->AllReduce(part.values.data(), part.count(), DType::kF64, part.op)));
      continue;
    }
    ops.copy(backend_.context, {.dst = device,
                                .src = part.values.data(),
                                .bytes = part.count() * 8,
                                .kind = CopyKind::kToDevice});
    RETURN_IF_ERROR(Marked(comm_->AllReduce(device, part.count(), DType::kF64, part.op)));
    device += part.count();
  }
  if (device == nullptr) {
    return absl::OkStatus();
  }
  device = static_cast<double*>(device_send_);
  for (const Part& part : parts) {
    ops.copy(backend_.context, {.dst = part.values.data(),
                                .src = device,
                                .bytes = part.count() * 8,
                                .kind = CopyKind::kToHost});
    device += part.count();
  }
  ops.synchronize(backend_.context);
  return Marked(comm_->Check());
}

absl::StatusOr<std::string> HostCollectives::AllGather(std::string_view mine) {
  const std::size_t bytes = mine.size();
  std::string all(bytes * static_cast<std::size_t>(size()), '\0');
  if (device_send_ == nullptr) {
    RETURN_IF_ERROR(
        Marked(comm_->AllGather(mine.data(), all.data(), static_cast<std::int64_t>(bytes))));
    return all;
  }
  // In parts that fit the receive buffer; part p of rank r lands at r·bytes + begin.
  const std::size_t part_max =
      static_cast<std::size_t>(kMaxBytes) / static_cast<std::size_t>(size());
  OCTAVO_CHECK(part_max > 0);
  const Ops& ops = *backend_.ops;
  std::string received;
  for (std::size_t begin = 0; begin < bytes; begin += part_max) {
    const std::size_t part = std::min(part_max, bytes - begin);
    const auto n = static_cast<std::int64_t>(part);
    received.resize(part * static_cast<std::size_t>(size()));
    ops.copy(
        backend_.context,
        {.dst = device_send_, .src = mine.data() + begin, .bytes = n, .kind = CopyKind::kToDevice});
    RETURN_IF_ERROR(Marked(comm_->AllGather(device_send_, device_receive_, n)));
    ops.copy(backend_.context, {.dst = received.data(),
                                .src = device_receive_,
                                .bytes = n * size(),
                                .kind = CopyKind::kToHost});
    ops.synchronize(backend_.context);
    RETURN_IF_ERROR(Marked(comm_->Check()));
    for (std::size_t r = 0; r < static_cast<std::size_t>(size()); ++r) {
      std::memcpy(&all[r * bytes + begin], &received[r * part], part);
    }
  }
  return all;
}

absl::Status HostCollectives::Broadcast(std::string* text, int root) {
  std::vector<double> length = {static_cast<double>(rank() == root ? text->size() : 0)};
  RETURN_IF_ERROR(AllReduce(length, ReduceOp::kMax));
  text->resize(static_cast<std::size_t>(length[0]));
  for (std::size_t begin = 0; begin < text->size(); begin += static_cast<std::size_t>(kMaxBytes)) {
    const auto n = static_cast<std::int64_t>(
        std::min(text->size() - begin, static_cast<std::size_t>(kMaxBytes)));
    if (device_send_ == nullptr) {
      RETURN_IF_ERROR(Marked(comm_->Broadcast(text->data() + begin, n, root)));
      continue;
    }
    const Ops& ops = *backend_.ops;
    ops.copy(backend_.context, {.dst = device_send_,
                                .src = text->data() + begin,
                                .bytes = n,
                                .kind = CopyKind::kToDevice});
    RETURN_IF_ERROR(Marked(comm_->Broadcast(device_send_, n, root)));
    ops.copy(
        backend_.context,
        {.dst = text->data() + begin, .src = device_send_, .bytes = n, .kind = CopyKind::kToHost});
    ops.synchronize(backend_.context);
    RETURN_IF_ERROR(Marked(comm_->Check()));
  }
  return absl::OkStatus();
}

absl::Status HostCollectives::Agree(const absl::Status& mine) {
  // The first failing rank, then its code and text.
  std::vector<double> first = {-static_cast<double>(mine.ok() ? size() : rank())};
  RETURN_IF_ERROR(AllReduce(first, ReduceOp::kMax));
  const int failed = static_cast<int>(-first[0]);
  if (failed == size()) {
    return absl::OkStatus();
  }
  const bool speaker = rank() == failed;
  std::vector<double> codes = {speaker ? static_cast<double>(mine.code()) : 0.0,
                               speaker ? static_cast<double>(MarkOf(mine)) : 0.0};
  RETURN_IF_ERROR(AllReduce(codes, ReduceOp::kMax));
  std::string text = speaker ? Message(mine) : "";
  RETURN_IF_ERROR(Broadcast(&text, failed));
  if (size() > 1) {
    text = StrCat("rank ", failed, ": ", text);
  }
  const absl::Status all = MakeStatus(static_cast<absl::StatusCode>(codes[0]), text);
  const auto mark = static_cast<FailureClass>(codes[1]);
  return mark == FailureClass::kNone ? all : WithFailure(all, mark);
}

absl::StatusOr<bool> HostCollectives::Any(bool mine) {
  std::vector<double> value = {mine ? 1.0 : 0.0};
  RETURN_IF_ERROR(AllReduce(value, ReduceOp::kMax));
  return value[0] > 0;
}

}  // namespace octavo
