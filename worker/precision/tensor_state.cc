#include "worker/precision/tensor_state.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "worker/precision/treatment.h"

namespace octavo {
namespace {

std::size_t SiteKey(const OpSite& site) {
  return static_cast<std::size_t>(site.layer) * kOpCount + static_cast<std::size_t>(site.op);
}
std::size_t Key(const OpSite& site, Tensor tensor) {
  return SiteKey(site) * kTensorCount + static_cast<std::size_t>(tensor);
}

}  // namespace

TensorStates::TensorStates(const Backend& backend, const TensorStatesOptions& options,
                           Arena& device, Arena& pinned)
    : backend_(backend) {
  const std::size_t site_count = options.layers.size() * kOpCount;
  first_index_.assign(site_count * kTensorCount, -1);
  energy_index_.assign(site_count * kTensorCount, -1);
  groups_.assign(site_count, 0);
  for (std::size_t l = 0; l < options.layers.size(); ++l) {
    const auto add = [&](Op op, bool experts) {
      const OpSite site{static_cast<std::int32_t>(l), op};
      groups_[SiteKey(site)] = experts ? options.expert_count : 1;
      for (int t = 0; t < kTensorCount; ++t) {
        // A payload has no weight.
        if (op != Op::kDispatch || static_cast<Tensor>(t) != Tensor::kWeight) {
          Add(site, static_cast<Tensor>(t), experts ? options.expert_count : 0,
              options.expert_first);
        }
      }
    };
    add(Op::kAttnQkv, false);
    add(Op::kAttnOut, false);
    if (options.layers[l].dense_mlp) {
      add(Op::kMlpFc1, false);
      add(Op::kMlpFc2, false);
    }
    if (options.layers[l].moe) {
      add(Op::kDispatch, false);
      add(Op::kFc1, true);
      add(Op::kFc2, true);
    }
  }
  const auto n = static_cast<std::int64_t>(sites_.size());
  const auto n_energies = static_cast<std::int64_t>(energy_sites_.size());
  delayed_.resize(sites_.size());
  device_slots_ = device.Take<StatSlot>(n);
  device_energies_ = device.Take<SqnrSlot>(n_energies);
  device_quant_scale_ = device.Take<float>(n);
  scratch_groups_ = std::max(options.expert_count, 1);
  scratch_ = device.Take<float>(3 * scratch_groups_);
  pinned_slots_ = pinned.Take<StatSlot>(n);
  pinned_energies_ = pinned.Take<SqnrSlot>(n_energies);
  pinned_quant_scale_ = pinned.Take<float>(n);
  host_stats_copy_.resize(sites_.size());
  host_energies_copy_.resize(energy_sites_.size());
}

void TensorStates::Add(const OpSite& site, Tensor tensor, std::int32_t experts,
                       std::int32_t expert_first) {
  first_index_[Key(site, tensor)] = static_cast<std::int32_t>(sites_.size());
  energy_index_[Key(site, tensor)] = static_cast<std::int32_t>(energy_sites_.size());
  energy_sites_.push_back({site, tensor, -1});
  if (experts == 0) {
    sites_.push_back({site, tensor, -1});
  }
  for (std::int32_t e = 0; e < experts; ++e) {
    sites_.push_back({site, tensor, expert_first + e});
  }
}

std::int32_t TensorStates::Index(const OpSite& site, Tensor tensor) const {
  const std::int32_t index = first_index_[Key(site, tensor)];
  OCTAVO_CHECK(index >= 0, "layer %d has no %s/%s", site.layer, std::string(Name(site.op)).c_str(),
               std::string(Name(tensor)).c_str());
  return index;
}

std::int32_t TensorStates::group_count(const OpSite& site) const { return groups_[SiteKey(site)]; }

SqnrSlot* TensorStates::energy(const OpSite& site, Tensor tensor) {
  const std::int32_t index = energy_index_[Key(site, tensor)];
  OCTAVO_CHECK_GE(index, 0);
  return device_energies_ + index;
}

void TensorStates::Reset(bool energies) {
  backend_.ops->stats_reset(backend_.context, device_slots_,
                            static_cast<std::int64_t>(sites_.size()));
  if (energies) {
    backend_.ops->zero(backend_.context, device_energies_,
                       static_cast<std::int64_t>(energy_sites_.size() * sizeof(SqnrSlot)));
  }
}

void TensorStates::FetchStats(bool energies) {
  const auto fetch = [this](void* host, const void* device, std::size_t bytes) {
    backend_.ops->copy(backend_.context, {.dst = host,
                                          .src = device,
                                          .bytes = static_cast<std::int64_t>(bytes),
                                          .kind = CopyKind::kToHost,
                                          .lane = Lane::kCopy});
  };
  backend_.ops->order(backend_.context, Lane::kCompute, Lane::kCopy);
  fetch(pinned_slots_, device_slots_, sites_.size() * sizeof(StatSlot));
  if (energies) {
    fetch(pinned_energies_, device_energies_, energy_sites_.size() * sizeof(SqnrSlot));
  }
}

void TensorStates::Publish(bool energies) {
  std::copy_n(pinned_slots_, sites_.size(), host_stats_copy_.begin());
  if (energies) {
    std::copy_n(pinned_energies_, energy_sites_.size(), host_energies_copy_.begin());
  }
}

void TensorStates::ApplyPlan(const PrecisionPlan& before, const PrecisionPlan& after, bool first) {
  for (std::size_t i = 0; i < sites_.size(); ++i) {
    const OpSite& site = sites_[i].site;
    const Recipe& now = after.Resolve(site.layer, site.op);
    if (now.kind != RecipeKind::kFp8Delayed) {
      continue;
    }
    if (!first && before.Resolve(site.layer, site.op).kind != RecipeKind::kFp8Delayed) {
      delayed_[i].Clear();
    }
    delayed_[i].Configure(now, FormatOf(now, sites_[i].tensor) == DType::kE5M2);
  }
}

void TensorStates::UploadQuantScales() {
  for (std::size_t i = 0; i < sites_.size(); ++i) {
    pinned_quant_scale_[i] = delayed_[i].primed() ? delayed_[i].quant_scale() : 1.0f;
  }
  backend_.ops->copy(backend_.context,
                     {.dst = device_quant_scale_,
                      .src = pinned_quant_scale_,
                      .bytes = static_cast<std::int64_t>(sites_.size() * sizeof(float)),
                      .kind = CopyKind::kToDevice});
}

}  // namespace octavo
