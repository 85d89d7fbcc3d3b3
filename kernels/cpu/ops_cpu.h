// The CPU implementations, one per operation; definitions live beside their CUDA twins in
// kernels/<op>/<op>_cpu.cc. Tests call them through CreateCpuBackend().
#pragma once

#include "kernels/ops.h"
#include "kernels/ops_list.h"

namespace octavo::cpu {
#define OCTAVO_DECLARE(field, Name, Args) void Name(OpsContext*, const Args&);
OCTAVO_COMPUTE_OPS(OCTAVO_DECLARE)
#undef OCTAVO_DECLARE
}  // namespace octavo::cpu
