// Every operation of the CUDA backend at the shapes of design/ANCHORS.md, with the floor measured
// in the same run and the peer's figure beside ours.
//
//   bench_ops_cuda [filter|filter…]      OCTAVO_PLUGIN names the plug-in if it is not beside the
//   program
//
// Floor: the bytes an operation must move (each input read once, each output written once) at the
// rate of a device copy of this run. Medians, timed with events, on random data, in buffers well
// beyond the 60 MB of L2: of regions of so many calls that they last half a millisecond (as in a
// step, the host's part of a launch is hidden behind the call before), and of single calls beside
// them. Peers are the best of PyTorch, Triton or DeepGEMM on one
// H200.
#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "base/check.h"
#include "kernels/formats/bf16.h"
#include "kernels/ops_abi.h"

namespace octavo {
namespace {

// Event timing through the runtime that the plug-in loaded.
struct Events {
  int (*create)(void**) = nullptr;
  int (*record)(void*, void*) = nullptr;
  int (*wait)(void*) = nullptr;
  int (*elapsed)(float*, void*, void*) = nullptr;
  void* start = nullptr;
  void* stop = nullptr;
};

class Bench {
 public:
  explicit Bench(const char* filter) : filter_(filter) {
    Load();
    random_.seed(20261129);
    MeasureCopy();
  }

  const Ops& ops() const { return *backend_.ops; }
  OpsContext* context() const { return backend_.context; }

  void* Memory(std::int64_t bytes) {
    void* p = ops().allocate(context(), bytes, octavo::Memory::kDevice);
    OCTAVO_CHECK(p != nullptr, "no device memory for %lld bytes", static_cast<long long>(bytes));
    memory_.push_back(p);
    return p;
  }
  template <class T>
  T* Upload(const std::vector<T>& v) {
    const std::int64_t bytes = static_cast<std::int64_t>(v.size() * sizeof(T));
    void* p = Memory(bytes);
    ops().copy(context(), {p, v.data(), bytes, CopyKind::kToDevice});
    ops().synchronize(context());
    return static_cast<T*>(p);
  }
  // Gaussian numbers; a pattern of 4 M elements, made once and begun anywhere, is repeated (a
  // period beyond any tile).
  void* Numbers(std::int64_t count, DType dtype, float size = 1.0f) {
    constexpr std::int64_t kPattern = 1 << 22;
    const std::int64_t n = std::min(count, kPattern), width = DTypeBytes(dtype);
    if (pattern_.empty()) {
      std::normal_distribution<float> normal(0.0f, 1.0f);
      pattern_.resize(static_cast<std::size_t>(kPattern));
      std::generate(pattern_.begin(), pattern_.end(), [&] { return normal(random_); });
    }
    const std::int64_t begin = Pick(0, kPattern - 1);
    std::vector<std::uint8_t> host(static_cast<std::size_t>(n * width));
    for (std::int64_t i = 0; i < n; ++i) {
      const float v = size * pattern_[static_cast<std::size_t>((begin + i) % kPattern)];
      if (dtype == DType::kF32) {
        std::memcpy(&host[static_cast<std::size_t>(i * 4)], &v, 4);
      } else {
        const std::uint16_t code = Bf16FromFloat(v);
        std::memcpy(&host[static_cast<std::size_t>(i * 2)], &code, 2);
      }
    }
    std::uint8_t* p = static_cast<std::uint8_t*>(Memory(count * width));
    ops().copy(context(), {p, host.data(), n * width, CopyKind::kToDevice});
    for (std::int64_t at = n; at < count; at += n) {
      ops().copy(context(),
                 {p + at * width, p, std::min(n, count - at) * width, CopyKind::kOnDevice});
    }
    ops().synchronize(context());
    return p;
  }
  void FreeAll() {
    ops().synchronize(context());
    for (void* p : memory_) {
      ops().release(context(), p, octavo::Memory::kDevice);
    }
    memory_.clear();
  }

  // The filter is a part of the name, or several with | between them.
  bool Wanted(const std::string& name) const {
    for (std::size_t at = 0; at <= filter_.size();) {
      const std::size_t end = std::min(filter_.find('|', at), filter_.size());
      if (name.find(filter_.substr(at, end - at)) != std::string::npos) {
        return true;
      }
      at = end + 1;
    }
    return false;
  }

  // Median milliseconds of one call, in regions of `calls` calls.
  float Time(const std::function<void()>& run, int calls = 1, int repeats = 15) {
    for (int i = 0; i < 3; ++i) {
      run();
    }
    std::vector<float> ms;
    for (int i = 0; i < repeats; ++i) {
      events_.record(events_.start, ops().stream(context()));
      for (int call = 0; call < calls; ++call) {
        run();
      }
      events_.record(events_.stop, ops().stream(context()));
      events_.wait(events_.stop);
      float t = 0;
      events_.elapsed(&t, events_.start, events_.stop);
      ms.push_back(t / static_cast<float>(calls));
    }
    char message[512];
    OCTAVO_CHECK(ops().poll_error(context(), message, sizeof(message)) == 0, "%s", message);
    std::sort(ms.begin(), ms.end());
    return ms[ms.size() / 2];
  }
  // A row of the memory table. must, peer: share of the floor's rate in %, ms; 0: none.
  void Bytes(const std::string& name, double bytes, double must, double peer_ms,
             const std::function<void()>& run) {
    const float single = Time(run);
    const int calls = std::clamp(static_cast<int>(0.5f / single), 1, 20);
    const float ms = calls > 1 ? Time(run, calls, 9) : single;
    const double floor = bytes / copy_rate_ * 1e3;
    std::printf("%-46s %8.4f %8.4f %6.1f%% %5.0f%% %8.4f %9.4f %5.1f%%\n", name.c_str(),
                static_cast<double>(ms), floor, 100 * floor / static_cast<double>(ms), must,
                peer_ms, static_cast<double>(single), 100 * floor / static_cast<double>(single));
    std::fflush(stdout);
    FreeAll();
  }
  void Flops(const std::string& name, double flops, double peer_tflops,
             const std::function<void()>& run) {
    const float ms = Time(run);
    std::printf("%-46s %8.4f %8.1f TFLOP/s   peer %6.0f\n", name.c_str(), static_cast<double>(ms),
                flops / static_cast<double>(ms) / 1e9, peer_tflops);
    std::fflush(stdout);
    FreeAll();
  }

