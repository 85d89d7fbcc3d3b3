// The CUDA implementations, one per operation; definitions live beside their CPU twins in
// kernels/<op>/<op>_cuda.cu.
#pragma once

#include "kernels/ops.h"
#include "kernels/ops_list.h"

namespace octavo::cuda {
#define OCTAVO_DECLARE(field, Name, Args) void Name(OpsContext*, const Args&);
OCTAVO_COMPUTE_OPS(OCTAVO_DECLARE)
#undef OCTAVO_DECLARE

// Adds `count` doubles of scratch to *out in index order: the second half of a deterministic sum.
void AddPartialSums(OpsContext* context, const double* partial, std::int64_t count, double* out);

// Workspace questions answered beside the kernels that use it.
std::int64_t RouteIndexWorkspaceBytes(std::int64_t tokens, std::int32_t experts);
std::int64_t RmsNormBackwardWorkspaceBytes(std::int64_t cols);
std::int64_t EmbeddingBackwardWorkspaceBytes(std::int64_t tokens, std::int64_t vocab);
void AttentionWorkspaceBytes(OpsContext* context, const WorkspaceQuery& query,
                             std::int64_t* forward, std::int64_t* backward);
std::int32_t CudnnVersion();  // 0: built without or not loadable

}  // namespace octavo::cuda
