#include "worker/layers/moe_dispatch.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "base/status.h"

namespace octavo {
namespace {

constexpr std::int64_t kRecordAlign = 16;  // permute copies 16 bytes at a time

std::int64_t TileOf(Tiling tiling) { return tiling == Tiling::kRow32 ? kMxBlock : kTile; }

}  // namespace

MoeDispatch::MoeDispatch(const Backend& backend, const DispatchShape& shape, Exchange* exchange,
                         DType act, bool mx, Arena& communication, Arena& pinned)
    : backend_(backend), shape_(shape), exchange_(exchange) {
  const std::int64_t local = local_experts(), ranks = exchange->size();
  padded_capacity_ = PaddedCapacity(shape.capacity, static_cast<std::int32_t>(local));
  const std::int64_t tile = mx ? kMxBlock : kTile;
  record_bytes_max_ = RoundUp(
      std::max(shape.hidden * DTypeBytes(act), shape.hidden + CeilDiv(shape.hidden, tile) * 4) + 4,
      kRecordAlign);
  group_begin_ = communication.Take<std::int64_t>(local);
  group_rows_ = communication.Take<std::int64_t>(local);
  ring_stride_ =
      RoundUp(local * 16 + ranks * local * static_cast<std::int64_t>(sizeof(RowSegment)), 64);
  ring_ = pinned.Take<std::uint8_t>(kRing * ring_stride_);
  if (ranks > 1) {
    segments_ = communication.Take<RowSegment>(ranks * local);
    to_padded_ = communication.Take<std::int32_t>(shape.capacity);
    from_padded_ = communication.Take<std::int32_t>(padded_capacity_);
    pack_ = communication.Take<std::uint8_t>(shape.choices() * record_bytes_max_);
    round_ = communication.Take<std::uint8_t>(shape.choices() * record_bytes_max_);
    receive_ = communication.Take<std::uint8_t>(shape.capacity * record_bytes_max_);
    returned_ = communication.Take<std::uint8_t>(shape.choices() * record_bytes_max_);
  }
}

absl::Status MoeDispatch::GatherCounts(const std::int64_t* counts,
                                       std::vector<std::int64_t>* matrix) {
  matrix->resize(static_cast<std::size_t>(exchange_->size()) *
                 static_cast<std::size_t>(shape_.experts));
  return exchange_->AllGatherHost(counts, shape_.experts, matrix->data());
}

std::int32_t MoeDispatch::Rounds(std::span<const std::int64_t> matrix) const {
  return CountRounds({.counts = matrix,
                      .ranks = exchange_->size(),
                      .experts = shape_.experts,
                      .rank = exchange_->rank(),
                      .capacity = shape_.capacity});
}

void MoeDispatch::SetRound(const LayerContext& ctx, std::span<const std::int64_t> matrix,
                           std::int32_t round, std::int32_t rounds) {
  rounds_ = rounds;
  PlanRound({.counts = matrix,
             .ranks = exchange_->size(),
             .experts = shape_.experts,
             .rank = exchange_->rank(),
             .capacity = shape_.capacity},
            round, &plan_);
  OCTAVO_CHECK(plan_.padded_rows <= padded_capacity_ && plan_.receive_total <= shape_.capacity,
               "%lld rows padded to %lld; room for %lld",
               static_cast<long long>(plan_.receive_total),
               static_cast<long long>(plan_.padded_rows), static_cast<long long>(padded_capacity_));
  if (ring_next_ == kRing) {
    ctx.ops().synchronize(ctx.device());
    ring_next_ = 0;
  }
  const std::int64_t local = local_experts();
  std::uint8_t* slot = ring_ + ring_next_++ * ring_stride_;
  auto* begin = reinterpret_cast<std::int64_t*>(slot);
  auto* rows = begin + local;
  auto* segments = reinterpret_cast<RowSegment*>(rows + local);
  std::copy(plan_.group_begin.begin(), plan_.group_begin.end(), begin);
  std::copy(plan_.group_rows.begin(), plan_.group_rows.end(), rows);
  std::copy(plan_.segments.begin(), plan_.segments.end(), segments);
  const auto send = [&ctx](void* dst, const void* src, std::int64_t bytes) {
    ctx.ops().copy(ctx.device(),
                   {.dst = dst, .src = src, .bytes = bytes, .kind = CopyKind::kToDevice});
  };
  send(group_begin_, begin, local * 8);
  send(group_rows_, rows, local * 8);
  groups_ = {.count = static_cast<std::int32_t>(local),
             .begin = group_begin_,
             .rows = group_rows_,
             .host_begin = begin,
             .host_rows = rows,
             .padded_rows = plan_.padded_rows};
  if (exchange_->size() == 1) {
    return;
  }
  const auto count = static_cast<std::int64_t>(plan_.segments.size());
  send(segments_, segments, count * static_cast<std::int64_t>(sizeof(RowSegment)));
  ctx.ops().expand_segments(ctx.device(), {.segments = segments_,
                                           .count = count,
                                           .src_rows = plan_.receive_total,
                                           .dest_row = to_padded_,
                                           .invert = false});
  ctx.ops().expand_segments(ctx.device(), {.segments = segments_,
                                           .count = count,
                                           .src_rows = plan_.padded_rows,
                                           .dest_row = from_padded_,
                                           .invert = true});
}

QTensor MoeDispatch::WireTensor(const QBuffer& buffer, const QuantizeRule& rule) const {
  QTensor tensor = buffer.Row(rule, shape_.tokens, shape_.hidden);
  tensor.scale_row_stride = shape_.hidden / TileOf(rule.tiling);
  tensor.scale_tile_stride = 1;
  return tensor;
}

MoeDispatch::Record MoeDispatch::RecordOf(const LayerContext& ctx, const Payload& payload,
                                          bool weight) const {
  Record record;
  const bool quantised = payload.quant.present();
  record.tiles =
      quantised ? static_cast<std::int32_t>(shape_.hidden / TileOf(payload.quant.tiling)) : 0;
  record.payload_bytes = shape_.hidden * (quantised ? 1 : ctx.act_bytes());
  record.scale_offset = record.payload_bytes;
  record.weight_offset = record.scale_offset + record.tiles * 4;
  record.weight = weight;
  record.stride = RoundUp(record.weight_offset + (weight ? 4 : 0), kRecordAlign);
  return record;
}

RowSet MoeDispatch::Rows(std::uint8_t* base, const Record& record) const {
  RowSet rows{.payload = base, .payload_stride = record.stride};
  if (record.tiles > 0) {
    rows.dequant_scale = base + record.scale_offset;
    rows.scale_row_stride = record.stride;
    rows.scale_tile_stride = 4;
  }
  if (record.weight) {
    rows.weight = base + record.weight_offset;
    rows.weight_stride = record.stride;
  }
  return rows;
}

namespace {

RowSet RowsOf(const Payload& payload, std::int64_t high_bytes) {
  if (!payload.quant.present()) {
    return {.payload = static_cast<std::uint8_t*>(payload.high), .payload_stride = high_bytes};
  }
  const QTensor& q = payload.quant;
  return {.payload = q.q,
          .payload_stride = q.stride(),
          .dequant_scale = reinterpret_cast<std::uint8_t*>(q.dequant_scale),
          .scale_row_stride = q.scale_row_stride * 4,
          .scale_tile_stride = q.scale_tile_stride * 4};
}

}  // namespace

// Moves this round's intervals between their places in send order and one packed run.
void MoeDispatch::CopyIntervals(const LayerContext& ctx, std::uint8_t* base, std::uint8_t* packed,
                                std::int64_t stride, bool pack) {
  for (int peer = 0; peer < exchange_->size(); ++peer) {
    const auto p = static_cast<std::size_t>(peer);
    std::uint8_t* at = base + plan_.send_begin[p] * stride;
    const std::int64_t bytes = plan_.send_rows[p] * stride;
    ctx.ops().copy(ctx.device(), {.dst = pack ? packed : at,
                                  .src = pack ? at : packed,
                                  .bytes = bytes,
                                  .kind = CopyKind::kOnDevice});
    packed += bytes;
  }
}

std::span<const std::int64_t> MoeDispatch::Bytes(const std::vector<std::int64_t>& rows,
                                                 std::int64_t stride,
                                                 std::vector<std::int64_t>* out) {
  out->resize(rows.size());
  std::transform(rows.begin(), rows.end(), out->begin(),
                 [stride](std::int64_t n) { return n * stride; });
  return *out;
}

absl::Status MoeDispatch::Send(const LayerContext& ctx, const SendArgs& args) {
  const Record record = RecordOf(ctx, args.source, args.weight != nullptr);
  RowSet source = RowsOf(args.source, shape_.hidden * ctx.act_bytes());
  if (args.weight != nullptr) {
    source.weight = reinterpret_cast<std::uint8_t*>(const_cast<float*>(args.weight));
    source.weight_stride = static_cast<std::int64_t>(shape_.experts_per_token) * 4;
  }
  RowSet target = RowsOf(args.target, shape_.hidden * ctx.act_bytes());
  if (args.target_weight != nullptr) {
    target.weight = reinterpret_cast<std::uint8_t*>(args.target_weight);
    target.weight_stride = 4;
  }
  PermuteArgs spread{.src = source,
                     .rows = shape_.tokens,
                     .fanout = shape_.experts_per_token,
                     .dest_row = args.dest_row,
                     .payload_bytes = record.payload_bytes,
                     .tiles = record.tiles};
  if (exchange_->size() == 1) {
    spread.dst = target;
    ctx.ops().permute(ctx.device(), spread);
  } else {
    spread.dst = Rows(pack_, record);
    ctx.ops().permute(ctx.device(), spread);
    std::uint8_t* message = pack_;
    if (rounds_ > 1) {
      CopyIntervals(ctx, pack_, round_, record.stride, true);
      message = round_;
    }
    RETURN_IF_ERROR(
        exchange_->AllToAllV(message, Bytes(plan_.send_rows, record.stride, &send_bytes_), receive_,
                             Bytes(plan_.receive_rows, record.stride, &receive_bytes_)));
    ctx.ops().permute(ctx.device(), {.src = Rows(receive_, record),
                                     .dst = target,
                                     .rows = plan_.receive_total,
                                     .fanout = 1,
                                     .dest_row = to_padded_,
                                     .payload_bytes = record.payload_bytes,
                                     .tiles = record.tiles});
  }
  ctx.ops().pad_rows(ctx.device(), {.groups = groups_,
                                    .dst = target,
                                    .payload_bytes = record.payload_bytes,
                                    .tiles = record.tiles});
  return absl::OkStatus();
}

absl::Status MoeDispatch::Return(const LayerContext& ctx, const void* rows, const float* d_weight) {
  RowSet source{.payload = static_cast<std::uint8_t*>(const_cast<void*>(rows)),
                .payload_stride = shape_.hidden * ctx.act_bytes()};
  if (d_weight != nullptr) {
    source.weight = reinterpret_cast<std::uint8_t*>(const_cast<float*>(d_weight));
    source.weight_stride = 4;
  }
  if (exchange_->size() == 1) {
    combine_source_ = source;
    return absl::OkStatus();
  }
  const Record record = RecordOf(ctx, {}, d_weight != nullptr);
  // What was received from a source goes back to it: the same rows in the same order.
  ctx.ops().permute(ctx.device(), {.src = source,
                                   .dst = Rows(receive_, record),
                                   .rows = plan_.padded_rows,
                                   .fanout = 1,
                                   .dest_row = from_padded_,
                                   .payload_bytes = record.payload_bytes,
                                   .tiles = 0});
  std::uint8_t* landing = rounds_ > 1 ? round_ : returned_;
  RETURN_IF_ERROR(
      exchange_->AllToAllV(receive_, Bytes(plan_.receive_rows, record.stride, &receive_bytes_),
                           landing, Bytes(plan_.send_rows, record.stride, &send_bytes_)));
  if (rounds_ > 1) {
    CopyIntervals(ctx, returned_, round_, record.stride, false);
  }
  combine_source_ = Rows(returned_, record);
  return absl::OkStatus();
}

void MoeDispatch::Combine(const LayerContext& ctx, const CombineInto& args) {
  ctx.ops().combine(ctx.device(), {.src = combine_source_,
                                   .src_dtype = ctx.act,
                                   .tokens = shape_.tokens,
                                   .hidden = shape_.hidden,
                                   .fanout = shape_.experts_per_token,
                                   .source_row = args.dest_row,
                                   .y = args.y,
                                   .y_dtype = args.y_dtype,
                                   .accumulate = false,
                                   .weight_out = args.weight_out});
}

}  // namespace octavo
