// Energies of a tensor and of its quantisation error. Sampled every few dozen steps, so a plain
// kernel: a block sums 8 rows in FP64, partial sums are added in order.
#include "base/check.h"
#include "kernels/cuda/context.h"
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/ops_cuda.h"

namespace octavo::cuda {
namespace {

template <class T>
__global__ void __launch_bounds__(256)
    sqnr_kernel(const T* x, std::int64_t cols, Groups groups, QTensor q, std::int64_t ld,
                bool transposed, double* partial) {
  __shared__ double smem[33];
  double signal = 0, noise = 0;
  for (int rr = 0; rr < 8; ++rr) {
    const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * 8 + rr;
    const RowOwner owner = row < groups.padded_rows ? FindOwner(groups, row) : RowOwner{-1, row};
    if (owner.group < 0 || row >= owner.real_end) {
      continue;
    }
    for (std::int64_t c = threadIdx.x; c < cols; c += 256) {
      const std::int64_t qr = transposed ? c : row, qc = transposed ? row : c;
      float d;
      switch (q.tiling) {
        case Tiling::kTensor:
          d = q.dequant_scale[owner.group];
          break;
        case Tiling::kBlock128:
          d = q.dequant_scale[qr / 128 * q.scale_row_stride + qc / 128 * q.scale_tile_stride];
          break;
        case Tiling::kRow32:
          d = q.dequant_scale[qr * q.scale_row_stride + qc / 32 * q.scale_tile_stride];
          break;
        default:
          d = q.dequant_scale[qr * q.scale_row_stride + qc / 128 * q.scale_tile_stride];
      }
      const double value = ToFloat(x[row * cols + c]);
      const double error = value - __fmul_rn(Fp8Decode(q.format, q.q[qr * ld + qc]), d);
      signal += value * value;
      noise += error * error;
    }
  }
  signal = BlockSum(signal, smem);
  __syncthreads();
  noise = BlockSum(noise, smem);
  if (threadIdx.x == 0) {
    partial[blockIdx.x] = signal;
    partial[gridDim.x + blockIdx.x] = noise;
  }
}

}  // namespace

void Sqnr(OpsContext* context, const SqnrArgs& a) {
  const std::int64_t rows = a.groups.padded_rows;
  if (rows == 0) {
    return;
  }
  const unsigned blocks = Blocks(rows, 8);
  double* partial = reinterpret_cast<double*>(context->scratch);
  OCTAVO_CHECK(std::int64_t{16} * blocks <= context->scratch_bytes, "rows = %lld is too many",
               static_cast<long long>(rows));
  if (a.x_dtype == DType::kBF16) {
    sqnr_kernel<<<blocks, 256, 0, context->stream>>>(static_cast<const bf16*>(a.x), a.cols,
                                                     MakeGroups(a.groups), a.q, a.q.stride(),
                                                     a.q_is_transposed, partial);
  } else {
    sqnr_kernel<<<blocks, 256, 0, context->stream>>>(static_cast<const float*>(a.x), a.cols,
                                                     MakeGroups(a.groups), a.q, a.q.stride(),
                                                     a.q_is_transposed, partial);
  }
  AddPartialSums(context, partial, blocks, &a.slot->signal);
  AddPartialSums(context, partial + blocks, blocks, &a.slot->noise);
  context->Launched("sqnr");
}

}  // namespace octavo::cuda
