// Names that people give to things, where their characters matter.
#pragma once

#include <algorithm>
#include <string_view>

namespace octavo {

// 1 to 128 of A-Z a-z 0-9 . _ - (ASCII): safe in resource names, metric labels, URLs and paths.
inline bool IsPlainName(std::string_view name) {
  return !name.empty() && name.size() <= 128 && name != "." && name != ".." &&
         std::all_of(name.begin(), name.end(), [](char c) {
           return (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') ||
                  c == '.' || c == '_' || c == '-';
         });
}

}  // namespace octavo
