// The telemetry history of a job in the store: rows of many items, so that a snapshot costs no
// commit and a long job few rows.
//
//   PolicyHistory.Add ─► HistoryRows.Add ─► open row ─(with the job's next save)─► StoreBatch
//
// The newest row is written again until it is full. Telemetry that came after the job's last save
// (progress_store_ms) is lost with a kill -9; an orderly end saves it. Rows that PolicyHistory has
// no room for any more leave the store too.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "controller/core/policy_history.h"
#include "controller/store/job_store.h"
#include "octavo/internal/v1/store.pb.h"

namespace octavo {

// An item to and from the store, exactly. nullopt: an item of a newer version.
internal::v1::StoredHistory::Item HistoryItemToStore(const HistoryItem& item);
std::optional<HistoryItem> HistoryItemFromStore(const internal::v1::StoredHistory::Item& stored);

// A value. Not thread-safe.
class HistoryRows {
 public:
  // A row is full from this cost on (PolicyHistory::CostOf): it bounds what is written again.
  static constexpr std::size_t kRowCost = 256;

  void Add(const HistoryItem& item);
  // What changed since the last call: at most one row to put and one trim.
  void Take(const std::string& job_uid, StoreBatch* batch);
  // Goes on after `rows`, ascending by sequence; their items are added to `history`.
  void Restore(const std::vector<StoredTelemetry>& rows, PolicyHistory* history);

 private:
  struct Full {
    std::int64_t sequence = 0;
    std::size_t cost = 0;
  };
  void CloseOpenRow();

  std::deque<Full> full_;
  std::size_t total_cost_ = 0;  // of full rows and the open one
  internal::v1::StoredHistory open_;
  std::int64_t open_sequence_ = 1;
  std::size_t open_cost_ = 0;
  bool changed_ = false;
};

}  // namespace octavo
