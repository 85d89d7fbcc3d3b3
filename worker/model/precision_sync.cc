#include "worker/model/precision_sync.h"

#include <limits>
#include <map>

#include "base/status.h"
#include "base/str.h"

namespace octavo {
namespace {

bool IsDelayed(const PrecisionPlan& plan, const OpSite& site) {
  return plan.Resolve(site.layer, site.op).kind == RecipeKind::kFp8Delayed;
}

std::string NameOf(const TensorSite& s) {
  std::string name = StrCat("precision.", s.site.layer, ".", Name(s.site.op), ".", Name(s.tensor));
  if (s.expert >= 0) {
    StrAppend(&name, ".", s.expert);
  }
  return name;
}

}  // namespace

absl::Status PushAmax(TensorStates& states, const PrecisionPlan& plan, Exchange& world,
                      Exchange& expert_data, std::int32_t stale_after) {
  std::vector<std::int32_t> dense, expert;
  for (std::size_t i = 0; i < states.sites().size(); ++i) {
    const TensorSite& site = states.sites()[i];
    if (IsDelayed(plan, site.site)) {
      (site.expert < 0 ? dense : expert).push_back(static_cast<std::int32_t>(i));
    }
  }
  const auto push = [&states, stale_after](const std::vector<std::int32_t>& indices, Exchange& group) {
    std::vector<float> amax;
    for (std::int32_t i : indices) {
      const StatSlot& slot = states.host_stats()[static_cast<std::size_t>(i)];
      amax.push_back(slot.nonfinite > 0 ? std::numeric_limits<float>::infinity() : slot.amax);
    }
    RETURN_IF_ERROR(
        Annotate(group.AllReduceHost(amax.data(), static_cast<std::int64_t>(amax.size()),
                                     DType::kF32, ReduceOp::kMax),
                 "reducing amax"));
    for (std::size_t i = 0; i < indices.size(); ++i) {
      states.delayed(indices[i]).Push(amax[i], stale_after);
    }
    return absl::OkStatus();
  };
  RETURN_IF_ERROR(push(dense, world));
  return push(expert, expert_data);
}

std::vector<StateTensor> ExportWindows(const TensorStates& states) {
  std::vector<StateTensor> exported;
  for (std::size_t i = 0; i < states.sites().size(); ++i) {
    const DelayedScaling& window = states.delayed(static_cast<std::int32_t>(i));
    if (window.primed()) {
      const TensorSite& site = states.sites()[i];
      exported.push_back(
          {.name = NameOf(site), .expert = site.expert >= 0, .values = window.Export()});
    }
  }
  return exported;
}

absl::Status ImportWindows(std::span<const StateTensor> state, const PrecisionPlan& plan,
                           TensorStates& states) {
  std::map<std::string, const StateTensor*> by_name;
  for (const StateTensor& tensor : state) {
    by_name[tensor.name] = &tensor;
  }
  for (std::size_t i = 0; i < states.sites().size(); ++i) {
    const TensorSite& site = states.sites()[i];
    DelayedScaling& window = states.delayed(static_cast<std::int32_t>(i));
    window.Clear();
    const auto found = by_name.find(NameOf(site));
    if (found == by_name.end() || !IsDelayed(plan, site.site)) {
      continue;
    }
    if (!window.Import(found->second->values)) {
      return InvalidArgumentError(StrCat(found->first, " is no delayed-scaling window: ",
                                         found->second->values.size(), " values"));
    }
  }
  return absl::OkStatus();
}

}  // namespace octavo
