// Dense products: cuBLASLt with a cache of chosen algorithms, and the plain kernel behind it.
//
// cuBLASLt is column-major, so C is computed as Cᵀ = B·Aᵀ: its "A" is our B. FP8 operands are
// K-contiguous on both sides, which is the only form the tensor cores of this architecture take.
#include <array>
#include <cstring>
#include <unordered_map>

#include "base/check.h"
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/ops_cuda.h"
#include "kernels/gemm/product_cuda.h"

namespace octavo::cuda {

// Plans live as long as the backend: expert sizes are multiples of 128, so they repeat.
class GemmPlans {
 public:
  using Key = std::array<std::int64_t, 18>;
  struct Plan {
    bool usable = false;
    cublasLtMatmulDesc_t desc = nullptr;
    cublasLtMatrixLayout_t a = nullptr, b = nullptr, c = nullptr;
    cublasLtMatmulAlgo_t algo{};
  };
  GemmPlans() = default;
  GemmPlans(const GemmPlans&) = delete;
  GemmPlans& operator=(const GemmPlans&) = delete;
  ~GemmPlans() {
    for (auto& [key, plan] : plans_) {
      cublasLtMatmulDescDestroy(plan.desc);
      cublasLtMatrixLayoutDestroy(plan.a);
      cublasLtMatrixLayoutDestroy(plan.b);
      cublasLtMatrixLayoutDestroy(plan.c);
    }
  }
  Plan* Find(const Key& key) {
    const auto it = plans_.find(key);
    return it == plans_.end() ? nullptr : &it->second;
  }
  Plan* Add(const Key& key) { return &plans_[key]; }

