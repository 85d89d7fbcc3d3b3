// What Hopper (sm_90a) adds for matrix kernels, as thin wrappers of its instructions: mbarriers,
// the bulk tensor copy engine (TMA), warpgroup matrix products (wgmma), register budgets per
// warpgroup.
//
// Shared memory tiles are rows of 128 bytes in the copy engine's 128-byte swizzle, which is also
// what the matrix descriptors below say; a tile begins at a multiple of 1024 bytes.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace octavo::cuda::hopper {

__device__ __forceinline__ std::uint32_t SharedAddress(const void* p) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(p));
}

// ---------------------------------------------------------------- mbarriers

__device__ __forceinline__ void BarrierInit(std::uint64_t* barrier, std::uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(SharedAddress(barrier)),
               "r"(arrivals));
}
// Makes initialised barriers visible to the copy engine (and the cluster).
__device__ __forceinline__ void BarrierInitFence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void BarrierArrive(std::uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(SharedAddress(barrier)) : "memory");
}
// Arrives and announces so many bytes of asynchronous copies.
__device__ __forceinline__ void BarrierExpect(std::uint64_t* barrier, std::uint32_t bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(SharedAddress(barrier)),
      "r"(bytes)
      : "memory");
}
// Waits until the phase of this parity has completed.
__device__ __forceinline__ void BarrierWait(std::uint64_t* barrier, std::uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(SharedAddress(barrier)),
      "r"(parity)
      : "memory");
}

// ---------------------------------------------------------------- copies

// Boxes of a tensor map into shared memory, completing on `barrier`. Coordinates in elements,
// innermost first; what lies outside of the tensor arrives as zeros and counts as bytes too.
__device__ __forceinline__ void LoadBox(void* shared, const CUtensorMap* map,
                                        std::uint64_t* barrier, int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(SharedAddress(shared)),
      "l"(map), "r"(SharedAddress(barrier)), "r"(x), "r"(y), "r"(z)
      : "memory");
}
__device__ __forceinline__ void LoadBox(void* shared, const CUtensorMap* map,
                                        std::uint64_t* barrier, int x, int y, int z, int w) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(SharedAddress(shared)),
      "l"(map), "r"(SharedAddress(barrier)), "r"(x), "r"(y), "r"(z), "r"(w)
      : "memory");
}
// Four bytes into shared memory, and the thread's arrival at a barrier once its copies so far are
// there (the barrier counts one arrival for each such thread).
__device__ __forceinline__ void LoadFloat(std::uint32_t shared, const float* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared), "l"(global) : "memory");
}
__device__ __forceinline__ void BarrierArriveAfterLoads(std::uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(SharedAddress(barrier))
               : "memory");
}
// A box of shared memory into a tensor, or added to it in FP32, in the thread's current bulk group;
// what lies outside of the tensor is left out.
__device__ __forceinline__ void StoreBox(const CUtensorMap* map, const void* shared, int x, int y,
                                         int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
      "r"(SharedAddress(shared)), "r"(x), "r"(y), "r"(z)
      : "memory");
}
__device__ __forceinline__ void AddBox(const CUtensorMap* map, const void* shared, int x, int y,
                                       int z) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.bulk_group"
      " [%0, {%2, %3, %4}], [%1];" ::"l"(map),
      "r"(SharedAddress(shared)), "r"(x), "r"(y), "r"(z)
      : "memory");
}
__device__ __forceinline__ void BulkCommit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Until at most kLeft of the thread's groups have yet to read their shared memory.
template <int kLeft>
__device__ __forceinline__ void BulkWaitRead() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kLeft) : "memory");
}
__device__ __forceinline__ void BulkWaitAll() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
// Orders the thread's ordinary stores to shared memory before later reads by the copy engine.
__device__ __forceinline__ void AsyncProxyFence() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void PrefetchMap(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// ---------------------------------------------------------------- matrix products

// Operand tile of shared memory, 128-byte swizzle. K-major (rows of K): leading is unused, eight
// rows are 1024 bytes apart from the next eight. MN-major (rows of 64 BF16 along M or N): eight
// rows along K are 1024 bytes apart from the next eight, `leading` bytes separate chunks of 64
// along M or N.
__device__ __forceinline__ std::uint64_t TileDescriptor(const void* shared, std::uint32_t leading) {
  constexpr std::uint64_t kSwizzle128 = std::uint64_t{1} << 62;
  constexpr std::uint64_t kEightRows = std::uint64_t{1024 >> 4} << 32;
  return kSwizzle128 | kEightRows | (static_cast<std::uint64_t>(leading >> 4) << 16) |
         ((SharedAddress(shared) & 0x3FFFFu) >> 4);
}

__device__ __forceinline__ void ProductArrive() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void ProductCommit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kLeft>
__device__ __forceinline__ void ProductWait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLeft) : "memory");
}
// Keeps the compiler from moving uses of accumulators across a fence or a wait.
template <int kCount>
__device__ __forceinline__ void Pin(float (&r)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    asm volatile("" : "+f"(r[i])::"memory");
  }
}

template <int kRegisters>
__device__ __forceinline__ void RaiseRegisters() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void LowerRegisters() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
// Named barriers (1 to 15) of `threads` threads.
__device__ __forceinline__ void NamedSync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ __forceinline__ void NamedArrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

