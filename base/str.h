// Small string helpers on std types: join, split, strict number parsing, human units, "did you
// mean".
#pragma once

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

namespace octavo {

namespace str_internal {

template <class T>
void AppendPiece(std::string* out, const T& piece) {
  if constexpr (std::is_convertible_v<const T&, std::string_view>) {
    *out += std::string_view(piece);
  } else if constexpr (std::is_same_v<T, bool>) {
    *out += piece ? "true" : "false";
  } else if constexpr (std::is_same_v<T, char>) {
    *out += piece;
  } else if constexpr (std::is_integral_v<T>) {
    *out += std::to_string(piece);
  } else if constexpr (std::is_floating_point_v<T>) {
    // Six significant digits, as printf's %g: these are for people. Exact round trips use to_chars.
    char text[48];
    std::snprintf(text, sizeof(text), "%g", static_cast<double>(piece));
    *out += text;
  } else if constexpr (requires { std::string_view(piece.data(), piece.size()); }) {
    *out += std::string_view(piece.data(), piece.size());  // absl::string_view and alike
  } else {
    std::ostringstream stream;
    stream << piece;
    *out += stream.str();
  }
}

}  // namespace str_internal

// Concatenates text, numbers, bool (true/false), char and anything with operator<<.
template <class... Pieces>
std::string StrCat(const Pieces&... pieces) {
  std::string out;
  (str_internal::AppendPiece(&out, pieces), ...);
  return out;
}

template <class... Pieces>
void StrAppend(std::string* out, const Pieces&... pieces) {
  (str_internal::AppendPiece(out, pieces), ...);
}

template <class Range>
std::string StrJoin(const Range& range, std::string_view separator) {
  std::string out;
  bool first = true;
  for (const auto& piece : range) {
    if (!first) {
      out += separator;
    }
    first = false;
    str_internal::AppendPiece(&out, piece);
  }
  return out;
}

// "a,,b" -> {"a", "", "b"}; "" -> {""}.
inline std::vector<std::string> StrSplit(std::string_view text, char separator) {
  std::vector<std::string> parts;
  while (true) {
    const std::size_t at = text.find(separator);
    parts.emplace_back(text.substr(0, at));
    if (at == std::string_view::npos) {
      return parts;
    }
    text.remove_prefix(at + 1);
  }
}

inline bool StartsWith(std::string_view text, std::string_view prefix) {
  return text.substr(0, prefix.size()) == prefix;
}
inline bool EndsWith(std::string_view text, std::string_view suffix) {
  return text.size() >= suffix.size() && text.substr(text.size() - suffix.size()) == suffix;
}

// Removes spaces, tabs and line ends at both ends.
inline std::string_view StripSpace(std::string_view text) {
  constexpr std::string_view kSpace = " \t\r\n";
  const std::size_t begin = text.find_first_not_of(kSpace);
  if (begin == std::string_view::npos) {
    return {};
  }
  return text.substr(begin, text.find_last_not_of(kSpace) - begin + 1);
}

// Strict: the whole text, decimal, no spaces, no leading '+', in range; otherwise nullopt.
inline std::optional<std::int64_t> ParseInt64(std::string_view text) {
  std::int64_t value = 0;
  const char* end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, value);
  if (text.empty() || error != std::errc() || rest != end) {
    return std::nullopt;
  }
  return value;
}

// Strict: the whole text, finite; "1e-3" and "5" are valid, "nan", "inf", "" and " 1" are not.
inline std::optional<double> ParseDouble(std::string_view text) {
  double value = 0;
  const char* end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, value);
  if (text.empty() || error != std::errc() || rest != end || !std::isfinite(value)) {
    return std::nullopt;
  }
  return value;
}

// "512 B", "1.5 KiB", "37.0 GiB": binary units, one decimal.
inline std::string HumanBytes(double bytes) {
  constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
  int unit = 0;
  // 1023.95 and not 1024, so that rounding to one decimal never prints "1024.0 KiB".
  while (std::fabs(bytes) >= (unit == 0 ? 1024.0 : 1023.95) && unit < 5) {
    bytes /= 1024;
    ++unit;
  }
  char text[48];
  std::snprintf(text, sizeof(text), unit == 0 ? "%.0f %s" : "%.1f %s", bytes, kUnits[unit]);
  return text;
}

// "350 ms", "12.3 s", "4m05s", "2h13m", "3d04h". Negative durations get a leading '-'.
inline std::string HumanDuration(double seconds) {
  if (seconds < 0) {
    return "-" + HumanDuration(-seconds);
  }
  char text[48];
  if (seconds < 0.9995) {
    std::snprintf(text, sizeof(text), "%.0f ms", seconds * 1e3);
  } else if (seconds < 59.95) {
    std::snprintf(text, sizeof(text), "%.1f s", seconds);
  } else {
    const auto whole = static_cast<long long>(std::llround(std::min(seconds, 9e15)));
    if (whole < 3600) {
      std::snprintf(text, sizeof(text), "%lldm%02llds", whole / 60, whole % 60);
    } else if (whole < 86400) {
      std::snprintf(text, sizeof(text), "%lldh%02lldm", whole / 3600, whole % 3600 / 60);
    } else {
      std::snprintf(text, sizeof(text), "%lldd%02lldh", whole / 86400, whole % 86400 / 3600);
    }
  }
  return text;
}

// Levenshtein distance with adjacent transpositions counted as one edit.
inline int EditDistance(std::string_view a, std::string_view b) {
  const std::size_t width = b.size() + 1;
  std::vector<int> before(width), previous(width), current(width);
  for (std::size_t j = 0; j < width; ++j) {
    previous[j] = static_cast<int>(j);
  }
  for (std::size_t i = 1; i <= a.size(); ++i) {
    current[0] = static_cast<int>(i);
    for (std::size_t j = 1; j < width; ++j) {
      const int substitution = previous[j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1);
      current[j] = std::min({previous[j] + 1, current[j - 1] + 1, substitution});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
        current[j] = std::min(current[j], before[j - 2] + 1);
      }
    }
    before.swap(previous);
    previous.swap(current);
  }
  return previous[b.size()];
}

// The candidate a reader most likely meant by `name`, or nullopt when none is near (more than a
// third of the letters differ, at least 1 and at most 3 edits). Ties go to the first candidate.
template <class Range>
std::optional<std::string> NearestMatch(std::string_view name, const Range& candidates) {
  const int limit = std::clamp(static_cast<int>(name.size() + 2) / 3, 1, 3);
  int best_distance = limit + 1;
  std::optional<std::string> best;
  for (const auto& candidate : candidates) {
    const std::string_view text(candidate);
    const int distance = EditDistance(name, text);
    if (distance < best_distance) {
      best_distance = distance;
      best = std::string(text);
    }
  }
  return best;
}

}  // namespace octavo
