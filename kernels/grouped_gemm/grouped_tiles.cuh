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
// The two warpgroups take turns at the tensor cores: while one adds up, the other's products run.
//
// Results leave through shared memory: the copy engine writes them, or adds them to gradients,
// while the next tile is computed. A spare warp works out which tile comes next, another one
// fetches dequant_scales, so that the multiplying warps never wait for an address.
#pragma once

#include "kernels/cuda/device.cuh"
#include "kernels/cuda/hopper.cuh"

namespace octavo::cuda::grouped {

inline constexpr int kMaxGroups = 512;
inline constexpr int kTileM = 128, kTileN = 256, kRowBytes = 128;
inline constexpr int kThreads = 384;
inline constexpr int kBand = 16;  // row tiles that are worked on together
inline constexpr int kAhead = 4;  // tiles handed out ahead

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

// One tile of work, as the scheduling warp hands it out.
struct __align__(16) Tile {
  int group;   // -1: no more
  int m0, n0;  // of C within the group (m0) and its columns
  int row0;    // fprop: first row of the tile in the buffer; wgrad: first row of the group
  int real;    // fprop: real rows from row0 on; wgrad: rows of the group
  int unused[3];
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
  // D of a stage: one for each row of A, then one for each column of B or for each 128 of them.
  static constexpr bool kScaled = kScaling != Scaling::kNone;
  static constexpr int kScaleBytes =
      !kScaled ? 0 : kTileM * 4 + (kScaling == Scaling::kColumns ? kTileN * 4 : 16);
  // Results pass through boxes of 64 rows by 128 bytes; a warpgroup has room for kSlots and writes
  // kStepBoxes between two barriers.
  static constexpr int kBoxBytes = 64 * kRowBytes, kSlots = 4;
  static constexpr int kBoxColumns = kRowBytes / (kF32 ? 4 : 2);
  static constexpr int kStepBoxes = kF32 ? 2 : 4, kSteps = kTileN / kBoxColumns / kStepBoxes;
  static constexpr int kStagingAt = kStages * kStageBytes;
  static constexpr int kScalesAt = kStagingAt + 2 * kSlots * kBoxBytes;
  static constexpr int kTilesAt = kScalesAt + kStages * kScaleBytes;
  static constexpr int kBarriersAt = kTilesAt + kAhead * static_cast<int>(sizeof(Tile));
  static constexpr int kStartsAt = kBarriersAt + 2 * (kStages + kAhead) * 8;
  static constexpr int SharedBytes(int groups) { return kStartsAt + (groups + 1) * 4; }
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
    const int begin = static_cast<int>(p_.begin[group_]);
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

// The tiles handed out, from the side of a warp that takes them.
class Handed {
 public:
  __device__ Handed(const Tile* tiles, std::uint64_t* full, std::uint64_t* empty)
      : tiles_(tiles), full_(full), empty_(empty) {}
  // Called by the whole warp, or by one thread that stands for it (alone).
  __device__ __forceinline__ bool Next(Tile* t, bool alone = false) {
    hopper::BarrierWait(&full_[ring_.stage], ring_.phase);
    *t = tiles_[ring_.stage];
    if (!alone) {
      __syncwarp();
    }
    if (alone || threadIdx.x % 32 == 0) {
      hopper::BarrierArrive(&empty_[ring_.stage]);
    }
    ring_.Step();
    return t->group >= 0;
  }

