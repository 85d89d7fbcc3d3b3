#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "kernels/cpu/ops_cpu.h"
#include "kernels/cpu/workspace.h"
#include "tests/unit/kernels/values.h"

namespace octavo {
namespace {

struct Shape {
  std::int64_t batch, sequence;
  int heads, kv_heads, head_dim;
  std::int64_t qkv_width() const { return (heads + 2 * kv_heads) * head_dim; }
  std::int64_t out_width() const { return heads * head_dim; }
  std::string Text() const {
    return "B " + std::to_string(batch) + " S " + std::to_string(sequence) + " Hq " +
           std::to_string(heads) + " Hkv " + std::to_string(kv_heads) + " D " +
           std::to_string(head_dim);
  }
};

// Lengths of one, around one block and several blocks; groups of 1, 2 and 4; narrow and wide heads.
const Shape kShapes[] = {{1, 1, 1, 1, 16},  {2, 7, 2, 1, 16},   {1, 63, 4, 2, 32},
                         {2, 64, 2, 2, 64}, {1, 65, 4, 1, 128}, {1, 131, 2, 1, 96}};

// Attention by the definition in FP64: per query a softmax over the keys up to it.
struct Oracle {
  std::vector<double> out, lse, d_qkv;
};

Oracle Fp64(const Shape& s, const Stored& qkv, const Stored* d_out, double factor) {
  Oracle o;
  const std::int64_t group = s.heads / s.kv_heads;
  o.out.assign(static_cast<std::size_t>(s.batch * s.sequence * s.out_width()), 0.0);
  o.lse.assign(static_cast<std::size_t>(s.batch * s.heads * s.sequence), 0.0);
  o.d_qkv.assign(static_cast<std::size_t>(s.batch * s.sequence * s.qkv_width()), 0.0);
  for (std::int64_t b = 0; b < s.batch; ++b) {
    for (std::int64_t h = 0; h < s.heads; ++h) {
      const auto at = [&](std::int64_t row, std::int64_t head, std::int64_t d) {
        return static_cast<std::size_t>((b * s.sequence + row) * s.qkv_width() + head * s.head_dim +
                                        d);
      };
      const std::int64_t hk = s.heads + h / group;
      const std::int64_t hv = hk + s.kv_heads;
      for (std::int64_t i = 0; i < s.sequence; ++i) {
        std::vector<double> p;
        double max = -HUGE_VAL, sum = 0;
        for (std::int64_t j = 0; j <= i; ++j) {
          double score = 0;
          for (std::int64_t d = 0; d < s.head_dim; ++d) {
            score += qkv[at(i, h, d)] * qkv[at(j, hk, d)];
          }
          p.push_back(score * factor);
          max = std::max(max, p.back());
        }
        for (double& v : p) {
          v = std::exp(v - max);
          sum += v;
        }
        o.lse[static_cast<std::size_t>((b * s.heads + h) * s.sequence + i)] = max + std::log(sum);
        const auto out_at =
            static_cast<std::size_t>((b * s.sequence + i) * s.out_width() + h * s.head_dim);
        std::vector<double> dp;
        double mean = 0;
        for (std::int64_t j = 0; j <= i; ++j) {
          double& weight = p[static_cast<std::size_t>(j)];
          weight /= sum;
          double d_weight = 0;
          for (std::int64_t d = 0; d < s.head_dim; ++d) {
            const std::size_t to = out_at + static_cast<std::size_t>(d);
            o.out[to] += weight * qkv[at(j, hv, d)];
            if (d_out != nullptr) {
              o.d_qkv[at(j, hv, d)] += weight * (*d_out)[to];
              d_weight += qkv[at(j, hv, d)] * (*d_out)[to];
            }
          }
          dp.push_back(d_weight);
          mean += weight * d_weight;
        }
        for (std::int64_t j = 0; j <= i && d_out != nullptr; ++j) {
          const auto js = static_cast<std::size_t>(j);
          const double ds = p[js] * (dp[js] - mean) * factor;
          for (std::int64_t d = 0; d < s.head_dim; ++d) {
            o.d_qkv[at(i, h, d)] += ds * qkv[at(j, hk, d)];
            o.d_qkv[at(j, hk, d)] += ds * qkv[at(i, h, d)];
          }
        }
      }
    }
  }
  return o;
}

struct Result {
  Stored out;
  std::vector<float> lse;
};

Result Forward(const Shape& s, Stored* qkv, float factor) {
  Result r = {
      .out = Stored(static_cast<std::size_t>(s.batch * s.sequence * s.out_width()), 7.0f,
                    qkv->dtype()),
      .lse = std::vector<float>(static_cast<std::size_t>(s.batch * s.heads * s.sequence), 7.0f)};
  const std::int64_t bytes = cpu::AttentionForwardWorkspaceBytes(s.sequence, s.head_dim);
  // Garbage in the workspace must not matter.
  std::vector<float> workspace(static_cast<std::size_t>(bytes / 4),
                               std::numeric_limits<float>::quiet_NaN());
  cpu::AttentionForward(nullptr, {.batch = s.batch,
                                  .sequence = s.sequence,
                                  .heads = s.heads,
                                  .kv_heads = s.kv_heads,
                                  .head_dim = s.head_dim,
                                  .qkv = qkv->data(),
                                  .dtype = qkv->dtype(),
                                  .softmax_factor = factor,
                                  .out = r.out.data(),
                                  .lse = r.lse.data(),
                                  .workspace = workspace.data(),
                                  .workspace_bytes = bytes});
  return r;
}

Stored Backward(const Shape& s, Stored* qkv, Result* forward, Stored* d_out, float factor) {
  Stored d_qkv(qkv->size(), 7.0f, qkv->dtype());
  const std::int64_t bytes = cpu::AttentionBackwardWorkspaceBytes(s.sequence, s.head_dim);
  std::vector<float> workspace(static_cast<std::size_t>(bytes / 4),
                               std::numeric_limits<float>::quiet_NaN());
  cpu::AttentionBackward(nullptr, {.batch = s.batch,
                                   .sequence = s.sequence,
                                   .heads = s.heads,
                                   .kv_heads = s.kv_heads,
                                   .head_dim = s.head_dim,
                                   .qkv = qkv->data(),
                                   .out = forward->out.data(),
                                   .d_out = d_out->data(),
                                   .lse = forward->lse.data(),
                                   .dtype = qkv->dtype(),
                                   .softmax_factor = factor,
                                   .d_qkv = d_qkv.data(),
                                   .workspace = workspace.data(),
                                   .workspace_bytes = bytes});
  return d_qkv;
}

TEST(Attention, ForwardAndBackwardMatchFp64) {
  for (DType dtype : {DType::kF32, DType::kBF16}) {
    for (const Shape& s : kShapes) {
      Random random(71);
      const float factor = 1.0f / std::sqrt(static_cast<float>(s.head_dim));
      Stored qkv(random.Normals(s.batch * s.sequence * s.qkv_width(), 1.5f), dtype);
      Stored d_out(random.Normals(s.batch * s.sequence * s.out_width()), dtype);
      Result forward = Forward(s, &qkv, factor);
      const Oracle want = Fp64(s, qkv, &d_out, factor);
      EXPECT_LT(RelativeError(forward.out, want.out), Tolerance(dtype)) << s.Text();
      EXPECT_LT(RelativeError(forward.lse, want.lse), 1e-6) << s.Text();
      const Stored d_qkv = Backward(s, &qkv, &forward, &d_out, factor);
      if (s.sequence > 1) {
        // BF16: δ = dO·O sees the rounded O, which enters dQ and dK beside the last rounding
        // (NUMERICS 12 asks for 5e-3). FP32: exp(f·s − lse) carries the rounding of lse.
        EXPECT_LT(RelativeError(d_qkv, want.d_qkv), dtype == DType::kF32 ? 4e-6 : 5e-3) << s.Text();
      }
    }
  }
}

TEST(Attention, AQueryDoesNotSeeLaterTokens) {
  const Shape s = {1, 70, 2, 1, 16};
  Random random(72);
  Stored qkv(random.Normals(s.sequence * s.qkv_width()), DType::kF32);
  const Result before = Forward(s, &qkv, 0.25f);
  const std::int64_t changed = 66;
  for (std::int64_t i = changed * s.qkv_width(); i < s.sequence * s.qkv_width(); ++i) {
    qkv.Set(static_cast<std::size_t>(i), std::numeric_limits<float>::quiet_NaN());
  }
  const Result after = Forward(s, &qkv, 0.25f);
  for (std::int64_t i = 0; i < s.sequence * s.out_width(); ++i) {
    const auto at = static_cast<std::size_t>(i);
    if (i < 64 * s.out_width()) {  // another block: the same products, so the same bits
      ASSERT_EQ(after.out.Get(at), before.out.Get(at)) << i;
    } else if (i >= changed * s.out_width()) {
      ASSERT_TRUE(std::isnan(after.out.Get(at))) << i;
    }
  }
}

TEST(Attention, LargeScoresDoNotOverflow) {
  const Shape s = {1, 5, 1, 1, 16};
  Random random(73);
  Stored qkv(random.Normals(s.sequence * s.qkv_width(), 100.0f), DType::kF32);
  Result forward = Forward(s, &qkv, 1.0f);
  const Oracle want = Fp64(s, qkv, nullptr, 1.0);
  // Scores of size 1e5 leave an absolute error of 1e-2 in the exponent; the largest one wins
  // anyway.
  EXPECT_LT(RelativeError(forward.out, want.out), 0.05);
  EXPECT_LT(RelativeError(forward.lse, want.lse), 1e-6);
}

TEST(Attention, RepeatsItsBits) {
  const Shape s = {2, 100, 4, 2, 32};
  Random random(74);
  Stored qkv(random.Normals(s.batch * s.sequence * s.qkv_width()), DType::kBF16);
  Stored d_out(random.Normals(s.batch * s.sequence * s.out_width()), DType::kBF16);
  Result first = Forward(s, &qkv, 0.2f);
  Result second = Forward(s, &qkv, 0.2f);
  EXPECT_TRUE(first.out == second.out);
  EXPECT_EQ(first.lse, second.lse);
  EXPECT_TRUE(Backward(s, &qkv, &first, &d_out, 0.2f) == Backward(s, &qkv, &second, &d_out, 0.2f));
}

TEST(AttentionDeathTest, ShortWorkspaceEndsTheProcess) {
  const Shape s = {1, 8, 1, 1, 16};
  Stored qkv(static_cast<std::size_t>(s.sequence * s.qkv_width()), 0.0f, DType::kF32);
  std::vector<float> out(8 * 16), lse(8), workspace(10);
  const AttentionForwardArgs args = {.batch = 1,
                                     .sequence = 8,
                                     .heads = 1,
                                     .kv_heads = 1,
                                     .head_dim = 16,
                                     .qkv = qkv.data(),
                                     .dtype = DType::kF32,
                                     .softmax_factor = 1,
                                     .out = out.data(),
                                     .lse = lse.data(),
                                     .workspace = workspace.data(),
                                     .workspace_bytes = 40};
  EXPECT_DEATH(cpu::AttentionForward(nullptr, args), "attention workspace");
}

}  // namespace
}  // namespace octavo
