// Chooses the form of the grouped kernel for given operands, describes them to the copy engine and
// launches.
#include <atomic>

#include "kernels/grouped_gemm/grouped_tiles.cuh"
#include "kernels/grouped_gemm/grouped_tiles.h"

namespace octavo::cuda {
namespace {

using grouped::Config;
using grouped::Params;
using grouped::Scaling;
using hopper::BoxedTensor;
using hopper::Input;

constexpr int kSharedLimit = 227 * 1024;

bool Aligned(const void* p) { return reinterpret_cast<std::uintptr_t>(p) % 16 == 0; }
bool IsInt(std::int64_t v) { return v > 0 && v < (std::int64_t{1} << 30); }

// Rows of K: [rows, k] of each group.
BoxedTensor KMajor(const void* data, DType dtype, std::int64_t k, std::int64_t rows,
                   std::int64_t groups, std::int64_t ld) {
  const bool bf16 = dtype == DType::kBF16;
  const std::uint64_t row = static_cast<std::uint64_t>(ld * DTypeBytes(dtype));
  return {.address = data,
          .type = bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_UINT8,
          .rank = 3,
          .size = {static_cast<std::uint64_t>(k), static_cast<std::uint64_t>(rows),
                   static_cast<std::uint64_t>(groups), 1},
          .stride = {row, row * static_cast<std::uint64_t>(rows), 0},
          .box = {bf16 ? 64u : 128u, 0, 1, 1}};
}
// BF16 [k, width] of each group, seen as chunks of 64 along the width.
BoxedTensor MnMajor(const void* data, std::int64_t k, std::int64_t width, std::int64_t groups,
                    std::int64_t ld) {
  const std::uint64_t row = static_cast<std::uint64_t>(ld * 2);
  return {.address = data,
          .type = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
          .rank = 4,
          .size = {64, static_cast<std::uint64_t>(k), static_cast<std::uint64_t>(width / 64),
                   static_cast<std::uint64_t>(groups)},
          .stride = {row, 128, row * static_cast<std::uint64_t>(k)},
          .box = {64, 64, 0, 1}};
}

// With the width of a tile along M or N as the box's.
BoxedTensor Boxed(BoxedTensor t, int width) {
  t.box[t.rank - 2] = static_cast<std::uint32_t>(t.rank == 3 ? width : width / 64);
  return t;
}

// C [planes, rows, n], a box of 64 rows by 128 bytes.
BoxedTensor Results(void* data, bool f32, std::int64_t n, std::int64_t rows, std::int64_t planes) {
  const std::uint64_t row = static_cast<std::uint64_t>(n * (f32 ? 4 : 2));
  return {.address = data,
          .type = f32 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
          .rank = 3,
          .size = {static_cast<std::uint64_t>(n), static_cast<std::uint64_t>(rows),
                   static_cast<std::uint64_t>(planes), 1},
          .stride = {row, row * static_cast<std::uint64_t>(rows), 0},
          .box = {f32 ? 32u : 64u, 64, 1, 1}};
}

template <class C>
bool Launch(const TileDevice& device, const BoxedTensor& a, const BoxedTensor& b,
            const BoxedTensor& c, const Params& params, std::int64_t most_row_tiles) {
  const std::int64_t most_tiles = most_row_tiles * CeilDiv(params.n, C::kTileN);
  CUtensorMap map_a, map_b, map_c;
  const int bytes = C::SharedBytes(params.groups);
  if (bytes > kSharedLimit || !hopper::EncodeMap(Boxed(a, grouped::kTileM), &map_a) ||
      !hopper::EncodeMap(Boxed(b, C::kTileN), &map_b) || !hopper::EncodeMap(c, &map_c)) {
    return false;
  }
  const auto kernel = grouped::grouped_tiles_kernel<C>;
  // The attribute belongs to the device; a process may use several.
  static std::atomic<std::uint64_t> prepared{0};
  int ordinal = 0;
  cudaGetDevice(&ordinal);
  const std::uint64_t bit = std::uint64_t{1} << (ordinal % 64);
  if ((prepared.load() & bit) == 0) {
    if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedLimit) !=
        cudaSuccess) {
      return false;
    }
    prepared.fetch_or(bit);
  }
  const std::int64_t grid =
      most_tiles < device.multiprocessors ? most_tiles : device.multiprocessors;
  kernel<<<static_cast<unsigned>(grid), grouped::kThreads, bytes, device.stream>>>(map_a, map_b,
                                                                                   map_c, params);
  return true;
}

