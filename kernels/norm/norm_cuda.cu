// RMSNorm on the GPU.
//
// Forward: 32, 128 or 256 threads a row, which stays in registers between the sum of squares and
// the product. y is computed from the rounded h, as stored. Backward: a persistent grid; each block
// walks over rows and keeps its share of dw in registers, columns split over the threads; partial
// dw [blocks, cols] are added in block order. Narrow rows go to warps, which need no barrier and
// load a row while they work on another; the adding kernel is launched while the rows still run and
// waits for them on the device (programmatic dependent launch), which hides its start.
#include "base/check.h"
#include "kernels/cuda/context.h"
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/ops_cuda.h"

namespace octavo::cuda {
namespace {

template <class T>
__device__ __forceinline__ void RoundTo(float v[8]) {
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    v[j] = ToFloat(FromFloat<T>(v[j]));
  }
}

// Threads of a row (kThreads) each hold up to kVectors vectors of 8 columns.
template <class T, int kThreads, int kVectors>
__global__ void __launch_bounds__(256) rms_norm_forward_kernel(RmsNormForwardArgs a) {
  __shared__ float part[8];
  constexpr int kRows = 256 / kThreads;
  const int t = threadIdx.x % kThreads;
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * kRows + threadIdx.x / kThreads;
  const bool on = row < a.rows;
  const T* x = static_cast<const T*>(a.x) + row * a.ld_x;
  const T* residual = static_cast<const T*>(a.residual) + row * a.cols;
  constexpr bool kKeepWeights = kVectors <= 2;  // loaded with the row, if there is room
  float h[kVectors][8], weights[kKeepWeights ? kVectors : 1][8];
  float sum = 0;
  Raw8<T> raw[kVectors], raw_r[kVectors];
#pragma unroll
  for (int u = 0; u < kVectors; ++u) {
    const std::int64_t col = (t + u * kThreads) * 8;
    ZeroRaw(raw[u]);
    ZeroRaw(raw_r[u]);
    if (on && col < a.cols) {
      LoadRawPlain(x + col, raw[u]);
      if (a.residual != nullptr) {
        LoadRawPlain(residual + col, raw_r[u]);
      }
      if constexpr (kKeepWeights) {
        Load8Plain(a.w + col, weights[u]);
      }
    }
  }
#pragma unroll
  for (int u = 0; u < kVectors; ++u) {
    const std::int64_t col = (t + u * kThreads) * 8;
    Unpack(raw[u], h[u]);
    if (a.residual != nullptr) {
      float r[8];
      Unpack(raw_r[u], r);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        h[u][j] += r[j];
      }
      RoundTo<T>(h[u]);
    }
    if (on && a.residual_out != nullptr && col < a.cols) {
      Store8(static_cast<T*>(a.residual_out) + row * a.cols + col, h[u]);
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      sum += h[u][j] * h[u][j];
    }
  }
  sum = WarpSum(sum);
  if (kThreads > 32) {
    if ((threadIdx.x & 31) == 0) {
      part[threadIdx.x >> 5] = sum;
    }
    __syncthreads();
    sum = 0;
    constexpr int kWarps = kThreads / 32;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      sum += part[threadIdx.x / kThreads * kWarps + w];
    }
  }
  if (!on) {
    return;
  }
  const float rstd = 1.0f / sqrtf(sum / static_cast<float>(a.cols) + a.eps);
  if (t == 0) {
    a.rstd[row] = rstd;
  }
#pragma unroll
  for (int u = 0; u < kVectors; ++u) {
    const std::int64_t col = (t + u * kThreads) * 8;
    if (col < a.cols) {
      float w_read[8], y[8];
      const float* w = weights[kKeepWeights ? u : 0];
      if constexpr (!kKeepWeights) {
        Load8Plain(a.w + col, w_read);
        w = w_read;
      }
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        y[j] = h[u][j] * rstd * w[j];
      }
      Store8(static_cast<T*>(a.y) + row * a.ld_y + col, y);
    }
  }
}

