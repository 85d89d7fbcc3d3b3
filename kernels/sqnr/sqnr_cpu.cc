// Energies of a tensor and of its quantisation error, for SQNR = 10·log10(signal / noise).
// FP64, element i of a run into lane i % 8, so that the sum does not depend on the vector width.
#include <algorithm>

#include "base/check.h"
#include "kernels/cpu/ops_cpu.h"
#include "kernels/cpu/rows.h"
#include "kernels/quantize/quantize_block.h"

namespace octavo::cpu {
namespace {

struct Energies {
  static constexpr std::int64_t kLanes = 8;
  double signal[kLanes] = {};
  double noise[kLanes] = {};

  void Add(const float* x, const float* decoded, std::int64_t n) {
    for (std::int64_t i = 0; i < n; ++i) {
      const double value = x[i];
      const double error = value - decoded[i];
      signal[i % kLanes] += value * value;
      noise[i % kLanes] += error * error;
    }
  }
  void AddTo(SqnrSlot* slot) const {
    for (std::int64_t i = 0; i < kLanes; ++i) {
      slot->signal += signal[i];
      slot->noise += noise[i];
    }
  }
};

}  // namespace

void Sqnr(OpsContext* ops_context, const SqnrArgs& args) {
  Context& context = Get(ops_context);
  const std::int64_t rows = args.groups.padded_rows;
  if (args.q_is_transposed) {
    CheckQTensor(args.q, args.cols, RoundUp(rows, kTile), "sqnr, column-wise copy");
  } else {
    CheckQTensor(args.q, rows, args.cols, "sqnr, row-wise copy");
  }
  float* x_buffer = context.row.Get<float>(kTile);
  float* block = context.block.Get<float>(kTile * kTile);
  float decoded[kTile];
  Energies energies;
  ForEachBand(args.groups, [&](const Band& band) {
    for (std::int64_t c = 0; c < args.cols; c += kTile) {
      const std::int64_t width = std::min(kTile, args.cols - c);
      if (args.q_is_transposed) {
        for (std::int64_t i = 0; i < width; ++i) {
          DecodeElements({.src = &args.q,
                          .row = c + i,
                          .col_begin = band.row,
                          .n = band.real,
                          .group = band.group},
                         decoded);
          for (std::int64_t r = 0; r < band.real; ++r) {
            block[r * kTile + i] = decoded[r];
          }
        }
      }
      for (std::int64_t r = 0; r < band.real; ++r) {
        const std::int64_t row = band.row + r;
        const float* x = LoadRow(args.x, args.x_dtype, row * args.cols + c, width, x_buffer);
        if (!args.q_is_transposed) {
          DecodeElements(
              {.src = &args.q, .row = row, .col_begin = c, .n = width, .group = band.group},
              decoded);
        }
        energies.Add(x, args.q_is_transposed ? block + r * kTile : decoded, width);
      }
    }
  });
  energies.AddTo(args.slot);
}

}  // namespace octavo::cpu
