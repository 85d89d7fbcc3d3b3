// AdamW with decoupled decay (arXiv 1711.05101, algorithm 2):
//   g = grad · grad_factor,  m = β1·m + (1−β1)·g,  v = β2·v + (1−β2)·g²
//   p = p·(1 − lr·λ) − lr·(m/(1−β1^t)) / (sqrt(v/(1−β2^t)) + ε)
// The step uses the FP32 moments of this step; BF16 moments are rounded when stored only.
#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "kernels/cpu/ops_cpu.h"
#include "kernels/cpu/rows.h"

namespace octavo::cpu {
namespace {

struct Coefficients {
  float grad_factor, beta1, beta1_rest, beta2, beta2_rest;
  float keep;          // 1 − lr·λ
  float step;          // lr / (1 − β1^t)
  float v_correction;  // 1 / (1 − β2^t)
  float eps;
};

OCTAVO_MULTIVERSION void Update(const Coefficients& k, const float* __restrict grad,
                                float* __restrict m, float* __restrict v, float* __restrict p,
                                std::int64_t n) {
  const Coefficients c = k;
  for (std::int64_t i = 0; i < n; ++i) {
    const float g = grad[i] * c.grad_factor;
    m[i] = c.beta1 * m[i] + c.beta1_rest * g;
    v[i] = c.beta2 * v[i] + c.beta2_rest * (g * g);
    const float denominator = __builtin_sqrtf(v[i] * c.v_correction) + c.eps;
    p[i] = p[i] * c.keep - c.step * (m[i] / denominator);
  }
}

float* Mutable(const float* loaded, float* buffer, std::int64_t n) {
  if (loaded != buffer) {
    std::copy(loaded, loaded + n, buffer);
  }
  return buffer;
}

}  // namespace

void AdamW(OpsContext*, const AdamWArgs& a) {
  if (a.skip != nullptr && a.skip[0] != 0) {
    return;
  }
  OCTAVO_CHECK(a.t >= 1, "t = %lld counts from 1", static_cast<long long>(a.t));
  // Corrections in FP64: 1 − β2^t loses most of its bits in FP32 for small t.
  const double t = static_cast<double>(a.t);
  const double correction1 = 1.0 - std::pow(static_cast<double>(a.beta1), t);
  const double correction2 = 1.0 - std::pow(static_cast<double>(a.beta2), t);
  const Coefficients k = {
      .grad_factor = a.grad_factor == nullptr ? 1.0f : a.grad_factor[0],
      .beta1 = a.beta1,
      .beta1_rest = static_cast<float>(1.0 - static_cast<double>(a.beta1)),
      .beta2 = a.beta2,
      .beta2_rest = static_cast<float>(1.0 - static_cast<double>(a.beta2)),
      .keep = static_cast<float>(1.0 - static_cast<double>(a.lr) * a.weight_decay),
      .step = static_cast<float>(a.lr / correction1),
      .v_correction = static_cast<float>(1.0 / correction2),
      .eps = a.eps,
  };
  float m_buffer[kChunk];
  float v_buffer[kChunk];
  for (std::int64_t i = 0; i < a.n; i += kChunk) {
    const std::int64_t n = std::min(kChunk, a.n - i);
    float* m = Mutable(LoadRow(a.m, a.moment_dtype, i, n, m_buffer), m_buffer, n);
    float* v = Mutable(LoadRow(a.v, a.moment_dtype, i, n, v_buffer), v_buffer, n);
    Update(k, a.grad + i, m, v, a.master + i, n);
    StoreRow(m, n, a.m, a.moment_dtype, i);
    StoreRow(v, n, a.v, a.moment_dtype, i);
    if (a.copy != nullptr) {
      StoreRow(a.master + i, n, a.copy, a.copy_dtype, i);
    }
  }
}

}  // namespace octavo::cpu
