// The grouped products of Hopper: one persistent kernel for fprop, dgrad and wgrad of all experts.
//
// A block of three warpgroups stays on its multiprocessor and walks tiles of 128×256 of C. One warp
// copies operand tiles (128 bytes of K a stage) with the copy engine; two warpgroups multiply 64
// rows each and hold their sums in registers. Group sizes are read on the device, so the host
// neither loops nor waits. Tiles of one group follow each other, 16 row tiles at a time for all
// columns, so that what one wave of blocks reads stays in L2.
//
// FP8 keeps about 14 bits while it adds in the tensor cores, so `promoted` sums are taken out every
// 128 of K and added in FP32 with the dequant_scales of that block: 128 columns at a time, 64
// registers, while the tensor cores work for the other warpgroup.
//
// Results leave through shared memory, each warp's 16 rows by themselves: rows are copied, or for
// gradients that accumulate added, by the copy engine while the next tile is computed.
#pragma once

#include "kernels/cuda/device.cuh"
#include "kernels/cuda/hopper.cuh"

namespace octavo::cuda::grouped {

inline constexpr int kMaxGroups = 512;
inline constexpr int kTileM = 128, kTileN = 256, kRowBytes = 128;
inline constexpr int kThreads = 384;
inline constexpr int kBand = 16;  // row tiles that are worked on together

enum class Scaling : std::uint8_t {
  kNone,     // plain sums; FP8: one D per group and operand, applied at the end
  kUniform,  // promoted; B's D is one for 128 columns
  kColumns,  // promoted; B's D is one per column
};

// D at base + group·group_stride + row·row_stride + block·tile_stride; rows of B are 128 columns of
// C (kUniform) or one (kColumns, row_stride 1).
struct Scales {
  const float* base;
  std::int64_t group_stride, row_stride, tile_stride;
};

struct Params {
  const std::int64_t* begin;
  const std::int64_t* rows;
  int groups;
  int m, n, k;  // m: of wgrad only; k: of fprop and dgrad only
  std::int64_t padded_rows;
  Scales a, b;
  void* c;  // [P, n] or [groups, m, n]
  bool accumulate;
};

template <hopper::Input kInputValue, Scaling kScalingValue, bool kWgradValue, bool kF32Value,
          bool kMnBValue, int kStagesValue>
struct Config {
  static constexpr hopper::Input kInput = kInputValue;
  static constexpr Scaling kScaling = kScalingValue;
  static constexpr bool kWgrad = kWgradValue;  // the contraction is over rows of a group
  static constexpr bool kF32 = kF32Value;
  static constexpr bool kBf16 = kInput == hopper::Input::kBF16;
  static constexpr bool kMnA = kBf16 && kWgrad, kMnB = kMnBValue;
  static constexpr int kStages = kStagesValue;
  static constexpr int kBlockK = kBf16 ? 64 : 128;  // elements of K a stage
  static constexpr int kStageA = kTileM * kRowBytes, kStageB = kTileN * kRowBytes;
  static constexpr int kStageBytes = kStageA + kStageB;
  static constexpr int kScaleBytes = kScaling == Scaling::kColumns ? kTileN * 4 : 0;
  // A row of results in shared memory: bytes of one round, and a pad that spreads rows over banks.
  static constexpr int kRoundBytes = kStages >= 4 ? 256 : 512;
  static constexpr int kPitch = kRoundBytes + (kF32 ? 32 : 16);
  static constexpr int kRoundColumns = kRoundBytes / (kF32 ? 4 : 2);
  static constexpr int kRounds = kTileN / kRoundColumns;
  static constexpr int kStaging = 8 * 16 * kPitch;
  static constexpr int kBarriersAt = kStages * (kStageBytes + kScaleBytes) + kStaging;
  static constexpr int kStartsAt = kBarriersAt + 2 * kStages * 8;
  static constexpr int SharedBytes(int groups) { return kStartsAt + (groups + 1) * 4; }
};

// One tile of work.
struct Tile {
  int group;
  int m0, n0;         // of C within the group (m0) and its columns
  std::int64_t row0;  // fprop: first row of the tile in the buffer; wgrad: first row of the group
  int real;           // fprop: real rows from row0 on; wgrad: rows of the group
};

// Walks the tiles of this block in order. starts[g]: row tiles of all groups before g.
template <class C>
class Walk {
 public:
  __device__ Walk(const Params& p, const int* starts)
      : p_(p), starts_(starts), tiles_n_((p.n + kTileN - 1) / kTileN), at_(blockIdx.x) {
    total_ = starts[p.groups] * tiles_n_;
  }
  __device__ bool Next(Tile* t) {
    if (at_ >= total_) {
      return false;
    }
    while (at_ >= starts_[group_ + 1] * tiles_n_) {
      ++group_;
    }
    const int first = starts_[group_], tiles_m = starts_[group_ + 1] - first;
    const int index = at_ - first * tiles_n_;
    const int band = index / (kBand * tiles_n_);
    const int height = min(kBand, tiles_m - band * kBand);
    const int rest = index - band * kBand * tiles_n_;
    t->group = group_;
    t->n0 = rest / height * kTileN;
    t->m0 = (band * kBand + rest % height) * kTileM;
    const std::int64_t begin = p_.begin[group_];
    const int rows = static_cast<int>(p_.rows[group_]);
    t->row0 = C::kWgrad ? begin : begin + t->m0;
    t->real = C::kWgrad ? rows : rows - t->m0;
    at_ += gridDim.x;
    return true;
  }

