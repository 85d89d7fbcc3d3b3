// One fault of a job's labels, as inject.cc describes them.
#pragma once

#include <cstdint>
#include <limits>
#include <string>

#include "base/str.h"

namespace octavo {

struct Fault {
  std::string kind, op;
  std::int64_t layer = 0, from = 0, to = 0, argument = 0;

  bool nonfinite() const { return kind.starts_with("inf") || kind.starts_with("nan"); }
  // The argument of these counts passes: 1 spares the retry of a step.
  bool IsOn(std::int64_t step, int pass) const {
    return step >= from && step <= to && (!nonfinite() || pass < argument);
  }
  bool Is(std::string_view some_kind, std::string_view some_op) const {
    return kind == some_kind && op == some_op;
  }
  // inf…: infinity, nan…: NaN.
  float value() const {
    return kind.starts_with("inf") ? std::numeric_limits<float>::infinity()
                                   : std::numeric_limits<float>::quiet_NaN();
  }
  std::string Prefix() const { return StrCat("layers.", layer, "."); }
};

}  // namespace octavo
