// One operation on one backend: inputs from a seed, outputs registered by name and read back.
//
// A case is a function of an OpRun. It draws its inputs from run.rng, asks for memory with In/Out,
// and calls run.ops. The harness runs it once on the CPU backend and once on the CUDA backend with
// the same seed and compares what was registered, in order. Output memory starts as a poison
// pattern on both sides, so bytes that an operation must not write are compared too.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "kernels/formats/bf16.h"
#include "kernels/ops.h"
#include "kernels/ops_abi.h"

namespace octavo::test {

// How two outputs must agree (NUMERICS 12).
enum class Agree : std::uint8_t {
  kExact,  // bytes, NaN equal to NaN where the type is a float
  kRelative,  // ‖a − b‖/‖b‖ <= tolerance over finite elements; NaN and ±∞ in the same places
  kCodes,      // FP8: at least 1 − tolerance equal, the rest one code apart
  kStats,      // StatSlot: all equal
  kStatsNear,  // amax and D to tolerance, counters within tolerance of the elements
};

struct Output {
  std::string name;
  void* device = nullptr;
  DType dtype = DType::kU8;
  std::int64_t count = 0;
  Agree agree = Agree::kExact;
  double tolerance = 0;
  std::vector<std::uint8_t> host;
};

class OpRun {
 public:
  OpRun(Backend backend, std::uint64_t seed)
      : ops(*backend.ops), context(backend.context), rng(seed) {}
  OpRun(const OpRun&) = delete;
  OpRun& operator=(const OpRun&) = delete;
  ~OpRun() {
    ops.synchronize(context);
    for (void* p : memory_) {
      ops.release(context, p, Memory::kDevice);
    }
  }

  const Ops& ops;
  OpsContext* context;
  std::mt19937_64 rng;

  void* Allocate(std::int64_t bytes) {
    void* p = ops.allocate(context, bytes > 0 ? bytes : 1, Memory::kDevice);
    memory_.push_back(p);
    return p;
  }
  // Memory with the host's bytes.
  template <class T>
  T* In(const std::vector<T>& values) {
    const std::int64_t bytes = static_cast<std::int64_t>(values.size() * sizeof(T));
    void* p = Allocate(bytes);
    // Kept until the run ends: the copy may be asynchronous.
    kept_.push_back(std::vector<std::uint8_t>(static_cast<std::size_t>(bytes)));
    if (bytes > 0) {
      std::memcpy(kept_.back().data(), values.data(), static_cast<std::size_t>(bytes));
    }
    ops.copy(context, {p, kept_.back().data(), bytes, CopyKind::kToDevice});
    return static_cast<T*>(p);
  }
  // Poisoned memory that is compared after the run.
  template <class T>
  T* Out(const std::string& name, DType dtype, std::int64_t count, Agree agree = Agree::kExact,
         double tolerance = 0) {
    const std::vector<std::uint8_t> poison(static_cast<std::size_t>(count * DTypeBytes(dtype)),
                                           0xA5);
    return static_cast<T*>(Register(name, In(poison), dtype, count, agree, tolerance));
  }
  // Memory that is read and written, compared after the run.
  template <class T>
  T* InOut(const std::string& name, DType dtype, const std::vector<T>& values,
           Agree agree = Agree::kExact, double tolerance = 0) {
    const std::int64_t count =
        static_cast<std::int64_t>(values.size() * sizeof(T)) / DTypeBytes(dtype);
    return static_cast<T*>(Register(name, In(values), dtype, count, agree, tolerance));
  }
  StatSlot* Stats(std::int64_t count, Agree agree = Agree::kStats, double tolerance = 0) {
    StatSlot* slots = In(std::vector<StatSlot>(static_cast<std::size_t>(count)));
    ops.stats_reset(context, slots, count);
    Register("stats", slots, DType::kU8, count * static_cast<std::int64_t>(sizeof(StatSlot)), agree,
             tolerance);
    return slots;
  }

  // Waits, reads the outputs back. "" or the backend's error.
  std::string Finish() {
    for (Output& o : outputs_) {
      o.host.resize(static_cast<std::size_t>(o.count * DTypeBytes(o.dtype)));
      ops.copy(context, {o.host.data(), o.device, static_cast<std::int64_t>(o.host.size()),
                         CopyKind::kToHost});
    }
    ops.synchronize(context);
    char message[512] = "";
    return ops.poll_error(context, message, sizeof(message)) != 0 ? message : "";
  }
  const std::vector<Output>& outputs() const { return outputs_; }

