// Opens the numbers: the CPU backend that is linked in, or the CUDA plug-in by dlopen.
//
// The plug-in is liboctavo_cuda.so beside the program, in ../lib beside it, or where
// OCTAVO_CUDA_PLUGIN says. It is never linked: cuBLASLt's static thread-local storage breaks other
// processes' threads (ARCHITECTURE 4).
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "kernels/ops.h"
#include "kernels/ops_abi.h"

namespace octavo {

// Owns the backend; the plug-in stays loaded until the process ends.
class LoadedBackend {
 public:
  // device: "cpu" or "cuda". NOT_FOUND: no plug-in, with the places tried; FAILED_PRECONDITION:
  // another ABI or no such device, in the plug-in's words.
  static absl::StatusOr<std::unique_ptr<LoadedBackend>> Open(const std::string& device,
                                                             int ordinal);
  ~LoadedBackend();
  LoadedBackend(const LoadedBackend&) = delete;
  LoadedBackend& operator=(const LoadedBackend&) = delete;

  const Backend& backend() const { return backend_; }
  const PluginTable* plugin() const { return plugin_; }  // null on the CPU
  // Which device of the world this is; empty on the CPU.
  const std::string& device_uuid() const { return device_uuid_; }

 private:
  LoadedBackend() = default;
  Backend backend_;
  const PluginTable* plugin_ = nullptr;
  std::string device_uuid_;
};

// One JSON object about the device, as the worker's inventory reads it.
absl::StatusOr<std::string> ProbeDevice(const std::string& device, int ordinal);

}  // namespace octavo