 private:
  struct Hash {
    std::size_t operator()(const Key& key) const {
      std::uint64_t h = 1469598103934665603ull;
      for (std::int64_t v : key) {
        h = (h ^ static_cast<std::uint64_t>(v)) * 1099511628211ull;
        h ^= h >> 29;
      }
      return static_cast<std::size_t>(h);
    }
  };
  std::unordered_map<Key, Plan, Hash> plans_;
};

void GemmPlansDeleter::operator()(GemmPlans* plans) const { delete plans; }

namespace {

// ---------------------------------------------------------------- cuBLASLt

cudaDataType_t LtType(DType t) {
  switch (t) {
    case DType::kF32:
      return CUDA_R_32F;
    case DType::kBF16:
      return CUDA_R_16BF;
    case DType::kE4M3:
      return CUDA_R_8F_E4M3;
    default:
      return CUDA_R_8F_E5M2;
  }
}

// An operand as cuBLASLt sees it.
struct LtOperand {
  const void* pointer;
  DType dtype;
  bool k_contiguous;
  std::int64_t ld;
  const float* dequant_scale = nullptr;
  int scale_mode = -1;
};

// Largest power of two up to 256 that divides the address.
std::int64_t Alignment(const void* p) {
  std::int64_t a = 256;
  while (reinterpret_cast<std::uintptr_t>(p) % a != 0) {
    a /= 2;
  }
  return a;
}

// False: cuBLASLt cannot take this operand.
bool Resolve(const ProductOperand& o, std::int64_t rows, std::int64_t k, LtOperand* out) {
  if (!o.quant.present()) {
    *out = {o.data, o.dtype, o.k_contiguous, o.ld};
    return true;
  }
  const QTensor& q = o.quant;
  *out = {q.q + o.row_begin * q.stride() + o.k_begin, q.format, true, q.stride()};
  if (q.stride() % 16 != 0 || k % 16 != 0) {
    return false;
  }
  switch (q.tiling) {
    case Tiling::kTensor:
      out->dequant_scale = o.ready_scale != nullptr ? o.ready_scale : q.dequant_scale + o.group;
      out->scale_mode = CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F;
      break;
    case Tiling::kRow128:
      out->scale_mode = CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F;
      if (o.ready_scale != nullptr) {
        out->dequant_scale = o.ready_scale;
      } else if (RowScalesReady(q, rows) && o.row_begin == 0) {
        out->dequant_scale = q.dequant_scale + o.k_begin / kTile * q.scale_tile_stride;
      } else {
        return false;
      }
      break;
    case Tiling::kBlock128:
      out->scale_mode = CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F;
      if (q.scale_tile_stride != 1 || q.scale_row_stride != RoundUp(CeilDiv(k, kTile), 4) ||
          o.row_begin % kTile != 0 || o.k_begin != 0) {
        return false;
      }
      out->dequant_scale = q.dequant_scale + o.row_begin / kTile * q.scale_row_stride;
      break;
    default:
      return false;
  }
  return reinterpret_cast<std::uintptr_t>(out->dequant_scale) % 16 == 0;
}

cublasLtMatrixLayout_t Layout(const LtOperand& o, std::int64_t rows, std::int64_t k) {
  cublasLtMatrixLayout_t layout = nullptr;
  const bool kc = o.k_contiguous;
  cublasLtMatrixLayoutCreate(&layout, LtType(o.dtype), static_cast<std::uint64_t>(kc ? k : rows),
                             static_cast<std::uint64_t>(kc ? rows : k), o.ld);
  return layout;
}

template <class T>
void Set(cublasLtMatmulDesc_t desc, cublasLtMatmulDescAttributes_t attribute, T value) {
  cublasLtMatmulDescSetAttribute(desc, attribute, &value, sizeof(value));
}

void Choose(OpsContext* context, const Product& p, const LtOperand& a, const LtOperand& b,
            const GemmPlans::Key& key, GemmPlans::Plan* plan) {
  const std::int64_t workspace_bytes = key[16];
  cublasLtMatmulDescCreate(&plan->desc, CUBLAS_COMPUTE_32F, CUDA_R_32F);
  Set(plan->desc, CUBLASLT_MATMUL_DESC_TRANSA, b.k_contiguous ? CUBLAS_OP_T : CUBLAS_OP_N);
  Set(plan->desc, CUBLASLT_MATMUL_DESC_TRANSB, a.k_contiguous ? CUBLAS_OP_N : CUBLAS_OP_T);
  if (a.dequant_scale != nullptr) {
    Set(plan->desc, CUBLASLT_MATMUL_DESC_A_SCALE_MODE, static_cast<std::int32_t>(b.scale_mode));
    Set(plan->desc, CUBLASLT_MATMUL_DESC_B_SCALE_MODE, static_cast<std::int32_t>(a.scale_mode));
    Set(plan->desc, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, static_cast<const void*>(b.dequant_scale));
    Set(plan->desc, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, static_cast<const void*>(a.dequant_scale));
    // Block-scaled kernels promote anyway.
    const bool tensor = a.scale_mode == CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F &&
                        b.scale_mode == CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F;
    Set(plan->desc, CUBLASLT_MATMUL_DESC_FAST_ACCUM,
        static_cast<std::int8_t>(tensor && p.mode == Accumulate::kFast ? 1 : 0));
  }
  if (context->multiprocessors < context->device_multiprocessors) {
    Set(plan->desc, CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET,
        static_cast<std::int32_t>(context->multiprocessors));
  }
  plan->a = Layout(b, p.n, p.k);
  plan->b = Layout(a, p.m, p.k);
  cublasLtMatrixLayoutCreate(&plan->c, LtType(p.c_dtype), static_cast<std::uint64_t>(p.n),
                             static_cast<std::uint64_t>(p.m), p.ldc);
  cublasLtMatmulPreference_t preference = nullptr;
  cublasLtMatmulPreferenceCreate(&preference);
  const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
    cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof(value));
  };
  prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, static_cast<std::size_t>(workspace_bytes));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, static_cast<std::uint32_t>(key[13]));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, static_cast<std::uint32_t>(key[14]));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, static_cast<std::uint32_t>(key[15]));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, static_cast<std::uint32_t>(key[15]));
  cublasLtMatmulHeuristicResult_t result{};
  int found = 0;
  const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(
      context->lt, plan->desc, plan->a, plan->b, plan->c, plan->c, preference, 1, &result, &found);
  cublasLtMatmulPreferenceDestroy(preference);
  plan->usable = status == CUBLAS_STATUS_SUCCESS && found > 0 &&
                 result.state == CUBLAS_STATUS_SUCCESS &&
                 static_cast<std::int64_t>(result.workspaceSize) <= workspace_bytes;
  plan->algo = result.algo;
}

