// Causal grouped-query attention: cuDNN's fused kernels (composite graphs that its engines
// recognise, see design/GPU.md), plans built once a shape; plain kernels for what it refuses (FP32,
// odd head dimensions, no library).
//
// The graphs are sensitive to detail: p is declared BF16 before P·V; the row sum of dO·O passes
// through a product with 1; dV and dK of query heads are BF16 before they are added up to KV heads.
// Without these the result is silently wrong or no engine is found.
#include <map>
#include <tuple>

#include "base/check.h"
#include "kernels/cuda/context.h"
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/ops_cuda.h"
#if defined(OCTAVO_HAVE_CUDNN)
#include "kernels/attention/cudnn_graph.cuh"
#endif

namespace octavo::cuda {
namespace {

struct Shape {
  std::int64_t batch, sequence, heads, kv_heads, dim;
  auto Tie() const { return std::tie(batch, sequence, heads, kv_heads, dim); }
  bool operator<(const Shape& o) const { return Tie() < o.Tie(); }
  std::int64_t row() const { return (heads + 2 * kv_heads) * dim; }
};

constexpr float kNegativeInfinity = -__builtin_huge_valf();
constexpr float kOne = 1.0f;

}  // namespace

#if defined(OCTAVO_HAVE_CUDNN)

// A finalised graph and the uids of its tensors; usable == false: refused, do not ask again.
struct AttentionPlan {
  std::unique_ptr<CudnnGraph> graph;
  bool usable = false;
  std::int64_t q = 0, kt = 0, v = 0, o = 0, stats = 0, d_o = 0, d_q = 0, d_k = 0, d_v = 0,
               d_q_sum = 0;
  std::int64_t factor = 0, lowest = 0, one = 0;
};

class AttentionPlans {
 public:
  AttentionPlans() {
    const CudnnLibrary& lib = CudnnLibrary::Get();
    if (lib.handle != nullptr && lib.create(&handle_) != CUDNN_STATUS_SUCCESS) {
      handle_ = nullptr;
    }
  }
  AttentionPlans(const AttentionPlans&) = delete;
  AttentionPlans& operator=(const AttentionPlans&) = delete;
  ~AttentionPlans() {
    forward_.clear();
    backward_.clear();
    if (handle_ != nullptr) {
      CudnnLibrary::Get().destroy(handle_);
    }
  }

  // Null when cuDNN cannot run the shape.
  AttentionPlan* Forward(const Shape& s) {
    return Find(s, &forward_, &AttentionPlans::BuildForward);
  }
  AttentionPlan* Backward(const Shape& s) {
    return Find(s, &backward_, &AttentionPlans::BuildBackward);
  }
  void SetStream(cudaStream_t stream) { CudnnLibrary::Get().set_stream(handle_, stream); }

 private:
  using Map = std::map<Shape, AttentionPlan>;
  AttentionPlan* Find(const Shape& s, Map* map,
                      AttentionPlan (AttentionPlans::*build)(const Shape&)) {
    if (handle_ == nullptr || s.dim % 8 != 0) {
      return nullptr;
    }
    auto it = map->find(s);
    if (it == map->end()) {
      it = map->emplace(s, (this->*build)(s)).first;
    }
    return it->second.usable ? &it->second : nullptr;
  }

  // scores = factor·Q·Kᵀ, and the causal mask over `x`.
  static CudnnGraph::Node Masked(CudnnGraph* g, const Dims& square, CudnnGraph::Node x,
                                 CudnnGraph::Node lowest) {
    const auto row = g->Virtual(square, CUDNN_DATA_INT32),
               col = g->Virtual(square, CUDNN_DATA_INT32);
    const auto keep = g->Virtual(square, CUDNN_DATA_BOOLEAN), y = g->Virtual(square);
    g->Pointwise(CUDNN_POINTWISE_GEN_INDEX, x, nullptr, nullptr, row, CUDNN_DATA_FLOAT, 2);
    g->Pointwise(CUDNN_POINTWISE_GEN_INDEX, x, nullptr, nullptr, col, CUDNN_DATA_FLOAT, 3);
    g->Pointwise(CUDNN_POINTWISE_CMP_GE, row, col, nullptr, keep, CUDNN_DATA_BOOLEAN);
    g->Pointwise(CUDNN_POINTWISE_BINARY_SELECT, x, lowest, keep, y);
    return y;
  }

