// The grouped products on Hopper's tensor cores in one launch each (grouped_tiles.cuh), for the
// operands that they take:
//   FP8: E4M3, or E5M2 by E4M3; 1×128 by 128×128 (grouped_gemm, N a multiple of 128) or by 1×128
//     (grouped_wgrad), or per tensor and expert, promoted or fast;
//   BF16: as GroupedGemmArgs and GroupedWgradArgs say; where M or N is stored innermost it is a
//     multiple of 64;
// with 16-byte aligned rows, at most a few hundred groups and a buffer of whole 128-row tiles.
#pragma once

#include "kernels/cuda/context.h"
#include "kernels/ops.h"

namespace octavo::cuda {

// Where a grouped product is to run.
struct TileDevice {
  cudaStream_t stream;
  int multiprocessors;
};

// False, and nothing enqueued: not for these kernels. A failed launch shows in cudaGetLastError.
bool GroupedGemmTiles(const TileDevice& device, const GroupedGemmArgs& args);
bool GroupedWgradTiles(const TileDevice& device, const GroupedWgradArgs& args);

}  // namespace octavo::cuda
