// Speed of the CPU kernels on one core: data movement beside memcpy's rate, matrix products beside
// raw sgemm's. Random data, poisoned outputs, median of several runs in thread CPU time (the
// machine may be shared).
//
//   bench_ops_cpu [rows] [cols] [groups]      default 2048 2048 8
//
// Bytes count what a kernel must read and write; memcpy's rate counts both directions too. FLOP are
// 2·M·N·K of real rows.
#include <time.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "kernels/cpu/backend.h"
#include "kernels/cpu/blas.h"
#include "kernels/formats/bf16.h"
#include "kernels/ops.h"

namespace octavo {
namespace {

std::size_t Index(std::int64_t i) { return static_cast<std::size_t>(i); }

double ThreadSeconds() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

double MedianSeconds(const std::function<void()>& body) {
  std::vector<double> seconds;
  body();  // warm-up: scratch grows, pages appear
  double total = 0;
  while (seconds.size() < 5 || (total < 0.3 && seconds.size() < 50)) {
    const double begin = ThreadSeconds();
    body();
    seconds.push_back(ThreadSeconds() - begin);
    total += seconds.back();
  }
  std::nth_element(seconds.begin(),
                   seconds.begin() + static_cast<std::ptrdiff_t>(seconds.size() / 2),
                   seconds.end());
  return seconds[seconds.size() / 2];
}

std::vector<float> Normals(std::int64_t n) {
  static std::mt19937 engine(1);
  std::normal_distribution<float> normal;
  std::vector<float> x(Index(n));
  for (float& v : x) {
    v = normal(engine);
  }
  return x;
}

std::vector<std::uint16_t> Bf16Normals(std::int64_t n) {
  std::vector<std::uint16_t> x(Index(n));
  const std::vector<float> wide = Normals(n);
  std::transform(wide.begin(), wide.end(), x.begin(), Bf16FromFloat);
  return x;
}

// A quantised tensor that owns its memory; scales [cols/128][rows], or per 128×128 block.
struct Quantised {
  std::vector<std::uint8_t> codes;
  std::vector<float> scales;
  QTensor tensor;
  Quantised(std::int64_t rows, std::int64_t cols, Tiling tiling)
      : codes(Index(rows * cols), 0xA5), scales(Index(rows * CeilDiv(cols, kMxBlock)), 1.0f) {
    const bool block = tiling == Tiling::kBlock128;
    tensor = {.q = codes.data(),
              .format = DType::kE4M3,
              .tiling = tiling,
              .rows = rows,
              .cols = cols,
              .ld = cols,
              .dequant_scale = scales.data(),
              .scale_row_stride = block ? RoundUp(CeilDiv(cols, kTile), 4) : 1,
              .scale_tile_stride = block ? 1 : rows};
  }
};

class Bench {
 public:
  Bench(std::int64_t rows, std::int64_t cols, std::int64_t groups)
      : rows_(RoundUp(rows, kTile * groups)),
        cols_(RoundUp(cols, kTile)),
        backend_(CreateCpuBackend()),
        ops_(*backend_.ops),
        context_(backend_.context) {
    for (std::int64_t g = 0; g < groups; ++g) {
      group_begin_.push_back(g * rows_ / groups);
      group_rows_.push_back(rows_ / groups);
    }
  }
  ~Bench() { DestroyCpuBackend(&backend_); }

  void Run() {
    std::printf("rows %lld, cols %lld, groups %zu, BLAS core %s\n", static_cast<long long>(rows_),
                static_cast<long long>(cols_), group_rows_.size(), BlasCoreType());
    Movement();
    Products();
  }

 private:
  RowGroups Groups() const {
    return {.count = static_cast<std::int32_t>(group_rows_.size()),
            .begin = group_begin_.data(),
            .rows = group_rows_.data(),
            .host_begin = group_begin_.data(),
            .host_rows = group_rows_.data(),
            .padded_rows = rows_};
  }

  void ReportBytes(const char* name, double bytes_per_element, const std::function<void()>& body) {
    const double bytes = bytes_per_element * static_cast<double>(rows_ * cols_);
    const double rate = bytes / MedianSeconds(body) * 1e-9;
    memcpy_rate_ = memcpy_rate_ == 0 ? rate : memcpy_rate_;
    std::printf("%-42s %8.2f GB/s %6.0f %% of memcpy\n", name, rate, 100 * rate / memcpy_rate_);
  }