  AttentionPlan BuildForward(const Shape& s) {
    AttentionPlan p;
    p.graph = std::make_unique<CudnnGraph>(handle_);
    CudnnGraph& g = *p.graph;
    const std::int64_t b = s.batch, hq = s.heads, hk = s.kv_heads, n = s.sequence, d = s.dim;
    const std::int64_t row = s.row();
    const Dims square = {b, hq, n, n}, column = {b, hq, n, 1};
    const auto q = g.Real({b, hq, n, d}, {n * row, d, row, 1}, CUDNN_DATA_BFLOAT16, &p.q);
    const auto kt = g.Real({b, hk, d, n}, {n * row, d, 1, row}, CUDNN_DATA_BFLOAT16, &p.kt);
    const auto v = g.Real({b, hk, n, d}, {n * row, d, row, 1}, CUDNN_DATA_BFLOAT16, &p.v);
    const auto o = g.Real({b, hq, n, d}, {n * hq * d, d, hq * d, 1}, CUDNN_DATA_BFLOAT16, &p.o);
    const auto stats = g.Real(column, {hq * n, n, 1, 1}, CUDNN_DATA_FLOAT, &p.stats);
    const auto factor = g.Scalar(&p.factor), lowest = g.Scalar(&p.lowest);

    const auto raw = g.Virtual(square), scores = g.Virtual(square);
    g.MatMul(q, kt, raw);
    g.Pointwise(CUDNN_POINTWISE_MUL, raw, factor, nullptr, scores);
    const auto masked = Masked(&g, square, scores, lowest);
    const auto top = g.Virtual(column), shifted = g.Virtual(square), exponent = g.Virtual(square);
    const auto sum = g.Virtual(column), log_sum = g.Virtual(column);
    const auto prob = g.Virtual(square, CUDNN_DATA_BFLOAT16);
    g.Reduce(CUDNN_REDUCE_TENSOR_MAX, masked, top);
    g.Pointwise(CUDNN_POINTWISE_SUB, masked, top, nullptr, shifted);
    g.Pointwise(CUDNN_POINTWISE_EXP, shifted, nullptr, nullptr, exponent);
    g.Reduce(CUDNN_REDUCE_TENSOR_ADD, exponent, sum);
    g.Pointwise(CUDNN_POINTWISE_LOG, sum, nullptr, nullptr, log_sum);
    g.Pointwise(CUDNN_POINTWISE_ADD, top, log_sum, nullptr, stats);
    g.Pointwise(CUDNN_POINTWISE_DIV, exponent, sum, nullptr, prob);
    g.MatMul(prob, v, o);
    p.usable = g.Build();
    return p;
  }

