// Faults in what an operation reads or writes, for tensors that no parameter makes: the outputs of
// attention, the experts' activations, the gradients of activations.
//
//   setup.backend.ops = op_faults::Install(setup.backend, faults);   // once a process
//   op_faults::BeginPass(step, pass); … microbatches …; op_faults::EndPass();
//
// The layer is known from the ranges that the decoder opens around it. CPU backend only.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/ops.h"
#include "tests/support/inject/fault.h"

namespace octavo::op_faults {

const Ops* Install(const Backend& backend, const std::vector<Fault>& faults);
// Outside a pass (validation) the operations are the backend's own.
void BeginPass(std::int64_t step, int pass);
void EndPass();

}  // namespace octavo::op_faults
