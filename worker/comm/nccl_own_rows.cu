#include <algorithm>

#include "worker/comm/nccl_own_rows.h"

namespace octavo {
namespace {

constexpr int kThreads = 1024, kUnroll = 4;  // 64 KiB on their way per multiprocessor
// One multiprocessor copies at 48 GB/s, NVLink brings 350 GB/s (both measured): so many blocks end
// as many bytes as are exchanged a little before the exchange.
constexpr std::int64_t kBlocksForEqual = 10;
constexpr std::int64_t kMostBlocks = 64;
// Below this a plain copy is over before it can hold up anything.
constexpr std::int64_t kPlainBytes = std::int64_t{4} << 20;

__global__ void __launch_bounds__(kThreads)
    own_rows_kernel(uint4* __restrict__ to, const uint4* __restrict__ from, std::int64_t count) {
  constexpr std::int64_t kPart = std::int64_t{kThreads} * kUnroll;
  std::int64_t at = blockIdx.x * kPart + threadIdx.x;
  for (; at + (kUnroll - 1) * kThreads < count; at += gridDim.x * kPart) {
    uint4 v[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      v[i] = __ldcs(from + at + i * kThreads);
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      __stcs(to + at + i * kThreads, v[i]);
    }
  }
  for (int i = 0; i < kUnroll; ++i, at += kThreads) {
    if (at < count) {
      to[at] = from[at];
    }
  }
}

}  // namespace

void CopyOwnRows(void* to, const void* from, std::int64_t bytes, std::int64_t exchanged,
                 cudaStream_t stream) {
  if (bytes <= 0) {
    return;
  }
  const auto address =
      reinterpret_cast<std::uintptr_t>(to) | reinterpret_cast<std::uintptr_t>(from);
  if (bytes < kPlainBytes || exchanged < bytes * kBlocksForEqual / kMostBlocks ||
      (address | static_cast<std::uintptr_t>(bytes)) % 16 != 0) {
    (void)cudaMemcpyAsync(to, from, static_cast<std::size_t>(bytes), cudaMemcpyDeviceToDevice,
                          stream);
    return;
  }
  const auto blocks = static_cast<unsigned>(
      std::min(kMostBlocks, (bytes * kBlocksForEqual + exchanged - 1) / exchanged));
  own_rows_kernel<<<blocks, kThreads, 0, stream>>>(static_cast<uint4*>(to),
                                                   static_cast<const uint4*>(from), bytes / 16);
}

}  // namespace octavo
