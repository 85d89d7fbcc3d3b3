#include "worker/model/optimizer.h"

#include <algorithm>
#include <cmath>

namespace octavo {

Optimizer::Optimizer(const Backend& backend, const OptimizerOptions& options, Arena& arena,
                     Arena& pinned)
    : backend_(backend),
      options_(options),
      control_(arena.Take<Control>(1)),
      host_control_(pinned.Take<Control>(2)) {}

void Optimizer::SetControl(float factor, bool skip) {
  // The words of the step before may still be on their way; those before it are not, because every
  // pass ends with a wait for its sums.
  half_ = 1 - half_;
  host_control_[half_] = {.grad_factor = factor, .skip = skip ? 1 : 0};
  backend_.ops->copy(backend_.context, {.dst = control_,
                                        .src = &host_control_[half_],
                                        .bytes = sizeof(Control),
                                        .kind = CopyKind::kToDevice});
}

void Optimizer::Apply(Parameters& parameters, double lr, std::int64_t t) {
  for (Parameter& p : parameters.all()) {
    // A copy that nobody read in this step is left stale; whoever reads it next makes it anew.
    const bool copy = p.copy != nullptr && p.state.copy_read;
    p.state.copy_stale = !copy;
    p.state.copy_read = false;
    backend_.ops->adamw(backend_.context, {.n = p.count,
                                           .master = p.master,
                                           .grad = p.grad,
                                           .m = p.m,
                                           .v = p.v,
                                           .moment_dtype = parameters.moment_dtype(),
                                           .copy = copy ? p.copy : nullptr,
                                           .copy_dtype = DType::kBF16,
                                           .lr = static_cast<float>(lr),
                                           .beta1 = options_.beta1,
                                           .beta2 = options_.beta2,
                                           .eps = options_.eps,
                                           .weight_decay = p.decay ? options_.weight_decay : 0.0f,
                                           .t = t,
                                           .grad_factor = &control_->grad_factor,
                                           .skip = &control_->skip});
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