  AttentionPlan BuildBackward(const Shape& s) {
    AttentionPlan p;
    p.graph = std::make_unique<CudnnGraph>(handle_);
    CudnnGraph& g = *p.graph;
    const std::int64_t b = s.batch, hq = s.heads, hk = s.kv_heads, n = s.sequence, d = s.dim;
    const std::int64_t row = s.row();
    const Dims square = {b, hq, n, n}, column = {b, hq, n, 1}, full = {b, hq, n, d};
    const Dims swapped = {hq * n * n, n * n, 1, n}, kv = {b, hk, n, d};
    constexpr auto kBf16 = CUDNN_DATA_BFLOAT16;
    const auto q = g.Real(full, {n * row, d, row, 1}, kBf16, &p.q);
    const auto kt = g.Real({b, hk, d, n}, {n * row, d, 1, row}, kBf16, &p.kt);
    const auto vt = g.Real({b, hk, d, n}, {n * row, d, 1, row}, kBf16, &p.v);
    const auto o = g.Real(full, {n * hq * d, d, hq * d, 1}, kBf16, &p.o);
    const auto d_o = g.Real(full, {n * hq * d, d, hq * d, 1}, kBf16, &p.d_o);
    const auto stats = g.Real(column, {hq * n, n, 1, 1}, CUDNN_DATA_FLOAT, &p.stats);
    const auto d_q = g.Real(full, {n * row, d, row, 1}, kBf16, &p.d_q);
    const auto d_k = g.Real(kv, {n * row, d, row, 1}, kBf16, &p.d_k);
    const auto d_v = g.Real(kv, {n * row, d, row, 1}, kBf16, &p.d_v);
    const auto d_q_sum = g.Real(full, {hq * n * d, n * d, d, 1}, CUDNN_DATA_FLOAT, &p.d_q_sum);
    const auto factor = g.Scalar(&p.factor), lowest = g.Scalar(&p.lowest), one = g.Scalar(&p.one);

    const auto product = g.Virtual(full), row_sum = g.Virtual(column), delta = g.Virtual(column);
    g.Pointwise(CUDNN_POINTWISE_MUL, d_o, o, nullptr, product);
    g.Reduce(CUDNN_REDUCE_TENSOR_ADD, product, row_sum);
    g.Pointwise(CUDNN_POINTWISE_MUL, row_sum, one, nullptr, delta);

    const auto raw = g.Virtual(square), scores = g.Virtual(square), shifted = g.Virtual(square);
    g.MatMul(q, kt, raw);
    g.Pointwise(CUDNN_POINTWISE_MUL, raw, factor, nullptr, scores);
    g.Pointwise(CUDNN_POINTWISE_SUB, scores, stats, nullptr, shifted);
    const auto masked = Masked(&g, square, shifted, lowest);
    const auto prob = g.Virtual(square);
    g.Pointwise(CUDNN_POINTWISE_EXP, masked, nullptr, nullptr, prob);
    const auto prob_t = g.Virtual(square, swapped, kBf16);
    g.Reshape(prob, prob_t);
    const bool grouped = hq != hk;
    if (grouped) {
      const auto d_v_full = g.Virtual(full, kBf16);
      g.MatMul(prob_t, d_o, d_v_full);
      g.Reduce(CUDNN_REDUCE_TENSOR_ADD, d_v_full, d_v);
    } else {
      g.MatMul(prob_t, d_o, d_v);
    }

    const auto d_prob = g.Virtual(square), centred = g.Virtual(square),
               weighted = g.Virtual(square);
    const auto d_s = g.Virtual(square), d_s_t = g.Virtual(square, swapped, kBf16);
    g.MatMul(d_o, vt, d_prob);
    g.Pointwise(CUDNN_POINTWISE_SUB, d_prob, delta, nullptr, centred);
    g.Pointwise(CUDNN_POINTWISE_MUL, centred, prob, nullptr, weighted);
    g.Pointwise(CUDNN_POINTWISE_MUL, weighted, factor, nullptr, d_s);
    g.Reshape(d_s, d_s_t);
    if (grouped) {
      const auto d_k_full = g.Virtual(full, kBf16);
      g.MatMul(d_s_t, q, d_k_full);
      g.Reduce(CUDNN_REDUCE_TENSOR_ADD, d_k_full, d_k);
    } else {
      g.MatMul(d_s_t, q, d_k);
    }
    const auto k = g.Virtual(kv, {n * row, d, row, 1}, kBf16);
    g.Reshape(kt, k);
    g.MatMul(d_s, k, d_q_sum);
    g.Pointwise(CUDNN_POINTWISE_IDENTITY, d_q_sum, nullptr, nullptr, d_q);
    p.usable = g.Build();
    return p;
  }