// Blocks of the backward grid: about as many as are resident on the reference card, and a divisor
// of the usual numbers of rows, so that none has a row more than the others. Also the rows of the
// workspace.
constexpr int BackwardBlocks(std::int64_t cols) {
  return cols <= 1024 ? 256 : cols <= 2048 ? 512 : 264;
}

// The add kernel may start: it waits for the end of this grid all the same.
__device__ __forceinline__ void LetNextStart() { cudaTriggerProgrammaticLaunchCompletion(); }

inline constexpr int kNarrowWarps = 8;

// Rows on their way into a warp's part of shared memory (two in BF16), and the bytes of one.
template <class T>
inline constexpr int kNarrowStages = sizeof(T) == 2 ? 2 : 1;
template <class T, int kVectors>
inline constexpr int kNarrowRowBytes = 3 * kVectors * 256 * static_cast<int>(sizeof(T));
template <class T, int kVectors>
inline constexpr int kNarrowSharedBytes =
    kNarrowWarps* kNarrowStages<T>* kNarrowRowBytes<T, kVectors>;

// A warp a row, kVectors vectors of 8 columns a lane; h, dy and d_residual of the next row arrive
// while it works on one. Weights and the lane's share of dw stay in registers; the warps' shares
// are added in order.
template <class T, int kVectors>
__global__ void __launch_bounds__(kNarrowWarps * 32, sizeof(T) == 2 ? 2 : 1)
    rms_norm_backward_narrow_kernel(RmsNormBackwardArgs a, float* partial) {
  extern __shared__ __align__(16) std::uint8_t dynamic[];
  constexpr int kStages = kNarrowStages<T>, kWords = static_cast<int>(sizeof(T)) / 2;
  constexpr int kRow = kNarrowRowBytes<T, kVectors> / 16;  // 16-byte words
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  uint4* const mine = reinterpret_cast<uint4*>(dynamic) + warp * kStages * kRow + lane;
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * kNarrowWarps;
  std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * kNarrowWarps + warp;
  // 16-byte word w of vector u of source s (0: h, 1: dy, 2: d_residual) of the stage.
  const auto place = [](int stage, int s, int u, int w) {
    return stage * kRow + ((s * kVectors + u) * kWords + w) * 32;
  };
  std::int64_t next = row;
  int put = 0, get = 0;
  const auto load_next = [&] {
    if (next < a.rows) {
#pragma unroll
      for (int u = 0; u < kVectors; ++u) {
        const std::int64_t col = (lane + u * 32) * 8;
        const bool in = col < a.cols, residual = in && a.d_residual != nullptr;
        const std::int64_t at = in ? col : 0;
        const T* h = static_cast<const T*>(a.h) + next * a.ld_h + at;
        const T* dy = static_cast<const T*>(a.dy) + next * a.ld_dy + at;
        const T* res = residual ? static_cast<const T*>(a.d_residual) + next * a.cols + at : h;
#pragma unroll
        for (int w = 0; w < kWords; ++w) {
          CopyAsync(mine + place(put, 0, u, w), h + w * 4, in);
          CopyAsync(mine + place(put, 1, u, w), dy + w * 4, in);
          CopyAsync(mine + place(put, 2, u, w), res + w * 4, residual);
        }
      }
      next += step;
      put = put == kStages - 1 ? 0 : put + 1;
    }
    CopyCommit();
  };
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) {
    load_next();
  }
  float dw[kVectors][8] = {}, weights[kVectors][8];