  QTensor Quant(std::int64_t rows, std::int64_t cols, Tiling tiling) {
    QTensor t;
    t.rows = rows;
    t.cols = cols;
    t.tiling = tiling;
    t.q = static_cast<std::uint8_t*>(Memory(rows * cols));
    std::int64_t floats = rows * CeilDiv(cols, kTile);
    t.scale_row_stride = 1;
    t.scale_tile_stride = rows;
    if (tiling == Tiling::kBlock128) {
      t.scale_row_stride = RoundUp(CeilDiv(cols, kTile), 4);
      t.scale_tile_stride = 1;
      floats = CeilDiv(rows, kTile) * t.scale_row_stride;
    }
    t.dequant_scale = static_cast<float*>(Memory(floats * 4));
    return t;
  }
  RowGroups Groups(const std::vector<std::int64_t>& rows) {
    std::vector<std::int64_t> begin;
    std::int64_t at = 0;
    for (std::int64_t r : rows) {
      begin.push_back(at);
      at += RoundUp(r, kRowAlign);
    }
    host_rows_ = rows;
    host_begin_ = begin;
    RowGroups g;
    g.count = static_cast<std::int32_t>(rows.size());
    g.begin = Upload(begin);
    g.rows = Upload(rows);
    g.host_begin = host_begin_.data();
    g.host_rows = host_rows_.data();
    g.padded_rows = at;
    return g;
  }
  RowGroups Dense(std::int64_t rows) { return Groups({rows}); }
  StatSlot* Slots(std::int64_t count) {
    StatSlot* slots = static_cast<StatSlot*>(Memory(count * 64));
    ops().stats_reset(context(), slots, count);
    return slots;
  }
  std::int64_t Pick(std::int64_t low, std::int64_t high) {
    return std::uniform_int_distribution<std::int64_t>(low, high)(random_);
  }

 private:
  void Load() {
    char self[4096] = "";
    const ssize_t n = readlink("/proc/self/exe", self, sizeof(self) - 1);
    std::string folder(self, n > 0 ? static_cast<std::size_t>(n) : 0);
    folder.resize(folder.rfind('/'));
    const char* forced = std::getenv("OCTAVO_PLUGIN");
    void* handle = nullptr;
    for (const std::string& name :
         {std::string(forced != nullptr ? forced : ""), folder + "/liboctavo_cuda.so",
          folder + "/../lib/liboctavo_cuda.so"}) {
      handle = handle == nullptr && !name.empty() ? dlopen(name.c_str(), RTLD_NOW) : handle;
    }
    OCTAVO_CHECK(handle != nullptr, "no plug-in: %s", dlerror());
    const auto entry =
        reinterpret_cast<const PluginTable* (*)()>(dlsym(handle, "octavo_plugin_v1"));
    char message[512] = "";
    OCTAVO_CHECK(entry()->abi_version == kOpsAbiVersion, "another ABI version");
    OCTAVO_CHECK(entry()->create(0, &backend_, message, sizeof(message)) == 0, "%s", message);
    DeviceFacts facts;
    entry()->probe(0, &facts, message, sizeof(message));
    std::printf("%s, driver %d, cuBLASLt %d, cuDNN %d\n", facts.name, facts.driver_version,
                facts.cublaslt_version, facts.cudnn_version);
    void* runtime = dlopen("libcudart.so.13", RTLD_NOW | RTLD_NOLOAD);
    OCTAVO_CHECK(runtime != nullptr, "the CUDA runtime is not loaded");
    events_.create = reinterpret_cast<int (*)(void**)>(dlsym(runtime, "cudaEventCreate"));
    events_.record = reinterpret_cast<int (*)(void*, void*)>(dlsym(runtime, "cudaEventRecord"));
    events_.wait = reinterpret_cast<int (*)(void*)>(dlsym(runtime, "cudaEventSynchronize"));
    events_.elapsed =
        reinterpret_cast<int (*)(float*, void*, void*)>(dlsym(runtime, "cudaEventElapsedTime"));
    events_.create(&events_.start);
    events_.create(&events_.stop);
  }
  void MeasureCopy() {
    const std::int64_t bytes = std::int64_t{1} << 30;
    void* from = Numbers(bytes / 2, DType::kBF16);
    void* to = Memory(bytes);
    const float ms = Time([&] { ops().copy(context(), {to, from, bytes, CopyKind::kOnDevice}); });
    copy_rate_ = 2.0 * static_cast<double>(bytes) / (static_cast<double>(ms) * 1e-3);
    std::printf("copy: %.0f GB/s read and written\n", copy_rate_ / 1e9);
    FreeAll();
  }

