// What the grouped kernel works on: its forms, its parameters, and the tiles of C in the order in
// which a block takes them.
#pragma once

#include "kernels/cuda/device.cuh"
#include "kernels/cuda/hopper.cuh"

namespace octavo::cuda::grouped {

inline constexpr int kMaxGroups = 512;
inline constexpr int kTileM = 128, kRowBytes = 128;
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
          bool kMnBValue>
struct Config {
  static constexpr hopper::Input kInput = kInputValue;
  static constexpr Scaling kScaling = kScalingValue;
  static constexpr bool kWgrad = kWgradValue;  // the contraction is over rows of a group
  static constexpr bool kF32 = kF32Value;
  static constexpr bool kBf16 = kInput == hopper::Input::kBF16;
  static constexpr bool kMnA = kBf16 && kWgrad, kMnB = kMnBValue;
  // One D a column takes 32 registers more for 128 columns, so those tiles are half as wide.
  static constexpr int kTileN = kScaling == Scaling::kColumns ? 128 : 256;
  static constexpr int kSums = kTileN / 2;  // registers of a thread
  static constexpr int kStages = kTileN == 128 ? 4 : 3;
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
  static constexpr int kTableAt = kBarriersAt + 2 * (kStages + kAhead) * 8;
  static constexpr int SharedBytes(int groups) { return kTableAt + (groups + 1) * 4; }
};

// Walks the tiles of this block in order. table, fprop and dgrad: row tiles of all groups before
// each one, and their number; wgrad: the groups, those with most rows first, so that blocks end
// together.
template <class C>
class Walk {
 public:
  __device__ Walk(const Params& p, const int* table)
      : p_(p), table_(table), tiles_n_((p.n + C::kTileN - 1) / C::kTileN), at_(blockIdx.x) {
    if constexpr (C::kWgrad) {
      tiles_m_ = (p.m + kTileM - 1) / kTileM;
      total_ = p.groups * tiles_m_ * tiles_n_;
    } else {
      total_ = table[p.groups] * tiles_n_;
    }
  }
  __device__ bool Next(Tile* t) {
    if (at_ >= total_) {
      return false;
    }
    int index = at_;
    if constexpr (C::kWgrad) {
      const int slot = index / (tiles_m_ * tiles_n_);
      index -= slot * tiles_m_ * tiles_n_;
      group_ = table_[slot];
    } else {
      while (at_ >= table_[group_ + 1] * tiles_n_) {
        ++group_;
      }
      index -= table_[group_] * tiles_n_;
      tiles_m_ = table_[group_ + 1] - table_[group_];
    }
    const int band = index / (kBand * tiles_n_);
    const int height = min(kBand, tiles_m_ - band * kBand);
    const int rest = index - band * kBand * tiles_n_;
    t->group = group_;
    t->n0 = rest / height * C::kTileN;
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
  const int* table_;
  int tiles_n_, at_, total_, tiles_m_ = 0, group_ = 0;
};

// Fills the walk's table; by all threads, which may use it afterwards.
template <class C>
__device__ __forceinline__ void FillTable(const Params& p, int* table) {
  const int lane = threadIdx.x % 32;
  for (int g = threadIdx.x; g < p.groups; g += kThreads) {
    table[g + 1] = static_cast<int>(C::kWgrad ? p.rows[g] : (p.rows[g] + kTileM - 1) / kTileM);
  }
  __syncthreads();
  if constexpr (C::kWgrad) {
    int rank[(kMaxGroups + kThreads - 1) / kThreads];
#pragma unroll
    for (int i = 0; i * kThreads < kMaxGroups; ++i) {
      const int g = threadIdx.x + i * kThreads, mine = g < p.groups ? table[g + 1] : 0;
      rank[i] = 0;
      for (int other = 0; g < p.groups && other < p.groups; ++other) {
        const int rows = table[other + 1];
        rank[i] += rows > mine || (rows == mine && other < g) ? 1 : 0;
      }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i * kThreads < kMaxGroups; ++i) {
      const int g = threadIdx.x + i * kThreads;
      if (g < p.groups) {
        table[rank[i]] = g;
      }
    }
  } else if (threadIdx.x < 32) {
    int sum = 0;
    for (int base = 0; base < p.groups; base += 32) {
      const int g = base + lane;
      int v = g < p.groups ? table[g + 1] : 0;
#pragma unroll
      for (int o = 1; o < 32; o *= 2) {
        const int below = __shfl_up_sync(kFullMask, v, o);
        v += lane >= o ? below : 0;
      }
      if (g < p.groups) {
        table[g + 1] = sum + v;
      }
      sum += __shfl_sync(kFullMask, v, 31);
    }
    table[0] = 0;
  }
  __syncthreads();
}

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

}  // namespace octavo::cuda::grouped