 private:
  const Tile* tiles_;
  std::uint64_t *full_, *empty_;
  Ring<kAhead> ring_;
};

template <class C>
__device__ __forceinline__ int Blocks(const Params& p, const Tile& t) {
  const int length = C::kWgrad ? t.real : p.k;
  return (length + C::kBlockK - 1) / C::kBlockK;
}

// Writes a warpgroup's 64 rows of results, acc as hopper::Product lays them out, from row m0 of the
// tensor's plane `z`.
template <class C>
__device__ __forceinline__ void StoreRows(const CUtensorMap* map, bool add, int n, int n0, int row,
                                          int z, const float (&acc)[128], std::uint8_t* slots,
                                          int barrier) {
  const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 % 4 * 16;
  const bool elected = threadIdx.x % 128 == 0;
#pragma unroll
  for (int step = 0; step < C::kSteps; ++step) {
    if (n0 + step * C::kStepBoxes * C::kBoxColumns >= n) {
      break;
    }
    std::uint8_t* boxes = slots + step * C::kStepBoxes % C::kSlots * C::kBoxBytes;
    // These slots' boxes of before have left.
    if (elected) {
      hopper::BulkWaitRead<C::kSlots / C::kStepBoxes - 1>();
    }
    hopper::NamedSync(barrier, 128);
#pragma unroll
    for (int i = 0; i < C::kStepBoxes; ++i) {
      const int first = (step * C::kStepBoxes + i) * C::kBoxColumns / 2;  // of acc
      const std::uint32_t box = hopper::SharedAddress(boxes + i * C::kBoxBytes);
      if constexpr (C::kF32) {
        const std::uint32_t at = box + (warp_row + lane / 4) * kRowBytes + (lane & 1) * 8;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const std::uint32_t to = at + ((2 * j + (lane % 4) / 2) ^ (lane / 4)) * 16;
          hopper::StoreShared(to, acc[first + 4 * j], acc[first + 4 * j + 1]);
          hopper::StoreShared(to + 8 * kRowBytes, acc[first + 4 * j + 2], acc[first + 4 * j + 3]);
        }
      } else {
        const std::uint32_t at = box + (warp_row + lane % 16) * kRowBytes;
#pragma unroll
        for (int j = 0; j < 8; j += 2) {
          const float* v = &acc[first + 4 * j];
          hopper::StoreMatrices(at + ((j + lane / 16) ^ (lane % 8)) * 16, PackBf16(v[0], v[1]),
                                PackBf16(v[2], v[3]), PackBf16(v[4], v[5]), PackBf16(v[6], v[7]));
        }
      }
    }
    hopper::AsyncProxyFence();
    hopper::NamedSync(barrier, 128);
    if (elected) {
#pragma unroll
      for (int i = 0; i < C::kStepBoxes; ++i) {
        const int column = n0 + (step * C::kStepBoxes + i) * C::kBoxColumns;
        if (column < n) {
          if (add) {
            hopper::AddBox(map, boxes + i * C::kBoxBytes, column, row, z);
          } else {
            hopper::StoreBox(map, boxes + i * C::kBoxBytes, column, row, z);
          }
        }
      }
      hopper::BulkCommit();
    }
  }
}

// Adds products of 128 columns, scaled, to the sums. column: B's D for all of them; columns: one
// each.
__device__ __forceinline__ void Promote(const float (&part)[64], float* acc, float row0, float row1,
                                        float column) {
  const float f0 = row0 * column, f1 = row1 * column;
#pragma unroll
  for (int j = 0; j < 64; j += 4) {
    acc[j] = fmaf(part[j], f0, acc[j]);
    acc[j + 1] = fmaf(part[j + 1], f0, acc[j + 1]);
    acc[j + 2] = fmaf(part[j + 2], f1, acc[j + 2]);
    acc[j + 3] = fmaf(part[j + 3], f1, acc[j + 3]);
  }
}
__device__ __forceinline__ void Promote(const float (&part)[64], float* acc, float row0, float row1,
                                        const float* columns, int lane) {
#pragma unroll
  for (int j = 0; j < 64; j += 4) {
    const float2 d = reinterpret_cast<const float2*>(columns)[j + lane % 4];
    acc[j] = fmaf(part[j] * row0, d.x, acc[j]);
    acc[j + 1] = fmaf(part[j + 1] * row0, d.y, acc[j + 1]);
    acc[j + 2] = fmaf(part[j + 2] * row1, d.x, acc[j + 2]);
    acc[j + 3] = fmaf(part[j + 3] * row1, d.y, acc[j + 3]);
  }
}

template <class C>
__global__ void __launch_bounds__(kThreads, 1)
    grouped_tiles_kernel(const __grid_constant__ CUtensorMap map_a,
                         const __grid_constant__ CUtensorMap map_b,
                         const __grid_constant__ CUtensorMap map_c,
                         const __grid_constant__ Params p) {
  using namespace hopper;
  extern __shared__ __align__(1024) std::uint8_t shared[];
  std::uint8_t* scale_stages = shared + C::kScalesAt;
  Tile* tiles = reinterpret_cast<Tile*>(shared + C::kTilesAt);
  std::uint64_t* full = reinterpret_cast<std::uint64_t*>(shared + C::kBarriersAt);
  std::uint64_t* empty = full + C::kStages;
  std::uint64_t* tile_full = empty + C::kStages;
  std::uint64_t* tile_empty = tile_full + kAhead;
  int* starts = reinterpret_cast<int*>(shared + C::kStartsAt);
  const int warp = __shfl_sync(kFullMask, threadIdx.x / 32, 0), lane = threadIdx.x % 32;

  // Row tiles before each group: sizes first, then one warp sums.
  for (int g = threadIdx.x; g < p.groups; g += kThreads) {
    starts[g + 1] = C::kWgrad ? (p.m + kTileM - 1) / kTileM
                              : static_cast<int>((p.rows[g] + kTileM - 1) / kTileM);
  }
  if (threadIdx.x == 0) {
    starts[0] = 0;
    for (int s = 0; s < C::kStages; ++s) {
      BarrierInit(&full[s], C::kScaled ? 33 : 1);
      BarrierInit(&empty[s], 8);
    }
    for (int s = 0; s < kAhead; ++s) {
      BarrierInit(&tile_full[s], 1);
      BarrierInit(&tile_empty[s], C::kScaled ? 10 : 9);
    }
    BarrierInitFence();
    PrefetchMap(&map_a);
    PrefetchMap(&map_b);
    PrefetchMap(&map_c);
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

  Handed handed(tiles, tile_full, tile_empty);
  if (warp >= 8) {
    LowerRegisters<56>();
    if (warp == 8 && lane == 0) {
      // Hands out tiles.
      Walk<C> walk(p, starts);
      Ring<kAhead> ring;
      Tile t{};
      for (bool more = true; more;) {
        more = walk.Next(&t);
        if (!more) {
          t.group = -1;
        } else if (C::kWgrad && t.real == 0 && p.accumulate) {
          continue;
        }
        BarrierWait(&tile_empty[ring.stage], ring.phase ^ 1);
        tiles[ring.stage] = t;
        BarrierArrive(&tile_full[ring.stage]);
        ring.Step();
      }
    } else if (warp == 9 && lane == 0) {
      // Copies operands.
      Ring<C::kStages> ring;
      for (Tile t; handed.Next(&t, true);) {
        const int blocks = Blocks<C>(p, t);
#pragma unroll 1
        for (int block = 0; block < blocks; ++block) {
          BarrierWait(&empty[ring.stage], ring.phase ^ 1);
          std::uint64_t* barrier = &full[ring.stage];
          std::uint8_t* a = shared + ring.stage * C::kStageBytes;
          std::uint8_t* b = a + C::kStageA;
          BarrierExpect(barrier, C::kStageBytes);
          const int k0 = block * C::kBlockK + (C::kWgrad ? t.row0 : 0);
          if constexpr (C::kMnA) {
            LoadBox(a, &map_a, barrier, 0, k0, t.m0 / 64, 0);
          } else {
            LoadBox(a, &map_a, barrier, k0, C::kWgrad ? t.m0 : t.row0, 0);
          }
          if constexpr (C::kMnB) {
            LoadBox(b, &map_b, barrier, 0, k0, t.n0 / 64, C::kWgrad ? 0 : t.group);
          } else {
            LoadBox(b, &map_b, barrier, k0, t.n0, C::kWgrad ? 0 : t.group);
          }
          ring.Step();
        }
      }
    } else if (C::kScaled && warp == 10) {
      // Copies D.
      Ring<C::kStages> ring;
      for (Tile t; handed.Next(&t);) {
        const int blocks = Blocks<C>(p, t);
        const std::int64_t block0 = C::kWgrad ? t.row0 / 128 : 0;
        const std::int64_t row0 = C::kWgrad ? t.m0 : t.row0;
        const std::int64_t last_row = (C::kWgrad ? p.m : p.padded_rows) - 1;
        const float* a = p.a.base + t.group * p.a.group_stride + block0 * p.a.tile_stride;
        const float* b = p.b.base + t.group * p.b.group_stride + block0 * p.b.tile_stride;
#pragma unroll 1
        for (int block = 0; block < blocks; ++block) {
          BarrierWait(&empty[ring.stage], ring.phase ^ 1);
          const std::uint32_t to =
              SharedAddress(scale_stages + ring.stage * C::kScaleBytes) + lane * 4;
#pragma unroll
          for (int i = 0; i < kTileM / 32; ++i) {
            LoadFloat(to + i * 128, a + min(row0 + lane + i * 32, last_row) * p.a.row_stride);
          }
          if constexpr (C::kScaling == Scaling::kColumns) {
#pragma unroll
            for (int i = 0; i < kTileN / 32; ++i) {
              LoadFloat(to + kTileM * 4 + i * 128,
                        b + min(t.n0 + lane + i * 32, p.n - 1) * p.b.row_stride);
            }
          } else if (lane < 2) {
            LoadFloat(to + kTileM * 4, b + min(t.n0 + lane * 128, p.n - 1) / 128 * p.b.row_stride);
          }
          BarrierArriveAfterLoads(&full[ring.stage]);
          a += p.a.tile_stride;
          b += p.b.tile_stride;
          ring.Step();
        }
      }
    }
  } else {
    RaiseRegisters<224>();
    const int half = warp / 4;  // which 64 rows
    const int first_row = warp * 16;
    std::uint8_t* slots = shared + C::kStagingAt + half * C::kSlots * C::kBoxBytes;
    const std::uint64_t tile_a = TileDescriptor(shared + half * 64 * kRowBytes, 8192);
    const std::uint64_t tile_b = TileDescriptor(shared + C::kStageA, 8192);
    constexpr std::uint64_t kStepA = (C::kMnA ? 2048 : 32) >> 4,
                            kStepB = (C::kMnB ? 2048 : 32) >> 4;
    Ring<C::kStages> ring;
    float acc[128];
    // Barriers 1 and 2: the first and the second warpgroup's turn at the tensor cores. 3 and 4: a
    // warpgroup by itself.
    if (C::kScaled && half == 1) {
      NamedArrive(1, 256);
    }
    for (Tile t; handed.Next(&t);) {
      const int blocks = Blocks<C>(p, t);
#pragma unroll
      for (int i = 0; i < 128; ++i) {
        acc[i] = 0.0f;
      }
      if constexpr (!C::kScaled) {
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
        for (int block = 0; block < blocks; ++block) {
          BarrierWait(&full[ring.stage], ring.phase);
          const std::uint64_t at = static_cast<std::uint64_t>(ring.stage) * (C::kStageBytes >> 4);
          const float* rows =
              reinterpret_cast<const float*>(scale_stages + ring.stage * C::kScaleBytes);
          const float* columns = rows + kTileM;
          const float row0 = rows[first_row + lane / 4], row1 = rows[first_row + lane / 4 + 8];
          // B's D for a piece of columns, and whether it is one for all of them: a casting-free
          // transpose leaves one D in 128 columns.
          bool same[2];
          float column[2];
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            same[h] = true;
            if constexpr (C::kScaling == Scaling::kColumns) {
              const float4 mine = reinterpret_cast<const float4*>(columns)[h * 32 + lane];
              column[h] = __shfl_sync(kFullMask, mine.x, 0);
              same[h] = __all_sync(kFullMask, mine.x == column[h] && mine.y == column[h] &&
                                                  mine.z == column[h] && mine.w == column[h]);
            } else {
              column[h] = columns[h];
            }
          }
          const auto promote = [&](const float(&part)[64], int h) {
            if (C::kScaling == Scaling::kUniform || same[h]) {
              Promote(part, &acc[h * 64], row0, row1, column[h]);
            } else {
              Promote(part, &acc[h * 64], row0, row1, columns + h * 128, lane);
            }
          };
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            if (h < halves) {
              float part[64];
              Pin(part);
              NamedSync(1 + half, 256);
              ProductArrive();
#pragma unroll
              for (int i = 0; i < 4; ++i) {
                Product<C::kInput>(part, tile_a + at + i * kStepA,
                                   tile_b + at + h * (128 * kRowBytes >> 4) + i * kStepB, i > 0);
              }
              ProductCommit();
              NamedArrive(2 - half, 256);
              ProductWait<0>();
              Pin(part);
              if (C::kScaling == Scaling::kUniform && h == halves - 1 && lane == 0) {
                BarrierArrive(&empty[ring.stage]);
              }
              promote(part, h);
            }
          }
          if (C::kScaling == Scaling::kColumns) {
            __syncwarp();
            if (lane == 0) {
              BarrierArrive(&empty[ring.stage]);
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
      StoreRows<C>(&map_c, C::kWgrad && p.accumulate, p.n, t.n0,
                   (C::kWgrad ? t.m0 : t.row0) + half * 64, C::kWgrad ? t.group : 0, acc, slots,
                   3 + half);
    }
    BulkWaitAll();
  }
}

}  // namespace octavo::cuda::grouped