  cudnnHandle_t handle_ = nullptr;
  Map forward_, backward_;
};

#else

class AttentionPlans {};

#endif

void AttentionPlansDeleter::operator()(AttentionPlans* plans) const { delete plans; }

namespace {

// ---------------------------------------------------------------- plain kernels

template <class T>
struct PlainParams {
  const T* qkv;
  const T* d_out;
  const T* out_in;
  T* out;
  T* d_qkv;
  float* lse;
  const float* lse_in;
  std::int64_t sequence, row;
  int heads, kv_heads, dim;
  float factor;
};

template <class T>
__device__ __forceinline__ float Dot(const T* a, const T* b, int dim) {
  float sum = 0;
  for (int i = 0; i < dim; ++i) {
    sum += ToFloat(a[i]) * ToFloat(b[i]);
  }
  return sum;
}
__device__ __forceinline__ float BlockMax128(float v, float* smem) {
  v = WarpMax(v);
  __syncthreads();
  if ((threadIdx.x & 31) == 0) {
    smem[threadIdx.x >> 5] = v;
  }
  __syncthreads();
  return fmaxf(fmaxf(smem[0], smem[1]), fmaxf(smem[2], smem[3]));
}

// A block a (query, head, batch): probabilities of its row in shared memory. kBackward: dQ instead.
template <class T, bool kBackward>
__global__ void __launch_bounds__(128) plain_row_kernel(PlainParams<T> p) {
  extern __shared__ float prob[];  // [sequence]
  __shared__ float smem[33];
  const std::int64_t q = blockIdx.x, b = blockIdx.z, first = b * p.sequence;
  const int h = blockIdx.y, kv = h / (p.heads / p.kv_heads);
  const T* query = p.qkv + (first + q) * p.row + h * p.dim;
  const T* keys = p.qkv + first * p.row + (p.heads + kv) * p.dim;
  const T* values = keys + p.kv_heads * p.dim;
  const std::int64_t count = q + 1;
  const std::int64_t out_at = (first + q) * p.heads * p.dim + h * p.dim;
  const std::int64_t lse_at = (b * p.heads + h) * p.sequence + q;
  if (!kBackward) {
    float best = kNegativeInfinity;
    for (std::int64_t j = threadIdx.x; j < count; j += 128) {
      prob[j] = Dot(query, keys + j * p.row, p.dim) * p.factor;
      best = fmaxf(best, prob[j]);
    }
    const float top = BlockMax128(best, smem);
    float sum = 0;
    for (std::int64_t j = threadIdx.x; j < count; j += 128) {
      prob[j] = expf(prob[j] - top);
      sum += prob[j];
    }
    __syncthreads();
    sum = BlockSum(sum, smem);
    if (threadIdx.x == 0) {
      p.lse[lse_at] = top + logf(sum);
    }
    for (int d = threadIdx.x; d < p.dim; d += 128) {
      float o = 0;
      for (std::int64_t j = 0; j < count; ++j) {
        o += prob[j] * ToFloat(values[j * p.row + d]);
      }
      p.out[out_at + d] = FromFloat<T>(o / sum);
    }
    return;
  }
  float delta = 0;
  for (int d = threadIdx.x; d < p.dim; d += 128) {
    delta += ToFloat(p.d_out[out_at + d]) * ToFloat(p.out_in[out_at + d]);
  }
  delta = BlockSum(delta, smem);
  const float lse = p.lse_in[lse_at];
  for (std::int64_t j = threadIdx.x; j < count; j += 128) {
    const float weight = expf(Dot(query, keys + j * p.row, p.dim) * p.factor - lse);
    const float d_prob = Dot(p.d_out + out_at, values + j * p.row, p.dim);
    prob[j] = weight * (d_prob - delta) * p.factor;
  }
  __syncthreads();
  for (int d = threadIdx.x; d < p.dim; d += 128) {
    float dq = 0;
    for (std::int64_t j = 0; j < count; ++j) {
      dq += prob[j] * ToFloat(keys[j * p.row + d]);
    }
    p.d_qkv[(first + q) * p.row + h * p.dim + d] = FromFloat<T>(dq);
  }
}

// A block a (key, KV head, batch): dK and dV over all queries behind it and all heads of the group.
template <class T>
__global__ void __launch_bounds__(128) plain_column_kernel(PlainParams<T> p) {
  extern __shared__ float shared[];  // [sequence] prob, [sequence] dS, [dim] dK, [dim] dV
  float* prob = shared;
  float* d_score = shared + p.sequence;
  float* d_key = d_score + p.sequence;
  float* d_value = d_key + p.dim;
  const std::int64_t j = blockIdx.x, b = blockIdx.z, first = b * p.sequence;
  const int kv = blockIdx.y, group = p.heads / p.kv_heads;
  const T* key = p.qkv + (first + j) * p.row + (p.heads + kv) * p.dim;
  const T* value = key + p.kv_heads * p.dim;
  for (int d = threadIdx.x; d < p.dim; d += 128) {
    d_key[d] = 0;
    d_value[d] = 0;
  }
  for (int h = kv * group; h < (kv + 1) * group; ++h) {
    __syncthreads();
    for (std::int64_t q = j + threadIdx.x; q < p.sequence; q += 128) {
      const T* query = p.qkv + (first + q) * p.row + h * p.dim;
      const std::int64_t out_at = (first + q) * p.heads * p.dim + h * p.dim;
      const float weight =
          expf(Dot(query, key, p.dim) * p.factor - p.lse_in[(b * p.heads + h) * p.sequence + q]);
      const float delta = Dot(p.d_out + out_at, p.out_in + out_at, p.dim);
      prob[q] = weight;
      d_score[q] = weight * (Dot(p.d_out + out_at, value, p.dim) - delta) * p.factor;
    }
    __syncthreads();
    for (int d = threadIdx.x; d < p.dim; d += 128) {
      float dk = 0, dv = 0;
      for (std::int64_t q = j; q < p.sequence; ++q) {
        dk += d_score[q] * ToFloat(p.qkv[(first + q) * p.row + h * p.dim + d]);
        dv += prob[q] * ToFloat(p.d_out[(first + q) * p.heads * p.dim + h * p.dim + d]);
      }
      d_key[d] += dk;
      d_value[d] += dv;
    }
  }
  __syncthreads();
  for (int d = threadIdx.x; d < p.dim; d += 128) {
    T* out = p.d_qkv + (first + j) * p.row + (p.heads + kv) * p.dim + d;
    out[0] = FromFloat<T>(d_key[d]);
    out[p.kv_heads * p.dim] = FromFloat<T>(d_value[d]);
  }
}

template <class Kernel>
void AllowShared(Kernel kernel, std::size_t bytes) {
  OCTAVO_CHECK(bytes <= 220 * 1024, "the plain attention kernel holds a row of scores on chip");
  if (bytes > 48 * 1024) {
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                         static_cast<int>(bytes));
  }
}

template <class T>
void PlainForward(OpsContext* context, const AttentionForwardArgs& a) {
  PlainParams<T> p{};
  p.qkv = static_cast<const T*>(a.qkv);
  p.out = static_cast<T*>(a.out);
  p.lse = a.lse;
  p.sequence = a.sequence;
  p.row = static_cast<std::int64_t>(a.heads + 2 * a.kv_heads) * a.head_dim;
  p.heads = a.heads, p.kv_heads = a.kv_heads, p.dim = a.head_dim, p.factor = a.softmax_factor;
  const std::size_t bytes = sizeof(float) * a.sequence;
  AllowShared(plain_row_kernel<T, false>, bytes);
  plain_row_kernel<T, false>
      <<<dim3(a.sequence, a.heads, a.batch), 128, bytes, context->stream>>>(p);
}

template <class T>
void PlainBackward(OpsContext* context, const AttentionBackwardArgs& a) {
  PlainParams<T> p{};
  p.qkv = static_cast<const T*>(a.qkv);
  p.d_out = static_cast<const T*>(a.d_out);
  p.out_in = static_cast<const T*>(a.out);
  p.d_qkv = static_cast<T*>(a.d_qkv);
  p.lse_in = a.lse;
  p.sequence = a.sequence;
  p.row = static_cast<std::int64_t>(a.heads + 2 * a.kv_heads) * a.head_dim;
  p.heads = a.heads, p.kv_heads = a.kv_heads, p.dim = a.head_dim, p.factor = a.softmax_factor;
  const std::size_t row_bytes = sizeof(float) * a.sequence;
  const std::size_t column_bytes = sizeof(float) * (2 * a.sequence + 2 * a.head_dim);
  AllowShared(plain_row_kernel<T, true>, row_bytes);
  AllowShared(plain_column_kernel<T>, column_bytes);
  plain_row_kernel<T, true>
      <<<dim3(a.sequence, a.heads, a.batch), 128, row_bytes, context->stream>>>(p);
  plain_column_kernel<T>
      <<<dim3(a.sequence, a.kv_heads, a.batch), 128, column_bytes, context->stream>>>(p);
}

#if defined(OCTAVO_HAVE_CUDNN)
AttentionPlans* Plans(OpsContext* context) {
  if (context->attention_plans == nullptr) {
    context->attention_plans.reset(new AttentionPlans);
  }
  return context->attention_plans.get();
}

std::int64_t DqBytes(const Shape& s) {
  return RoundUp(4 * s.batch * s.heads * s.sequence * s.dim, 256);
}
#endif

}  // namespace