bool TakesGroups(const RowGroups& groups) {
  return groups.count > 0 && groups.count <= grouped::kMaxGroups && IsInt(groups.padded_rows) &&
         groups.padded_rows % kRowAlign == 0;
}

bool TakesFp8(const QTensor& a, const QTensor& b) {
  return IsFp8(a.format) && b.format == DType::kE4M3 && Aligned(a.q) && Aligned(b.q) &&
         a.stride() % 16 == 0 && b.stride() % 16 == 0;
}

// Per tensor and expert on both sides.
bool PerTensor(const QTensor& a, const QTensor& b) {
  return a.tiling == Tiling::kTensor && b.tiling == Tiling::kTensor;
}
grouped::Scales TensorScales(const QTensor& q) { return {q.dequant_scale, 1, 0, 0}; }

template <Input kInput, Scaling kScaling, bool kMnB>
bool LaunchGemm(const TileDevice& device, const GroupedGemmArgs& args, const BoxedTensor& a,
                const BoxedTensor& b, const Params& params) {
  const std::int64_t row_tiles = args.groups.padded_rows / grouped::kTileM;
  const BoxedTensor c =
      Results(args.c, args.c_dtype == DType::kF32, args.n, args.groups.padded_rows, 1);
  if (args.c_dtype == DType::kF32) {
    return Launch<Config<kInput, kScaling, false, true, kMnB>>(device, a, b, c, params, row_tiles);
  }
  return Launch<Config<kInput, kScaling, false, false, kMnB>>(device, a, b, c, params, row_tiles);
}

template <Input kInput, Scaling kScaling>
bool LaunchWgrad(const TileDevice& device, const GroupedWgradArgs& args, const BoxedTensor& a,
                 const BoxedTensor& b, const Params& params) {
  const std::int64_t row_tiles = args.groups.count * CeilDiv(args.m, grouped::kTileM);
  const BoxedTensor c = Results(args.c, true, args.n, args.m, args.groups.count);
  return Launch<Config<kInput, kScaling, true, true, kInput == Input::kBF16>>(device, a, b, c,
                                                                              params, row_tiles);
}

}  // namespace

bool GroupedGemmTiles(const TileDevice& device, const GroupedGemmArgs& args) {
  const RowGroups& groups = args.groups;
  if (!TakesGroups(groups) || !IsInt(args.n) || !IsInt(args.k) || !Aligned(args.c) ||
      args.n * DTypeBytes(args.c_dtype) % 16 != 0) {
    return false;
  }
  Params params{.begin = groups.begin,
                .rows = groups.rows,
                .groups = groups.count,
                .m = 0,
                .n = static_cast<int>(args.n),
                .k = static_cast<int>(args.k),
                .padded_rows = groups.padded_rows,
                .a = {},
                .b = {},
                .accumulate = false};
  const QTensor &qa = args.a.quant, &qb = args.b.quant;
  if (qa.present() != qb.present()) {
    return false;
  }
  if (qa.present()) {
    if (!TakesFp8(qa, qb)) {
      return false;
    }
    const bool tensor = PerTensor(qa, qb);
    if (tensor) {
      params.a = TensorScales(qa);
      params.b = TensorScales(qb);
    } else if (qa.tiling == Tiling::kRow128 && qb.tiling == Tiling::kBlock128 &&
               args.n % kTile == 0) {
      params.a = {qa.dequant_scale, 0, qa.scale_row_stride, qa.scale_tile_stride};
      params.b = {qb.dequant_scale, args.n / kTile * qb.scale_row_stride, qb.scale_row_stride,
                  qb.scale_tile_stride};
    } else {
      return false;
    }
    const BoxedTensor a = KMajor(qa.q, qa.format, args.k, groups.padded_rows, 1, qa.stride());
    const BoxedTensor b = KMajor(qb.q, qb.format, args.k, args.n, groups.count, qb.stride());
    const bool fast = tensor && args.mode == Accumulate::kFast, e4m3 = qa.format == DType::kE4M3;
    if (e4m3) {
      return fast ? LaunchGemm<Input::kE4M3, Scaling::kNone, false>(device, args, a, b, params)
                  : LaunchGemm<Input::kE4M3, Scaling::kUniform, false>(device, args, a, b, params);
    }
    return fast ? LaunchGemm<Input::kE5M2ByE4M3, Scaling::kNone, false>(device, args, a, b, params)
                : LaunchGemm<Input::kE5M2ByE4M3, Scaling::kUniform, false>(device, args, a, b,
                                                                           params);
  }
  if (args.a.dtype != DType::kBF16 || args.b.dtype != DType::kBF16 || !args.a.k_contiguous ||
      !Aligned(args.a.data) || !Aligned(args.b.data)) {
    return false;
  }
  const std::int64_t lda = args.a.ld != 0 ? args.a.ld : args.k;
  const std::int64_t ldb = args.b.ld != 0 ? args.b.ld : (args.b.k_contiguous ? args.k : args.n);
  if (lda % 8 != 0 || ldb % 8 != 0 || (!args.b.k_contiguous && args.n % 64 != 0)) {
    return false;
  }
  const BoxedTensor a = KMajor(args.a.data, DType::kBF16, args.k, groups.padded_rows, 1, lda);
  if (args.b.k_contiguous) {
    return LaunchGemm<Input::kBF16, Scaling::kNone, false>(
        device, args, a, KMajor(args.b.data, DType::kBF16, args.k, args.n, groups.count, ldb),
        params);
  }
  return LaunchGemm<Input::kBF16, Scaling::kNone, true>(
      device, args, a, MnMajor(args.b.data, args.k, args.n, groups.count, ldb), params);
}

