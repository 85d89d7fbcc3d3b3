// Scratch sizes of the CPU operations that need any; backend.cc reports them in workspace_sizes.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/ops.h"

namespace octavo::cpu {

// Queries handled at a time: scores of one block are [kAttentionBlock, S] FP32.
inline constexpr std::int64_t kAttentionBlock = 64;

// FP32 copies of K and V of one head, one block of Q, out and scores.
constexpr std::int64_t AttentionForwardWorkspaceBytes(std::int64_t sequence,
                                                      std::int64_t head_dim) {
  const std::int64_t block = std::min(kAttentionBlock, sequence);
  return 4 * (2 * sequence * head_dim + 2 * block * head_dim + block * sequence);
}

// FP32 copies of K, V, dK and dV of one head, one block of Q, dQ, out, d_out, P and dS.
constexpr std::int64_t AttentionBackwardWorkspaceBytes(std::int64_t sequence,
                                                       std::int64_t head_dim) {
  const std::int64_t block = std::min(kAttentionBlock, sequence);
  return 4 * (4 * sequence * head_dim + 4 * block * head_dim + 2 * block * sequence);
}

}  // namespace octavo::cpu
