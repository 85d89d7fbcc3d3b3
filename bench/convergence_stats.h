// Statistics of the convergence table: is a recipe's mean loss that of bf16, and could we tell?
//
//   Comparison c = Compare(Summarise(bf16_losses), Summarise(recipe_losses));
//
// NUMERICS 12: |difference of means| <= max(0.25 %, two standard errors). The two samples are not
// paired: perturbed runs part within a few hundred steps, whatever they began with. Variances may
// differ, so standard error and degrees of freedom are Welch's; p is two-sided Student.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>

namespace octavo {

inline constexpr double kAllowedRelative = 0.0025;  // NUMERICS 12
// Two standard errors beyond this make "within" mean little.
inline constexpr double kResolutionRelative = 0.005;

struct Sample {
  std::int64_t n = 0;
  double mean = NAN;
  double sd = NAN;  // of single values, n − 1 in the denominator; NaN below two values
};

inline Sample Summarise(std::span<const double> values) {
  Sample s{.n = static_cast<std::int64_t>(values.size())};
  if (values.empty()) {
    return s;
  }
  double sum = 0;
  for (double v : values) {
    sum += v;
  }
  s.mean = sum / static_cast<double>(s.n);
  if (s.n > 1) {
    double squares = 0;
    for (double v : values) {
      squares += (v - s.mean) * (v - s.mean);
    }
    s.sd = std::sqrt(squares / static_cast<double>(s.n - 1));
  }
  return s;
}

// Regularised incomplete beta function I_x(a, b), 0 <= x <= 1, by Lentz's continued fraction
// (Abramowitz & Stegun 26.5.8), good to 1e-12 for the arguments of a t distribution.
inline double IncompleteBeta(double a, double b, double x) {
  if (x <= 0 || x >= 1) {
    return x <= 0 ? 0 : 1;
  }
  if (x > (a + 1) / (a + b + 2)) {
    return 1 - IncompleteBeta(b, a, 1 - x);
  }
  const double front = std::exp(std::lgamma(a + b) - std::lgamma(a) - std::lgamma(b) +
                                a * std::log(x) + b * std::log1p(-x)) /
                       a;
  constexpr double kTiny = 1e-300;
  const auto safe = [](double v) { return std::fabs(v) < kTiny ? kTiny : v; };
  double c = 1, d = 1 / safe(1 - (a + b) * x / (a + 1)), f = d;
  for (int i = 1; i < 500; ++i) {
    const double m = i;
    double step = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m));
    d = 1 / safe(1 + step * d);
    c = safe(1 + step / c);
    f *= c * d;
    step = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1));
    d = 1 / safe(1 + step * d);
    c = safe(1 + step / c);
    f *= c * d;
    if (std::fabs(c * d - 1) < 1e-14) {
      break;
    }
  }
  return front * f;
}

// P(|T| >= |t|) of Student's t with `degrees` of freedom.
inline double StudentTwoSided(double t, double degrees) {
  return IncompleteBeta(degrees / 2, 0.5, degrees / (degrees + t * t));
}

enum class Verdict : std::uint8_t {
  kUnknown,  // fewer than two values of either, or a NaN among them
  kWithin,
  kCoarse,  // within, but two standard errors are more than kResolutionRelative
  kBelow,   // the recipe's loss is lower than allowed
  kAbove,
};

inline const char* Text(Verdict verdict) {
  switch (verdict) {
    case Verdict::kWithin:
      return "ok";
    case Verdict::kCoarse:
      return "ok, coarse";
    case Verdict::kBelow:
      return "BELOW";
    case Verdict::kAbove:
      return "ABOVE";
    case Verdict::kUnknown:
      break;
  }
  return "unknown";
}

// Fractions of the base's mean, but for degrees and p.
struct Comparison {
  double difference = NAN;
  double standard_error = NAN;
  double allowed = NAN;  // max(0.25 %, two standard errors)
  double degrees = NAN;  // Welch and Satterthwaite
  double p = NAN;
  Verdict verdict = Verdict::kUnknown;
};

inline Comparison Compare(const Sample& base, const Sample& other) {
  Comparison c;
  if (base.n < 1 || other.n < 1) {
    return c;
  }
  c.difference = other.mean / base.mean - 1;
  if (base.n < 2 || other.n < 2 || std::isnan(c.difference)) {
    return c;
  }
  const double nb = static_cast<double>(base.n), no = static_cast<double>(other.n);
  const double vb = base.sd * base.sd / nb, vo = other.sd * other.sd / no;
  c.standard_error = std::sqrt(vb + vo) / base.mean;
  c.allowed = std::max(kAllowedRelative, 2 * c.standard_error);
  if (vb + vo > 0) {
    c.degrees = (vb + vo) * (vb + vo) / (vb * vb / (nb - 1) + vo * vo / (no - 1));
    c.p = StudentTwoSided(c.difference / c.standard_error, c.degrees);
  }
  if (std::fabs(c.difference) > c.allowed) {
    c.verdict = c.difference < 0 ? Verdict::kBelow : Verdict::kAbove;
  } else {
    c.verdict = 2 * c.standard_error > kResolutionRelative ? Verdict::kCoarse : Verdict::kWithin;
  }
  return c;
}

}  // namespace octavo