#pragma unroll
  for (int u = 0; u < kVectors; ++u) {
    const std::int64_t col = (lane + u * 32) * 8;
    if (col < a.cols) {
      Load8Plain(a.w + col, weights[u]);
    }
  }
  float rstd_next = row < a.rows ? a.rstd[row] : 0.0f;
  for (; row < a.rows; row += step) {
    const float rstd = rstd_next;
    if (row + step < a.rows) {
      rstd_next = a.rstd[row + step];
    }
    load_next();
    CopyWait<kStages - 1>();
    const int stage = get;
    get = get == kStages - 1 ? 0 : get + 1;
    const auto take = [&](int s, int u, float v[8]) {
      Raw8<T> raw;
      uint4* words = reinterpret_cast<uint4*>(&raw);
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        words[w] = mine[place(stage, s, u, w)];
      }
      Unpack(raw, v);
    };
    float sum = 0;
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
      const std::int64_t col = (lane + u * 32) * 8;
      if (col < a.cols) {
        float h[8], dy[8];
        take(0, u, h);
        take(1, u, dy);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          sum += dy[j] * weights[u][j] * h[j];
          dw[u][j] += dy[j] * (h[j] * rstd);
        }
      }
    }
    sum = WarpSum(sum);
    const float mean = sum * rstd / static_cast<float>(a.cols);
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
      const std::int64_t col = (lane + u * 32) * 8;
      if (col < a.cols) {
        float h[8], dy[8], res[8], dx[8];
        take(0, u, h);
        take(1, u, dy);
        take(2, u, res);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          dx[j] = rstd * (dy[j] * weights[u][j] - h[j] * rstd * mean) + res[j];
        }
        Store8(static_cast<T*>(a.dx) + row * a.ld_dx + col, dx);
      }
    }
  }
  // The stages become [warps][cols] sums.
  constexpr int kStride = kStages * kRow * 4;  // floats of a warp's part
  static_assert(kStride >= kVectors * 256);
  CopyWait<0>();
  __syncwarp();
#pragma unroll
  for (int u = 0; u < kVectors; ++u) {
    Store8(reinterpret_cast<float*>(dynamic) + warp * kStride + (lane + u * 32) * 8, dw[u]);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < a.cols; i += kNarrowWarps * 32) {
    const float* share = reinterpret_cast<const float*>(dynamic) + i;
    float sum = share[0];
#pragma unroll
    for (int w = 1; w < kNarrowWarps; ++w) {
      sum += share[w * kStride];
    }
    partial[blockIdx.x * a.cols + i] = sum;
  }
  LetNextStart();
}

// A block walks over rows blockIdx.x, + gridDim.x, …, kRows at a time (independent loads in flight,
// one pair of barriers); kVectors vectors of 8 columns a thread.
template <class T, int kThreads, int kVectors, int kRows>
__global__ void __launch_bounds__(kThreads)
    rms_norm_backward_kernel(RmsNormBackwardArgs a, float* partial) {
  constexpr int kWarps = kThreads / 32;
  __shared__ float part[2][kRows][kWarps];
  float dw[kVectors][8] = {};
  int turn = 0;
  for (std::int64_t row0 = blockIdx.x; row0 < a.rows;
       row0 += static_cast<std::int64_t>(gridDim.x) * kRows, turn ^= 1) {
    Raw8<T> h_raw[kRows][kVectors], dy_raw[kRows][kVectors], res_raw[kRows][kVectors];
    float rstd[kRows], sum[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const std::int64_t row = row0 + r * static_cast<std::int64_t>(gridDim.x);
      rstd[r] = row < a.rows ? a.rstd[row] : 0.0f;
#pragma unroll
      for (int u = 0; u < kVectors; ++u) {
        const std::int64_t col = (threadIdx.x + u * kThreads) * 8;
        ZeroRaw(h_raw[r][u]);
        ZeroRaw(dy_raw[r][u]);
        ZeroRaw(res_raw[r][u]);
        if (col < a.cols && row < a.rows) {
          LoadRawPlain(static_cast<const T*>(a.h) + row * a.ld_h + col, h_raw[r][u]);
          LoadRawPlain(static_cast<const T*>(a.dy) + row * a.ld_dy + col, dy_raw[r][u]);
          if (a.d_residual != nullptr) {
            LoadRawPlain(static_cast<const T*>(a.d_residual) + row * a.cols + col, res_raw[r][u]);
          }
        }
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      sum[r] = 0;
    }
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
      const std::int64_t col = (threadIdx.x + u * kThreads) * 8;
      if (col < a.cols) {
        float w[8];
        Load8Plain(a.w + col, w);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          float h[8], dy[8];
          Unpack(h_raw[r][u], h);
          Unpack(dy_raw[r][u], dy);
#pragma unroll
          for (int j = 0; j < 8; ++j) {
            sum[r] += dy[j] * w[j] * h[j];
            dw[u][j] += dy[j] * (h[j] * rstd[r]);
          }
        }
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      sum[r] = WarpSum(sum[r]);
      if ((threadIdx.x & 31) == 0) {
        part[turn][r][threadIdx.x >> 5] = sum[r];
      }
    }
    __syncthreads();  // the other half of `part` is free: all threads passed its barrier last time
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const std::int64_t row = row0 + r * static_cast<std::int64_t>(gridDim.x);
      float total = 0;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        total += part[turn][r][w];
      }
      const float mean = total * rstd[r] / static_cast<float>(a.cols);
#pragma unroll
      for (int u = 0; u < kVectors; ++u) {
        const std::int64_t col = (threadIdx.x + u * kThreads) * 8;
        if (col < a.cols && row < a.rows) {
          float h[8], dy[8], w[8], res[8], dx[8];
          Unpack(h_raw[r][u], h);
          Unpack(dy_raw[r][u], dy);
          Unpack(res_raw[r][u], res);
          Load8Plain(a.w + col, w);
#pragma unroll
          for (int j = 0; j < 8; ++j) {
            dx[j] = rstd[r] * (dy[j] * w[j] - h[j] * rstd[r] * mean) + res[j];
          }
          Store8(static_cast<T*>(a.dx) + row * a.ld_dx + col, dx);
        }
      }
    }
  }
