#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "kernels/cpu/ops_cpu.h"
#include "tests/unit/kernels/values.h"

namespace octavo {
namespace {

struct Settings {
  double lr = 3e-3, beta1 = 0.9, beta2 = 0.95, eps = 1e-8, weight_decay = 0.1;
};

// The textbook step in FP64; moments are rounded by the caller where it stores them in BF16.
struct Reference {
  std::vector<double> p, m, v;
  void Step(const std::vector<float>& grad, double grad_factor, int t, const Settings& s) {
    for (std::size_t i = 0; i < p.size(); ++i) {
      const double g = static_cast<double>(grad[i]) * grad_factor;
      m[i] = s.beta1 * m[i] + (1 - s.beta1) * g;
      v[i] = s.beta2 * v[i] + (1 - s.beta2) * g * g;
      const double m_hat = m[i] / (1 - std::pow(s.beta1, t));
      const double v_hat = v[i] / (1 - std::pow(s.beta2, t));
      p[i] = p[i] * (1 - s.lr * s.weight_decay) - s.lr * m_hat / (std::sqrt(v_hat) + s.eps);
    }
  }
};

AdamWArgs Args(std::vector<float>* p, const std::vector<float>& grad, Stored* m, Stored* v,
               const float* factor, const std::int32_t* skip, std::int64_t t, const Settings& s) {
  return {.n = static_cast<std::int64_t>(p->size()),
          .master = p->data(),
          .grad = grad.data(),
          .m = m->data(),
          .v = v->data(),
          .moment_dtype = m->dtype(),
          .copy = nullptr,
          .copy_dtype = DType::kBF16,
          .lr = static_cast<float>(s.lr),
          .beta1 = static_cast<float>(s.beta1),
          .beta2 = static_cast<float>(s.beta2),
          .eps = static_cast<float>(s.eps),
          .weight_decay = static_cast<float>(s.weight_decay),
          .t = t,
          .grad_factor = factor,
          .skip = skip};
}

TEST(AdamW, FollowsTheFp64ReferenceOverManySteps) {
  const Settings s;
  Random random(21);
  const std::int64_t n = 1111;
  std::vector<float> p = random.Normals(n, 0.02f);
  Reference reference = {.p = std::vector<double>(p.begin(), p.end()),
                         .m = std::vector<double>(p.size(), 0.0),
                         .v = std::vector<double>(p.size(), 0.0)};
  Stored m(p.size(), 0.0f, DType::kF32);
  Stored v(p.size(), 0.0f, DType::kF32);
  const std::int32_t skip = 0;
  for (int t = 1; t <= 20; ++t) {
    const std::vector<float> grad = random.Normals(n, 0.1f);
    const float factor = t % 2 == 0 ? 0.25f : 1.0f;
    cpu::AdamW(nullptr, Args(&p, grad, &m, &v, &factor, &skip, t, s));
    reference.Step(grad, factor, t, s);
    // 20 steps of relative error 2^-24 in each of some ten operations; lr, betas rounded to FP32.
    ASSERT_LT(RelativeError(p, reference.p), 2e-6) << "t = " << t;
    ASSERT_LT(RelativeError(m, reference.m), 2e-6) << "t = " << t;
    ASSERT_LT(RelativeError(v, reference.v), 2e-6) << "t = " << t;
  }
}

TEST(AdamW, RoundsBf16MomentsOnlyWhenItStoresThem) {
  const Settings s;
  Random random(22);
  const std::int64_t n = 600;
  std::vector<float> p = random.Normals(n, 0.02f);
  Reference reference = {.p = std::vector<double>(p.begin(), p.end()),
                         .m = std::vector<double>(p.size(), 0.0),
                         .v = std::vector<double>(p.size(), 0.0)};
  Stored m(p.size(), 0.0f, DType::kBF16);
  Stored v(p.size(), 0.0f, DType::kBF16);
  const float factor = 1.0f;
  const std::int32_t skip = 0;
  for (int t = 1; t <= 5; ++t) {
    const std::vector<float> grad = random.Normals(n, 0.1f);
    for (std::size_t i = 0; i < p.size(); ++i) {  // start from the moments that are stored
      reference.m[i] = m[i];
      reference.v[i] = v[i];
    }
    cpu::AdamW(nullptr, Args(&p, grad, &m, &v, &factor, &skip, t, s));
    reference.Step(grad, factor, t, s);
    // Rounding m or v before the update would show as 1e-3 of lr, ten times this bound.
    for (std::size_t i = 0; i < p.size(); ++i) {
      ASSERT_NEAR(p[i], reference.p[i], 1e-4 * s.lr) << i << " at t = " << t;
      // Half a unit in the last place of BF16, and FP32 noise where the exact value is near a tie.
      ASSERT_NEAR(m[i], reference.m[i], std::fabs(reference.m[i]) * 0.00391 + 1e-9) << i;
      ASSERT_NEAR(v[i], reference.v[i], std::fabs(reference.v[i]) * 0.00391 + 1e-12) << i;
      reference.p[i] = p[i];
    }
  }
}

TEST(AdamW, SkipFlagChangesNothingAtAll) {
  Random random(23);
  std::vector<float> p = random.Normals(50);
  const std::vector<float> p_before = p;
  const std::vector<float> grad(50, std::numeric_limits<float>::quiet_NaN());
  Stored m(random.Normals(50), DType::kBF16);
  Stored v(random.Normals(50), DType::kBF16);
  Stored copy(random.Normals(50), DType::kBF16);
  const Stored m_before = m, v_before = v, copy_before = copy;
  const float factor = 1.0f;
  const std::int32_t skip = 1;
  AdamWArgs args = Args(&p, grad, &m, &v, &factor, &skip, 3, Settings());
  args.copy = copy.data();
  cpu::AdamW(nullptr, args);
  EXPECT_EQ(p, p_before);
  EXPECT_TRUE(m == m_before && v == v_before && copy == copy_before);
}

TEST(AdamW, WritesTheRoundedCopyOfTheNewParameter) {
  Random random(24);
  for (DType dtype : {DType::kBF16, DType::kF32}) {
    std::vector<float> p = random.Normals(700);
    const std::vector<float> grad = random.Normals(700);
    Stored m(700, 0.0f, DType::kF32);
    Stored v(700, 0.0f, DType::kF32);
    Stored copy(700, 0.0f, dtype);
    const float factor = 1.0f;
    const std::int32_t skip = 0;
    AdamWArgs args = Args(&p, grad, &m, &v, &factor, &skip, 1, Settings());
    args.copy = copy.data();
    args.copy_dtype = dtype;
    cpu::AdamW(nullptr, args);
    EXPECT_TRUE(copy == Stored(p, dtype)) << Name(dtype);
  }
}

// Decoupled: with a zero gradient the parameter shrinks by lr·weight_decay and by nothing else.
TEST(AdamW, DecayIsIndependentOfTheGradient) {
  const Settings s = {.lr = 0.01, .weight_decay = 0.5};
  std::vector<float> p = {1.0f, -2.0f};
  const std::vector<float> grad = {0.0f, 0.0f};
  Stored m(2, 0.0f, DType::kF32);
  Stored v(2, 0.0f, DType::kF32);
  const float factor = 1.0f;
  const std::int32_t skip = 0;
  cpu::AdamW(nullptr, Args(&p, grad, &m, &v, &factor, &skip, 1, s));
  EXPECT_FLOAT_EQ(p[0], 0.995f);
  EXPECT_FLOAT_EQ(p[1], -1.99f);
}

}  // namespace
}  // namespace octavo