  void ReportFlops(const char* name, const std::function<void()>& body) {
    const double flops = 2.0 * static_cast<double>(rows_) * static_cast<double>(cols_ * cols_);
    const double rate = flops / MedianSeconds(body) * 1e-9;
    sgemm_rate_ = sgemm_rate_ == 0 ? rate : sgemm_rate_;
    std::printf("%-42s %8.1f GFLOP/s %4.0f %% of sgemm\n", name, rate, 100 * rate / sgemm_rate_);
  }

  void Movement() {
    std::vector<std::uint16_t> x = Bf16Normals(rows_ * cols_);
    std::vector<float> wide = Normals(rows_ * cols_);
    std::vector<std::uint16_t> out(x.size(), 0xA5A5);
    Quantised row(rows_, cols_, Tiling::kRow128);
    Quantised col(cols_, rows_, Tiling::kRow128);
    Quantised mx(rows_, cols_, Tiling::kRow32);
    Quantised weights(rows_, cols_, Tiling::kBlock128);
    Quantised weights_col(cols_, rows_, Tiling::kBlock128);
    std::vector<StatSlot> stats(group_rows_.size());
    ReportBytes("memcpy", 4, [&] { std::memcpy(out.data(), x.data(), x.size() * 2); });
    const auto quantise = [&](const void* from, DType dtype, QuantizeRule rule, QTensor to_row,
                              QTensor to_col) {
      ops_.quantize_rows(context_, {.x = from,
                                    .x_dtype = dtype,
                                    .cols = cols_,
                                    .groups = Groups(),
                                    .rule = rule,
                                    .row = to_row,
                                    .col = to_col,
                                    .stats = stats.data()});
    };
    const QuantizeRule pow2 = {.pow2 = true};
    ReportBytes("quantize 1x128, BF16", 3,
                [&] { quantise(x.data(), DType::kBF16, {}, row.tensor, {}); });
    ReportBytes("quantize 1x128, FP32", 5,
                [&] { quantise(wide.data(), DType::kF32, {}, row.tensor, {}); });
    ReportBytes("quantize 1x32 MX, BF16", 3, [&] {
      quantise(x.data(), DType::kBF16, {.tiling = Tiling::kRow32}, mx.tensor, {});
    });
    ReportBytes("quantize 1x128 rows and columns, BF16", 4,
                [&] { quantise(x.data(), DType::kBF16, pow2, row.tensor, col.tensor); });
    ReportBytes("quantize 128x128 and transpose, FP32", 6, [&] {
      ops_.quantize_blocks(context_, {.w = wide.data(),
                                      .groups = 1,
                                      .n = rows_,
                                      .k = cols_,
                                      .rule = {.tiling = Tiling::kBlock128},
                                      .row = weights.tensor,
                                      .col = weights_col.tensor,
                                      .stats = nullptr});
    });
    ReportBytes("scaling-aware transpose", 2, [&] {
      ops_.transpose_scaled(
          context_,
          {.src = row.tensor, .groups = Groups(), .dst = col.tensor, .stats = stats.data()});
    });
    ReportBytes("dequantize to BF16", 3, [&] {
      ops_.dequantize(
          context_,
          {.src = row.tensor, .groups = Groups(), .dst = out.data(), .dst_dtype = DType::kBF16});
    });
    ReportBytes("swiglu and quantize, BF16 (per input)", 2.5, [&] {
      Quantised& half = swiglu_out_.empty()
                            ? swiglu_out_.emplace_back(rows_, cols_ / 2, Tiling::kRow128)
                            : swiglu_out_.front();
      ops_.swiglu_forward(context_, {.groups = Groups(),
                                     .f = cols_ / 2,
                                     .gate_up = x.data(),
                                     .dtype = DType::kBF16,
                                     .weight = nullptr,
                                     .act = nullptr,
                                     .rule = {},
                                     .quant = half.tensor,
                                     .quant_col = {},
                                     .stats = nullptr});
    });
    std::vector<std::int32_t> dest(Index(rows_));
    for (std::int64_t r = 0; r < rows_; ++r) {
      dest[Index(r)] = static_cast<std::int32_t>((r * 7919) % rows_);
    }
    const auto rows_of = [&](std::vector<std::uint16_t>& v) {
      return RowSet{.payload = reinterpret_cast<std::uint8_t*>(v.data()),
                    .payload_stride = 2 * cols_};
    };
    ReportBytes("permute, BF16", 4, [&] {
      ops_.permute(context_, {.src = rows_of(x),
                              .dst = rows_of(out),
                              .rows = rows_,
                              .fanout = 1,
                              .dest_row = dest.data(),
                              .payload_bytes = 2 * cols_,
                              .tiles = 0});
    });
  }

