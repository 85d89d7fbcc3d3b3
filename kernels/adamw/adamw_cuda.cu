// AdamW in one pass: reads gradient, master and moments once, writes master, moments and the copy.
// The arithmetic is the CPU's, rounding by rounding, so results are equal bit for bit.
#include <cmath>

#include "base/check.h"
#include "kernels/cuda/context.h"
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/ops_cuda.h"

namespace octavo::cuda {
namespace {

struct Coefficients {
  float beta1, beta1_rest, beta2, beta2_rest;
  float keep, step, v_correction, eps;
};

// Four consecutive elements.
__device__ __forceinline__ void Load4(const float* p, float v[4]) {
  const float4 f = *reinterpret_cast<const float4*>(p);
  v[0] = f.x, v[1] = f.y, v[2] = f.z, v[3] = f.w;
}
__device__ __forceinline__ void Load4(const bf16* p, float v[4]) {
  const uint2 w = *reinterpret_cast<const uint2*>(p);
  Unpack2(w.x, v[0], v[1]);
  Unpack2(w.y, v[2], v[3]);
}
__device__ __forceinline__ void Store4(float* p, const float v[4]) {
  *reinterpret_cast<float4*>(p) = make_float4(v[0], v[1], v[2], v[3]);
}
__device__ __forceinline__ void Store4(bf16* p, const float v[4]) {
  *reinterpret_cast<uint2*>(p) = make_uint2(PackBf16(v[0], v[1]), PackBf16(v[2], v[3]));
}

__device__ __forceinline__ void Update(const Coefficients& c, float grad, float& m, float& v,
                                       float& p) {
  m = __fadd_rn(__fmul_rn(c.beta1, m), __fmul_rn(c.beta1_rest, grad));
  v = __fadd_rn(__fmul_rn(c.beta2, v), __fmul_rn(c.beta2_rest, __fmul_rn(grad, grad)));
  const float denominator = __fadd_rn(__fsqrt_rn(__fmul_rn(v, c.v_correction)), c.eps);
  p = __fsub_rn(__fmul_rn(p, c.keep), __fmul_rn(c.step, __fdiv_rn(m, denominator)));
}

template <class M, class C>
__global__ void __launch_bounds__(256)
    adamw_kernel(Coefficients c, std::int64_t n, float* master, const float* grad, M* m, M* v,
                 C* copy, const float* grad_factor, const std::int32_t* skip, bool vector) {
  if (skip != nullptr && skip[0] != 0) {
    return;
  }
  const float factor = grad_factor != nullptr ? grad_factor[0] : 1.0f;
  const std::int64_t i = (static_cast<std::int64_t>(blockIdx.x) * 256 + threadIdx.x) * 4;
  if (vector && i + 4 <= n) {
    float g[4], vm[4], vv[4], p[4];
    Load4(grad + i, g);
    Load4(m + i, vm);
    Load4(v + i, vv);
    Load4(master + i, p);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      Update(c, __fmul_rn(g[j], factor), vm[j], vv[j], p[j]);
    }
    Store4(master + i, p);
    Store4(m + i, vm);
    Store4(v + i, vv);
    if (copy != nullptr) {
      Store4(copy + i, p);
    }
    return;
  }
  for (std::int64_t j = i; j < min(i + 4, n); ++j) {
    float vm = ToFloat(m[j]), vv = ToFloat(v[j]), p = master[j];
    Update(c, __fmul_rn(grad[j], factor), vm, vv, p);
    master[j] = p;
    m[j] = FromFloat<M>(vm);
    v[j] = FromFloat<M>(vv);
    if (copy != nullptr) {
      copy[j] = FromFloat<C>(p);
    }
  }
}

template <class M, class C>
void Launch(cudaStream_t stream, const Coefficients& c, const AdamWArgs& a) {
  const auto aligned = [](const void* p) { return reinterpret_cast<std::uintptr_t>(p) % 16 == 0; };
  const bool vector =
      aligned(a.master) && aligned(a.grad) && aligned(a.m) && aligned(a.v) && aligned(a.copy);
  adamw_kernel<<<Blocks(a.n, 1024), 256, 0, stream>>>(
      c, a.n, a.master, a.grad, static_cast<M*>(a.m), static_cast<M*>(a.v), static_cast<C*>(a.copy),
      a.grad_factor, a.skip, vector);
}

}  // namespace

void AdamW(OpsContext* context, const AdamWArgs& a) {
  if (a.n <= 0) {
    return;
  }
  OCTAVO_CHECK(a.t >= 1, "t = %lld counts from 1", static_cast<long long>(a.t));
  const double t = static_cast<double>(a.t);
  const double correction1 = 1.0 - std::pow(static_cast<double>(a.beta1), t);
  const double correction2 = 1.0 - std::pow(static_cast<double>(a.beta2), t);
  const Coefficients c = {
      .beta1 = a.beta1,
      .beta1_rest = static_cast<float>(1.0 - static_cast<double>(a.beta1)),
      .beta2 = a.beta2,
      .beta2_rest = static_cast<float>(1.0 - static_cast<double>(a.beta2)),
      .keep = static_cast<float>(1.0 - static_cast<double>(a.lr) * a.weight_decay),
      .step = static_cast<float>(a.lr / correction1),
      .v_correction = static_cast<float>(1.0 / correction2),
      .eps = a.eps,
  };
  const bool copy_bf16 = a.copy_dtype == DType::kBF16;
  if (a.moment_dtype == DType::kBF16) {
    copy_bf16 ? Launch<bf16, bf16>(context->stream, c, a)
              : Launch<bf16, float>(context->stream, c, a);
  } else {
    copy_bf16 ? Launch<float, bf16>(context->stream, c, a)
              : Launch<float, float>(context->stream, c, a);
  }
  context->Launched("adamw");
}

}  // namespace octavo::cuda
