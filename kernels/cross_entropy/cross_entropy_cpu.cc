// Cross entropy over rows of logits: FP32 softmax, FP64 sum of losses in row order.
//   loss = log Σ exp(l − max) − (l[target] − max);  dlogits = (softmax − onehot)·dloss.
// A target outside the vocabulary is a bug of the caller; a negative one marks an ignored row.
#include <algorithm>
#include <cmath>
#include <limits>

#include "base/check.h"
#include "kernels/cpu/ops_cpu.h"
#include "kernels/cpu/rows.h"

namespace octavo::cpu {
namespace {

void ZeroRow(const CrossEntropyArgs& a, std::int64_t row) {
  const float zeros[kChunk] = {};
  for (std::int64_t c = 0; c < a.vocab; c += kChunk) {
    StoreRow(zeros, std::min(kChunk, a.vocab - c), a.logits, a.dtype, row * a.vocab + c);
  }
}

}  // namespace

void CrossEntropy(OpsContext*, const CrossEntropyArgs& a) {
  float buffer[kChunk];
  float exponent[kChunk];
  double loss = 0;
  for (std::int64_t r = 0; r < a.rows; ++r) {
    const std::int64_t target = a.target[r];
    OCTAVO_CHECK(target < a.vocab, "target %lld of row %lld is outside the vocabulary of %lld",
                 static_cast<long long>(target), static_cast<long long>(r),
                 static_cast<long long>(a.vocab));
    if (target < 0) {
      if (a.dloss != 0.0f) {
        ZeroRow(a, r);
      }
      continue;
    }
    const std::int64_t base = r * a.vocab;
    float max = -std::numeric_limits<float>::infinity();
    for (std::int64_t c = 0; c < a.vocab; c += kChunk) {
      const std::int64_t n = std::min(kChunk, a.vocab - c);
      max = std::max(max, RowMax(LoadRow(a.logits, a.dtype, base + c, n, buffer), n));
    }
    Lanes lanes;
    for (std::int64_t c = 0; c < a.vocab; c += kChunk) {
      const std::int64_t n = std::min(kChunk, a.vocab - c);
      ExpRow(LoadRow(a.logits, a.dtype, base + c, n, buffer), n, 1.0f, max, exponent, &lanes);
    }
    const float sum = lanes.Total();
    const float at_target = *LoadRow(a.logits, a.dtype, base + target, 1, buffer);
    loss += std::log(static_cast<double>(sum)) -
            (static_cast<double>(at_target) - static_cast<double>(max));
    if (a.dloss == 0.0f) {
      continue;
    }
    const float factor = a.dloss / sum;
    for (std::int64_t c = 0; c < a.vocab; c += kChunk) {
      const std::int64_t n = std::min(kChunk, a.vocab - c);
      Lanes unused;
      ExpRow(LoadRow(a.logits, a.dtype, base + c, n, buffer), n, 1.0f, max, exponent, &unused);
      ScaleRow(exponent, n, factor, exponent);
      if (target >= c && target < c + n) {
        exponent[target - c] -= a.dloss;
      }
      StoreRow(exponent, n, a.logits, a.dtype, base + c);
    }
  }
  a.loss_sum[0] += loss;
}

}  // namespace octavo::cpu
