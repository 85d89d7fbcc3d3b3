// The CPU backend: the specification, bit for bit. One thread; the context belongs to one thread.
#pragma once

#include "kernels/ops.h"

namespace octavo {

// Creates / destroys a CPU backend. Never fails but for lack of memory (which ends the process).
Backend CreateCpuBackend();
void DestroyCpuBackend(Backend* backend);

}  // namespace octavo