bool MultiplyLt(OpsContext* context, const Lane& lane, const Product& p) {
  LtOperand a, b;
  const bool fp8 = p.a.quant.present();
  if (fp8 != p.b.quant.present() || (!fp8 && p.a.dtype != p.b.dtype) ||
      !Resolve(p.a, p.m, p.k, &a) || !Resolve(p.b, p.n, p.k, &b) ||
      (fp8 && a.dtype == DType::kE5M2 && b.dtype == DType::kE5M2)) {
    return false;
  }
  // cuBLASLt 13.1 computes wrongly when a leading dimension passes 2^31 bytes.
  const std::int64_t limit = std::int64_t{1} << 31;
  if (a.ld * DTypeBytes(a.dtype) >= limit || b.ld * DTypeBytes(b.dtype) >= limit ||
      p.ldc * DTypeBytes(p.c_dtype) >= limit) {
    return false;
  }
  const GemmPlans::Key key = {p.m,
                              p.n,
                              p.k,
                              a.ld,
                              b.ld,
                              p.ldc,
                              static_cast<std::int64_t>(a.dtype),
                              static_cast<std::int64_t>(b.dtype),
                              static_cast<std::int64_t>(p.c_dtype),
                              (a.k_contiguous ? 1 : 0) + (b.k_contiguous ? 2 : 0),
                              a.scale_mode,
                              b.scale_mode,
                              (p.mode == Accumulate::kFast ? 1 : 0) + (p.accumulate ? 2 : 0),
                              Alignment(b.pointer),
                              Alignment(a.pointer),
                              Alignment(p.c),
                              lane.workspace_bytes,
                              context->multiprocessors};
  if (context->gemm_plans == nullptr) {
    context->gemm_plans.reset(new GemmPlans);
  }
  GemmPlans::Plan* plan = context->gemm_plans->Find(key);
  if (plan == nullptr) {
    plan = context->gemm_plans->Add(key);
    ++context->plans;
    Choose(context, p, a, b, key, plan);
  }
  if (!plan->usable) {
    return false;
  }
  if (fp8) {
    Set(plan->desc, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, static_cast<const void*>(b.dequant_scale));
    Set(plan->desc, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, static_cast<const void*>(a.dequant_scale));
  }
  const float one = 1.0f, beta = p.accumulate ? 1.0f : 0.0f;
  const cublasStatus_t status =
      cublasLtMatmul(context->lt, plan->desc, &one, b.pointer, plan->a, a.pointer, plan->b, &beta,
                     p.c, plan->c, p.c, plan->c, &plan->algo, lane.workspace,
                     static_cast<std::size_t>(lane.workspace_bytes), lane.stream);
  if (status == CUBLAS_STATUS_NOT_SUPPORTED) {
    plan->usable = false;
    return false;
  }
  if (status != CUBLAS_STATUS_SUCCESS) {
    context->RecordText(std::string("cuBLASLt matmul: ") + cublasLtGetStatusString(status));
  }
  return true;
}

// ---------------------------------------------------------------- plain kernel

struct PlainOperand {
  const void* data;
  DType dtype;
  bool k_contiguous;
  std::int64_t ld;
  Tiling tiling;
  const float* dequant_scale;
  std::int64_t row_stride, tile_stride, row_begin, k_begin;
};

PlainOperand MakePlain(const ProductOperand& o) {
  if (!o.quant.present()) {
    return {o.data, o.dtype, o.k_contiguous, o.ld, Tiling::kNone, nullptr, 0, 0, 0, 0};
  }
  const QTensor& q = o.quant;
  const float* dequant_scale = q.tiling == Tiling::kTensor ? q.dequant_scale + o.group : q.dequant_scale;
  return {q.q,
          q.format,
          true,
          q.stride(),
          q.tiling,
          dequant_scale,
          q.scale_row_stride,
          q.scale_tile_stride,
          o.row_begin,
          o.k_begin};
}

__device__ __forceinline__ float Element(const PlainOperand& o, std::int64_t row, std::int64_t k) {
  if (o.tiling == Tiling::kNone) {
    const std::int64_t at = o.k_contiguous ? row * o.ld + k : k * o.ld + row;
    return o.dtype == DType::kF32 ? static_cast<const float*>(o.data)[at]
                                  : ToFloat(static_cast<const bf16*>(o.data)[at]);
  }
  row += o.row_begin;
  k += o.k_begin;
  const float q = Fp8Decode(o.dtype, static_cast<const std::uint8_t*>(o.data)[row * o.ld + k]);
  switch (o.tiling) {
    case Tiling::kTensor:
      return q * o.dequant_scale[0];
    case Tiling::kBlock128:
      return q * o.dequant_scale[row / 128 * o.row_stride + k / 128 * o.tile_stride];
    case Tiling::kRow32:
      return q * o.dequant_scale[row * o.row_stride + k / 32 * o.tile_stride];
    default:
      return q * o.dequant_scale[row * o.row_stride + k / 128 * o.tile_stride];
  }
}