#pragma unroll
  for (int u = 0; u < kVectors; ++u) {
    const std::int64_t col = (threadIdx.x + u * kThreads) * 8;
    if (col < a.cols) {
      Store8(partial + blockIdx.x * a.cols + col, dw[u]);
    }
  }
  LetNextStart();
}

// dw[c] += Σ_b partial[b, c]: 16 columns a block, 32 threads a column over the blocks.
__global__ void __launch_bounds__(512)
    add_columns_kernel(const float* partial, int blocks, std::int64_t cols, float* dw) {
  __shared__ float part[32][17];
  const int c = threadIdx.x & 15, w = threadIdx.x >> 4;
  const std::int64_t col = static_cast<std::int64_t>(blockIdx.x) * 16 + c;
  cudaGridDependencySynchronize();
  float sum = 0;
  if (col < cols) {
#pragma unroll 8
    for (int b = w; b < blocks; b += 32) {
      sum += partial[b * cols + col];
    }
  }
  part[w][c] = sum;
  __syncthreads();
  if (w == 0 && col < cols) {
#pragma unroll
    for (int i = 1; i < 32; ++i) {
      sum += part[i][c];
    }
    dw[col] += sum;
  }
}

template <class T>
void LaunchForward(cudaStream_t stream, const RmsNormForwardArgs& a) {
  const auto blocks = [&](int rows) { return Blocks(a.rows, rows); };
  if (a.cols <= 256) {
    rms_norm_forward_kernel<T, 32, 1><<<blocks(8), 256, 0, stream>>>(a);
  } else if (a.cols <= 1024) {
    rms_norm_forward_kernel<T, 128, 1><<<blocks(2), 256, 0, stream>>>(a);
  } else if (a.cols <= 2048) {
    rms_norm_forward_kernel<T, 256, 1><<<blocks(1), 256, 0, stream>>>(a);
  } else if (a.cols <= 4096) {
    rms_norm_forward_kernel<T, 256, 2><<<blocks(1), 256, 0, stream>>>(a);
  } else {
    rms_norm_forward_kernel<T, 256, 8><<<blocks(1), 256, 0, stream>>>(a);
  }
}