 private:
  const Params& p_;
  const int* starts_;
  int tiles_n_, at_, total_, group_ = 0;
};

// Stages of the ring in order.
template <int kStages>
struct Ring {
  int stage = 0;
  std::uint32_t phase = 0;
  __device__ void Step() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

template <class C>
__device__ __forceinline__ int Blocks(const Params& p, const Tile& t) {
  const int length = C::kWgrad ? t.real : p.k;
  return (length + C::kBlockK - 1) / C::kBlockK;
}

// Writes a warp's 16 rows of results, acc as hopper::Product lays them out.
template <class C>
__device__ __forceinline__ void StoreRows(const Params& p, const Tile& t, const float (&acc)[128],
                                          std::uint8_t* staging, int first_row, int lane) {
  constexpr int kElement = C::kF32 ? 4 : 2;
  const std::uint32_t base = hopper::SharedAddress(staging);
#pragma unroll
  for (int round = 0; round < C::kRounds; ++round) {
    const int column = t.n0 + round * C::kRoundColumns;
    if (column >= p.n) {
      break;
    }
    // The copies of the round before have left the staging rows.
    hopper::BulkWaitRead<0>();
    __syncwarp();
    constexpr int kEights = C::kRoundColumns / 8;
    if constexpr (C::kF32) {
      const std::uint32_t at = base + (lane / 4) * C::kPitch + (lane % 4) * 8;
#pragma unroll
      for (int j = 0; j < kEights; ++j) {
        const int r = (round * kEights + j) * 4;
        asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at + j * 32), "f"(acc[r]),
                     "f"(acc[r + 1])
                     : "memory");
        asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at + 8 * C::kPitch + j * 32),
                     "f"(acc[r + 2]), "f"(acc[r + 3])
                     : "memory");
      }
    } else {
      const std::uint32_t at =
          base + (lane % 16) * C::kPitch + (lane / 16) * 16;  // matrix l / 8, row l % 8
#pragma unroll
      for (int j = 0; j < kEights; j += 2) {
        const int r = (round * kEights + j) * 4;
        hopper::StoreMatrices(at + j * 16, PackBf16(acc[r], acc[r + 1]),
                              PackBf16(acc[r + 2], acc[r + 3]), PackBf16(acc[r + 4], acc[r + 5]),
                              PackBf16(acc[r + 6], acc[r + 7]));
      }
    }
    hopper::AsyncProxyFence();
    __syncwarp();
    const int row = first_row + lane;  // within the tile
    const bool wanted = C::kWgrad ? t.m0 + row < p.m : t.row0 + row < p.padded_rows;
    if (lane < 16 && wanted) {
      const std::int64_t c_row =
          C::kWgrad ? static_cast<std::int64_t>(t.group) * p.m + t.m0 + row : t.row0 + row;
      std::uint8_t* to = static_cast<std::uint8_t*>(p.c) + (c_row * p.n + column) * kElement;
      const std::uint32_t bytes = min(C::kRoundColumns, p.n - column) * kElement;
      const std::uint8_t* from = staging + lane * C::kPitch;
      if (C::kWgrad && p.accumulate) {
        hopper::AddFloats(to, from, bytes);
      } else {
        hopper::StoreBytes(to, from, bytes);
      }
    }
    hopper::BulkCommit();
  }
}

