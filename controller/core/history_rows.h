// The telemetry history of a job in the store: rows of many items, so that a snapshot costs no
// commit and a long job few rows.
//
//   HistoryRows.Add ─► open row ─(with the job's next save)─► StoreBatch ─► replays
//
// The newest row is written again until it is full; the oldest leave when the job has more than
// kCostMax. Only the open row is in memory. Telemetry that came after the job's last save
// (progress_store_ms) is lost with a kill -9; an orderly end saves it.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "controller/policy/replay.h"
#include "controller/store/job_store.h"
#include "octavo/internal/v1/store.pb.h"

namespace octavo {

// An item to and from the store, exactly. nullopt: an item of a newer version.
internal::v1::StoredHistory::Item HistoryItemToStore(const HistoryItem& item);
std::optional<HistoryItem> HistoryItemFromStore(const internal::v1::StoredHistory::Item& stored);

// A value. Not thread-safe.
class HistoryRows {
 public:
  // A snapshot costs its tensors (about 100 bytes each) and 1, everything else 1.
  static std::int64_t CostOf(const HistoryItem& item);
  // What the store keeps of a job, at least and up to a row more.
  static constexpr std::int64_t kCostMax = 150000;
  // A row is full from this cost on: it bounds what is written again.
  static constexpr std::int64_t kRowCost = 256;

  void Add(const HistoryItem& item);
  // What changed since the last call: at most one row to put and one trim.
  void Take(const std::string& job_uid, StoreBatch* batch);
  // Goes on after `rows`, ascending by sequence.
  void Restore(const std::vector<TelemetryRow>& rows);
  // Everything that is kept, oldest first: what the store has, and what it lacks yet.
  std::vector<HistoryItem> Items(const std::vector<StoredTelemetry>& stored) const;

 private:
  std::deque<TelemetryRow> full_;
  std::int64_t total_cost_ = 0;  // of full rows and the open one
  internal::v1::StoredHistory open_;
  std::int64_t open_sequence_ = 1;
  std::int64_t open_cost_ = 0;
  bool changed_ = false;
};

}  // namespace octavo