template <class T, int kVectors>
void LaunchNarrow(cudaStream_t stream, unsigned blocks, const RmsNormBackwardArgs& a,
                  float* partial) {
  constexpr int kShared = kNarrowSharedBytes<T, kVectors>;
  cudaFuncSetAttribute(rms_norm_backward_narrow_kernel<T, kVectors>,
                       cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
  rms_norm_backward_narrow_kernel<T, kVectors>
      <<<blocks, kNarrowWarps * 32, kShared, stream>>>(a, partial);
}

template <class T>
void LaunchBackward(cudaStream_t stream, const RmsNormBackwardArgs& a) {
  float* partial = static_cast<float*>(a.workspace);
  const std::int64_t most = BackwardBlocks(a.cols);
  const std::int64_t wanted = a.cols <= 1024 ? CeilDiv(a.rows, kNarrowWarps) : a.rows;
  const unsigned blocks = static_cast<unsigned>(wanted < most ? wanted : most);
  constexpr int kWide = sizeof(T) == 2 ? 1 : 2;  // FP32 rows take twice the registers
  if (a.cols <= 256) {
    LaunchNarrow<T, 1>(stream, blocks, a, partial);
  } else if (a.cols <= 512) {
    LaunchNarrow<T, 2>(stream, blocks, a, partial);
  } else if (a.cols <= 1024) {
    LaunchNarrow<T, 4>(stream, blocks, a, partial);
  } else if (a.cols <= 2048) {
    rms_norm_backward_kernel<T, 256, 1, 2 / kWide><<<blocks, 256, 0, stream>>>(a, partial);
  } else if (a.cols <= 4096) {
    rms_norm_backward_kernel<T, 256, 2, 2 / kWide><<<blocks, 256, 0, stream>>>(a, partial);
  } else {
    rms_norm_backward_kernel<T, 256, 4, 1><<<blocks, 256, 0, stream>>>(a, partial);
  }
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(Blocks(a.cols, 16));
  config.blockDim = dim3(512);
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = 1;
  (void)cudaLaunchKernelEx(&config, add_columns_kernel, static_cast<const float*>(partial),
                           static_cast<int>(blocks), a.cols, a.dw);  // read by Launched
}

}  // namespace

std::int64_t RmsNormBackwardWorkspaceBytes(std::int64_t cols) {
  return BackwardBlocks(cols) * cols * static_cast<std::int64_t>(sizeof(float));
}

void RmsNormForward(OpsContext* context, const RmsNormForwardArgs& a) {
  OCTAVO_CHECK(a.cols % 8 == 0 && a.ld_x % 8 == 0 && a.ld_y % 8 == 0 && a.cols <= 16384,
               "cols = %lld (at most 16384), ld_x = %lld, ld_y = %lld must be multiples of 8",
               static_cast<long long>(a.cols), static_cast<long long>(a.ld_x),
               static_cast<long long>(a.ld_y));
  if (a.rows > 0) {
    a.dtype == DType::kBF16 ? LaunchForward<bf16>(context->stream, a)
                            : LaunchForward<float>(context->stream, a);
  }
  context->Launched("rms_norm_forward");
}

void RmsNormBackward(OpsContext* context, const RmsNormBackwardArgs& a) {
  OCTAVO_CHECK(
      a.cols % 8 == 0 && a.ld_h % 8 == 0 && a.ld_dy % 8 == 0 && a.ld_dx % 8 == 0 && a.cols <= 8192,
      "cols = %lld (at most 8192), ld_h = %lld, ld_dy = %lld, ld_dx = %lld must be "
      "multiples of 8",
      static_cast<long long>(a.cols), static_cast<long long>(a.ld_h),
      static_cast<long long>(a.ld_dy), static_cast<long long>(a.ld_dx));
  if (a.rows > 0) {
    a.dtype == DType::kBF16 ? LaunchBackward<bf16>(context->stream, a)
                            : LaunchBackward<float>(context->stream, a);
  }
  context->Launched("rms_norm_backward");
}

}  // namespace octavo::cuda
