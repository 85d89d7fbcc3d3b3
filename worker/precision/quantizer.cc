#include "worker/precision/quantizer.h"

namespace octavo {
namespace {

// Q of every group on the device, or null entries where windows are empty are replaced by current
// scaling. Scratch comes from the states (one owner, one stream).
const float* QuantScales(const Backend& backend, TensorStates& states,
                         const QuantizeRequest& request) {
  const std::int32_t count = request.groups.count;
  std::int32_t primed = 0;
  if (request.recipe.kind == RecipeKind::kFp8Delayed) {
    for (std::int32_t g = 0; g < count; ++g) {
      primed += states.delayed(request.state_index + g).primed() ? 1 : 0;
    }
    if (primed == count) {
      return states.quant_scale(request.state_index);
    }
  }
  float* amax = states.scratch_amax();
  float* quant_scale = states.scratch_quant_scale();
  backend.ops->amax(backend.context, {.x = request.x,
                                      .x_dtype = request.x_dtype,
                                      .cols = request.cols,
                                      .groups = request.groups,
                                      .amax = amax,
                                      .has_nonfinite = nullptr});
  backend.ops->scale_from_amax(backend.context, {.amax = amax,
                                                 .n = count,
                                                 .rule = request.rule,
                                                 .quant_scale = quant_scale,
                                                 .dequant_scale = states.scratch_dequant_scale()});
  for (std::int32_t g = 0; primed > 0 && g < count; ++g) {
    if (states.delayed(request.state_index + g).primed()) {
      backend.ops->copy(backend.context, {.dst = quant_scale + g,
                                          .src = states.quant_scale(request.state_index + g),
                                          .bytes = sizeof(float),
                                          .kind = CopyKind::kOnDevice});
    }
  }
  return quant_scale;
}

}  // namespace

void QuantizeInto(const Backend& backend, TensorStates& states, const QuantizeRequest& request) {
  if (request.rule.tiling != Tiling::kTensor) {
    backend.ops->quantize_rows(backend.context, {.x = request.x,
                                                 .x_dtype = request.x_dtype,
                                                 .cols = request.cols,
                                                 .groups = request.groups,
                                                 .rule = request.rule,
                                                 .row = request.row,
                                                 .col = request.col,
                                                 .stats = request.stats});
    return;
  }
  backend.ops->quantize_tensor(backend.context,
                               {.x = request.x,
                                .x_dtype = request.x_dtype,
                                .cols = request.cols,
                                .groups = request.groups,
                                .quant_scale = QuantScales(backend, states, request),
                                .format = request.rule.format,
                                .row = request.row,
                                .col = request.col,
                                .stats = request.stats});
}

}  // namespace octavo