// 64×64 of C a block, 16 of K at a time, FP32 throughout.
template <class C>
__global__ void __launch_bounds__(256)
    plain_gemm_kernel(std::int64_t m, std::int64_t n, std::int64_t k, PlainOperand a,
                      PlainOperand b, C* c, std::int64_t ldc, bool accumulate) {
  __shared__ float tile_a[16][65], tile_b[16][65];
  const std::int64_t tiles_n = CeilDiv(n, 64);
  const std::int64_t m0 = blockIdx.x / tiles_n * 64, n0 = blockIdx.x % tiles_n * 64;
  const int tx = threadIdx.x & 15, ty = threadIdx.x >> 4;
  float sum[4][4] = {};
  for (std::int64_t k0 = 0; k0 < k; k0 += 16) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int index = threadIdx.x + i * 256, kk = index & 15, row = index >> 4;
      tile_a[kk][row] = m0 + row < m && k0 + kk < k ? Element(a, m0 + row, k0 + kk) : 0.0f;
      tile_b[kk][row] = n0 + row < n && k0 + kk < k ? Element(b, n0 + row, k0 + kk) : 0.0f;
    }
    __syncthreads();
#pragma unroll
    for (int kk = 0; kk < 16; ++kk) {
      float va[4], vb[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        va[i] = tile_a[kk][ty + 16 * i];
        vb[i] = tile_b[kk][tx + 16 * i];
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          sum[i][j] += va[i] * vb[j];
        }
      }
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const std::int64_t row = m0 + ty + 16 * i, col = n0 + tx + 16 * j;
      if (row < m && col < n) {
        C* at = c + row * ldc + col;
        *at = FromFloat<C>(accumulate ? ToFloat(*at) + sum[i][j] : sum[i][j]);
      }
    }
  }
}

// ---------------------------------------------------------------- scales

__global__ void __launch_bounds__(128)
    pack_row_scales_kernel(const float* dequant_scale, std::int64_t row_stride, std::int64_t tile_stride,
                           std::int64_t tiles, Groups groups, float* out) {
  const std::int64_t row0 = static_cast<std::int64_t>(blockIdx.x) * 128, row = row0 + threadIdx.x;
  const RowOwner owner = FindOwner(groups, row0);
  if (owner.group < 0) {
    return;
  }
  const std::int64_t begin = groups.begin[owner.group];
  const std::int64_t padded = RoundUp(groups.rows[owner.group], kRowAlign);
  float* dst = out + begin * tiles + (row - begin);
  for (std::int64_t t = blockIdx.y; t < tiles; t += gridDim.y) {
    dst[t * padded] = dequant_scale[row * row_stride + t * tile_stride];
  }
}

// out[tile, row] of a dense operand.
__global__ void __launch_bounds__(128)
    transpose_scales_kernel(const float* dequant_scale, std::int64_t row_stride, std::int64_t tile_stride,
                            std::int64_t rows, float* out) {
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * 128 + threadIdx.x;
  if (row < rows) {
    out[blockIdx.y * rows + row] = dequant_scale[row * row_stride + blockIdx.y * tile_stride];
  }
}

__global__ void spread_scales_kernel(const float* dequant_scale, std::int64_t count, float* out) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < count) {
    out[4 * i] = dequant_scale[i];
  }
}

}  // namespace

bool RowScalesReady(const QTensor& quant, std::int64_t rows) {
  return quant.scale_row_stride == 1 && quant.scale_tile_stride == rows;
}

void PackRowScales(OpsContext* context, const QTensor& quant, const RowGroups& groups, float* out) {
  const std::int64_t tiles = CeilDiv(quant.cols, kTile);
  if (groups.padded_rows > 0 && tiles > 0) {
    const unsigned y = static_cast<unsigned>(tiles < 8 ? tiles : 8);
    pack_row_scales_kernel<<<dim3(Blocks(groups.padded_rows, 128), y), 128, 0, context->stream>>>(
        quant.dequant_scale, quant.scale_row_stride, quant.scale_tile_stride, tiles,
        MakeGroups(groups), out);
  }
}

void SpreadScales(OpsContext* context, const float* dequant_scale, std::int64_t count, float* out) {
  spread_scales_kernel<<<Blocks(count, 128), 128, 0, context->stream>>>(dequant_scale, count, out);
}

ProductOperand MakeProductOperand(const GemmOperand& operand, std::int64_t rows, std::int64_t k) {
  ProductOperand o;
  o.data = operand.data;
  o.dtype = operand.dtype;
  o.k_contiguous = operand.k_contiguous;
  o.ld = operand.ld != 0 ? operand.ld : (operand.k_contiguous ? k : rows);
  o.quant = operand.quant;
  return o;
}

