// Causal grouped-query attention, forward and backward, FP32 inside.
//
// Per (batch, KV head) K and V are unpacked to FP32 once and used by the whole group of query
// heads; queries go in blocks of kAttentionBlock rows against keys [0, end of block), so that half
// of the square above the diagonal is never computed. Products are sgemm calls; the softmax keeps
// its row maximum. Backward recomputes P from the saved logarithm of the denominator:
//   P = exp(f·QKᵀ − lse), dV = Pᵀ·dO, dP = dO·Vᵀ, δ = rowsum(dO ∘ O),
//   dS = f·P ∘ (dP − δ), dQ = dS·K, dK = dSᵀ·Q.
#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "kernels/cpu/blas.h"
#include "kernels/cpu/ops_cpu.h"
#include "kernels/cpu/rows.h"
#include "kernels/cpu/workspace.h"

namespace octavo::cpu {
namespace {

// Where things are in the packed rows.
struct Geometry {
  std::int64_t batch, sequence, heads, kv_heads, dim;
  std::int64_t group() const { return heads / kv_heads; }
  std::int64_t qkv_stride() const { return (heads + 2 * kv_heads) * dim; }
  std::int64_t out_stride() const { return heads * dim; }
  std::int64_t q_at(std::int64_t h) const { return h * dim; }
  std::int64_t k_at(std::int64_t h) const { return (heads + h) * dim; }
  std::int64_t v_at(std::int64_t h) const { return (heads + kv_heads + h) * dim; }
};

void CheckGeometry(const Geometry& g) {
  OCTAVO_CHECK(g.dim > 0 && g.kv_heads > 0 && g.heads % g.kv_heads == 0,
               "heads = %lld, kv_heads = %lld, head_dim = %lld", static_cast<long long>(g.heads),
               static_cast<long long>(g.kv_heads), static_cast<long long>(g.dim));
}

// dst [rows, dim] = rows of one head of a packed matrix.
void Unpack(const void* packed, DType dtype, std::int64_t at, std::int64_t stride,
            std::int64_t rows, std::int64_t dim, float* dst) {
  for (std::int64_t r = 0; r < rows; ++r) {
    const float* x = LoadRow(packed, dtype, at + r * stride, dim, dst + r * dim);
    if (x != dst + r * dim) {
      std::copy(x, x + dim, dst + r * dim);
    }
  }
}

void Pack(const float* src, std::int64_t rows, std::int64_t dim, void* packed, DType dtype,
          std::int64_t at, std::int64_t stride) {
  for (std::int64_t r = 0; r < rows; ++r) {
    StoreRow(src + r * dim, dim, packed, dtype, at + r * stride);
  }
}

// Hands out pieces of the caller's workspace.
class Scratch {
 public:
  Scratch(void* memory, std::int64_t bytes)
      : next_(static_cast<float*>(memory)), left_(bytes / 4) {}
  float* Take(std::int64_t elements) {
    OCTAVO_CHECK(elements <= left_, "attention workspace is %lld floats short",
                 static_cast<long long>(elements - left_));
    float* taken = next_;
    next_ += elements;
    left_ -= elements;
    return taken;
  }

