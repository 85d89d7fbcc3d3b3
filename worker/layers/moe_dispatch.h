// Dispatch and combine: token rows to the ranks of their experts and back.
//
//   Send      source rows [T, H] → records [payload | dequant_scales | p] in send order, one
//   message
//             per peer → rows by local expert, every group padded to 128
//   Return    the experts' rows back to their sources (BF16, with the gradient of p in backward)
//   Combine   y[t] = Σ_j row(t, j), FP32, in top-k order
//
// One rank skips the messages: rows go straight into the padded groups. When incoming rows exceed
// the receive capacity the layer runs in rounds (round_plan.h). Nothing is dropped, nothing
// allocates.
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
  std::int64_t choices() const { return tokens * experts_per_token; }
};

// Rows in high precision, or cast by 1×128 or 1×32 tiles. At the source [T, H], at arrival [P, H].
struct Payload {
  void* high = nullptr;
  QTensor quant;
};

// Not thread-safe; one per model, used by one layer at a time.
class MoeDispatch {
 public:
  MoeDispatch(const Backend& backend, const DispatchShape& shape, Exchange* exchange, DType act,
              bool mx, Arena& communication, Arena& pinned);

  std::int64_t padded_capacity() const { return padded_capacity_; }
  std::int32_t local_experts() const { return shape_.experts / exchange_->size(); }

  // Gathers every rank's counts [E] (host) into matrix [R, E].
  absl::Status GatherCounts(const std::int64_t* counts, std::vector<std::int64_t>* matrix);
  std::int32_t Rounds(std::span<const std::int64_t> matrix) const;
  // Prepares round `round`; groups() then describes it.
  void SetRound(const LayerContext& ctx, std::span<const std::int64_t> matrix, std::int32_t round,
                std::int32_t rounds);
  const RowGroups& groups() const { return groups_; }

  // Source copy of [T, H] in the layout that messages carry.
  QTensor WireTensor(const QBuffer& buffer, const QuantizeRule& rule) const;

  struct SendArgs {
    Payload source;                // [T, H]
    const std::int32_t* dest_row;  // [T, k]
    const float* weight;           // [T, k] travels along, or null
    Payload target;                // [P, H] of this round
    float* target_weight;          // [P] or null
  };
  absl::Status Send(const LayerContext& ctx, const SendArgs& args);
  // rows [P, H] act dtype; d_weight [P] or null.
  absl::Status Return(const LayerContext& ctx, const void* rows, const float* d_weight);

  struct CombineInto {
    const std::int32_t* dest_row;  // [T, k]
    void* y;                       // [T, H]
    DType y_dtype;
    float* weight_out;  // [T, k] or null
  };
  // After the last round's Return.
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
  void CopyIntervals(const LayerContext& ctx, std::uint8_t* base, std::uint8_t* packed,
                     std::int64_t stride, bool pack);
  std::span<const std::int64_t> Bytes(const std::vector<std::int64_t>& rows, std::int64_t stride,
                                      std::vector<std::int64_t>* out);

  const Backend backend_;
  const DispatchShape shape_;
  Exchange* const exchange_;
  std::int64_t padded_capacity_ = 0;
  std::int64_t record_bytes_max_ = 0;

  RoundPlan plan_;
  RowGroups groups_;
  std::int32_t rounds_ = 1;
  std::vector<std::int64_t> send_bytes_, receive_bytes_;

  // Device: groups of the round, and maps receive order ↔ padded rows.
  std::int64_t* group_begin_ = nullptr;
  std::int64_t* group_rows_ = nullptr;
  RowSegment* segments_ = nullptr;
  std::int32_t* to_padded_ = nullptr;    // [capacity]
  std::int32_t* from_padded_ = nullptr;  // [padded capacity]
  // Messages.
  std::uint8_t* pack_ = nullptr;      // [T·k] records in send order
  std::uint8_t* round_ = nullptr;     // [T·k] one round's records (several rounds)
  std::uint8_t* receive_ = nullptr;   // [capacity] records
  std::uint8_t* returned_ = nullptr;  // [T·k] records in send order
  // Where Combine reads: returned_ records, or the experts' rows themselves on one rank.
  RowSet combine_source_;

  // Pinned ring: descriptions of a round may be under way to the device while the next is written.
  static constexpr int kRing = 32;
  std::uint8_t* ring_ = nullptr;
  std::int64_t ring_stride_ = 0;
  int ring_next_ = 0;
};

}  // namespace octavo
