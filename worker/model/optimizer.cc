#include "worker/model/optimizer.h"

#include <algorithm>
#include <cmath>

namespace octavo {

Optimizer::Optimizer(const Backend& backend, const OptimizerOptions& options, Arena& arena)
    : backend_(backend),
      options_(options),
      grad_factor_(arena.Take<float>(1)),
      skip_(arena.Take<std::int32_t>(1)) {}

void Optimizer::SetControl(float factor, bool skip) {
  const std::int32_t flag = skip ? 1 : 0;
  const auto send = [this](void* dst, const void* src) {
    backend_.ops->copy(backend_.context,
                       {.dst = dst, .src = src, .bytes = 4, .kind = CopyKind::kToDevice});
  };
  send(grad_factor_, &factor);
  send(skip_, &flag);
  // The words are on this stack frame; the step waits for the device here anyway.
  backend_.ops->synchronize(backend_.context);
}

void Optimizer::Apply(Parameters& parameters, double lr, std::int64_t t) {
  for (Parameter& p : parameters.all()) {
    backend_.ops->adamw(backend_.context, {.n = p.count,
                                           .master = p.master,
                                           .grad = p.grad,
                                           .m = p.m,
                                           .v = p.v,
                                           .moment_dtype = parameters.moment_dtype(),
                                           .copy = p.copy,
                                           .copy_dtype = DType::kBF16,
                                           .lr = static_cast<float>(lr),
                                           .beta1 = options_.beta1,
                                           .beta2 = options_.beta2,
                                           .eps = options_.eps,
                                           .weight_decay = p.decay ? options_.weight_decay : 0.0f,
                                           .t = t,
                                           .grad_factor = grad_factor_,
                                           .skip = skip_});
  }
}

float ClipFactor(double grad_norm_squared, double max_norm) {
  const double norm = std::sqrt(grad_norm_squared);
  if (max_norm <= 0 || !(norm > max_norm)) {
    return 1.0f;
  }
  return static_cast<float>(max_norm / norm);
}

}  // namespace octavo