  // ------------------------------------------------------------ inputs

  std::int64_t Pick(std::int64_t low, std::int64_t high) {
    return std::uniform_int_distribution<std::int64_t>(low, high)(rng);
  }
  // Gaussian numbers of very different size by row tile, some zeros; poison: NaN and infinities.
  std::vector<float> Numbers(std::int64_t count, float size, bool poison = false) {
    std::normal_distribution<float> normal(0.0f, size);
    std::vector<float> v(static_cast<std::size_t>(count));
    float factor = 1.0f;
    for (std::size_t i = 0; i < v.size(); ++i) {
      if (i % 128 == 0) {
        factor = std::ldexp(1.0f, static_cast<int>(Pick(-12, 12)));
      }
      v[i] = normal(rng) * (poison ? factor : 1.0f);
      if (poison) {
        switch (Pick(0, 400)) {
          case 0:
            v[i] = 0.0f;
            break;
          case 1:
            v[i] = -0.0f;
            break;
          case 2:
            v[i] *= 1e-6f;
            break;
          case 3:
            v[i] = Pick(0, 1) != 0 ? __builtin_nanf("") : -__builtin_huge_valf();
            break;
          case 4:
            v[i] = __builtin_huge_valf();
            break;
          default:
            break;
        }
      }
    }
    return v;
  }
  // In `dtype` (kF32 or kBF16) as bytes.
  std::vector<std::uint8_t> Encode(const std::vector<float>& v, DType dtype) {
    std::vector<std::uint8_t> bytes(v.size() * static_cast<std::size_t>(DTypeBytes(dtype)));
    for (std::size_t i = 0; i < v.size(); ++i) {
      if (dtype == DType::kF32) {
        std::memcpy(&bytes[i * 4], &v[i], 4);
      } else {
        const std::uint16_t code = Bf16FromFloat(v[i]);
        std::memcpy(&bytes[i * 2], &code, 2);
      }
    }
    return bytes;
  }
  void* Activations(std::int64_t count, DType dtype, float size = 1.0f, bool poison = false) {
    return In(Encode(Numbers(count, size, poison), dtype));
  }

  // Groups with `rows` real rows each, begins padded; `slack` rows behind the last group.
  RowGroups Groups(const std::vector<std::int64_t>& rows, std::int64_t slack = 0) {
    auto begin = std::make_unique<std::vector<std::int64_t>>();
    auto count = std::make_unique<std::vector<std::int64_t>>(rows);
    std::int64_t at = 0;
    for (std::int64_t r : rows) {
      begin->push_back(at);
      at += RoundUp(r, kRowAlign);
    }
    RowGroups g;
    g.count = static_cast<std::int32_t>(rows.size());
    g.begin = In(*begin);
    g.rows = In(*count);
    g.host_begin = begin->data();
    g.host_rows = count->data();
    g.padded_rows = at + slack;
    host_groups_.push_back(std::move(begin));
    host_groups_.push_back(std::move(count));
    return g;
  }
  // A dense tensor: one group of any number of rows.
  RowGroups Dense(std::int64_t rows) {
    RowGroups g = Groups({rows});
    g.padded_rows = rows;
    return g;
  }

 private:
  void* Register(const std::string& name, void* device, DType dtype, std::int64_t count,
                 Agree agree, double tolerance) {
    outputs_.push_back({name, device, dtype, count, agree, tolerance, {}});
    return device;
  }

  std::vector<void*> memory_;
  std::vector<Output> outputs_;
  std::vector<std::vector<std::uint8_t>> kept_;
  std::vector<std::unique_ptr<std::vector<std::int64_t>>> host_groups_;
};

// "" when the outputs agree, else what differs, with the first place.
std::string Compare(const Output& cpu, const Output& cuda);

// The plug-in, opened once: OCTAVO_PLUGIN, else liboctavo_cuda.so beside the program or in ../lib.
// Null ops and a reason when there is none or no device.
struct CudaBackend {
  Backend backend;
  std::string reason;
};
const CudaBackend& OpenCuda();

// The plug-in's table alone (null and a reason where it cannot be opened).
const PluginTable* OpenPlugin(std::string* reason);

struct OpCase {
  const char* name;
  void (*run)(OpRun&);
};
const std::vector<OpCase>& OpCases();

}  // namespace octavo::test