Lane ComputeLane(const OpsContext* context) {
  return {context->stream, context->gemm_workspace, context->gemm_workspace_bytes};
}

SideLanes::SideLanes(OpsContext* context) : context_(context) {
  context->Record(cudaEventRecord(context->fork, context->stream), "fork");
  for (cudaStream_t side : context->side) {
    context->Record(cudaStreamWaitEvent(side, context->fork, 0), "fork");
  }
}

SideLanes::~SideLanes() {
  for (int i = 0; i < OpsContext::kSides; ++i) {
    context_->Record(cudaEventRecord(context_->join[i], context_->side[i]), "join");
    context_->Record(cudaStreamWaitEvent(context_->stream, context_->join[i], 0), "join");
  }
}

Lane SideLanes::Next() {
  const int i = next_++ % OpsContext::kSides;
  const std::int64_t share = context_->gemm_workspace_bytes / OpsContext::kSides / 256 * 256;
  return {context_->side[i], static_cast<std::uint8_t*>(context_->gemm_workspace) + i * share,
          share};
}

void Multiply(OpsContext* context, const Lane& lane, const Product& p, const char* what) {
  if (p.m == 0 || p.n == 0) {
    return;
  }
  if (p.k == 0) {
    if (!p.accumulate) {
      const std::int64_t bytes = DTypeBytes(p.c_dtype);
      context->Record(cudaMemset2DAsync(p.c, p.ldc * bytes, 0, p.n * bytes, p.m, lane.stream),
                      what);
    }
    return;
  }
  OCTAVO_CHECK(!p.accumulate || p.c_dtype == DType::kF32, "%s: accumulating needs FP32", what);
  if (MultiplyLt(context, lane, p)) {
    return;
  }
  const unsigned blocks = static_cast<unsigned>(CeilDiv(p.m, 64) * CeilDiv(p.n, 64));
  if (p.c_dtype == DType::kBF16) {
    plain_gemm_kernel<<<blocks, 256, 0, lane.stream>>>(p.m, p.n, p.k, MakePlain(p.a),
                                                       MakePlain(p.b), static_cast<bf16*>(p.c),
                                                       p.ldc, p.accumulate);
  } else {
    plain_gemm_kernel<<<blocks, 256, 0, lane.stream>>>(p.m, p.n, p.k, MakePlain(p.a),
                                                       MakePlain(p.b), static_cast<float*>(p.c),
                                                       p.ldc, p.accumulate);
  }
  context->Launched(what);
}

void Gemm(OpsContext* context, const GemmArgs& a) {
  Product p{.m = a.m,
            .n = a.n,
            .k = a.k,
            .a = MakeProductOperand(a.a, a.m, a.k),
            .b = MakeProductOperand(a.b, a.n, a.k),
            .c = a.c,
            .c_dtype = a.c_dtype,
            .ldc = a.ldc != 0 ? a.ldc : a.n,
            .accumulate = a.accumulate,
            .mode = a.mode};
  std::int64_t used = 0;
  // Scales that cuBLASLt cannot read in place are repacked into scratch; dense rows are one group.
  const auto prepare = [&](ProductOperand* o, std::int64_t rows) {
    float* out = reinterpret_cast<float*>(context->scratch) + used;
    if (!o->quant.present()) {
      return;
    }
    if (o->quant.tiling == Tiling::kTensor) {
      if (reinterpret_cast<std::uintptr_t>(o->quant.dequant_scale) % 16 != 0) {
        SpreadScales(context, o->quant.dequant_scale, 1, out);
        o->ready_scale = out;
        used += 4;
      }
    } else if (o->quant.tiling == Tiling::kRow128 && !RowScalesReady(o->quant, rows)) {
      const std::int64_t tiles = CeilDiv(a.k, kTile), floats = RoundUp(rows * tiles, 4);
      if ((used + floats) * 4 <= context->scratch_bytes) {
        transpose_scales_kernel<<<dim3(Blocks(rows, 128), static_cast<unsigned>(tiles)), 128, 0,
                                  context->stream>>>(o->quant.dequant_scale,
                                                     o->quant.scale_row_stride,
                                                     o->quant.scale_tile_stride, rows, out);
        o->ready_scale = out;
        used += floats;
      }
    }
  };
  prepare(&p.a, a.m);
  prepare(&p.b, a.n);
  Multiply(context, ComputeLane(context), p, "gemm");
}

}  // namespace octavo::cuda
