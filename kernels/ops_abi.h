// The plug-in's C entry. liboctavo_cuda.so exports octavo_plugin_v1; the rank dlopens it (never
// links it: cuBLASLt's static TLS breaks threads with small stacks in processes that serve HTTP).
#pragma once

#include <cstdint>

#include "kernels/ops.h"

namespace octavo {

// Raise on any change of ops.h, stats.h, tensor.h, worker/comm/communicator.h or this file.
inline constexpr std::uint32_t kOpsAbiVersion = 5;

struct DeviceFacts {
  char name[128];
  char uuid[40];                  // 32 hexadecimal digits: which device of the world it is
  std::int32_t sm;                // 90 for Hopper
  std::int32_t multiprocessors;
  std::int64_t memory_bytes;
  std::int32_t driver_version, runtime_version;  // as CUDA counts: 13000
  std::int32_t cublaslt_version, cudnn_version, nccl_version;  // 0: not present
};

class Communicator;

struct PluginTable {
  std::uint32_t abi_version;  // == kOpsAbiVersion
  const char* build;          // version text for logs
  // 0 on success; else message says what failed.
  int (*probe)(int device_ordinal, DeviceFacts*, char* message, std::int64_t message_bytes);
  int (*create)(int device_ordinal, Backend*, char* message, std::int64_t message_bytes);
  void (*destroy)(Backend*);
  // NCCL: null when built without. unique_id is 128 bytes made by rank 0.
  int (*nccl_unique_id)(std::uint8_t* id, char* message, std::int64_t message_bytes);
  Communicator* (*nccl_create)(Backend*, const std::uint8_t* id, int rank, int size,
                               double timeout_seconds, char* message, std::int64_t message_bytes);
};

}  // namespace octavo

extern "C" const octavo::PluginTable* octavo_plugin_v1();
