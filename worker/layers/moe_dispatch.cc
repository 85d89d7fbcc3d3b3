#include "worker/layers/moe_dispatch.h"

#include <algorithm>
#include <numeric>

#include "base/check.h"
#include "base/status.h"

namespace octavo {
namespace {

constexpr std::int64_t kRecordAlign = 16;  // permute copies 16 bytes at a time

std::int64_t TileOf(Tiling tiling) { return tiling == Tiling::kRow32 ? kMxBlock : kTile; }

}  // namespace

std::size_t MoeDispatch::SlotBytes() const {
  const auto local = static_cast<std::size_t>(local_experts());
  const auto ranks = static_cast<std::size_t>(exchange_->size());
  return 3 * local * sizeof(std::int64_t) +
         (ranks > 1 ? 2 * ranks * local * sizeof(RowSegment) : 0);
}

MoeDispatch::MoeDispatch(const Backend& backend, const DispatchShape& shape, Exchange* exchange,
                         DType act, bool mx, Arena& communication, Arena& pinned)
    : backend_(backend), shape_(shape), exchange_(exchange) {
  const std::int64_t local = local_experts(), ranks = exchange->size();
  padded_capacity_ = PaddedCapacity(shape.capacity, static_cast<std::int32_t>(local));
  const std::int64_t tile = mx ? kMxBlock : kTile;
  record_bytes_max_ = RoundUp(
      std::max(shape.hidden * DTypeBytes(act), shape.hidden + CeilDiv(shape.hidden, tile) * 4) + 4,
      kRecordAlign);
  // A backward pass of one-round layers, which waits nowhere, fits twice.
  slots_ = 2 * shape.layers + 8;
  slot_stride_ = RoundUp(static_cast<std::int64_t>(SlotBytes()), 64);
  host_slots_ = pinned.Take<std::uint8_t>(slots_ * slot_stride_);
  device_slots_ = communication.Take<std::uint8_t>(slots_ * slot_stride_);
  host_matrix_ = pinned.Take<std::int64_t>(ranks * shape.experts);
  if (ranks > 1) {
    to_padded_ = communication.Take<std::int32_t>(shape.capacity);
    from_padded_ = communication.Take<std::int32_t>(padded_capacity_);
    own_to_padded_ = communication.Take<std::int32_t>(shape.choices());
    own_from_padded_ = communication.Take<std::int32_t>(padded_capacity_);
    pack_ = communication.Take<std::uint8_t>(shape.choices() * record_bytes_max_);
    receive_ = communication.Take<std::uint8_t>(shape.capacity * record_bytes_max_);
    returned_ = communication.Take<std::uint8_t>(shape.choices() * record_bytes_max_);
  }
}

absl::Status MoeDispatch::StartCounts(const std::int64_t* counts) {
  return exchange_->StartGather(counts, shape_.experts, host_matrix_);
}

absl::Status MoeDispatch::FinishCounts(std::vector<std::int64_t>* matrix) {
  RETURN_IF_ERROR(exchange_->FinishGather());
  unread_ = 0;  // what was written before lay before the counts on the compute lane
  matrix->assign(host_matrix_, host_matrix_ + exchange_->size() * shape_.experts);
  return absl::OkStatus();
}

std::int32_t MoeDispatch::Rounds(std::span<const std::int64_t> matrix) const {
  return CountRounds({.counts = matrix,
                      .ranks = exchange_->size(),
                      .experts = shape_.experts,
                      .rank = exchange_->rank(),
                      .capacity = shape_.capacity});
}

void MoeDispatch::SetRound(const LayerContext& ctx, std::span<const std::int64_t> matrix,
                           std::int32_t round, std::int32_t parts) {
  OCTAVO_CHECK(parts == 1 || exchange_->size() > 1, "%d parts on one rank", parts);
  PlanRound({.counts = matrix,
             .ranks = exchange_->size(),
             .experts = shape_.experts,
             .rank = exchange_->rank(),
             .capacity = shape_.capacity,
             .parts = parts},
            round, &plan_);
  OCTAVO_CHECK(plan_.padded_rows <= padded_capacity_ && plan_.receive_total <= shape_.capacity,
               "%lld rows padded to %lld; room for %lld",
               static_cast<long long>(plan_.receive_total),
               static_cast<long long>(plan_.padded_rows), static_cast<long long>(padded_capacity_));
  if (unread_ == slots_) {
    ctx.ops().synchronize(ctx.device());  // layers of many rounds only
    unread_ = 0;
  }
  const std::int64_t local = local_experts();
  std::uint8_t* const slot = host_slots_ + next_slot_ * slot_stride_;
  std::uint8_t* const device = device_slots_ + next_slot_ * slot_stride_;
  next_slot_ = (next_slot_ + 1) % slots_;
  ++unread_;
  auto* begin = reinterpret_cast<std::int64_t*>(slot);
  auto* rows = begin + local;
  auto* part_begin = rows + local;
  std::copy(plan_.group_begin.begin(), plan_.group_begin.end(), begin);
  std::copy(plan_.group_rows.begin(), plan_.group_rows.end(), rows);
  for (std::int32_t part = 0; part < parts; ++part) {
    for (std::int32_t g = FirstExpertOfPart(part, parts, local_experts());
         g < FirstExpertOfPart(part + 1, parts, local_experts()); ++g) {
      part_begin[g] = begin[g] - plan_.padded_begin[static_cast<std::size_t>(part)];
    }
  }
  // Segments of other ranks' rows, then of this rank's own, which begin where they do in send
  // order.
  const std::size_t count = plan_.segments.size();
  if (exchange_->size() > 1) {
    auto* others = reinterpret_cast<RowSegment*>(part_begin + local);
    auto* own = others + count;
    std::size_t at = 0;
    for (std::int32_t part = 0; part < parts; ++part) {
      const std::int32_t experts = FirstExpertOfPart(part + 1, parts, local_experts()) -
                                   FirstExpertOfPart(part, parts, local_experts());
      std::int64_t own_row =
          plan_.send_begin[static_cast<std::size_t>(part * exchange_->size() + exchange_->rank())];
      for (std::int32_t source = 0; source < exchange_->size(); ++source) {
        for (std::int32_t e = 0; e < experts; ++e, ++at) {
          const RowSegment& segment = plan_.segments[at];
          const bool is_own = source == exchange_->rank();
          others[at] = is_own ? RowSegment{} : segment;
          own[at] = is_own ? RowSegment{own_row, segment.dst_begin, segment.rows} : RowSegment{};
          own_row += own[at].rows;
        }
      }
    }
  }
  ctx.ops().copy(ctx.device(), {.dst = device,
                                .src = slot,
                                .bytes = static_cast<std::int64_t>(SlotBytes()),
                                .kind = CopyKind::kToDevice});
  const auto* device_begin = reinterpret_cast<const std::int64_t*>(device);
  groups_ = {.count = static_cast<std::int32_t>(local),
             .begin = device_begin,
             .rows = device_begin + local,
             .host_begin = begin,
             .host_rows = rows,
             .padded_rows = plan_.padded_rows};
  part_begin_ = device_begin + 2 * local;
  host_part_begin_ = part_begin;
  if (exchange_->size() == 1) {
    return;
  }
  const auto* others = reinterpret_cast<const RowSegment*>(part_begin_ + local);
  const auto map = [&](const RowSegment* segments, std::int64_t rows, std::int32_t* dest_row,
                       bool invert) {
    ctx.ops().expand_segments(ctx.device(), {.segments = segments,
                                             .count = static_cast<std::int64_t>(count),
                                             .src_rows = rows,
                                             .dest_row = dest_row,
                                             .invert = invert});
  };
  map(others, plan_.receive_total, to_padded_, false);
  map(others, plan_.padded_rows, from_padded_, true);
  map(others + count, shape_.choices(), own_to_padded_, false);
  map(others + count, plan_.padded_rows, own_from_padded_, true);
}

RoundPart MoeDispatch::Part(std::int32_t part) const {
  const std::int32_t first = FirstExpertOfPart(part, plan_.parts, local_experts());
  const std::int64_t row = plan_.padded_begin[static_cast<std::size_t>(part)];
  return {.groups = {.count = FirstExpertOfPart(part + 1, plan_.parts, local_experts()) - first,
                     .begin = part_begin_ + first,
                     .rows = groups_.rows + first,
                     .host_begin = host_part_begin_ + first,
                     .host_rows = groups_.host_rows + first,
                     .padded_rows = plan_.padded_begin[static_cast<std::size_t>(part) + 1] - row},
          .first_group = first,
          .first_row = row,
          .total_rows = plan_.padded_rows};
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

void MoeDispatch::BytesOf(std::int32_t part, std::int64_t stride) {
  const auto ranks = static_cast<std::size_t>(exchange_->size());
  const std::size_t first = static_cast<std::size_t>(part) * ranks;
  const auto scaled = [&](const std::vector<std::int64_t>& rows, std::vector<std::int64_t>* out) {
    out->resize(ranks);
    std::transform(rows.begin() + static_cast<std::ptrdiff_t>(first),
                   rows.begin() + static_cast<std::ptrdiff_t>(first + ranks), out->begin(),
                   [stride](std::int64_t n) { return n * stride; });
  };
  scaled(plan_.send_rows, &bytes_.send);
  scaled(plan_.send_begin, &bytes_.send_offset);
  scaled(plan_.receive_rows, &bytes_.receive);
  bytes_.receive_offset.resize(ranks);
  std::exclusive_scan(bytes_.receive.begin(), bytes_.receive.end(), bytes_.receive_offset.begin(),
                      std::int64_t{0});
  const auto own = static_cast<std::size_t>(exchange_->rank());
  bytes_.send[own] = bytes_.receive[own] = 0;
}

void MoeDispatch::Pack(const LayerContext& ctx, const PackArgs& args) {
  sent_ = RecordOf(ctx, args.source, args.weight != nullptr);
  spread_source_ = RowsOf(args.source, shape_.hidden * ctx.act_bytes());
  if (args.weight != nullptr) {
    spread_source_.weight = reinterpret_cast<std::uint8_t*>(const_cast<float*>(args.weight));
    spread_source_.weight_stride = static_cast<std::int64_t>(shape_.experts_per_token) * 4;
  }
  spread_dest_ = args.dest_row;
  if (exchange_->size() > 1) {
    ctx.ops().permute(ctx.device(), {.src = spread_source_,
                                     .dst = Rows(pack_, sent_),
                                     .rows = shape_.tokens,
                                     .fanout = shape_.experts_per_token,
                                     .dest_row = spread_dest_,
                                     .payload_bytes = sent_.payload_bytes,
                                     .tiles = sent_.tiles});
  }
}

std::uint8_t* MoeDispatch::Arrivals(std::int32_t part) const {
  return receive_ + plan_.receive_begin[static_cast<std::size_t>(part)] * record_bytes_max_;
}

absl::Status MoeDispatch::StartSend(std::int32_t part) {
  if (exchange_->size() == 1) {
    return absl::OkStatus();
  }
  BytesOf(part, sent_.stride);
  return exchange_->StartAllToAllV({.send = pack_,
                                    .receive = Arrivals(part),
                                    .send_bytes = bytes_.send,
                                    .receive_bytes = bytes_.receive,
                                    .send_offsets = bytes_.send_offset,
                                    .receive_offsets = bytes_.receive_offset});
}

void MoeDispatch::FinishSend(const LayerContext& ctx, std::int32_t part, const Payload& target,
                             float* target_weight) {
  RowSet rows = RowsOf(target, shape_.hidden * ctx.act_bytes());
  if (target_weight != nullptr) {
    rows.weight = reinterpret_cast<std::uint8_t*>(target_weight);
    rows.weight_stride = 4;
  }
  if (exchange_->size() == 1) {
    ctx.ops().permute(ctx.device(), {.src = spread_source_,
                                     .dst = rows,
                                     .rows = shape_.tokens,
                                     .fanout = shape_.experts_per_token,
                                     .dest_row = spread_dest_,
                                     .payload_bytes = sent_.payload_bytes,
                                     .tiles = sent_.tiles});
  } else {
    const auto p = static_cast<std::size_t>(part);
    const std::int64_t first = plan_.receive_begin[p];
    ctx.ops().permute(ctx.device(), {.src = Rows(Arrivals(part), sent_),
                                     .dst = rows,
                                     .rows = plan_.receive_begin[p + 1] - first,
                                     .fanout = 1,
                                     .dest_row = to_padded_ + first,
                                     .payload_bytes = sent_.payload_bytes,
                                     .tiles = sent_.tiles});
    const auto own = p * static_cast<std::size_t>(exchange_->size()) +
                     static_cast<std::size_t>(exchange_->rank());
    ctx.ops().permute(ctx.device(),
                      {.src = Rows(pack_ + plan_.send_begin[own] * sent_.stride, sent_),
                       .dst = rows,
                       .rows = plan_.send_rows[own],
                       .fanout = 1,
                       .dest_row = own_to_padded_ + plan_.send_begin[own],
                       .payload_bytes = sent_.payload_bytes,
                       .tiles = sent_.tiles});
  }
  const RoundPart range = Part(part);
  rows.payload += range.first_row * rows.payload_stride;
  if (rows.dequant_scale != nullptr) {
    rows.dequant_scale += range.first_row * rows.scale_row_stride;
  }
  if (rows.weight != nullptr) {
    rows.weight += range.first_row * rows.weight_stride;
  }
  ctx.ops().pad_rows(ctx.device(), {.groups = range.groups,
                                    .dst = rows,
                                    .payload_bytes = sent_.payload_bytes,
                                    .tiles = sent_.tiles});
}

void MoeDispatch::PackReturn(const LayerContext& ctx, std::int32_t part, const void* rows,
                             const float* d_weight) {
  RowSet source{.payload = static_cast<std::uint8_t*>(const_cast<void*>(rows)),
                .payload_stride = shape_.hidden * ctx.act_bytes()};
  if (d_weight != nullptr) {
    source.weight = reinterpret_cast<std::uint8_t*>(const_cast<float*>(d_weight));
    source.weight_stride = 4;
  }
  if (exchange_->size() == 1) {
    combine_source_ = source;
    return;
  }
  returning_ = RecordOf(ctx, {}, d_weight != nullptr);
  const RoundPart range = Part(part);
  source.payload += range.first_row * source.payload_stride;
  if (d_weight != nullptr) {
    source.weight += range.first_row * source.weight_stride;
  }
  // What was received from a source goes back to it: the same rows in the same order. from_padded_
  // counts from the round's first arrival.
  std::uint8_t* const base =
      Arrivals(part) - plan_.receive_begin[static_cast<std::size_t>(part)] * returning_.stride;
  const auto pack = [&](std::uint8_t* to, const std::int32_t* dest_row) {
    ctx.ops().permute(ctx.device(), {.src = source,
                                     .dst = Rows(to, returning_),
                                     .rows = range.groups.padded_rows,
                                     .fanout = 1,
                                     .dest_row = dest_row + range.first_row,
                                     .payload_bytes = returning_.payload_bytes,
                                     .tiles = 0});
  };
  pack(base, from_padded_);
  pack(returned_, own_from_padded_);
}

absl::Status MoeDispatch::StartReturn(std::int32_t part) {
  if (exchange_->size() == 1) {
    return absl::OkStatus();
  }
  BytesOf(part, returning_.stride);
  combine_source_ = Rows(returned_, returning_);
  return exchange_->StartAllToAllV({.send = Arrivals(part),
                                    .receive = returned_,
                                    .send_bytes = bytes_.receive,
                                    .receive_bytes = bytes_.send,
                                    .send_offsets = bytes_.receive_offset,
                                    .receive_offsets = bytes_.send_offset});
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
