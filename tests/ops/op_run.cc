#include "tests/ops/op_run.h"

#include <dlfcn.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>

#include "kernels/formats/fp8.h"
#include "kernels/ops_abi.h"

namespace octavo::test {
namespace {

double At(const Output& o, std::int64_t i) {
  switch (o.dtype) {
    case DType::kF32: {
      float v;
      std::memcpy(&v, &o.host[static_cast<std::size_t>(i) * 4], 4);
      return v;
    }
    case DType::kBF16: {
      std::uint16_t v;
      std::memcpy(&v, &o.host[static_cast<std::size_t>(i) * 2], 2);
      return FloatFromBf16(v);
    }
    case DType::kF64: {
      double v;
      std::memcpy(&v, &o.host[static_cast<std::size_t>(i) * 8], 8);
      return v;
    }
    default:
      return 0;
  }
}

std::string Text(const char* format, const Output& o, std::int64_t i, double a, double b) {
  char text[256];
  std::snprintf(text, sizeof(text), format, o.name.c_str(), static_cast<long long>(i), a, b);
  return text;
}

bool IsFloat(DType t) { return t == DType::kF32 || t == DType::kBF16 || t == DType::kF64; }

std::string CompareExact(const Output& cpu, const Output& cuda) {
  const std::int64_t size = DTypeBytes(cpu.dtype);
  for (std::int64_t i = 0; i < cpu.count; ++i) {
    const std::size_t at = static_cast<std::size_t>(i * size);
    if (std::memcmp(&cpu.host[at], &cuda.host[at], static_cast<std::size_t>(size)) == 0) {
      continue;
    }
    if (IsFloat(cpu.dtype)) {
      const double a = At(cpu, i), b = At(cuda, i);
      if (std::isnan(a) && std::isnan(b)) {
        continue;
      }
      return Text("%s[%lld]: cpu %.9g, cuda %.9g", cpu, i, a, b);
    }
    std::int64_t a = 0, b = 0;
    std::memcpy(&a, &cpu.host[at], static_cast<std::size_t>(size));
    std::memcpy(&b, &cuda.host[at], static_cast<std::size_t>(size));
    return Text("%s[%lld]: cpu %.0f, cuda %.0f", cpu, i, static_cast<double>(a),
                static_cast<double>(b));
  }
  return "";
}

std::string CompareRelative(const Output& cpu, const Output& cuda) {
  double error = 0, norm = 0;
  for (std::int64_t i = 0; i < cpu.count; ++i) {
    const double a = At(cpu, i), b = At(cuda, i);
    if (std::isnan(a) != std::isnan(b) || std::isinf(a) != std::isinf(b)) {
      return Text("%s[%lld]: cpu %g, cuda %g", cpu, i, a, b);
    }
    if (std::isfinite(a)) {
      error += (a - b) * (a - b);
      norm += a * a;
    }
  }
  const double relative = norm > 0 ? std::sqrt(error / norm) : std::sqrt(error);
  if (relative > cpu.tolerance) {
    return Text("%s (%lld elements): relative error %.3g, allowed %.3g", cpu, cpu.count, relative,
                cpu.tolerance);
  }
  return "";
}

// Distance in codes of one sign; different signs only meet at zero.
int CodeDistance(std::uint8_t a, std::uint8_t b) {
  const int x = (a & 0x80) != 0 ? -(a & 0x7F) : (a & 0x7F);
  const int y = (b & 0x80) != 0 ? -(b & 0x7F) : (b & 0x7F);
  return std::abs(x - y);
}

std::string CompareCodes(const Output& cpu, const Output& cuda) {
  std::int64_t different = 0;
  for (std::int64_t i = 0; i < cpu.count; ++i) {
    const int distance =
        CodeDistance(cpu.host[static_cast<std::size_t>(i)], cuda.host[static_cast<std::size_t>(i)]);
    if (distance > 1) {
      return Text("%s[%lld]: code %.0f on the CPU, %.0f on the GPU", cpu, i,
                  cpu.host[static_cast<std::size_t>(i)], cuda.host[static_cast<std::size_t>(i)]);
    }
    different += distance != 0 ? 1 : 0;
  }
  const double share = cpu.count > 0 ? static_cast<double>(different) / cpu.count : 0;
  if (share > cpu.tolerance) {
    return Text("%s (%lld codes): share of different codes %.4g, allowed %.4g", cpu, cpu.count,
                share, cpu.tolerance);
  }
  return "";
}

std::string CompareStats(const Output& cpu, const Output& cuda) {
  const double tolerance = cpu.tolerance;
  for (std::size_t i = 0; i < cpu.host.size() / sizeof(StatSlot); ++i) {
    StatSlot a, b;
    std::memcpy(&a, &cpu.host[i * sizeof(StatSlot)], sizeof(a));
    std::memcpy(&b, &cuda.host[i * sizeof(StatSlot)], sizeof(b));
    const auto near = [&](double x, double y, double room) { return std::fabs(x - y) <= room; };
    const double room = tolerance * static_cast<double>(a.elements);
    const auto count = [&](std::uint64_t x, std::uint64_t y) {
      return near(static_cast<double>(x), static_cast<double>(y), room);
    };
    if (!near(a.amax, b.amax, tolerance * a.amax) ||
        !near(a.dequant_scale_min, b.dequant_scale_min, tolerance * a.dequant_scale_min) ||
        !near(a.dequant_scale_max, b.dequant_scale_max, tolerance * a.dequant_scale_max) ||
        a.elements != b.elements || a.nonfinite != b.nonfinite ||
        !count(a.saturated, b.saturated) || !count(a.nonzero, b.nonzero) ||
        !count(a.flushed, b.flushed) || !count(a.transpose_flushed, b.transpose_flushed)) {
      char text[640];
      std::snprintf(
          text, sizeof(text),
          "stats[%zu]: cpu amax %.9g D %.9g..%.9g elements %llu nonfinite %llu saturated "
          "%llu nonzero %llu flushed %llu transpose_flushed %llu; cuda amax %.9g D "
          "%.9g..%.9g elements %llu nonfinite %llu saturated %llu nonzero %llu flushed "
          "%llu transpose_flushed %llu",
          i, a.amax, a.dequant_scale_min, a.dequant_scale_max,
          static_cast<unsigned long long>(a.elements), static_cast<unsigned long long>(a.nonfinite),
          static_cast<unsigned long long>(a.saturated), static_cast<unsigned long long>(a.nonzero),
          static_cast<unsigned long long>(a.flushed),
          static_cast<unsigned long long>(a.transpose_flushed), b.amax, b.dequant_scale_min,
          b.dequant_scale_max, static_cast<unsigned long long>(b.elements),
          static_cast<unsigned long long>(b.nonfinite),
          static_cast<unsigned long long>(b.saturated), static_cast<unsigned long long>(b.nonzero),
          static_cast<unsigned long long>(b.flushed),
          static_cast<unsigned long long>(b.transpose_flushed));
      return text;
    }
  }
  return "";
}

CudaBackend Open() {
  CudaBackend result;
  const PluginTable* plugin = OpenPlugin(&result.reason);
  if (plugin == nullptr) {
    return result;
  }
  char message[512] = "";
  if (plugin->create(0, &result.backend, message, sizeof(message)) != 0) {
    result.backend = Backend{};
    result.reason = message;
    return result;
  }
  DeviceFacts facts;
  plugin->probe(0, &facts, message, sizeof(message));
  std::printf("device %s, SM %d, %d multiprocessors, cuBLASLt %d, cuDNN %d, NCCL %d\n", facts.name,
              facts.sm, facts.multiprocessors, facts.cublaslt_version, facts.cudnn_version,
              facts.nccl_version);
  return result;
}

}  // namespace

std::string Compare(const Output& cpu, const Output& cuda) {
  switch (cpu.agree) {
    case Agree::kExact:
      return CompareExact(cpu, cuda);
    case Agree::kRelative:
      return CompareRelative(cpu, cuda);
    case Agree::kCodes:
      return CompareCodes(cpu, cuda);
    case Agree::kStats:
    case Agree::kStatsNear:
      return CompareStats(cpu, cuda);
  }
  return "unknown comparison";
}

const PluginTable* OpenPlugin(std::string* reason) {
  std::vector<std::string> names;
  if (const char* forced = std::getenv("OCTAVO_PLUGIN")) {
    names.push_back(forced);
  } else {
    char self[4096] = "";
    const ssize_t n = readlink("/proc/self/exe", self, sizeof(self) - 1);
    std::string folder(self, n > 0 ? static_cast<std::size_t>(n) : 0);
    folder.resize(folder.rfind('/') == std::string::npos ? 0 : folder.rfind('/'));
    names = {folder + "/liboctavo_cuda.so", folder + "/../lib/liboctavo_cuda.so"};
  }
  void* handle = nullptr;
  for (const std::string& name : names) {
    handle = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle != nullptr) {
      break;
    }
    const char* error = dlerror();
    *reason += (reason->empty() ? "" : "; ") + std::string(error != nullptr ? error : name);
  }
  if (handle == nullptr) {
    return nullptr;
  }
  const auto entry = reinterpret_cast<const PluginTable* (*)()>(dlsym(handle, "octavo_plugin_v1"));
  if (entry == nullptr || entry()->abi_version != kOpsAbiVersion) {
    *reason = "the plug-in has another ABI version";
    return nullptr;
  }
  return entry();
}

const CudaBackend& OpenCuda() {
  static const CudaBackend cuda = Open();
  return cuda;
}

}  // namespace octavo::test
