// Checks of flags whose messages people can read (CLI11's PositiveNumber prints 300 digits).
#pragma once

#include <CLI/CLI.hpp>
#include <string>

#include "base/str.h"

namespace octavo {

inline CLI::Validator AtLeast(std::int64_t min) {
  return CLI::Validator(
      [min](std::string& text) {
        const std::optional<std::int64_t> value = ParseInt64(text);
        return value.has_value() && *value >= min
                   ? std::string()
                   : StrCat("found ", text, "; valid: an integer, at least ", min);
      },
      "", "at least");
}

}  // namespace octavo