#ifndef OCTAVO_ORDERED
#define OCTAVO_ORDERED 0
#endif

template <class C>
__global__ void __launch_bounds__(kThreads, 1)
    grouped_tiles_kernel(const __grid_constant__ CUtensorMap map_a,
                         const __grid_constant__ CUtensorMap map_b,
                         const __grid_constant__ Params p) {
  using namespace hopper;
  extern __shared__ __align__(1024) std::uint8_t shared[];
  std::uint8_t* scale_stages = shared + C::kStages * C::kStageBytes;
  std::uint8_t* staging = scale_stages + C::kStages * C::kScaleBytes;
  std::uint64_t* full = reinterpret_cast<std::uint64_t*>(shared + C::kBarriersAt);
  std::uint64_t* empty = full + C::kStages;
  int* starts = reinterpret_cast<int*>(shared + C::kStartsAt);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  // Row tiles before each group: sizes first, then one warp sums.
  for (int g = threadIdx.x; g < p.groups; g += kThreads) {
    starts[g + 1] = C::kWgrad ? (p.m + kTileM - 1) / kTileM
                              : static_cast<int>((p.rows[g] + kTileM - 1) / kTileM);
  }
  if (threadIdx.x == 0) {
    starts[0] = 0;
    for (int s = 0; s < C::kStages; ++s) {
      BarrierInit(&full[s], 1);
      BarrierInit(&empty[s], 8);
    }
    BarrierInitFence();
    PrefetchMap(&map_a);
    PrefetchMap(&map_b);
  }
  __syncthreads();
  if (warp == 0) {
    int sum = 0;
    for (int base = 0; base < p.groups; base += 32) {
      const int g = base + lane;
      int v = g < p.groups ? starts[g + 1] : 0;
#pragma unroll
      for (int o = 1; o < 32; o *= 2) {
        const int below = __shfl_up_sync(kFullMask, v, o);
        v += lane >= o ? below : 0;
      }
      if (g < p.groups) {
        starts[g + 1] = sum + v;
      }
      sum += __shfl_sync(kFullMask, v, 31);
    }
  }
  __syncthreads();

  if (warp >= 8) {
    LowerRegisters<40>();
    if (warp == 8 && lane == 0) {
      Walk<C> walk(p, starts);
      Ring<C::kStages> ring;
      for (Tile t; walk.Next(&t);) {
        const int blocks = Blocks<C>(p, t);
        const int row0 = static_cast<int>(t.row0);
        // A whole number of 16 bytes: n is a multiple of 4.
        const std::uint32_t scale_bytes = C::kScaleBytes > 0 ? min(kTileN, p.n - t.n0) * 4 : 0;
        for (int block = 0; block < blocks; ++block) {
          BarrierWait(&empty[ring.stage], ring.phase ^ 1);
          std::uint64_t* barrier = &full[ring.stage];
          std::uint8_t* a = shared + ring.stage * C::kStageBytes;
          std::uint8_t* b = a + C::kStageA;
          BarrierExpect(barrier, C::kStageBytes + scale_bytes);
          const int k0 = block * C::kBlockK + (C::kWgrad ? row0 : 0);
          if constexpr (C::kMnA) {
            LoadBox(a, &map_a, barrier, 0, k0, t.m0 / 64, 0);
          } else {
            LoadBox(a, &map_a, barrier, k0, C::kWgrad ? t.m0 : row0, 0);
          }
          if constexpr (C::kMnB) {
            LoadBox(b, &map_b, barrier, 0, k0, t.n0 / 64, C::kWgrad ? 0 : t.group);
          } else {
            LoadBox(b, &map_b, barrier, k0, t.n0, C::kWgrad ? 0 : t.group);
          }
          if constexpr (C::kScaleBytes > 0) {
            LoadBytes(scale_stages + ring.stage * C::kScaleBytes,
                      p.b.base + (t.row0 / 128 + block) * p.b.tile_stride + t.n0, scale_bytes,
                      barrier);
          }
          ring.Step();
        }
      }
    }
  } else {
    RaiseRegisters<232>();
    const int half = warp / 4;  // which 64 rows
    const int first_row = warp * 16;
    std::uint8_t* my_staging = staging + warp * 16 * C::kPitch;
    const std::uint64_t tile_a = TileDescriptor(shared + half * 64 * kRowBytes, 8192);
    const std::uint64_t tile_b = TileDescriptor(shared + C::kStageA, 8192);
    constexpr std::uint64_t kStepA = (C::kMnA ? 2048 : 32) >> 4,
                            kStepB = (C::kMnB ? 2048 : 32) >> 4;
    Walk<C> walk(p, starts);
    Ring<C::kStages> ring;
    float acc[128];
    if (OCTAVO_ORDERED && half == 1) {
      NamedArrive(1, 256);
    }
    for (Tile t; walk.Next(&t);) {
      const int blocks = Blocks<C>(p, t);
      if (C::kWgrad && blocks == 0 && p.accumulate) {
        continue;
      }
#pragma unroll
      for (int i = 0; i < 128; ++i) {
        acc[i] = 0.0f;
      }
      if constexpr (C::kScaling == Scaling::kNone) {
        int last = 0;
        for (int block = 0; block < blocks; ++block) {
          BarrierWait(&full[ring.stage], ring.phase);
          const std::uint64_t at = static_cast<std::uint64_t>(ring.stage) * (C::kStageBytes >> 4);
          Pin(acc);
          ProductArrive();
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            Product<C::kInput, C::kMnA, C::kMnB>(acc, tile_a + at + i * kStepA,
                                                 tile_b + at + i * kStepB, 1);
          }
          ProductCommit();
          ProductWait<1>();
          if (block > 0 && lane == 0) {
            BarrierArrive(&empty[last]);
          }
          last = ring.stage;
          ring.Step();
        }
        ProductWait<0>();
        Pin(acc);
        if (blocks > 0 && lane == 0) {
          BarrierArrive(&empty[last]);
        }
        if constexpr (!C::kBf16) {
          const float factor =
              p.a.base[t.group * p.a.group_stride] * p.b.base[t.group * p.b.group_stride];
#pragma unroll
          for (int i = 0; i < 128; ++i) {
            acc[i] *= factor;
          }
        }
      } else {
        const int halves = t.n0 + 128 < p.n ? 2 : 1;
        const std::int64_t block0 = C::kWgrad ? t.row0 / 128 : 0;
        // D of the lane's two rows, and of the two halves of columns.
        const std::int64_t row = (C::kWgrad ? t.m0 : t.row0) + first_row + lane / 4;
        const std::int64_t end = C::kWgrad ? p.m : p.padded_rows;
        const float* scale_a = p.a.base + t.group * p.a.group_stride + block0 * p.a.tile_stride;
        const float* scale_a0 = scale_a + min(row, end - 1) * p.a.row_stride;
        const float* scale_a1 = scale_a + min(row + 8, end - 1) * p.a.row_stride;
        const float* scale_b = p.b.base + t.group * p.b.group_stride + t.n0 / 128 * p.b.row_stride;
        const std::int64_t second = halves > 1 ? p.b.row_stride : 0;
        float a0 = 0, a1 = 0, b[2] = {0, 0};
        const auto load = [&](int block) {
          a0 = __ldg(scale_a0 + block * p.a.tile_stride);
          a1 = __ldg(scale_a1 + block * p.a.tile_stride);
          if constexpr (C::kScaling == Scaling::kUniform) {
            b[0] = __ldg(scale_b + block * p.b.tile_stride);
            b[1] = __ldg(scale_b + second + block * p.b.tile_stride);
          }
        };
        if (blocks > 0) {
          load(0);
        }
        for (int block = 0; block < blocks; ++block) {
          const float row0 = a0, row1 = a1, column[2] = {b[0], b[1]};
          if (block + 1 < blocks) {
            load(block + 1);
          }
          BarrierWait(&full[ring.stage], ring.phase);
          const std::uint64_t at = static_cast<std::uint64_t>(ring.stage) * (C::kStageBytes >> 4);
          const float* columns =
              reinterpret_cast<const float*>(scale_stages + ring.stage * C::kScaleBytes);
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            if (h < halves) {
              float part[64];
              Pin(part);
              if (OCTAVO_ORDERED) {
                NamedSync(1 + half, 256);
              }
              ProductArrive();
#pragma unroll
              for (int i = 0; i < 4; ++i) {
                Product<C::kInput>(part, tile_a + at + i * kStepA,
                                   tile_b + at + h * (128 * kRowBytes >> 4) + i * kStepB, i > 0);
              }
              ProductCommit();
              if (OCTAVO_ORDERED) {
                NamedArrive(2 - half, 256);
              }
              float one = column[h];
              bool same = true;
              if constexpr (C::kScaling == Scaling::kColumns) {
                // A casting-free transpose leaves one D in 128 columns.
                one = columns[h * 128];
                const float4 mine = reinterpret_cast<const float4*>(columns)[h * 32 + lane];
                same = __all_sync(kFullMask,
                                  mine.x == one && mine.y == one && mine.z == one && mine.w == one);
              }
              const float f0 = row0 * one, f1 = row1 * one;
              ProductWait<0>();
              Pin(part);
              if (C::kScaling == Scaling::kUniform && h == halves - 1 && lane == 0) {
                BarrierArrive(&empty[ring.stage]);
              }
              if (C::kScaling == Scaling::kUniform || same) {
#pragma unroll
                for (int j = 0; j < 16; ++j) {
                  acc[h * 64 + 4 * j] = fmaf(part[4 * j], f0, acc[h * 64 + 4 * j]);
                  acc[h * 64 + 4 * j + 1] = fmaf(part[4 * j + 1], f0, acc[h * 64 + 4 * j + 1]);
                  acc[h * 64 + 4 * j + 2] = fmaf(part[4 * j + 2], f1, acc[h * 64 + 4 * j + 2]);
                  acc[h * 64 + 4 * j + 3] = fmaf(part[4 * j + 3], f1, acc[h * 64 + 4 * j + 3]);
                }
              } else {
#pragma unroll
                for (int j = 0; j < 16; ++j) {
                  const float2 d =
                      reinterpret_cast<const float2*>(columns)[h * 64 + 4 * j + lane % 4];
                  float* sum = &acc[h * 64 + 4 * j];
                  sum[0] = fmaf(part[4 * j] * row0, d.x, sum[0]);
                  sum[1] = fmaf(part[4 * j + 1] * row0, d.y, sum[1]);
                  sum[2] = fmaf(part[4 * j + 2] * row1, d.x, sum[2]);
                  sum[3] = fmaf(part[4 * j + 3] * row1, d.y, sum[3]);
                }
              }
              if (C::kScaling == Scaling::kColumns && h == halves - 1) {
                __syncwarp();
                if (lane == 0) {
                  BarrierArrive(&empty[ring.stage]);
                }
              }
            }
          }
          ring.Step();
        }
      }
      if constexpr (!C::kWgrad) {
        // Padding is zero whatever the operands hold.
        if (t.real < kTileM) {
          const bool keep0 = first_row + lane / 4 < t.real,
                     keep1 = first_row + lane / 4 + 8 < t.real;
#pragma unroll
          for (int j = 0; j < 32; ++j) {
            acc[4 * j] = keep0 ? acc[4 * j] : 0.0f;
            acc[4 * j + 1] = keep0 ? acc[4 * j + 1] : 0.0f;
            acc[4 * j + 2] = keep1 ? acc[4 * j + 2] : 0.0f;
            acc[4 * j + 3] = keep1 ? acc[4 * j + 3] : 0.0f;
          }
        }
      }
      StoreRows<C>(p, t, acc, my_staging, first_row, lane);
    }
    BulkWaitAll();
  }
}

}  // namespace octavo::cuda::grouped
