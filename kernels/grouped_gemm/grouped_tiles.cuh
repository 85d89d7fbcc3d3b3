// The grouped products of Hopper: one persistent kernel for fprop, dgrad and wgrad of all experts.
//
// A block of three warpgroups stays on its multiprocessor and walks tiles of 128×256 of C (128×128
// where B has a D for each column). One warp
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

#include "kernels/grouped_gemm/grouped_walk.cuh"

namespace octavo::cuda::grouped {

// Writes a warpgroup's 64 rows of results, acc as hopper::Product lays them out, from row m0 of the
// tensor's plane `z`.
template <class C>
__device__ __forceinline__ void StoreRows(const CUtensorMap* map, bool add, int n, int n0, int row,
                                          int z, const float (&acc)[C::kSums], std::uint8_t* slots,
                                          int barrier) {
  const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 % 4 * 16;
  const bool elected = threadIdx.x % 128 == 0;
#pragma unroll
  for (int step = 0; step < C::kSteps; ++step) {
    if (n0 + step * C::kStepBoxes * C::kBoxColumns >= n) {
      break;
    }
    std::uint8_t* boxes = slots + step * C::kStepBoxes % C::kSlots * C::kBoxBytes;
    // These slots' boxes of before have left: of the tile before, any (it may have been narrow).
    if (elected) {
      if (step == 0) {
        hopper::BulkWaitRead<0>();
      } else {
        hopper::BulkWaitRead<C::kSlots / C::kStepBoxes - 1>();
      }
    }
    hopper::NamedSync(barrier, 128);
#pragma unroll
    for (int i = 0; i < C::kStepBoxes; ++i) {
      const int first = (step * C::kStepBoxes + i) * C::kBoxColumns / 2;  // of acc
      const std::uint32_t box = hopper::SharedAddress(boxes + i * C::kBoxBytes);
      if constexpr (C::kF32) {
        // Odd rows go two blocks of eight columns ahead: with the swizzle, half a warp's rows then
        // lie in different banks.
        const std::uint32_t at = box + (warp_row + lane / 4) * kRowBytes + (lane & 1) * 8;
        const bool odd = (lane / 4 & 1) != 0;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float *v = &acc[first + 4 * j], *w = &acc[first + 4 * (j ^ 2)];
          const std::uint32_t chunk = 2 * (odd ? j ^ 2 : j) + lane % 4 / 2;
          const std::uint32_t to = at + (chunk ^ (lane / 4)) * 16;
          hopper::StoreShared(to, odd ? w[0] : v[0], odd ? w[1] : v[1]);
          hopper::StoreShared(to + 8 * kRowBytes, odd ? w[2] : v[2], odd ? w[3] : v[3]);
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
                                        const float2 (&columns)[16]) {
#pragma unroll
  for (int j = 0; j < 64; j += 4) {
    const float2 d = columns[j / 4];
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
  int* table = reinterpret_cast<int*>(shared + C::kTableAt);
  const int warp = __shfl_sync(kFullMask, threadIdx.x / 32, 0), lane = threadIdx.x % 32;

  if (threadIdx.x == 0) {
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
  FillTable<C>(p, table);

  Handed handed(tiles, tile_full, tile_empty);
  if (warp >= 8) {
    LowerRegisters<40>();
    if (warp == 8 && lane == 0) {
      // Hands out tiles.
      Walk<C> walk(p, table);
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
#pragma unroll 1
            for (int i = 0; i < C::kTileN / 32; ++i) {
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
    RaiseRegisters<232>();
    const int half = warp / 4;  // which 64 rows
    const int first_row = warp * 16;
    std::uint8_t* slots = shared + C::kStagingAt + half * C::kSlots * C::kBoxBytes;
    const std::uint64_t tile_a = TileDescriptor(shared + half * 64 * kRowBytes, 8192);
    const std::uint64_t tile_b = TileDescriptor(shared + C::kStageA, 8192);
    constexpr std::uint64_t kStepA = (C::kMnA ? 2048 : 32) >> 4,
                            kStepB = (C::kMnB ? 2048 : 32) >> 4;
    Ring<C::kStages> ring;
    float acc[C::kSums];
    // Barriers 1 and 2: the first and the second warpgroup's turn at the tensor cores. 3 and 4: a
    // warpgroup by itself.
    if (C::kScaled && half == 1) {
      NamedArrive(1, 256);
    }
    for (Tile t; handed.Next(&t);) {
      const int blocks = Blocks<C>(p, t);
#pragma unroll
      for (int i = 0; i < C::kSums; ++i) {
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
        const int halves = C::kTileN == 256 && t.n0 + 128 < p.n ? 2 : 1;
        for (int block = 0; block < blocks; ++block) {
          BarrierWait(&full[ring.stage], ring.phase);
          const std::uint64_t at = static_cast<std::uint64_t>(ring.stage) * (C::kStageBytes >> 4);
          const float* rows =
              reinterpret_cast<const float*>(scale_stages + ring.stage * C::kScaleBytes);
          const float* columns = rows + kTileM;
          float row0 = 0, row1 = 0, column[2] = {0, 0};
          float2 each[16];
#pragma unroll
          for (int h = 0; h < C::kTileN / 128; ++h) {
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
              if (h == 0) {
                row0 = rows[first_row + lane / 4];
                row1 = rows[first_row + lane / 4 + 8];
                if constexpr (C::kScaling == Scaling::kColumns) {
#pragma unroll
                  for (int j = 0; j < 16; ++j) {
                    each[j] = reinterpret_cast<const float2*>(columns)[4 * j + lane % 4];
                  }
                } else {
                  column[0] = columns[0];
                  column[1] = columns[1];
                }
              }
              ProductWait<0>();
              Pin(part);
              if (h == halves - 1) {
                __syncwarp();  // every lane has read its D of this stage
                if (lane == 0) {
                  BarrierArrive(&empty[ring.stage]);
                }
              }
              if constexpr (C::kScaling == Scaling::kColumns) {
                Promote(part, acc, row0, row1, each);
              } else {
                Promote(part, &acc[h * 64], row0, row1, column[h]);
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
      StoreRows<C>(&map_c, C::kWgrad && p.accumulate, p.n, t.n0,
                   (C::kWgrad ? t.m0 : t.row0) + half * 64, C::kWgrad ? t.group : 0, acc, slots,
                   3 + half);
    }
    BulkWaitAll();
  }
}

}  // namespace octavo::cuda::grouped
