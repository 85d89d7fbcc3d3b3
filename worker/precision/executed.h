// Planned against executed precision (NUMERICS 10): every GEMM and every payload is counted with
// the recipe that the plan asked for, the recipe that ran, and the reason when they differ.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "proto/precision/op_id.h"
#include "proto/precision/recipe.h"

namespace octavo {

// Arithmetic of a matrix product, for FLOP shares.
enum class FlopPrecision : std::uint8_t { kFp32, kBf16, kFp8 };
inline constexpr int kFlopPrecisionCount = 3;
std::string_view Name(FlopPrecision precision);  // "fp32", "bf16", "fp8"

struct ExecutedEntry {
  OpSite site;
  Recipe planned, executed;
  std::string reason;  // empty when they are the same; else e.g. "retry after a non-finite value"
  std::int64_t calls = 0;  // products, or payloads for dispatch; activation recompute counts too
  double flops = 0;        // of real rows, padding not counted; 0 for dispatch
  bool mismatch() const { return !(planned == executed); }
};

// Monotonic since creation. Not thread-safe.
class ExecutedCounters {
 public:
  explicit ExecutedCounters(std::int32_t layers = 0)
      : by_site_(static_cast<std::size_t>(layers) * kOpCount) {}

  struct Event {
    OpSite site;
    const Recipe& planned;
    const Recipe& executed;
    std::string_view reason;
    FlopPrecision precision;
    double flops;
  };
  void Count(const Event& event);
  // GEMMs outside the plan (router, LM head).
  void CountFlops(FlopPrecision precision, double flops) {
    flops_[static_cast<std::size_t>(precision)] += flops;
  }

  std::vector<ExecutedEntry> entries() const;
  // The recipe that ran last for the site; planned when nothing ran yet. REQUIRES: site exists.
  const std::vector<ExecutedEntry>& At(const OpSite& site) const {
    return by_site_[static_cast<std::size_t>(site.layer) * kOpCount +
                    static_cast<std::size_t>(site.op)];
  }
  std::int64_t mismatches() const { return mismatches_; }
  // GEMM FLOPs (2·m·n·k) by arithmetic. An emulated FP8 product counts as fp8.
  double flops(FlopPrecision precision) const {
    return flops_[static_cast<std::size_t>(precision)];
  }

 private:
  std::vector<std::vector<ExecutedEntry>> by_site_;
  std::array<double, kFlopPrecisionCount> flops_{};
  std::int64_t mismatches_ = 0;
};

}  // namespace octavo
