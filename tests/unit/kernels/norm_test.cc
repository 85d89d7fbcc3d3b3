#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "kernels/cpu/ops_cpu.h"
#include "tests/unit/kernels/values.h"

namespace octavo {
namespace {

constexpr float kEps = 1e-5f;

struct Shape {
  std::int64_t rows, cols;
};

// Widths below, at and above one vector and one chunk.
const Shape kShapes[] = {{1, 1}, {3, 7}, {2, 16}, {5, 128}, {2, 512}, {3, 1100}};

// Element (r, c) of a matrix with row stride ld.
std::size_t At(std::int64_t r, std::int64_t c, std::int64_t ld) {
  return static_cast<std::size_t>(r * ld + c);
}

TEST(RmsNormForward, MatchesFp64WithAndWithoutResidual) {
  for (DType dtype : {DType::kF32, DType::kBF16}) {
    for (const Shape& s : kShapes) {
      for (bool with_residual : {false, true}) {
        Random random(41);
        const std::int64_t ld_x = s.cols + 3, ld_y = s.cols + 1;
        Stored x(random.Normals(s.rows * ld_x), dtype);
        Stored residual(random.Normals(s.rows * s.cols), dtype);
        const std::vector<float> w = random.Normals(s.cols);
        Stored h(static_cast<std::size_t>(s.rows * s.cols), 0.0f, dtype);
        Stored y(static_cast<std::size_t>(s.rows * ld_y), 9.0f, dtype);
        std::vector<float> rstd(static_cast<std::size_t>(s.rows));
        cpu::RmsNormForward(nullptr, {.rows = s.rows,
                                      .cols = s.cols,
                                      .x = x.data(),
                                      .ld_x = ld_x,
                                      .residual = with_residual ? residual.data() : nullptr,
                                      .residual_out = with_residual ? h.data() : nullptr,
                                      .w = w.data(),
                                      .eps = kEps,
                                      .dtype = dtype,
                                      .y = y.data(),
                                      .ld_y = ld_y,
                                      .rstd = rstd.data()});
        for (std::int64_t r = 0; r < s.rows; ++r) {
          double mean = 0;
          std::vector<double> row(static_cast<std::size_t>(s.cols));
          for (std::int64_t c = 0; c < s.cols; ++c) {
            double& v = row[static_cast<std::size_t>(c)];
            v = x[At(r, c, ld_x)];
            if (with_residual) {
              Stored sum(1, static_cast<float>(v + residual[At(r, c, s.cols)]), dtype);
              ASSERT_EQ(h.Get(At(r, c, s.cols)), sum.Get(0));
              v = sum[0];
            }
            mean += v * v / static_cast<double>(s.cols);
          }
          const double want_rstd = 1.0 / std::sqrt(mean + kEps);
          EXPECT_NEAR(rstd[static_cast<std::size_t>(r)] / want_rstd, 1.0, 1e-6);
          for (std::int64_t c = 0; c < s.cols; ++c) {
            const double want =
                row[static_cast<std::size_t>(c)] * want_rstd * w[static_cast<std::size_t>(c)];
            // Half a unit of BF16 is 2^-8; FP32: a few roundings.
            ASSERT_NEAR(y[At(r, c, ld_y)], want,
                        std::fabs(want) * (dtype == DType::kF32 ? 1e-6 : 0.00391) + 1e-30);
          }
          ASSERT_EQ(y.Get(At(r, s.cols, ld_y)), 9.0f) << "wrote past the row";
        }
      }
    }
  }
}

TEST(RmsNormForward, ResidualOutMayAliasResidual) {
  Random random(42);
  const std::int64_t rows = 3, cols = 1100;
  Stored x(random.Normals(rows * cols), DType::kBF16);
  Stored residual(random.Normals(rows * cols), DType::kBF16);
  const std::vector<float> w = random.Normals(cols);
  Stored h(residual.size(), 0.0f, DType::kBF16), y = h, y_aliased = h;
  std::vector<float> rstd(rows);
  RmsNormForwardArgs args = {.rows = rows,
                             .cols = cols,
                             .x = x.data(),
                             .ld_x = cols,
                             .residual = residual.data(),
                             .residual_out = h.data(),
                             .w = w.data(),
                             .eps = kEps,
                             .dtype = DType::kBF16,
                             .y = y.data(),
                             .ld_y = cols,
                             .rstd = rstd.data()};
  cpu::RmsNormForward(nullptr, args);
  args.residual_out = residual.data();
  args.y = y_aliased.data();
  cpu::RmsNormForward(nullptr, args);
  EXPECT_TRUE(residual == h);
  EXPECT_TRUE(y_aliased == y);
}

TEST(RmsNormForward, PropagatesNaNToItsRowOnly) {
  std::vector<float> x(3 * 40, 1.0f);
  x[40 + 33] = std::numeric_limits<float>::quiet_NaN();
  const std::vector<float> w(40, 1.0f);
  std::vector<float> y(x.size()), rstd(3);
  cpu::RmsNormForward(nullptr, {.rows = 3,
                                .cols = 40,
                                .x = x.data(),
                                .ld_x = 40,
                                .w = w.data(),
                                .eps = kEps,
                                .dtype = DType::kF32,
                                .y = y.data(),
                                .ld_y = 40,
                                .rstd = rstd.data()});
  for (std::size_t i = 0; i < y.size(); ++i) {
    EXPECT_EQ(std::isnan(y[i]), i >= 40 && i < 80) << i;
  }
}

// Loss = Σ dy·y as a function of h and w, in FP64.
double Loss(const std::vector<double>& h, const std::vector<double>& w, const Stored& dy,
            std::int64_t rows, std::int64_t cols) {
  double loss = 0;
  for (std::int64_t r = 0; r < rows; ++r) {
    double mean = 0;
    for (std::int64_t c = 0; c < cols; ++c) {
      mean += h[At(r, c, cols)] * h[At(r, c, cols)] / static_cast<double>(cols);
    }
    const double rstd = 1.0 / std::sqrt(mean + kEps);
    for (std::int64_t c = 0; c < cols; ++c) {
      loss += dy[At(r, c, cols)] * h[At(r, c, cols)] * rstd * w[static_cast<std::size_t>(c)];
    }
  }
  return loss;
}

TEST(RmsNormBackward, MatchesFiniteDifferencesOfTheFp64Loss) {
  const std::int64_t rows = 3, cols = 37;
  Random random(43);
  Stored h(random.Normals(rows * cols), DType::kF32);
  Stored dy(random.Normals(rows * cols), DType::kF32);
  Stored d_residual(random.Normals(rows * cols), DType::kF32);
  const std::vector<float> w = random.Normals(cols);
  std::vector<double> h64, w64(w.begin(), w.end());
  std::vector<float> rstd;
  for (std::int64_t r = 0; r < rows; ++r) {
    double mean = 0;
    for (std::int64_t c = 0; c < cols; ++c) {
      h64.push_back(h[At(r, c, cols)]);
      mean += h64.back() * h64.back() / cols;
    }
    rstd.push_back(static_cast<float>(1.0 / std::sqrt(mean + kEps)));
  }
  Stored dx(h.size(), 0.0f, DType::kF32);
  std::vector<float> dw(cols, 0.5f);  // accumulated
  cpu::RmsNormBackward(nullptr, {.rows = rows,
                                 .cols = cols,
                                 .h = h.data(),
                                 .ld_h = cols,
                                 .w = w.data(),
                                 .rstd = rstd.data(),
                                 .dy = dy.data(),
                                 .ld_dy = cols,
                                 .d_residual = d_residual.data(),
                                 .dtype = DType::kF32,
                                 .dx = dx.data(),
                                 .ld_dx = cols,
                                 .dw = dw.data()});
  const double step = 1e-5;  // central differences: error O(step²), noise 1e-16/step
  const auto slope = [&](double* at) {
    const double kept = *at;
    *at = kept + step;
    const double up = Loss(h64, w64, dy, rows, cols);
    *at = kept - step;
    const double down = Loss(h64, w64, dy, rows, cols);
    *at = kept;
    return (up - down) / (2 * step);
  };
  for (std::size_t i = 0; i < h64.size(); ++i) {
    ASSERT_NEAR(dx[i], slope(&h64[i]) + d_residual[i], 5e-6) << i;
  }
  for (std::size_t c = 0; c < w64.size(); ++c) {
    ASSERT_NEAR(dw[c], 0.5 + slope(&w64[c]), 5e-6) << c;
  }
}

TEST(RmsNormBackward, WorksInPlaceOnStridedBf16) {
  Random random(44);
  const std::int64_t rows = 4, cols = 700, ld = 720;
  Stored h(random.Normals(rows * ld), DType::kBF16);
  Stored dy(random.Normals(rows * ld), DType::kBF16);
  const std::vector<float> w = random.Normals(cols);
  const std::vector<float> rstd = {0.9f, 1.0f, 1.1f, 1.2f};
  Stored dx = dy;
  std::vector<float> dw(cols, 0.0f), dw_aliased = dw;
  RmsNormBackwardArgs args = {.rows = rows,
                              .cols = cols,
                              .h = h.data(),
                              .ld_h = ld,
                              .w = w.data(),
                              .rstd = rstd.data(),
                              .dy = dy.data(),
                              .ld_dy = ld,
                              .dtype = DType::kBF16,
                              .dx = dx.data(),
                              .ld_dx = ld,
                              .dw = dw.data()};
  cpu::RmsNormBackward(nullptr, args);
  std::vector<double> want;
  std::vector<double> got;
  for (std::int64_t r = 0; r < rows; ++r) {
    const double s = rstd[static_cast<std::size_t>(r)];
    double mean = 0;
    for (std::int64_t c = 0; c < cols; ++c) {
      mean += dy[At(r, c, ld)] * w[static_cast<std::size_t>(c)] * h[At(r, c, ld)] * s / cols;
    }
    for (std::int64_t c = 0; c < cols; ++c) {
      want.push_back(
          s * (dy[At(r, c, ld)] * w[static_cast<std::size_t>(c)] - h[At(r, c, ld)] * s * mean));
      got.push_back(dx[At(r, c, ld)]);
    }
  }
  EXPECT_LT(RelativeError(got, want), Tolerance(DType::kBF16));
  args.dx = dy.data();
  args.dw = dw_aliased.data();
  cpu::RmsNormBackward(nullptr, args);
  EXPECT_TRUE(dy == dx);
  EXPECT_EQ(dw_aliased, dw);
}

TEST(RmsNorm, NoRowsIsLegal) {
  std::vector<float> dw(8, 1.0f);
  cpu::RmsNormForward(nullptr, {.rows = 0, .cols = 8, .ld_x = 8, .dtype = DType::kF32, .ld_y = 8});
  cpu::RmsNormBackward(nullptr, {.rows = 0, .cols = 8, .dtype = DType::kF32, .dw = dw.data()});
  EXPECT_EQ(dw, std::vector<float>(8, 1.0f));
}

}  // namespace
}  // namespace octavo
