// What this host offers: its slots, and the facts about each, learnt from a short-lived process.
//
// The daemon never touches a GPU. At start it runs `octavo-rank --probe` once per slot (all at the
// same time, bounded) and registers what the probes print:
//   {"device_name": "...", "sm": 90, "memory_bytes": 1, "driver": "", "cuda": "", "nccl": "",
//    "cublaslt": "", "cudnn": ""}
// A slot whose probe fails is registered as poisoned with the reason in device_name: the operator
// sees it in `octavo workers`, and no job is placed there.
#pragma once

#include <chrono>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "octavo/v1/job.pb.h"

namespace octavo {

inline constexpr std::chrono::seconds kProbeTimeLimit{60};  // a cold CUDA start takes several

struct ProbeOptions {
  std::string rank_binary;
  std::string device;  // cpu | cuda
  int slots = 1;
  std::string folder;  // for the probes' output; exists
};

// One entry per slot, index = slot. Error: no slot at all could be probed.
absl::StatusOr<std::vector<v1::SlotFacts>> ProbeSlots(const ProbeOptions& options);

// One probe's output. INVALID_ARGUMENT with what was found.
absl::StatusOr<v1::SlotFacts> ParseProbe(std::string_view json);

// The first non-loopback IPv4 address that is up, or "127.0.0.1".
std::string DefaultAdvertiseAddress();
std::string HostName();

}  // namespace octavo