std::int32_t CudnnVersion() {
#if defined(OCTAVO_HAVE_CUDNN)
  const CudnnLibrary& lib = CudnnLibrary::Get();
  return lib.handle != nullptr ? static_cast<std::int32_t>(lib.version()) : 0;
#else
  return 0;
#endif
}

// Finalising a plan costs up to 1.5 s, so asking for the workspace is also what builds it.
void AttentionWorkspaceBytes(OpsContext* context, const WorkspaceQuery& query,
                             std::int64_t* forward, std::int64_t* backward) {
  *forward = *backward = 256;
#if defined(OCTAVO_HAVE_CUDNN)
  const Shape s{query.batch, query.sequence, query.heads, query.kv_heads, query.head_dim};
  if (query.dtype != DType::kBF16 || s.batch * s.sequence * s.heads * s.kv_heads * s.dim == 0) {
    return;
  }
  AttentionPlan* f = Plans(context)->Forward(s);
  AttentionPlan* b = Plans(context)->Backward(s);
  *forward = f != nullptr ? f->graph->workspace_bytes() + 256 : 256;
  *backward = b != nullptr ? DqBytes(s) + b->graph->workspace_bytes() + 256 : 256;
#endif
}

void AttentionForward(OpsContext* context, const AttentionForwardArgs& a) {
  OCTAVO_CHECK(a.kv_heads > 0 && a.heads % a.kv_heads == 0, "heads = %d, kv_heads = %d", a.heads,
               a.kv_heads);
  if (a.batch == 0 || a.sequence == 0) {
    return;
  }
#if defined(OCTAVO_HAVE_CUDNN)
  if (a.dtype == DType::kBF16) {
    const Shape s{a.batch, a.sequence, a.heads, a.kv_heads, a.head_dim};
    AttentionPlan* plan = Plans(context)->Forward(s);
    if (plan != nullptr && plan->graph->workspace_bytes() <= a.workspace_bytes) {
      Plans(context)->SetStream(context->stream);
      const bf16* qkv = static_cast<const bf16*>(a.qkv);
      const int status = plan->graph->Run({{plan->q, qkv},
                                           {plan->kt, qkv + s.heads * s.dim},
                                           {plan->v, qkv + (s.heads + s.kv_heads) * s.dim},
                                           {plan->o, a.out},
                                           {plan->stats, a.lse},
                                           {plan->factor, &a.softmax_factor},
                                           {plan->lowest, &kNegativeInfinity}},
                                          a.workspace);
      if (status != 0) {
        context->RecordText("cuDNN attention forward: status " + std::to_string(status));
      }
      return;
    }
  }
#endif
  a.dtype == DType::kBF16 ? PlainForward<bf16>(context, a) : PlainForward<float>(context, a);
  context->Launched("attention_forward");
}