 private:
  float* next_;
  std::int64_t left_;
};

// c [m, n] = beta·c + a · b of packed row-major FP32 matrices, either transposed.
void Product(std::int64_t m, std::int64_t n, std::int64_t k, const float* a,
             Transposed a_transposed, const float* b, Transposed b_transposed, float* c,
             float beta) {
  Sgemm({.m = m,
         .n = n,
         .k = k,
         .a = a,
         .a_transposed = a_transposed,
         .lda = a_transposed == Transposed::kYes ? m : k,
         .b = b,
         .b_transposed = b_transposed,
         .ldb = b_transposed == Transposed::kYes ? k : n,
         .c = c,
         .ldc = n,
         .beta = beta});
}

// scores [rows, keys] = x [rows, dim] · y [keys, dim]ᵀ
void RowsTimesKeys(const float* x, std::int64_t rows, const float* y, std::int64_t keys,
                   std::int64_t dim, float* scores) {
  Product(rows, keys, dim, x, Transposed::kNo, y, Transposed::kYes, scores, 0);
}

// out [rows, dim] = weights [rows, keys] · y [keys, dim]
void WeighKeys(const float* weights, std::int64_t rows, const float* y, std::int64_t keys,
               std::int64_t dim, float* out) {
  Product(rows, dim, keys, weights, Transposed::kNo, y, Transposed::kNo, out, 0);
}

// out [keys, dim] += weights [rows, keys]ᵀ · x [rows, dim]
void AddWeighedRows(const float* weights, std::int64_t rows, const float* x, std::int64_t keys,
                    std::int64_t dim, float* out) {
  Product(keys, dim, rows, weights, Transposed::kYes, x, Transposed::kNo, out, 1);
}

// dS in place of dP: f·P∘(dP − δ).
OCTAVO_MULTIVERSION void ScoreGradient(const float* __restrict p, float delta, float factor,
                                       std::int64_t n, float* __restrict dp) {
  for (std::int64_t i = 0; i < n; ++i) {
    dp[i] = factor * (p[i] * (dp[i] - delta));
  }
}

}  // namespace

void AttentionForward(OpsContext*, const AttentionForwardArgs& a) {
  const Geometry g = {a.batch, a.sequence, a.heads, a.kv_heads, a.head_dim};
  if (g.batch == 0 || g.sequence == 0) {
    return;
  }
  CheckGeometry(g);
  Scratch scratch(a.workspace, a.workspace_bytes);
  const std::int64_t block = std::min(kAttentionBlock, g.sequence);
  float* k = scratch.Take(g.sequence * g.dim);
  float* v = scratch.Take(g.sequence * g.dim);
  float* q = scratch.Take(block * g.dim);
  float* out = scratch.Take(block * g.dim);
  float* scores = scratch.Take(block * g.sequence);
  for (std::int64_t b = 0; b < g.batch; ++b) {
    const std::int64_t qkv = b * g.sequence * g.qkv_stride();
    for (std::int64_t kv = 0; kv < g.kv_heads; ++kv) {
      Unpack(a.qkv, a.dtype, qkv + g.k_at(kv), g.qkv_stride(), g.sequence, g.dim, k);
      Unpack(a.qkv, a.dtype, qkv + g.v_at(kv), g.qkv_stride(), g.sequence, g.dim, v);
      for (std::int64_t h = kv * g.group(); h < (kv + 1) * g.group(); ++h) {
        float* lse = a.lse + (b * g.heads + h) * g.sequence;
        for (std::int64_t begin = 0; begin < g.sequence; begin += block) {
          const std::int64_t rows = std::min(block, g.sequence - begin);
          const std::int64_t keys = begin + rows;
          Unpack(a.qkv, a.dtype, qkv + g.q_at(h) + begin * g.qkv_stride(), g.qkv_stride(), rows,
                 g.dim, q);
          RowsTimesKeys(q, rows, k, keys, g.dim, scores);
          for (std::int64_t r = 0; r < rows; ++r) {
            float* row = scores + r * keys;
            const std::int64_t visible = begin + r + 1;
            const float max = RowMax(row, visible) * a.softmax_factor;
            Lanes lanes;
            ExpRow(row, visible, a.softmax_factor, max, row, &lanes);
            std::fill(row + visible, row + keys, 0.0f);
            const float sum = lanes.Total();
            ScaleRow(row, visible, 1.0f / sum, row);
            lse[begin + r] = max + static_cast<float>(std::log(static_cast<double>(sum)));
          }
          WeighKeys(scores, rows, v, keys, g.dim, out);
          Pack(out, rows, g.dim, a.out, a.dtype,
               (b * g.sequence + begin) * g.out_stride() + g.q_at(h), g.out_stride());
        }
      }
    }
  }
}

void AttentionBackward(OpsContext*, const AttentionBackwardArgs& a) {
  const Geometry g = {a.batch, a.sequence, a.heads, a.kv_heads, a.head_dim};
  if (g.batch == 0 || g.sequence == 0) {
    return;
  }
  CheckGeometry(g);
  Scratch scratch(a.workspace, a.workspace_bytes);
  const std::int64_t block = std::min(kAttentionBlock, g.sequence);
  float* k = scratch.Take(g.sequence * g.dim);
  float* v = scratch.Take(g.sequence * g.dim);
  float* dk = scratch.Take(g.sequence * g.dim);
  float* dv = scratch.Take(g.sequence * g.dim);
  float* q = scratch.Take(block * g.dim);
  float* dq = scratch.Take(block * g.dim);
  float* out = scratch.Take(block * g.dim);
  float* d_out = scratch.Take(block * g.dim);
  float* p = scratch.Take(block * g.sequence);
  float* ds = scratch.Take(block * g.sequence);
  for (std::int64_t b = 0; b < g.batch; ++b) {
    const std::int64_t qkv = b * g.sequence * g.qkv_stride();
    for (std::int64_t kv = 0; kv < g.kv_heads; ++kv) {
      Unpack(a.qkv, a.dtype, qkv + g.k_at(kv), g.qkv_stride(), g.sequence, g.dim, k);
      Unpack(a.qkv, a.dtype, qkv + g.v_at(kv), g.qkv_stride(), g.sequence, g.dim, v);
      std::fill_n(dk, g.sequence * g.dim, 0.0f);
      std::fill_n(dv, g.sequence * g.dim, 0.0f);
      for (std::int64_t h = kv * g.group(); h < (kv + 1) * g.group(); ++h) {
        const float* lse = a.lse + (b * g.heads + h) * g.sequence;
        for (std::int64_t begin = 0; begin < g.sequence; begin += block) {
          const std::int64_t rows = std::min(block, g.sequence - begin);
          const std::int64_t keys = begin + rows;
          const std::int64_t q_at = qkv + g.q_at(h) + begin * g.qkv_stride();
          const std::int64_t out_at = (b * g.sequence + begin) * g.out_stride() + g.q_at(h);
          Unpack(a.qkv, a.dtype, q_at, g.qkv_stride(), rows, g.dim, q);
          Unpack(a.out, a.dtype, out_at, g.out_stride(), rows, g.dim, out);
          Unpack(a.d_out, a.dtype, out_at, g.out_stride(), rows, g.dim, d_out);
          RowsTimesKeys(q, rows, k, keys, g.dim, p);
          RowsTimesKeys(d_out, rows, v, keys, g.dim, ds);
          for (std::int64_t r = 0; r < rows; ++r) {
            const std::int64_t visible = begin + r + 1;
            float* p_row = p + r * keys;
            float* ds_row = ds + r * keys;
            Lanes unused;
            ExpRow(p_row, visible, a.softmax_factor, lse[begin + r], p_row, &unused);
            Lanes delta;
            AddDot(d_out + r * g.dim, out + r * g.dim, g.dim, &delta);
            ScoreGradient(p_row, delta.Total(), a.softmax_factor, visible, ds_row);
            std::fill(p_row + visible, p_row + keys, 0.0f);
            std::fill(ds_row + visible, ds_row + keys, 0.0f);
          }
          AddWeighedRows(p, rows, d_out, keys, g.dim, dv);
          AddWeighedRows(ds, rows, q, keys, g.dim, dk);
          WeighKeys(ds, rows, k, keys, g.dim, dq);
          Pack(dq, rows, g.dim, a.d_qkv, a.dtype, q_at, g.qkv_stride());
        }
      }
      Pack(dk, g.sequence, g.dim, a.d_qkv, a.dtype, qkv + g.k_at(kv), g.qkv_stride());
      Pack(dv, g.sequence, g.dim, a.d_qkv, a.dtype, qkv + g.v_at(kv), g.qkv_stride());
    }
  }
}

}  // namespace octavo::cpu
