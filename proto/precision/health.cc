#include "proto/precision/health.h"

#include <cmath>

namespace octavo {
namespace {

constexpr std::string_view kSignalNames[kSignalCount] = {
    "nonfinite",      "saturated",             "flushed", "transpose_flushed", "sqnr", "amax_jump",
    "amax_variation", "dequant_scale_outlier", "stale",   "loss_spike"};

// Reported instead of infinity when the cast was exact.
constexpr double kExactDb = 200;

}  // namespace

std::string_view Name(Signal signal) { return kSignalNames[static_cast<std::size_t>(signal)]; }

double SqnrDb(const TensorHealth& t) {
  if (t.noise_energy <= 0) {
    return kExactDb;
  }
  return 10 * std::log10(t.signal_energy / t.noise_energy);
}

}  // namespace octavo