  // [rows, cols] · [cols, cols]ᵀ, and the same spread over groups.
  void Products() {
    std::vector<float> a = Normals(rows_ * cols_);
    std::vector<float> b = Normals(cols_ * cols_);
    std::vector<std::uint16_t> a16(a.size());
    std::vector<std::uint16_t> b16(b.size());
    std::transform(a.begin(), a.end(), a16.begin(), Bf16FromFloat);
    std::transform(b.begin(), b.end(), b16.begin(), Bf16FromFloat);
    std::vector<float> c(Index(rows_ * cols_), -1.0f);
    ReportFlops("sgemm", [&] {
      Sgemm({.m = rows_,
             .n = cols_,
             .k = cols_,
             .a = a.data(),
             .a_transposed = Transposed::kNo,
             .lda = cols_,
             .b = b.data(),
             .b_transposed = Transposed::kYes,
             .ldb = cols_,
             .c = c.data(),
             .ldc = cols_,
             .beta = 0});
    });
    const auto gemm = [&](GemmOperand left, GemmOperand right) {
      ops_.gemm(context_, {.m = rows_,
                           .n = cols_,
                           .k = cols_,
                           .a = left,
                           .b = right,
                           .c = c.data(),
                           .c_dtype = DType::kF32,
                           .ldc = 0,
                           .accumulate = false,
                           .mode = Accumulate::kPromoted});
    };
    ReportFlops("gemm BF16", [&] {
      gemm({.data = a16.data(), .dtype = DType::kBF16},
           {.data = b16.data(), .dtype = DType::kBF16});
    });
    Quantised qa(rows_, cols_, Tiling::kRow128);
    Quantised qb(cols_, cols_, Tiling::kBlock128);
    const std::int64_t dense_begin = 0;
    const RowGroups dense = {.count = 1,
                             .begin = &dense_begin,
                             .rows = &rows_,
                             .host_begin = &dense_begin,
                             .host_rows = &rows_,
                             .padded_rows = rows_};
    for (const bool pow2 : {true, false}) {
      ops_.quantize_rows(context_, {.x = a.data(),
                                    .x_dtype = DType::kF32,
                                    .cols = cols_,
                                    .groups = dense,
                                    .rule = {.pow2 = pow2},
                                    .row = qa.tensor,
                                    .col = {},
                                    .stats = nullptr});
      ops_.quantize_blocks(context_, {.w = b.data(),
                                      .groups = 1,
                                      .n = cols_,
                                      .k = cols_,
                                      .rule = {.tiling = Tiling::kBlock128, .pow2 = pow2},
                                      .row = qb.tensor,
                                      .col = {},
                                      .stats = nullptr});
      ReportFlops(
          pow2 ? "gemm FP8 blockwise, power-of-two scales" : "gemm FP8 blockwise, FP32 scales",
          [&] { gemm({.quant = qa.tensor}, {.quant = qb.tensor}); });
    }
    const auto experts = static_cast<std::int64_t>(group_rows_.size());
    std::vector<std::uint16_t> weights = Bf16Normals(experts * cols_ * cols_);
    ReportFlops("grouped gemm BF16", [&] {
      ops_.grouped_gemm(context_, {.groups = Groups(),
                                   .n = cols_,
                                   .k = cols_,
                                   .a = {.data = a16.data(), .dtype = DType::kBF16},
                                   .b = {.data = weights.data(), .dtype = DType::kBF16},
                                   .c = c.data(),
                                   .c_dtype = DType::kF32,
                                   .mode = Accumulate::kPromoted});
    });
  }

  std::int64_t rows_, cols_;
  Backend backend_;
  const Ops& ops_;
  OpsContext* context_;
  std::vector<std::int64_t> group_begin_, group_rows_;
  std::vector<Quantised> swiglu_out_;
  double memcpy_rate_ = 0, sgemm_rate_ = 0;
};

}  // namespace
}  // namespace octavo

int main(int argc, char** argv) {
  octavo::MaybeRunBlasProbe(argc, argv);
  octavo::EnsureBlasCoreType(argv);
  const auto argument = [&](int i, std::int64_t otherwise) {
    return argc > i ? std::max<std::int64_t>(1, std::atoll(argv[i])) : otherwise;
  };
  octavo::Bench(argument(1, 2048), argument(2, 2048), argument(3, 8)).Run();
  return 0;
}
