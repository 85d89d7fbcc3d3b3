#include "worker/rank/backend_loader.h"

#include <dlfcn.h>
#include <unistd.h>

#include <climits>
#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>
#include <vector>

#include "base/file.h"
#include "base/status.h"
#include "base/str.h"
#include "kernels/cpu/backend.h"
#include "kernels/cpu/blas.h"

namespace octavo {
namespace {

constexpr char kPluginName[] = "liboctavo_cuda.so";
constexpr std::size_t kMessageBytes = 512;

std::string ProgramFolder() {
  char path[PATH_MAX];
  const ssize_t n = ::readlink("/proc/self/exe", path, sizeof(path));
  return n > 0 ? DirectoryName(std::string(path, static_cast<std::size_t>(n))) : ".";
}

absl::StatusOr<const PluginTable*> LoadPlugin() {
  std::vector<std::string> places;
  if (const char* named = std::getenv("OCTAVO_CUDA_PLUGIN"); named != nullptr) {
    places.push_back(named);
  } else {
    const std::string folder = ProgramFolder();
    places = {JoinPath(folder, kPluginName), JoinPath(folder, StrCat("../lib/", kPluginName))};
  }
  std::string tried;
  for (const std::string& place : places) {
    void* handle = ::dlopen(place.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) {
      StrAppend(&tried, tried.empty() ? "" : "; ", ::dlerror());
      continue;
    }
    using Entry = const PluginTable* (*)();
    const auto entry = reinterpret_cast<Entry>(::dlsym(handle, "octavo_plugin_v1"));
    if (entry == nullptr) {
      return FailedPreconditionError(StrCat(place, ": not a CUDA plug-in of Octavo (no entry)"));
    }
    const PluginTable* table = entry();
    if (table->abi_version != kOpsAbiVersion) {
      return FailedPreconditionError(StrCat(place, ": plug-in ABI ", table->abi_version,
                                            ", this program needs ", kOpsAbiVersion,
                                            "; build both from the same source"));
    }
    return table;
  }
  return NotFoundError(
      StrCat("no CUDA plug-in: ", tried, ". Build with a CUDA toolkit, or set OCTAVO_CUDA_PLUGIN"));
}

std::string CpuModel() {
  std::ifstream info("/proc/cpuinfo");
  std::string line;
  while (std::getline(info, line)) {
    if (StartsWith(line, "model name")) {
      return std::string(StripSpace(line.substr(line.find(':') + 1)));
    }
  }
  return "CPU";
}

std::string CudaVersion(std::int32_t version) {  // 13000 → "13.0"
  return version == 0 ? "" : StrCat(version / 1000, ".", version % 1000 / 10);
}

}  // namespace

absl::StatusOr<std::unique_ptr<LoadedBackend>> LoadedBackend::Open(const std::string& device,
                                                                   int ordinal) {
  auto loaded = std::unique_ptr<LoadedBackend>(new LoadedBackend());
  if (device == "cpu") {
    loaded->backend_ = CreateCpuBackend();
    return loaded;
  }
  if (device != "cuda") {
    return InvalidArgumentError(StrCat("device \"", device, "\"; valid are cpu and cuda"));
  }
  ASSIGN_OR_RETURN(const PluginTable* plugin, LoadPlugin());
  char message[kMessageBytes] = {};
  if (plugin->create(ordinal, &loaded->backend_, message, sizeof(message)) != 0) {
    return FailedPreconditionError(StrCat("opening CUDA device ", ordinal, ": ", message));
  }
  loaded->plugin_ = plugin;
  DeviceFacts facts{};
  if (plugin->probe(ordinal, &facts, message, sizeof(message)) != 0) {
    return FailedPreconditionError(StrCat("CUDA device ", ordinal, ": ", message));
  }
  loaded->device_uuid_ = facts.uuid;
  return loaded;
}

LoadedBackend::~LoadedBackend() {
  if (backend_.ops == nullptr) {
    return;
  }
  plugin_ == nullptr ? DestroyCpuBackend(&backend_) : plugin_->destroy(&backend_);
}

absl::StatusOr<std::string> ProbeDevice(const std::string& device, int ordinal) {
  if (device == "cpu") {
    const std::int64_t pages = ::sysconf(_SC_PHYS_PAGES), page_bytes = ::sysconf(_SC_PAGESIZE);
    return nlohmann::json{{"device_name", CpuModel()},
                          {"sm", 0},
                          {"memory_bytes", pages * page_bytes},
                          {"blas_core", BlasCoreType()}}
        .dump();
  }
  ASSIGN_OR_RETURN(const PluginTable* plugin, LoadPlugin());
  DeviceFacts facts{};
  char message[kMessageBytes] = {};
  if (plugin->probe(ordinal, &facts, message, sizeof(message)) != 0) {
    return FailedPreconditionError(StrCat("CUDA device ", ordinal, ": ", message));
  }
  const auto version = [](std::int32_t v) { return v == 0 ? std::string() : StrCat(v); };
  return nlohmann::json{{"device_name", facts.name},
                        {"sm", facts.sm},
                        {"multiprocessors", facts.multiprocessors},
                        {"memory_bytes", facts.memory_bytes},
                        {"driver", CudaVersion(facts.driver_version)},
                        {"cuda", CudaVersion(facts.runtime_version)},
                        {"nccl", version(facts.nccl_version)},
                        {"cublaslt", version(facts.cublaslt_version)},
                        {"cudnn", version(facts.cudnn_version)}}
      .dump();
}

}  // namespace octavo
