#include "worker/agent/telemetry_merge.h"

#include <algorithm>
#include <string>
#include <tuple>

namespace octavo {
namespace {

using TensorId = std::tuple<int, int, int, bool>;

TensorId IdOf(const iv1::TensorStats& stats) {
  return {stats.layer(), stats.op(), stats.tensor(), stats.shadow()};
}

double Ratio(const iv1::TensorStats::WorstExpert& worst) {
  return worst.total() == 0
             ? 0
             : static_cast<double>(worst.count()) / static_cast<double>(worst.total());
}

void MergeWorst(const iv1::TensorStats& from, iv1::TensorStats* into) {
  for (const auto& worst : from.worst()) {
    auto same = std::find_if(
        into->mutable_worst()->begin(), into->mutable_worst()->end(), [&](const auto& have) {
          return have.expert() == worst.expert() && have.ratio() == worst.ratio();
        });
    if (same == into->mutable_worst()->end()) {
      *into->add_worst() = worst;
    } else {
      same->set_count(same->count() + worst.count());
      same->set_total(same->total() + worst.total());
    }
  }
  // Ties go to the smaller expert, so that the result does not depend on who reported first.
  std::sort(into->mutable_worst()->begin(), into->mutable_worst()->end(),
            [](const auto& a, const auto& b) {
              return std::tuple(-Ratio(a), a.expert(), a.ratio()) <
                     std::tuple(-Ratio(b), b.expert(), b.ratio());
            });
  while (into->worst_size() > kWorstKept) {
    into->mutable_worst()->RemoveLast();
  }
}

void MergeTensor(const iv1::TensorStats& from, iv1::TensorStats* into) {
  into->set_amax(std::max(into->amax(), from.amax()));
  // 0 means "no group had a value": it must not win the minimum.
  if (from.dequant_scale_max() > 0) {
    into->set_dequant_scale_min(into->dequant_scale_max() > 0
                                    ? std::min(into->dequant_scale_min(), from.dequant_scale_min())
                                    : from.dequant_scale_min());
    into->set_dequant_scale_max(std::max(into->dequant_scale_max(), from.dequant_scale_max()));
  }
  into->set_elements(into->elements() + from.elements());
  into->set_nonfinite(into->nonfinite() + from.nonfinite());
  into->set_saturated(into->saturated() + from.saturated());
  into->set_nonzero(into->nonzero() + from.nonzero());
  into->set_flushed(into->flushed() + from.flushed());
  into->set_transpose_flushed(into->transpose_flushed() + from.transpose_flushed());
  into->set_signal_energy(into->signal_energy() + from.signal_energy());
  into->set_noise_energy(into->noise_energy() + from.noise_energy());
  MergeWorst(from, into);
}

void MergeTensors(const iv1::TelemetrySnapshot& from, iv1::TelemetrySnapshot* into) {
  std::map<TensorId, iv1::TensorStats*> have;
  for (iv1::TensorStats& stats : *into->mutable_tensors()) {
    have[IdOf(stats)] = &stats;
  }
  for (const iv1::TensorStats& stats : from.tensors()) {
    const auto found = have.find(IdOf(stats));
    if (found != have.end()) {
      MergeTensor(stats, found->second);
    } else {
      iv1::TensorStats* added =
          into->add_tensors();  // pointers stay valid: elements are on the heap
      *added = stats;
      have[IdOf(stats)] = added;
    }
  }
}

void MergeExecuted(const iv1::TelemetrySnapshot& from, iv1::TelemetrySnapshot* into) {
  using Id = std::tuple<int, int, std::string, std::string, std::string>;
  const auto id = [](const iv1::ExecutedPrecision& e) {
    return Id(e.layer(), e.op(), e.planned(), e.executed(), e.reason());
  };
  std::map<Id, iv1::ExecutedPrecision*> have;
  for (iv1::ExecutedPrecision& executed : *into->mutable_executed()) {
    have[id(executed)] = &executed;
  }
  for (const iv1::ExecutedPrecision& executed : from.executed()) {
    const auto found = have.find(id(executed));
    if (found != have.end()) {
      found->second->set_count(found->second->count() + executed.count());
    } else {
      *into->add_executed() = executed;
    }
  }
}

void MergeLoads(const iv1::TelemetrySnapshot& from, iv1::TelemetrySnapshot* into) {
  std::map<int, iv1::LayerLoad*> have;
  for (iv1::LayerLoad& load : *into->mutable_loads()) {
    have[load.layer()] = &load;
  }
  for (const iv1::LayerLoad& load : from.loads()) {
    const auto found = have.find(load.layer());
    if (found == have.end()) {
      *into->add_loads() = load;
      continue;
    }
    iv1::LayerLoad* merged = found->second;
    merged->set_max_ratio(std::max(merged->max_ratio(), load.max_ratio()));
    merged->set_min_ratio(std::min(merged->min_ratio(), load.min_ratio()));
    merged->set_cv(std::max(merged->cv(), load.cv()));
    merged->set_extra_rounds(merged->extra_rounds() + load.extra_rounds());
  }
}

// How many ranks a snapshot stands for; a rank need not fill the field.
int RanksIn(const iv1::TelemetrySnapshot& snapshot) { return std::max(1, snapshot.ranks()); }

}  // namespace

void MergeSnapshot(const iv1::TelemetrySnapshot& from, iv1::TelemetrySnapshot* into) {
  into->set_ranks(RanksIn(*into) + RanksIn(from));
  into->set_plan_version(std::max(into->plan_version(), from.plan_version()));
  MergeTensors(from, into);
  MergeExecuted(from, into);
  MergeLoads(from, into);
  for (const auto& [precision, flops] : from.flops()) {
    (*into->mutable_flops())[precision] += flops;
  }
  into->set_all_to_all_bytes(into->all_to_all_bytes() + from.all_to_all_bytes());
  into->set_all_reduce_bytes(into->all_reduce_bytes() + from.all_reduce_bytes());
  into->set_all_to_all_seconds(into->all_to_all_seconds() + from.all_to_all_seconds());
  into->set_dropped_reports(into->dropped_reports() + from.dropped_reports());
  into->set_memory_bytes(into->memory_bytes() + from.memory_bytes());
  into->set_padding_rows(into->padding_rows() + from.padding_rows());
  if (into->recipes_in_force().empty()) {
    *into->mutable_recipes_in_force() = from.recipes_in_force();
  }
}

std::vector<iv1::TelemetrySnapshot> TelemetryMerger::Add(const iv1::TelemetrySnapshot& snapshot,
                                                         int expected_ranks,
                                                         std::int64_t now_micros) {
  const std::pair<std::int64_t, std::int64_t> id = {snapshot.last_step(), snapshot.first_step()};
  std::vector<iv1::TelemetrySnapshot> ready;
  while (!windows_.empty() && windows_.begin()->first < id) {
    // Only one window back may still be filled by slower ranks of the same host.
    if (windows_.size() < 2 && expected_ranks > 1) {
      break;
    }
    ready.push_back(std::move(windows_.begin()->second.merged));
    windows_.erase(windows_.begin());
  }
  const auto [found, fresh] = windows_.try_emplace(id);
  Window& window = found->second;
  if (fresh) {
    window.merged = snapshot;
    window.merged.set_ranks(RanksIn(snapshot));
    window.since_micros = now_micros;
  } else {
    MergeSnapshot(snapshot, &window.merged);
  }
  if (window.merged.ranks() >= expected_ranks) {
    // In order of steps: whatever is older can no longer become complete.
    while (!windows_.empty() && windows_.begin()->first <= id) {
      ready.push_back(std::move(windows_.begin()->second.merged));
      windows_.erase(windows_.begin());
    }
  }
  return ready;
}

std::vector<iv1::TelemetrySnapshot> TelemetryMerger::Flush(std::int64_t now_micros) {
  std::vector<iv1::TelemetrySnapshot> ready;
  while (!windows_.empty() &&
         now_micros - windows_.begin()->second.since_micros >= kMergeWaitMicros) {
    ready.push_back(std::move(windows_.begin()->second.merged));
    windows_.erase(windows_.begin());
  }
  return ready;
}

}  // namespace octavo
