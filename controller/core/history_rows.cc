#include "controller/core/history_rows.h"

#include <utility>

#include "proto/convert/health.h"

namespace octavo {
namespace {

void TensorToStore(const TensorHealth& t, internal::v1::TensorStats* out) {
  out->set_layer(t.site.layer);
  out->set_op(static_cast<std::int32_t>(t.site.op));
  out->set_tensor(static_cast<std::int32_t>(t.tensor));
  out->set_shadow(t.shadow);
  if (t.shadow) {
    out->set_shadow_recipe(std::string(Name(t.shadow_recipe)));
  }
  out->set_e5m2(t.e5m2);
  out->set_amax(t.amax);
  out->set_dequant_scale_min(t.dequant_scale_min);
  out->set_dequant_scale_max(t.dequant_scale_max);
  out->set_elements(t.elements);
  out->set_nonfinite(t.nonfinite);
  out->set_saturated(t.saturated);
  out->set_nonzero(t.nonzero);
  out->set_flushed(t.flushed);
  out->set_transpose_flushed(t.transpose_flushed);
  out->set_signal_energy(t.signal_energy);
  out->set_noise_energy(t.noise_energy);
  for (const WorstExpert& worst : t.worst) {
    internal::v1::TensorStats::WorstExpert& stored = *out->add_worst();
    stored.set_expert(worst.expert);
    stored.set_ratio(static_cast<std::int32_t>(worst.ratio));
    stored.set_count(worst.count);
    stored.set_total(worst.total);
  }
}

}  // namespace

internal::v1::StoredHistory::Item HistoryItemToStore(const HistoryItem& item) {
  internal::v1::StoredHistory::Item stored;
  if (const auto* start = std::get_if<AttemptStarted>(&item)) {
    stored.set_attempt_started(start->step);
  } else if (const auto* applied = std::get_if<PlanAppliedAt>(&item)) {
    stored.mutable_plan_applied()->set_version(applied->version);
    stored.mutable_plan_applied()->set_step(applied->step);
  } else if (const auto* step = std::get_if<StepHealth>(&item)) {
    internal::v1::StepReport& report = *stored.mutable_step();
    report.set_step(step->step);
    report.set_loss(step->loss);
    report.set_outcome(step->nonfinite ? 1 : 0);
    report.set_nonfinite_elements(step->nonfinite_elements);
    if (step->site_known) {
      report.set_nonfinite_op(FormatSite({step->site, step->tensor}));
    }
  } else if (const auto* snapshot = std::get_if<HealthSnapshot>(&item)) {
    internal::v1::TelemetrySnapshot& wire = *stored.mutable_snapshot();
    wire.set_first_step(snapshot->first_step);
    wire.set_last_step(snapshot->last_step);
    wire.set_plan_version(snapshot->plan_version);
    wire.mutable_tensors()->Reserve(static_cast<int>(snapshot->tensors.size()));
    for (const TensorHealth& tensor : snapshot->tensors) {
      TensorToStore(tensor, wire.add_tensors());
    }
  }
  return stored;
}

std::optional<HistoryItem> HistoryItemFromStore(const internal::v1::StoredHistory::Item& stored) {
  using Item = internal::v1::StoredHistory::Item;
  switch (stored.what_case()) {
    case Item::kAttemptStarted:
      return AttemptStarted{stored.attempt_started()};
    case Item::kPlanApplied:
      return PlanAppliedAt{stored.plan_applied().version(), stored.plan_applied().step()};
    case Item::kStep:
      return StepHealthFromWire(stored.step());
    case Item::kSnapshot:
      return HealthFromWire(stored.snapshot());
    case Item::WHAT_NOT_SET:
      break;
  }
  return std::nullopt;
}

std::int64_t HistoryRows::CostOf(const HistoryItem& item) {
  const auto* snapshot = std::get_if<HealthSnapshot>(&item);
  return 1 + (snapshot == nullptr ? 0 : static_cast<std::int64_t>(snapshot->tensors.size()));
}

void HistoryRows::Add(const HistoryItem& item) {
  *open_.add_items() = HistoryItemToStore(item);
  open_cost_ += CostOf(item);
  total_cost_ += CostOf(item);
  changed_ = true;
}

void HistoryRows::Take(const std::string& job_uid, StoreBatch* batch) {
  if (!changed_) {
    return;
  }
  changed_ = false;
  StoredTelemetry& row = batch->telemetry.emplace_back();
  row.job_uid = job_uid;
  row.sequence = open_sequence_;
  row.cost = open_cost_;
  if (open_cost_ >= kRowCost) {
    row.history = std::move(open_);
    open_ = internal::v1::StoredHistory();
    full_.push_back({.sequence = open_sequence_, .cost = open_cost_});
    ++open_sequence_;
    open_cost_ = 0;
  } else {
    row.history = open_;
  }
  bool trimmed = false;
  while (!full_.empty() && total_cost_ - full_.front().cost >= kCostMax) {
    total_cost_ -= full_.front().cost;
    full_.pop_front();
    trimmed = true;
  }
  if (trimmed) {
    batch->telemetry_trims.emplace_back(job_uid,
                                        full_.empty() ? open_sequence_ : full_.front().sequence);
  }
}

void HistoryRows::Restore(const std::vector<TelemetryRow>& rows) {
  full_.assign(rows.begin(), rows.end());
  total_cost_ = 0;
  for (const TelemetryRow& row : rows) {
    total_cost_ += row.cost;
    open_sequence_ = row.sequence + 1;  // what comes next begins a row of its own
  }
}

std::vector<HistoryItem> HistoryRows::Items(const std::vector<StoredTelemetry>& stored) const {
  std::vector<HistoryItem> items;
  const auto add = [&items](const internal::v1::StoredHistory& history) {
    for (const internal::v1::StoredHistory::Item& item : history.items()) {
      if (std::optional<HistoryItem> value = HistoryItemFromStore(item); value.has_value()) {
        items.push_back(*std::move(value));
      }
    }
  };
  for (const StoredTelemetry& row : stored) {
    if (row.sequence < open_sequence_) {
      add(row.history);
    }
  }
  add(open_);
  return items;
}

}  // namespace octavo
