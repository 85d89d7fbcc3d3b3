#include "worker/precision/executed.h"

#include "base/check.h"

namespace octavo {

std::string_view Name(FlopPrecision precision) {
  constexpr std::string_view kNames[kFlopPrecisionCount] = {"fp32", "bf16", "fp8"};
  return kNames[static_cast<std::size_t>(precision)];
}

void ExecutedCounters::Count(const Event& event) {
  const std::size_t index = static_cast<std::size_t>(event.site.layer) * kOpCount +
                            static_cast<std::size_t>(event.site.op);
  OCTAVO_CHECK_LT(index, by_site_.size());
  std::vector<ExecutedEntry>& entries = by_site_[index];
  ExecutedEntry* found = nullptr;
  for (ExecutedEntry& entry : entries) {
    if (entry.planned == event.planned && entry.executed == event.executed &&
        entry.reason == event.reason) {
      found = &entry;
    }
  }
  if (found == nullptr) {
    found = &entries.emplace_back(ExecutedEntry{.site = event.site,
                                                .planned = event.planned,
                                                .executed = event.executed,
                                                .reason = std::string(event.reason)});
  }
  ++found->calls;
  found->flops += event.flops;
  flops_[static_cast<std::size_t>(event.precision)] += event.flops;
  mismatches_ += found->mismatch() ? 1 : 0;
}

std::vector<ExecutedEntry> ExecutedCounters::entries() const {
  std::vector<ExecutedEntry> all;
  for (const std::vector<ExecutedEntry>& site : by_site_) {
    all.insert(all.end(), site.begin(), site.end());
  }
  return all;
}

}  // namespace octavo