bool GroupedWgradTiles(const TileDevice& device, const GroupedWgradArgs& args) {
  const RowGroups& groups = args.groups;
  if (!TakesGroups(groups) || !IsInt(args.m) || !IsInt(args.n) || !Aligned(args.c) ||
      args.n % 4 != 0) {
    return false;
  }
  Params params{.begin = groups.begin,
                .rows = groups.rows,
                .groups = groups.count,
                .m = static_cast<int>(args.m),
                .n = static_cast<int>(args.n),
                .k = 0,
                .padded_rows = groups.padded_rows,
                .a = {},
                .b = {},
                .accumulate = args.accumulate};
  const QTensor &qa = args.a.quant, &qb = args.b.quant;
  if (qa.present() != qb.present()) {
    return false;
  }
  if (qa.present()) {
    if (!TakesFp8(qa, qb)) {
      return false;
    }
    const bool tensor = PerTensor(qa, qb);
    if (tensor) {
      params.a = TensorScales(qa);
      params.b = TensorScales(qb);
    } else if (qa.tiling == Tiling::kRow128 && qb.tiling == Tiling::kRow128) {
      params.a = {qa.dequant_scale, 0, qa.scale_row_stride, qa.scale_tile_stride};
      params.b = {qb.dequant_scale, 0, qb.scale_row_stride * (args.same_by_128 ? kTile : 1),
                  qb.scale_tile_stride};
    } else {
      return false;
    }
    const std::int64_t rows = groups.padded_rows;
    const BoxedTensor a = KMajor(qa.q, qa.format, rows, args.m, 1, qa.stride());
    const BoxedTensor b = KMajor(qb.q, qb.format, rows, args.n, 1, qb.stride());
    const bool fast = tensor && args.mode == Accumulate::kFast, e4m3 = qa.format == DType::kE4M3;
    if (!tensor && !args.same_by_128) {
      return e4m3 ? LaunchWgrad<Input::kE4M3, Scaling::kColumns>(device, args, a, b, params)
                  : LaunchWgrad<Input::kE5M2ByE4M3, Scaling::kColumns>(device, args, a, b, params);
    }
    if (fast) {
      return e4m3 ? LaunchWgrad<Input::kE4M3, Scaling::kNone>(device, args, a, b, params)
                  : LaunchWgrad<Input::kE5M2ByE4M3, Scaling::kNone>(device, args, a, b, params);
    }
    return e4m3 ? LaunchWgrad<Input::kE4M3, Scaling::kUniform>(device, args, a, b, params)
                : LaunchWgrad<Input::kE5M2ByE4M3, Scaling::kUniform>(device, args, a, b, params);
  }
  const std::int64_t lda = args.a.ld != 0 ? args.a.ld : args.m;
  const std::int64_t ldb = args.b.ld != 0 ? args.b.ld : args.n;
  if (args.a.dtype != DType::kBF16 || args.b.dtype != DType::kBF16 || args.m % 64 != 0 ||
      args.n % 64 != 0 || lda % 8 != 0 || ldb % 8 != 0 || !Aligned(args.a.data) ||
      !Aligned(args.b.data)) {
    return false;
  }
  return LaunchWgrad<Input::kBF16, Scaling::kNone>(
      device, args, MnMajor(args.a.data, groups.padded_rows, args.m, 1, lda),
      MnMajor(args.b.data, groups.padded_rows, args.n, 1, ldb), params);
}

}  // namespace octavo::cuda
