// State of every quantised tensor of a rank, by one index: statistics slot, delayed window, Q.
//
// A site is (layer, op, tensor, global expert). The experts of one (layer, op, tensor) are
// adjacent, so that grouped kernels get one pointer for all groups. Statistics live on the device
// for a pass and are copied to the host once; quant_scales go the other way once per step.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/arena.h"
#include "kernels/ops.h"
#include "kernels/stats.h"
#include "proto/precision/op_id.h"
#include "proto/precision/plan.h"
#include "worker/precision/delayed_scaling.h"

namespace octavo {

struct TensorSite {
  OpSite site;
  Tensor tensor = Tensor::kInput;
  std::int32_t expert = -1;  // global id; −1: not of one expert
};

// Which sites a layer has.
struct LayerSites {
  bool moe = true;
  bool dense_mlp = false;  // dense MLP, or shared experts beside the MoE
};

struct TensorStatesOptions {
  std::vector<LayerSites> layers;
  std::int32_t expert_first = 0, expert_count = 0;  // experts of this rank
};

// Not thread-safe.
class TensorStates {
 public:
  TensorStates(const Backend& backend, const TensorStatesOptions& options, Arena& device,
               Arena& pinned);

  const std::vector<TensorSite>& sites() const { return sites_; }
  const std::vector<TensorSite>& energy_sites() const { return energy_sites_; }
  // Index of the first site of (layer, op, tensor); experts follow. REQUIRES: exists.
  std::int32_t Index(const OpSite& site, Tensor tensor) const;
  std::int32_t group_count(const OpSite& site) const;

  StatSlot* slots(std::int32_t index) { return device_slots_ + index; }
  SqnrSlot* energy(const OpSite& site, Tensor tensor);
  // Device Q of delayed scaling, [groups]; meaningful where primed.
  const float* quant_scale(std::int32_t index) const { return device_quant_scale_ + index; }
  DelayedScaling& delayed(std::int32_t index) { return delayed_[static_cast<std::size_t>(index)]; }
  const DelayedScaling& delayed(std::int32_t index) const {
    return delayed_[static_cast<std::size_t>(index)];
  }

  // Device scratch of one call of the quantiser, [most groups of a site].
  float* scratch_amax() { return scratch_; }
  float* scratch_quant_scale() { return scratch_ + scratch_groups_; }
  float* scratch_dequant_scale() { return scratch_ + 2 * scratch_groups_; }

  // Clears device statistics (and energies when `energies`).
  void Reset(bool energies);
  // Enqueues the copy to the host on the copy lane; valid once that was waited for.
  void FetchStats(bool energies);
  const std::vector<StatSlot>& host_stats() const { return host_stats_copy_; }
  const std::vector<SqnrSlot>& host_energies() const { return host_energies_copy_; }
  void Publish(bool energies);  // after that wait: pinned memory → the vectors above

  // A new plan: configures windows of delayed sites, empties those that were not delayed before.
  void ApplyPlan(const PrecisionPlan& before, const PrecisionPlan& after, bool first);
  // Sends the quant_scales of primed windows to the device.
  void UploadQuantScales();

 private:
  void Add(const OpSite& site, Tensor tensor, std::int32_t experts, std::int32_t expert_first);

  const Backend backend_;
  std::vector<TensorSite> sites_;
  std::vector<TensorSite> energy_sites_;
  std::vector<std::int32_t> first_index_;   // [layer, op, tensor] → site index or −1
  std::vector<std::int32_t> energy_index_;  // [layer, op, tensor]
  std::vector<std::int32_t> groups_;        // [layer, op]
  std::vector<DelayedScaling> delayed_;
  StatSlot* device_slots_ = nullptr;
  SqnrSlot* device_energies_ = nullptr;
  float* device_quant_scale_ = nullptr;
  float* scratch_ = nullptr;
  std::int64_t scratch_groups_ = 1;
  StatSlot* pinned_slots_ = nullptr;
  SqnrSlot* pinned_energies_ = nullptr;
  float* pinned_quant_scale_ = nullptr;
  std::vector<StatSlot> host_stats_copy_;
  std::vector<SqnrSlot> host_energies_copy_;
};

}  // namespace octavo