  std::string filter_;
  Backend backend_;
  Events events_;
  double copy_rate_ = 0;
  std::vector<void*> memory_;
  std::vector<std::int64_t> host_begin_, host_rows_;
  std::mt19937_64 random_;
  std::vector<float> pattern_;
};

// ---------------------------------------------------------------- memory-bound operations

void QuantiseTable(Bench& b) {
  const std::int64_t rows = 32768, cols = 7168;
  const double e = static_cast<double>(rows * cols);
  for (const bool stats : {false, true}) {
    for (const bool pow2 : {false, true}) {
      const std::string name = std::string("quantise rows 32768x7168") + (pow2 ? " pow2" : "") +
                               (stats ? " + stats" : "");
      if (b.Wanted(name)) {
        QuantizeRowsArgs a{};
        a.x = b.Numbers(rows * cols, DType::kBF16);
        a.x_dtype = DType::kBF16;
        a.cols = cols;
        a.groups = b.Dense(rows);
        a.rule.pow2 = pow2;
        a.row = b.Quant(rows, cols, Tiling::kRow128);
        a.stats = stats ? b.Slots(1) : nullptr;
        b.Bytes(name, e * 3.03125, 90, 0.164, [&] { b.ops().quantize_rows(b.context(), a); });
      }
    }
  }
  if (b.Wanted("quantise rows and columns 32768x7168")) {
    QuantizeRowsArgs a{};
    a.x = b.Numbers(rows * cols, DType::kBF16);
    a.x_dtype = DType::kBF16;
    a.cols = cols;
    a.groups = b.Dense(rows);
    a.row = b.Quant(rows, cols, Tiling::kRow128);
    a.col = b.Quant(cols, rows, Tiling::kRow128);
    a.stats = b.Slots(1);
    b.Bytes("quantise rows and columns 32768x7168", e * 4.0625, 75, 0.298,
            [&] { b.ops().quantize_rows(b.context(), a); });
  }
  for (const bool both : {false, true}) {
    const std::string name = std::string("quantise 128x128 4x(7168x4096)") + (both ? " both" : "");
    if (b.Wanted(name)) {
      QuantizeBlocksArgs a{};
      a.groups = 4;
      a.n = 7168;
      a.k = 4096;
      a.rule.tiling = Tiling::kBlock128;
      a.w = static_cast<const float*>(b.Numbers(a.groups * a.n * a.k, DType::kF32, 0.02f));
      a.row = b.Quant(a.groups * a.n, a.k, Tiling::kBlock128);
      if (both) {
        a.col = b.Quant(a.groups * a.k, a.n, Tiling::kBlock128);
      }
      a.stats = b.Slots(4);
      b.Bytes(name, static_cast<double>(a.groups * a.n * a.k) * (both ? 6.0 : 5.0), 90,
              both ? 0 : 0.188, [&] { b.ops().quantize_blocks(b.context(), a); });
    }
  }
  if (b.Wanted("quantise tensor 32768x7168")) {
    QuantizeTensorArgs a{};
    a.x = b.Numbers(rows * cols, DType::kBF16);
    a.x_dtype = DType::kBF16;
    a.cols = cols;
    a.groups = b.Dense(rows);
    a.quant_scale = b.Upload(std::vector<float>{64.0f});
    a.format = DType::kE4M3;
    a.row = b.Quant(rows, cols, Tiling::kRow128);
    a.stats = b.Slots(1);
    b.Bytes("quantise tensor 32768x7168", e * 3, 90, 0,
            [&] { b.ops().quantize_tensor(b.context(), a); });
  }
  if (b.Wanted("amax 32768x7168")) {
    AmaxArgs a{};
    a.x = b.Numbers(rows * cols, DType::kBF16);
    a.x_dtype = DType::kBF16;
    a.cols = cols;
    a.groups = b.Dense(rows);
    a.amax = static_cast<float*>(b.Memory(4));
    b.Bytes("amax 32768x7168", e * 2, 0, 0, [&] { b.ops().amax(b.context(), a); });
  }
  if (b.Wanted("dequantise 32768x7168")) {
    DequantizeArgs a{};
    a.src = b.Quant(rows, cols, Tiling::kRow128);
    QuantizeRowsArgs q{};
    q.x = b.Numbers(rows * cols, DType::kBF16);
    q.x_dtype = DType::kBF16;
    q.cols = cols;
    q.groups = b.Dense(rows);
    q.row = a.src;
    b.ops().quantize_rows(b.context(), q);
    a.groups = q.groups;
    a.dst = b.Memory(rows * cols * 2);
    a.dst_dtype = DType::kBF16;
    b.Bytes("dequantise 32768x7168", e * 3.03125, 0, 0,
            [&] { b.ops().dequantize(b.context(), a); });
  }
}

void TransposeTable(Bench& b) {
  struct Shape {
    std::int64_t rows, cols;
    double must, peer;
  };
  for (const Shape& s : {Shape{32768, 7168, 88, 0.127}, Shape{24576, 5120, 0, 0.069},
                         Shape{24576, 2048, 80, 0.030}}) {
    const std::string name = "transpose " + std::to_string(s.rows) + "x" + std::to_string(s.cols);
    if (!b.Wanted(name)) {
      continue;
    }
    QuantizeRowsArgs q{};
    q.x = b.Numbers(s.rows * s.cols, DType::kBF16);
    q.x_dtype = DType::kBF16;
    q.cols = s.cols;
    q.groups = b.Dense(s.rows);
    q.rule.pow2 = true;
    q.row = b.Quant(s.rows, s.cols, Tiling::kRow128);
    b.ops().quantize_rows(b.context(), q);
    // Small shapes would stay in L2: two sets in turn, with something else in between, is a step's
    // life; four sets are enough to leave it.
    std::vector<TransposeScaledArgs> sets;
    for (int i = 0; i < (s.rows * s.cols < (std::int64_t{1} << 27) ? 6 : 1); ++i) {
      TransposeScaledArgs t{};
      t.src = b.Quant(s.rows, s.cols, Tiling::kRow128);
      b.ops().copy(b.context(), {t.src.q, q.row.q, s.rows * s.cols, CopyKind::kOnDevice});
      b.ops().copy(b.context(), {t.src.dequant_scale, q.row.dequant_scale, s.rows * s.cols / 32,
                                 CopyKind::kOnDevice});
      t.groups = q.groups;
      t.dst = b.Quant(s.cols, s.rows, Tiling::kRow128);
      t.stats = b.Slots(1);
      sets.push_back(t);
    }
    std::size_t at = 0;
    // What a copy of as many bytes takes: small ones do not reach the rate of large ones either.
    const std::int64_t moved = s.rows * s.cols;
    const auto copy = [&] {
      const TransposeScaledArgs& t = sets[at++ % sets.size()];
      b.ops().copy(b.context(), {t.dst.q, t.src.q, moved, CopyKind::kOnDevice});
    };
    const float copy_ms = b.Time(copy), copies_ms = b.Time(copy, 10, 9);
    std::printf("  copy of %lld MiB: %.4f ms in a row, %.4f ms alone\n",
                static_cast<long long>(moved >> 20), static_cast<double>(copies_ms),
                static_cast<double>(copy_ms));
    b.Bytes(name, static_cast<double>(s.rows * s.cols) * 2.0625, s.must, s.peer,
            [&] { b.ops().transpose_scaled(b.context(), sets[at++ % sets.size()]); });
  }
}

void SwigluTable(Bench& b) {
  const std::int64_t rows = 32768, f = 2048;
  const double e = static_cast<double>(rows * f);
  const auto weight = [&] { return static_cast<const float*>(b.Numbers(rows, DType::kF32)); };
  for (const bool both : {false, true}) {
    const std::string name = std::string("swiglu + quantise 32768x2048") + (both ? " both" : "");
    if (b.Wanted(name)) {
      SwigluForwardArgs a{};
      a.groups = b.Dense(rows);
      a.f = f;
      a.gate_up = b.Numbers(rows * 2 * f, DType::kBF16);
      a.dtype = DType::kBF16;
      a.weight = weight();
      a.quant = b.Quant(rows, f, Tiling::kRow128);
      if (both) {
        a.quant_col = b.Quant(f, rows, Tiling::kRow128);
      }
      a.stats = b.Slots(1);
      b.Bytes(name, e * (both ? 6.0625 : 5.03125), both ? 0 : 90, both ? 0 : 0.086,
              [&] { b.ops().swiglu_forward(b.context(), a); });
    }
  }
  if (b.Wanted("swiglu bf16 32768x2048")) {
    SwigluForwardArgs a{};
    a.groups = b.Dense(rows);
    a.f = f;
    a.gate_up = b.Numbers(rows * 2 * f, DType::kBF16);
    a.dtype = DType::kBF16;
    a.weight = weight();
    a.act = b.Memory(rows * f * 2);
    b.Bytes("swiglu bf16 32768x2048", e * 6, 0, 0.096,
            [&] { b.ops().swiglu_forward(b.context(), a); });
  }
  for (int kind = 0; kind < 3; ++kind) {
    const char* names[] = {"swiglu backward + quantise 32768x2048",
                           "swiglu backward + quantise 32768x2048 both",
                           "swiglu backward bf16 32768x2048"};
    if (!b.Wanted(names[kind])) {
      continue;
    }
    SwigluBackwardArgs a{};
    a.groups = b.Dense(rows);
    a.f = f;
    a.gate_up = b.Numbers(rows * 2 * f, DType::kBF16);
    a.d_act = b.Numbers(rows * f, DType::kBF16);
    a.dtype = DType::kBF16;
    a.weight = weight();
    a.dweight = static_cast<float*>(b.Memory(rows * 4));
    if (kind == 2) {
      a.d_gate_up = b.Memory(rows * 2 * f * 2);
    } else {
      a.quant = b.Quant(rows, 2 * f, Tiling::kRow128);
      a.stats = b.Slots(1);
      if (kind == 1) {
        a.quant_col = b.Quant(2 * f, rows, Tiling::kRow128);
      }
    }
    const double per[] = {8.0625, 10.125, 10.0};
    b.Bytes(names[kind], e * per[kind], kind == 0 ? 75 : 0, kind == 2 ? 0.224 : 0,
            [&] { b.ops().swiglu_backward(b.context(), a); });
  }
}

// Distinct experts a token, uniform.
std::vector<std::int32_t> Choices(Bench& b, std::int64_t tokens, std::int32_t experts,
                                  std::int32_t k) {
  std::vector<std::int32_t> index;
  std::vector<std::int32_t> all(static_cast<std::size_t>(experts));
  for (std::int32_t e = 0; e < experts; ++e) {
    all[static_cast<std::size_t>(e)] = e;
  }
  for (std::int64_t t = 0; t < tokens; ++t) {
    for (std::int32_t j = 0; j < k; ++j) {
      std::swap(all[static_cast<std::size_t>(j)],
                all[static_cast<std::size_t>(b.Pick(j, experts - 1))]);
      index.push_back(all[static_cast<std::size_t>(j)]);
    }
  }
  return index;
}

void PermuteTable(Bench& b) {
  struct Shape {
    const char* name;
    std::int64_t tokens, hidden;
    std::int32_t experts;
    bool fp8;
    double peer;
  };
  for (const Shape& s :
       {Shape{"permute+pad FP8 8192x7168 E256 top-8", 8192, 7168, 256, true, 0.175 + 0.45},
        Shape{"permute+pad BF16 16384x2048 E64 top-8", 16384, 2048, 64, false, 0.169 + 0.43}}) {
    if (!b.Wanted(s.name)) {
      continue;
    }
    const std::int32_t k = 8;
    const std::int64_t choices = s.tokens * k, row_bytes = s.hidden * (s.fp8 ? 1 : 2);
    const std::vector<std::int32_t> topk = Choices(b, s.tokens, s.experts, k);
    WorkspaceQuery query{};
    query.tokens = s.tokens;
    query.experts = s.experts;
    query.experts_per_token = k;
    query.dtype = DType::kF32;
    WorkspaceSizes sizes{};
    b.ops().workspace_sizes(b.context(), query, &sizes);
    RouteIndexArgs r{};
    r.tokens = s.tokens;
    r.experts = s.experts;
    r.experts_per_token = k;
    r.topk_index = b.Upload(topk);
    r.align = kRowAlign;
    r.counts = static_cast<std::int64_t*>(b.Memory(s.experts * 8));
    r.begin = static_cast<std::int64_t*>(b.Memory(s.experts * 8));
    r.dest_row = static_cast<std::int32_t*>(b.Memory(choices * 4));
    r.workspace = b.Memory(sizes.route_index);
    std::vector<std::int64_t> count(static_cast<std::size_t>(s.experts), 0);
    for (std::int32_t e : topk) {
      ++count[static_cast<std::size_t>(e)];
    }
    std::int64_t rows = 0;
    for (std::int64_t c : count) {
      rows += RoundUp(c, kRowAlign);
    }
    PermuteArgs p{};
    p.tiles = s.fp8 ? static_cast<std::int32_t>(s.hidden / kTile) : 0;
    p.src.payload = static_cast<std::uint8_t*>(b.Numbers(s.tokens * row_bytes / 2, DType::kBF16));
    p.src.payload_stride = row_bytes;
    p.dst.payload = static_cast<std::uint8_t*>(b.Memory(rows * row_bytes));
    p.dst.payload_stride = row_bytes;
    if (s.fp8) {
      p.src.dequant_scale = static_cast<std::uint8_t*>(b.Numbers(s.tokens * p.tiles, DType::kF32));
      p.src.scale_row_stride = p.tiles * 4;
      p.src.scale_tile_stride = 4;
      p.dst.dequant_scale = static_cast<std::uint8_t*>(b.Memory(rows * p.tiles * 4));
      p.dst.scale_row_stride = 4;
      p.dst.scale_tile_stride = rows * 4;
    }
    p.rows = s.tokens;
    p.fanout = k;
    p.dest_row = r.dest_row;
    p.payload_bytes = row_bytes;
    RowGroups groups;
    groups.count = s.experts;
    groups.begin = r.begin;
    groups.rows = r.counts;
    groups.padded_rows = rows;
    const double scale_overhead = s.fp8 ? 1.03125 : 1.0;
    const double bytes = static_cast<double>((s.tokens + rows) * row_bytes) * scale_overhead;
    const float index_ms = b.Time([&] { b.ops().route_index(b.context(), r); });
    const float permute_ms = b.Time([&] { b.ops().permute(b.context(), p); });
    const float pad_ms = b.Time([&] {
      b.ops().pad_rows(b.context(), {groups, p.dst, row_bytes, p.tiles});
    });
    std::printf("  indices %.4f, permute %.4f, pad %.4f ms, %lld rows\n",
                static_cast<double>(index_ms), static_cast<double>(permute_ms),
                static_cast<double>(pad_ms), static_cast<long long>(rows));
    b.Bytes(s.name, bytes, 60, s.peer, [&] {
      b.ops().route_index(b.context(), r);
      b.ops().permute(b.context(), p);
      b.ops().pad_rows(b.context(), {groups, p.dst, row_bytes, p.tiles});
    });
  }
  if (b.Wanted("combine BF16 8192x7168 top-8")) {
    const std::int64_t tokens = 8192, hidden = 7168, rows = tokens * 8;
    std::vector<std::int32_t> from(static_cast<std::size_t>(rows));
    for (std::int64_t i = 0; i < rows; ++i) {
      from[static_cast<std::size_t>(i)] = static_cast<std::int32_t>(i);
    }
    for (std::int64_t i = rows - 1; i > 0; --i) {
      std::swap(from[static_cast<std::size_t>(i)], from[static_cast<std::size_t>(b.Pick(0, i))]);
    }
    CombineArgs a{};
    a.src.payload = static_cast<std::uint8_t*>(b.Numbers(rows * hidden, DType::kBF16));
    a.src.payload_stride = hidden * 2;
    a.src_dtype = DType::kBF16;
    a.tokens = tokens;
    a.hidden = hidden;
    a.fanout = 8;
    a.source_row = b.Upload(from);
    a.y = b.Memory(tokens * hidden * 2);
    a.y_dtype = DType::kBF16;
    b.Bytes("combine BF16 8192x7168 top-8", static_cast<double>((rows + tokens) * hidden) * 2, 60,
            1.22, [&] { b.ops().combine(b.context(), a); });
  }
}

void ModelTable(Bench& b) {
  if (b.Wanted("router 16384x256 top-8")) {
    const std::int64_t tokens = 16384;
    RouterForwardArgs a{};
    a.config = {.experts = 256,
                .experts_per_token = 8,
                .score = RouterScore::kSoftmax,
                .normalize_topk = true,
                .routed_scaling_factor = 1.0f,
                .n_group = 1,
                .topk_group = 1};
    a.tokens = tokens;
    a.tokens_per_segment = 2048;
    a.logits = static_cast<const float*>(b.Numbers(tokens * 256, DType::kF32));
    a.topk_index = static_cast<std::int32_t*>(b.Memory(tokens * 8 * 4));
    a.topk_weight = static_cast<float*>(b.Memory(tokens * 8 * 4));
    a.counts = static_cast<std::int64_t*>(b.Memory(8 * 256 * 8));
    a.score_sum = static_cast<float*>(b.Memory(8 * 256 * 4));
    a.logsumexp = static_cast<float*>(b.Memory(tokens * 4));
    a.z_sum = static_cast<double*>(b.Memory(8));
    b.Bytes("router 16384x256 top-8 (must 0.06 ms)", static_cast<double>(tokens) * (1024 + 68), 0,
            0.212, [&] { b.ops().router_forward(b.context(), a); });
  }
  if (b.Wanted("cross entropy 8192x32768")) {
    const std::int64_t rows = 8192, vocab = 32768;
    std::vector<std::int32_t> target(static_cast<std::size_t>(rows));
    for (std::int32_t& t : target) {
      t = static_cast<std::int32_t>(b.Pick(0, vocab - 1));
    }
    CrossEntropyArgs a{};
    a.rows = rows;
    a.vocab = vocab;
    a.logits = b.Numbers(rows * vocab, DType::kBF16);
    a.dtype = DType::kBF16;
    a.target = b.Upload(target);
    a.dloss = 1.0f;
    a.loss_sum = static_cast<double*>(b.Memory(8));
    b.Bytes("cross entropy 8192x32768", static_cast<double>(rows * vocab) * 4, 80, 0,
            [&] { b.ops().cross_entropy(b.context(), a); });
  }
  const std::int64_t rows = 16384;
  for (const std::int64_t cols : {std::int64_t{1024}, std::int64_t{2048}, std::int64_t{7168}}) {
    const double e = static_cast<double>(rows * cols);
    const std::string shape = " 16384x" + std::to_string(cols);
    if (b.Wanted("norm forward" + shape)) {
      RmsNormForwardArgs a{};
      a.rows = rows;
      a.cols = cols;
      a.x = b.Numbers(rows * cols, DType::kBF16);
      a.ld_x = cols;
      a.residual = b.Numbers(rows * cols, DType::kBF16);
      a.residual_out = b.Memory(rows * cols * 2);
      a.w = static_cast<const float*>(b.Numbers(cols, DType::kF32));
      a.eps = 1e-5f;
      a.dtype = DType::kBF16;
      a.y = b.Memory(rows * cols * 2);
      a.ld_y = cols;
      a.rstd = static_cast<float*>(b.Memory(rows * 4));
      b.Bytes("norm forward" + shape, e * 8, 80, 0,
              [&] { b.ops().rms_norm_forward(b.context(), a); });
    }
    if (b.Wanted("norm backward" + shape)) {
      WorkspaceQuery query{};
      query.hidden = cols;
      query.dtype = DType::kF32;
      WorkspaceSizes sizes{};
      b.ops().workspace_sizes(b.context(), query, &sizes);
      RmsNormBackwardArgs a{};
      a.rows = rows;
      a.cols = cols;
      a.h = b.Numbers(rows * cols, DType::kBF16);
      a.ld_h = cols;
      a.w = static_cast<const float*>(b.Numbers(cols, DType::kF32));
      a.rstd = static_cast<const float*>(b.Numbers(rows, DType::kF32));
      a.dy = b.Numbers(rows * cols, DType::kBF16);
      a.ld_dy = cols;
      a.d_residual = b.Numbers(rows * cols, DType::kBF16);
      a.dtype = DType::kBF16;
      a.dx = b.Memory(rows * cols * 2);
      a.ld_dx = cols;
      a.dw = static_cast<float*>(b.Numbers(cols, DType::kF32));
      a.workspace = b.Memory(sizes.rms_norm_backward);
      b.Bytes("norm backward" + shape, e * 8, 80, 0,
              [&] { b.ops().rms_norm_backward(b.context(), a); });
    }
  }
  if (b.Wanted("adamw 256M, BF16 copy")) {
    const std::int64_t n = std::int64_t{1} << 28;
    AdamWArgs a{};
    a.n = n;
    a.master = static_cast<float*>(b.Numbers(n, DType::kF32));
    a.grad = static_cast<const float*>(b.Numbers(n, DType::kF32));
    a.m = b.Numbers(n, DType::kF32, 0.1f);
    a.v = b.Numbers(n, DType::kF32, 0.0f);
    a.moment_dtype = DType::kF32;
    a.copy = b.Memory(n * 2);
    a.copy_dtype = DType::kBF16;
    a.lr = 1e-4f;
    a.beta1 = 0.9f;
    a.beta2 = 0.95f;
    a.eps = 1e-8f;
    a.t = 10;
    b.Bytes("adamw 256M, BF16 copy", static_cast<double>(n) * 30, 80, 0,
            [&] { b.ops().adamw(b.context(), a); });
  }
  if (b.Wanted("sum of squares 256M")) {
    const std::int64_t n = std::int64_t{1} << 28;
    SumSquaresArgs a{static_cast<const float*>(b.Numbers(n, DType::kF32)), n,
                     static_cast<double*>(b.Memory(8)), nullptr};
    b.Bytes("sum of squares 256M", static_cast<double>(n) * 4, 0, 0,
            [&] { b.ops().sum_squares(b.context(), a); });
  }
  for (const bool equal : {false, true}) {
    const std::string name =
        std::string("embedding backward 16384x2048") + (equal ? " one token" : "");
    if (!b.Wanted(name)) {
      continue;
    }
    const std::int64_t tokens = 16384, hidden = 2048, vocab = 32768;
    std::vector<std::int32_t> ids(static_cast<std::size_t>(tokens), 17);
    if (!equal) {
      for (std::int32_t& t : ids) {
        // Roughly Zipf: log-uniform ranks.
        t = static_cast<std::int32_t>(
            std::min<double>(vocab - 1, std::exp(static_cast<double>(b.Pick(0, 10397)) / 1000.0)));
      }
    }
    WorkspaceQuery query{};
    query.tokens = tokens;
    query.hidden = hidden;
    query.vocab = vocab;
    query.dtype = DType::kF32;
    WorkspaceSizes sizes{};
    b.ops().workspace_sizes(b.context(), query, &sizes);
    EmbeddingBackwardArgs a{b.Upload(ids),
                            tokens,
                            hidden,
                            vocab,
                            b.Numbers(tokens * hidden, DType::kBF16),
                            DType::kBF16,
                            static_cast<float*>(b.Numbers(vocab * hidden, DType::kF32)),
                            b.Memory(sizes.embedding_backward)};
    // One token: each row is read, one is added to.
    b.Bytes(name, static_cast<double>(tokens * hidden) * (equal ? 2 : 10), 0, 0,
            [&] { b.ops().embedding_backward(b.context(), a); });
  }
  for (const std::int32_t dim : {64, 128}) {
    const std::string name = "attention 8x2048 16/4 heads of " + std::to_string(dim);
    if (!b.Wanted(name)) {
      continue;
    }
    WorkspaceQuery query{};
    query.batch = 8;
    query.sequence = 2048;
    query.heads = 16;
    query.kv_heads = 4;
    query.head_dim = dim;
    query.dtype = DType::kBF16;
    WorkspaceSizes sizes{};
    b.ops().workspace_sizes(b.context(), query, &sizes);
    const std::int64_t tokens = 8 * 2048;
    AttentionForwardArgs f{};
    f.batch = 8;
    f.sequence = 2048;
    f.heads = 16;
    f.kv_heads = 4;
    f.head_dim = dim;
    f.qkv = b.Numbers(tokens * 24 * dim, DType::kBF16);
    f.dtype = DType::kBF16;
    f.softmax_factor = 0.1f;
    f.out = b.Memory(tokens * 16 * dim * 2);
    f.lse = static_cast<float*>(b.Memory(tokens * 16 * 4));
    f.workspace = b.Memory(sizes.attention_forward);
    f.workspace_bytes = sizes.attention_forward;
    AttentionBackwardArgs g{};
    g.batch = 8;
    g.sequence = 2048;
    g.heads = 16;
    g.kv_heads = 4;
    g.head_dim = dim;
    g.qkv = f.qkv;
    g.out = f.out;
    g.d_out = b.Numbers(tokens * 16 * dim, DType::kBF16);
    g.lse = f.lse;
    g.dtype = DType::kBF16;
    g.softmax_factor = 0.1f;
    g.d_qkv = b.Memory(tokens * 24 * dim * 2);
    g.workspace = b.Memory(sizes.attention_backward);
    g.workspace_bytes = sizes.attention_backward;
    const float forward = b.Time([&] { b.ops().attention_forward(b.context(), f); });
    const float backward = b.Time([&] { b.ops().attention_backward(b.context(), g); });
    std::printf("%-46s forward %.3f ms (cuDNN %.3f), backward %.3f ms (cuDNN %.3f)\n", name.c_str(),
                static_cast<double>(forward), dim == 64 ? 0.184 : 0.257,
                static_cast<double>(backward), dim == 64 ? 0.570 : 0.935);
    b.FreeAll();
  }
}

// ---------------------------------------------------------------- products

// A quantised operand of random numbers.
GemmOperand Fp8(Bench& b, std::int64_t rows, std::int64_t cols, Tiling tiling) {
  GemmOperand o;
  o.quant = b.Quant(rows, cols, tiling);
  if (tiling == Tiling::kBlock128) {
    QuantizeBlocksArgs a{};
    a.w = static_cast<const float*>(b.Numbers(rows * cols, DType::kF32, 0.02f));
    a.groups = 1;
    a.n = rows;
    a.k = cols;
    a.rule.tiling = tiling;
    a.row = o.quant;
    b.ops().quantize_blocks(b.context(), a);
  } else {
    QuantizeRowsArgs a{};
    a.x = b.Numbers(rows * cols, DType::kBF16);
    a.x_dtype = DType::kBF16;
    a.cols = cols;
    a.groups = b.Dense(RoundUp(rows, kRowAlign));
    a.groups.padded_rows = rows;
    a.row = o.quant;
    b.ops().quantize_rows(b.context(), a);
  }
  return o;
}
GemmOperand High(Bench& b, std::int64_t rows, std::int64_t cols, DType dtype) {
  GemmOperand o;
  o.data = b.Numbers(rows * cols, dtype);
  o.dtype = dtype;
  return o;
}

void ProductTable(Bench& b) {
  struct Dense {
    const char* name;
    std::int64_t m, n, k;
    int kind;  // 0 BF16, 1 rows × blocks, 2 rows × rows FP32 accumulate, 3 FP32
    double peer;
  };
  for (const Dense& d :
       {Dense{"gemm BF16 8192^3", 8192, 8192, 8192, 0, 797},
        Dense{"gemm BF16 8192x4096x7168", 8192, 4096, 7168, 0, 778},
        Dense{"gemm FP8 1x128 by 128x128 8192x4096x7168", 8192, 4096, 7168, 1, 1261},
        Dense{"gemm FP8 1x128 by 1x128 8192x4096x7168", 8192, 4096, 7168, 2, 983},
        Dense{"gemm FP32 router 16384x256x2048", 16384, 256, 2048, 3, 0}}) {
    if (!b.Wanted(d.name)) {
      continue;
    }
    GemmArgs a{};
    a.m = d.m;
    a.n = d.n;
    a.k = d.k;
    a.c_dtype = d.kind >= 2 ? DType::kF32 : DType::kBF16;
    a.accumulate = d.kind == 2;
    if (d.kind == 0 || d.kind == 3) {
      const DType t = d.kind == 0 ? DType::kBF16 : DType::kF32;
      a.a = High(b, d.m, d.k, t);
      a.b = High(b, d.n, d.k, t);
    } else {
      a.a = Fp8(b, d.m, d.k, Tiling::kRow128);
      a.b = Fp8(b, d.n, d.k, d.kind == 1 ? Tiling::kBlock128 : Tiling::kRow128);
    }
    a.c = b.Memory(d.m * d.n * DTypeBytes(a.c_dtype));
    b.Flops(d.name, 2.0 * static_cast<double>(d.m * d.n) * static_cast<double>(d.k), d.peer,
            [&] { b.ops().gemm(b.context(), a); });
  }
}

// ---------------------------------------------------------------- grouped products

// What a user has today on the same card, TFLOP/s (0: not measured): torch's grouped BF16, its FP8
// row-wise and DeepGEMM, forward / dgrad / wgrad.
struct GroupedShape {
  const char* name;
  std::int32_t experts;
  std::int64_t rows, n, k;
  double bf16[3], fp8[3], deep[3];
};
constexpr GroupedShape kGroupedShapes[] = {
    {"dsv3-up E8 8k", 8, 8192, 4096, 7168, {698, 759, 702}, {977, 926, 938}, {1365, 1354, 575}},
    {"dsv3-up E8 32k",
     8,
     32768,
     4096,
     7168,
     {769, 718, 640},
     {1159, 1149, 1135},
     {1415, 1389, 890}},
    {"dsv3-down E8 32k",
     8,
     32768,
     7168,
     2048,
     {727, 750, 727},
     {1058, 1005, 1055},
     {1319, 1358, 876}},
    {"dsv3-up E32 8k", 32, 8192, 4096, 7168, {635, 663, 473}, {557, 619, 473}, {1157, 1126, 154}},
    {"dsv3-up E32 32k",
     32,
     32768,
     4096,
     7168,
     {703, 558, 599},
     {1105, 1056, 948},
     {1285, 1330, 515}},
    {"dsv3-down E32 32k",
     32,
     32768,
     7168,
     2048,
     {715, 725, 636},
     {918, 1013, 947},
     {1292, 1325, 553}},
    {"mixtral-up E8 16k", 8, 16384, 28672, 4096, {648, 0, 579}, {1140, 0, 1007}, {1278, 0, 746}},
    {"mixtral-down E8 16k", 8, 16384, 4096, 14336, {682, 0, 692}, {1172, 0, 1116}, {1395, 0, 801}},
    {"small-up E64 32k",
     64,
     32768,
     1536,
     2048,
     {582, 606, 542},
     {869, 872, 670},
     {1147, 1126, 289}},
    {"small-down E64 32k",
     64,
     32768,
     2048,
     768,
     {524, 578, 528},
     {654, 678, 490},
     {954, 1128, 286}},
    {"A fc1 E32 64k", 32, 65536, 1024, 1024, {}, {}, {}},
    {"A fc2 E32 64k", 32, 65536, 1024, 512, {}, {}, {}},
    {"B fc1 E64 128k", 64, 131072, 2048, 2048, {}, {}, {}},
    {"B fc2 E64 128k", 64, 131072, 2048, 1024, {}, {}, {}},
};

// One row of the table: our kernels, then the cuBLASLt loop over the same operands.
void GroupedRow(Bench& b, const std::string& name, double flops, double peer, const char* peer_name,
                const std::function<void()>& run) {
  setenv("OCTAVO_GROUPED_GEMM", "tiles", 1);
  const double ours = static_cast<double>(b.Time(run, 1, 9));
  setenv("OCTAVO_GROUPED_GEMM", "cublaslt", 1);
  const double loop = static_cast<double>(b.Time(run, 1, 3));
  unsetenv("OCTAVO_GROUPED_GEMM");
  std::printf("%-40s %8.4f %8.0f %8.4f %8.0f %8.0f %s\n", name.c_str(), ours, flops / ours / 1e9,
              loop, flops / loop / 1e9, peer, peer > 0 ? peer_name : "");
  std::fflush(stdout);
  b.FreeAll();
}

// The column-wise copy that a casting-free recipe makes of [rows, cols].
GemmOperand Flow(Bench& b, const RowGroups& groups, std::int64_t cols) {
  const std::int64_t rows = groups.padded_rows;
  QuantizeRowsArgs a{};
  a.x = b.Numbers(rows * cols, DType::kBF16);
  a.x_dtype = DType::kBF16;
  a.cols = cols;
  a.groups = groups;
  a.rule.pow2 = true;
  a.row = b.Quant(rows, cols, Tiling::kRow128);
  b.ops().quantize_rows(b.context(), a);
  GemmOperand o;
  o.quant = b.Quant(cols, rows, Tiling::kRow128);
  b.ops().transpose_scaled(b.context(), {a.row, groups, o.quant, nullptr});
  return o;
}

void GroupedTable(Bench& b) {
  bool headed = false;
  for (const GroupedShape& g : kGroupedShapes) {
    const std::string name = std::string("grouped ") + g.name;
    if (!b.Wanted(name)) {
      continue;
    }
    if (!headed) {
      std::printf("%-40s %8s %8s %8s %8s %8s\n", "grouped products", "ms", "TFLOP/s", "loop ms",
                  "TFLOP/s", "peer");
      headed = true;
    }
    // Ragged multiples of 128 around the mean.
    std::vector<std::int64_t> rows(static_cast<std::size_t>(g.experts), g.rows / g.experts);
    for (std::size_t i = 0; i + 1 < rows.size(); i += 2) {
      const std::int64_t shift = kRowAlign * b.Pick(0, g.rows / g.experts / kRowAlign / 2);
      rows[i] -= shift;
      rows[i + 1] += shift;
    }
    const double flops =
        2.0 * static_cast<double>(g.rows) * static_cast<double>(g.n) * static_cast<double>(g.k);
    for (const bool fp8 : {false, true}) {
      for (const bool dgrad : {false, true}) {
        const std::int64_t n = dgrad ? g.k : g.n, k = dgrad ? g.n : g.k;
        GroupedGemmArgs a{};
        a.n = n;
        a.k = k;
        a.a = fp8 ? Fp8(b, g.rows, k, Tiling::kRow128) : High(b, g.rows, k, DType::kBF16);
        a.b = fp8 ? Fp8(b, g.experts * n, k, Tiling::kBlock128)
                  : High(b, g.experts * n, k, DType::kBF16);
        a.b.k_contiguous = fp8 || !dgrad;
        a.groups = b.Groups(rows);
        a.c = b.Memory(g.rows * n * 2);
        a.c_dtype = DType::kBF16;
        const int at = dgrad ? 1 : 0;
        GroupedRow(b, name + (fp8 ? " FP8" : " BF16") + (dgrad ? " dgrad" : " fprop"), flops,
                   fp8 ? std::max(g.fp8[at], g.deep[at]) : g.bf16[at],
                   !fp8 || g.fp8[at] > g.deep[at] ? "torch" : "DeepGEMM",
                   [&] { b.ops().grouped_gemm(b.context(), a); });
      }
      // FP8 of general tiles, then of a casting-free recipe; a step's first gradient is written,
      // the ones after it are added.
      for (const int form : {0, 1, 2, 3}) {
        const bool flow = form >= 2, add = form % 2 != 0;
        if (flow && !fp8) {
          continue;
        }
        GroupedWgradArgs a{};
        a.m = g.n;
        a.n = g.k;
        a.groups = b.Groups(rows);
        if (flow) {
          a.a = Flow(b, a.groups, g.n);
          a.b = Flow(b, a.groups, g.k);
        } else if (fp8) {
          a.a = Fp8(b, g.n, g.rows, Tiling::kRow128);
          a.b = Fp8(b, g.k, g.rows, Tiling::kRow128);
          a.groups = b.Groups(rows);
        } else {
          a.a = High(b, g.rows, g.n, DType::kBF16);
          a.b = High(b, g.rows, g.k, DType::kBF16);
        }
        a.c = static_cast<float*>(b.Numbers(g.experts * g.n * g.k, DType::kF32));
        a.same_by_128 = flow;
        a.accumulate = add;
        GroupedRow(b,
                   name +
                       (flow  ? " flow wgrad"
                        : fp8 ? " FP8 wgrad"
                              : " BF16 wgrad") +
                       (add ? " +=" : ""),
                   flops, fp8 ? std::max(g.fp8[2], g.deep[2]) : g.bf16[2],
                   !fp8 || g.fp8[2] > g.deep[2] ? "torch" : "DeepGEMM",
                   [&] { b.ops().grouped_wgrad(b.context(), a); });
      }
    }
  }
}

int Main(int argc, char** argv) {
  Bench bench(argc > 1 ? argv[1] : "");
  std::printf("%-46s %8s %8s %7s %6s %8s %9s %6s\n", "operation", "ms", "floor", "share", "must",
              "peer ms", "single ms", "share");
  QuantiseTable(bench);
  TransposeTable(bench);
  SwigluTable(bench);
  PermuteTable(bench);
  ModelTable(bench);
  ProductTable(bench);
  GroupedTable(bench);
  return 0;
}

}  // namespace
}  // namespace octavo

int main(int argc, char** argv) { return octavo::Main(argc, argv); }