__device__ __forceinline__ void StoreShared(std::uint32_t address, float a, float b) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(a), "f"(b) : "memory");
}
// Four 8×8 matrices of 16-bit elements to shared memory; lane l gives the address of row l % 8 of
// matrix l / 8.
__device__ __forceinline__ void StoreMatrices(std::uint32_t address, std::uint32_t a,
                                              std::uint32_t b, std::uint32_t c, std::uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

enum class Input : std::uint8_t { kBF16, kE4M3, kE5M2ByE4M3 };

// clang-format off
#define OCTAVO_F4(r, i) "+f"(r[i]), "+f"(r[i + 1]), "+f"(r[i + 2]), "+f"(r[i + 3])
#define OCTAVO_F16(r, i) OCTAVO_F4(r, i), OCTAVO_F4(r, i + 4), OCTAVO_F4(r, i + 8), OCTAVO_F4(r, i + 12)
#define OCTAVO_F64(r, i) OCTAVO_F16(r, i), OCTAVO_F16(r, i + 16), OCTAVO_F16(r, i + 32), OCTAVO_F16(r, i + 48)
#define OCTAVO_REGISTERS_64 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define OCTAVO_REGISTERS_128 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, " \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, " \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
// clang-format on

#define OCTAVO_WGMMA_64(shape, types, tail)                                        \
  asm volatile(                                                                    \
      "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"                                 \
      "wgmma.mma_async.sync.aligned." shape ".f32." types " {" OCTAVO_REGISTERS_64 \
      "}, %64, %65, p, 1, 1" tail ";\n}\n"                                         \
      : OCTAVO_F64(d, 0)                                                           \
      : "l"(a), "l"(b), "r"(add))
#define OCTAVO_WGMMA_128(shape, types, tail)                                        \
  asm volatile(                                                                     \
      "{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"                                 \
      "wgmma.mma_async.sync.aligned." shape ".f32." types " {" OCTAVO_REGISTERS_128 \
      "}, %128, %129, p, 1, 1" tail ";\n}\n"                                        \
      : OCTAVO_F64(d, 0), OCTAVO_F64(d, 64)                                         \
      : "l"(a), "l"(b), "r"(add))

// d [64, 128] or [64, 256] (+)= A [64, 32 bytes of K] · B [128 or 256, 32 bytes of K]ᵀ by a
// warpgroup. Lane l of warp w holds, for columns 8j + 2(l % 4) + {0, 1}, row 16w + l / 4 in
// d[4j + {0, 1}] and the row 8 below in d[4j + {2, 3}]. kMnA, kMnB: BF16 operands that are
// MN-major.
template <Input kInput, bool kMnA = false, bool kMnB = false>
__device__ __forceinline__ void Product(float (&d)[64], std::uint64_t a, std::uint64_t b, int add) {
  static_assert(kInput != Input::kBF16 && !kMnA && !kMnB, "128 columns are for FP8");
  if constexpr (kInput == Input::kE4M3) {
    OCTAVO_WGMMA_64("m64n128k32", "e4m3.e4m3", "");
  } else {
    OCTAVO_WGMMA_64("m64n128k32", "e5m2.e4m3", "");
  }
}
template <Input kInput, bool kMnA = false, bool kMnB = false>
__device__ __forceinline__ void Product(float (&d)[128], std::uint64_t a, std::uint64_t b,
                                        int add) {
  if constexpr (kInput == Input::kE4M3) {
    OCTAVO_WGMMA_128("m64n256k32", "e4m3.e4m3", "");
  } else if constexpr (kInput == Input::kE5M2ByE4M3) {
    OCTAVO_WGMMA_128("m64n256k32", "e5m2.e4m3", "");
  } else if constexpr (kMnA && kMnB) {
    OCTAVO_WGMMA_128("m64n256k16", "bf16.bf16", ", 1, 1");
  } else if constexpr (kMnB) {
    OCTAVO_WGMMA_128("m64n256k16", "bf16.bf16", ", 0, 1");
  } else {
    static_assert(!kMnA, "no operation has this form");
    OCTAVO_WGMMA_128("m64n256k16", "bf16.bf16", ", 0, 0");
  }
}

#undef OCTAVO_WGMMA_64
#undef OCTAVO_WGMMA_128
#undef OCTAVO_REGISTERS_64
#undef OCTAVO_REGISTERS_128
#undef OCTAVO_F64
#undef OCTAVO_F16
#undef OCTAVO_F4

// ---------------------------------------------------------------- tensor maps (host)

// Describes a tensor of `rank` dimensions, innermost first, and the box a LoadBox of it moves, 128
// bytes wide inside, swizzled by 128 bytes. stride[i] is of dimension i + 1, in bytes. False: the
// driver refuses (an address or a stride that is no multiple of 16, say).
struct BoxedTensor {
  const void* address;
  CUtensorMapDataType type;
  unsigned rank;
  std::uint64_t size[4];
  std::uint64_t stride[3];
  std::uint32_t box[4];
};
inline bool EncodeMap(const BoxedTensor& t, CUtensorMap* map) {
  using Encode =
      CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                   const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                   CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
  // Through the runtime, so that nothing links the driver's library.
  static const Encode encode = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found{};
    const cudaError_t status = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry,
                                                                12000, cudaEnableDefault, &found);
    return reinterpret_cast<Encode>(
        status == cudaSuccess && found == cudaDriverEntryPointSuccess ? entry : nullptr);
  }();
  if (encode == nullptr) {
    return false;
  }
  const cuuint32_t step[4] = {1, 1, 1, 1};
  cuuint64_t size[4], stride[3];
  for (unsigned i = 0; i < t.rank; ++i) {
    size[i] = t.size[i];
    if (i + 1 < t.rank) {
      stride[i] = t.stride[i];
    }
  }
  return encode(map, t.type, t.rank, const_cast<void*>(t.address), size, stride, t.box, step,
                CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace octavo::cuda::hopper
