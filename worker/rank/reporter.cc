#include "worker/rank/reporter.h"

#include <algorithm>
#include <utility>

#include "base/clock.h"
#include "proto/convert/precision.h"

namespace octavo {

iv1::RankToWorker ProgressMessage(iv1::RankPhase phase, std::int64_t step, std::string detail) {
  iv1::RankToWorker message;
  message.mutable_progress()->set_phase(phase);
  message.mutable_progress()->set_step(step);
  message.mutable_progress()->set_detail(std::move(detail));
  return message;
}

void MergeSlot(const StatSlot& from, StatSlot* into) {
  into->amax = std::max(into->amax, from.amax);
  if (from.dequant_scale_max > 0) {
    into->dequant_scale_min = into->dequant_scale_max > 0
                                  ? std::min(into->dequant_scale_min, from.dequant_scale_min)
                                  : from.dequant_scale_min;
    into->dequant_scale_max = std::max(into->dequant_scale_max, from.dequant_scale_max);
  }
  into->elements += from.elements;
  into->nonfinite += from.nonfinite;
  into->saturated += from.saturated;
  into->nonzero += from.nonzero;
  into->flushed += from.flushed;
  into->transpose_flushed += from.transpose_flushed;
}

iv1::TensorStats MakeTensorStats(const TensorSite& site, const std::vector<std::int32_t>& experts,
                                 const std::vector<StatSlot>& slots) {
  StatSlot all;
  for (const StatSlot& slot : slots) {
    MergeSlot(slot, &all);
  }
  iv1::TensorStats out;
  out.set_layer(site.site.layer);
  out.set_op(static_cast<int>(site.site.op));
  out.set_tensor(static_cast<int>(site.tensor));
  out.set_amax(all.amax);
  out.set_dequant_scale_min(all.dequant_scale_min);
  out.set_dequant_scale_max(all.dequant_scale_max);
  out.set_elements(all.elements);
  out.set_nonfinite(all.nonfinite);
  out.set_saturated(all.saturated);
  out.set_nonzero(all.nonzero);
  out.set_flushed(all.flushed);
  out.set_transpose_flushed(all.transpose_flushed);

  struct Ratio {
    std::uint64_t StatSlot::*count;
    std::uint64_t StatSlot::*total;
  };
  constexpr Ratio kRatios[] = {{&StatSlot::saturated, &StatSlot::elements},
                               {&StatSlot::flushed, &StatSlot::nonzero},
                               {&StatSlot::transpose_flushed, &StatSlot::nonzero}};
  for (int r = 0; r < 3; ++r) {
    std::vector<std::size_t> order;
    for (std::size_t i = 0; i < slots.size(); ++i) {
      if (experts[i] >= 0 && slots[i].*kRatios[r].count > 0) {
        order.push_back(i);
      }
    }
    const auto value = [&](std::size_t i) {
      const std::uint64_t total = std::max<std::uint64_t>(slots[i].*kRatios[r].total, 1);
      return static_cast<double>(slots[i].*kRatios[r].count) / static_cast<double>(total);
    };
    std::stable_sort(order.begin(), order.end(),
                     [&](std::size_t a, std::size_t b) { return value(a) > value(b); });
    order.resize(std::min<std::size_t>(order.size(), kWorstExperts));
    for (const std::size_t i : order) {
      auto& worst = *out.add_worst();
      worst.set_expert(experts[i]);
      worst.set_ratio(r);
      worst.set_count(slots[i].*kRatios[r].count);
      worst.set_total(slots[i].*kRatios[r].total);
    }
  }
  return out;
}

Reporter::Reporter(TrainingHost& host, std::vector<const Communicator*> comms, std::int32_t rank,
                   std::function<double()> all_to_all_seconds)
    : host_(host),
      comms_(std::move(comms)),
      rank_(rank),
      all_to_all_seconds_(std::move(all_to_all_seconds)) {}

bool Reporter::Send(iv1::RankToWorker message) {
  const bool sent = host_.TryReport(std::move(message));
  dropped_ += sent ? 0 : 1;
  return sent;
}

void Reporter::ReportStep(const iv1::StepReport& report) {
  if (rank_ != 0) {
    return;  // the values are the job's, once is enough
  }
  iv1::RankToWorker message;
  *message.mutable_step() = report;
  unsent_step_.reset();
  if (!Send(std::move(message))) {
    unsent_step_ = report;
  }
}

void Reporter::DeliverLastStep() {
  if (!unsent_step_.has_value()) {
    return;
  }
  iv1::RankToWorker message;
  *message.mutable_step() = *std::exchange(unsent_step_, std::nullopt);
  host_.Deliver(std::move(message));
}

void Reporter::Heartbeat(iv1::RankPhase phase, std::int64_t step, const std::string& detail) {
  const std::int64_t now = RealClock::Get().MonotonicMicros();
  if (phase == last_phase_ && now - last_beat_micros_ < kHeartbeatMs * kMicrosPerMilli) {
    return;
  }
  last_phase_ = phase;
  last_beat_micros_ = now;
  Send(ProgressMessage(phase, step, detail));
}

std::int64_t Reporter::NonfiniteElements(const Transformer& model) {
  std::int64_t count = 0;
  for (const StatSlot& slot : model.stats()) {
    count += static_cast<std::int64_t>(slot.nonfinite);
  }
  return count;
}

void Reporter::AddPass(const Transformer& model, bool rolled_back) {
  const std::span<const StatSlot> stats = model.stats();
  slots_.resize(stats.size());
  ++passes_;
  for (std::size_t i = 0; i < stats.size(); ++i) {
    if (rolled_back) {
      slots_[i].nonfinite += stats[i].nonfinite;
    } else {
      MergeSlot(stats[i], &slots_[i]);
    }
  }
}

void Reporter::AddSample(const Transformer& model) {
  const std::span<const SqnrSlot> energies = model.sqnr();
  energies_.resize(energies.size());
  for (std::size_t i = 0; i < energies.size(); ++i) {
    energies_[i].signal += energies[i].signal;
    energies_[i].noise += energies[i].noise;
  }
  for (const ShadowResult& shadow : model.shadows()) {
    const auto key = std::tuple(shadow.site, shadow.tensor, DebugString(shadow.recipe));
    const auto [at, fresh] = shadows_.emplace(key, shadow);
    if (!fresh) {
      MergeSlot(shadow.stats, &at->second.stats);
      at->second.energy.signal += shadow.energy.signal;
      at->second.energy.noise += shadow.energy.noise;
    }
  }
}

void Reporter::Snapshot(const Transformer& model, const Interval& interval) {
  if (passes_ == 0) {
    return;
  }
  iv1::RankToWorker message;
  auto& snapshot = *message.mutable_telemetry();
  snapshot.set_first_step(interval.first_step);
  snapshot.set_last_step(interval.last_step);
  snapshot.set_plan_version(model.plan().version);
  snapshot.set_ranks(1);
  snapshot.set_memory_bytes(model.memory().total());
  FillTensors(model, &snapshot);
  FillExecuted(model, &snapshot);
  FillTraffic(&snapshot);
  for (const ExpertLoad& load : model.expert_load()) {
    auto& out = *snapshot.add_loads();
    out.set_layer(load.layer);
    out.set_max_ratio(load.mean > 0 ? load.max / load.mean : 0);
    out.set_min_ratio(load.mean > 0 ? load.min / load.mean : 0);
    out.set_cv(load.cv);
  }
  const std::int64_t rounds = model.multi_round_layers();
  if (snapshot.loads_size() > 0) {
    // The model counts rounds over all layers; they travel on the first entry.
    snapshot.mutable_loads(0)->set_extra_rounds(rounds - multi_round_before_);
  }
  multi_round_before_ = rounds;
  snapshot.set_dropped_reports(dropped_ - dropped_before_);
  if (Send(std::move(message))) {
    dropped_before_ = dropped_;
  }
  slots_.assign(slots_.size(), StatSlot{});
  energies_.assign(energies_.size(), SqnrSlot{});
  shadows_.clear();
  passes_ = 0;
}

void Reporter::FillTensors(const Transformer& model, iv1::TelemetrySnapshot* snapshot) {
  const std::vector<TensorSite>& sites = model.stat_sites();
  const auto key = [](const TensorSite& s) { return std::tuple(s.site, s.tensor); };
  std::map<std::tuple<OpSite, Tensor>, SqnrSlot> energies;
  for (std::size_t i = 0; i < energies_.size(); ++i) {
    energies[key(model.sqnr_sites()[i])] = energies_[i];
  }
  // Experts of one tensor are adjacent.
  for (std::size_t begin = 0; begin < sites.size();) {
    std::size_t end = begin;
    std::vector<std::int32_t> experts;
    std::vector<StatSlot> slots;
    std::uint64_t seen = 0;
    for (; end < sites.size() && key(sites[end]) == key(sites[begin]); ++end) {
      experts.push_back(sites[end].expert);
      slots.push_back(slots_[end]);
      seen += slots_[end].elements + slots_[end].nonfinite;
    }
    if (seen > 0) {
      iv1::TensorStats stats = MakeTensorStats(sites[begin], experts, slots);
      const SqnrSlot& energy = energies[key(sites[begin])];
      stats.set_signal_energy(energy.signal);
      stats.set_noise_energy(energy.noise);
      const OpSite& site = sites[begin].site;
      stats.set_e5m2(sites[begin].tensor == Tensor::kGrad &&
                     model.plan().Resolve(site.layer, site.op).gradient_is_e5m2());
      *snapshot->add_tensors() = std::move(stats);
    }
    begin = end;
  }
  for (const auto& [id, shadow] : shadows_) {
    if (shadow.stats.elements == 0) {
      continue;
    }
    iv1::TensorStats stats =
        MakeTensorStats({.site = shadow.site, .tensor = shadow.tensor}, {-1}, {shadow.stats});
    stats.set_signal_energy(shadow.energy.signal);
    stats.set_noise_energy(shadow.energy.noise);
    stats.set_shadow(true);
    stats.set_shadow_recipe(std::string(Name(shadow.recipe.kind)));
    stats.set_e5m2(shadow.tensor == Tensor::kGrad && shadow.recipe.gradient_is_e5m2());
    *snapshot->add_tensors() = std::move(stats);
  }
}

void Reporter::FillExecuted(const Transformer& model, iv1::TelemetrySnapshot* snapshot) {
  const PrecisionPlan& plan = model.plan();
  const ExecutedCounters& executed = model.executed();
  for (std::int32_t layer = 0; layer < plan.layers; ++layer) {
    for (int op = 0; op < kOpCount; ++op) {
      const OpSite site{.layer = layer, .op = static_cast<Op>(op)};
      // What ran most in this interval is in force; the plan where nothing ran (a dense layer's
      // fc1).
      std::int64_t most = 0;
      std::string in_force = DebugString(plan.Resolve(layer, site.op));
      for (const ExecutedEntry& entry : executed.At(site)) {
        const auto id = std::tuple(layer, op, DebugString(entry.planned),
                                   DebugString(entry.executed), entry.reason);
        std::int64_t& before = executed_before_[id];
        const std::int64_t calls = entry.calls - std::exchange(before, entry.calls);
        if (calls == 0) {
          continue;
        }
        if (calls > most) {
          most = calls;
          in_force = DebugString(entry.executed);
        }
        auto& out = *snapshot->add_executed();
        out.set_layer(layer);
        out.set_op(op);
        out.set_planned(std::string(Name(entry.planned.kind)));
        out.set_executed(std::string(Name(entry.executed.kind)));
        out.set_reason(entry.reason);
        out.set_count(calls);
      }
      snapshot->add_recipes_in_force(in_force);
    }
  }
  for (int p = 0; p < kFlopPrecisionCount; ++p) {
    const auto precision = static_cast<FlopPrecision>(p);
    const double flops = executed.flops(precision);
    (*snapshot->mutable_flops())[std::string(Name(precision))] = flops - flops_before_[p];
    flops_before_[p] = flops;
  }
}

void Reporter::FillTraffic(iv1::TelemetrySnapshot* snapshot) {
  std::int64_t all_to_all = 0, all_reduce = 0;
  for (const Communicator* comm : comms_) {
    all_to_all += comm->counters().all_to_all_bytes;
    all_reduce += comm->counters().all_reduce_bytes;
  }
  snapshot->set_all_to_all_bytes(all_to_all - all_to_all_before_);
  snapshot->set_all_reduce_bytes(all_reduce - all_reduce_before_);
  if (all_to_all_seconds_) {
    const double seconds = all_to_all_seconds_();
    snapshot->set_all_to_all_seconds(seconds - std::exchange(all_to_all_seconds_before_, seconds));
  }
  all_to_all_before_ = all_to_all;
  all_reduce_before_ = all_reduce;
}

}  // namespace octavo
