// Checks of flags whose messages people can read (CLI11's PositiveNumber prints 300 digits).
#pragma once

#include <CLI/CLI.hpp>
#include <map>
#include <string>

#include "base/str.h"
#include "proto/spec/names.h"

namespace octavo {

// A number in [min, max]. CLI::Range lets NaN through, because NaN is neither below nor above.
inline CLI::Validator FiniteRange(double min, double max) {
  return CLI::Validator(
      [min, max](std::string& text) {
        const std::optional<double> value = ParseDouble(text);
        return value.has_value() && *value >= min && *value <= max
                   ? std::string()
                   : StrCat("found ", text, "; valid: a number from ", min, " to ", max);
      },
      "", "finite range");
}

// "host:port" or ":port" to listen on, with a port from 0 to 65535.
inline CLI::Validator ListenAddress() {
  return CLI::Validator(
      [](std::string& text) {
        const std::size_t colon = text.rfind(':');
        const std::optional<std::int64_t> port =
            colon == std::string::npos ? std::nullopt
                                       : ParseInt64(std::string_view(text).substr(colon + 1));
        return port.has_value() && *port >= 0 && *port <= 65535
                   ? std::string()
                   : StrCat("found \"", text,
                            "\"; valid: host:port with a port from 0 (any) to 65535");
      },
      "", "listen address");
}

// Letters, digits, '.', '_' and '-', at most 128: what stands in resource names, labels and paths.
inline CLI::Validator PlainName() {
  return CLI::Validator(
      [](std::string& text) {
        return IsPlainName(text)
                   ? std::string()
                   : StrCat("found \"", text, "\"; valid: 1 to 128 letters, digits, '.', '_', '-'");
      },
      "", "name");
}

// One of the words of a map (word → enumerator), turned into the enumerator.
template <class Enum>
CLI::Validator OneOf(const std::map<std::string, Enum>& words) {
  return CLI::Validator(
      [words](std::string& text) {
        const auto found = words.find(text);
        if (found != words.end()) {
          text = std::to_string(static_cast<int>(found->second));  // what CLI11 reads enums from
          return std::string();
        }
        std::string valid;
        for (const auto& [word, value] : words) {
          StrAppend(&valid, valid.empty() ? "" : ", ", word);
        }
        return StrCat("found \"", text, "\"; valid: ", valid);
      },
      "", "one of");
}

inline CLI::Validator NotEmpty() {
  return CLI::Validator(
      [](std::string& text) {
        return text.empty() ? std::string("must not be empty") : std::string();
      },
      "", "not empty");
}

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
