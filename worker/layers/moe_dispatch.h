// Dispatch and combine: token rows to the ranks of their experts and back.
//
//   Pack        source rows [T, H] → records [payload | dequant_scales | p] in send order
//   StartSend   one message per peer begins to travel
//   FinishSend  what arrived → rows by local expert, every group padded to 128
//   PackReturn  the experts' rows (BF16, with the gradient of p in backward) → records
//   StartReturn records begin to travel back
//   Combine     y[t] = Σ_j row(t, j), FP32, in top-k order
//
// Between a Start and the Join that must follow it the compute lane is free for other work. In
// flight are then: pack_ (read) and the part's rows of receive_ (written) by a send, the part's
// rows of receive_ (read) and other ranks' rows of returned_ (written) by a return. No other
// operation touches those: pack_ is written by Pack alone, receive_ by PackReturn alone, and
// returned_ is read by Combine. Rows for the rank's own experts take no part in messages:
// FinishSend reads them in pack_, PackReturn writes them to returned_.
//
// One rank skips the messages: rows go straight into the padded groups. When incoming rows exceed
// the receive capacity the layer runs in rounds, and a round may travel in parts, each a range of
// local experts (round_plan.h). Nothing is dropped, nothing allocates.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "worker/layers/context.h"
#include "worker/layers/exchange.h"
#include "worker/layers/round_plan.h"

namespace octavo {

struct DispatchShape {
  std::int64_t tokens = 0, hidden = 0;
  std::int32_t experts = 0, experts_per_token = 0;
  std::int64_t capacity = 0;  // rows received at once; tokens · k on one rank
  std::int32_t layers = 1;    // that use it
  std::int64_t choices() const { return tokens * experts_per_token; }
};

// Rows in high precision, or cast by 1×128 or 1×32 tiles. At the source [T, H], at arrival [P, H].
struct Payload {
  void* high = nullptr;
  QTensor quant;
};

// A range of local experts within a round: rows [first_row, first_row + groups.padded_rows) of its
// `total_rows` padded rows. groups counts from first_row.
struct RoundPart {
  RowGroups groups;
  std::int32_t first_group = 0;
  std::int64_t first_row = 0, total_rows = 0;
};

// Not thread-safe; one per model, used by one layer at a time.
class MoeDispatch {
 public:
  MoeDispatch(const Backend& backend, const DispatchShape& shape, Exchange* exchange, DType act,
              bool mx, Arena& communication, Arena& pinned);

  std::int64_t padded_capacity() const { return padded_capacity_; }
  std::int32_t local_experts() const { return shape_.experts / exchange_->size(); }
  std::int32_t ranks() const { return exchange_->size(); }
  std::int32_t rank() const { return exchange_->rank(); }

  // Gathers every rank's counts [E] (device) into matrix [R, E]. FinishCounts is the one wait of
  // the host in a layer: for what the compute lane held at StartCounts, not for what it was given
  // since.
  absl::Status StartCounts(const std::int64_t* counts);
  absl::Status FinishCounts(std::vector<std::int64_t>* matrix);
  std::int32_t Rounds(std::span<const std::int64_t> matrix) const;
  // Prepares round `round` in `parts` parts (one rank: 1); groups() then describes it. Groups stay
  // valid for the next two rounds prepared.
  void SetRound(const LayerContext& ctx, std::span<const std::int64_t> matrix, std::int32_t round,
                std::int32_t parts);
  const RowGroups& groups() const { return groups_; }
  RoundPart Part(std::int32_t part) const;

  // Source copy of [T, H] in the layout that messages carry.
  QTensor WireTensor(const QBuffer& buffer, const QuantizeRule& rule) const;

  struct PackArgs {
    Payload source;                // [T, H]
    const std::int32_t* dest_row;  // [T, k]
    const float* weight;           // [T, k] travels along, or null
  };
  // Needs no round. The source must stay until FinishSend (one rank reads it there).
  void Pack(const LayerContext& ctx, const PackArgs& args);
  absl::Status StartSend(std::int32_t part);
  // After Join. target [P, H] of this round, target_weight [P] or null; writes the part's rows.
  void FinishSend(const LayerContext& ctx, std::int32_t part, const Payload& target,
                  float* target_weight);
  // rows [P, H] act dtype of this round; d_weight [P] or null; reads the part's rows.
  void PackReturn(const LayerContext& ctx, std::int32_t part, const void* rows,
                  const float* d_weight);
  absl::Status StartReturn(std::int32_t part);
  // The compute lane waits for what was started.
  void Join() { exchange_->Join(); }

  struct CombineInto {
    const std::int32_t* dest_row;  // [T, k]
    void* y;                       // [T, H]
    DType y_dtype;
    float* weight_out;  // [T, k] or null
  };
  // After the Join behind the last round's last StartReturn.
  void Combine(const LayerContext& ctx, const CombineInto& args);

 private:
  // One message row.
  struct Record {
    std::int64_t payload_bytes = 0, scale_offset = 0, weight_offset = 0, stride = 0;
    std::int32_t tiles = 0;
    bool weight = false;
  };
  Record RecordOf(const LayerContext& ctx, const Payload& payload, bool weight) const;
  RowSet Rows(std::uint8_t* base, const Record& record) const;
  // Of one part, by peer: bytes and where they begin in send order, bytes that arrive and where.
  struct Bytes {
    std::vector<std::int64_t> send, send_offset, receive, receive_offset;
  };
  void BytesOf(std::int32_t part, std::int64_t stride);
  // Where a part's records arrive and leave again. Room for the longest record: what leaves may be
  // longer than what the next part brings meanwhile.
  std::uint8_t* Arrivals(std::int32_t part) const;
  std::size_t SlotBytes() const;

  const Backend backend_;
  const DispatchShape shape_;
  Exchange* const exchange_;
  std::int64_t padded_capacity_ = 0;
  std::int64_t record_bytes_max_ = 0;

  RoundPlan plan_;
  RowGroups groups_;
  const std::int64_t* part_begin_ = nullptr;  // device [local] rows of groups within their part
  const std::int64_t* host_part_begin_ = nullptr;  // host
  Bytes bytes_;
  Record sent_, returning_;
  RowSet spread_source_;  // of the last Pack, for one rank
  const std::int32_t* spread_dest_ = nullptr;

  std::int64_t* host_matrix_ = nullptr;  // pinned [R, E]
  // Device: maps receive order ↔ padded rows of the round, and send order ↔ padded rows for this
  // rank's own; −1 for rows of the other kind.
  std::int32_t* to_padded_ = nullptr;        // [capacity]
  std::int32_t* from_padded_ = nullptr;      // [padded capacity]
  std::int32_t* own_to_padded_ = nullptr;    // [T·k]
  std::int32_t* own_from_padded_ = nullptr;  // [padded capacity]
  // Messages.
  std::uint8_t* pack_ = nullptr;      // [T·k] records in send order
  std::uint8_t* receive_ = nullptr;   // [capacity] records
  std::uint8_t* returned_ = nullptr;  // [T·k] records in send order
  // Where Combine reads: returned_ records, or the experts' rows themselves on one rank.
  RowSet combine_source_;

  // Rounds' descriptions, in turn, pinned and on the device: one may be under way to the device
  // while the next is written, and work that was left for later reads the one before.
  std::int32_t slots_ = 0, next_slot_ = 0;
  std::int32_t unread_ = 0;  // written since the host last knew that the device had read them
  std::int64_t slot_stride_ = 0;
  std::uint8_t* host_slots_ = nullptr;
  std::uint8_t* device_slots_ = nullptr;
};

}  // namespace octavo