void AttentionBackward(OpsContext* context, const AttentionBackwardArgs& a) {
  OCTAVO_CHECK(a.kv_heads > 0 && a.heads % a.kv_heads == 0, "heads = %d, kv_heads = %d", a.heads,
               a.kv_heads);
  if (a.batch == 0 || a.sequence == 0) {
    return;
  }
#if defined(OCTAVO_HAVE_CUDNN)
  if (a.dtype == DType::kBF16) {
    const Shape s{a.batch, a.sequence, a.heads, a.kv_heads, a.head_dim};
    AttentionPlan* plan = Plans(context)->Backward(s);
    if (plan != nullptr && DqBytes(s) + plan->graph->workspace_bytes() <= a.workspace_bytes) {
      Plans(context)->SetStream(context->stream);
      const bf16* qkv = static_cast<const bf16*>(a.qkv);
      bf16* d_qkv = static_cast<bf16*>(a.d_qkv);
      const std::int64_t k_at = s.heads * s.dim, v_at = (s.heads + s.kv_heads) * s.dim;
      std::uint8_t* workspace = static_cast<std::uint8_t*>(a.workspace);
      context->Record(cudaMemsetAsync(workspace, 0, DqBytes(s), context->stream),
                      "attention_backward");
      const int status = plan->graph->Run({{plan->q, qkv},
                                           {plan->kt, qkv + k_at},
                                           {plan->v, qkv + v_at},
                                           {plan->o, a.out},
                                           {plan->d_o, a.d_out},
                                           {plan->stats, a.lse},
                                           {plan->d_q, d_qkv},
                                           {plan->d_k, d_qkv + k_at},
                                           {plan->d_v, d_qkv + v_at},
                                           {plan->d_q_sum, workspace},
                                           {plan->factor, &a.softmax_factor},
                                           {plan->lowest, &kNegativeInfinity},
                                           {plan->one, &kOne}},
                                          workspace + DqBytes(s));
      if (status != 0) {
        context->RecordText("cuDNN attention backward: status " + std::to_string(status));
      }
      return;
    }
  }
#endif
  a.dtype == DType::kBF16 ? PlainBackward<bf16>(context, a) : PlainBackward<float>(context, a);
  context->Launched("attention_backward");
}

}  // namespace octavo::cuda
