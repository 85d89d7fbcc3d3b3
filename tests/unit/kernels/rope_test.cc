#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "kernels/cpu/ops_cpu.h"
#include "tests/unit/kernels/values.h"

namespace octavo {
namespace {

struct Case {
  std::int64_t rows, sequence, row_stride;
  int first_head, heads, head_dim;
  float theta;
};

const Case kCases[] = {
    {10, 5, 3 * 16, 0, 2, 16, 10000.0f},
    {7, 7, 5 * 64 + 8, 1, 3, 64, 500000.0f},
    {6, 100, 2 * 10, 0, 2, 10, 100.0f},  // fewer rows than the sequence, odd half
    {3, 2, 4, 0, 2, 2, 10000.0f},
};

RopeArgs Args(const Case& c, Stored* x, int direction) {
  return {.x = x->data(),
          .dtype = x->dtype(),
          .rows = c.rows,
          .sequence = c.sequence,
          .row_stride = c.row_stride,
          .first_head = c.first_head,
          .heads = c.heads,
          .head_dim = c.head_dim,
          .theta = c.theta,
          .direction = direction};
}

TEST(Rope, RotatesPairsByTheFp64AngleAndTouchesNothingElse) {
  for (DType dtype : {DType::kF32, DType::kBF16}) {
    for (const Case& c : kCases) {
      for (int direction : {1, -1}) {
        Random random(51);
        Stored x(random.Normals(c.rows * c.row_stride), dtype);
        const Stored before = x;
        cpu::Rope(nullptr, Args(c, &x, direction));
        for (std::int64_t r = 0; r < c.rows; ++r) {
          for (std::int64_t i = 0; i < c.row_stride; ++i) {
            const auto at = static_cast<std::size_t>(r * c.row_stride + i);
            const std::int64_t head = i / c.head_dim;
            if (head < c.first_head || head >= c.first_head + c.heads) {
              ASSERT_EQ(x.Get(at), before.Get(at)) << "row " << r << " column " << i;
              continue;
            }
            const int half = c.head_dim / 2;
            const int d = static_cast<int>(i % c.head_dim);
            const double angle =
                direction * static_cast<double>(r % c.sequence) *
                std::pow(static_cast<double>(c.theta), -2.0 * (d % half) / c.head_dim);
            const double partner = d < half ? -before[at + static_cast<std::size_t>(half)]
                                            : before[at - static_cast<std::size_t>(half)];
            const double want = before[at] * std::cos(angle) + partner * std::sin(angle);
            // Values of size ~3: FP32 keeps three roundings of 2^-24, BF16 one of 2^-8.
            ASSERT_NEAR(x[at], want, dtype == DType::kF32 ? 1e-6 : 0.00391 * std::fabs(want) + 1e-6)
                << "row " << r << " column " << i;
          }
        }
      }
    }
  }
}

TEST(Rope, BackwardUndoesForward) {
  const Case c = {64, 64, 2 * 128, 0, 2, 128, 10000.0f};
  Random random(52);
  Stored x(random.Normals(c.rows * c.row_stride), DType::kF32);
  std::vector<double> want;
  for (std::size_t i = 0; i < x.size(); ++i) {
    want.push_back(x[i]);
  }
  cpu::Rope(nullptr, Args(c, &x, 1));
  EXPECT_GT(RelativeError(x, want), 0.1);
  cpu::Rope(nullptr, Args(c, &x, -1));
  EXPECT_LT(RelativeError(x, want), 3e-7);
}

// The table of angles is kept between calls: another geometry must not see the old one.
TEST(Rope, AlternatingGeometriesGiveTheBitsOfFreshCalls) {
  Random random(53);
  const Stored start(random.Normals(2000), DType::kF32);
  const auto run = [&](std::int64_t sequence, int head_dim, float theta) {
    Stored x = start;
    cpu::Rope(nullptr, {.x = x.data(),
                        .dtype = DType::kF32,
                        .rows = 20,
                        .sequence = sequence,
                        .row_stride = 100,
                        .first_head = 0,
                        .heads = 2,
                        .head_dim = head_dim,
                        .theta = theta,
                        .direction = 1});
    return x;
  };
  const Stored first = run(20, 32, 1e4f);
  const Stored other = run(10, 32, 1e6f);
  const Stored narrow = run(20, 16, 1e4f);
  EXPECT_TRUE(run(20, 32, 1e4f) == first);
  EXPECT_TRUE(run(10, 32, 1e6f) == other);
  EXPECT_TRUE(run(20, 16, 1e4f) == narrow);
  EXPECT_FALSE(first == other);
}

TEST(RopeDeathTest, OddHeadDimEndsTheProcess) {
  std::vector<float> x(30);
  const RopeArgs args = {.x = x.data(),
                         .dtype = DType::kF32,
                         .rows = 1,
                         .sequence = 1,
                         .row_stride = 30,
                         .first_head = 0,
                         .heads = 2,
                         .head_dim = 15,
                         .theta = 1e4f,
                         .direction = 1};
  EXPECT_DEATH(cpu::Rope(nullptr, args), "head_dim = 15 must be even");
}

}  // namespace
}  // namespace octavo
